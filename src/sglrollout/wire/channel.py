"""A duplex, framed channel over one inherited socket pair.

Why a socket pair and not a named socket or a broker: the kernel closes it when either process ends, however it ends,
so both sides learn of a death at once; it has no name on disk, so nothing can be left behind, collide, or be opened by
anybody else. A frame is a little-endian uint32 length and that many bytes of msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any, Generic, TypeVar

import anyio
import msgspec

from sglrollout.errors import ChannelError
from sglrollout.wire.messages import PROTOCOL, FromHost, Hello, SentByHost, ToHost

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_READ_LIMIT_BYTES = 8 << 20
_CLOSE_S = 2.0
_MOST_QUOTED = 200
"""Characters of what came that an error may repeat: it says what is wrong with it, and is logged."""

In = TypeVar("In")
Out = TypeVar("Out")


class Channel(Generic[In, Out]):
    """One end of the channel: sends ``Out``, receives ``In``. It owns the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: Out) -> None:
        """Queue one message. Never blocks; does nothing once the channel is closing."""
        if self._writer.is_closing():
            return
        body = self._encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ChannelError(f"a message of {len(body)} bytes is over the {MAX_FRAME_BYTES}-byte frame limit")
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def drain(self) -> None:
        """Wait until the peer has taken most of what was sent."""
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise ChannelError(f"the channel closed while sending: {error}") from error

    async def receive(self) -> In | None:
        """The next message, or ``None`` once the other end has closed (or died).

        Raises:
            ChannelError: the bytes are not a message of this protocol.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ChannelError(f"a frame announces {length} bytes, over the {MAX_FRAME_BYTES}-byte limit")
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:  # the latter: values nested without end
            why = f"{error!s:.{_MOST_QUOTED}}"
            raise ChannelError(f"a frame of {length} bytes is not a message of protocol {PROTOCOL}: {why}") from error

    async def handshake(self, hello: Hello) -> Hello:
        """Exchange versions; both ends call it first.

        Raises:
            ChannelError: the other end closed, sent something else, or speaks another protocol.
        """
        self.send(hello)  # type: ignore[arg-type]
        answer: object = await self.receive()
        if not isinstance(answer, Hello):
            raise ChannelError(f"expected a hello, got {type(answer).__name__}")
        if answer.protocol != PROTOCOL:
            raise ChannelError(
                f"the other end (sglrollout {answer.library_version:.{_MOST_QUOTED}}, pid {answer.pid}) speaks "
                f"protocol {answer.protocol}, this one (sglrollout {hello.library_version}) speaks {PROTOCOL}: "
                "both must come from the same installation"
            )
        return answer

    async def close(self) -> None:
        """Close this end, once what was sent is on its way, or nobody takes it. The peer reads the end."""
        self._writer.close()
        with anyio.move_on_after(_CLOSE_S), contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        await self.abort()

    async def abort(self) -> None:
        """Close this end at once, for nobody is at the other one."""
        self._writer.transport.abort()
        with anyio.CancelScope(shield=True), contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def client_channel(sock: socket.socket) -> Channel[FromHost, ToHost]:
    """The client's end of ``sock``, on the running loop."""
    return Channel(*await _streams(sock), FromHost)


async def host_channel(sock: socket.socket) -> Channel[ToHost, SentByHost]:
    """The host's end of ``sock``, on the running loop."""
    return Channel(*await _streams(sock), ToHost)


async def _streams(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock.setblocking(False)
    return await asyncio.open_unix_connection(sock=sock, limit=_READ_LIMIT_BYTES)
