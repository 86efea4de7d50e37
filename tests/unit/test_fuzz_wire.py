"""Whatever comes on a channel or a weight link: a message, an error that says so, or the end. Nothing else, soon."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple, get_args

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.boxes import Box
from sglrollout.errors import ChannelError
from sglrollout.wire import messages as m
from sglrollout.wire.channel import Channel, client_channel, host_channel
from sglrollout.wire.link import (
    Failed,
    Filled,
    FromEngine,
    FromTrainer,
    Joined,
    Link,
    Loaded,
    Mapped,
    Offer,
    Piece,
    Region,
)

pytestmark = pytest.mark.timeout(60)

FUZZ = settings(max_examples=300, deadline=None, derandomize=True, database=None)
HANG_S = 5.0
OWN_BYTES = 4 << 20
"""What an end takes for itself: its buffers."""
BYTES_PER_BYTE = 128
"""An empty list or map, which is one byte on the wire, is a Python object of some 80."""

CUDA = (b"handle", 4096, 256, b"counter", 8, b"event", True)
INFO = m.EngineInfo(
    *("0.5.21", 1, [2, 3], 2048, 2042, 512, 32, 32768, [2], True, True, True, True, True, 1, False, 0, 1.5, ["slow"])
)


class End(NamedTuple):
    """One of the four ways to read: which messages it takes, some of them, and how to read a stream to its end."""

    takes: Any
    samples: tuple[msgspec.Struct, ...]
    read_all: Callable[[socket.socket, Any], list[Any]]


def read_channel(open_channel: Any) -> Callable[[socket.socket, Any], list[Any]]:
    def read(sock: socket.socket, takes: Any) -> list[Any]:
        async def run() -> list[Any]:
            channel: Channel[Any, Any] = await open_channel(sock)
            received = []
            try:
                with anyio.fail_after(HANG_S):
                    while (message := await channel.receive()) is not None:
                        received.append(message)
            finally:
                await channel.close()
            return received

        return asyncio.run(run())

    return read


def read_link(sock: socket.socket, takes: Any) -> list[Any]:
    received: list[Any] = []
    with closing(Link(sock, takes)) as link:
        while True:
            try:
                received.append(link.receive(HANG_S))
            except ChannelError as error:
                if "is gone" in str(error):  # how a link ends
                    return received
                raise


ENDS = {
    "the host's": End(
        m.ToHost,
        (
            m.Hello(m.PROTOCOL, 5, "0.1"),
            m.Launch("engine-0", {"model_path": "x", "tp_size": 2}, True, [0, 1], "/tmp/x"),
            m.Generate(1, [5, 6, 7], {"temperature": 0.5, "stop": ["a"], "logit_bias": {"3": 1.0}}, 8),
            m.Abort([1, 2]),
            m.Command(3, "pause", {"mode": "retract", "timeout_s": 1.0}),
            m.Stop(),
        ),
        read_channel(host_channel),
    ),
    "the client's": End(
        m.FromHost,
        (
            m.Hello(m.PROTOCOL, 5, "0.1"),
            INFO,
            m.LaunchFailed("no"),
            m.Outputs(3, [m.Output(1, [4, 5], [-0.5, -1.5]), m.Output(2, [], None, m.Finish("stop", "END", "", 5, 2))]),
            m.Load(1, 2, 3, 0.5, 0.25, 100.0),
            m.Reply(3, "", False, {"ranks": [{"seconds": 1.0}, [1, [2, [3]]]]}),
            m.Died("it ended"),
        ),
        read_channel(client_channel),
    ),
    "the trainer's": End(
        FromEngine, (Joined("token", "engine-0", 1), Mapped("no"), Loaded(3, 0.5), Failed("no")), read_link
    ),
    "the engine's": End(
        FromTrainer,
        (
            Offer([Region(64), Region(64, "uuid", CUDA)], [[Piece(0, Box((0,), (4,)), 1, 8)], []], ["half"], ["half"]),
            Filled(2),
            Failed("no"),
        ),
        read_link,
    ),
}
every_end = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def packed(value: Any) -> bytes:
    return framed(msgspec.msgpack.encode(value))


def read(end: End, stream: bytes) -> list[Any] | ChannelError:
    """The messages of a stream, or the error that it is. Whatever else is raised or takes too long fails the test."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with suppress(OSError):  # an end that has seen enough closes
            ours.sendall(stream)
        ours.close()

    sender = threading.Thread(target=send)
    begun = time.monotonic()
    sender.start()
    try:
        received = end.read_all(theirs, end.takes)
    except ChannelError as error:
        return error
    finally:
        theirs.close()
        sender.join()
        assert time.monotonic() - begun < HANG_S
    assert all(isinstance(message, get_args(end.takes)) for message in received)
    return received


@contextmanager
def memory_for(stream: bytes) -> Iterator[None]:
    """Fails if what runs in here ever holds much more memory than it was sent."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert taken < OWN_BYTES + BYTES_PER_BYTE * len(stream), f"{taken} bytes for {len(stream)}"


# ------------------------------------------------------------ streams


@every_end
@FUZZ
@given(stream=st.binary(max_size=300))
def test_random_bytes(end: End, stream: bytes) -> None:
    with memory_for(stream):
        read(end, stream)


@every_end
@FUZZ
@given(body=st.binary(max_size=300))
def test_frames_of_random_bytes(end: End, body: bytes) -> None:
    with memory_for(body):
        assert isinstance(read(end, packed(end.samples[-1]) + framed(body)), (ChannelError, list))


@every_end
@FUZZ
@given(data=st.data())
def test_valid_frames_with_bytes_changed_lost_and_added(end: End, data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(end.samples))
    keep_length = data.draw(st.booleans())
    stream = bytearray(msgspec.msgpack.encode(sample) if keep_length else packed(sample))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stream)))
        removed, added = data.draw(st.integers(0, 4)), data.draw(st.binary(max_size=4))
        stream[at : at + removed] = added
    sent = framed(bytes(stream)) if keep_length else bytes(stream)
    with memory_for(sent):
        read(end, sent)


@every_end
def test_a_stream_that_breaks_off_gives_the_messages_before_that_and_ends(end: End) -> None:
    frames = [packed(sample) for sample in end.samples]
    stream = b"".join(frames)
    starts = [0]
    for frame in frames:
        starts.append(starts[-1] + len(frame))
    for cut in range(len(stream) + 1):
        whole = sum(start <= cut for start in starts) - 1
        assert read(end, stream[:cut]) == list(end.samples[:whole])


@every_end
@pytest.mark.parametrize("num_bytes", [0, 1, 1000])
@pytest.mark.parametrize("announced", [1 << 16, (1 << 28) - 1, (1 << 30) - 1, (1 << 30) + 1, (1 << 32) - 1])
def test_a_frame_that_announces_much_and_brings_little_takes_no_memory(
    end: End, announced: int, num_bytes: int
) -> None:
    stream = struct.pack("<I", announced) + b"\x90" * num_bytes
    with memory_for(stream):
        answer = read(end, stream)
    assert answer == [] or isinstance(answer, ChannelError)


# ------------------------------------------------------------ bodies

LONG = [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]
"""The first bytes of msgpack's arrays, maps, texts, bytes and extensions with a length of 32 bits."""


@every_end
@FUZZ
@given(data=st.data())
def test_values_in_a_frame_that_announce_much_take_no_memory(end: End, data: st.DataObject) -> None:
    body = bytearray(msgspec.msgpack.encode(data.draw(st.sampled_from(end.samples))))
    at = data.draw(st.integers(0, len(body)))
    length = data.draw(st.sampled_from([1 << 20, 1 << 27, (1 << 31) - 1, (1 << 32) - 1]))
    body[at : at + 1] = (data.draw(st.sampled_from(LONG)) + struct.pack(">I", length)) * data.draw(st.integers(1, 50))
    stream = framed(bytes(body))
    with memory_for(stream):
        read(end, stream)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=5,
)


def with_something_else(value: Any, data: st.DataObject) -> Any:
    """The value with one part of it, however deep inside, replaced or taken away."""
    if isinstance(value, (list, dict)) and value and data.draw(st.integers(0, 3)):
        keys = sorted(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(keys))
        changed = dict(value) if isinstance(value, dict) else list(value)
        if data.draw(st.integers(0, 4)):
            changed[key] = with_something_else(value[key], data)
        else:
            del changed[key]
        return changed
    return data.draw(PLAIN)


@every_end
@FUZZ
@given(data=st.data())
def test_messages_with_a_part_of_another_type_or_without_it(end: End, data: st.DataObject) -> None:
    sample = msgspec.to_builtins(data.draw(st.sampled_from(end.samples)))
    stream = packed(with_something_else(sample, data))
    with memory_for(stream):
        read(end, stream)


@every_end
@pytest.mark.parametrize("opened", [b"\x91", b"\x81\xa1x", b"\x81\xa4type"], ids=["lists", "maps", "tags"])
@pytest.mark.parametrize("depth", [1000, 50_000, 300_000])
def test_values_nested_without_end(end: End, opened: bytes, depth: int) -> None:
    for before in [b"", *(msgspec.msgpack.encode(sample)[:-1] for sample in end.samples)]:
        stream = framed(before + opened * depth + b"\x00")
        with memory_for(stream):
            assert isinstance(read(end, stream), ChannelError)


@every_end
def test_many_small_values_take_a_small_multiple_of_their_bytes(end: End) -> None:
    for small in (b"\x90", b"\x80", b"\xa0", b"\xc0", b"\xcf" + b"\xff" * 8):
        body = b"\xdd" + struct.pack(">I", 200_000) + small * 200_000
        for before in (b"", msgspec.msgpack.encode(m.Reply(1, value={"x": 0}))[:-1]):
            stream = framed(before + body)
            with memory_for(stream):
                read(end, stream)


@every_end
def test_an_error_quotes_little_of_what_came(end: End) -> None:
    secret = "s" * 10_000
    for value in ({"type": secret}, {"type": "command", "command_id": 1, "name": secret}, {secret: 1}, secret):
        error = read(end, packed(value))
        assert isinstance(error, ChannelError)
        assert len(str(error)) < 500


@FUZZ
@given(first=st.binary(max_size=60) | st.sampled_from([msgspec.msgpack.encode(m.Hello(9, 1, "v" * 9999)), b"\x90"]))
def test_a_handshake_with_something_else_is_a_channel_error(first: bytes) -> None:
    async def check() -> None:
        ours, theirs = socket.socketpair()
        channel = await client_channel(theirs)
        try:
            with ours, anyio.fail_after(HANG_S):
                ours.sendall(framed(first))
                ours.shutdown(socket.SHUT_WR)
                with pytest.raises(ChannelError) as caught:
                    await channel.handshake(m.Hello(m.PROTOCOL, 1, "0.1"))
            assert len(str(caught.value)) < 500
        finally:
            await channel.close()

    asyncio.run(check())


# ------------------------------------------------------------ of links alone


def test_a_sender_that_trickles_does_not_hold_a_link_beyond_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    over = threading.Event()

    def trickle() -> None:
        ours.sendall(struct.pack("<I", 1 << 20))
        while not over.wait(0.01):
            ours.sendall(b"\x90")

    sender = threading.Thread(target=trickle)
    with ours, closing(Link(theirs, FromTrainer)) as link:
        sender.start()
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            link.receive(0.2)
        assert time.monotonic() - begun < 2
        over.set()
        sender.join()


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def link_and_a_file() -> Iterator[tuple[socket.socket, Link, int]]:
    """A bare socket, the link at its other end, and a file to send. Fails if any is open that was not before."""
    before = num_open_fds()
    ours, theirs = socket.socketpair()
    with ours, closing(Link(theirs, FromTrainer)) as link, open(os.devnull) as file:
        yield ours, link, file.fileno()
    assert num_open_fds() == before


@pytest.mark.parametrize("body", [b"\xc1", b"\x91" * 100_000, msgspec.msgpack.encode(Mapped())])
def test_files_that_come_with_what_is_no_message_are_closed(body: bytes) -> None:
    with link_and_a_file() as (ours, link, file):
        socket.send_fds(ours, [framed(body)], [file] * 3)
        with pytest.raises(ChannelError):
            link.receive_with_fds(1)


def test_files_of_a_message_that_breaks_off_are_closed() -> None:
    with link_and_a_file() as (ours, link, file):
        socket.send_fds(ours, [packed(Filled(1))[:-1]], [file])
        ours.close()
        with pytest.raises(ChannelError, match="gone"):
            link.receive_with_fds(1)


def test_files_of_a_message_that_takes_longer_than_a_deadline_come_with_it() -> None:
    with link_and_a_file() as (ours, link, file):
        stream = packed(Filled(1))
        socket.send_fds(ours, [stream[:5]], [file])
        with pytest.raises(TimeoutError):
            link.receive_with_fds(0.02)
        ours.sendall(stream[5:])
        message, fds = link.receive_with_fds(1)
        assert message == Filled(1)
        assert len(fds) == 1
        os.close(fds[0])


def test_more_files_than_a_message_has_are_refused_and_closed() -> None:
    with link_and_a_file() as (ours, link, file):
        stream = packed(Failed("x" * 100))
        for byte in stream[:10]:
            socket.send_fds(ours, [bytes([byte])], [file] * 5)
        with pytest.raises(ChannelError, match="more than 16 file descriptors"):
            link.receive_with_fds(1)
