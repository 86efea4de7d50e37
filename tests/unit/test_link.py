"""The link of a trainer rank and an engine: whole messages, file descriptors, deadlines, and ends that are gone."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.boxes import Box
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import ChannelError
from sglrollout.wire.link import (
    Failed,
    Filled,
    FromEngine,
    FromTrainer,
    Joined,
    Link,
    Listener,
    Loaded,
    Mapped,
    Offer,
    Piece,
    Region,
    connect,
)

pytestmark = pytest.mark.timeout(20)

CUDA = (b"handle", 4096, 256, b"counter", 8, b"event", True)
OFFER = Offer(
    [Region(1024), Region(4096, "0f3c-uuid", CUDA)],
    [[Piece(0, Box((0, 2), (3, 4)), 0, 256)], [Piece(1, Box((), ()), 1, 0), Piece(0, Box((0, 0), (3, 2)), 0, 0)], []],
    ["bfloat16", "float32"],
    ["float32", "float32"],
)


class Ends(NamedTuple):
    trainer: Link
    engine: Link


class RawEnds(NamedTuple):
    raw: socket.socket
    engine: Link


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = socket.socketpair()
    pair = Ends(Link(one, FromEngine), Link(other, FromTrainer))
    yield pair
    pair.trainer.close()
    pair.engine.close()


@pytest.fixture
def raw() -> Iterator[RawEnds]:
    """A link whose other end sends what it likes."""
    one, other = socket.socketpair()
    engine = Link(other, FromTrainer)
    yield RawEnds(one, engine)
    one.close()
    engine.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    path = new_scratch()
    yield path
    remove_scratch(path)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------ messages


@pytest.mark.parametrize(
    "message", [OFFER, Offer([], [], [], []), Filled(7), Failed("the optimizer ran out of memory")]
)
def test_what_a_trainer_says_arrives_as_it_was(ends: Ends, message: FromTrainer) -> None:
    ends.trainer.send(message)
    assert ends.engine.receive(1) == message


@pytest.mark.parametrize(
    "message", [Joined("token", "engine-3", 5), Mapped(), Mapped("no room"), Loaded(3, 0.25), Failed("")]
)
def test_what_an_engine_says_arrives_as_it_was(ends: Ends, message: FromEngine) -> None:
    ends.engine.send(message)
    assert ends.trainer.receive(1) == message


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(max_size=30), max_size=8), st.lists(st.integers(1, 60), max_size=60))
def test_messages_stay_whole_and_in_order_however_the_bytes_arrive(texts: list[str], sizes: list[int]) -> None:
    one, other = socket.socketpair()
    with one, closing(Link(other, FromTrainer)) as engine:
        data = b"".join(framed(msgspec.msgpack.encode(Failed(text))) for text in texts)

        def send() -> None:
            position = 0
            for size in sizes:
                one.sendall(data[position : position + size])
                position += size
            one.sendall(data[position:])

        sender = threading.Thread(target=send)
        sender.start()
        assert [engine.receive(5) for _ in texts] == [Failed(text) for text in texts]
        sender.join()


def test_a_message_that_is_larger_than_the_sockets_buffer_arrives(ends: Ends) -> None:
    message = Failed("x" * (4 << 20))
    sender = threading.Thread(target=ends.trainer.send, args=(message,))
    sender.start()
    assert ends.engine.receive(10) == message
    sender.join()


def test_both_ends_may_talk_at_once(ends: Ends) -> None:
    for k in range(20):
        ends.trainer.send(Filled(k))
        ends.engine.send(Loaded(k, 0.0))
    assert [ends.engine.receive(1) for _ in range(20)] == [Filled(k) for k in range(20)]
    assert [ends.trainer.receive(1) for _ in range(20)] == [Loaded(k, 0.0) for k in range(20)]


# ------------------------------------------------------------ file descriptors


def test_a_file_descriptor_that_comes_with_a_message_is_of_the_same_memory(ends: Ends) -> None:
    fd = os.memfd_create("test")
    os.write(fd, b"weights")
    ends.trainer.send(OFFER, [fd])
    os.close(fd)
    message, (received,) = ends.engine.receive_with_fds(1)
    assert message == OFFER
    assert os.pread(received, 100, 0) == b"weights"
    os.close(received)


def test_file_descriptors_come_in_order_with_a_message_of_many_parts(ends: Ends) -> None:
    fds = [os.memfd_create(f"test-{i}") for i in range(3)]
    for i, fd in enumerate(fds):
        os.write(fd, str(i).encode())
    message = Failed("x" * (4 << 20))
    sender = threading.Thread(target=ends.trainer.send, args=(message, fds))
    sender.start()
    answer, received = ends.engine.receive_with_fds(10)
    sender.join()
    assert answer == message
    assert [os.pread(fd, 10, 0) for fd in received] == [b"0", b"1", b"2"]
    for fd in [*fds, *received]:
        os.close(fd)


def test_a_message_without_file_descriptors_has_none(ends: Ends) -> None:
    ends.trainer.send(Filled(0), [])
    assert ends.engine.receive_with_fds(1) == (Filled(0), [])


# ------------------------------------------------------------ deadlines


def test_waiting_for_a_message_has_a_deadline_and_the_link_stays_usable(ends: Ends) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"nothing came on a weight link within 0\.05 s"):
        ends.engine.receive(0.05)
    assert 0.04 < time.monotonic() - begun < 2
    ends.trainer.send(Filled(1))
    assert ends.engine.receive(0.05) == Filled(1)


def test_half_a_message_does_not_count_and_is_kept_for_the_next_call(raw: RawEnds) -> None:
    data = framed(msgspec.msgpack.encode(Failed("no more memory")))
    raw.raw.sendall(data[:9])
    with pytest.raises(TimeoutError):
        raw.engine.receive(0.03)
    raw.raw.sendall(data[9:])
    assert raw.engine.receive(1) == Failed("no more memory")


def test_sending_to_an_end_that_takes_nothing_has_a_deadline(ends: Ends) -> None:
    with pytest.raises(ChannelError, match="timed out"):
        ends.trainer.send(Failed("x" * (8 << 20)), timeout_s=0.05)


# ------------------------------------------------------------ what goes wrong


def test_an_end_that_is_gone_is_told_to_who_waits_for_it(ends: Ends) -> None:
    waker = threading.Timer(0.03, ends.trainer.close)
    waker.start()
    with pytest.raises(ChannelError, match="gone"):
        ends.engine.receive(10)
    waker.join()


def test_what_was_said_before_an_end_went_is_still_heard(ends: Ends) -> None:
    ends.trainer.send(Failed("out of memory"))
    ends.trainer.close()
    assert ends.engine.receive(1) == Failed("out of memory")
    with pytest.raises(ChannelError, match="gone"):
        ends.engine.receive(1)


def test_sending_to_an_end_that_is_gone_fails(ends: Ends) -> None:
    ends.trainer.close()
    with pytest.raises(ChannelError, match="gone"):
        ends.engine.send(Mapped())


def test_a_message_with_file_descriptors_is_sent_even_if_its_reader_goes_as_soon_as_it_has_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_fds = socket.send_fds

    def send_and_be_left(*arguments: Any) -> int:
        sent = send_fds(*arguments)
        ends.engine.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_be_left)
    with open(os.devnull) as file:
        ends.trainer.send(OFFER, [file.fileno()])


def test_sending_file_descriptors_to_an_end_that_is_gone_fails(ends: Ends) -> None:
    ends.engine.close()
    fd = os.memfd_create("test")
    with pytest.raises(ChannelError, match="gone"):
        ends.trainer.send(OFFER, [fd])
    os.close(fd)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1garbage",
        msgspec.msgpack.encode({"type": "surprise"}),
        msgspec.msgpack.encode({"type": "filled"}),
        msgspec.msgpack.encode({"type": "filled", "bucket": "zero"}),
        msgspec.msgpack.encode(Mapped()),
    ],
    ids=["empty", "no msgpack", "another kind", "a field too few", "another type", "the other way's"],
)
def test_what_is_no_message_for_this_end_is_refused(raw: RawEnds, body: bytes) -> None:
    raw.raw.sendall(framed(body))
    with pytest.raises(ChannelError, match="not a message of a weight link"):
        raw.engine.receive(1)


def test_a_frame_that_announces_too_much_is_refused_at_once(raw: RawEnds) -> None:
    raw.raw.sendall(struct.pack("<I", (1 << 28) + 1))
    with pytest.raises(ChannelError, match=f"announces {(1 << 28) + 1} bytes"):
        raw.engine.receive(1)


# ------------------------------------------------------------ listener


def test_links_come_in_the_order_in_which_engines_connected(directory: Path) -> None:
    with closing(Listener(directory)) as listener:
        engines = [connect(listener.path, 1) for _ in range(3)]
        for i, engine in enumerate(engines):
            engine.send(Joined("token", f"engine-{i}", i))
        for i, engine in enumerate(engines):
            with closing(listener.accept(1)) as link:
                assert link.receive(1) == Joined("token", f"engine-{i}", i)
                link.send(Filled(i))
                assert engine.receive(1) == Filled(i)
            engine.close()


def test_waiting_for_an_engine_has_a_deadline(directory: Path) -> None:
    with closing(Listener(directory)) as listener:
        with pytest.raises(TimeoutError, match=r"no engine joined within 0\.03 s"):
            listener.accept(0.03)
        with closing(connect(listener.path, 1)), closing(listener.accept(1)):
            pass


def test_the_deadline_of_accepting_is_not_that_of_the_link(directory: Path) -> None:
    with (
        closing(Listener(directory)) as listener,
        closing(connect(listener.path, 1)) as engine,
        closing(listener.accept(0.01)) as link,
    ):
        sender = threading.Timer(0.1, engine.send, (Mapped(),))
        sender.start()
        assert link.receive(5) == Mapped()
        sender.join()


def test_connecting_to_nobody_names_the_path(directory: Path) -> None:
    before = num_open_fds()
    with pytest.raises(ChannelError, match=f"cannot reach the trainer rank at {directory}/link"):
        connect(str(directory / "link"), 1)
    listener = Listener(directory)
    listener.close()
    with pytest.raises(ChannelError, match="cannot reach"):
        connect(listener.path, 1)
    assert num_open_fds() == before


def test_nobody_else_can_enter_a_listeners_directory(directory: Path) -> None:
    assert directory.stat().st_mode & 0o777 == 0o700
