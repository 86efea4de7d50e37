"""Real engines that are killed under load: what callers have is what an undisturbed pool gives, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

import sglrollout as sr

pytestmark = pytest.mark.slow

GREEDY = sr.Sampling(temperature=0, max_new_tokens=160, ignore_eos=True)
PROMPTS = [f"{i} bottles of milk on the wall" for i in range(6)]


@pytest.fixture(scope="module")
async def pool(tiny_model: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """Engines for these tests alone: each test kills one, and the last stays."""
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=3, device="cpu", dtype="float32", max_restarts=0) as pool:
        yield pool


async def undisturbed(pool: sr.AsyncRolloutEngine) -> list[tuple[int, ...]]:
    groups = await pool.generate(PROMPTS, sampling=GREEDY)
    return [group.completions[0].token_ids for group in groups]


def kill(pool: sr.AsyncRolloutEngine, name: str, scheduler: bool) -> None:
    (info,) = (engine.info for engine in pool.engines if engine.name == name)
    assert info is not None
    os.kill(info.child_pids[0] if scheduler else info.pid, signal.SIGKILL)


async def test_a_stream_and_a_session_go_on_when_their_host_is_killed(pool: sr.AsyncRolloutEngine) -> None:
    expected = await undisturbed(pool)
    async with pool.session(sampling=GREEDY) as quiet:
        quiet.add(PROMPTS[1])
        await quiet.generate()
        stream = pool.stream(PROMPTS[0], GREEDY, chunk_tokens=1)
        tokens = [*(await anext(stream)).token_ids]
        (engine,) = (engine.name for engine in pool.engines if engine.num_inflight)
        async with pool.session(sampling=GREEDY) as disturbed:
            disturbed.add(PROMPTS[1])
            turn = asyncio.ensure_future(disturbed.generate())
            while len(tokens) < 40:
                tokens += (await anext(stream)).token_ids
            kill(pool, engine, scheduler=False)
            async for chunk in stream:
                tokens += chunk.token_ids
            await turn
            assert disturbed.token_ids == quiet.token_ids
    assert tuple(tokens) == stream.completion.token_ids == expected[0]
    assert stream.completion.engine != engine
    assert stream.completion.logprobs is not None
    assert len(stream.completion.logprobs) == len(tokens)


async def test_groups_go_on_when_a_scheduler_is_killed(pool: sr.AsyncRolloutEngine) -> None:
    expected = await undisturbed(pool)
    task = asyncio.ensure_future(pool.generate(PROMPTS, n=2, sampling=GREEDY))
    with anyio.fail_after(20):
        while sum(bool(engine.num_inflight) for engine in pool.engines) < 2:
            await anyio.sleep(0.01)
    await anyio.sleep(0.2)
    victim = next(engine.name for engine in pool.engines if engine.num_inflight)
    kill(pool, victim, scheduler=True)
    groups = await task
    assert [completion.token_ids for group in groups for completion in group.completions] == [
        tokens for tokens in expected for _ in range(2)
    ]
    assert victim not in {completion.engine for group in groups for completion in group.completions}
    assert not any(engine.num_inflight for engine in pool.engines)
