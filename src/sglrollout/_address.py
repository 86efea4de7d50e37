"""Where something listens, and the key it asks for: checked, bound, and written as a URL."""

from __future__ import annotations

import errno
import ipaddress
import socket

from sglrollout.errors import ConfigError

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that are all of a machine's addresses, to one at which the machine itself reaches them."""

_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documentation, which are nowhere (RFC 5737, RFC 3849)."""


def check_address(host: str, port: int, api_key: str | None) -> None:
    """
    Raises:
        ConfigError: of ``host``, ``port`` or ``api_key``.
    """
    if not isinstance(host, str) or not host.strip():
        raise ConfigError("host", host, "must be a text that is not empty")
    if type(port) is not int or not 0 <= port < 65536:
        raise ConfigError("port", port, "must be an integer from 0 to 65535")
    if api_key is not None and not (isinstance(api_key, str) and api_key and all("!" <= c <= "~" for c in api_key)):
        raise ConfigError("api_key", "...", "must be a text of ASCII characters without spaces")


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has the address, and does not listen.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is none of this machine's.
    """
    bound = socket.socket(
        _family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # else asyncio leaves Nagle's delays on
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError("port", port, f"must be one that is free on {host} ({error.strerror})") from error
        raise ConfigError("host", host, f"must be an address of this machine ({error})") from error
    return bound


def is_loopback(host: str) -> bool:
    """Whether what listens there is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reached_at(host: str) -> str:
    """The address at which others reach what listens on ``host``: for all addresses, that of the way out."""
    if host not in WILDCARDS:
        return host
    family = _family(host)
    with socket.socket(family, socket.SOCK_DGRAM) as way_out:
        try:
            way_out.connect((_FAR_AWAY[family], 9))  # sends nothing
        except OSError:
            return local_address(host)
        address: str = way_out.getsockname()[0]
        return address


def local_address(host: str) -> str:
    """The address at which this machine reaches what listens on ``host``."""
    return WILDCARDS.get(host, host)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """For instance ``http://[::1]:30000``."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
