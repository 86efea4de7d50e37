"""A rank's part in a sync if it owns engines: it tells them what to do, all at once, and keeps their states."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import anyio
import msgspec

from sglrollout.boxes import Box
from sglrollout.concurrency import to_the_end, unwrapped
from sglrollout.errors import EngineError, RolloutError, WeightNamesError, WeightSyncError
from sglrollout.pool.pool import Member, Pool
from sglrollout.pool.sleep import TAGS, wake_members
from sglrollout.wire.messages import WeightReport, WeightSpec

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
_MARGIN_S = 10.0
_DETACH_S = 2.0


@dataclass(frozen=True)
class EngineFacts:
    """What other ranks must know of an engine. What was planned for one life of it does not hold for the next."""

    name: str
    life: int
    tp_size: int
    devices: tuple[str, ...]


class Leader:
    """The engines of this rank's rollout, during syncs.

    Args:
        pool: of the rollout, up.
        timeout_s: for each phase.
    """

    def __init__(self, pool: Pool, timeout_s: float) -> None:
        self.pool, self._timeout_s = pool, timeout_s
        self.members: list[Member] = []
        self.keys: dict[str, str] = {}
        """What an engine is called among those of all ranks."""
        self.num_bytes = 0

    async def muster(self) -> None:
        """If no engine is up, wait for one that is restarted, as long as a phase may take. One that died asleep is
        restarted now: a sync wakes engines."""
        pool = self.pool
        if pool.serving or pool.busy:
            return
        for member in pool.restarting:
            member.asleep = {}
        pool.changed()
        with anyio.move_on_after(self._timeout_s):
            await pool.until(lambda: pool.serving or not pool.restarting)

    def facts(self) -> list[EngineFacts]:
        """The engines that are up now, which are those of this sync."""
        self.members = self.pool.serving
        return [
            EngineFacts(member.name, member.num_restarts, max(1, info.tp_size), tuple(member.engine.devices))
            for member in self.members
            if (info := member.engine.info) is not None
        ]

    async def describe(self, weights: list[WeightSpec], allow_missing: Sequence[str]) -> list[WeightReport]:
        """What every TP rank of every engine says to these weights."""
        arguments = {"weights": msgspec.to_builtins(weights), "allow_missing": list(allow_missing)}
        answers = await self._all("plan", lambda m: m.engine.command("describe_weights", self._timeout_s, **arguments))
        return [msgspec.convert(report, WeightReport) for answer in answers for report in answer["reports"]]

    async def attach(self, links: dict[str, list[tuple[str, str]]]) -> None:
        """Let every engine join the trainer ranks that serve its TP ranks: (path, token) by TP rank."""
        await self._all(
            "plan",
            lambda m: m.engine.command(
                "attach_weights", self._timeout_s, links=links[self.keys[m.name]], engine=self.keys[m.name]
            ),
        )

    async def detach(self) -> None:
        """Let engines give the trainer's memory back, those that still can."""
        serving = [member for member in self.members if member.serving]
        with contextlib.suppress(RolloutError), anyio.move_on_after(_DETACH_S):
            await self._all("plan", lambda m: m.engine.command("detach_weights", _DETACH_S), serving)

    async def wake_weights(self) -> float:
        """Wake what holds weights in engines that gave it up; the rest waits until they are loaded."""
        begun = time.perf_counter()
        if not any(member.asleep for member in self.members):
            return 0.0
        await self._guarded("wake", wake_members(self.members, ["weights"], self._timeout_s, room_for=TAGS))
        return time.perf_counter() - begun

    def refuse_garbage(self, reports: Sequence[WeightReport]) -> None:
        """Whether a sync would leave garbage that a sleep left: parameters that need not be written.

        Raises:
            WeightNamesError: it would.
        """
        unwritten = sorted({name for report in reports for name in report.unwritten})
        if unwritten and any(member.garbage for member in self.members):
            raise WeightNamesError(missing=unwritten)

    async def wake_rest(self) -> float:
        """Wake what else is asleep, once the weights are there."""
        begun = time.perf_counter()
        rest = sorted({tag for member in self.members for tag in member.asleep})
        if not rest:
            return 0.0
        await self._guarded("wake", wake_members(self.members, rest, self._timeout_s))
        return time.perf_counter() - begun

    async def pause(self, mode: PauseMode, told: anyio.Event) -> tuple[float, bool]:
        """Stop all engines. ``told`` is set once they were told.

        Returns:
            the seconds that took, and whether all still hold the plan that was made for them.
        """
        begun = time.perf_counter()
        self.pool.hold(self.members)
        for member in self.members:
            member.paused = True
        answers = await self._all("pause", lambda m: m.engine.command("pause", self._timeout_s, mode=mode), told=told)
        return time.perf_counter() - begun, all(answer["attached"] for answer in answers)

    async def load(self, told: anyio.Event) -> None:
        """Let engines take the buckets that trainer ranks hand them. Until it returns their weights are a mixture.
        ``told`` is set once they were told."""
        await self._all("transfer", lambda m: m.engine.command("load_weights", self._timeout_s), told=told)

    async def begin_portable(self) -> None:
        await self._all("transfer", lambda m: m.engine.command("begin_portable", self._timeout_s))

    async def load_portable(self, payloads: dict[str, list[bytes]]) -> None:
        await self._all(
            "transfer",
            lambda m: m.engine.command("load_portable", self._timeout_s, payloads=payloads[self.keys[m.name]]),
        )

    async def end_portable(self) -> None:
        await self._all("transfer", lambda m: m.engine.command("end_portable", self._timeout_s))

    async def resume(self, version: int, flush: bool) -> tuple[float, float]:
        """Let engines empty their prefix caches and run again under ``version``. They take work once it is published.

        Returns:
            the seconds that flushes took, and those of the rest.
        """
        begun = time.perf_counter()
        answers = await self._all(
            "resume", lambda m: m.engine.command("resume", self._timeout_s, version=version, flush=flush)
        )
        flush_s = max((rank["flush_s"] for answer in answers for rank in answer["ranks"]), default=0.0)
        return flush_s, time.perf_counter() - begun - flush_s

    def publish(self, version: int) -> None:
        """The end of a sync that went well on every rank."""
        for member in self.members:
            member.stale = ""
            member.garbage = member.paused = False
        for member in self.pool.restarting:
            member.asleep = {}  # all others are awake
        self.pool.weight_version = version
        self.pool.release(self.members)

    async def checksums(self, boxes: Sequence[Sequence[Box]]) -> dict[str, list[list[int]]]:
        """By engine and TP rank: sums of what was copied, cut by ``boxes`` (by weight, of who holds it)."""
        plain = msgspec.to_builtins(boxes)
        answers = await self._all(
            "verify", lambda m: m.engine.command("checksum_weights", self._timeout_s, boxes=plain)
        )
        self.num_bytes = sum(rank["num_bytes"] for answer in answers for rank in answer["ranks"])
        return {
            member.name: [rank["sums"] for rank in answer["ranks"]]
            for member, answer in zip(self.members, answers, strict=True)
        }

    async def spoil(self, reason: str, members: Sequence[Member] | None = None) -> None:
        """Engines may hold half of a sync: what they run fails, and they stay paused with nothing in them."""
        spoilt = [member for member in (self.members if members is None else members) if member.serving]
        self.pool.spoil(spoilt, reason)
        with contextlib.suppress(RolloutError), anyio.move_on_after(_DETACH_S):
            await to_the_end(partial(member.engine.command, "pause", _DETACH_S, mode="retract") for member in spoilt)

    async def call_off(self) -> None:
        """The sync failed before any weight moved: engines go on as they were, each that can."""
        await to_the_end(partial(self._go_on, member) for member in self.members if member.held)

    async def _go_on(self, member: Member) -> None:
        try:
            if member.serving and not member.asleep and not member.stale:
                version = self.pool.weight_version
                await member.engine.command("resume", self._timeout_s, version=version, flush=False)
                member.paused = False
            self.pool.release([member])
        except RolloutError as error:
            await self.spoil(f"a weight sync was called off, and it did not go on: {error}", [member])

    async def _all(
        self,
        phase: str,
        call: Callable[[Member], Awaitable[Any]],
        members: Sequence[Member] | None = None,
        told: anyio.Event | None = None,
    ) -> list[Any]:
        """Call every engine at once; the answers, in their order. ``told`` is set once all were called."""
        members = self.members if members is None else members
        answers: list[Any] = [None] * len(members)

        async def one(i: int) -> None:
            answers[i] = await call(members[i])

        async def note() -> None:
            if told is not None:
                told.set()  # this task begins after those of the engines have

        # Each to its end, also if one fails: what an engine was told, it may do, and its answer says so.
        calls: list[Callable[[], Awaitable[None]]] = [*(partial(one, i) for i in range(len(members))), note]
        await self._guarded(phase, to_the_end(calls))
        return answers

    async def _guarded(self, phase: str, work: Awaitable[Any]) -> None:
        """Within the deadline; what goes wrong is of ``phase``."""
        try:
            with anyio.fail_after(self._timeout_s + _MARGIN_S):
                await work
        except TimeoutError:
            raise WeightSyncError(phase, f"engines did not answer within {self._timeout_s:g} s") from None
        except ExceptionGroup as group:
            raise _of_phase(phase, unwrapped(group)) from None
        except EngineError as error:
            raise _of_phase(phase, error) from None


def _of_phase(phase: str, error: Exception) -> Exception:
    if isinstance(error, EngineError):
        return WeightSyncError(phase, str(error), engine=error.engine)
    return error if isinstance(error, RolloutError) else WeightSyncError(phase, f"{type(error).__name__}: {error}")
