"""Engines that hang are found by what does not move in them, and no engine is blamed for what others do."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.testing import ScriptedEngine

pytestmark = pytest.mark.timeout(30)

CONFIG = sr.RolloutConfig(
    model="org/name",
    engine_args={"skip_tokenizer_init": True},
    progress=False,
    max_restarts=0,
    stall_timeout_s=0.2,
    start_timeout_s=0.6,
)
PROMPT = [1, 2, 3]
LONG = sr.Sampling(max_new_tokens=400, ignore_eos=True)


def rollout_of(*engines: ScriptedEngine, **options: Any) -> sr.AsyncRolloutEngine:
    return sr.AsyncRolloutEngine(config=CONFIG.replace(**options), engines=engines)


async def warm(rollout: sr.AsyncRolloutEngine) -> None:
    await rollout.generate([[i] for i in range(8)], sampling=LONG.replace(max_new_tokens=2))
    await anyio.sleep(0.05)


async def test_an_engine_in_which_nothing_moves_is_ended_and_its_samples_go_on_elsewhere() -> None:
    engines = [ScriptedEngine(f"engine-{i}") for i in range(2)]
    async with rollout_of(*engines) as rollout:
        await warm(rollout)
        engines[0].hang = True
        begun = time.monotonic()
        groups = await rollout.generate([[i] for i in range(4)], sampling=LONG)
        assert 0.15 < time.monotonic() - begun < 2
        assert {group.completions[0].engine for group in groups} == {"engine-1"}
        assert [status.state for status in rollout.engines] == ["dead", "ready"]


async def test_one_that_hangs_is_found_also_if_what_runs_in_it_is_given_up_each_time_before() -> None:
    engines = [ScriptedEngine(f"engine-{i}") for i in range(2)]
    async with rollout_of(*engines) as rollout:
        await warm(rollout)
        engines[0].hang = True
        with anyio.fail_after(10):
            while rollout.engines[0].state == "ready":
                with suppress(sr.RequestTimeoutError):
                    await rollout.generate([[i] for i in range(4)], sampling=LONG, timeout_s=0.1)
                await anyio.sleep(0.06)  # at least one look at which nothing runs
        assert [status.state for status in rollout.engines] == ["dead", "ready"]


async def test_what_ended_it_says_so() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        await warm(rollout)
        engine.hang = True
        with pytest.raises(sr.EngineDiedError, match=r"engine-0: it hangs: nothing moved in it for 0.2 s, while 1 "):
            await rollout.generate([PROMPT], sampling=LONG)


async def test_an_engine_that_hangs_is_restarted() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine, max_restarts=1, restart_delay_s=0.01) as rollout:
        await warm(rollout)
        engine.hang = True
        task = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG))
        with anyio.fail_after(5):
            while rollout.engines[0].num_restarts == 0:
                await anyio.sleep(0.01)
        engine.hang = False
        assert len((await task)[0].completions[0].token_ids) == 400


async def test_a_slow_engine_is_left_alone() -> None:
    engine = ScriptedEngine(token_s=0.1)
    async with rollout_of(engine) as rollout:
        await rollout.generate([PROMPT], sampling=LONG.replace(max_new_tokens=12))
        assert rollout.engines[0].state == "ready"


async def test_an_idle_engine_is_left_alone() -> None:
    engine = ScriptedEngine(hang=True)
    async with rollout_of(engine, start_timeout_s=0.2) as rollout:
        await anyio.sleep(0.6)
        assert rollout.engines[0].state == "ready"


async def test_the_first_requests_of_an_engine_may_take_as_long_as_its_start() -> None:
    engine = ScriptedEngine(first_token_s=0.4)
    async with rollout_of(engine) as rollout:
        await rollout.generate([PROMPT], sampling=LONG.replace(max_new_tokens=2))
        engine.hang = True
        with anyio.fail_after(5), pytest.raises(sr.EngineDiedError):
            await rollout.generate([PROMPT], sampling=LONG)


async def test_a_paused_engine_is_left_alone() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        await warm(rollout)
        assert rollout._pool is not None
        task = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG))
        while not engine.num_running:
            await asyncio.sleep(0)
        member = rollout._pool.members[0]
        member.paused = engine.hang = True
        await anyio.sleep(0.5)
        member.paused = engine.hang = False
        await task


async def test_a_loop_that_the_users_code_blocks_makes_no_engine_guilty() -> None:
    engine = ScriptedEngine(token_s=0.01)
    async with rollout_of(engine) as rollout:
        await warm(rollout)
        task = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG.replace(max_new_tokens=100)))
        for _ in range(3):
            await anyio.sleep(0.02)
            time.sleep(0.5)  # noqa: ASYNC251 - that is the point
        await task
        assert rollout.engines[0].state == "ready"


async def test_an_engine_that_answers_no_command_is_ended() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        engine.num_unanswered = 1
        await anyio.sleep(0.15)
        assert rollout.engines[0].state == "ready"
        engine.num_unanswered = 2
        with anyio.fail_after(2):
            while rollout.engines[0].state != "dead":
                await anyio.sleep(0.01)


async def test_one_that_is_to_answer_a_command_is_left_alone_until_it_has() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        await warm(rollout)
        task = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG, on_error="return"))
        while not engine.num_running:
            await asyncio.sleep(0)
        engine.hang, engine.num_pending = True, 1
        await anyio.sleep(0.6)
        assert rollout.engines[0].state == "ready"
        engine.num_pending = 0
        with anyio.fail_after(5):
            await task
        assert rollout.engines[0].state == "dead"


async def test_it_can_be_switched_off() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine, stall_timeout_s=None) as rollout:
        await warm(rollout)
        engine.hang = True
        with pytest.raises(sr.RequestTimeoutError):
            await rollout.generate([PROMPT], sampling=LONG, timeout_s=0.6)
        assert rollout.engines[0].state == "ready"
