"""The public end of a collection: batches, by ``async for`` or by ``await``."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread

from sglrollout.collect.options import CollectOptions, Source
from sglrollout.collect.producer import STATE_FORMAT, Producer
from sglrollout.errors import ConfigError, LifecycleError
from sglrollout.generation.batch import Ready
from sglrollout.observe import progress
from sglrollout.types import Group

if TYPE_CHECKING:
    from sglrollout.collect.batch import Padding, RolloutBatch
    from sglrollout.collect.stats import CollectReport, CollectStats


class Collector:
    """Batches of rewarded groups, made in the background while the trainer trains.

    ``async for batch in collector`` gives one after another; ``await collector`` gives the next. It starts with the
    first, and stops reading prompts, sampling and rewarding when it is dropped, closed, or left by ``async with``.
    """

    def __init__(
        self,
        ready: Callable[[], Awaitable[Ready]],
        source: Source,
        options: CollectOptions,
        padding: Padding,
        show: bool,
        on_batch: Callable[[CollectReport], None] | None = None,
    ) -> None:
        self._ready, self._source, self._options, self._padding, self._show = ready, source, options, padding, show
        self._on_batch = on_batch
        self._producer: Producer | None = None
        self._state: dict[str, Any] | None = None
        self._over = self._waiting = self._exhausted = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RolloutBatch:
        batch = await self._next()
        if batch is None:
            raise StopAsyncIteration
        return batch

    def __await__(self) -> Generator[Any, None, RolloutBatch]:
        return self._only().__await__()

    async def _only(self) -> RolloutBatch:
        batch = await self._next()
        if batch is None:
            raise LifecycleError(self._why_no_more())
        return batch

    def _why_no_more(self) -> str:
        if self._producer is None or not self._exhausted:
            return "this collection was closed"
        filtered = ", ".join(f"{count} {reason}" for reason, count in self._producer.tally.filtered.items())
        return f"this collection has no more groups: its source is exhausted (filtered out: {filtered or 'none'})"

    async def _next(self) -> RolloutBatch | None:
        if self._over:
            return None
        if self._waiting:
            raise LifecycleError("another task is waiting for this collection's next batch")
        self._waiting = True
        try:
            producer = await self._started()
            with progress.collecting(producer.stats, self._options.target_groups, self._show):
                batch: RolloutBatch | None = await producer.next(self._build)
        finally:
            self._waiting = False
        if batch is None:
            self._exhausted = True
            self._abandon()
            return None
        report = producer.tally.report
        if report is not None and self._on_batch is not None:
            self._on_batch(report)
        return dataclasses.replace(batch, report=report)

    async def _started(self) -> Producer:
        if self._producer is None:
            ready = await self._ready()
            if self._over:
                raise LifecycleError("this collection was closed")
            self._check(ready)
            producer = Producer(self._source, self._options, ready)
            if self._state is not None:
                producer.load_state_dict(self._state)
            producer.start()
            self._producer = producer
        return self._producer

    def _check(self, ready: Ready) -> None:
        """What only running engines can tell."""
        ready.sampler.check(self._options.sampling)
        if self._options.seed is not None and not ready.sampler.info.deterministic:
            raise ConfigError("seed", self._options.seed, "takes effect only with RolloutConfig(deterministic=True)")

    async def _build(self, groups: list[Group]) -> RolloutBatch:
        from sglrollout.collect.batch import RolloutBatch

        assert self._producer is not None
        return await anyio.to_thread.run_sync(
            partial(RolloutBatch.from_groups, groups, padding=self._padding, pad_id=self._producer.pad_id)
        )

    # ------------------------------------------------------------ what it is doing

    @property
    def stats(self) -> CollectStats | None:
        """Where everything is, now; ``None`` before it has started."""
        return self._producer.stats() if self._producer is not None else None

    @property
    def report(self) -> CollectReport | None:
        """What the latest batch was like, and what has happened since the one before it."""
        return self._producer.tally.report if self._producer is not None else None

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on from here without losing or repeating a prompt, as JSON values.

        Prompts that were read and not delivered, with what was sampled of them and their rewards; how far the source
        was read; the state of the random numbers. Batches that were taken are not in it: save it with a checkpoint of
        the trainer that has trained on them.

        Raises:
            ConfigError: a prompt or its data are not JSON values.
        """
        if self._producer is not None:
            return self._producer.state_dict()
        if self._state is not None:
            return self._state
        raise LifecycleError("this collection has not started: there is nothing to save")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. The source must yield the same prompts again; those that were read are skipped.

        The first batch raises :class:`LifecycleError` while engines have weights of an earlier version than the state.

        Raises:
            LifecycleError: it has started.
            ConfigError: not a state, or one of another version.
        """
        if self._producer is not None:
            raise LifecycleError("this collection has started: load its state before the first batch")
        if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
            raise ConfigError("state", state, f"must be a state_dict() of a collection, of format {STATE_FORMAT}")
        self._state = state

    # ------------------------------------------------------------ life

    async def aclose(self) -> None:
        """Abort what still runs, and wait until it has ended."""
        self._abandon()
        if self._producer is not None:
            await self._producer.ended.wait()  # not shielded: a reward or an episode may call this, and is cancelled

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _abandon(self) -> None:
        self._over = True
        if self._producer is not None:
            self._producer.abandon()

    def __del__(self) -> None:
        # As in Stream: a loop left by `break` drops this object, possibly on another thread.
        if not self._over and self._producer is not None and not self._producer.loop.is_closed():
            self._producer.loop.call_soon_threadsafe(self._producer.abandon)
