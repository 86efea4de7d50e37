"""The engine's end of a link, against a thread that is the trainer: buckets land in the parameters, or it is told."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglrollout.boxes import Box
from sglrollout.engine.scheduler_loader import Loader
from sglrollout.engine.scheduler_recorder import Copy, Fill, Recording
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import ChannelError
from sglrollout.wire.link import Failed, Filled, Joined, Link, Listener, Loaded, Mapped, Offer, Piece, Region

pytestmark = pytest.mark.timeout(20)

TOKEN = "a token"
ROW_BYTES = 32  # of weight 0, [4, 8] in float32; weight 1 is [8] in bfloat16
BUCKETS = [
    [Piece(0, Box((0, 0), (2, 8)), 0, 0), Piece(1, Box.whole((8,)), 0, 256)],
    [Piece(0, Box((2, 0), (2, 8)), 0, 512)],
]
DTYPES = ["float32", "bfloat16"]


class Memory:
    """A trainer's staging buffer, as a file without a name."""

    def __init__(self, num_bytes: int = 1024) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("test-staging")
        os.ftruncate(self.fd, num_bytes)

    def write(self, offset: int, tensor: Any) -> None:
        os.pwrite(self.fd, tensor.contiguous().view(torch.uint8).numpy().tobytes(), offset)


class Trainer:
    """Runs one function with the accepted link, on a thread; what it returns or raises is told by :meth:`result`."""

    def __init__(self, listener: Listener, work: Callable[[Link], Any]) -> None:
        self._listener, self._work = listener, work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            link = self._listener.accept(5)
            try:
                assert link.receive(5) == Joined(TOKEN, "engine-0", 3)
                self._value = self._work(link)
            finally:
                link.close()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join(10)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._value


@pytest.fixture
def listener() -> Iterator[Listener]:
    directory: Path = new_scratch()
    listener = Listener(directory)
    yield listener
    listener.close()
    remove_scratch(directory)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    os.close(memory.fd)


class Parameters:
    """Of a TP rank that takes the right half of weight 0, and weight 1 behind padding, in other dtypes or layouts."""

    def __init__(self) -> None:
        self.half, self.bias = torch.full((4, 4), -1.0), torch.full((12,), -1.0)

    def recording(self) -> Recording:
        copies = [
            Copy(0, Box((0, 4), (4, 4)), self.half),
            Copy(1, Box((0,), (8,)), self.bias[2:10]),
        ]
        fills = [Fill(self.bias[:2], 7.0), Fill(self.bias[10:], 0.0)]
        return Recording(copies, fills, [], [], [], [], [], "")

    def holds(self, weight: Any, bias: Any) -> bool:
        padded = torch.cat([torch.full((2,), 7.0), bias.float(), torch.zeros(2)])
        return bool(torch.equal(self.half, weight[:, 4:]) and torch.equal(self.bias, padded))


def loader(listener: Listener, recording: Recording, timeout_s: float = 5.0) -> Loader:
    return Loader(listener.path, TOKEN, "engine-0", 3, recording, timeout_s)


def offer(memory: Memory, buckets: list[list[Piece]] = BUCKETS) -> Offer:
    return Offer([Region(memory.num_bytes)], buckets, DTYPES, DTYPES)


def mapped(link: Link, memory: Memory, buckets: list[list[Piece]] = BUCKETS) -> Any:
    """Offer, and what the engine says to that."""
    link.send(offer(memory, buckets), [memory.fd])
    return link.receive(5)


def hand_over(link: Link, memory: Memory, weight: Any, bias: Any) -> list[Any]:
    """One sync; the engine's answers."""
    answers = []
    memory.write(0, weight[:2])
    memory.write(256, bias)
    link.send(Filled(0))
    answers.append(link.receive(5))
    memory.write(512, weight[2:])
    link.send(Filled(1))
    answers.append(link.receive(5))
    return answers


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------ weights land


def test_every_sync_brings_the_values_of_its_time_to_their_places(listener: Listener, memory: Memory) -> None:
    weights = [(torch.randn(4, 8), torch.randn(8).bfloat16()) for _ in range(3)]

    def train(link: Link) -> list[list[Any]]:
        assert mapped(link, memory) == Mapped()
        return [hand_over(link, memory, weight, bias) for weight, bias in weights]

    trainer = Trainer(listener, train)
    parameters = Parameters()
    taker = loader(listener, parameters.recording())
    for weight, bias in weights:
        measured = taker.load(5)
        assert parameters.holds(weight, bias)
        assert measured["num_bytes"] == 4 * 4 * 4 + 8 * 4
        assert measured["seconds"] > 0
    taker.close()
    for answers in trainer.result():
        assert [(type(answer), answer.bucket) for answer in answers] == [(Loaded, 0), (Loaded, 1)]
        assert all(answer.seconds >= 0 for answer in answers)


def test_a_slot_that_is_used_again_is_read_before_the_engine_says_that_it_is(
    listener: Listener, memory: Memory
) -> None:
    """Both halves of the weight pass through the same place."""
    weight, bias = torch.randn(4, 8), torch.randn(8).bfloat16()
    buckets = [
        [Piece(0, Box((0, 0), (2, 8)), 0, 0)],
        [Piece(0, Box((2, 0), (2, 8)), 0, 0)],
        [Piece(1, Box.whole((8,)), 0, 0)],
    ]

    def train(link: Link) -> None:
        assert mapped(link, memory, buckets) == Mapped()
        for k, part in enumerate((weight[:2], weight[2:], bias)):
            memory.write(0, part)
            link.send(Filled(k))
            assert isinstance(link.receive(5), Loaded)
            memory.write(0, torch.zeros(64))

    trainer = Trainer(listener, train)
    parameters = Parameters()
    taker = loader(listener, parameters.recording())
    taker.load(5)
    assert parameters.holds(weight, bias)
    taker.close()
    trainer.result()


def test_one_weight_may_go_to_several_places_and_another_to_none(listener: Listener, memory: Memory) -> None:
    weight, bias = torch.randn(4, 8), torch.randn(8).bfloat16()
    one, other = torch.zeros(4, 8), torch.zeros(8, 4)
    recording = Recording(
        [Copy(0, Box.whole((4, 8)), one), Copy(0, Box.whole((4, 8)), other.t())], [], [], [], [], [], [], ""
    )

    def train(link: Link) -> None:
        assert mapped(link, memory) == Mapped()
        hand_over(link, memory, weight, bias)

    trainer = Trainer(listener, train)
    taker = loader(listener, recording)
    assert taker.load(5)["num_bytes"] == 2 * 4 * ROW_BYTES
    assert torch.equal(one, weight)
    assert torch.equal(other, weight.t())
    taker.close()
    trainer.result()


def test_several_regions_come_with_a_file_each(listener: Listener, memory: Memory) -> None:
    weight, bias = torch.randn(4, 8), torch.randn(8).bfloat16()
    second = Memory(512)
    buckets = [[Piece(0, Box.whole((4, 8)), 1, 128), Piece(1, Box.whole((8,)), 0, 0)]]

    def train(link: Link) -> None:
        link.send(Offer([Region(1024), Region(512)], buckets, DTYPES, DTYPES), [memory.fd, second.fd])
        assert link.receive(5) == Mapped()
        second.write(128, weight)
        memory.write(0, bias)
        link.send(Filled(0))
        assert isinstance(link.receive(5), Loaded)

    trainer = Trainer(listener, train)
    parameters = Parameters()
    taker = loader(listener, parameters.recording())
    taker.load(5)
    assert parameters.holds(weight, bias)
    taker.close()
    trainer.result()
    os.close(second.fd)


def test_a_weight_outside_of_the_staging_buffer_has_the_trainers_dtype_and_is_cast(
    listener: Listener, memory: Memory
) -> None:
    weight, bias = torch.randn(4, 8), torch.randn(8)
    second = Memory(512)
    buckets = [[Piece(1, Box.whole((8,)), 1, 128), Piece(0, Box.whole((4, 8)), 0, 0)]]

    def train(link: Link) -> None:
        link.send(Offer([Region(1024), Region(512)], buckets, DTYPES, ["float32", "float32"]), [memory.fd, second.fd])
        assert link.receive(5) == Mapped()
        second.write(128, bias)
        memory.write(0, weight)
        link.send(Filled(0))
        assert isinstance(link.receive(5), Loaded)

    trainer = Trainer(listener, train)
    half, casted = torch.zeros(4, 4), torch.zeros(8).bfloat16()
    copies = [Copy(0, Box((0, 4), (4, 4)), half), Copy(1, Box.whole((8,)), casted)]
    taker = loader(listener, Recording(copies, [], [], [], [], [], [], ""))
    taker.load(5)
    assert torch.equal(half, weight[:, 4:])
    assert torch.equal(casted, bias.bfloat16())
    taker.close()
    trainer.result()
    os.close(second.fd)


def test_nothing_to_load_needs_no_bucket(listener: Listener, memory: Memory) -> None:
    trainer = Trainer(listener, lambda link: mapped(link, memory, []))
    taker = loader(listener, Recording([], [], [], [], [], [], [], ""))
    assert taker.load(0.1) == {"seconds": 0.0, "num_bytes": 0}
    taker.close()
    assert trainer.result() == Mapped()


# ------------------------------------------------------------ joining fails


@pytest.mark.parametrize(
    "buckets",
    [
        [],
        BUCKETS[:1],
        [BUCKETS[0]],
        [[Piece(0, Box((0, 0), (4, 5)), 0, 0), Piece(1, Box.whole((8,)), 0, 256)]],
        [*BUCKETS, [Piece(0, Box((0, 4), (1, 1)), 0, 0)]],
    ],
    ids=["nothing", "half of it", "the first bucket", "too few columns", "an element twice"],
)
def test_buckets_that_do_not_bring_what_is_needed_are_refused_before_anything_is_loaded(
    listener: Listener, memory: Memory, buckets: list[list[Piece]]
) -> None:
    trainer = Trainer(listener, lambda link: mapped(link, memory, buckets))
    parameters = Parameters()
    with pytest.raises(ChannelError, match=r"buckets bring \d+ elements, and 24 are needed"):
        loader(listener, parameters.recording())
    answer = trainer.result()
    assert "24 are needed" in answer.error
    assert bool((parameters.half == -1).all())
    assert bool((parameters.bias == -1).all())


def test_a_piece_outside_of_its_region_is_refused_and_the_trainer_hears_why(listener: Listener, memory: Memory) -> None:
    buckets = [[Piece(0, Box.whole((4, 8)), 0, 1000), Piece(1, Box.whole((8,)), 0, 0)]]
    trainer = Trainer(listener, lambda link: mapped(link, memory, buckets))
    with pytest.raises(RuntimeError):
        loader(listener, Parameters().recording())
    assert trainer.result().error.startswith("RuntimeError: ")


def test_a_region_larger_than_its_file_is_refused_and_the_trainer_hears_why(listener: Listener, memory: Memory) -> None:
    def train(link: Link) -> Any:
        link.send(Offer([Region(1 << 20)], BUCKETS, DTYPES, DTYPES), [memory.fd])
        return link.receive(5)

    trainer = Trainer(listener, train)
    with pytest.raises(ValueError, match="file size"):
        loader(listener, Parameters().recording())
    assert trainer.result().error.startswith("ValueError: ")


def test_something_else_than_an_offer_is_refused(listener: Listener) -> None:
    trainer = Trainer(listener, lambda link: link.send(Filled(0)))
    with pytest.raises(ChannelError, match="expected an offer, got Filled"):
        loader(listener, Parameters().recording())
    trainer.result()


def test_a_trainer_that_offers_nothing_in_time_is_given_up(listener: Listener) -> None:
    release = threading.Event()
    trainer = Trainer(listener, lambda link: release.wait(5))
    with pytest.raises(TimeoutError):
        loader(listener, Parameters().recording(), timeout_s=0.05)
    release.set()
    trainer.result()


def test_a_trainer_that_refuses_the_token_just_closes(listener: Listener) -> None:
    trainer = Trainer(listener, lambda link: None)
    with pytest.raises(ChannelError, match=r"gone|broke"):
        loader(listener, Parameters().recording())
    trainer.result()


def test_a_trainer_that_is_not_there_is_a_channel_error(listener: Listener) -> None:
    listener.close()
    with pytest.raises(ChannelError, match="cannot reach"):
        loader(listener, Parameters().recording())


def test_no_file_descriptor_is_left_open_whether_joining_works_or_not(listener: Listener, memory: Memory) -> None:
    before = num_open_fds()
    for buckets in (BUCKETS, []):
        trainer = Trainer(listener, lambda link, buckets=buckets: mapped(link, memory, buckets))  # type: ignore[misc]
        if buckets:
            loader(listener, Parameters().recording()).close()
        else:
            with pytest.raises(ChannelError):
                loader(listener, Parameters().recording())
        trainer.result()
    deadline = time.monotonic() + 2
    while num_open_fds() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert num_open_fds() == before


# ------------------------------------------------------------ loading fails


def test_a_trainer_that_stops_in_the_middle_is_given_up_and_told(listener: Listener, memory: Memory) -> None:
    def train(link: Link) -> Any:
        mapped(link, memory)
        link.send(Filled(0))
        assert isinstance(link.receive(5), Loaded)
        return link.receive(5)

    trainer = Trainer(listener, train)
    taker = loader(listener, Parameters().recording())
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        taker.load(0.1)
    assert time.monotonic() - begun < 2
    taker.close()
    answer = trainer.result()
    assert isinstance(answer, Failed)
    assert "TimeoutError" in answer.error


def test_a_trainer_that_gives_up_says_why(listener: Listener, memory: Memory) -> None:
    def train(link: Link) -> None:
        mapped(link, memory)
        link.send(Failed("a shard is gone"))

    trainer = Trainer(listener, train)
    taker = loader(listener, Parameters().recording())
    with pytest.raises(ChannelError, match="the trainer gave up: a shard is gone"):
        taker.load(5)
    taker.close()
    trainer.result()


def test_a_trainer_that_dies_in_the_middle_is_a_channel_error(listener: Listener, memory: Memory) -> None:
    def train(link: Link) -> None:
        mapped(link, memory)
        link.send(Filled(0))
        link.receive(5)

    trainer = Trainer(listener, train)
    taker = loader(listener, Parameters().recording())
    with pytest.raises(ChannelError, match=r"gone|broke"):
        taker.load(5)
    taker.close()
    trainer.result()


@pytest.mark.parametrize("bucket", [2, 99])
def test_a_bucket_that_was_not_planned_ends_the_load_and_the_trainer_is_told(
    listener: Listener, memory: Memory, bucket: int
) -> None:
    def train(link: Link) -> Any:
        mapped(link, memory)
        link.send(Filled(bucket))
        return link.receive(5)

    trainer = Trainer(listener, train)
    taker = loader(listener, Parameters().recording())
    with pytest.raises(IndexError):
        taker.load(5)
    taker.close()
    assert isinstance(trainer.result(), Failed)


def test_a_second_offer_is_not_a_bucket(listener: Listener, memory: Memory) -> None:
    def train(link: Link) -> Any:
        mapped(link, memory)
        link.send(offer(memory))
        return link.receive(5)

    trainer = Trainer(listener, train)
    taker = loader(listener, Parameters().recording())
    with pytest.raises(ChannelError, match="expected a bucket, got Offer"):
        taker.load(5)
    taker.close()
    assert "expected a bucket" in trainer.result().error
