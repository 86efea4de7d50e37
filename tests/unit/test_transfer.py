"""A trainer rank's part in a sync, alone on the CPU: it packs, gathers, hands over, and survives engines that fail."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import sglrollout as sr
from sglrollout.boxes import Box, narrowed
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import ChannelError, WeightSyncError
from sglrollout.weights.memory import Exports
from sglrollout.weights.plan import plan_buckets
from sglrollout.weights.sources import Weight, WeightSource
from sglrollout.weights.transfer import Clock, Consumer, Gatherer, Layout, Transfer
from sglrollout.wire.link import Failed, Filled, Joined, Link, Listener, Loaded, Mapped, Offer, Region, connect
from sglrollout.wire.messages import WeightSpec

pytestmark = pytest.mark.timeout(30)

BUCKET_BYTES, TOKEN = 1024, "a token"
ONE, TWO = Consumer("engine-0", 0), Consumer("engine-1", 0)


def never() -> bool:
    return False


def tensors() -> dict[str, Any]:
    """A scalar, a small weight, and two that do not fit into one bucket."""
    return {
        "large": torch.randn(40, 16),
        "scalar": torch.tensor(3.0),
        "small": torch.randn(7),
        "wide": torch.randn(3, 300),
    }


def layout_of(source: WeightSource, dtypes: dict[str, str] | None = None) -> Layout:
    weights = source.weights()
    names = [(dtypes or {}).get(weight.spec.name, weight.spec.dtype) for weight in weights]
    return Layout(weights, names, [(weight.box,) for weight in weights], 0, None)


class Engine:
    """A consumer on a thread: it joins, then takes what it is told of, after ``before`` has let it."""

    def __init__(
        self,
        listener: Listener,
        consumer: Consumer = ONE,
        *,
        token: str = TOKEN,
        before: Callable[[Link, int], Any] = lambda link, k: None,
        mapped: Mapped | Failed | None = None,
        num_syncs: int = 1,
    ) -> None:
        self.received: list[dict[int, Any]] = []
        self.offer: Offer | None = None
        self.error: BaseException | None = None
        self.heard: list[Any] = []
        self._memory: Any = None
        self._before, self._mapped, self._num_syncs = before, mapped or Mapped(), num_syncs
        self._link = connect(listener.path, 5)
        self._link.send(Joined(token, *consumer))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            offer, fds = self._link.receive_with_fds(5)
            assert isinstance(offer, Offer)
            self.offer = offer
            self._memory = torch.frombuffer(mmap.mmap(fds[0], offer.regions[0].num_bytes), dtype=torch.uint8)
            os.close(fds[0])
            self._link.send(self._mapped)
            for _ in range(self._num_syncs):
                self.received.append({})
                for _ in offer.buckets:
                    message = self._link.receive(5)
                    self.heard.append(message)
                    if not isinstance(message, Filled):
                        return
                    self._before(self._link, message.bucket)
                    self._take(offer, message.bucket)
                    self._link.send(Loaded(message.bucket, 0.001))
            self.heard.append(self._link.receive(5))
        except (ChannelError, TimeoutError) as error:
            self.error = error

    def _take(self, offer: Offer, k: int) -> None:
        """Copy a bucket's pieces to where they belong, as a loader does."""
        parts = self.received[-1]
        for piece in offer.buckets[k]:
            if piece.region:
                continue  # the memory of a GPU
            dtype = getattr(torch, offer.staged[piece.entry])
            data = self._memory[piece.offset : piece.offset + piece.box.numel * dtype.itemsize].view(dtype)
            known: Any = parts.setdefault(piece.entry, {})
            known[piece.box] = data.view(piece.box.size).clone()

    def weight(self, i: int, shape: tuple[int, ...], sync: int = 0) -> Any:
        parts = self.received[sync][i]
        whole = torch.zeros(shape, dtype=next(iter(parts.values())).dtype)
        for box, part in parts.items():
            narrowed(whole, box).copy_(part)
        return whole

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._link.close()
        self._memory = None


@pytest.fixture
def listener() -> Iterator[Listener]:
    directory = new_scratch()
    listener = Listener(directory)
    yield listener
    listener.close()
    remove_scratch(directory)


class Set(NamedTuple):
    transfer: Transfer
    engine: Engine


def attached(listener: Listener, source: WeightSource, num_slots: int = 2, **options: Any) -> Set:
    """A transfer with one engine that has joined."""
    engine = Engine(listener, **options)
    transfer = Transfer(layout_of(source), source, [ONE], BUCKET_BYTES, num_slots)
    transfer.accept(listener, TOKEN, 5)
    return Set(transfer, engine)


# ------------------------------------------------------------ good syncs


@pytest.mark.parametrize("num_slots", [2, 3, 50])
def test_every_weight_arrives_whole_sync_after_sync(listener: Listener, num_slots: int) -> None:
    values = tensors()
    source = sr.TensorSource(values)
    transfer, engine = attached(listener, source, num_slots, num_syncs=3)
    for sync in range(3):
        values.update(tensors())
        measured = transfer.run(5, never)
        assert measured["load_s"] == pytest.approx(0.001 * transfer.num_buckets)  # as the engine says
        assert measured["wall_s"] >= measured["gather_s"] > 0
        for i, (name, tensor) in enumerate(values.items()):
            assert torch.equal(engine.weight(i, tensor.shape, sync), tensor), name
    transfer.close()
    engine.join()
    assert [m.bucket for m in engine.heard if isinstance(m, Filled)] == [*range(transfer.num_buckets)] * 3
    assert transfer.num_buckets > num_slots or num_slots == 50


def test_the_extra_memory_is_that_of_the_slots(listener: Listener) -> None:
    source = sr.TensorSource({"large": torch.randn(400, 16)})
    for num_slots in (2, 5):
        transfer = Transfer(layout_of(source), source, [ONE], BUCKET_BYTES, num_slots)
        assert transfer.staging.bytes.numel() == num_slots * BUCKET_BYTES
        transfer.close()
    single = sr.TensorSource({"small": torch.randn(4)})
    transfer = Transfer(layout_of(single), single, [ONE], BUCKET_BYTES, 5)
    assert transfer.staging.bytes.numel() == 256
    transfer.close()


def test_a_modules_parameters_arrive_as_they_are_at_the_time_of_each_sync(listener: Listener) -> None:
    model = torch.nn.Linear(5, 7)
    source = sr.ModuleSource(model)
    transfer, engine = attached(listener, source, num_syncs=2)
    for sync in range(2):
        with torch.no_grad():
            model.weight.add_(1)
        transfer.run(5, never)
        assert torch.equal(engine.weight(0, (7, 5), sync), model.weight.detach())
        assert torch.equal(engine.weight(1, (7,), sync), model.bias.detach())
    transfer.close()
    engine.join()


def test_weights_travel_in_the_engines_dtypes(listener: Listener) -> None:
    values = tensors()
    source = sr.TensorSource(values)
    engine = Engine(listener)
    transfer = Transfer(layout_of(source, {"large": "bfloat16"}), source, [ONE], BUCKET_BYTES, 2)
    transfer.accept(listener, TOKEN, 5)
    transfer.run(5, never)
    assert engine.offer is not None
    assert (engine.offer.staged[0], engine.offer.own[0]) == ("bfloat16", "float32")
    assert torch.equal(engine.weight(0, (40, 16)), values["large"].bfloat16())
    assert torch.equal(engine.weight(2, (7,)), values["small"])
    transfer.close()
    engine.join()


def test_several_engines_read_the_same_memory_and_the_slowest_sets_the_pace(listener: Listener) -> None:
    values = tensors()
    source = sr.TensorSource(values)
    fast = Engine(listener, ONE)
    slow = Engine(listener, TWO, before=lambda link, k: time.sleep(0.01))
    transfer = Transfer(layout_of(source), source, [ONE, TWO], BUCKET_BYTES, 2)
    transfer.accept(listener, TOKEN, 5)
    transfer.run(5, never)
    for engine in (fast, slow):
        assert all(torch.equal(engine.weight(i, t.shape), t) for i, t in enumerate(values.values()))
    transfer.close()
    for engine in (fast, slow):
        engine.join()


def test_no_more_buckets_are_under_way_than_there_are_slots(listener: Listener) -> None:
    """Else a bucket would be filled over one that an engine still reads."""
    source = sr.TensorSource({"large": torch.randn(100, 16)})
    seen: list[int] = []
    read = source.read

    def counting_read() -> Callable[[int], Any]:
        inner = read()

        def one(i: int) -> Any:
            num_packed.append(i)
            return inner(i)

        return one

    num_packed: list[int] = []
    source.read = counting_read  # type: ignore[method-assign]

    def before(link: Link, k: int) -> None:
        time.sleep(0.01)
        seen.append(len(num_packed) - k)

    transfer, engine = attached(listener, source, before=before)
    transfer.run(5, never)
    assert len(seen) == transfer.num_buckets == 7
    assert max(seen) == 2
    transfer.close()
    engine.join()


def test_a_rank_without_engines_still_reads_all_its_tensors(listener: Listener) -> None:
    """Making them may be a collective, which the others are in."""
    made: list[str] = []

    def pairs() -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors().items():
            made.append(name)
            yield name, tensor

    source = sr.TensorSource(pairs)
    transfer = Transfer(layout_of(source), source, [], BUCKET_BYTES, 2)
    transfer.accept(listener, TOKEN, 0.1)
    assert transfer.num_buckets == 0
    made.clear()
    transfer.run(5, never)
    assert made == list(tensors())
    transfer.close()


def test_a_weight_that_engines_read_where_it_is_takes_no_room_and_is_announced_first(listener: Listener) -> None:
    source = sr.TensorSource({"there": torch.randn(40, 16), "here": torch.randn(7)})
    exports = {0: Exports([Region(1 << 20)], {0: (0, 4096)}, {0: 1})}
    transfer = Transfer(layout_of(source), source, [ONE], BUCKET_BYTES, 2, exports, [0])
    engine = Engine(listener)
    transfer.accept(listener, TOKEN, 5)
    transfer.run(5, never)
    assert engine.offer is not None
    assert [region.num_bytes for region in engine.offer.regions] == [256, 1 << 20]
    first, second = engine.offer.buckets
    assert [(piece.entry, piece.box, piece.region, piece.offset) for piece in first] == [
        (0, Box.whole((40, 16)), 1, 4096)
    ]
    assert [(piece.entry, piece.region) for piece in second] == [(1, 0)]
    transfer.close()
    engine.join()


def test_exported_weights_have_moved_when_one_of_them_is_elsewhere() -> None:
    values = [torch.randn(3), torch.randn(3)]
    exports = Exports([], {0: (0, 0), 1: (0, 64)}, {i: tensor.data_ptr() for i, tensor in enumerate(values)})
    assert not exports.has_moved(lambda i: values[i])
    values[1] = values[1].clone()
    assert exports.has_moved(lambda i: values[i])
    assert not Exports().has_moved(lambda i: values[i])


# ------------------------------------------------------------ joining


def test_only_engines_that_know_the_token_and_are_waited_for_may_join(listener: Listener) -> None:
    values = tensors()
    source = sr.TensorSource(values)
    strangers = [Engine(listener, token="another"), Engine(listener, TWO), Engine(listener, Consumer("engine-0", 1))]
    transfer, engine = attached(listener, source)
    again = connect(listener.path, 5)
    again.send(Joined(TOKEN, *ONE))
    transfer.run(5, never)
    assert torch.equal(engine.weight(0, (40, 16)), values["large"])
    transfer.close()
    for stranger in strangers:
        stranger.join()
        assert isinstance(stranger.error, ChannelError)
        assert stranger.offer is None
    with pytest.raises(TimeoutError):
        again.receive(0.01)
    again.close()
    engine.join()


def test_an_engine_that_does_not_join_in_time_ends_the_wait(listener: Listener) -> None:
    source = sr.TensorSource(tensors())
    transfer = Transfer(layout_of(source), source, [ONE], BUCKET_BYTES, 2)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="no engine joined"):
        transfer.accept(listener, TOKEN, 0.05)
    assert time.monotonic() - begun < 2
    transfer.close()


def test_an_engine_that_cannot_map_the_memory_says_why(listener: Listener) -> None:
    source = sr.TensorSource(tensors())
    engine = Engine(listener, mapped=Mapped("RuntimeError: no room"), num_syncs=0)
    transfer = Transfer(layout_of(source), source, [ONE], BUCKET_BYTES, 2)
    with pytest.raises(ChannelError, match="cannot map this rank's memory: RuntimeError: no room"):
        transfer.accept(listener, TOKEN, 5)
    transfer.close()
    engine.join()


# ------------------------------------------------------------ failures


def test_an_engine_that_fails_is_named_with_its_reason_and_the_others_are_told(listener: Listener) -> None:
    def fail(link: Link, k: int) -> None:
        if k == 1:
            link.send(Failed("StaleRecordingError: it moved"))
            raise ChannelError("it ends")

    source = sr.TensorSource(tensors())
    failing, other = Engine(listener, ONE, before=fail), Engine(listener, TWO)
    transfer = Transfer(layout_of(source), source, [ONE, TWO], BUCKET_BYTES, 2)
    transfer.accept(listener, TOKEN, 5)
    with pytest.raises(ChannelError, match="engine-0 failed at bucket 1: StaleRecordingError: it moved"):
        transfer.run(5, never)
    failing.join()
    other.join()
    transfer.close()
    assert isinstance(other.heard[-1], Failed)
    assert "it moved" in other.heard[-1].error


def test_an_engine_that_dies_is_noticed_at_once(listener: Listener) -> None:
    def die(link: Link, k: int) -> None:
        link.close()
        raise ChannelError("it is dead")

    transfer, engine = attached(listener, sr.TensorSource(tensors()), before=die)
    begun = time.monotonic()
    with pytest.raises(ChannelError, match=r"gone|broke"):
        transfer.run(5, never)
    assert time.monotonic() - begun < 2
    transfer.close()
    engine.join()


def test_an_engine_that_stops_is_waited_for_until_the_deadline(listener: Listener) -> None:
    release = threading.Event()
    transfer, engine = attached(listener, sr.TensorSource(tensors()), before=lambda link, k: release.wait(5))
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"engine-0 has not loaded bucket 0 of \d+ within 0\.1 s"):
        transfer.run(0.1, never)
    assert 0.09 < time.monotonic() - begun < 1
    release.set()
    transfer.close()
    engine.join()


def test_a_sync_that_is_cancelled_meanwhile_ends_soon_and_engines_are_told(listener: Listener) -> None:
    release, cancelled = threading.Event(), threading.Event()
    transfer, engine = attached(listener, sr.TensorSource(tensors()), before=lambda link, k: release.wait(5))
    threading.Timer(0.05, cancelled.set).start()
    begun = time.monotonic()
    with pytest.raises(WeightSyncError, match="it was cancelled"):
        transfer.run(60, cancelled.is_set)
    assert time.monotonic() - begun < 2
    release.set()
    engine.join()
    transfer.close()
    assert any(isinstance(message, Failed) for message in engine.heard)


def test_a_tensor_that_cannot_be_made_fails_the_sync_and_engines_are_told(listener: Listener) -> None:
    values = tensors()

    def pairs() -> Iterator[tuple[str, Any]]:
        for name, tensor in values.items():
            if broken and name == "wide":
                raise ValueError("the hook broke")
            yield name, tensor

    broken: list[bool] = []
    transfer, engine = attached(listener, sr.TensorSource(pairs))
    broken.append(True)
    with pytest.raises(ValueError, match="the hook broke"):
        transfer.run(5, never)
    engine.join()
    transfer.close()
    assert isinstance(engine.heard[-1], Failed)
    assert "ValueError: the hook broke" in engine.heard[-1].error


def test_a_tensor_of_another_shape_than_planned_fails_the_sync(listener: Listener) -> None:
    values = tensors()
    transfer, engine = attached(listener, sr.TensorSource(values))
    values["small"] = torch.randn(8)
    with pytest.raises(WeightSyncError, match=r"small is \[8\] here and was planned as \[7\]") as caught:
        transfer.run(5, never)
    assert caught.value.phase == "transfer"
    engine.join()
    transfer.close()
    assert isinstance(engine.heard[-1], Failed)


def test_nothing_stays_open_after_close(listener: Listener) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    transfer, engine = attached(listener, sr.TensorSource(tensors()))
    transfer.run(5, never)
    transfer.close()
    transfer.close()
    engine.join()
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------ gathers


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this rank alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def cut_layout(shape: tuple[int, ...], group: Any) -> Layout:
    spec = WeightSpec("cut", list(shape), "float32")
    return Layout([Weight(spec, Box.whole(shape), (0,), group)], ["float32"], [(Box.whole(shape),)], 0, None)


def filled(gatherer: Gatherer, read: Callable[[int], Any] | None) -> tuple[Any, list[Exception | None]]:
    """Weight 0, put together from all buckets, and what went wrong in each."""
    whole, errors = torch.zeros(gatherer._layout.weights[0].spec.shape), []
    for k, bucket in enumerate(gatherer.buckets):
        gathering = gatherer.launch(k, read)
        Clock(5, never).wait(gathering.is_done, "it was not gathered")
        assert gathering.seconds() > 0
        errors.append(gathering.error)
        for piece in bucket.pieces(gatherer.start(k)):
            data = gatherer.staging.bytes[piece.offset : piece.offset + 4 * piece.box.numel].view(torch.float32)
            narrowed(whole, piece.box).copy_(data.view(piece.box.size))
    return whole, errors


def test_gathered_buckets_are_filled_with_each_ranks_share(group: Any) -> None:
    layout, tensor = cut_layout((40, 16), group), torch.randn(40, 16)
    buckets = plan_buckets(layout.planned({}, whole=True), BUCKET_BYTES)
    assert all(bucket.ranks == (0,) for bucket in buckets)
    gatherer = Gatherer(layout, buckets, 2, shared=False)
    whole, errors = filled(gatherer, lambda i: tensor)
    assert errors == [None] * len(buckets)
    assert torch.equal(whole, tensor)
    gatherer.close()


def test_a_gather_is_made_even_if_this_rank_cannot_pack_or_has_given_up(group: Any) -> None:
    def read(i: int) -> Any:
        raise RuntimeError("a shard is gone")

    layout = cut_layout((40, 16), group)
    buckets = plan_buckets(layout.planned({}, whole=True), BUCKET_BYTES)
    gatherer = Gatherer(layout, buckets, 2, shared=False)
    _, errors = filled(gatherer, read)
    assert [str(error) for error in errors] == ["a shard is gone"] * len(buckets)
    _, errors = filled(gatherer, None)
    assert errors == [None] * len(buckets)
    gatherer.close()


def test_a_rank_that_cannot_pack_takes_part_in_every_gather_before_it_fails(listener: Listener, group: Any) -> None:
    class Broken(sr.TensorSource):
        def read(self) -> Callable[[int], Any]:
            def one(i: int) -> Any:
                calls.append(i)
                raise RuntimeError("a shard is gone")

            return one

    calls: list[int] = []
    source, engine = Broken({"cut": torch.randn(40, 16)}), Engine(listener)
    transfer = Transfer(cut_layout((40, 16), group), source, [ONE], BUCKET_BYTES, 2)
    transfer.accept(listener, TOKEN, 5)
    launched: list[int] = []
    launch = transfer._gatherer.launch

    def noting_launch(k: int, read: Any) -> Any:
        launched.append(k)
        return launch(k, read)

    transfer._gatherer.launch = noting_launch  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a shard is gone"):
        transfer.run(5, never)
    assert launched == list(range(transfer.num_buckets))
    assert len(calls) == transfer.num_buckets  # to make them may take all ranks, too
    transfer.close()
    engine.join()


def test_shards_that_do_not_make_up_a_weight_are_refused_by_its_name() -> None:
    spec, parts = WeightSpec("cut", [4, 2], "float32"), Box.whole((4, 2)).split(2)
    weight = Weight(spec, parts[0], (0, 3))
    Layout([weight], ["float32"], [tuple(parts)], 0, None).check()
    with pytest.raises(
        WeightSyncError, match=r"the shards of cut on ranks \[0, 3\] do not make up the whole"
    ) as caught:
        Layout([weight], ["float32"], [(parts[0], parts[0])], 0, None).check()
    assert caught.value.phase == "plan"


def test_whole_weights_are_sent_by_ranks_that_serve_engines_and_shards_by_all() -> None:
    whole, cut = Box.whole((4, 2)), Box.whole((4, 2)).split(2)
    spec = WeightSpec("a", [4, 2], "bfloat16")
    layout = Layout(
        [Weight(spec, whole), Weight(spec, cut[0], (0, 1))], ["float32"] * 2, [(whole,), tuple(cut)], 0, None
    )
    assert [weight.sent for weight in layout.planned({}, whole=True)] == [True, True]
    assert [weight.sent for weight in layout.planned({}, whole=False)] == [False, True]
    assert [weight.itemsize for weight in layout.planned({}, whole=True)] == [4, 4]
    assert [weight.addresses for weight in layout.planned({0: ((1, 64),)}, whole=True)] == [((1, 64),), None]


# ------------------------------------------------------------ the clock


def test_a_clock_says_what_was_not_done_in_time() -> None:
    clock = Clock(0.02, never)
    assert 0 < clock.left("it") <= 0.02
    with pytest.raises(TimeoutError, match=r"bucket 3 was not gathered within 0\.02 s"):
        clock.wait(never, "bucket 3 was not gathered")
    with pytest.raises(TimeoutError):
        clock.left("it")
    clock.wait(lambda: True, "what is done already")


def test_a_clock_looks_for_a_cancellation_first() -> None:
    with pytest.raises(WeightSyncError, match="transfer: it was cancelled"):
        Clock(60, lambda: True).wait(never, "it")


def test_a_connection_that_is_closed_or_silent_does_not_keep_the_right_engine_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglrollout.weights.transfer._JOIN_S", 0.2)
    source = sr.TensorSource(tensors())
    source.weights()
    gone, silent = connect(listener.path, 1), connect(listener.path, 1)
    gone.close()
    begun = time.monotonic()
    attached_anyhow = attached(listener, source)
    assert time.monotonic() - begun < 2
    silent.close()
    attached_anyhow.transfer.close()
    attached_anyhow.engine.join()
