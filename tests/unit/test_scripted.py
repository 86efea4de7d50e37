from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from sglrollout.engine.protocol import Engine, Request
from sglrollout.errors import EngineDiedError, EngineError, EngineRequestError, EngineStartError, LifecycleError
from sglrollout.testing import ScriptedEngine, hashed_tokens
from sglrollout.wire.messages import Finish, Load

SIX = {"max_new_tokens": 6, "ignore_eos": True}
MANY = {"max_new_tokens": 2000, "ignore_eos": True}


class Counted(Request):
    """Counts its ends."""

    def __init__(self, prompt_ids: list[int], sampling: dict[str, Any], chunk_tokens: int = 0) -> None:
        super().__init__(prompt_ids, sampling, chunk_tokens)
        self.num_ends = 0
        self.on_end = self._count

    def _count(self, request: Request) -> None:
        self.num_ends += 1


async def started(engine: ScriptedEngine) -> asyncio.Task[None]:
    await engine.start()
    return asyncio.ensure_future(engine.run())


async def submitted(engine: ScriptedEngine, count: int, sampling: dict[str, Any] = MANY) -> list[Counted]:
    requests = [Counted([i], sampling) for i in range(count)]
    for request in requests:
        await engine.submit(request)
    return requests


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_it_is_an_engine() -> None:
    engine: Engine = ScriptedEngine()
    assert not engine.alive
    assert await engine.start() is engine.info
    assert engine.alive
    await engine.close()
    assert not engine.alive


def test_the_default_script_says_the_same_in_every_process() -> None:
    ids, logprobs = hashed_tokens([1, 2, 3], {"max_new_tokens": 5, "ignore_eos": True}, 0)
    assert list(ids) == [10, 106, 202, 138, 90]
    assert all(logprob <= 0 for logprob in logprobs)


def test_the_default_script_follows_the_prompt_the_index_the_seed_and_the_temperature() -> None:
    def answer(prompt: list[int], index: int, **sampling: Any) -> Any:
        return hashed_tokens(prompt, {**SIX, **sampling}, index)

    assert answer([1], 0) != answer([2], 0)
    assert answer([1], 0) != answer([1], 1)
    assert answer([1], 0, seed=5) == answer([1], 1, seed=5) != answer([1], 1, seed=6)
    assert answer([1], 0, temperature=0) == answer([1], 1, temperature=0)


@pytest.mark.parametrize("index", range(20))
def test_the_default_script_keeps_to_the_number_of_tokens(index: int) -> None:
    ids, logprobs = hashed_tokens([1], {"max_new_tokens": 9, "min_new_tokens": 4}, index)
    assert 4 <= len(ids) == len(logprobs) <= 9


async def test_more_than_it_can_run_waits_in_it() -> None:
    engine = ScriptedEngine(max_running=3)
    running = await started(engine)
    requests = await submitted(engine, 10, SIX)
    await turns(3)
    assert (engine.num_running, engine.num_waiting) == (3, 7)
    assert [len(request.token_ids) > 0 for request in requests] == [True] * 3 + [False] * 7
    await turns(60)
    assert [request.num_ends for request in requests] == [1] * 10
    assert engine.peak_running == 3
    assert engine.num_tokens == 60
    await engine.close()
    await running


async def test_its_death_ends_everything_once_and_is_told_once() -> None:
    engine = ScriptedEngine(max_running=2)
    deaths: list[Exception] = []
    engine.on_death = deaths.append
    running = await started(engine)
    requests = await submitted(engine, 4)
    await turns()
    engine.die("first")
    engine.die("second")
    assert [str(death) for death in deaths] == ["engine-0: first"]
    assert not engine.alive
    for request in requests:
        assert (request.num_ends, request.finish_reason, request.error) == (1, "error", deaths[0])
    with pytest.raises(EngineDiedError, match="first"):
        await engine.submit(Request([1], SIX))
    with pytest.raises(EngineDiedError):
        await engine.command("flush_cache")
    await asyncio.wait_for(running, 1)
    await engine.close()
    assert [request.num_ends for request in requests] == [1] * 4
    assert len(deaths) == 1


async def test_it_dies_after_so_many_tokens() -> None:
    engine = ScriptedEngine(die_after=7)
    running = await started(engine)
    requests = await submitted(engine, 3)
    await asyncio.wait_for(running, 1)
    assert engine.num_tokens == 7
    assert sum(len(request.token_ids) for request in requests) == 7


async def test_closing_ends_everything_once_and_is_no_death() -> None:
    engine = ScriptedEngine(hang=True)
    deaths: list[Exception] = []
    engine.on_death = deaths.append
    running = await started(engine)
    (request,) = await submitted(engine, 1)
    await engine.close()
    await engine.close()
    engine.die()
    await asyncio.wait_for(running, 1)
    assert (request.num_ends, request.finish_reason, type(request.error)) == (1, "abort", LifecycleError)
    assert deaths == []
    with pytest.raises(EngineError, match="closed"):
        await engine.submit(Request([1], SIX))


async def test_an_aborted_request_gets_nothing_more_and_its_end_is_the_callers() -> None:
    engine = ScriptedEngine(max_running=1)
    running = await started(engine)
    first, second = await submitted(engine, 2)
    await turns(5)
    engine.abort(first)
    seen = len(first.token_ids)
    engine.abort(first)
    engine.abort(Request([1], SIX))
    await turns()
    assert (len(first.token_ids), first.num_ends) == (seen, 0)
    assert len(second.token_ids) > 0
    assert engine.aborted == [first]
    await engine.close()
    await running


async def test_a_request_that_is_to_fail_fails_with_the_engines_name() -> None:
    engine = ScriptedEngine(fail_request=lambda request: "refused" if request.prompt_ids == [1] else None)
    running = await started(engine)
    requests = await submitted(engine, 3, SIX)
    await turns(20)
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert isinstance(requests[1].error, EngineRequestError)
    assert str(requests[1].error) == "engine-0: refused"
    await engine.close()
    await running


async def test_tokens_come_in_parts_of_chunk_tokens_and_all_of_them_before_the_version_changes() -> None:
    engine = ScriptedEngine()
    running = await started(engine)
    request = Counted([1], {"max_new_tokens": 20, "ignore_eos": True}, chunk_tokens=8)
    await engine.submit(request)
    lengths = set()
    while engine.num_tokens < 11:
        await asyncio.sleep(0)
        lengths.add(len(request.token_ids))
    assert lengths == {0, 8}
    made = engine.num_tokens
    engine.weight_version = 4
    assert len(request.token_ids) == made
    assert engine.info is not None
    assert engine.info.weight_version == 4
    await turns(20)
    assert list(request.spans) == [(0, 0, made), (4, made, 20)]
    await engine.close()
    await running


async def test_latencies_are_kept() -> None:
    engine = ScriptedEngine(start_s=0.03, first_token_s=0.05, token_s=0.01)
    begun = time.monotonic()
    running = await started(engine)
    assert time.monotonic() - begun >= 0.03
    begun = time.monotonic()
    (request,) = await submitted(engine, 1, SIX)
    while not request.ended:
        await request.progress()
    assert request.first_token_s is not None
    assert request.first_token_s - begun >= 0.05
    assert time.monotonic() - begun >= 0.05 + 5 * 0.01
    await engine.close()
    await running


async def test_a_hanging_engine_goes_on_when_it_is_let() -> None:
    engine = ScriptedEngine(hang=True)
    running = await started(engine)
    (request,) = await submitted(engine, 1, SIX)
    await turns()
    assert not request.token_ids
    engine.hang = False
    await turns()
    assert request.finish == Finish("length", prompt_tokens=1)
    await engine.close()
    await running


async def test_load_is_reported_when_it_changes() -> None:
    engine = ScriptedEngine(max_running=2)
    reports: list[Load] = []
    engine.on_load = reports.append
    running = await started(engine)
    await submitted(engine, 3, SIX)
    await turns(30)
    seen = [(report.num_inflight, report.num_running, report.num_waiting) for report in reports]
    assert seen == [(3, 0, 3), (3, 2, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)]
    await engine.close()
    await running


async def test_it_starts_or_fails_as_it_is_told() -> None:
    engine = ScriptedEngine(fail_start="no such model")
    with pytest.raises(EngineStartError, match="engine-0: no such model"):
        await engine.start()
    engine.fail_start = None
    await engine.start()
    with pytest.raises(EngineStartError, match="it is ready"):
        await engine.start()
    await engine.close()
    with pytest.raises(EngineStartError, match="it is closed"):
        await engine.start()
    slow = ScriptedEngine(start_s=0.02)
    starting = asyncio.ensure_future(slow.start())
    await turns(2)
    slow.die("too early")
    with pytest.raises(EngineStartError, match="too early"):
        await starting


async def test_commands_it_does_not_know_are_refused() -> None:
    engine = ScriptedEngine()
    running = await started(engine)
    with pytest.raises(EngineRequestError, match="no such command"):
        await engine.command("fly")
    assert engine.commands == ["fly"]
    await engine.close()
    await running
