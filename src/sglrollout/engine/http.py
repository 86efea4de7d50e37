"""HTTP to a server of others, by httpx: bounded in time and size, and with errors that say whether it was reached."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anyio
import httpx
import msgspec

Verify: TypeAlias = bool | str | ssl.SSLContext
"""Whether TLS certificates are checked, or by which CA file or context."""

_CONNECT_S = 5.0
_IDLE_S = 3.0
"""Connections that are idle for longer are closed: SGLang closes them after 5 s, and one must not be used just then."""
_MOST_ANSWER_BYTES = 64 << 20
_MOST_ERROR_BYTES = 64 << 10
_MOST_QUOTED = 500
_GATEWAY_STATUSES = frozenset({408, 429, 502, 503, 504})
"""Of servers that are overloaded, or of what is between: another engine may well serve the request."""
_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
"""A peer that is gone without a word is noticed, by a request that waits for its answer, after half a minute."""


class UnreachableError(Exception):
    """Nothing was answered, or not the whole of it, or what was answered is not SGLang's.

    Args:
        sent: the server may have got the request.
        refused: nobody listens there.
        untrusted: its TLS certificate is not one to trust.
        timed_out: the deadline passed.
    """

    def __init__(
        self,
        message: str,
        *,
        sent: bool = True,
        refused: bool = False,
        untrusted: bool = False,
        timed_out: bool = False,
    ) -> None:
        self.sent, self.refused, self.untrusted, self.timed_out = sent, refused, untrusted, timed_out
        super().__init__(message)


class RefusedError(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(f"HTTP {status}: {message}")


class Http:
    """A client of one address, with connections of its own.

    Args:
        base_url: scheme, host and port.
        key: sent as a bearer token. It is in no error and no log.
        most_connections: at once; ``None`` is no bound.
        trust_env: take proxies and certificates from the environment.
    """

    def __init__(
        self, base_url: str, key: str | None, verify: Verify, *, most_connections: int | None, trust_env: bool
    ) -> None:
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        limits = httpx.Limits(
            max_connections=most_connections, max_keepalive_connections=most_connections, keepalive_expiry=_IDLE_S
        )
        if base_url.startswith("http:"):
            verify = False  # there is no TLS, and loading certificates takes a while
        elif isinstance(verify, str):
            verify = ssl.create_default_context(cafile=verify)
        transport = None  # with one of our own, httpx does not look for proxies
        if not trust_env:
            transport = httpx.AsyncHTTPTransport(
                verify=verify, trust_env=False, limits=limits, socket_options=_KEEPALIVE
            )
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            verify=verify,
            limits=limits,
            transport=transport,
            trust_env=trust_env,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
        )

    @asynccontextmanager
    async def opened(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """The answer to a request, its body not read yet. Nothing bounds the time that it takes.

        Args:
            key: in place of the client's.

        Raises:
            UnreachableError, RefusedError: also of the body, while it is read.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        try:
            async with self._client.stream(method, path, content=content, params=params, headers=headers) as response:
                if response.status_code != 200:
                    raise await _refusal(response)
                yield response
        except httpx.HTTPError as error:
            raise _unreachable(error) from None

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        key: str | None = None,
    ) -> bytes:
        """The body of the answer to a request.

        Raises:
            UnreachableError, RefusedError: there is none, within ``timeout_s``.
        """
        try:
            with anyio.fail_after(timeout_s):
                async with self.opened(method, path, body, params, key) as response:
                    return await whole(response)
        except TimeoutError:
            raise UnreachableError(f"no answer within {timeout_s:.3g} s", timed_out=True) from None

    async def aclose(self) -> None:
        """Close all connections."""
        with anyio.CancelScope(shield=True):
            await self._client.aclose()


async def whole(response: httpx.Response, most_bytes: int = _MOST_ANSWER_BYTES) -> bytes:
    """All of a body.

    Raises:
        UnreachableError: it is longer than ``most_bytes``.
    """
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > most_bytes:
            raise UnreachableError(f"its answer is longer than {most_bytes} bytes")
    return bytes(body)


def decoded(body: bytes) -> Any:
    """The JSON of a body.

    Raises:
        UnreachableError: it is none.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UnreachableError(f"its answer is not JSON: {quoted(body)}") from None


def quoted(text: bytes | str) -> str:
    """The beginning of what a server said, for an error."""
    if isinstance(text, bytes):
        text = text[: 4 * _MOST_QUOTED].decode(errors="replace")
    text = " ".join(text.split())
    return text if len(text) <= _MOST_QUOTED else text[:_MOST_QUOTED] + "..."


async def _refusal(response: httpx.Response) -> Exception:
    """What an answer that is an error says: SGLang puts its message in several places."""
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > _MOST_ERROR_BYTES:
            break
    message = message_of(bytes(body))
    if response.status_code in _GATEWAY_STATUSES:
        return UnreachableError(f"HTTP {response.status_code}: {message}")
    return RefusedError(response.status_code, message)


def message_of(body: bytes) -> str:
    """What an error says, without what is around it."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return quoted(body)
    while isinstance(said, dict):
        inner = next((said[name] for name in ("error", "message", "detail") if said.get(name)), None)
        if inner is None:
            return quoted(body)
        said = inner
    return quoted(said if isinstance(said, str) else msgspec.json.encode(said))


def refusal(error: RefusedError, key: str) -> str:
    """What a server refused, in words. Of a key it is said which, and not what it is."""
    if error.status in (401, 403):
        return f"it refuses the {key} that it was given, or wants one (HTTP {error.status})"
    return str(error)


def is_gateway_status(status: Any) -> bool:
    """Whether an error with this status may be none in another engine."""
    return status in _GATEWAY_STATUSES


def _unreachable(error: httpx.HTTPError) -> UnreachableError:
    unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
    said = f": {quoted(str(error))}" if str(error) else ""
    return UnreachableError(
        f"{type(error).__name__}{said}",
        sent=not unsent,
        refused=unsent and _stems_from(error, ConnectionRefusedError),  # which the kernel of that machine said
        untrusted=_stems_from(error, ssl.SSLCertVerificationError),
        timed_out=isinstance(error, httpx.TimeoutException),
    )


def _stems_from(error: BaseException | None, kind: type[Exception]) -> bool:
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            return all(_stems_from(inner, kind) for inner in error.exceptions)
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False
