"""One of two trainer ranks, each with a scripted engine: ``syncer_rank.py RANK PORT``. Prints what it saw, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is started as a script
import sglrollout as sr
from sglrollout.testing import ScriptedEngine

CONFIG = sr.RolloutConfig(
    model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=3, restart_delay_s=0.0
)


class Mortal(ScriptedEngine):
    """Dies when it is told to load weights, once it is to."""

    dies = False

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        if name == "load_portable" and self.dies:
            self.dies = False
            self.die("out of memory")
        return await super().command(name, timeout_s, **arguments)


class Case:
    """An engine, its rollout and its syncer."""

    def __init__(self, rollout: sr.AsyncRolloutEngine, syncer: sr.WeightSyncer) -> None:
        self.rollout, self._syncer = rollout, syncer

    async def sync(self) -> dict[str, Any]:
        begun = time.monotonic()
        try:
            report = await self._syncer.sync()
        except sr.WeightSyncError as error:
            found: dict[str, Any] = {"error": str(error), "engine": error.engine, "rank": error.rank}
        else:
            found = {"lost": report.lost_engines, "engines": report.num_engines, "version": report.version}
            found["published"] = self.rollout.weight_version
        return {**found, "seconds": time.monotonic() - begun, "state": self.rollout.engines[0].state}


@asynccontextmanager
async def case(engine: Mortal, **options: Any) -> AsyncIterator[Case]:
    source = sr.TensorSource({"weight": torch.ones(40, 16)})
    async with (
        sr.AsyncRolloutEngine(config=CONFIG, engines=[engine]) as rollout,
        sr.WeightSyncer(rollout, source, timeout_s=5, **options) as syncer,
    ):
        yield Case(rollout, syncer)


async def one_dies(rank: int) -> list[dict[str, Any]]:
    engine = Mortal("engine-0")
    async with case(engine) as it:
        engine.dies = rank == 1
        engine.start_s = 3.0
        found = [await it.sync()]
        with anyio.fail_after(10):
            while it.rollout.engines[0].state not in ("ready", "stale"):
                await anyio.sleep(0.01)
        return [*found, await it.sync()]


async def both_die(rank: int) -> list[dict[str, Any]]:
    engine = Mortal("engine-0")
    async with case(engine) as it:
        engine.dies = True
        engine.start_s = 0.5 + rank
        return [await it.sync(), await it.sync()]


async def one_dies_and_the_other_has_no_retries(rank: int) -> list[dict[str, Any]]:
    engine = Mortal("engine-0")
    async with case(engine, max_retries=2 * rank) as it:
        engine.dies = rank == 1
        return [await it.sync(), await it.sync()]


async def one_is_cancelled_while_it_waits(rank: int) -> list[dict[str, Any]]:
    engine = Mortal("engine-0")
    async with case(engine) as it:
        engine.dies = True
        engine.start_s = 2.0
        if rank == 0:
            return [await it.sync(), await it.sync()]
        with anyio.move_on_after(1.0):
            await it.sync()
        return [await it.sync()]


async def main(rank: int) -> dict[str, Any]:
    cases = (one_dies, both_die, one_dies_and_the_other_has_no_retries, one_is_cancelled_while_it_waits)
    return {run.__name__: await run(rank) for run in cases}


if __name__ == "__main__":
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
    print(json.dumps(asyncio.run(main(rank))), flush=True)  # noqa: T201
    os._exit(0)  # without a word about the other rank, which may be gone
