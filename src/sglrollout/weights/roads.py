"""How weights travel bucket by bucket, on whichever road: one is made ready while engines take the one before."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Protocol

from sglrollout.weights.leader import Leader
from sglrollout.weights.phases import Phases, together
from sglrollout.weights.transfer import Clock
from sglrollout.weights.worker import Worker


class Road(Protocol):
    """A way to bring buckets to engines. Every rank has one of the same kind, those that own no engines too."""

    @property
    def num_buckets(self) -> int: ...

    @property
    def num_written(self) -> int:
        """Bytes that this rank wrote to a disk in the last sync."""
        ...

    @property
    def second(self) -> SecondRoad | None:
        """That all ranks take after this one, if one of them needs to. All have one, or none has."""
        ...

    def begin(self) -> None:
        """Once for each sync, on the worker's thread."""

    async def open(self, leader: Leader) -> None:
        """Tell this rank's engines that weights come."""

    def bucket(self, k: int, clock: Clock) -> Any:
        """Make bucket ``k`` ready, on the worker's thread; what is to be told to all ranks. It stays valid until the
        second next one is made."""

    async def load(self, leader: Leader, k: int, made: list[Any]) -> None:
        """Let this rank's engines take bucket ``k``, of which every rank said what is in ``made``."""

    async def close_for(self, leader: Leader) -> None:
        """Tell this rank's engines that all have come."""

    def close(self) -> None:
        """Give back what it holds, on the worker's thread."""


class SecondRoad(Road, Protocol):
    """A road for what another one could not bring."""

    @property
    def needed(self) -> bool:
        """By engines of this rank."""
        ...


class RemoteRoad(Road, Protocol):
    """A road to engines on other machines."""

    method: str

    async def connect(self, leader: Leader) -> None:
        """Once, when a sync plans, on ranks that own engines."""

    async def prove(self, leader: Leader) -> None:
        """Whether it holds: before each sync, with engines stopped and before any weight moves."""


async def travel(
    road: Road, leader: Leader | None, phases: Phases, worker: Worker, timeout_s: float
) -> list[dict[str, float]]:
    """Bring all buckets to all engines. A collective.

    Returns:
        the seconds that every rank took.
    """
    begun, load_s, gather_s = time.perf_counter(), 0.0, 0.0

    async def begin() -> None:
        await worker.run(road.begin)
        if leader is not None:
            await road.open(leader)

    await phases.run("transfer", begin)
    made: list[Any] | None = None
    for k in range(road.num_buckets + 1):

        async def step(k: int = k, made: list[Any] | None = made) -> tuple[Any, list[float]]:
            ready: list[Any] = []
            times = [0.0, 0.0]

            async def make() -> None:
                started = time.perf_counter()
                ready.append(await worker.run(lambda: road.bucket(k, Clock(timeout_s, worker.is_cancelled))))
                times[0] = time.perf_counter() - started

            async def load() -> None:
                started = time.perf_counter()
                assert leader is not None
                assert made is not None
                await road.load(leader, k - 1, made)
                times[1] = time.perf_counter() - started

            calls = [make] if k < road.num_buckets else []
            await together(calls + ([load] if leader is not None and made is not None else []))
            return ready[0] if ready else None, times

        answers = await phases.run("transfer", step)
        gather_s += max(times[0] for _, times in answers)
        load_s += max(times[1] for _, times in answers)
        made = [told for told, _ in answers]

    second = road.second
    if second is not None and any(await phases.run("transfer", partial(_is_needed, second))):
        again = await travel(second, leader, phases, worker, timeout_s)
        gather_s += max(part["gather_s"] for part in again)
        load_s += max(part["load_s"] for part in again)

    async def end() -> dict[str, float]:
        if leader is not None:
            await road.close_for(leader)
        return {"gather_s": gather_s, "load_s": load_s, "transfer_s": time.perf_counter() - begun}

    return await phases.run("transfer", end)


async def _is_needed(road: SecondRoad) -> bool:
    return road.needed
