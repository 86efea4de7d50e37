"""Real engines that are killed come back, and serve again only with the current weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import sglrollout as sr
from sglrollout import testing
from sglrollout.engine.cpu_support import forgive_torchvision
from tests.reference import greedy

pytestmark = pytest.mark.slow

GREEDY = sr.Sampling(temperature=0.0, max_new_tokens=16, ignore_eos=True)
PROMPTS = ["The sky is", "2 + 2 ="]
BUCKET_BYTES = 1 << 15


def trained(path: Path, step: int) -> Any:
    """The model after some steps of training, in float32."""
    forgive_torchvision()
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    train(model, step)
    return model


def train(model: Any, step: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


async def check_answers(rollout: sr.AsyncRolloutEngine, model: Any) -> None:
    """Every engine says what transformers says with this model, and calls these weights by their version."""
    groups = await rollout.generate(PROMPTS * 2, sampling=GREEDY)
    completions = [group.completions[0] for group in groups]
    assert len({completion.engine for completion in completions}) == len(rollout.engines)
    for completion in completions:
        assert list(completion.token_ids) == greedy(model, completion.prompt_ids)
        assert [span.version for span in completion.weight_versions] == [rollout.weight_version]


async def until(rollout: sr.AsyncRolloutEngine, *states: str) -> float:
    begun = time.monotonic()
    with anyio.fail_after(120):
        while [engine.state for engine in rollout.engines] != list(states):
            await anyio.sleep(0.02)
    return time.monotonic() - begun


def kill(rollout: sr.AsyncRolloutEngine, index: int, what: str) -> list[int]:
    """Kill a host, or a scheduler; the processes of that life."""
    info = rollout.engines[index].info
    assert info is not None
    os.kill(info.pid if what == "host" else info.child_pids[0], signal.SIGKILL)
    return [info.pid, *info.child_pids]


_others: set[int] = set()
"""Processes of other tests' engines, which live through all tests."""


class Traces:
    """What engines of this process leave while they live: processes, files and shared memory."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.files: set[str] = set()

    def look(self) -> None:
        """Note what there is now."""
        for process in psutil.Process().children(recursive=True):
            if process.pid in _others:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                self.files |= {
                    line.split()[-1]
                    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                    if "/dev/shm/sglang" in line and not line.endswith("(deleted)")
                }
                self.files |= {process.environ()["TMPDIR"]} if "TMPDIR" in process.environ() else set()
                self.pids.add(process.pid)

    def left(self) -> list[str]:
        """What of it is still there."""
        alive = [f"process {pid}" for pid in self.pids if is_running(pid)]
        return alive + [path for path in self.files if "sgl" in path and os.path.exists(path)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def engines(
    model: Path, kill_at_the_end: str, after_s: float, **options: Any
) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """Engines that are closed while one is restarted, so long after it was killed; which ends at once, and wholly."""
    traces, num_fds = Traces(), len(os.listdir("/proc/self/fd"))
    _others.clear()
    _others.update(process.pid for process in psutil.Process().children(recursive=True))
    async with sr.AsyncRolloutEngine(model, device="cpu", dtype="float32", restart_delay_s=0.1, **options) as rollout:
        yield rollout
        traces.look()
        kill(rollout, 0, kill_at_the_end)
        with anyio.fail_after(10):
            while rollout.engines[0].state != "restarting":
                await anyio.sleep(0.01)
        await anyio.sleep(after_s)
        traces.look()
        begun = time.monotonic()
    assert time.monotonic() - begun < 3.0
    assert traces.pids
    assert traces.files
    assert not traces.left()
    assert len(os.listdir("/proc/self/fd")) <= num_fds + 1


async def test_killed_engines_come_back_with_the_weights_of_the_other_one(tiny_model: Path) -> None:
    model = trained(tiny_model, 1)
    async with (
        engines(tiny_model, "host", 0.0, num_engines=2) as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer,
    ):
        await syncer.sync()
        traces = Traces()
        traces.look()
        pids = kill(rollout, 0, "scheduler")
        await until(rollout, "restarting", "ready")
        (group,) = await rollout.generate(PROMPTS[:1], sampling=GREEDY)
        assert group.completions[0].engine == "engine-1"
        await until(rollout, "ready", "ready")
        assert not any(is_running(pid) for pid in pids)
        await check_answers(rollout, model)
        with pytest.raises(sr.LifecycleError, match="restarted, since the last sync"):
            await syncer.verify()

        train(model, 2)
        report = await syncer.sync()  # plans anew: what it knew was of the former life
        assert (report.method, report.num_engines) == ("fast", 2)
        assert report.plan_s > 0
        assert (await syncer.verify()).num_engines == 2
        kill(rollout, 1, "host")
        await until(rollout, "ready", "restarting")
        train(model, 3)
        assert (await syncer.sync()).num_engines == 1  # while it starts: it gets these weights from the other one
        await until(rollout, "ready", "ready")
        await check_answers(rollout, model)
        await syncer.sync()
        assert (await syncer.verify()).num_engines == 2
        assert [engine.num_restarts for engine in rollout.engines] == [1, 1]
        assert not traces.left()


async def test_the_only_engine_is_stale_until_the_next_sync(tiny_model: Path) -> None:
    model = trained(tiny_model, 1)
    async with (
        engines(tiny_model, "scheduler", 4.0) as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer,
    ):
        await syncer.sync()
        kill(rollout, 0, "host")
        await until(rollout, "restarting")
        with pytest.raises(sr.StaleWeightsError, match="start-up weights"):
            await rollout.generate(PROMPTS, sampling=GREEDY)
        train(model, 2)
        await syncer.sync()
        await syncer.verify()
        await check_answers(rollout, model)


async def test_a_kept_snapshot_brings_the_only_engine_back_with_its_tp_ranks(tmp_path: Path) -> None:
    path = testing.tiny_model(tmp_path / "untied", tie=False, vocab_size=515)
    model = trained(path, 1)
    async with (
        engines(path, "scheduler", 0.0, tp_size=2, keep_weights_snapshot=True) as rollout,
        sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES) as syncer,
    ):
        for step in (2, 3):
            train(model, step)
            await syncer.sync()
        pool = await rollout._ready_pool()
        with anyio.fail_after(20):
            while pool._catch_up._kept_of(2) is None:
                await anyio.sleep(0.01)
        generating = asyncio.ensure_future(rollout.generate(PROMPTS, sampling=GREEDY, on_error="return"))
        kill(rollout, 0, "scheduler")
        await until(rollout, "restarting")
        await until(rollout, "ready")
        await check_answers(rollout, model)
        await generating
        await syncer.sync()
        await syncer.verify()
