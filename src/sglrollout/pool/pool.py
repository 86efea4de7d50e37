"""The engines of one rollout: starts them together, watches them, and ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Literal

from anyio.abc import TaskGroup

from sglrollout.concurrency import in_parallel
from sglrollout.engine.protocol import Engine
from sglrollout.errors import LifecycleError, NoEngineError, StaleWeightsError, fresh
from sglrollout.pool.dispatcher import Dispatcher
from sglrollout.pool.limits import Limit
from sglrollout.wire.messages import Load

_log = logging.getLogger("sglrollout.pool")


class EngineState(Enum):
    """Where a member is in its life. Only READY members get work."""

    STARTING = "starting"
    READY = "ready"
    HELD = "held"
    """Work for it waits: a sync, or a change of its memory, is under way."""
    ASLEEP = "asleep"
    """Memory of it is given up: its weights, its KV cache, or its graphs."""
    STALE = "stale"
    """Its weights are not the trainer's. It refuses work until a sync."""
    DEAD = "dead"


class Member:
    """An engine in the pool, with its state and its limit.

    Attributes:
        held: work for it waits.
        asleep: the memory that is given up, by tag, with its bytes per TP rank (0 where that is not known).
        stale: why its weights are not the trainer's; empty when they are.
        garbage: its weights came back from a sleep as garbage, all of them.
        paused: it takes no steps until it is told to resume.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.held = False
        self.asleep: dict[str, int] = {}
        self.stale = ""
        self.garbage = self.paused = False
        self._limit: Limit | None = None
        self._dead = False

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def state(self) -> EngineState:
        if self._dead:
            return EngineState.DEAD
        if self._limit is None:
            return EngineState.STARTING
        if self.held:
            return EngineState.HELD
        if self.asleep:
            return EngineState.ASLEEP
        if self.stale:
            return EngineState.STALE
        return EngineState.HELD if self.paused else EngineState.READY

    @property
    def ready(self) -> bool:
        return self.state is EngineState.READY and self.engine.alive  # a dying one frees slots before it says so

    @property
    def serving(self) -> bool:
        """Up, whatever it may take: not starting and not dead."""
        return self._limit is not None and not self._dead and self.engine.alive

    @property
    def limit(self) -> int:
        return self._limit.value if self._limit is not None else 1

    def set_ready(self, setting: int | Literal["auto"]) -> None:
        assert self.engine.info is not None
        self._limit = Limit(setting, self.engine.info)

    def bury(self) -> None:
        self._dead = True

    def on_load(self, load: Load) -> None:
        if self._limit is not None:
            self._limit.update(load)


class Pool:
    """Owns its engines from :meth:`start` to :meth:`close`.

    Args:
        engines: not started yet.
        max_inflight: per engine, or ``auto``.
        max_queued: callers that may wait for a slot.
    """

    def __init__(self, engines: Sequence[Engine], max_inflight: int | Literal["auto"], max_queued: int) -> None:
        self.members = [Member(engine) for engine in engines]
        self.dispatcher: Dispatcher[Member] = Dispatcher(self.members, max_queued)
        self._max_inflight = max_inflight
        self._busy = ""
        self.weight_version = 0
        self.last_version = 0
        self.attached: object | None = None
        """The weight syncer whose plan engines hold; they hold one at a time."""
        self.watchers: list[Callable[[], None]] = []
        """Called after each change of a state or of the weight version. They must not fail."""

    async def start(self, tasks: TaskGroup) -> None:
        """Start all engines in parallel; on the first failure end the others.

        Args:
            tasks: where the engines' receive loops run afterwards.

        Raises:
            EngineStartError: of the first engine that failed.
        """
        for member in self.members:
            self._watch(member)
        await in_parallel(member.engine.start for member in self.members)
        for member in self.members:
            self._admit(member, tasks)
        versions = [member.engine.info.weight_version for member in self.serving if member.engine.info]
        self.weight_version = self.last_version = max(versions, default=0)
        self.changed()

    def _watch(self, member: Member) -> None:
        def on_load(load: Load) -> None:
            member.on_load(load)
            self.dispatcher.wake()

        member.engine.on_load = on_load
        member.engine.on_death = lambda error: self._bury(member, error)

    def _admit(self, member: Member, tasks: TaskGroup) -> None:
        if member.state is EngineState.DEAD:
            return
        member.set_ready(self._max_inflight)
        for warning in member.engine.info.warnings if member.engine.info else ():
            _log.warning("%s: %s", member.name, warning)
        tasks.start_soon(member.engine.run)

    def _bury(self, member: Member, error: Exception) -> None:
        member.bury()
        _log.error("%s", error)
        if all(other.state is EngineState.DEAD for other in self.members):
            gone = NoEngineError(f"every engine of the pool is dead; the last: {error}")
            gone.__cause__ = error
            self.shut(gone)
        else:
            self.changed()

    # ------------------------------------------------------------ states

    @property
    def serving(self) -> list[Member]:
        """The members that are up, ready or not."""
        return [member for member in self.members if member.serving]

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """For a change of the whole pool: a sync, a sleep, a wake.

        Raises:
            LifecycleError: another one is under way.
        """
        if self._busy:
            raise LifecycleError(f"{what} cannot begin: {self._busy} is under way on this rollout")
        self._busy = what
        try:
            yield
        finally:
            self._busy = ""

    def hold(self, members: Sequence[Member]) -> None:
        """Let work for them wait."""
        for member in members:
            member.held = True
        self.changed()

    def release(self, members: Sequence[Member]) -> None:
        """Let them take work again, those that may."""
        for member in members:
            member.held = False
        self.changed()

    def spoil(self, members: Sequence[Member], reason: str) -> None:
        """Their weights are not the trainer's any more: what they hold fails, and they take nothing until a sync."""
        for member in members:
            member.stale, member.held = reason, False
            if member.engine.alive:
                member.engine.drop(StaleWeightsError(f"{member.name} was given up: {reason}"))
        self.changed()

    def changed(self) -> None:
        """Act on changed states: give out work, or refuse it where none could ever be taken as things are."""
        states = {member.state for member in self.members}
        if states & {EngineState.READY, EngineState.HELD, EngineState.STARTING}:
            self.dispatcher.refuse(None)
        elif EngineState.STALE in states:
            reason = next(member.stale for member in self.members if member.state is EngineState.STALE)
            self.dispatcher.refuse(StaleWeightsError(f"no engine has the trainer's weights: {reason}; sync first"))
        elif EngineState.ASLEEP in states:
            tags = sorted({tag for member in self.members for tag in member.asleep})
            self.dispatcher.refuse(LifecycleError(f"the engines are asleep ({', '.join(tags)}): call wake() first"))
        self.dispatcher.wake()
        self._tell()

    def _tell(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()

    async def until_open(self) -> None:
        """Wait while no engine takes work and one may again: while they are asleep, or stale.

        Raises:
            NoEngineError: they are all dead.
            LifecycleError: the pool is closed.
        """
        changed = asyncio.Event()
        self.watchers.append(changed.set)
        try:
            while (refusal := self.dispatcher.refusal) is not None:
                if self.dispatcher.closed:
                    raise fresh(refusal)
                changed.clear()
                await changed.wait()
        finally:
            self.watchers.remove(changed.set)

    def shut(self, reason: Exception) -> None:
        """Take no work any more: what waits for a slot, and what comes, fails with ``reason``."""
        self.dispatcher.close(reason)
        self._tell()

    async def close(self) -> None:
        """End all engines, in parallel."""
        await in_parallel(member.engine.close for member in self.members)
