"""The engines of one rollout: starts them together, watches them, and ends them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import Literal

from anyio.abc import TaskGroup

from sglrollout.concurrency import in_parallel
from sglrollout.engine.protocol import Engine
from sglrollout.errors import NoEngineError
from sglrollout.pool.dispatcher import Dispatcher
from sglrollout.pool.limits import Limit
from sglrollout.wire.messages import Load

_log = logging.getLogger("sglrollout.pool")


class EngineState(Enum):
    """Where a member is in its life. Only READY members get work."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class Member:
    """An engine in the pool, with its state and its limit."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.state = EngineState.STARTING
        self._limit: Limit | None = None

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def ready(self) -> bool:
        return self.state is EngineState.READY and self.engine.alive  # a dying one frees slots before it says so

    @property
    def limit(self) -> int:
        return self._limit.value if self._limit is not None else 1

    def set_ready(self, setting: int | Literal["auto"]) -> None:
        assert self.engine.info is not None
        self._limit = Limit(setting, self.engine.info)
        self.state = EngineState.READY

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
        self.dispatcher.wake()

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
        member.state = EngineState.DEAD
        _log.error("%s", error)
        if all(other.state is EngineState.DEAD for other in self.members):
            gone = NoEngineError(f"every engine of the pool is dead; the last: {error}")
            gone.__cause__ = error
            self.dispatcher.close(gone)
        else:
            self.dispatcher.wake()

    async def close(self) -> None:
        """End all engines, in parallel."""
        await in_parallel(member.engine.close for member in self.members)
