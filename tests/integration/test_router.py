"""SGLang's own router, with two real servers behind it, is one engine of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import httpx
import pytest

import sglrollout as sr
from tests.reference import GREEDY, PROMPTS, answers_like, greedy, trained, untrained
from tests.remote import RealServer, free_port, real_servers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    with real_servers(tiny_model, tmp_path_factory.mktemp("servers") / "log", [], []) as servers:
        yield servers


LAUNCH = """
from sglrollout.engine.cpu_support import forgive_torchvision
forgive_torchvision()
from sglang_router.launch_router import main
main()
"""


@pytest.fixture(scope="module")
def router(servers: list[RealServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    port, log = free_port(), tmp_path_factory.mktemp("router") / "log"
    command = [sys.executable, "-c", LAUNCH, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin", "--disable-retries"]
    command += ["--worker-urls", *(server.url for server in servers)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    RealServer.logs[log] = None
    try:
        with httpx.Client(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client:
            while process.poll() is None and not is_up(client):
                time.sleep(0.2)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        del RealServer.logs[log]


def is_up(client: httpx.Client) -> bool:
    """Whether it has found both workers."""
    try:
        return len(client.get("/workers").json()["workers"]) == 2
    except (httpx.HTTPError, ValueError, KeyError):
        return False


@pytest.fixture(scope="module")
async def rollout(tiny_model: Path, router: str) -> AsyncIterator[sr.AsyncRolloutEngine]:
    remote = [sr.RemoteEngine(router, router=True)]
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=0, remote=remote) as rollout:
        yield rollout


async def test_samples_and_streams_go_through_it_to_both_workers(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    (status,) = rollout.engines
    assert status.info is not None
    assert status.info.tp_size == 2  # of both together
    model = untrained(tiny_model)
    assert await answers_like(rollout, model)

    async def read(prompt: str) -> sr.Completion:
        stream = rollout.stream(prompt, GREEDY)
        async for _ in stream:
            pass
        return stream.completion

    for prompt, completion in zip(PROMPTS, await asyncio.gather(*map(read, PROMPTS)), strict=True):
        ids = tuple(rollout.tokenizer.encode(prompt))
        assert list(completion.token_ids) == greedy(model, ids)


async def test_a_sync_reaches_both_workers(rollout: sr.AsyncRolloutEngine, tiny_model: Path) -> None:
    for step, mode in ((1, "retract"), (2, "abort")):
        model = trained(tiny_model, step)
        async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=1 << 15) as syncer:
            report = await syncer.sync(mode)  # type: ignore[arg-type]
            assert report.method == "broadcast"
            for _ in range(2):
                assert await answers_like(rollout, model)
            assert (await syncer.verify()).num_remote == 1


async def test_a_sample_that_is_cancelled_frees_its_workers_slot(
    rollout: sr.AsyncRolloutEngine, servers: list[RealServer]
) -> None:
    async def num_running() -> int:
        return sum([await server.num_running() for server in servers])

    endless = GREEDY.replace(max_new_tokens=1900)
    tasks = [asyncio.ensure_future(rollout.generate([prompt], sampling=endless)) for prompt in PROMPTS]
    with anyio.fail_after(20):
        while await num_running() < 2:
            await anyio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    with anyio.fail_after(3):
        while await num_running():
            await anyio.sleep(0.05)
