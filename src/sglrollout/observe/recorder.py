"""What a rollout keeps of its past: it is told of samples, looks at the pool when that changes, and once a second."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import anyio

from sglrollout.engine.protocol import Request
from sglrollout.errors import EngineDiedError, StaleWeightsError
from sglrollout.observe.metrics import EngineMetrics, Metrics
from sglrollout.observe.series import TOKENS, VERSIONS, Series
from sglrollout.pool.pool import SYNC, EngineState, Member, Pool
from sglrollout.pool.sleep import SleepReport
from sglrollout.weights.report import SyncReport

PHASES = ("plan", "wake", "pause", "gather", "load", "transfer", "flush", "resume", "total")
"""Of a sync, as :class:`SyncReport` has them."""
NUM_POINTS = 2048
_TICK_S = 1.0
_RATE_S = 10
_NUM_SYNCS = 512
_NO_ENGINE = ""
_WHOLE = ("stop", "length")
_USUAL = EngineState.READY.value
_LOST = (EngineState.RESTARTING.value, EngineState.DEAD.value)


class Sampled(Protocol):
    """What is read of a sample."""

    request: Request
    asked_s: float
    """When it was asked for, or lost its last engine."""
    held_s: float | None
    """When it got its slot, unless it waits for one."""
    num_before: int
    """Tokens that it had by then."""


class Collected(Protocol):
    """What is read of a collection's batch."""

    @property
    def staleness_mean(self) -> float: ...
    @property
    def staleness_max(self) -> int: ...


class Stay(NamedTuple):
    """A sample in one engine, or in the queue alone (``held_s`` is ``None``). Times are of ``time.monotonic``."""

    engine: str
    asked_s: float
    held_s: float | None
    first_token_s: float | None
    end_s: float
    num_tokens: int
    outcome: str


class Spell(NamedTuple):
    """A state of an engine, or what the whole pool did (``engine`` is empty)."""

    engine: str
    what: str
    begin_s: float
    end_s: float


class Point(NamedTuple):
    """The pool at one time."""

    when_s: float
    num_queued: int
    num_inflight: int
    num_running: int
    num_waiting: int
    kv_usage_mean: float
    kv_usage_max: float
    num_tokens: int


class Counts:
    """What is counted of one engine; of none, for samples that never reached one."""

    __slots__ = (
        "finish_reasons",
        "num_cached_tokens",
        "num_deaths",
        "num_failovers",
        "num_interrupted",
        "num_prompt_tokens",
        "num_restarts",
        "num_tokens",
    )

    def __init__(self) -> None:
        self.finish_reasons: defaultdict[str, int] = defaultdict(int)
        self.num_tokens = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_failovers = self.num_interrupted = self.num_deaths = self.num_restarts = 0


class Recorder:
    """Written on the event loop, read from any thread: what is read is copied in one step, or is one number.

    Args:
        num_events: stays of samples, and as many spells, that are kept for a timeline; the oldest go first.
    """

    def __init__(self, num_events: int) -> None:
        self.num_events = num_events
        self.begun_s = time.monotonic()
        self.queue_s, self.prefill_s, self.decode_s, self.total_s = Series(), Series(), Series(), Series()
        self.response_len, self.staleness = Series(TOKENS), Series(VERSIONS)
        self.sync_s = {phase: Series() for phase in PHASES}
        self.num_failed_syncs = self.num_sleeps = self.num_batches = 0
        self.syncs: deque[tuple[float, SyncReport]] = deque(maxlen=_NUM_SYNCS)
        self.batches: deque[tuple[float, float, int]] = deque(maxlen=NUM_POINTS)
        """When each was delivered, and its staleness: mean and max."""
        self._sleep: SleepReport | None = None
        self._pool: Pool | None = None
        self._ended_s: float | None = None
        self._counts: defaultdict[str, Counts] = defaultdict(Counts)
        self._live: set[Sampled] = set()
        self._stays: deque[Stay] = deque(maxlen=num_events)
        self._spells: deque[Spell] = deque(maxlen=num_events)
        self._states: dict[str, tuple[str, float]] = {}
        """By engine: its state, and since when."""
        self._busy, self._busy_since_s, self._num_syncs_before = "", 0.0, 0
        self._points: list[Point] = []
        self._every_s = _TICK_S
        self._num_tokens: dict[str, int] = {}
        """By engine, when it was last asked for."""
        self._recent: deque[tuple[float, dict[str, int]]] = deque(maxlen=_RATE_S + 1)

    # ------------------------------------------------------------ what it is told

    def held(self, sample: Sampled) -> None:
        """A sample got a slot."""
        self._live.add(sample)

    def left(self, sample: Sampled, error: Exception | None) -> None:
        """A sample lost its engine, and goes on in another one, or later."""
        lost = isinstance(error, (EngineDiedError, StaleWeightsError))
        counts = self._leave(sample, time.monotonic(), "failover" if lost else "interrupted")
        if lost:
            counts.num_failovers += 1
        else:
            counts.num_interrupted += 1

    def ended(self, sample: Sampled) -> None:
        """A sample has ended."""
        request = sample.request
        finish, end_s = request.finish, request.finished_s
        assert finish is not None
        assert end_s is not None
        counts = self._leave(sample, end_s, finish.reason)
        counts.finish_reasons[finish.reason] += 1
        counts.num_prompt_tokens += finish.prompt_tokens
        counts.num_cached_tokens += finish.cached_tokens
        if request.engine:
            self.queue_s.add(request.queue_s)
        if finish.reason not in _WHOLE:
            return
        self.total_s.add(end_s - request.created_s)
        self.response_len.add(len(request.token_ids))
        if request.first_token_s is not None:
            self.decode_s.add(end_s - request.first_token_s)
        if self._pool is not None and request.token_ids:
            self.staleness.add(self._pool.weight_version - request.first_version)

    def _leave(self, sample: Sampled, end_s: float, outcome: str) -> Counts:
        request, held_s, num_tokens = sample.request, sample.held_s, 0
        counts, first_s = self._counts[request.engine], request.first_token_s
        if held_s is not None:
            self._live.discard(sample)
            num_tokens = len(request.token_ids) - sample.num_before
            counts.num_tokens += num_tokens
            if first_s is not None and first_s >= held_s:
                self.prefill_s.add(first_s - held_s)
        if self.num_events:
            self._stays.append(Stay(request.engine, sample.asked_s, held_s, first_s, end_s, num_tokens, outcome))
        return counts

    def synced(self, report: SyncReport) -> None:
        """A weight sync went well."""
        for phase, series in self.sync_s.items():
            series.add(getattr(report, f"{phase}_s"))
        self.syncs.append((time.monotonic(), report))

    def slept(self, report: SleepReport) -> None:
        """Engines gave memory back."""
        self.num_sleeps += 1
        self._sleep = report

    def collected(self, report: Collected) -> None:
        """A collection delivered a batch."""
        self.num_batches += 1
        self.batches.append((time.monotonic(), report.staleness_mean, report.staleness_max))

    # ------------------------------------------------------------ what it looks at

    @contextmanager
    def watching(self, pool: Pool) -> Iterator[None]:
        """Follow a pool that has not been started yet."""
        self._pool, self.begun_s = pool, time.monotonic()
        self._states = {member.name: (member.state.value, self.begun_s) for member in pool.members}
        self._recent.append((self.begun_s, {}))
        pool.on_sync = self.synced
        try:
            with pool.watched_by(self._look):
                yield
        finally:
            self._ended_s = time.monotonic()

    def _look(self) -> None:
        pool = self._pool
        assert pool is not None
        now = time.monotonic()
        for member in pool.members:
            state = member.state.value
            before, since_s = self._states.setdefault(member.name, (state, now))
            if state == before:
                continue
            self._states[member.name] = (state, now)
            if before != _USUAL:
                self._spells.append(Spell(member.name, before, since_s, now))
            self._counts[member.name].num_deaths += state in _LOST and before not in _LOST
            self._counts[member.name].num_restarts += before in _LOST and state not in _LOST
        if pool.busy != self._busy:
            if self._busy:
                self._spells.append(Spell(_NO_ENGINE, self._busy, self._busy_since_s, now))
                self.num_failed_syncs += self._busy == SYNC and self.sync_s["total"].count == self._num_syncs_before
            self._busy, self._busy_since_s = pool.busy, now
            self._num_syncs_before = self.sync_s["total"].count

    async def run(self) -> None:
        """Once a second."""
        while True:
            self.tick()
            await anyio.sleep(_TICK_S)

    def tick(self) -> None:
        """Note how the pool is. When there are too many points, every other one goes, and fewer come from then on."""
        now, num_tokens = time.monotonic(), self._tokens()
        self._recent.append((now, num_tokens))
        if self._points and now < self._points[-1].when_s + self._every_s - _TICK_S / 2:
            return
        if len(self._points) >= NUM_POINTS:
            self._points = self._points[::2]
            self._every_s *= 2
        self._points.append(self._point(now, sum(num_tokens.values())))

    def _point(self, now: float, num_tokens: int) -> Point:
        pool = self._pool
        assert pool is not None
        loads = [load for member in pool.serving if (load := member.engine.load) is not None]
        usages = [load.kv_usage for load in loads]
        return Point(
            now,
            pool.dispatcher.num_queued,
            sum(pool.dispatcher.num_inflight(member) for member in pool.members),
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(usages) / len(usages) if usages else 0.0,
            max(usages, default=0.0),
            num_tokens,
        )

    def _tokens(self) -> dict[str, int]:
        """Sampled so far, by engine."""
        # Counts first: read by another thread, a sample that ends meanwhile may be missed, but is never counted twice.
        found = {name: counts.num_tokens for name, counts in list(self._counts.items())}
        for sample in list(self._live):
            engine = sample.request.engine
            found[engine] = found.get(engine, 0) + max(0, len(sample.request.token_ids) - sample.num_before)
        self._num_tokens = {name: max(count, self._num_tokens.get(name, 0)) for name, count in found.items()}
        return self._num_tokens

    # ------------------------------------------------------------ what can be read

    @property
    def now_s(self) -> float:
        """Once the rollout is closed, when that was."""
        return time.monotonic() if self._ended_s is None else self._ended_s

    @property
    def engines(self) -> list[str]:
        """Their names."""
        return list(self._states)

    @property
    def points(self) -> list[Point]:
        """The whole past, in at most 2,048 points."""
        return list(self._points)

    @property
    def stays(self) -> list[Stay]:
        """Those that are over, in the order of their ends, and those that are not."""
        now = self.now_s
        running = [
            Stay(
                sample.request.engine,
                sample.asked_s,
                sample.held_s,
                sample.request.first_token_s,
                now,
                max(0, len(sample.request.token_ids) - sample.num_before),
                "running",
            )
            for sample in list(self._live)
        ]
        return [*list(self._stays), *running]

    @property
    def spells(self) -> list[Spell]:
        """The same."""
        now = self.now_s
        open_ = [
            Spell(name, state, since_s, now) for name, (state, since_s) in list(self._states.items()) if state != _USUAL
        ]
        if self._busy:
            open_.append(Spell(_NO_ENGINE, self._busy, self._busy_since_s, now))
        return [*list(self._spells), *open_]

    def metrics(self) -> Metrics:
        """All numbers, now."""
        now, pool, num_tokens = self.now_s, self._pool, self._tokens()
        members = pool.members if pool is not None else []
        engines = tuple(self._engine(member, now, num_tokens) for member in members)
        reasons: dict[str, int] = dict(self._counts[_NO_ENGINE].finish_reasons)
        for engine in engines:
            for reason, count in engine.finish_reasons.items():
                reasons[reason] = reasons.get(reason, 0) + count
        num_prompt_tokens = sum(engine.num_prompt_tokens for engine in engines)
        num_cached_tokens = sum(engine.num_cached_tokens for engine in engines)
        num_whole = sum(reasons.get(reason, 0) for reason in _WHOLE)
        usages = [engine.kv_usage for engine in engines if engine.kv_usage is not None]
        batch = self.batches[-1] if self.batches else None
        return Metrics(
            seconds=now - self.begun_s if pool is not None else 0.0,
            weight_version=pool.weight_version if pool is not None else 0,
            num_queued=pool.dispatcher.num_queued if pool is not None else 0,
            num_inflight=sum(engine.num_inflight for engine in engines),
            num_running=sum(engine.num_running or 0 for engine in engines),
            num_waiting=sum(engine.num_waiting or 0 for engine in engines),
            kv_usage_mean=sum(usages) / len(usages) if usages else 0.0,
            kv_usage_max=max(usages, default=0.0),
            tokens_per_s=sum(engine.tokens_per_s for engine in engines),
            num_tokens=sum(engine.num_tokens for engine in engines),
            num_samples=sum(reasons.values()),
            finish_reasons=reasons,
            truncated_ratio=reasons.get("length", 0) / num_whole if num_whole else 0.0,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            prefix_cache_hit_rate=num_cached_tokens / num_prompt_tokens if num_prompt_tokens else 0.0,
            num_failovers=sum(engine.num_failovers for engine in engines),
            num_interrupted=sum(engine.num_interrupted for engine in engines),
            num_deaths=sum(engine.num_deaths for engine in engines),
            num_restarts=sum(engine.num_restarts for engine in engines),
            queue_s=self.queue_s.summary(),
            prefill_s=self.prefill_s.summary(),
            decode_s=self.decode_s.summary(),
            total_s=self.total_s.summary(),
            response_len=self.response_len.summary(),
            staleness=self.staleness.summary(),
            num_batches=self.num_batches,
            batch_staleness_mean=batch[1] if batch is not None else None,
            batch_staleness_max=batch[2] if batch is not None else None,
            num_syncs=self.sync_s["total"].count,
            num_failed_syncs=self.num_failed_syncs,
            sync_s={phase: series.summary() for phase, series in self.sync_s.items()},
            last_sync=self.syncs[-1][1] if self.syncs else None,
            num_sleeps=self.num_sleeps,
            engines=engines,
        )

    def _engine(self, member: Member, now: float, num_tokens: dict[str, int]) -> EngineMetrics:
        assert self._pool is not None
        name, counts, sleep = member.name, self._counts[member.name], self._sleep
        load = member.engine.load if member.serving else None
        since_s, before = self._recent[0]
        total = num_tokens.get(name, 0)
        return EngineMetrics(
            name=name,
            state=member.state.value,
            num_inflight=self._pool.dispatcher.num_inflight(member),
            limit=member.limit,
            num_running=load.num_running if load is not None else None,
            num_waiting=load.num_waiting if load is not None else None,
            kv_usage=load.kv_usage if load is not None else None,
            cache_hit_rate=load.cache_hit_rate if load is not None else None,
            tokens_per_s=(total - before.get(name, 0)) / max(now - since_s, 1e-9),
            num_tokens=total,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            finish_reasons=dict(counts.finish_reasons),
            num_failovers=counts.num_failovers,
            num_interrupted=counts.num_interrupted,
            num_deaths=counts.num_deaths,
            num_restarts=counts.num_restarts,
            freed_bytes=dict(sleep.freed_bytes.get(name, {})) if sleep is not None else {},
            used_bytes=sleep.used_bytes.get(name) if sleep is not None else None,
            residual_bytes=sleep.residual_bytes.get(name) if sleep is not None else None,
        )
