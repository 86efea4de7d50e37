"""Small helpers over anyio.  Imports nothing of ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Self

import anyio


class Abandonable(ABC):
    """What is ended by :meth:`aclose`, and at the end of its ``async with``."""

    @abstractmethod
    def _abandon(self) -> None:
        """End what still runs. Safe to call twice."""

    async def aclose(self) -> None:
        """End what still runs, and abort its samples."""
        self._abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()


async def in_parallel(calls: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run all calls at once; the first exception, unwrapped, cancels the others and is raised."""
    try:
        async with anyio.create_task_group() as tasks:
            for call in calls:
                tasks.start_soon(_await, call)
    except ExceptionGroup as group:
        raise unwrapped(group) from None


async def to_the_end(calls: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Run all calls at once, each to its end; then the first exception is raised, if there was one."""
    failures: list[Exception] = []

    async def guarded(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except Exception as error:
            failures.append(error)

    await in_parallel(partial(guarded, call) for call in calls)
    if failures:
        raise failures[0]


async def _await(call: Callable[[], Awaitable[object]]) -> None:
    await call()


def unwrapped(error: Exception) -> Exception:
    """The first plain exception of a group: callers catch types, not groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
