"""On a GPU: an engine that was killed comes back in the memory that it had, with the weights of the last sync."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import sglrollout as sr
from sglrollout.testing import tiny_model
from tests.gpu.test_weight_sync import CLOSE, ENGINE_ARGS, NUM_GPUS, distance, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device, and none is visible"),
    pytest.mark.timeout(400),
]


async def until(rollout: sr.AsyncRolloutEngine, state: str) -> None:
    with anyio.fail_after(200):
        while rollout.engines[0].state != state:
            await anyio.sleep(0.02)


def options(path: Path) -> dict[str, Any]:
    engine_args = ENGINE_ARGS | {"max_total_tokens": 100_000}
    named: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "mem_fraction": 0.3, "memory_saver": True}
    return {"model": path, "num_engines": 1, "restart_delay_s": 0.1, "engine_args": engine_args, **named}


async def test_a_sync_waits_for_the_only_engine_that_was_killed_in_it(tmp_path: Path) -> None:
    import torch

    path = tiny_model(tmp_path / "tiny", dtype="bfloat16")
    model = trained(path, 20)
    async with (
        sr.AsyncRolloutEngine(**options(path)) as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model), timeout_s=200) as syncer,
    ):
        await syncer.sync()
        with torch.no_grad():
            model.model.norm.weight.add_(0.5)
        info = rollout.engines[0].info
        assert info is not None
        scheduler = psutil.Process(info.child_pids[0])
        scheduler.suspend()  # so that it is sure to be in the middle
        asyncio.get_running_loop().call_later(1.0, scheduler.kill)
        report = await syncer.sync()
        assert (report.version, report.num_engines, report.lost_engines) == (2, 1, ("engine-0",))
        await syncer.verify()
        assert await distance(rollout, model) < CLOSE


@pytest.mark.parametrize("kept", [True, False], ids=["with a snapshot", "without"])
async def test_a_killed_engine_comes_back_and_sleeps_and_syncs_as_before(tmp_path: Path, kept: bool) -> None:
    path = tiny_model(tmp_path / "tiny", dtype="bfloat16")
    model = trained(path, 21)
    async with (
        sr.AsyncRolloutEngine(**options(path), keep_weights_snapshot=kept) as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer,
    ):
        await syncer.sync()
        freed = (await rollout.sleep()).freed_bytes["engine-0"]
        await syncer.sync()
        if kept:
            pool = await rollout._ready_pool()
            with anyio.fail_after(20):
                while pool._catch_up._kept_of(rollout.weight_version) is None:
                    await anyio.sleep(0.01)

        info = rollout.engines[0].info
        assert info is not None
        os.kill(info.child_pids[0], signal.SIGKILL)
        await until(rollout, "restarting")
        if not kept:
            with pytest.raises(sr.StaleWeightsError, match="start-up weights"):
                await rollout.generate([[7, 8, 9]], sampling=sr.Sampling(max_new_tokens=4))
            await syncer.sync()
        await until(rollout, "ready")
        assert await distance(rollout, model) < CLOSE
        await syncer.sync()
        await syncer.verify()
        again = (await rollout.sleep()).freed_bytes["engine-0"]
        assert again == pytest.approx(freed, abs=64 << 20)
        await syncer.sync()
        assert await distance(rollout, model) < CLOSE
