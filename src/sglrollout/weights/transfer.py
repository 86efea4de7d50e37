"""A trainer rank's part in moving weights: it packs and gathers them, and hands them to the engines that share its GPU.

Blocking code, run on the syncer's own thread. Every wait on another process has a deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sglrollout.boxes import Box, cover, narrowed
from sglrollout.errors import ChannelError, WeightSyncError
from sglrollout.weights.memory import Exports, Staging
from sglrollout.weights.plan import Bucket, Planned, plan_buckets
from sglrollout.weights.sources import Weight, WeightSource
from sglrollout.wire.link import Failed, Filled, FromEngine, Joined, Link, Listener, Loaded, Mapped, Offer, Region

_POLL_S = 20e-6
_JOIN_S = 5.0
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
Read = Callable[[int], Any]


class Consumer(NamedTuple):
    """A TP rank of an engine that this trainer rank serves."""

    engine: str
    tp_rank: int


@dataclass(frozen=True)
class Layout:
    """What all ranks know of the weights, and this rank's own part.

    Attributes:
        weights: this rank's.
        dtypes: torch's names of the dtypes on the way, by weight.
        boxes: by weight, what each of its gathering ranks holds.
        rank: this rank's number.
        device: this rank's GPU, or ``None``.
    """

    weights: list[Weight]
    dtypes: list[str]
    boxes: list[tuple[Box, ...]]
    rank: int
    device: Any

    def check(self) -> None:
        """Whether the shards of each weight make it up.

        Raises:
            WeightSyncError: they do not.
        """
        for weight, boxes in zip(self.weights, self.boxes, strict=True):
            if weight.ranks and not cover(weight.spec.shape, boxes):
                message = f"the shards of {weight.spec.name} on ranks {list(weight.ranks)} do not make up the whole"
                raise WeightSyncError("plan", message)

    def planned(self, addresses: dict[int, tuple[tuple[int, int], ...]], whole: bool) -> list[Planned]:
        """For the planner.

        Args:
            addresses: of the weights that engines read where they are.
            whole: whether weights that are whole on this rank are its to send.
        """
        return [
            Planned(
                shape=tuple(weight.spec.shape),
                itemsize=getattr(torch, dtype).itemsize,
                ranks=weight.ranks,
                boxes=boxes,
                addresses=addresses.get(i),
                sent=whole or bool(weight.ranks),
            )
            for i, (weight, dtype, boxes) in enumerate(zip(self.weights, self.dtypes, self.boxes, strict=True))
        ]


class Gatherer:
    """Fills slots of a staging buffer, bucket by bucket, with this rank's share and those of the others."""

    def __init__(self, layout: Layout, buckets: Sequence[Bucket], num_slots: int, shared: bool) -> None:
        self._layout, self.buckets = layout, buckets
        self._slot_bytes = max((bucket.num_bytes for bucket in buckets), default=0)
        self.num_slots = min(num_slots, max(1, sum(1 for bucket in buckets if bucket.parts)))
        self.staging = Staging(max(1, self._slot_bytes * self.num_slots), layout.device, shared)
        self._stream = torch.cuda.Stream(layout.device) if layout.device is not None else None
        self._groups = {weight.ranks: weight.group for weight in layout.weights}
        self._targets = [self._own_part(bucket, self.start(k)) for k, bucket in enumerate(buckets)]

    def start(self, k: int) -> int:
        """Where in the buffer bucket ``k`` goes."""
        return (k % self.num_slots) * self._slot_bytes

    def _own_part(self, bucket: Bucket, start: int) -> list[tuple[int, Box, torch.Tensor]]:
        """Where this rank packs what: weight, box of it, and a view of the buffer."""
        if not bucket.parts:
            return []
        me = bucket.ranks.index(self._layout.rank) if bucket.ranks else 0
        packed = []
        for piece in bucket.parts[me]:
            dtype = getattr(torch, self._layout.dtypes[piece.entry])
            begin = start + me * bucket.share + piece.offset
            view = self.staging.bytes[begin : begin + piece.box.numel * dtype.itemsize].view(dtype).view(piece.box.size)
            packed.append((piece.entry, piece.box, view))
        return packed

    def launch(self, k: int, read: Read | None) -> Gathering:
        """Begin to fill bucket ``k``; its slot must be free.

        Where packing fails, or there is nothing to ``read`` with, the gather is made all the same: the other ranks are
        in it, and must not wait for one that has given up.
        """
        bucket = self.buckets[k]
        if self._stream is None:
            return self._launch_on_cpu(k, bucket, read)
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begun.record()
            error = self._pack(k, read)
            if bucket.ranks:
                out, own = self._shares(k, bucket)
                _all_gather(
                    out, own, group=self._groups[bucket.ranks], async_op=True
                ).wait()  # the stream waits, not we
            done.record()
        return Gathering(done.query, lambda: float(begun.elapsed_time(done)) / 1e3, error)

    def _launch_on_cpu(self, k: int, bucket: Bucket, read: Read | None) -> Gathering:
        begun = time.perf_counter()
        error = self._pack(k, read)
        if not bucket.ranks:
            seconds = time.perf_counter() - begun
            return Gathering(lambda: True, lambda: seconds, error)
        out, own = self._shares(k, bucket)
        work = _all_gather(out, own.clone(), group=self._groups[bucket.ranks], async_op=True)

        def is_done() -> bool:
            if not work.is_completed():
                return False
            work.wait()  # raises what went wrong
            return True

        return Gathering(is_done, lambda: time.perf_counter() - begun, error)

    def _pack(self, k: int, read: Read | None) -> Exception | None:
        """Copy this rank's parts to their places; what went wrong, if something did."""
        try:
            if read is not None:
                self._copy_own(k, read)
        except Exception as error:
            return error
        return None

    def _copy_own(self, k: int, read: Read) -> None:
        """Read all that this rank has of the bucket, also if one cannot be read: other ranks may be in the reading."""
        targets, sources, failure = [], [], None
        for entry, box, view in self._targets[k]:
            weight = self._layout.weights[entry]
            try:
                local = read(entry)
            except Exception as error:
                failure = failure or error
                continue
            if tuple(local.shape) != weight.box.size:
                message = f"{weight.spec.name} is {list(local.shape)} here and was planned as {list(weight.box.size)}"
                failure = failure or WeightSyncError("transfer", message)
                continue
            targets.append(view)
            sources.append(narrowed(local, box.within(weight.box)))
        if failure is not None:
            raise failure
        if targets:
            torch._foreach_copy_(targets, sources)

    def _shares(self, k: int, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole bucket, and this rank's share of it."""
        out = self.staging.bytes[self.start(k) : self.start(k) + bucket.num_bytes]
        me = bucket.ranks.index(self._layout.rank)
        return out, out[me * bucket.share : (me + 1) * bucket.share]

    def close(self) -> None:
        self._targets = []
        self.staging.close()


class Gathering(NamedTuple):
    """A bucket being filled: whether it is, how many seconds that took once it is, and what failed on this rank."""

    is_done: Callable[[], bool]
    seconds: Callable[[], float]
    error: Exception | None


class Transfer:
    """Moves weights to the engines that share this rank's memory, over links that stay open from sync to sync.

    Args:
        layout: see there.
        source: of the weights.
        consumers: the TP ranks to serve; there may be none, and then this rank only takes part in gathers.
        bucket_bytes: of a slot of the staging buffer.
        num_slots: of the staging buffer: how many buckets may be under way at once.
        exports: what ranks of this machine have exported.
        direct: the weights that engines read where they are, in every rank's memory. They need no gather and no room.
    """

    def __init__(
        self,
        layout: Layout,
        source: WeightSource,
        consumers: Sequence[Consumer],
        bucket_bytes: int,
        num_slots: int,
        exports: dict[int, Exports] | None = None,
        direct: Sequence[int] = (),
    ) -> None:
        self._layout, self._source, self._consumers = layout, source, list(consumers)
        self._regions: list[Region] = []
        addresses = self._addresses(exports or {}, direct)
        planned = layout.planned(addresses, whole=bool(consumers))
        self._gatherer = Gatherer(layout, plan_buckets(planned, bucket_bytes), num_slots, shared=bool(consumers))
        self._links: list[tuple[Consumer, Link]] = []
        self._num_loaded, self._load_s = 0, 0.0
        self._lazy = [] if source.persistent or consumers else [i for i, w in enumerate(layout.weights) if not w.ranks]

    def _addresses(self, exports: dict[int, Exports], direct: Sequence[int]) -> dict[int, tuple[tuple[int, int], ...]]:
        """Where engines find the boxes of ``direct`` weights, in the regions of all ranks one after the other."""
        first: dict[int, int] = {}
        for rank, of_rank in exports.items():
            first[rank] = 1 + len(self._regions)  # region 0 is the staging buffer
            self._regions += of_rank.regions
        found = {}
        for i in direct:
            ranks = self._layout.weights[i].ranks or (self._layout.rank,)
            of_ranks = [(rank, *exports[rank].addresses.get(i, (0, 0))) for rank in ranks]  # an empty shard has none
            found[i] = tuple((first[rank] + region, offset) for rank, region, offset in of_ranks)
        return found

    @property
    def num_buckets(self) -> int:
        return len(self._gatherer.buckets)

    @property
    def staging(self) -> Staging:
        return self._gatherer.staging

    def accept(self, listener: Listener, token: str, timeout_s: float) -> None:
        """Let each consumer join and map this rank's memory.

        Raises:
            TimeoutError, ChannelError: one did not.
        """
        if not self._consumers:
            return
        deadline = time.monotonic() + timeout_s
        buckets = [bucket.pieces(self._gatherer.start(k)) for k, bucket in enumerate(self._gatherer.buckets)]
        staging = self._gatherer.staging
        own = [weight.spec.dtype for weight in self._layout.weights]
        offer = Offer([staging.region(), *self._regions], buckets, self._layout.dtypes, own)
        fds = [staging.fd] if staging.fd is not None else None
        missing = set(self._consumers)
        while missing:
            link = listener.accept(_left(deadline))
            consumer = _who_joined(link, token, min(_JOIN_S, _left(deadline)))
            if consumer not in missing:
                link.close()
                continue
            missing.remove(consumer)
            self._links.append((consumer, link))
            link.send(offer, fds)
        for _, link in self._links:
            answer = link.receive(_left(deadline))
            if not isinstance(answer, Mapped) or answer.error:
                raise ChannelError(f"an engine cannot map this rank's memory: {getattr(answer, 'error', answer)}")

    def run(self, timeout_s: float, is_cancelled: Callable[[], bool]) -> dict[str, float]:
        """Move all weights once. A failure on this rank ends its part, but not the gathers that others are in.

        Raises:
            WeightSyncError, TimeoutError, ChannelError: it failed; the engines on the links were told.
        """
        clock = Clock(timeout_s, is_cancelled)
        begun = time.perf_counter()
        failures: list[Exception] = []
        measured: dict[str, float] = {}
        try:
            measured = self._run(clock, failures)
        except Exception as error:
            failures.append(error)
        if failures:
            self._tell_engines(failures[0])
            raise failures[0]
        return {**measured, "wall_s": time.perf_counter() - begun}

    def _run(self, clock: Clock, failures: list[Exception]) -> dict[str, float]:
        gatherer, read = self._gatherer, self._source.read()
        must_read = not self._source.persistent  # what is made as it comes may need all ranks for each tensor
        filling: list[tuple[int, Gathering]] = []
        self._num_loaded, self._load_s, gather_s = 0, 0.0, 0.0
        for k, bucket in enumerate(gatherer.buckets):
            if bucket.direct:
                self._announce(k, failures)
                continue
            self._await_loaded(k - gatherer.num_slots, clock, failures)  # the bucket before it in its slot
            filling.append((k, gatherer.launch(k, read if must_read or not failures else None)))
            if len(filling) > 1:
                gather_s += self._finish(*filling.pop(0), clock, failures)
        for item in filling:
            gather_s += self._finish(*item, clock, failures)
        for i in self._lazy:
            try:
                read(i)
            except Exception as error:
                failures.append(error)
        self._await_loaded(len(gatherer.buckets) - 1, clock, failures)
        return {"gather_s": gather_s, "load_s": self._load_s}

    def _finish(self, k: int, gathering: Gathering, clock: Clock, failures: list[Exception]) -> float:
        clock.wait(gathering.is_done, f"bucket {k} of {self.num_buckets} was not gathered")
        if gathering.error is not None:
            failures.append(gathering.error)
        self._announce(k, failures)
        return gathering.seconds()

    def _announce(self, k: int, failures: list[Exception]) -> None:
        if failures:
            return
        try:
            for _, link in self._links:
                link.send(Filled(k))
        except ChannelError as error:
            failures.append(error)

    def _await_loaded(self, k: int, clock: Clock, failures: list[Exception]) -> None:
        """Until engines are done with bucket ``k`` and all before it."""
        while self._links and not failures and self._num_loaded <= k:
            try:
                self._load_s += self._loaded(self._num_loaded, clock)
                self._num_loaded += 1
            except (ChannelError, TimeoutError) as error:
                failures.append(error)

    def _loaded(self, k: int, clock: Clock) -> float:
        """The longest that a consumer took for bucket ``k``."""
        longest = 0.0
        for consumer, link in self._links:
            answer = self._answer(link, clock, f"{consumer.engine} has not loaded bucket {k} of {self.num_buckets}")
            if not isinstance(answer, Loaded) or answer.bucket != k:
                raise ChannelError(f"{consumer.engine} failed at bucket {k}: {getattr(answer, 'error', answer)}")
            longest = max(longest, answer.seconds)
        return longest

    def _answer(self, link: Link, clock: Clock, what: str) -> FromEngine:
        while True:
            try:
                return link.receive(min(0.25, clock.left(what)))  # type: ignore[return-value]
            except TimeoutError:
                clock.check(what)

    def _tell_engines(self, error: Exception) -> None:
        for _, link in self._links:
            with contextlib.suppress(ChannelError):
                link.send(Failed(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        for _, link in self._links:
            link.close()
        self._links.clear()
        self._gatherer.close()


class Clock:
    """A deadline for one phase, and a look at whether the sync was given up meanwhile."""

    def __init__(self, timeout_s: float, is_cancelled: Callable[[], bool]) -> None:
        self._timeout_s, self._is_cancelled = timeout_s, is_cancelled
        self._deadline = time.monotonic() + timeout_s

    def left(self, what: str) -> float:
        self.check(what)
        return self._deadline - time.monotonic()

    def check(self, what: str) -> None:
        if self._is_cancelled():
            raise WeightSyncError("transfer", "it was cancelled")
        if time.monotonic() >= self._deadline:
            raise TimeoutError(f"{what} within {self._timeout_s:g} s")

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        while not is_done():
            self.check(what)
            time.sleep(_POLL_S)


def _who_joined(link: Link, token: str, timeout_s: float) -> Consumer | None:
    """The consumer at the other end, if it was told of this link."""
    try:
        message = link.receive(timeout_s)
    except (ChannelError, TimeoutError):
        return None
    if not isinstance(message, Joined) or not message.brings(token):
        return None
    return Consumer(message.engine, message.tp_rank)


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
