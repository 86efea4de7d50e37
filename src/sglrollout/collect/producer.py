"""What runs behind a collection: reads prompts, samples, rewards, filters, and keeps groups for their batch.

It never refers to the :class:`~sglrollout.collect.collector.Collector`, so that a dropped one is noticed at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import random
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from sglrollout.collect.calls import finite
from sglrollout.collect.judge import Judge
from sglrollout.collect.ledger import Ledger
from sglrollout.collect.options import CollectOptions, Source
from sglrollout.collect.pacing import Pacer
from sglrollout.collect.runs import GroupRun, Slot, Stage
from sglrollout.collect.stats import CollectStats, Tally
from sglrollout.collect.task import Task, as_task
from sglrollout.concurrency import unwrapped
from sglrollout.errors import (
    ConfigError,
    LifecycleError,
    NoEngineError,
    QueueFullError,
    RewardError,
    fresh,
)
from sglrollout.generation.batch import Ready
from sglrollout.generation.sample import Outlives, Prepared, Sample, resumable
from sglrollout.types import Completion, Group

T = TypeVar("T")

_CHUNK_TOKENS = 32  # so often a sample's tokens come in: no more of them are lost when it is cut
_CHECKPOINT_EVERY = 32
_MOST_QUEUED = 16
_POLL_S = 0.02
STATE_FORMAT = 1
STALL_S = 30.0


class Producer:
    """Runs a collection, from its source to its batches.

    Args:
        source: of the prompts.
        options: of the collection.
        ready: the running pool.
    """

    def __init__(self, source: Source, options: CollectOptions, ready: Ready) -> None:
        self.loop = asyncio.get_running_loop()
        self.options, self.tally = options, Tally(self.loop.time)
        self._source, self._sampler, self._parent = source, ready.sampler, ready.tasks
        self._pool = ready.sampler.pool
        self._judge = Judge(options.rewards, options.filters, self.tally, options.max_failures)
        self._ledger = Ledger(
            Pacer(
                options.target_groups,
                options.max_staleness,
                options.num_spare,
                self._ahead(),
                self._pool.weight_version,
            )
        )
        self._units: list[tuple[int, int, int]] = []
        self._rng = random.Random(options.seed)
        self._num_read, self._num_delivered, self._exhausted = 0, 0, False
        self._failure: Exception | None = None
        self._changed, self._room, self._wanted = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._scope = anyio.CancelScope()
        self._tasks: TaskGroup | None = None
        self.ended = asyncio.Event()

    def _ahead(self) -> int:
        """Groups that keep all engines busy, and as many that wait, so that none idles when a batch is taken."""
        capacity = sum(member.limit for member in self._pool.members)
        return max(2 * capacity // self.options.n, self.options.target_groups or 1, 1)

    @property
    def pad_id(self) -> int:
        """The model's padding token, or its end-of-sequence token, or 0."""
        tokenizer = self._sampler.tokenizer.inner if self._sampler.tokenizer is not None else None
        ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        return next((token for token in ids if token is not None), 0)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begin, in the rollout's task group."""
        self._pool.watchers.append(self._pool_changed)
        self._parent.start_soon(self._run)

    def abandon(self, reason: str = "the collection was left") -> None:
        """Abort all that runs. Nothing is delivered any more, and all of it can still be saved."""
        self._failure = self._failure or LifecycleError(reason)
        self._scope.cancel()
        for run in list(self._ledger.runs.values()):
            self._ledger.take_back(run, keep=True)
        self._notify()

    async def _run(self) -> None:
        with self._scope:
            try:
                async with anyio.create_task_group() as self._tasks:
                    self._tasks.start_soon(self._read)
                    self._tasks.start_soon(self._feed)
            except Exception as error:
                self._failure = self._failure or unwrapped(error)
            finally:
                self.ended.set()
                self._pool.watchers.remove(self._pool_changed)
                self.abandon("this rollout is closed")

    def _pool_changed(self) -> None:
        """Engines changed their state, or the weights changed."""
        if self._pool.weight_version != self._ledger.pacer.version:
            self._ledger.advance(self._pool.weight_version)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._room.set()
        if not self._ledger.pending:
            self._wanted.set()

    def _spawn(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(function, *arguments)

    # ------------------------------------------------------------ prompts

    async def _read(self) -> None:
        """Keep one prompt of the source in reserve."""
        num_to_skip = self._num_read
        try:
            async for index, item in _numbered(self._source):
                if index % _CHECKPOINT_EVERY == 0:
                    await anyio.lowlevel.checkpoint()
                if index < num_to_skip:
                    continue
                task = as_task(item, f"source[{index}]")
                prepared = self._prepare(task, f"source[{index}]")
                while self._ledger.pending:
                    self._wanted.clear()
                    await self._wanted.wait()
                self._num_read = index + 1
                self._ledger.push(GroupRun(index, task, prepared, self.options.n, self._seed()))
                self._notify()
        except asyncio.CancelledError:
            reader = asyncio.current_task()
            if reader is not None and reader.cancelling():
                raise
            raise ConfigError("source", self._source, "was cancelled while it was read") from None
        self._exhausted = True
        self._notify()

    def _seed(self) -> int | None:
        if self._sampler.info.deterministic and self.options.sampling.seed is None:
            return self._rng.getrandbits(30)
        return None

    def _prepare(self, task: Task, name: str = "source") -> Prepared | None:
        return None if self.options.play is not None else self._sampler.prepare(task.prompt, name)

    # ------------------------------------------------------------ samples

    async def _feed(self) -> None:
        """Start samples, the oldest group's first. One of them waits in the pool's queue at a time."""
        while True:
            unit = self._next_unit()
            if unit is None or self._refused():
                self._room.clear()
                await self._room.wait()
            else:
                heapq.heappop(self._units)
                await self._start_sample(*unit)

    def _refused(self) -> bool:
        """Whether engines are asleep or stale: they may take work again.

        Raises:
            NoEngineError: they are all dead, which they remain.
        """
        refusal = self._pool.dispatcher.refusal
        if isinstance(refusal, NoEngineError):
            raise fresh(refusal)
        return refusal is not None

    def _next_unit(self) -> tuple[GroupRun, int] | None:
        """The next sample to start, left in place: of the groups that run, else of the next group that may."""
        while True:
            while self._units:
                index, i, attempt = self._units[0]
                run = self._ledger.runs.get(index)
                if run is not None and run.attempt == attempt:
                    return run, i
                heapq.heappop(self._units)
            run = self._ledger.admit()
            if run is None:
                return None
            self._begin(run)

    def _begin(self, run: GroupRun) -> None:
        for i, slot in enumerate(run.slots):
            if slot.completion is None:
                self._queue(run, i)
                self.tally.num_resumed += slot.prior is not None
            elif not slot.settled and not slot.being_rewarded:
                self._spawn(self._settle, run, slot)
        if run.sampled:
            self._ledger.ended(run)
        if run.whole:
            self._spawn(self._finish, run, run.attempt)
        self._notify()

    def _queue(self, run: GroupRun, i: int) -> None:
        heapq.heappush(self._units, (run.index, i, run.attempt))
        self._room.set()

    async def _start_sample(self, run: GroupRun, i: int) -> None:
        attempt, slot = run.attempt, run.slots[i]
        if self.options.play is not None:
            scope = anyio.CancelScope()
            slot.cancel = partial(_cancel, scope)
            self._spawn(self._play, run, i, scope)
            while self._pool.dispatcher.num_queued > _MOST_QUEUED:  # noqa: ASYNC110
                await anyio.sleep(_POLL_S)  # turns of the episodes under way go first
            await anyio.lowlevel.checkpoint()
            return
        assert run.prepared is not None
        try:
            sample = await self._sampler.start(
                run.prepared,
                self.options.sampling if run.seed is None else self.options.sampling.replace(seed=run.seed),
                index=i,
                key=run.key,
                chunk_tokens=_CHUNK_TOKENS,
                timeout_s=self.options.timeout_s,
                prior=slot.prior,
                outlives=Outlives.SLEEP,
            )
        except QueueFullError:
            if run.attempt == attempt:
                self._queue(run, i)
            await anyio.sleep(_POLL_S)
            return
        if run.attempt != attempt:
            sample.cancel("its group was taken back")
            return
        slot.cancel = partial(self._cut, sample)
        slot.so_far = partial(self._so_far, sample)
        slot.last_token_s = lambda: sample.request.last_token_s
        self._spawn(self._follow, run, i, sample)

    def _cut(self, sample: Sample) -> Completion | None:
        """Abort a sample; what there is of it, if that can be resumed."""
        sample.cancel("its group was taken back")
        return self._so_far(sample)

    def _so_far(self, sample: Sample) -> Completion | None:
        if not resumable(self.options.sampling):
            return None
        completion = self._sampler.completion(sample)
        return completion if completion.token_ids else None

    async def _follow(self, run: GroupRun, i: int, sample: Sample) -> None:
        """Wait for a sample's end; then it is settled."""
        attempt, slot = run.attempt, run.slots[i]
        await sample.until_ended()
        if run.attempt != attempt:
            return
        slot.stop_following()
        self.tally.num_resumed += sample.num_resumed
        slot.completion = self._sampler.completion(sample)
        await self._settle(run, slot)

    async def _play(self, run: GroupRun, i: int, scope: anyio.CancelScope) -> None:
        """An episode: the user's own function samples."""
        attempt, slot = run.attempt, run.slots[i]
        assert self.options.play is not None
        with scope:
            completion, reward = await self.options.play(run.task)
            if run.attempt != attempt:
                return
            slot.stop_following()
            slot.completion = dataclasses.replace(completion, index=i)
            if reward is not None and completion.error is None:
                try:
                    slot.reward = finite(reward, "the episode")
                except RewardError as error:
                    slot.completion = dataclasses.replace(slot.completion, finish_reason="error", error=error)
        if slot.completion is not None:
            await self._settle(run, slot)

    # ------------------------------------------------------------ rewards and filters

    async def _settle(self, run: GroupRun, slot: Slot) -> None:
        """A sample has ended: reward it, and judge its group if it was the last."""
        if run.stage is Stage.RUNNING and run.sampled:
            self._ledger.ended(run)
            self._room.set()
        await self._judge.settle(slot, run.task)
        if run.stage is Stage.ENDED and run.whole and any(slot is other for other in run.slots):
            await self._finish(run, run.attempt)
        else:
            self._notify()  # a loop that waits while engines sleep waited for this reward, too

    async def _finish(self, run: GroupRun, attempt: int) -> None:
        """A group is whole: it is kept for a batch, or filtered out."""
        if run.attempt != attempt:
            return
        group, verdict = await self._judge.judge(run)
        if run.attempt != attempt:
            return
        if verdict.keep:
            self._ledger.finish(run, group)
        else:
            self._ledger.forget(run)
            self.tally.filtered_out(verdict.reason, self.options.target_groups or 1)
        self._notify()

    # ------------------------------------------------------------ batches

    async def next(self, build: Callable[[list[Group]], Awaitable[T]]) -> T | None:
        """The next batch; ``None`` when there is no more.

        Args:
            build: makes it of the groups. They are delivered once that has returned: cancelling it loses nothing.
        """
        self._ledger.ask()
        self._notify()
        begun = self.loop.time()
        while True:
            if self._failure is not None:
                raise fresh(self._failure)
            chosen = self._choose()
            if chosen:
                groups = [run.group for run in chosen if run.group is not None]
                batch = await build(groups)
                still = all(run.group is group for run, group in zip(chosen, groups, strict=True))
                if still and self._failure is None:  # and not overtaken by a sync meanwhile
                    self._deliver(chosen, groups, self.loop.time() - begun)
                    return batch
                continue
            if self._exhausted and not self._ledger.pending and not self._ledger.runs:
                if self._num_delivered == 0 and self.tally.num_failed and set(self.tally.filtered) <= {"all_failed"}:
                    raise self.tally.budget_error()
                return None
            refusal = self._pool.dispatcher.refusal
            if refusal is not None and not self._judge.num_busy:
                raise fresh(refusal)
            self._changed.clear()
            await self._changed.wait()

    def _choose(self) -> list[GroupRun]:
        """The groups of a batch that may be taken now; none if it must wait."""
        ledger, size = self._ledger, self.options.target_groups
        if size is not None and len(ledger.finished) >= size:
            return ledger.choose(size)
        if not self._exhausted or ledger.pending or len(ledger.finished) < len(ledger.runs):
            return []
        if size is not None and self.options.drop_last:
            for run in list(ledger.finished.values()):
                ledger.forget(run)
        return ledger.choose(None)

    def _deliver(self, chosen: list[GroupRun], groups: list[Group], waited_s: float) -> None:
        ledger = self._ledger
        ledger.deliver(chosen)
        self._num_delivered += len(chosen)
        if self.options.surplus != "run":
            kept = self.options.surplus == "partial"
            self.tally.num_surplus += ledger.set_aside_surplus(self.options.num_spare, kept)
        self.tally.num_restarted = ledger.num_expired
        self.tally.delivered(groups, ledger.pacer.version, waited_s)
        self._notify()

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """All that is not delivered, as JSON values."""
        version, numbers, gauss = self._rng.getstate()
        return {
            "format": STATE_FORMAT,
            "num_read": self._num_read,
            "num_delivered": self._num_delivered,
            "weight_version": self._ledger.pacer.version,
            "rng": [version, list(numbers), gauss],
            "groups": [run.to_record() for run in self._ledger.everything()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Before :meth:`start`."""
        try:
            version, numbers, gauss = state["rng"]
            self._rng.setstate((version, tuple(numbers), gauss))
            self._num_read, self._num_delivered = state["num_read"], state["num_delivered"]
            version_then = int(state["weight_version"])
            runs = [GroupRun.from_record(record, self._prepare) for record in state["groups"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError("state", "...", f"must be a state_dict() of a collection ({error!r})") from error
        if version_then > self._ledger.pacer.version:
            raise LifecycleError(
                f"the state was saved under weight version {version_then}, and the engines are at "
                f"{self._ledger.pacer.version}: sync the restored weights first, with version={version_then} or later"
            )
        for run in runs:
            if len(run.slots) != self.options.n:
                raise ConfigError("n", self.options.n, f"must be that of the saved state, {len(run.slots)}")
            self._drop_what_cannot_go_on(run)
            self._ledger.push(run)

    def _drop_what_cannot_go_on(self, run: GroupRun) -> None:
        """The sampling options may be others than those that the state was saved under."""
        for slot in run.slots:
            most = self.options.sampling.max_new_tokens if resumable(self.options.sampling) else 0
            if slot.prior is not None and len(slot.prior.token_ids) >= most:
                slot.prior = None

    def stats(self) -> CollectStats:
        """Where everything is, now."""
        slots = [slot for run in self._ledger.runs.values() for slot in run.slots]
        live = [slot for slot in slots if slot.cancel is not None]
        now = self.loop.time()
        return CollectStats(
            num_queued=sum(slot.completion is None and slot.cancel is None for slot in slots),
            num_active=len(live),
            num_stalled=sum(slot.last_token_s is not None and now - slot.last_token_s() > STALL_S for slot in live),
            num_rewarding=self._judge.num_busy,
            num_ready=len(self._ledger.finished),
            num_delivered=self._num_delivered,
            num_failed=self.tally.num_failed,
            filtered=dict(self.tally.filtered),
            num_surplus=self.tally.num_surplus,
            num_resumed=self.tally.num_resumed,
            num_restarted=self._ledger.num_expired,
            num_tokens=self.tally.num_tokens,
            tokens_per_s=self.tally.tokens_per_s(),
            weight_version=self._ledger.pacer.version,
            staleness_max=self._ledger.staleness_max,
        )


def _cancel(scope: anyio.CancelScope) -> None:
    scope.cancel()


async def _numbered(source: Source) -> AsyncIterator[tuple[int, Any]]:
    if isinstance(source, AsyncIterable):
        index = 0
        async for item in source:
            yield index, item
            index += 1
        return
    for index, item in enumerate(source):
        yield index, item
