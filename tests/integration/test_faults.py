"""What befalls one of two real engines under load: callers get every token, and the engine comes back."""

from __future__ import annotations

import os
import resource
import signal
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import sglrollout as sr
from sglrollout.wire.messages import EngineInfo

pytestmark = pytest.mark.slow

GREEDY = sr.Sampling(temperature=0, max_new_tokens=300, ignore_eos=True)
STALL_S = 2.0


@pytest.fixture(scope="module")
async def pool(tiny_model: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """Engines for these tests alone, for each of them breaks one."""
    options: dict[str, Any] = {"max_restarts": 100, "restart_delay_s": 0.0, "stall_timeout_s": STALL_S}
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=2, device="cpu", dtype="float32", **options) as pool:
        yield pool


def info_of(pool: sr.AsyncRolloutEngine, name: str) -> EngineInfo:
    (info,) = (engine.info for engine in pool.engines if engine.name == name)
    assert info is not None
    return info


async def run_out_of_memory(pool: sr.AsyncRolloutEngine, name: str) -> None:
    scheduler = psutil.Process(info_of(pool, name).child_pids[0])
    scheduler.rlimit(resource.RLIMIT_AS, (scheduler.memory_info().vms, resource.RLIM_INFINITY))
    await pool.generate([[i % 200 + 3 for i in range(1800)]] * 8, sampling=GREEDY.replace(max_new_tokens=2))


async def stop_the_scheduler(pool: sr.AsyncRolloutEngine, name: str) -> None:
    os.kill(info_of(pool, name).child_pids[0], signal.SIGSTOP)


async def stop_the_host(pool: sr.AsyncRolloutEngine, name: str) -> None:
    os.kill(info_of(pool, name).pid, signal.SIGSTOP)


async def kill_the_scheduler(pool: sr.AsyncRolloutEngine, name: str) -> None:
    os.kill(info_of(pool, name).child_pids[0], signal.SIGKILL)


async def talk_nonsense_to_the_host(pool: sr.AsyncRolloutEngine, name: str) -> None:
    channel_of(pool, name)._writer.write(struct.pack("<I", 40) + b"\xff" * 40)


async def cut_the_channel(pool: sr.AsyncRolloutEngine, name: str) -> None:
    await channel_of(pool, name).close()


def channel_of(pool: sr.AsyncRolloutEngine, name: str) -> Any:
    assert pool._pool is not None
    (engine,) = (member.engine for member in pool._pool.members if member.name == name)
    return engine._channel  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "within_s", "reason"),
    [
        (kill_the_scheduler, 2.0, "scheduler 0 ended unasked"),
        (run_out_of_memory, 30.0, "scheduler 0 ended unasked"),
        (stop_the_scheduler, STALL_S + 2.0, "it hangs: nothing moved in it for 2 s"),
        (stop_the_host, STALL_S + 2.0, "it hangs: nothing moved in it for 2 s"),
        (talk_nonsense_to_the_host, 2.0, "its host is gone"),
        (cut_the_channel, 2.0, "its host is gone"),
    ],
)
async def test_an_engine_that_breaks_is_known_in_time_costs_no_token_and_comes_back(
    pool: sr.AsyncRolloutEngine,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[sr.AsyncRolloutEngine, str], Coroutine[Any, Any, None]],
    within_s: float,
    reason: str,
) -> None:
    with anyio.fail_after(120):
        while any(engine.state != "ready" for engine in pool.engines):
            await anyio.sleep(0.1)
    expected = (await pool.generate(["break it"], sampling=GREEDY))[0].completions[0].token_ids
    stream = pool.stream("break it", GREEDY, chunk_tokens=1)
    tokens = [token for _ in range(10) for token in (await anext(stream)).token_ids]
    (broken,) = (engine.name for engine in pool.engines if engine.num_inflight)
    begun = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fault, pool, broken)
        async for chunk in stream:
            tokens += chunk.token_ids
        with anyio.fail_after(within_s):
            while not any(record.getMessage().startswith(f"{broken}: ") for record in caplog.records):
                await anyio.sleep(0.02)
    assert time.monotonic() - begun < within_s + 10
    assert tuple(tokens) == expected
    assert stream.completion.engine != broken
    (message,) = (message for record in caplog.records if (message := record.getMessage()).startswith(f"{broken}: "))
    assert message.startswith(f"{broken}: {reason}")
    assert fault is not run_out_of_memory or "allocate memory" in message  # the end of its log says why
