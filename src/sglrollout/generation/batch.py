"""Many prompts at once: groups as they complete."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup

from sglrollout.concurrency import Abandonable
from sglrollout.config import Sampling
from sglrollout.errors import ConfigError, LifecycleError, fresh
from sglrollout.generation.sample import Prepared, Sample
from sglrollout.generation.sampler import Sampler
from sglrollout.types import Group, Prompt

OnError = Literal["raise", "return"]
_AHEAD_GROUPS = 64
_CHECKPOINT_EVERY = 32
_PREPARED_AT_ONCE = 1000
_group_keys = itertools.count()


class Ready(NamedTuple):
    """A running pool: what makes samples, and where background tasks live."""

    sampler: Sampler
    tasks: TaskGroup


class BatchOptions(NamedTuple):
    """What one call asks of every group. See :meth:`sglrollout.AsyncRolloutEngine.generate`."""

    sampling: Sampling
    n: int = 1
    timeout_s: float | None = None
    on_error: OnError = "raise"
    bounded: bool = False
    on_sample: Callable[[int], None] | None = None


class _Run:
    """One group while its samples run."""

    __slots__ = ("index", "key", "num_missing", "prepared", "samples")

    def __init__(self, prepared: Prepared, index: int, n: int) -> None:
        self.prepared, self.index, self.num_missing = prepared, index, n
        self.key = next(_group_keys) if n > 1 else None
        self.samples: list[Sample] = []


class _Batch:
    """What runs behind a GroupStream. It never refers to that, so that a dropped GroupStream is noticed at once."""

    def __init__(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        options: BatchOptions,
        ready: Ready,
        still_ready: Callable[[], Awaitable[Ready]],
    ) -> None:
        self._still_ready = still_ready
        self.loop = asyncio.get_running_loop()
        self._prompts, self._options = prompts, options
        self._sampler, self._tasks = ready
        self._scope = anyio.CancelScope()
        self._running: dict[int, _Run] = {}
        self._finished: deque[_Run] = deque()
        self._failure: Exception | None = None
        self._changed, self._room = asyncio.Event(), asyncio.Event()
        self._ahead = self._groups_ahead() if options.bounded else math.inf
        self._fed = False

    def _groups_ahead(self) -> int:
        """Looks at every engine: not for each call of one prompt."""
        capacity = sum(member.limit for member in self._sampler.pool.members)
        return max(_AHEAD_GROUPS, 2 * capacity // self._options.n)

    async def check(self) -> AsyncIterator[Prepared]:
        """The prompts, checked as far as they can be before any is started.

        Raises:
            ConfigError: nothing was started.
        """
        self._sampler.check(self._options.sampling)
        return await self._prepare()

    def feed(self, prompts: AsyncIterator[Prepared]) -> None:
        """Begin, in the background."""
        self._tasks.start_soon(self._feed, prompts)

    async def next(self) -> Group | None:
        """The next finished group; ``None`` when there are no more."""
        while True:
            if self._failure is not None:
                raise fresh(self._failure)
            if self._finished:
                return self._group(self._finished.popleft())
            if self._fed and not self._running:
                return None
            self._changed.clear()
            await self._changed.wait()

    def abandon(self) -> None:
        """Stop feeding, and abort what runs."""
        self._scope.cancel()
        runs, self._running = self._running, {}
        for run in runs.values():
            for sample in run.samples:
                sample.cancel("the call was left")

    def _group(self, run: _Run) -> Group:
        self._room.set()
        completions = tuple(self._sampler.completion(sample) for sample in run.samples)
        return Group(run.prepared.prompt, run.prepared.ids, completions, run.index)

    async def _prepare(self) -> AsyncIterator[Prepared]:
        """Check prompts that are all there before any is started; check the others as they come."""
        prepare, prompts = self._sampler.prepare, self._prompts
        if isinstance(prompts, Sequence):
            checked: list[Prepared] = []
            for begin in range(0, len(prompts), _PREPARED_AT_ONCE):
                some = range(begin, min(begin + _PREPARED_AT_ONCE, len(prompts)))
                checked += await anyio.to_thread.run_sync(_prepare_some, prepare, prompts, some)
                await self._still_ready()
            return _as_async(checked)
        return _prepare_lazily(prepare, prompts)

    async def _feed(self, prompts: AsyncIterator[Prepared]) -> None:
        """Runs in the pool's task group; whatever goes wrong here is raised from the loop."""
        with self._scope:
            try:
                index = 0
                async for prepared in prompts:
                    await self._feed_group(prepared, index)
                    index += 1
                self._fed = True
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # Not ours: the source awaited something that was cancelled. It must not pass for a cancelled pool.
                self._failure = self._failure or ConfigError(
                    "prompts", self._prompts, "was cancelled while it was read"
                )
            except Exception as error:
                self._failure = self._failure or error
            finally:
                if not self._fed:  # cancelled: the loop was left, or the pool is being closed under it
                    self._failure = self._failure or LifecycleError("this rollout is closed")
                self._changed.set()

    async def _feed_group(self, prepared: Prepared, index: int) -> None:
        options, sampler = self._options, self._sampler
        while len(self._finished) + len(self._running) >= self._ahead:
            self._room.clear()
            await self._room.wait()
        run = self._running[index] = _Run(prepared, index, options.n)
        for i in range(options.n):
            sample = await sampler.start(
                prepared,
                options.sampling,
                index=i,
                key=run.key,
                timeout_s=options.timeout_s,
                on_end=lambda sample, run=run: self._sample_ended(run, sample),  # type: ignore[misc]
            )
            run.samples.append(sample)
            self._finish(run)
            if self._scope.cancel_called:
                sample.cancel("the call was left")  # its slot was granted in the very instant in which that happened
            if (index * options.n + i) % _CHECKPOINT_EVERY == 0:
                await anyio.lowlevel.checkpoint()

    def _sample_ended(self, run: _Run, sample: Sample) -> None:
        options, request = self._options, sample.request
        if options.on_sample is not None:
            options.on_sample(len(request.token_ids))
        if request.error is not None and options.on_error == "raise" and self._failure is None:
            self._failure = request.error
        run.num_missing -= 1
        self._finish(run)
        self._changed.set()

    def _finish(self, run: _Run) -> None:
        """Hand the group over once its samples have ended; one may end before its engine has quite taken it."""
        whole = run.num_missing == 0 and len(run.samples) == self._options.n
        if whole and self._running.pop(run.index, None) is not None:
            self._finished.append(run)
            self._changed.set()


class GroupStream(Abandonable):
    """Groups of one call, by ``async for``, in the order in which they complete.

    Samples are fed in prompt order; the feeder waits for a slot for each, so that one sample of the call stands in the
    pool's queue at a time, however many prompts there are. With ``bounded`` it also stays a limited number of groups
    ahead of the loop that takes them. Leaving the loop early aborts what still runs, as with a ``Stream``.
    """

    def __init__(
        self,
        ready: Callable[[], Awaitable[Ready]],
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        options: BatchOptions,
    ) -> None:
        self._ready, self._prompts, self._options = ready, prompts, options
        self._batch: _Batch | None = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._batch is None:
                self._batch = _Batch(self._prompts, self._options, await self._ready(), self._ready)
                prompts = await self._batch.check()
                await self._ready()  # which it may no longer be
                self._batch.feed(prompts)
            group = await self._batch.next()
        except BaseException:
            self._abandon()
            raise
        if group is None:
            self._over = True
            raise StopAsyncIteration
        return group

    def _abandon(self) -> None:
        self._over = True
        if self._batch is not None:
            self._batch.abandon()

    def __del__(self) -> None:
        # As in Stream: a loop left by `break` drops this object, possibly on another thread.
        if not self._over and self._batch is not None and not self._batch.loop.is_closed():
            self._batch.loop.call_soon_threadsafe(self._batch.abandon)


def _prepare_some(
    prepare: Callable[[Prompt, str], Prepared], prompts: Sequence[Prompt], indices: range
) -> list[Prepared]:
    return [prepare(prompts[i], f"prompts[{i}]") for i in indices]


async def _as_async(items: Iterable[Prepared]) -> AsyncIterator[Prepared]:
    for item in items:
        yield item


async def _prepare_lazily(
    prepare: Callable[[Prompt, str], Prepared], prompts: Iterable[Prompt] | AsyncIterable[Prompt]
) -> AsyncIterator[Prepared]:
    index = 0
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prepare(prompt, f"prompts[{index}]")
            index += 1
        return
    for prompt in prompts:
        yield prepare(prompt, f"prompts[{index}]")
        index += 1
