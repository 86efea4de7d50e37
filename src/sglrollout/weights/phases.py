"""Phases of a collective call: every rank does its part, then all hear how it went on all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from sglrollout.errors import EngineError, WeightSyncError
from sglrollout.weights.control import Ranks
from sglrollout.weights.worker import Worker

T = TypeVar("T")


class Phases:
    """Runs phases on this rank and agrees on each with the others, on the syncer's thread."""

    def __init__(self, ranks: Ranks, worker: Worker) -> None:
        self._ranks, self._worker = ranks, worker

    async def run(self, phase: str, work: Callable[[], Awaitable[T]], within_s: float | None = None) -> list[T]:
        """Do this rank's part of a phase; then all hear how it went on all. Every rank's value, or one error."""
        value, failure = None, None
        try:
            value = await work()
        except Exception as error:
            failure = error
        except BaseException:
            self._ranks.leave(phase)
            raise
        try:
            return await self._worker.run(lambda: self._ranks.agree(phase, value, failure, within_s))
        except asyncio.CancelledError:
            self._ranks.leave(phase)
            raise

    async def alone(self, phase: str, work: Callable[[], Awaitable[T]]) -> T:
        """What this rank does for itself before a phase. If it gets no further, it agrees with the others on nothing
        any more."""
        try:
            return await work()
        except BaseException:
            self._ranks.leave(phase)
            raise


async def together(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """All at once. Of several failures the most telling is raised: an engine's own rather than that a link broke."""
    failures: list[Exception] = []

    async def guarded(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(guarded, call)
    if failures:
        raise min(failures, key=lambda error: not isinstance(error, (WeightSyncError, EngineError)))


async def beside(tell: Callable[[anyio.Event], Awaitable[None]] | None, work: Callable[[], Awaitable[None]]) -> None:
    """``work`` on this rank while engines do as they are told, after they were: Python does one thing at a time, and
    engines should not wait for ours."""
    told = anyio.Event()

    async def work_then() -> None:
        if tell is not None:
            await told.wait()
        await work()

    async def tell_first() -> None:
        try:
            if tell is not None:
                await tell(told)
        finally:
            told.set()

    await together([tell_first, work_then])
