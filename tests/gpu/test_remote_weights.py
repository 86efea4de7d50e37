"""Weights from a trainer to SGLang's server on another GPU, by NCCL.

With one GPU the two share it, and each says that it is on a host of its own: NCCL then goes over the network, as
between machines.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
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
BUCKET_BYTES = 1 << 16
WATCHDOG_S = 20.0
"""For NCCL's watchdog to end this process, if it is going to."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
async def server(path: Path) -> AsyncIterator[sr.SGLangServer]:
    options: dict[str, Any] = {"mem_fraction": 0.3, "engine_args": ENGINE_ARGS | {"max_total_tokens": 100_000}}
    options |= {"device": "cuda", "devices": [[NUM_GPUS - 1]], "dtype": "bfloat16"}
    with pytest.MonkeyPatch.context() as patched:
        if NUM_GPUS == 1:
            patched.setenv("NCCL_HOSTID", "server")
        async with sr.launch_server(path, **options) as server:
            if NUM_GPUS == 1:
                patched.setenv("NCCL_HOSTID", "trainer")
            yield server


@pytest.fixture
async def rollout(path: Path, server: sr.SGLangServer) -> AsyncIterator[sr.AsyncRolloutEngine]:
    remote = [sr.RemoteEngine(server.url, api_key=server.api_key, dead_after_s=6.0)]
    options: dict[str, Any] = {"engine_args": {"skip_tokenizer_init": True}, "progress": False, "max_restarts": 0}
    async with sr.AsyncRolloutEngine(path, num_engines=0, remote=remote, **options) as rollout:
        yield rollout


async def test_a_server_on_another_gpu_answers_like_the_trainer_after_each_sync(
    rollout: sr.AsyncRolloutEngine, path: Path, tmp_path: Path
) -> None:
    import torch

    model = trained(path, 11)
    assert await distance(rollout, model) > 1.0
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer:
        for _ in range(2):
            report = await syncer.sync("abort")  # SGLang 0.5.17 does not retract
            assert report.method == "broadcast"
            assert report.num_buckets > 2
            assert await distance(rollout, model) < CLOSE
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), remote=sr.Disk(tmp_path)) as syncer:
        assert (await syncer.sync("abort")).method == "disk"
        assert await distance(rollout, model) < CLOSE


# The last one, since it ends the server.
async def test_a_server_that_is_killed_in_a_broadcast_fails_the_sync_and_leaves_the_trainer_alive(
    rollout: sr.AsyncRolloutEngine, server: sr.SGLangServer, path: Path
) -> None:
    import torch

    model = trained(path, 12)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES, timeout_s=10) as syncer:
        await syncer.sync("abort")
        assert rollout._pool is not None
        engine = rollout._pool.members[0].engine
        command = engine.command

        async def kill_then(name: str, *arguments: Any, **named: Any) -> Any:
            if name == "receive_weights":
                os.killpg(server.pid, signal.SIGKILL)
            return await command(name, *arguments, **named)

        engine.command = kill_then  # type: ignore[method-assign]
        with anyio.fail_after(60), pytest.raises(sr.WeightSyncError):
            await syncer.sync("abort")
    await asyncio.sleep(WATCHDOG_S)
    assert torch.ones(2, device="cuda").sum().item() == 2
