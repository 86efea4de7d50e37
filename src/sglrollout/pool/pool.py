"""The engines of one rollout: starts them together, watches them, and ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
from anyio.abc import TaskGroup

from sglrollout.concurrency import in_parallel
from sglrollout.engine.protocol import Engine
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import LifecycleError, NoEngineError, StaleWeightsError, fresh
from sglrollout.pool.adapter import Adapter
from sglrollout.pool.catch_up import CatchUp, is_remote
from sglrollout.pool.dispatcher import Dispatcher
from sglrollout.pool.limits import Limit
from sglrollout.pool.supervisor import Restarts, Supervisor
from sglrollout.wire.messages import EngineInfo, Load

SLEEP = "sleep"
"""What :attr:`Pool.busy` says while engines give up memory."""
SYNC = "a weight sync"
"""What it says while they get weights."""
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
    RESTARTING = "restarting"
    """It died, and comes back."""
    DEAD = "dead"
    """It died, and stays so."""


class Member:
    """An engine in the pool, with its state and its limit.

    Attributes:
        held: work for it waits.
        asleep: the memory that is given up, by tag, with its bytes per TP rank (0 where that is not known).
        stale: why its weights are not the trainer's; empty when they are.
        garbage: its weights came back from a sleep as garbage, all of them.
        base_doubtful: its weights, an adapter apart, may be others than the pool's, and not garbage.
        adapter_doubtful: it may have another version of the adapter than the pool's, or none.
        paused: it takes no steps until it is told to resume.
        num_restarts: how often it was started again, in vain included.
        has_memory_saver: it can give memory up.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.held = False
        self.asleep: dict[str, int] = {}
        self.stale = ""
        self.garbage = self.paused = False
        self.base_doubtful = self.adapter_doubtful = False
        self.num_restarts = 0
        self.has_memory_saver = False
        self._limit: Limit | None = None
        self._dead = self._restarting = False

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def state(self) -> EngineState:
        if self._dead:
            return EngineState.DEAD
        if self._restarting:
            return EngineState.RESTARTING
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
        """Up, whatever it may take: not starting, not restarting and not dead."""
        return self._limit is not None and self.engine.alive

    @property
    def limit(self) -> int:
        return self._limit.value if self._limit is not None else 1

    def join(self, setting: int | Literal["auto"], stale: str = "") -> None:
        """It is up, and may serve, unless it is stale."""
        assert self.engine.info is not None
        self._limit = Limit(setting, self.engine.info)
        self.has_memory_saver = self.engine.info.memory_saver
        self._begin_anew(stale)
        self.asleep = {}
        self._restarting = False

    def leave(self) -> None:
        """It died, and comes back. What was given up of it stays so: it is not there until engines wake."""
        self._limit = None
        self._begin_anew()
        self._restarting = True

    def bury(self) -> None:
        """It died for good."""
        self._limit = None
        self._begin_anew()
        self.asleep = {}
        self._restarting, self._dead = False, True

    def _begin_anew(self, stale: str = "") -> None:
        self.held = self.garbage = self.paused = False
        self.stale = stale

    def on_load(self, load: Load) -> None:
        if self._limit is not None:
            self._limit.update(load)


class Pool:
    """Owns its engines from :meth:`start` to :meth:`close`.

    Args:
        engines: not started yet.
        max_inflight: per engine, or ``auto``.
        max_queued: callers that may wait for a slot.
        restarts: whether engines that die come back.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        max_inflight: int | Literal["auto"],
        max_queued: int,
        restarts: Restarts = Restarts(),  # noqa: B008 - it is immutable
    ) -> None:
        self.members = [Member(engine) for engine in engines]
        self.dispatcher: Dispatcher[Member] = Dispatcher(self.members, max_queued)
        self._catch_up = CatchUp(self, restarts.timeout_s)
        self._supervisors = [Supervisor(self, member, restarts, self._catch_up) for member in self.members]
        self._max_inflight, self._keeps_snapshot = max_inflight, restarts.keep_snapshot
        self._busy, self._changing, self._mustering = "", False, False
        self.num_changes = 0
        """How often weights or memory of engines were changed, or began to be."""
        self.weight_version = 0
        self.last_version = 0
        self.attached: object | None = None
        """The weight syncer whose plan engines hold; they hold one at a time."""
        self.has_new_base = False
        """Whether engines have, or may have, other weights than from their start, adapters apart."""
        self.adapter: Adapter | None = None
        """What samples are sampled with by default, in the version of :attr:`weight_version`."""
        self._adapters: Path | None = None
        self.on_sync: Callable[[Any], None] | None = None
        """Called at the end of each weight sync that went well, with its report. It must not fail."""
        self.watchers: list[Callable[[], None]] = []
        """Called after each change of a state or of the weight version. They must not fail."""

    async def start(self, tasks: TaskGroup) -> None:
        """Start all engines in parallel; on the first failure end the others.

        Args:
            tasks: where each engine's lives run afterwards, and what keeps a snapshot of the weights.

        Raises:
            EngineStartError: of the first engine that failed.
        """
        for member, supervisor in zip(self.members, self._supervisors, strict=True):
            self._watch(member, supervisor)
        await in_parallel(member.engine.start for member in self.members)
        self.weight_version = self.last_version = version = self._first_version()
        for member, supervisor in zip(self.members, self._supervisors, strict=True):
            if member.state is EngineState.STARTING:
                self._join(member, _foreign(member, version))
            tasks.start_soon(supervisor.run)
        if self._keeps_snapshot:
            tasks.start_soon(self._catch_up.keep)
        self.changed()

    @property
    def adapters(self) -> Path:
        """Where adapters are kept for engines of this machine, those that restart among them."""
        if self._adapters is None:
            self._adapters = new_scratch()
        return self._adapters

    def _first_version(self) -> int:
        """That of the local engines, whose weights are known; without any, the latest of the remote ones."""
        infos = [member.engine.info for member in self.members if member.engine.info is not None]
        versions = [info.weight_version for info in infos if not info.remote] or [info.weight_version for info in infos]
        return max(0, *versions)

    @property
    def common_info(self) -> EngineInfo:
        """What a request may rely on, whichever engine takes it. Once they are up."""
        infos = [member.engine.info for member in self.members if member.engine.info is not None]
        return msgspec.structs.replace(
            infos[0],
            context_length=min(info.context_length for info in infos),
            max_prompt_tokens=min(info.max_prompt_tokens for info in infos),
            max_total_tokens=min(info.max_total_tokens for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
            deterministic=all(info.deterministic for info in infos),
            has_tokenizer=all(info.has_tokenizer for info in infos),
            lora=all(info.lora for info in infos),
        )

    def _watch(self, member: Member, supervisor: Supervisor) -> None:
        def on_load(load: Load) -> None:
            member.on_load(load)
            self.dispatcher.wake(member)

        member.engine.on_load = on_load
        member.engine.on_death = supervisor.on_death

    def admit(self, member: Member, stale: str = "") -> None:
        """It is up: let it serve, unless a sync waits for it, or ``stale`` says why it may not."""
        self._join(member, stale)
        member.held = self._mustering
        self.changed()

    def _join(self, member: Member, stale: str) -> None:
        member.join(self._max_inflight, stale)
        info = member.engine.info
        member.base_doubtful = bool(stale) and (self.has_new_base or info is None or info.weight_version != 0)
        member.adapter_doubtful = bool(stale)
        for warning in member.engine.info.warnings if member.engine.info else ():
            _log.warning("%s: %s", member.name, warning)

    def bury(self, member: Member, error: Exception) -> None:
        """It is dead for good."""
        member.bury()
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

    @property
    def restarting(self) -> list[Member]:
        """The members that died and come back."""
        return [member for member in self.members if member.state is EngineState.RESTARTING]

    @property
    def busy(self) -> str:
        """What concerns the whole pool now; empty if nothing does."""
        return self._busy

    @property
    def changing(self) -> bool:
        """Whether what it is busy with changes weights or memory of engines."""
        return self._changing

    @property
    def admits(self) -> bool:
        """Engines that come back may be admitted: nothing concerns the whole pool now, or what does waits for them."""
        return not self._busy or self._mustering

    @property
    def has_its_memory(self) -> bool:
        """Engines may be started: none has given up memory, which the trainer would use."""
        gone = EngineState.DEAD
        return self._busy != SLEEP and not any(member.asleep for member in self.members if member.state is not gone)

    @property
    def is_settled(self) -> bool:
        """No weight sync is under way, or was the last to fail with weights half loaded."""
        return self.last_version == self.weight_version

    @contextmanager
    def exclusive(self, what: str, changes: bool = True) -> Iterator[None]:
        """For what concerns the whole pool, one at a time.

        Args:
            changes: it changes weights or memory of engines, as a sync, a sleep and a wake do.

        Raises:
            LifecycleError: another one is under way.
        """
        if self._busy:
            raise LifecycleError(f"{what} cannot begin: {self._busy} is under way on this rollout")
        self._busy, self._changing = what, changes
        self.num_changes += changes
        self._tell()
        try:
            yield
        finally:
            self._busy, self._changing = "", False
            self._tell()

    async def muster(self, within_s: float) -> None:
        """For a sync, which wakes engines: if none is up, wait for one that comes back, also if it died asleep. It is
        held then."""
        if self.serving:
            return
        for member in self.restarting:
            member.asleep = {}
        self._mustering = True
        self.changed()
        try:
            with anyio.move_on_after(within_s):
                await self.until(lambda: self.serving or not self.restarting)
        finally:
            self._mustering = False

    async def call_off_restarts(self) -> None:
        """End what is being restarted, and return once its memory is free. It begins again once engines are awake."""
        await in_parallel(supervisor.call_off for supervisor in self._supervisors)

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
        self.dispatcher.refuse(self._refusal())
        self.dispatcher.wake()
        self._tell()

    def _refusal(self) -> Exception | None:
        """Why no engine can take work before something else is done; ``None`` if one can, or will by itself."""
        states = {member.state for member in self.members}
        if states & {EngineState.READY, EngineState.HELD, EngineState.STARTING}:
            return None
        stale = next((member.stale for member in self.members if member.state is EngineState.STALE), None)
        may_return = EngineState.RESTARTING in states and self.has_its_memory
        if may_return and (stale is None or self.is_settled):  # else it will be stale, as the others are
            return None
        if stale is not None:
            return StaleWeightsError(f"no engine has the trainer's weights: {stale}; sync first")
        tags = sorted({tag for member in self.members for tag in member.asleep})
        return LifecycleError(f"the engines are asleep ({', '.join(tags)}): call wake() first") if tags else None

    def _tell(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()

    @contextmanager
    def watched_by(self, watcher: Callable[[], None]) -> Iterator[None]:
        """Call ``watcher`` after each change. It must not fail."""
        self.watchers.append(watcher)
        try:
            yield
        finally:
            self.watchers.remove(watcher)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition`` holds, which is asked after each change. If it does already, nothing else runs."""
        changed = asyncio.Event()
        with self.watched_by(changed.set):
            while not condition():
                changed.clear()
                await changed.wait()

    async def until_open(self) -> None:
        """Wait while no engine takes work and one may again: while they are asleep, or stale.

        Raises:
            NoEngineError: they are all dead.
            LifecycleError: the pool is closed.
        """
        await self.until(lambda: self.dispatcher.refusal is None or self.dispatcher.closed)
        if self.dispatcher.closed:
            assert self.dispatcher.refusal is not None
            raise fresh(self.dispatcher.refusal)

    def shut(self, reason: Exception) -> None:
        """Take no work any more: what waits for a slot, and what comes, fails with ``reason``."""
        self.dispatcher.close(reason)
        self._tell()

    async def close(self) -> None:
        """End all engines, in parallel, and restarts that are under way."""
        for supervisor in self._supervisors:
            supervisor.stop()
        self._catch_up.stop()
        try:
            await in_parallel(member.engine.close for member in self.members)
        finally:
            if self._adapters is not None:
                remove_scratch(self._adapters)


def _foreign(member: Member, version: int) -> str:
    """Why the weights of an engine that has come up for the first time are not the pool's, if so."""
    info = member.engine.info
    if info is None or not is_remote(member) or info.weight_version == version:
        return ""
    if info.weight_version < 0:
        return "its weights were being replaced when that was broken off"
    return f"its weights are of version {info.weight_version}, and the pool's of version {version}"
