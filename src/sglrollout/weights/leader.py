"""A rank's part in a sync if it owns engines: it tells them what to do, all at once, and keeps their states."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import msgspec

from sglrollout.boxes import Box
from sglrollout.concurrency import in_parallel, to_the_end, unwrapped
from sglrollout.errors import (
    ConfigError,
    EngineError,
    EngineRequestError,
    RolloutError,
    WeightNamesError,
    WeightSyncError,
)
from sglrollout.pool.adapter import Adapter
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
    remote: bool = False


class Leader:
    """The engines of this rank's rollout, during syncs.

    Args:
        pool: of the rollout, up.
        timeout_s: for each phase.
    """

    def __init__(self, pool: Pool, timeout_s: float) -> None:
        self.pool, self._timeout_s = pool, timeout_s
        self.members: list[Member] = []
        self._lives: list[int] = []
        self.local: list[Member] = []
        """Those of :attr:`members` on this machine."""
        self.remote: list[Member] = []
        """And those on others."""
        self.group = ""
        """The name of the process group that remote engines are in, or may be."""
        self.keys: dict[str, str] = {}
        """What an engine is called among those of all ranks."""
        self.num_bytes = 0
        self._mode: PauseMode = "retract"
        self._adapter: Adapter | None = None
        """What this sync has brought."""

    async def muster(self, waits: bool) -> list[EngineFacts]:
        """The engines of this sync: those that are up. If there is none, one that is restarted may be waited for, as
        long as a phase may take."""
        if waits:
            await self.pool.muster(self._timeout_s)
        return self.facts()

    def facts(self) -> list[EngineFacts]:
        """The engines that are up now."""
        self.members, self.local, self.remote, facts = self.pool.serving, [], [], []
        for member in self.members:
            info = member.engine.info
            assert info is not None  # it is serving
            (self.remote if info.remote else self.local).append(member)
            tp_size, devices = max(1, info.tp_size), tuple(member.engine.devices)
            facts.append(EngineFacts(member.name, member.num_restarts, tp_size, devices, info.remote))
        self._lives = [fact.life for fact in facts]
        return facts

    async def lost(self) -> list[str]:
        """Those engines of this sync that have died since it began. Servers are spoken to, else it may not be known."""
        stopped = [member for member in self.remote if member.serving and member.paused]
        with contextlib.suppress(RolloutError), anyio.move_on_after(_DETACH_S):
            await to_the_end(partial(member.engine.command, "pause", _DETACH_S, mode=self._mode) for member in stopped)
        lives = zip(self.members, self._lives, strict=True)
        lost = [member.name for member, life in lives if not member.serving or member.num_restarts != life]
        return [self.keys.get(name, name) for name in lost]

    async def describe(self, weights: list[WeightSpec], allow_missing: Sequence[str]) -> list[WeightReport]:
        """What every TP rank of every engine says to these weights."""
        arguments = {"weights": msgspec.to_builtins(weights), "allow_missing": list(allow_missing)}
        answers = await self._all(
            "plan", lambda m: m.engine.command("describe_weights", self._timeout_s, **arguments), self.local
        )
        return [msgspec.convert(report, WeightReport) for answer in answers for report in answer["reports"]]

    async def attach(self, links: dict[str, list[tuple[str, str]]]) -> None:
        """Let every engine join the trainer ranks that serve its TP ranks: (path, token) by TP rank."""
        await self._all(
            "plan",
            lambda m: m.engine.command(
                "attach_weights", self._timeout_s, links=links[self.keys[m.name]], engine=self.keys[m.name]
            ),
            self.local,
        )

    async def detach(self) -> None:
        """Let engines give the trainer's memory back, those that still can."""
        serving = [member for member in self.local if member.serving]
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
            the seconds that took, and whether all on this machine still hold the plan that was made for them.
        """
        begun = time.perf_counter()
        self._mode = mode
        self.pool.hold(self.members)
        for member in self.members:
            member.paused = True
        answers = await self._all("pause", lambda m: m.engine.command("pause", self._timeout_s, mode=mode), told=told)
        local = set(self.local)
        attached = [answer["attached"] for m, answer in zip(self.members, answers, strict=True) if m in local]
        return time.perf_counter() - begun, all(attached)

    async def load(self, told: anyio.Event) -> None:
        """Let engines take the buckets that trainer ranks hand them. Until it returns their weights are a mixture.
        ``told`` is set once they were told."""
        await self._all("transfer", lambda m: m.engine.command("load_weights", self._timeout_s), self.local, told)

    async def begin_portable(self) -> None:
        await self._all("transfer", lambda m: m.engine.command("begin_portable", self._timeout_s), self.local)

    async def load_portable(self, payloads: dict[str, list[bytes]]) -> None:
        await self._all(
            "transfer",
            lambda m: m.engine.command("load_portable", self._timeout_s, payloads=payloads[self.keys[m.name]]),
            self.local,
        )

    async def end_portable(self) -> None:
        await self._all("transfer", lambda m: m.engine.command("end_portable", self._timeout_s), self.local)

    # ------------------------------------------------------------ remote engines

    @property
    def remote_hosts(self) -> list[tuple[str, int]]:
        """Host and port of each of them."""
        urls = [urlsplit(member.engine.url) for member in self.remote]
        return [(url.hostname or "", url.port or (443 if url.scheme == "https" else 80)) for url in urls]

    @property
    def group_size(self) -> int:
        """Ranks of a group of this rank and all TP ranks of remote engines."""
        return 1 + sum(_tp_size(member) for member in self.remote)

    async def join_group(self, name: str, address: str, port: int, backend: str) -> None:
        """Let remote engines join a group, as its ranks from 1 on."""
        first = dict[str, int]()
        rank = 1
        for member in self.remote:
            first[member.name] = rank
            rank += _tp_size(member)
        await self._remote(
            "plan",
            "init_group",
            lambda m: {
                "master_address": address,
                "master_port": port,
                "rank_offset": first[m.name],
                "world_size": rank,
                "group_name": name,
                "backend": backend,
            },
        )

    async def leave_group(self) -> None:
        """Let remote engines leave the group, those that still can."""
        group, self.group = self.group, ""
        serving = [member for member in self.remote if member.serving] if group else []
        with contextlib.suppress(RolloutError), anyio.move_on_after(_DETACH_S):
            await to_the_end(
                partial(member.engine.command, "destroy_group", _DETACH_S, group_name=group) for member in serving
            )

    async def begin_update(self) -> None:
        await self._remote("transfer", "begin_update")

    async def receive(
        self, group: str, names: list[str], dtypes: list[str], shapes: list[list[int]], refusable: bool = False
    ) -> None:
        """Let remote engines receive a flattened bucket. One that fails ends it: all wait for the same broadcast.

        Args:
            refusable: it is no failure if an engine's model has no weight of the first name.
        """
        arguments = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
        ignoring = names[0] if refusable else None
        await self._remote(
            "transfer", "receive_weights", lambda m: {**arguments, "load_format": "flattened_bucket"}, ignoring
        )

    async def end_update(self) -> None:
        await self._remote("transfer", "end_update")

    async def give_up_update(self, members: Sequence[Member] | None = None) -> None:
        """End what may have begun in remote engines, in those that still can."""
        serving = [member for member in (self.remote if members is None else members) if member.serving]
        with contextlib.suppress(RolloutError), anyio.move_on_after(_DETACH_S, shield=True):
            await to_the_end(partial(member.engine.command, "end_update", _DETACH_S) for member in serving)

    async def load_from_disk(self, path: str) -> None:
        # Each to its end: a server that was still loading would take the answer to that for the answer to the next one.
        await self._all(
            "transfer", lambda m: m.engine.command("load_from_disk", self._timeout_s, path=path), self.remote
        )

    async def mirrors(self, phase: str) -> dict[str, set[str]]:
        """Which weights remote engines have in copies of their own, by engine.

        Raises:
            ConfigError: one has none.
        """
        answers = await self._all(phase, lambda m: m.engine.command("mirrors", self._timeout_s), self.remote)
        held = {member.name: answer["ids"] for member, answer in zip(self.remote, answers, strict=True)}
        for name, ids in held.items():
            if ids is None:
                rule = (
                    f"must be a Disk without delta=True: {name} keeps no copy of its weights. Servers that "
                    "`sglrollout serve` starts on one machine do"
                )
                raise ConfigError("remote", "Disk(..., delta=True)", rule)
        return {name: set(ids) for name, ids in held.items()}

    async def update_mirrors(self, folder: Path, new_id: str, names: Collection[str]) -> dict[str, str]:
        """Let remote engines of these names have their copies updated from a folder.

        Returns:
            of those whose copies could not be, why.
        """
        members = [member for member in self.remote if member.name in names]
        arguments = {"folder": str(folder), "new_id": new_id}
        answers = await self._all(
            "transfer", lambda m: m.engine.command("update_mirror", self._timeout_s, **arguments), members
        )
        refusals = {m.name: answer["refusal"] for m, answer in zip(members, answers, strict=True)}
        return {name: refusal for name, refusal in refusals.items() if refusal is not None}

    async def load_mirrors(self, new_id: str, names: Collection[str]) -> None:
        """Let remote engines of these names load their copies."""
        members = [member for member in self.remote if member.name in names]
        await self._all("transfer", lambda m: m.engine.command("load_mirror", self._timeout_s, new_id=new_id), members)

    # ------------------------------------------------------------ LoRA

    def refuse_without_lora(self, adapter: str, rank: int) -> None:
        """
        Raises:
            ConfigError: an engine was not started for adapters, or not for such large ones, or has another one.
        """
        known = self.pool.adapter
        if known is not None and known.name != adapter:
            rule = f"must be {known.name!r}, the adapter that this rollout has"
            raise ConfigError("source.adapter", adapter, rule)
        for member in self.members:
            info = member.engine.info
            assert info is not None  # it is serving
            if not info.lora:
                rule = f"needs engines that were started with RolloutConfig(lora_rank=...), and {member.name} was not"
                raise ConfigError("source", "a LoRASource", rule)
            if info.lora_rank and rank > info.lora_rank:
                rule = f"must be at most {info.lora_rank}, for which {member.name} was started (lora_rank)"
                raise ConfigError("source.config.r", rank, rule)

    def refuse_to_change_adapter(self) -> None:
        """With engines stopped, and before they are told of another version of an adapter.

        Raises:
            WeightSyncError: what runs would go on with what it has, or without weights.
        """
        pool = self.pool
        if any(member.garbage or "weights" in member.asleep for member in self.members):
            message = 'the base model was given up in a sleep, and an adapter is all that comes: sleep(["kv_cache"])'
            raise WeightSyncError("plan", message)
        wrong = next((member for member in self.members if member.base_doubtful), None)
        if wrong is not None:
            message = f"its base model may be wrong, and an adapter is all that comes ({wrong.stale}): sync all weights"
            raise WeightSyncError("plan", message, engine=wrong.name)
        running = sum(pool.dispatcher.num_inflight(member) for member in self.members)
        is_new = pool.adapter is None
        if running and self._mode != "abort" and (is_new or self.remote):
            why = "samples are under way without it" if is_new else "a remote engine changes it for new requests only"
            raise WeightSyncError("plan", f'the adapter cannot be changed: {why}. Use sync(mode="abort")')

    async def load_adapter(self, adapter: Adapter) -> None:
        """Let every engine load it, in place of the version before."""
        await self._bring(adapter, self.members)
        self._adapter = adapter

    async def mend_adapters(self) -> None:
        """After whole weights: let engines that a sync of an adapter left with another version have the pool's."""
        doubtful = [member for member in self.members if member.adapter_doubtful]
        if self.pool.adapter is not None:
            await self._bring(self.pool.adapter, doubtful)

    async def _bring(self, adapter: Adapter, members: Sequence[Member]) -> None:
        await self._all("transfer", lambda m: adapter.bring(m.engine, self._timeout_s), members)

    async def drop_old_adapter(self, before: Adapter | None) -> None:
        """Remove the folder of the version before, which nobody reads any more."""
        if before is not None and before is not self.pool.adapter:
            await anyio.to_thread.run_sync(partial(shutil.rmtree, before.folder, ignore_errors=True))

    async def _remote(
        self,
        phase: str,
        command: str,
        arguments: Callable[[Member], dict[str, Any]] = lambda m: {},
        ignoring: str | None = None,
    ) -> None:
        """Tell every remote engine at once; the first that fails ends it for all. What says ``ignoring`` is no
        failure."""

        async def tell(member: Member) -> None:
            _check_life(phase, member)
            try:
                await member.engine.command(command, self._timeout_s, **arguments(member))
            except EngineRequestError as error:
                if ignoring is None or ignoring not in str(error):
                    raise

        await self._guarded(phase, in_parallel(partial(tell, member) for member in self.remote))

    # ------------------------------------------------------------ the end of a sync

    def begin_to_move(self, version: int, is_lora: bool) -> None:
        """From here on until it is published, engines may hold a half of this sync."""
        self._adapter = None
        self.pool.last_version = version  # its number, whatever comes of it: no other weights may have it
        self.pool.has_new_base |= not is_lora
        for member in self.members:
            if is_lora:
                member.adapter_doubtful = True
            else:
                member.base_doubtful = True

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
            member.garbage = member.paused = member.base_doubtful = member.adapter_doubtful = False
        for member in self.pool.restarting:
            member.asleep = {}  # all others are awake
        self.pool.weight_version = version
        if self._adapter is not None:
            self.pool.adapter = self._adapter
        self.pool.release(self.members)

    async def checksums(self, boxes: Sequence[Sequence[Box]]) -> dict[str, list[list[int]]]:
        """By engine and TP rank: sums of what was copied, cut by ``boxes`` (by weight, of who holds it)."""
        plain = msgspec.to_builtins(boxes)
        answers = await self._all(
            "verify", lambda m: m.engine.command("checksum_weights", self._timeout_s, boxes=plain), self.local
        )
        self.num_bytes = sum(rank["num_bytes"] for answer in answers for rank in answer["ranks"])
        return {
            member.name: [rank["sums"] for rank in answer["ranks"]]
            for member, answer in zip(self.local, answers, strict=True)
        }

    async def spoil(self, reason: str, members: Sequence[Member] | None = None) -> None:
        """Engines may hold half of a sync: what they run fails, and they stay paused with nothing in them."""
        spoilt = [member for member in (self.pool.members if members is None else members) if member.serving]
        self.pool.spoil(spoilt, reason)
        with contextlib.suppress(RolloutError), anyio.move_on_after(_DETACH_S):
            await to_the_end(partial(member.engine.command, "pause", _DETACH_S, mode="retract") for member in spoilt)
        remote = set(self.remote)
        await self.give_up_update([member for member in spoilt if member in remote])

    async def call_off(self) -> None:
        """The sync failed before any weight moved: engines go on as they were, each that can."""
        await to_the_end(partial(self._go_on, member) for member in self.pool.members if member.held)

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
            _check_life(phase, members[i])
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


def _check_life(phase: str, member: Member) -> None:
    """Raise WeightSyncError if the engine has died since the sync began, and is up again: what it has now are not the
    weights of this sync, and it must not be told that they are."""
    if member.engine.alive and not member.serving:
        raise WeightSyncError(phase, "it was restarted meanwhile", engine=member.name)


def _tp_size(member: Member) -> int:
    return max(1, member.engine.info.tp_size) if member.engine.info is not None else 1


def _of_phase(phase: str, error: Exception) -> Exception:
    if isinstance(error, EngineError):
        return WeightSyncError(phase, str(error), engine=error.engine)
    return error if isinstance(error, RolloutError) else WeightSyncError(phase, f"{type(error).__name__}: {error}")
