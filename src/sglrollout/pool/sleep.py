"""Sleep and wake: engines give device memory back while the trainer needs it, and take it again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import anyio

from sglrollout.concurrency import to_the_end
from sglrollout.errors import ConfigError, DeviceMemoryError, LifecycleError, NoEngineError, RolloutError
from sglrollout.pool.pool import SLEEP, EngineState, Member, Pool

TAGS = ("kv_cache", "weights", "cuda_graph")
"""What an engine can give up, in the order in which it does."""

_POLL_S = 0.005
_MARGIN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SleepReport:
    """What engines gave back, by engine. Bytes are of the fullest of its devices.

    Attributes:
        seconds: the whole call.
        freed_bytes: by engine and tag.
        used_bytes: by engine: what is still in use on its device, by anybody. Grows with each cycle if memory leaks.
        residual_bytes: by engine: what its own allocator still holds.
    """

    seconds: float
    freed_bytes: dict[str, dict[str, int]]
    used_bytes: dict[str, int]
    residual_bytes: dict[str, int]

    def __str__(self) -> str:
        lines = [f"asleep in {self.seconds:.3f} s"]
        for engine, freed in self.freed_bytes.items():
            parts = ", ".join(f"{tag} {size / 1e9:.2f}" for tag, size in freed.items())
            used = f"{self.used_bytes[engine] / 1e9:.2f} GB still in use on its device"
            lines.append(
                f"{engine}: gave back {parts} GB; {used}, {self.residual_bytes[engine] / 1e9:.2f} GB by itself"
            )
        return "\n".join(lines)


async def sleep(pool: Pool, tags: Sequence[str], drain_s: float, timeout_s: float) -> SleepReport:
    """Give memory back. What runs has ``drain_s`` to end, and is aborted then.

    Restarts that are under way are called off; they begin again once all is awake.

    Raises:
        ConfigError, LifecycleError: nothing was done.
    """
    begun = time.monotonic()
    members = pool.serving
    _check_tags(tags)
    if not members and not pool.restarting:
        raise NoEngineError("every engine of the pool is dead")
    _check_memory_saver(pool.members)
    for member in [*members, *pool.restarting]:
        twice = [tag for tag in tags if tag in member.asleep]
        if twice:
            raise LifecycleError(f"{member.name}'s {twice[0]} is asleep already")
    freed: dict[str, dict[str, int]] = {member.name: {} for member in members}
    with pool.exclusive(SLEEP):
        pool.hold(members)
        try:
            await pool.call_off_restarts()
            await _drain(pool, members, drain_s)
            await to_the_end(partial(_sleep_one, member, tags, freed[member.name], timeout_s) for member in members)
            memory = {member.name: await _memory(member, timeout_s) for member in members}
            for member in pool.restarting:
                member.asleep.update(dict.fromkeys(tags, 0))
        finally:
            with anyio.CancelScope(shield=True):
                await _settle(pool, members, timeout_s)
    return SleepReport(
        seconds=time.monotonic() - begun,
        freed_bytes=freed,
        used_bytes={name: max((r["total"] - r["free"] for r in ranks), default=0) for name, ranks in memory.items()},
        residual_bytes={name: max((r["reserved"] for r in ranks), default=0) for name, ranks in memory.items()},
    )


async def wake(pool: Pool, tags: Sequence[str] | None, timeout_s: float) -> None:
    """Take memory again: ``tags``, or all that is asleep.

    Raises:
        ConfigError, LifecycleError, DeviceMemoryError: nothing was done.
    """
    members = pool.serving
    asleep = {tag for member in [*members, *pool.restarting] for tag in member.asleep}
    if tags is None:
        tags = [tag for tag in TAGS if tag in asleep]
    else:
        _check_tags(tags)
    awake = [tag for tag in tags if tag not in asleep]
    if awake or not asleep:
        raise LifecycleError(f"{awake[0]} is not asleep" if awake else "nothing is asleep")
    with pool.exclusive("wake"):
        pool.hold(members)
        try:
            await wake_members(members, tags, timeout_s)
            for member in pool.restarting:
                member.asleep = {tag: size for tag, size in member.asleep.items() if tag not in tags}
        finally:
            with anyio.CancelScope(shield=True):
                await _settle(pool, members, timeout_s)


async def _settle(pool: Pool, members: Sequence[Member], timeout_s: float) -> None:
    """Let those run again that are awake and have their weights; then each is what it is.

    Raises:
        EngineRequestError, EngineDiedError: one did not; it is stale.
    """
    version = pool.weight_version
    failure: RolloutError | None = None
    for member in members:
        try:
            if member.paused and member.serving and not member.asleep and not member.stale:
                await member.engine.command("resume", timeout_s, version=version, flush=False)
                member.paused = False
        except RolloutError as error:
            failure = error
            pool.spoil([member], f"it did not resume: {error}")
    pool.release(members)
    if failure is not None:
        raise failure


async def wake_members(
    members: Sequence[Member], tags: Sequence[str], timeout_s: float, room_for: Sequence[str] = ()
) -> None:
    """Take the memory behind ``tags`` again in those of the members that gave it up. Weights come back as garbage.

    Args:
        room_for: tags that are to follow: there must be room for them, too.

    Raises:
        DeviceMemoryError: a device has less free memory than that takes; nothing was woken.
    """
    for member in members:
        await _check_free(member, [*tags, *(tag for tag in room_for if tag not in tags)], timeout_s)
    await to_the_end(partial(_wake_one, member, tags, timeout_s) for member in members)


async def _sleep_one(member: Member, tags: Sequence[str], freed: dict[str, int], timeout_s: float) -> None:
    free = _least_free(await _memory(member, timeout_s))
    for tag in (tag for tag in TAGS if tag in tags):
        with anyio.CancelScope(shield=True):  # it has a deadline, and what it did must be noted
            member.paused = True
            await member.engine.command("sleep", timeout_s, tags=[tag])
            freed[tag] = member.asleep[tag] = 0
        free_now = _least_free(await _memory(member, timeout_s))
        freed[tag] = member.asleep[tag] = max(0, free_now - free)
        free = free_now


async def _wake_one(member: Member, tags: Sequence[str], timeout_s: float) -> None:
    tags = [tag for tag in tags if tag in member.asleep]
    if not tags:
        return
    with anyio.CancelScope(shield=True):
        await member.engine.command("wake", timeout_s, tags=tags)
        for tag in tags:
            del member.asleep[tag]
        if "weights" in tags and not (member.engine.info and member.engine.info.keeps_weights):
            member.garbage, member.stale = True, member.stale or "its weights were given up in a sleep"


async def _check_free(member: Member, tags: Sequence[str], timeout_s: float) -> None:
    needed = {tag: member.asleep[tag] for tag in tags if tag in member.asleep}
    ranks = await _memory(member, timeout_s) if needed else []
    for rank in ranks:
        if rank["free"] < sum(needed.values()) + _MARGIN_BYTES:
            raise DeviceMemoryError(member.name, needed, rank["free"], rank["total"])


async def _drain(pool: Pool, members: Sequence[Member], drain_s: float) -> None:
    """Until nothing runs in them; what still does after ``drain_s`` is aborted."""

    def num_running() -> int:
        return sum(pool.dispatcher.num_inflight(member) for member in members)

    with anyio.move_on_after(drain_s):
        while num_running():  # noqa: ASYNC110
            await anyio.sleep(_POLL_S)
        return
    error = LifecycleError(f"aborted by sleep(), which waited drain_s={drain_s:g} s for it")
    for member in members:
        member.engine.drop(error)


async def _memory(member: Member, timeout_s: float) -> list[dict[str, int]]:
    answer = await member.engine.command("memory", timeout_s)
    ranks: list[dict[str, int]] = [rank for rank in answer["ranks"] if rank]
    return ranks


def _least_free(ranks: list[dict[str, int]]) -> int:
    return min((rank["free"] for rank in ranks), default=0)


def _check_tags(tags: Sequence[str]) -> None:
    wrong = [tag for tag in tags if tag not in TAGS]
    if wrong or isinstance(tags, str) or not tags:
        raise ConfigError("tags", tags, f"must be a list of {', '.join(TAGS)}")


def _check_memory_saver(members: Sequence[Member]) -> None:
    for member in members:
        if member.state is not EngineState.DEAD and not member.has_memory_saver:
            raise LifecycleError(f"{member.name} cannot sleep: it needs RolloutConfig(memory_saver=True), on a GPU")
