"""Read a file of options, with errors that name the file and the line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglrollout.errors import ConfigError


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The top-level mapping of a YAML, TOML or JSON file; the suffix says which.

    Raises:
        ConfigError: of the field ``path``.
    """
    file = Path(path).expanduser()
    parse = _PARSERS.get(file.suffix.lower())
    if parse is None:
        raise ConfigError("path", str(path), f"must end in {', '.join(_PARSERS)}")
    try:
        content = parse(_read(file))
    except ValueError as error:
        raise ConfigError("path", str(path), str(error)) from None
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise ConfigError("path", str(path), f"must hold a mapping of option names to values, and holds {kind}")
    for key, value in content.items():
        if not isinstance(key, str):
            raise ConfigError(str(key), value, f"is not an option: names are strings, and this is {key!r}")
    return content


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("must be UTF-8 text") from None
    except FileNotFoundError:
        raise ValueError("must name an existing file") from None
    except OSError as error:
        raise ValueError(f"must be a readable file ({error.strerror})") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be valid JSON (line {error.lineno}: {error.msg})") from None


def _toml(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last_line = text.count("\n") + 1
        problem = str(error).replace("at end of document", f"at end of document, line {last_line}")
        raise ValueError(f"must be valid TOML ({problem})") from None


def _yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ValueError("must be TOML or JSON where PyYAML is not installed") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"must be valid YAML ({where}{getattr(error, 'problem', None) or error})") from None


_PARSERS: dict[str, Callable[[str], Any]] = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": _json}
