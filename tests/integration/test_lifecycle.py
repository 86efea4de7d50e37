"""Processes, files and deaths: whatever ends, and however, nothing stays behind and everybody concerned knows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import sglrollout as sr
from tests.leftovers import Leftovers, is_running

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("user_script.py")
LONG = sr.Sampling(max_new_tokens=100_000, ignore_eos=True)


class UserScript(Leftovers):
    """user_script.py in a terminal-like session of its own, with a temporary directory of its own."""

    def __init__(self, mode: str, model: Path, temporary: Path, **environment: str) -> None:
        super().__init__(temporary)
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), mode, str(model)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary), **environment},
            start_new_session=True,
        )

    def wait_for(self, step: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                self.see(said["pids"])
                if said["step"] == step:
                    return said
        raise AssertionError(f"the script ended with {self.process.wait()} before it said {step}")


@pytest.fixture
def run_script(tiny_model: Path) -> Iterator[Callable[..., UserScript]]:
    scripts: list[UserScript] = []
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:

        def run(mode: str, **environment: str) -> UserScript:
            scripts.append(UserScript(mode, tiny_model, Path(temporary), **environment))
            return scripts[-1]

        yield run
        for script in scripts:
            script.process.kill()
            script.process.wait()
            assert script.process.stdout is not None
            script.process.stdout.close()


# ------------------------------------------------------------ the user's process ends


def test_when_the_users_process_is_killed_nothing_is_left_within_5_s(run_script: Callable[..., UserScript]) -> None:
    script = run_script("generating")
    script.wait_for("generating")
    assert len(script.pids) >= 2
    assert script.shared_memory
    script.process.kill()
    script.assert_nothing_left(within_s=5.0)


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("mode", ["starting", "generating", "syncing", "closing"])
def test_ctrl_c_leaves_nothing(run_script: Callable[..., UserScript], mode: str, times: int) -> None:
    script = run_script(mode)
    script.wait_for(mode)
    for _ in range(times):
        os.killpg(script.process.pid, signal.SIGINT)
        time.sleep(0.2)
    assert script.process.wait(timeout=15) != 0
    script.assert_nothing_left(within_s=5.0 if times > 1 else 1.0)


def test_a_rollout_that_was_never_closed_ends_with_its_loop(run_script: Callable[..., UserScript]) -> None:
    script = run_script("forgetting_to_close")
    script.wait_for("started")
    assert script.process.wait(timeout=15) == 0
    script.assert_nothing_left(within_s=1.0)


def test_a_process_that_exits_without_cleaning_up_leaves_nothing(run_script: Callable[..., UserScript]) -> None:
    script = run_script("exiting_hard")
    script.wait_for("started")
    assert script.process.wait(timeout=15) == 3
    script.assert_nothing_left(within_s=5.0)


def test_closing_a_pool_touches_no_other_child_and_torchrun_does_not_disturb_it(
    run_script: Callable[..., UserScript],
) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    script = run_script("beside_other_children", TORCHELASTIC_USE_AGENT_STORE="True", **torchrun)
    said = script.wait_for("closed")
    assert said["worker_alive"]
    assert len(said["hosts"]) == 2
    assert not any(is_running(pid) for pid in said["hosts"])
    assert script.process.wait(timeout=15) == 0
    script.assert_nothing_left(within_s=1.0)


# ------------------------------------------------------------ isolation="thread"


def test_an_engine_in_a_thread_leaves_the_users_process_as_it_was(run_script: Callable[..., UserScript]) -> None:
    script = run_script("in_a_thread")
    said = script.wait_for("closed")
    assert said["same_process"]
    assert said["unchanged"]
    assert said["streamed"] == said["tokens"]
    assert len(said["tokens"]) == 8
    assert "SGLang allows one" in said["second"]
    assert said["worker_alive"]
    assert not said["scheduler_alive"]
    assert script.process.wait(timeout=20) == 0
    script.assert_nothing_left(within_s=3.0)


def test_a_scheduler_that_dies_does_not_take_the_users_process_along(run_script: Callable[..., UserScript]) -> None:
    script = run_script("in_a_thread_with_a_dying_scheduler")
    said = script.wait_for("closed")
    assert said["outcome"] in ("EngineDiedError", "NoEngineError")
    assert script.process.wait(timeout=20) == 0


# ------------------------------------------------------------ an engine ends


async def test_an_engine_that_dies_is_known_within_2_s_and_the_others_go_on(tiny_model: Path) -> None:
    async with sr.AsyncRolloutEngine(
        tiny_model, num_engines=2, device="cpu", max_inflight=2, max_restarts=0
    ) as rollout:
        infos = [engine.info for engine in rollout.engines]
        assert infos[0] is not None
        assert infos[1] is not None
        prompts = [f"prompt {i}" for i in range(4)]
        task = asyncio.create_task(rollout.generate(prompts, sampling=LONG, on_error="return"))
        while sum(engine.num_inflight for engine in rollout.engines) < 4:
            await anyio.sleep(0.02)
        os.kill(infos[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        while rollout.engines[0].state != "dead":
            await anyio.sleep(0.01)
        assert time.monotonic() - killed < 2.0
        task.cancel()
        (group,) = await rollout.generate(["still here"], sampling=sr.Sampling(max_new_tokens=4))
        assert group.completions[0].engine == "engine-1"
        with anyio.fail_after(2.0):
            while any(is_running(pid) for pid in infos[0].child_pids):
                await anyio.sleep(0.02)

        stream = rollout.stream("until the end", LONG, chunk_tokens=1)
        await anext(stream)
        for pid in infos[1].child_pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(sr.EngineDiedError, match=r"engine-1: scheduler 0 ended unasked"):
            assert [chunk async for chunk in stream]
        assert stream.completion.finish_reason == "error"
        with pytest.raises(sr.NoEngineError):
            await rollout.generate(["nobody left"])


async def test_a_model_that_does_not_load_is_an_error_with_the_log_and_the_other_engine_is_ended(
    tmp_path: Path, tiny_model: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(sr.EngineStartError, match=r"engine-\d") as caught:
        await sr.AsyncRolloutEngine(broken, num_engines=2, device="cpu").start()
    assert "afetensor" in caught.value.log_tail
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


async def test_a_start_that_takes_too_long_is_an_error_and_leaves_nothing(tiny_model: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(sr.EngineStartError, match=r"not ready after start_timeout_s=2 s"):
        await sr.AsyncRolloutEngine(tiny_model, device="cpu", start_timeout_s=2.0).start()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


async def test_an_engine_argument_that_does_not_exist_is_refused_before_anything_starts(tiny_model: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(sr.ConfigError, match=r'chunked_prefil_size.*did you mean "chunked_prefill_size"'):
        await sr.AsyncRolloutEngine(tiny_model, device="cpu", engine_args={"chunked_prefil_size": 64}).start()
    assert time.monotonic() - begun < 2.0
