"""On a GPU: an engine that was killed comes back in the memory that it had, with the weights of the last sync."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
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


@pytest.mark.parametrize("kept", [True, False], ids=["with a snapshot", "without"])
async def test_a_killed_engine_comes_back_and_sleeps_and_syncs_as_before(tmp_path: Path, kept: bool) -> None:
    path = tiny_model(tmp_path / "tiny", dtype="bfloat16")
    options: dict[str, Any] = {
        "mem_fraction": 0.3,
        "memory_saver": True,
        "num_engines": 1,
        "engine_args": ENGINE_ARGS | {"max_total_tokens": 100_000},
    }
    model = trained(path, 21)
    async with (
        sr.AsyncRolloutEngine(
            path, device="cuda", dtype="bfloat16", restart_delay_s=0.1, keep_weights_snapshot=kept, **options
        ) as rollout,
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
