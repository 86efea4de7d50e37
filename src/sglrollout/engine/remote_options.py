"""What a user sets of a remote engine, checked."""

from __future__ import annotations

from urllib.parse import urlsplit

from sglrollout.errors import ConfigError


def checked_url(url: object) -> str:
    """Scheme, host and port of a server, or ConfigError."""
    parts = urlsplit(url) if isinstance(url, str) else None
    rule = "must be scheme, host and port of an SGLang server, such as http://10.0.0.2:30000"
    try:
        wrong = parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # a port that is no number
        wrong = True
    if wrong or parts is None:
        raise ConfigError("remote.url", url, rule)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("remote.url", f"{parts.scheme}://...@{parts.hostname}", f"{rule}; give its key as api_key")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError("remote.url", url, f"{rule}, without a path")
    return f"{parts.scheme}://{parts.netloc}"


def check_key(field: str, key: object) -> None:
    """Raise ConfigError, which does not say what it is, unless it can be sent as a bearer token, or is ``None``."""
    if key is None:
        return
    if not isinstance(key, str):
        raise ConfigError(f"remote.{field}", type(key).__name__, "must be a text")
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"remote.{field}", "***", "must be printable ASCII, without spaces")


def check_seconds(field: str, value: object) -> None:
    """Raise ConfigError unless it is a time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"remote.{field}", value, "must be a number of seconds greater than 0")
