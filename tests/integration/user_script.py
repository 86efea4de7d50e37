"""A user's script, run by test_lifecycle.py as a process of its own: ``python user_script.py MODE MODEL``.

It prints one JSON line per step, so that the test knows when to interrupt or kill it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

import sglrollout as sr

LONG = sr.Sampling(max_new_tokens=100_000, ignore_eos=True)


def say(step: str, **facts: Any) -> None:
    print(
        json.dumps({"step": step, "pids": [p.pid for p in psutil.Process().children(recursive=True)], **facts}),
        flush=True,
    )


async def generating(model: str) -> None:
    async with sr.AsyncRolloutEngine(model, device="cpu", context_length=512) as rollout:
        async for chunk in rollout.stream("go on", LONG, chunk_tokens=1):
            if not chunk.finish_reason:
                say("generating")
                await rollout.generate(["and on"] * 4, n=4, sampling=LONG)
                await asyncio.sleep(600)


async def starting(model: str) -> None:
    rollout = sr.AsyncRolloutEngine(model, device="cpu", num_engines=2)
    await rollout.start(wait=False)
    await asyncio.sleep(6)
    say("starting")
    await rollout.generate(["as soon as it is there"] * 4, n=4, sampling=LONG)


async def syncing(model: str) -> None:
    weights = load_file(Path(model, "model.safetensors"))
    async with (
        sr.AsyncRolloutEngine(model, device="cpu", context_length=512) as rollout,
        sr.WeightSyncer(rollout, sr.TensorSource(weights)) as syncer,
    ):
        await syncer.sync()
        say("syncing")
        while True:
            await syncer.sync()


async def closing(model: str) -> None:
    rollout = await sr.AsyncRolloutEngine(model, device="cpu", context_length=512).start()
    say("closing")
    await rollout.close()
    await asyncio.sleep(600)


async def forgetting_to_close(model: str) -> None:
    rollout = sr.AsyncRolloutEngine(model, device="cpu")
    await rollout.start()
    say("started")


async def exiting_hard(model: str) -> None:
    async with sr.AsyncRolloutEngine(model, device="cpu"):
        say("started")
        os._exit(3)


def data_loader_worker() -> None:
    time.sleep(600)


async def beside_other_children(model: str) -> None:
    worker = multiprocessing.get_context("fork").Process(target=data_loader_worker, daemon=True)
    worker.start()
    async with sr.AsyncRolloutEngine(model, device="cpu", num_engines=2) as rollout:
        hosts = [engine.info.pid for engine in rollout.engines if engine.info]
    say("closed", worker_alive=worker.is_alive(), hosts=hosts)
    worker.kill()


async def in_a_thread(model: str) -> None:
    """isolation="thread": works, refuses a second one, leaves the process as it was, and can be started again."""
    worker = multiprocessing.get_context("fork").Process(target=data_loader_worker, daemon=True)
    worker.start()
    before = (
        dict(os.environ),
        multiprocessing.get_start_method(allow_none=True),
        type(asyncio.get_event_loop_policy()),
    )
    greedy = sr.Sampling(temperature=0, max_new_tokens=8)
    async with sr.AsyncRolloutEngine(model, device="cpu", isolation="thread") as rollout:
        after = (
            dict(os.environ),
            multiprocessing.get_start_method(allow_none=True),
            type(asyncio.get_event_loop_policy()),
        )
        (group,) = await rollout.generate(["hello"], sampling=greedy)
        chunks = [chunk.token_ids async for chunk in rollout.stream("hello", greedy, chunk_tokens=1)]
        weights = {name: tensor * 1.1 for name, tensor in load_file(Path(model, "model.safetensors")).items()}
        async with sr.WeightSyncer(rollout, sr.TensorSource(weights)) as syncer:
            await syncer.sync()
            num_verified = (await syncer.verify()).num_weights
        try:
            await sr.AsyncRolloutEngine(model, device="cpu", isolation="thread").start()
            second = "started"
        except sr.LifecycleError as error:
            second = str(error)
        info = rollout.engines[0].info
        assert info is not None
    say(
        "closed",
        same_process=info.pid == os.getpid(),
        unchanged=before == after,
        tokens=list(group.completions[0].token_ids),
        streamed=[token for ids in chunks for token in ids],
        second=second,
        all_verified=num_verified == len(weights),
        worker_alive=worker.is_alive(),
        scheduler_alive=any(psutil.pid_exists(pid) for pid in info.child_pids),
    )
    worker.kill()


async def in_a_thread_with_a_dying_scheduler(model: str) -> None:
    async with sr.AsyncRolloutEngine(model, device="cpu", isolation="thread") as rollout:
        info = rollout.engines[0].info
        assert info is not None
        for pid in info.child_pids:
            os.kill(pid, 9)
        try:
            await rollout.generate(["x"], sampling=LONG)
            outcome = "generated"
        except sr.RolloutError as error:
            outcome = type(error).__name__
    say("closed", outcome=outcome)


if __name__ == "__main__":
    # A shell starts what it runs in the background with Ctrl-C ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(globals()[sys.argv[1]](sys.argv[2]))
