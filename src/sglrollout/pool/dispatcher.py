"""Chooses the engine for each sample, and throttles.  Every path goes through here: stream, batch, group, session."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from sglrollout.errors import NoEngineError, QueueFullError, RequestTimeoutError, fresh

_AFFINITY_MEMORY = 100_000
_SLACK_SHARE = 0.25
_SLACK_FLOOR = 8
_CLOSED = math.inf


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


class Elsewhere(NamedTuple, Generic[T]):
    """In place of a key: at any target but this one, where another one has room."""

    key: Hashable | None
    target: T


class _Tournament:
    """Which of a row of numbers is the least, the first of equals. To change one costs O(log n)."""

    __slots__ = ("_first_leaf", "_nodes")

    def __init__(self, numbers: Sequence[float]) -> None:
        # The n leaves are nodes n to 2n - 1; each other node i holds the lesser of nodes 2i and 2i + 1, down to node 1.
        # They hold pairs of a number and its place, so that the lesser of two equals is the one that comes first.
        leaves = [(number, place) for place, number in enumerate(numbers)]
        self._first_leaf = len(leaves)
        self._nodes = leaves + leaves
        for node in range(self._first_leaf - 1, 0, -1):
            self._nodes[node] = min(self._nodes[2 * node], self._nodes[2 * node + 1])

    @property
    def least(self) -> tuple[float, int]:
        """The number, and its place."""
        return self._nodes[1]

    def change(self, place: int, number: float) -> None:
        nodes, node, winner = self._nodes, self._first_leaf + place, (number, place)
        while nodes[node] != winner:
            nodes[node] = winner
            if node > 1:
                winner = min(winner, nodes[node ^ 1])
                node //= 2


_Queue: TypeAlias = "OrderedDict[asyncio.Future[Lease[T]], Hashable | None]"
"""Those that wait, with their keys."""


def _expire(queue: _Queue[T], future: asyncio.Future[Lease[T]]) -> None:
    if not future.done():
        del queue[future]
        future.set_exception(RequestTimeoutError("the deadline passed while the sample waited for a slot"))


class Dispatcher(Generic[T]):
    """Hands out leases, first come first served.

    An engine takes ``limit`` samples at once. A sample goes to the engine with the smallest share of its limit in use,
    unless its ``key`` was sent somewhere before: then there, for the prefix cache, as long as that engine has room and
    is not far busier than the idlest one.

    Args:
        targets: the engines, whose ``ready`` and ``limit`` may change. Call :meth:`wake` when they do.
        max_queued: callers that may wait at once.
    """

    def __init__(self, targets: list[T], max_queued: int = 65536) -> None:
        self._targets, self._max_queued = list(targets), max_queued
        self._places = {id(target): place for place, target in enumerate(targets)}
        self._inflight = [0] * len(targets)
        self._shares, self._shares_are_old = _Tournament(()), True
        self._waiting: _Queue[T] = OrderedDict()
        self._first: _Queue[T] = OrderedDict()
        """Those that had a slot and lost it: before all others, and among themselves in their order."""
        self._affinity: OrderedDict[Hashable, T] = OrderedDict()
        self._closed: Exception | None = None
        self._refusal: Exception | None = None

    @property
    def num_queued(self) -> int:
        """Callers that wait for a lease."""
        return len(self._first) + len(self._waiting)

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
        return self._inflight[self._places[id(target)]]

    def add(self, target: T) -> None:
        """One more, last among equals."""
        self._places[id(target)] = len(self._targets)
        self._targets.append(target)
        self._inflight.append(0)
        self.wake()

    async def acquire(
        self, key: Hashable | None = None, deadline: float | None = None, first: bool = False
    ) -> Lease[T]:
        """Wait for a slot. Cancelling the wait frees whatever it would have got.

        Args:
            key: samples with the same key prefer the same engine. See also :class:`Elsewhere`.
            deadline: on ``time.monotonic``'s clock.
            first: stand before all that never had a slot, however many wait.

        Raises:
            QueueFullError: ``max_queued`` callers wait already.
            RequestTimeoutError: the deadline passed first.
            NoEngineError: no engine is left that could ever take it.
        """
        self._refuse_when_closed()
        if not self._first and (first or not self._waiting):
            target = self._choose(key)
            if target is not None:
                return self._grant(target, key)
        if self.num_queued >= self._max_queued and not first:
            raise QueueFullError(f"{self._max_queued} samples wait for a slot already (max_queued)")
        return await self._wait(key, deadline, first)

    async def _wait(self, key: Hashable | None, deadline: float | None, first: bool) -> Lease[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Lease[T]] = loop.create_future()
        queue = self._first if first else self._waiting
        queue[future] = key
        timer = None
        if deadline is not None:  # a bare timer: a cancel scope would double the memory that one that waits takes
            timer = loop.call_later(max(0.0, deadline - time.monotonic()), _expire, queue, future)
        try:
            return await future
        except BaseException:
            queue.pop(future, None)
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # granted in the same instant in which the caller was cancelled
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def wake(self, target: T | None = None) -> None:
        """Serve waiters, as ``ready`` or ``limit`` of ``target`` has changed; or of any target, which takes longer."""
        if target is None:
            self._shares_are_old = True
        else:
            self._note(self._places[id(target)])
        self._serve()

    def _serve(self) -> None:
        """Serve waiters in order, as far as there is room."""
        while queue := self._first or self._waiting:
            future, key = next(iter(queue.items()))
            target = self._choose(key)
            if target is None:
                return
            del queue[future]
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
        waiting = [*self._first, *self._waiting]
        self._first.clear()
        self._waiting.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(fresh(reason))

    def _refuse_when_closed(self) -> None:
        if self.refusal is not None:
            raise fresh(self.refusal)
        if not self._targets:
            raise NoEngineError("the pool has no engine")

    def _grant(self, target: T, key: Hashable | None) -> Lease[T]:
        self._count(target, 1)
        if isinstance(key, Elsewhere):
            key = key.key
        if key is not None:
            self._affinity[key] = target
            self._affinity.move_to_end(key)
            if len(self._affinity) > _AFFINITY_MEMORY:
                self._affinity.popitem(last=False)
        return Lease(self, target)

    def _release(self, target: T) -> None:
        self._count(target, -1)
        self._serve()

    def _count(self, target: T, change: int) -> None:
        place = self._places[id(target)]
        self._inflight[place] += change
        self._note(place)

    # ------------------------------------------------------------ who takes it

    def _choose(self, key: Hashable | None) -> T | None:
        """The engine for this sample now, or ``None`` when all are full."""
        if isinstance(key, Elsewhere):
            return self._choose_other(key)
        idlest = self._idlest()
        sticky = self._affinity.get(key) if key is not None else None
        if sticky is None or idlest is None or self._share(self._places[id(sticky)]) == _CLOSED:
            return idlest
        slack = max(_SLACK_FLOOR, int(_SLACK_SHARE * sticky.limit))
        return sticky if self.num_inflight(sticky) - self.num_inflight(idlest) <= slack else idlest

    def _choose_other(self, wish: Elsewhere[Any]) -> T | None:
        idlest = self._idlest()
        if idlest is not wish.target:
            return idlest
        place = self._places[id(wish.target)]
        self._shares.change(place, _CLOSED)
        other = self._idlest()
        self._note(place)
        return idlest if other is None else other

    def _idlest(self) -> T | None:
        """The one with the smallest share of its limit in use, the first of equals, of those that have room."""
        if self._shares_are_old:
            self._shares = _Tournament([self._share(place) for place in range(len(self._targets))])
            self._shares_are_old = False
        while True:
            noted, place = self._shares.least
            if noted == _CLOSED:
                return None
            # A target that changed for the worse may not have said so yet; one that is better off always has.
            if self._share(place) == noted:
                return self._targets[place]
            self._note(place)

    def _note(self, place: int) -> None:
        if not self._shares_are_old:
            self._shares.change(place, self._share(place))

    def _share(self, place: int) -> float:
        """How much of its limit is in use; ``_CLOSED`` if it takes nothing now."""
        target, num_inflight = self._targets[place], self._inflight[place]
        limit = target.limit
        return num_inflight / limit if num_inflight < limit and target.ready else _CLOSED
