"""Chooses the engine for each sample, and throttles.  Every path goes through here: stream, batch, group, session."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

import anyio

from sglrollout.errors import NoEngineError, QueueFullError, RequestTimeoutError, fresh

_AFFINITY_MEMORY = 100_000
_SLACK_SHARE = 0.25
_SLACK_FLOOR = 8


class Target(Protocol):
    """What the dispatcher needs to know of an engine."""

    @property
    def ready(self) -> bool: ...

    @property
    def limit(self) -> int: ...


T = TypeVar("T", bound=Target)


class Lease(Generic[T]):
    """The right to have one sample in flight at ``target``. Release it once; later releases do nothing."""

    __slots__ = ("_dispatcher", "target")

    def __init__(self, dispatcher: Dispatcher[T], target: T) -> None:
        self._dispatcher: Dispatcher[T] | None = dispatcher
        self.target = target

    def release(self) -> None:
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher._release(self.target)


class Dispatcher(Generic[T]):
    """Hands out leases, first come first served.

    An engine takes ``limit`` samples at once. A sample goes to the engine with the smallest share of its limit in use,
    unless its ``key`` was sent somewhere before: then there, for the prefix cache, as long as that engine has room and
    is not far busier than the idlest one.

    Args:
        targets: the engines; a fixed set, whose ``ready`` and ``limit`` may change. Call :meth:`wake` when they do.
        max_queued: callers that may wait at once.
    """

    def __init__(self, targets: list[T], max_queued: int = 65536) -> None:
        self._targets, self._max_queued = targets, max_queued
        self._inflight: dict[int, int] = {id(target): 0 for target in targets}
        self._waiting: OrderedDict[asyncio.Future[Lease[T]], Hashable | None] = OrderedDict()
        self._affinity: OrderedDict[Hashable, T] = OrderedDict()
        self._closed: Exception | None = None
        self._refusal: Exception | None = None

    @property
    def num_queued(self) -> int:
        """Callers that wait for a lease."""
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """Whether it takes nobody any more."""
        return self._closed is not None

    @property
    def refusal(self) -> Exception | None:
        """Why it takes nobody now, if so."""
        return self._closed or self._refusal

    def num_inflight(self, target: T) -> int:
        """Leases out at one engine."""
        return self._inflight[id(target)]

    async def acquire(self, key: Hashable | None = None, deadline: float | None = None) -> Lease[T]:
        """Wait for a slot. Cancelling the wait frees whatever it would have got.

        Args:
            key: samples with the same key prefer the same engine.
            deadline: on ``time.monotonic``'s clock.

        Raises:
            QueueFullError: ``max_queued`` callers wait already.
            RequestTimeoutError: the deadline passed first.
            NoEngineError: no engine is left that could ever take it.
        """
        self._refuse_when_closed()
        if not self._waiting:
            target = self._choose(key)
            if target is not None:
                return self._grant(target, key)
        if len(self._waiting) >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} samples wait for a slot already (max_queued)")
        return await self._wait(key, deadline)

    async def _wait(self, key: Hashable | None, deadline: float | None) -> Lease[T]:
        future: asyncio.Future[Lease[T]] = asyncio.get_running_loop().create_future()
        self._waiting[future] = key
        try:
            with anyio.fail_after(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # granted in the same instant in which the caller was cancelled
            self._waiting.pop(future, None)
            self.wake()
            if isinstance(error, TimeoutError):
                raise RequestTimeoutError("the deadline passed while the sample waited for a slot") from None
            raise

    def wake(self) -> None:
        """Serve waiters in order, as far as there is room."""
        while self._waiting:
            future, key = next(iter(self._waiting.items()))
            target = self._choose(key)
            if target is None:
                return
            del self._waiting[future]
            if not future.done():  # it is done when its caller was cancelled and has not run since
                future.set_result(self._grant(target, key))

    def close(self, reason: Exception) -> None:
        """Fail all waiters, and all later calls, with ``reason``."""
        self._closed = reason
        self._fail_waiters(reason)

    def refuse(self, reason: Exception | None) -> None:
        """Fail all waiters, and later calls, with ``reason``, until it is called with ``None``."""
        self._refusal = reason
        if reason is not None:
            self._fail_waiters(reason)

    def _fail_waiters(self, reason: Exception) -> None:
        waiting, self._waiting = self._waiting, OrderedDict()
        for future in waiting:
            if not future.done():
                future.set_exception(fresh(reason))

    def _refuse_when_closed(self) -> None:
        if self.refusal is not None:
            raise fresh(self.refusal)
        if not self._targets:
            raise NoEngineError("the pool has no engine")

    def _grant(self, target: T, key: Hashable | None) -> Lease[T]:
        self._inflight[id(target)] += 1
        if key is not None:
            self._affinity[key] = target
            self._affinity.move_to_end(key)
            if len(self._affinity) > _AFFINITY_MEMORY:
                self._affinity.popitem(last=False)
        return Lease(self, target)

    def _release(self, target: T) -> None:
        self._inflight[id(target)] -= 1
        self.wake()

    def _choose(self, key: Hashable | None) -> T | None:
        """The engine for this sample now, or ``None`` when all are full."""
        idlest, least = None, math.inf
        for target in self._targets:
            num_inflight, limit = self._inflight[id(target)], target.limit
            if num_inflight < limit and num_inflight / limit < least and target.ready:
                idlest, least = target, num_inflight / limit
        sticky = self._affinity.get(key) if key is not None else None
        if sticky is None or idlest is None or not self._is_open(sticky):
            return idlest
        slack = max(_SLACK_FLOOR, int(_SLACK_SHARE * sticky.limit))
        return sticky if self.num_inflight(sticky) - self.num_inflight(idlest) <= slack else idlest

    def _is_open(self, target: T) -> bool:
        return self.num_inflight(target) < target.limit and target.ready
