"""The link between a trainer rank and one TP rank of an engine, on which they hand weights over bucket by bucket.

A trainer rank listens on a socket in a directory of its own (mode 0700); the scheduler connects once, shows the token
that its engine was given over the channel, and stays. What travels are small msgspec frames and, for memory shared on a
CPU, file descriptors. The weights themselves never do.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from pathlib import Path
from typing import TypeAlias

import msgspec

from sglrollout.boxes import Box
from sglrollout.errors import ChannelError

_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 28
_MAX_FDS = 16
_READ_BYTES = 1 << 20
_MOST_QUOTED = 200


STAGING = 0
"""The region that all gathered buckets use, by turns of its slots."""


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """Elements ``box`` of weight ``entry``, contiguous, at ``offset`` bytes of region ``region``."""

    entry: int
    box: Box
    region: int
    offset: int


class Region(msgspec.Struct, array_like=True, frozen=True):
    """Memory of a trainer rank that an engine maps.

    On a CPU ``cuda`` is empty, and a file descriptor comes with the message, in the order of the regions. On a GPU it
    is torch's IPC handle of a storage: handle, bytes of the storage, its offset, reference counter's handle and offset,
    event's handle, and whether to wait for that event. ``device`` is that GPU's UUID as torch writes it.
    """

    num_bytes: int
    device: str = ""
    cuda: tuple[bytes, int, int, bytes, int, bytes, bool] | None = None


# ---------------------------------------------------------------- from the engine


class Joined(msgspec.Struct, tag="joined"):
    """The first message of a TP rank. ``token`` is the one that its engine was given for this link."""

    token: str
    engine: str
    tp_rank: int

    def brings(self, token: str) -> bool:
        """Whether its token is this one. How long that takes says nothing of how much of it is right."""
        return hmac.compare_digest(self.token.encode(), token.encode())

    def __repr__(self) -> str:
        return f"Joined(engine={self.engine!r}, tp_rank={self.tp_rank})"  # what is printed may be logged


class Mapped(msgspec.Struct, tag="mapped"):
    """The regions are mapped, and the copies are planned; or ``error`` says why not."""

    error: str = ""


class Loaded(msgspec.Struct, tag="loaded"):
    """A bucket has arrived in the parameters: the device is done with it. ``seconds`` is what that took."""

    bucket: int
    seconds: float


class Failed(msgspec.Struct, tag="failed"):
    """The other end cannot go on with this sync."""

    error: str


# ---------------------------------------------------------------- from the trainer


class Offer(msgspec.Struct, tag="offer"):
    """What there is to map, and which buckets will come.

    Region 0 is a staging buffer, in which weights have the dtypes ``staged``. In all others they are as the trainer has
    them, with the dtypes ``own``. Both are torch's names, by weight.
    """

    regions: list[Region]
    buckets: list[list[Piece]]
    staged: list[str]
    own: list[str]


class Filled(msgspec.Struct, tag="filled"):
    """A bucket is in its region, complete."""

    bucket: int


FromEngine: TypeAlias = Joined | Mapped | Loaded | Failed
FromTrainer: TypeAlias = Offer | Filled | Failed


class Link:
    """One end, blocking, with a deadline on every wait. It owns the socket."""

    def __init__(self, sock: socket.socket, incoming: object) -> None:
        self._socket = sock
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._received = bytearray()
        self._fds: list[int] = []

    def send(self, message: FromEngine | FromTrainer, fds: list[int] | None = None, timeout_s: float = 10.0) -> None:
        """Send one message.

        Raises:
            ChannelError: the other end is gone, or takes nothing for so long.
        """
        body = self._encode(message)
        frame = _LENGTH.pack(len(body)) + body
        self._socket.settimeout(timeout_s)
        try:
            sent = socket.send_fds(self._socket, [frame], fds) if fds else 0
            if sent < len(frame):  # an empty sendall() still fails on a link that the other end has closed since
                self._socket.sendall(frame[sent:])
        except OSError as error:
            raise ChannelError(f"the other end of a weight link is gone: {error}") from error

    def receive(self, timeout_s: float) -> FromEngine | FromTrainer:
        """The next message.

        Raises:
            TimeoutError: none came in time.
            ChannelError: the other end is gone, or sent something else.
        """
        message, fds = self.receive_with_fds(timeout_s)
        for fd in fds:  # nobody asked for them
            os.close(fd)
        return message

    def receive_with_fds(self, timeout_s: float) -> tuple[FromEngine | FromTrainer, list[int]]:
        """The next message, and the file descriptors that came with it, which are the caller's to close.

        Raises:
            TimeoutError: none came in time.
            ChannelError: the other end is gone, or sent something else.
        """
        deadline = time.monotonic() + timeout_s
        while (body := self._take_frame()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no whole message came on a weight link within {timeout_s:.3g} s")
            self._socket.settimeout(left)
            try:
                self._take_bytes()
            except TimeoutError:
                raise TimeoutError(f"nothing came on a weight link within {timeout_s:.3g} s") from None
            except OSError as error:
                raise ChannelError(f"a weight link broke: {error}") from error
        try:
            message: FromEngine | FromTrainer = self._decode(body)
        except (msgspec.DecodeError, RecursionError) as error:  # the latter: values nested without end
            raise ChannelError(f"not a message of a weight link: {error!s:.{_MOST_QUOTED}}") from error
        fds, self._fds = self._fds, []
        return message, fds

    def _take_bytes(self) -> None:
        """What has come, and the file descriptors with it: they stay here until their message is whole."""
        data, new, flags, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_FDS)
        self._fds += new
        if flags & socket.MSG_CTRUNC or len(self._fds) > _MAX_FDS:
            raise ChannelError(f"more than {_MAX_FDS} file descriptors came with a message of a weight link")
        if not data:
            raise ChannelError("the other end of a weight link is gone")
        self._received += data

    def _take_frame(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _MAX_FRAME_BYTES:
            raise ChannelError(f"a weight link announces {length} bytes")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return body

    def close(self) -> None:
        self._socket.close()
        fds, self._fds = self._fds, []
        for fd in fds:  # of a message that never came
            os.close(fd)


class Listener:
    """A trainer rank's socket in ``directory``, which nobody else can enter and which is the caller's to remove."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "link")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(64)

    def accept(self, timeout_s: float) -> Link:
        """The next link.

        Raises:
            TimeoutError: nobody connected in time.
        """
        self._socket.settimeout(timeout_s)
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            raise TimeoutError(f"no engine joined within {timeout_s:.3g} s") from None
        return Link(connection, FromEngine)

    def close(self) -> None:
        self._socket.close()


def connect(path: str, timeout_s: float) -> Link:
    """The engine's end of a link to the trainer rank that listens at ``path``.

    Raises:
        ChannelError: nobody does.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise ChannelError(f"cannot reach the trainer rank at {path}: {error}") from error
    return Link(connection, FromTrainer)
