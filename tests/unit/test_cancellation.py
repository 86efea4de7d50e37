"""Callers that are cancelled: at every await there is, all that the call held is free again, and the pool goes on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import sglrollout as sr
from sglrollout.testing import ScriptedEngine

pytestmark = pytest.mark.timeout(60)

SHORT = sr.Sampling(max_new_tokens=6, ignore_eos=True)
Call = Callable[[sr.AsyncRolloutEngine], Awaitable[Any]]


def said(prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int) -> tuple[list[int], list[float]]:
    count = sampling["max_new_tokens"]
    return [3 + i for i in range(count)], [-0.5] * count


async def generate(rollout: sr.AsyncRolloutEngine) -> None:
    await rollout.generate([[1], [2], [3]], n=3, sampling=SHORT)


async def stream(rollout: sr.AsyncRolloutEngine) -> None:
    async for _ in rollout.stream([1, 2], SHORT, chunk_tokens=1):
        await asyncio.sleep(0)


async def as_completed(rollout: sr.AsyncRolloutEngine) -> None:
    async for _ in rollout.as_completed(([i] for i in range(1, 6)), n=2, sampling=SHORT):
        pass


async def a_turn(rollout: sr.AsyncRolloutEngine) -> None:
    async with rollout.session(sampling=SHORT) as session:
        session.add("hello")
        await session.generate()
        await session.run("and again")


async def a_streamed_turn(rollout: sr.AsyncRolloutEngine) -> None:
    async with rollout.session(sampling=SHORT) as session:
        session.add("hello")
        async for _ in session.stream(chunk_tokens=2):
            pass


async def collect(rollout: sr.AsyncRolloutEngine) -> None:
    prompts = [[i] for i in range(1, 9)]
    async with rollout.collect(prompts, n=2, sampling=SHORT, target_groups=2, reward=len_of) as batches:
        async for _ in batches:
            pass


def len_of(completion: sr.Completion) -> float:
    return len(completion.token_ids)


async def sync(rollout: sr.AsyncRolloutEngine) -> None:
    async with sr.WeightSyncer(rollout, sr.TensorSource({"w": torch.zeros(2)})) as syncer:
        await syncer.sync()


async def sleep_and_wake(rollout: sr.AsyncRolloutEngine) -> None:
    await rollout.sleep(["kv_cache"])
    await rollout.wake()


async def a_sample_that_lost_its_engine(rollout: sr.AsyncRolloutEngine) -> None:
    assert rollout._pool is not None
    first = rollout._pool.members[0].engine
    assert isinstance(first, ScriptedEngine)
    first.die_after = first.num_tokens + 3
    await rollout.generate([[1], [2]], sampling=SHORT)


@pytest.mark.parametrize(
    "call",
    [
        *(generate, stream, as_completed, a_turn, a_streamed_turn, collect, sync, sleep_and_wake),
        a_sample_that_lost_its_engine,
    ],
)
async def test_a_call_that_is_cancelled_at_any_await_frees_all_it_held(call: Call, tiny_model: Path) -> None:
    config = sr.RolloutConfig(model=str(tiny_model), progress=False, max_inflight=2)
    num_turns, ended = 0, False
    while not ended:
        engines = [ScriptedEngine(f"engine-{i}", said, vocab_size=512, memory_saver=True) for i in range(2)]
        async with sr.AsyncRolloutEngine(config=config, engines=engines) as rollout:
            task = asyncio.ensure_future(call(rollout))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            ended = task.done()
            task.cancel()
            await asyncio.wait([task])
            if ended:
                await task
            for engine in engines:
                engine.hang = True  # so that nothing ends by itself
            with anyio.fail_after(5):
                while not is_idle(rollout, *engines):
                    await asyncio.sleep(0)
            for engine in engines:
                engine.hang = False
            if any(engine.state == "asleep" for engine in rollout.engines):
                await rollout.wake()
            if any(engine.state == "stale" for engine in rollout.engines):
                await sync(rollout)
            (group,) = await rollout.generate([[7]], sampling=SHORT)
            assert len(group.completions[0].token_ids) == 6
        num_turns += 1 + num_turns // 12
    assert num_turns > 3
    gc.collect()  # a coroutine that was never awaited, or a task whose error nobody saw, speaks up here


def is_idle(rollout: sr.AsyncRolloutEngine, *engines: ScriptedEngine) -> bool:
    slots = sum(status.num_inflight for status in rollout.engines)
    held = any(engine.num_running or engine.num_waiting for engine in engines if engine.alive)
    return not (slots or rollout.num_queued or held)
