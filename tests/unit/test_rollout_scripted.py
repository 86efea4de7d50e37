from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import pickle
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.engine.protocol import Request
from sglrollout.pool.pool import Member
from sglrollout.testing import ScriptedEngine
from sglrollout.types import Prompt

pytestmark = pytest.mark.timeout(30)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)
PROMPT = [1, 2, 3]
SHORT = sr.Sampling(max_new_tokens=4, ignore_eos=True)
LONG = sr.Sampling(max_new_tokens=3000, ignore_eos=True)


def rollout_of(*engines: ScriptedEngine, **options: Any) -> sr.AsyncRolloutEngine:
    return sr.AsyncRolloutEngine(config=CONFIG.replace(**options), engines=engines or (ScriptedEngine(),))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Any) -> None:
    with anyio.fail_after(5):
        while not condition():
            await asyncio.sleep(0)


def is_idle(rollout: sr.AsyncRolloutEngine, *engines: ScriptedEngine) -> bool:
    """No slot is taken, nobody waits, and no engine holds anything."""
    slots = sum(status.num_inflight for status in rollout.engines)
    return not (slots or rollout.num_queued or any(engine.num_running or engine.num_waiting for engine in engines))


def counting(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
    """Tokens 0, 1, 2, ..., each with minus itself as its logprob."""
    count = sampling["max_new_tokens"]
    return list(range(count)), [-float(i) for i in range(count)]


# ------------------------------------------------------------ streams


@pytest.mark.parametrize("chunk_tokens", [1, 8])
async def test_a_stream_comes_in_chunks_of_the_asked_for_size(chunk_tokens: int) -> None:
    async with rollout_of(ScriptedEngine(script=counting)) as rollout:
        sampling = sr.Sampling(max_new_tokens=20)
        chunks = [chunk async for chunk in rollout.stream(PROMPT, sampling, chunk_tokens=chunk_tokens)]
    sizes = [len(chunk.token_ids) for chunk in chunks]
    assert sizes == ([1] * 20 if chunk_tokens == 1 else [8, 8, 4])
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(20))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_chunk_tokens_comes_from_the_config_by_default() -> None:
    async with rollout_of(chunk_tokens=5) as rollout:
        sizes = [
            len(chunk.token_ids)
            async for chunk in rollout.stream(PROMPT, sr.Sampling(max_new_tokens=12, ignore_eos=True))
        ]
    assert sizes == [5, 5, 2]


async def test_a_slow_reader_gets_whole_chunks_of_what_has_piled_up_and_nothing_is_lost() -> None:
    engine = ScriptedEngine(script=counting)
    async with rollout_of(engine) as rollout:
        stream = rollout.stream(PROMPT, sr.Sampling(max_new_tokens=20), chunk_tokens=8)
        first = await anext(stream)
        await until(lambda: engine.num_running == 0)
        rest = [chunk async for chunk in stream]
    assert [len(chunk.token_ids) for chunk in [first, *rest]] == [8, 8, 4]
    assert [token for chunk in [first, *rest] for token in chunk.token_ids] == list(range(20))


async def test_every_logprob_stays_with_its_token() -> None:
    async with rollout_of(ScriptedEngine(script=counting)) as rollout:
        stream = rollout.stream(PROMPT, sr.Sampling(max_new_tokens=30), chunk_tokens=7)
        chunks = [chunk async for chunk in stream]
        groups = await rollout.generate([PROMPT, [9]], n=3, sampling=sr.Sampling(max_new_tokens=30))
    parts: list[sr.Chunk | sr.Completion] = [*chunks, stream.completion, *groups[0].completions, *groups[1].completions]
    for part in parts:
        assert part.logprobs == tuple(-float(token) for token in part.token_ids)


async def test_logprobs_can_be_left_out() -> None:
    async with rollout_of() as rollout:
        quiet = SHORT.replace(logprobs=False)
        (group,) = await rollout.generate([PROMPT], sampling=quiet)
        assert group.completions[0].logprobs is None
        assert all([chunk.logprobs is None async for chunk in rollout.stream(PROMPT, quiet)])


async def test_a_streams_completion_is_what_its_chunks_were() -> None:
    async with rollout_of() as rollout:
        stream = rollout.stream(PROMPT, sr.Sampling(max_new_tokens=20), chunk_tokens=3)
        with pytest.raises(sr.LifecycleError, match="has not ended"):
            _ = stream.completion
        chunks = [chunk async for chunk in stream]
        whole = stream.completion
        assert whole.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
        assert whole.prompt_ids == tuple(PROMPT)
        assert whole.engine == "engine-0"
        assert whole.timings is not None
        assert whole.timings.first_token_s is not None
        assert 0 <= whole.timings.queue_s <= whole.timings.first_token_s <= whole.timings.total_s
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_text_without_a_tokenizer_is_refused_with_a_reason() -> None:
    async with rollout_of() as rollout:
        (group,) = await rollout.generate([PROMPT], sampling=SHORT)
        with pytest.raises(sr.LifecycleError, match="skip_tokenizer_init"):
            _ = group.completions[0].text
        with pytest.raises(sr.ConfigError, match="skip_tokenizer_init"):
            await rollout.generate(["a text"])


async def test_a_prompt_with_no_room_ends_at_once_and_reaches_no_engine() -> None:
    engine = ScriptedEngine(context_length=8)
    async with rollout_of(engine) as rollout:
        chunks = [chunk async for chunk in rollout.stream([1] * 8)]
        assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [((), "length")]
        groups = await rollout.generate([[1] * 8, [1] * 6, [1] * 9], n=2, sampling=LONG)
        assert [[len(c.token_ids) for c in group.completions] for group in groups] == [[0, 0], [2, 2], [0, 0]]
    assert len(engine.submitted) == 2


# ------------------------------------------------------------ leaving a stream early


async def test_break_aborts_the_request_and_frees_the_slot() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        async for _ in rollout.stream(PROMPT, LONG, chunk_tokens=1):
            assert rollout.engines[0].num_inflight == 1
            break
        await turns(3)
        assert engine.aborted == engine.submitted
        assert is_idle(rollout, engine)


async def test_an_exception_in_the_loop_aborts_the_request() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:

        async def user_code() -> None:
            async for _ in rollout.stream(PROMPT, LONG, chunk_tokens=1):
                raise ZeroDivisionError

        with suppress(ZeroDivisionError):  # its traceback holds the frames that hold the stream, and goes here
            await user_code()
        await until(lambda: is_idle(rollout, engine))
        assert len(engine.aborted) == 1


async def test_aclose_aborts_at_once_and_the_completion_is_what_there_was() -> None:
    engine = ScriptedEngine(script=counting)
    async with rollout_of(engine) as rollout:
        stream = rollout.stream(PROMPT, LONG, chunk_tokens=1)
        await anext(stream)
        await stream.aclose()
        assert is_idle(rollout, engine)
        assert stream.completion.finish_reason == "abort"
        assert stream.completion.token_ids[:1] == (0,)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert len(engine.aborted) == 1


async def test_async_with_aborts_at_the_end_of_its_block() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        async with rollout.stream(PROMPT, LONG) as stream:
            async for _ in stream:
                break
            assert not is_idle(rollout, engine)
        assert is_idle(rollout, engine)
        assert stream.completion.finish_reason == "abort"


@pytest.mark.parametrize("after_turns", range(12))
async def test_cancelling_the_task_aborts_the_request_wherever_it_waits(after_turns: int) -> None:
    engine = ScriptedEngine(first_token_s=0.0005)
    async with rollout_of(engine) as rollout:

        async def user_code() -> None:
            async for _ in rollout.stream(PROMPT, LONG, chunk_tokens=4):
                pass

        task = asyncio.ensure_future(user_code())
        await turns(after_turns)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        assert is_idle(rollout, engine)


async def test_a_stream_that_waits_for_a_slot_can_be_cancelled() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine, max_inflight=1) as rollout:
        async with rollout.stream(PROMPT, LONG) as first:
            await anext(first)
            task = asyncio.ensure_future(anext(rollout.stream(PROMPT, LONG)))
            await turns()
            assert rollout.num_queued == 1
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert rollout.num_queued == 0
        assert len(engine.submitted) == 1
        assert is_idle(rollout, engine)


async def test_a_stream_dropped_in_a_reference_cycle_is_aborted_when_it_is_collected() -> None:
    engine = ScriptedEngine(hang=True)
    async with rollout_of(engine) as rollout:
        stream: Any = rollout.stream(PROMPT, LONG)
        engine.hang = False
        await anext(stream)
        stream.itself = stream
        del stream
        assert not is_idle(rollout, engine)
        gc.collect()
        await turns(3)
        assert is_idle(rollout, engine)


async def test_a_stream_collected_on_another_thread_is_aborted_on_its_loop_at_once() -> None:
    aborted_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    dropped_s = []

    class Noting(ScriptedEngine):
        def abort(self, request: Request) -> None:
            super().abort(request)
            aborted_s.set_result(time.monotonic())

    engine = Noting()
    async with rollout_of(engine) as rollout:
        streams = [rollout.stream(PROMPT, LONG)]
        await anext(streams[0])
        engine.hang = True  # so that the loop sleeps, and has to be woken

        def drop() -> None:
            time.sleep(0.05)
            dropped_s.append(time.monotonic())
            streams.clear()

        thread = threading.Thread(target=drop)
        thread.start()
        assert await asyncio.wait_for(aborted_s, 5) - dropped_s[0] < 2
        thread.join()
        assert is_idle(rollout, engine)


async def test_a_stream_that_was_never_begun_holds_nothing() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        stream = rollout.stream(PROMPT)
        await stream.aclose()
        del stream
        assert engine.submitted == []


# ------------------------------------------------------------ generate


async def test_groups_come_in_the_order_of_prompts_and_samples_in_the_order_of_the_group() -> None:
    def slow_first(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
        count = 30 - prompt_ids[0] + (3 - index)  # later prompts and later samples end first
        return [prompt_ids[0]] * count, [0.0] * count

    engines = [ScriptedEngine(f"engine-{i}", slow_first) for i in range(3)]
    prompts = [[i] for i in range(30)]
    async with rollout_of(*engines) as rollout:
        groups = await rollout.generate(prompts, n=4)
        assert [group.prompt for group in groups] == prompts
        assert [group.index for group in groups] == list(range(30))
        for group in groups:
            assert [completion.index for completion in group.completions] == [0, 1, 2, 3]
            assert {completion.token_ids[0] for completion in group.completions} == {group.index}
            assert len({completion.engine for completion in group.completions}) == 1
        assert is_idle(rollout, *engines)
    assert all(len(engine.submitted) >= 20 for engine in engines)


async def test_the_samples_of_a_group_are_those_of_the_script() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        (group,) = await rollout.generate([PROMPT], n=3, sampling=sr.Sampling(max_new_tokens=40))
        for i, completion in enumerate(group.completions):
            ids, logprobs = engine.script(PROMPT, {"max_new_tokens": 40}, i)
            assert completion.token_ids == tuple(ids)
            assert completion.logprobs == tuple(logprobs)
            assert completion.finish_reason == ("length" if len(ids) == 40 else "stop")


async def test_a_stop_token_ends_a_completion() -> None:
    async with rollout_of(ScriptedEngine(script=counting)) as rollout:
        (group,) = await rollout.generate([PROMPT], sampling=sr.Sampling(stop_token_ids=[4]))
    (completion,) = group.completions
    assert (completion.token_ids, completion.finish_reason, completion.stop_match) == ((0, 1, 2, 3, 4), "stop", 4)


async def test_a_seed_gives_sample_i_seed_plus_i() -> None:
    engine = ScriptedEngine(deterministic=True)
    async with rollout_of(engine) as rollout:
        await rollout.generate([PROMPT], n=3, sampling=SHORT.replace(seed=7))
    assert [request.sampling["seed"] for request in engine.submitted] == [7, 8, 9]


async def test_sampling_options_reach_the_engine_as_plain_data_and_only_where_they_differ() -> None:
    engine = ScriptedEngine()
    sampling = sr.Sampling(temperature=0.5, top_k=3, stop_token_ids=[7], logit_bias={5: -1.0}, max_new_tokens=4)
    async with rollout_of(engine) as rollout:
        await rollout.generate([PROMPT, PROMPT], sampling=sampling)
    expected = {
        "temperature": 0.5,
        "top_k": 3,
        "stop_token_ids": [7],
        "logit_bias": {5: -1.0},
        "max_new_tokens": 4,
    }
    assert [request.sampling for request in engine.submitted] == [expected] * 2
    assert engine.submitted[0].sampling is not engine.submitted[1].sampling


async def test_no_prompts_are_no_groups() -> None:
    async with rollout_of() as rollout:
        assert await rollout.generate([]) == []
        assert [group async for group in rollout.as_completed(iter([]))] == []


async def test_ten_thousand_prompts_through_four_engines_finish_with_a_bounded_queue() -> None:
    engines = [ScriptedEngine(f"engine-{i}", max_running=8) for i in range(4)]
    queued = []

    async with rollout_of(*engines, max_queued=2) as rollout:

        async def watch() -> None:
            while True:
                queued.append(rollout.num_queued)
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        prompts = [[i % 30_000, i // 100] for i in range(10_000)]
        groups = await rollout.generate(prompts, sampling=sr.Sampling(max_new_tokens=3))
        watching.cancel()
        assert [group.prompt for group in groups] == prompts
        assert is_idle(rollout, *engines)
    assert max(queued) == 1
    assert [engine.peak_running for engine in engines] == [8] * 4
    assert sum(len(engine.submitted) for engine in engines) == 10_000


@pytest.mark.parametrize("num_engines", [4, 400])
async def test_a_call_of_one_prompt_looks_at_few_engines(num_engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    limit = vars(Member)["limit"].fget

    def counted(member: Member) -> Any:
        looks.append(member.name)
        return limit(member)

    async with rollout_of(*(ScriptedEngine(f"engine-{i}") for i in range(num_engines))) as rollout:
        await rollout.generate([[1]], sampling=SHORT)
        monkeypatch.setattr(Member, "limit", property(counted))
        for number in range(10):
            await rollout.generate([[number]], sampling=SHORT)
            assert [chunk async for chunk in rollout.stream([number], SHORT)]
    assert 0 < len(looks) <= 20 * 10


async def test_several_calls_at_once_share_the_slots_fairly() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine, max_inflight=4) as rollout:
        long = asyncio.ensure_future(rollout.generate([[i] for i in range(400)], sampling=SHORT))
        await until(lambda: len(engine.submitted) > 20)
        before = len(engine.submitted)
        assert len([chunk async for chunk in rollout.stream([7], SHORT)]) == 1
        assert len(engine.submitted) - before < 20  # it did not wait for the whole other call
        await long


@pytest.mark.parametrize("after_turns", [0, 1, 2, 3, 5, 8, 13, 40])
async def test_cancelling_generate_aborts_all_its_samples(after_turns: int) -> None:
    engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1")]
    async with rollout_of(*engines, max_inflight=5) as rollout:
        task = asyncio.ensure_future(rollout.generate([[i] for i in range(100)], n=2, sampling=LONG))
        await turns(after_turns)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        await turns(5)
        assert is_idle(rollout, *engines)
        num_submitted = sum(len(engine.submitted) for engine in engines)
        await turns()
        assert sum(len(engine.submitted) for engine in engines) == num_submitted


# ------------------------------------------------------------ errors


def refuses_odd(request: Request) -> str | None:
    return "odd prompts are not served" if request.prompt_ids[0] % 2 else None


async def test_on_error_raise_ends_the_call_and_what_it_started() -> None:
    engine = ScriptedEngine(fail_request=refuses_odd)
    async with rollout_of(engine) as rollout:
        with pytest.raises(sr.EngineRequestError, match="engine-0: odd prompts are not served"):
            await rollout.generate([[0], [2], [3], [4]], sampling=LONG)
        assert is_idle(rollout, engine)


async def test_on_error_return_gives_failed_samples_as_data() -> None:
    engine = ScriptedEngine(fail_request=refuses_odd)
    async with rollout_of(engine) as rollout:
        groups = await rollout.generate([[i] for i in range(6)], n=2, sampling=SHORT, on_error="return")
        assert is_idle(rollout, engine)
    for group in groups:
        assert len(group.completions) == 2
        for completion in group.completions:
            failed = group.index % 2 == 1
            assert completion.finish_reason == ("error" if failed else "length")
            assert isinstance(completion.error, sr.EngineRequestError) == failed


async def test_a_streams_failure_is_raised_from_its_loop_and_frees_the_slot() -> None:
    engine = ScriptedEngine(fail_request=refuses_odd)
    async with rollout_of(engine) as rollout:
        with pytest.raises(sr.EngineRequestError):
            async for _ in rollout.stream([1]):
                pass
        assert is_idle(rollout, engine)


async def test_tokens_that_came_before_a_death_are_streamed_before_its_error() -> None:
    engine = ScriptedEngine(script=counting, die_after=10)
    async with rollout_of(engine, ScriptedEngine("engine-1"), failover="none") as rollout:
        stream = rollout.stream(PROMPT, LONG, chunk_tokens=1)
        chunks = [await anext(stream) for _ in range(10)]
        with pytest.raises(sr.EngineDiedError, match="engine-0"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(10))
    assert {chunk.finish_reason for chunk in chunks} == {None}


async def test_when_one_engine_dies_its_samples_are_data_and_the_others_finish() -> None:
    engines = [ScriptedEngine("engine-0", die_after=50), ScriptedEngine("engine-1")]
    async with rollout_of(*engines, max_inflight=4, failover="none") as rollout:
        groups = await rollout.generate([[i] for i in range(40)], sampling=SHORT, on_error="return")
        completions = [group.completions[0] for group in groups]
        failed = [completion for completion in completions if completion.finish_reason == "error"]
        assert 1 <= len(failed) <= 4
        assert all(isinstance(completion.error, sr.EngineDiedError) for completion in failed)
        assert all(completion.engine == "engine-0" for completion in failed)
        assert [status.state for status in rollout.engines] == ["dead", "ready"]
        assert is_idle(rollout, *engines)


async def test_when_all_engines_are_dead_calls_are_told_so() -> None:
    engines = [ScriptedEngine("engine-0", die_after=20), ScriptedEngine("engine-1", die_after=20)]
    async with rollout_of(*engines, max_inflight=2) as rollout:
        with pytest.raises(sr.NoEngineError, match="every engine of the pool is dead"):
            await rollout.generate([[i] for i in range(40)], sampling=SHORT, on_error="return")
        with pytest.raises(sr.NoEngineError):
            await anext(rollout.stream(PROMPT))


async def test_an_engine_that_died_before_it_had_the_sample_is_no_failure_of_the_sample() -> None:
    class DiesOnSubmit(ScriptedEngine):
        async def submit(self, request: Request) -> None:
            self.die("just now")
            await super().submit(request)

    engines = [DiesOnSubmit("engine-0"), ScriptedEngine("engine-1")]
    async with rollout_of(*engines) as rollout:
        (group,) = await rollout.generate([PROMPT], sampling=SHORT)
        assert group.completions[0].engine == "engine-1"
        assert is_idle(rollout, *engines)


class Crowded(ScriptedEngine):
    """Takes a while to take a request, as when the channel to an engine is full."""

    async def submit(self, request: Request) -> None:
        await super().submit(request)
        await turns(30)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_sample_that_ends_while_it_is_still_being_handed_over_is_in_its_group(n: int) -> None:
    async with rollout_of(Crowded()) as rollout:
        groups = await rollout.generate([[i] for i in range(4)], n=n, sampling=SHORT)
        assert [len(group.completions) for group in groups] == [n] * 4


async def test_an_engine_that_dies_while_a_sample_is_handed_over_fails_that_sample_alone() -> None:
    engines = [Crowded("engine-0", die_after=2), ScriptedEngine("engine-1")]
    async with rollout_of(*engines, failover="none") as rollout:
        groups = await rollout.generate([[0], [1]], sampling=SHORT, on_error="return")
        reasons = [[completion.finish_reason for completion in group.completions] for group in groups]
        assert reasons == [["error"], ["length"]]


# ------------------------------------------------------------ deadlines


@pytest.fixture
def stuck() -> ScriptedEngine:
    return ScriptedEngine(hang=True)


async def test_a_timeout_aborts_the_request_and_is_raised(stuck: ScriptedEngine) -> None:
    async with rollout_of(stuck) as rollout:
        with anyio.fail_after(5), pytest.raises(sr.RequestTimeoutError, match="not finished by its deadline"):
            await rollout.generate([PROMPT], timeout_s=0.02)
        with anyio.fail_after(5), pytest.raises(sr.RequestTimeoutError):
            await anext(rollout.stream(PROMPT, timeout_s=0.02))
        assert stuck.aborted == stuck.submitted
        assert is_idle(rollout, stuck)


async def test_a_timeout_can_be_data_with_the_tokens_there_were() -> None:
    async with rollout_of(ScriptedEngine(script=counting, token_s=0.005)) as rollout:
        (group,) = await rollout.generate([PROMPT], sampling=LONG, timeout_s=0.1, on_error="return")
    (completion,) = group.completions
    assert completion.finish_reason == "error"
    assert isinstance(completion.error, sr.RequestTimeoutError)
    assert completion.token_ids == tuple(range(len(completion.token_ids))) != ()


async def test_the_configs_timeout_holds_where_the_call_gives_none(stuck: ScriptedEngine) -> None:
    async with rollout_of(stuck, request_timeout_s=0.02) as rollout:
        with anyio.fail_after(5), pytest.raises(sr.RequestTimeoutError):
            await rollout.generate([PROMPT])


async def test_a_timeout_in_the_queue_is_raised(stuck: ScriptedEngine) -> None:
    async with rollout_of(stuck, max_inflight=1) as rollout:
        async with rollout.stream(PROMPT) as first:
            holding = asyncio.ensure_future(anext(first))
            await turns()
            with anyio.fail_after(5), pytest.raises(sr.RequestTimeoutError):
                await rollout.generate([PROMPT], timeout_s=0.02)
            with anyio.fail_after(5), pytest.raises(sr.RequestTimeoutError):
                await anext(rollout.stream(PROMPT, timeout_s=0.02))
            assert len(stuck.submitted) == 1
            holding.cancel()
            await asyncio.wait([holding])
        assert is_idle(rollout, stuck)


async def test_a_timeout_in_the_queue_can_be_data(stuck: ScriptedEngine) -> None:
    async with rollout_of(stuck, max_inflight=1) as rollout:
        async with rollout.stream(PROMPT) as first:
            holding = asyncio.ensure_future(anext(first))
            await turns()
            with anyio.fail_after(5):
                groups = await rollout.generate([[i] for i in range(3)], n=2, timeout_s=0.02, on_error="return")
            errors = [completion.error for group in groups for completion in group.completions]
            assert [type(error) for error in errors] == [sr.RequestTimeoutError] * 6
            assert len(stuck.submitted) == 1
            holding.cancel()
            await asyncio.wait([holding])
        assert is_idle(rollout, stuck)


async def test_a_sample_that_ends_in_time_leaves_no_timer() -> None:
    async with rollout_of() as rollout:
        await rollout.generate([PROMPT], sampling=SHORT, timeout_s=60)
        loop: Any = asyncio.get_running_loop()
        assert all(handle.cancelled() for handle in loop._scheduled if 30 < handle.when() - loop.time() < 100)


# ------------------------------------------------------------ as_completed


async def test_groups_come_as_they_complete() -> None:
    def by_prompt(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
        return [1] * prompt_ids[0], [0.0] * prompt_ids[0]

    async with rollout_of(ScriptedEngine(script=by_prompt)) as rollout:
        order = [group.prompt async for group in rollout.as_completed([[30], [5], [15]])]
    assert order == [[5], [15], [30]]


def endless(taken: list[int]) -> Iterator[Prompt]:
    while True:
        taken.append(len(taken))
        yield [len(taken) % 1000]


async def endless_async(taken: list[int]) -> AsyncIterator[Prompt]:
    for prompt in endless(taken):
        await asyncio.sleep(0)
        yield prompt


@pytest.mark.parametrize("source", [endless, endless_async])
@pytest.mark.parametrize("n", [1, 4])
async def test_an_endless_iterable_is_read_no_further_ahead_than_keeps_the_engines_busy(source: Any, n: int) -> None:
    engines = [ScriptedEngine("engine-0", max_running=50), ScriptedEngine("engine-1", max_running=50)]
    taken: list[int] = []
    ahead = []
    async with rollout_of(*engines) as rollout:
        async with rollout.as_completed(source(taken), n=n, sampling=SHORT) as groups:
            num_seen = 0
            async for _ in groups:
                num_seen += 1
                await turns(8)  # a loop slower than the engines
                ahead.append(len(taken) - num_seen)
                if num_seen == 300:
                    break
        await turns(5)
        assert is_idle(rollout, *engines)
        num_taken = len(taken)
        await turns()
        assert len(taken) == num_taken
    assert max(ahead) <= 2 * 100 // n + 64
    assert max(ahead) >= 100 // n  # and far enough


async def test_leaving_as_completed_by_break_aborts_the_rest() -> None:
    engine = ScriptedEngine(script=lambda ids, sampling, index: ([1] * ids[0], [0.0] * ids[0]))
    async with rollout_of(engine) as rollout:
        async for group in rollout.as_completed([[1], [2000], [2000]], sampling=LONG):
            assert group.index == 0
            break
        await turns(5)
        assert len(engine.aborted) == 2
        assert is_idle(rollout, engine)


async def test_a_sample_granted_in_the_instant_in_which_the_call_is_left_is_aborted(stuck: ScriptedEngine) -> None:
    async with rollout_of(stuck, max_inflight=1) as rollout:
        first = rollout.stream(PROMPT)
        holding = asyncio.ensure_future(anext(first))
        await turns()
        groups = rollout.as_completed([[5]] * 4)
        waiting = asyncio.ensure_future(anext(groups))
        await until(lambda: rollout.num_queued == 1)
        await first.aclose()  # gives its slot to the group's feeder, which has not run yet
        await groups.aclose()
        await turns(10)
        assert is_idle(rollout, stuck)
        for task in (holding, waiting):
            task.cancel()
        await asyncio.wait([holding, waiting])


async def test_an_exception_of_the_prompts_ends_the_loop_as_it_is() -> None:
    def broken() -> Iterator[Prompt]:
        yield [1]
        raise ZeroDivisionError("in the user's iterator")

    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        with pytest.raises(ZeroDivisionError, match="user's iterator"):
            async for _ in rollout.as_completed(broken(), sampling=LONG):
                pass
        await turns(3)
        assert is_idle(rollout, engine)
        assert len(await rollout.generate([PROMPT], sampling=SHORT)) == 1


async def test_an_exception_of_async_prompts_ends_the_loop_as_it_is() -> None:
    async def broken() -> AsyncIterator[Prompt]:
        yield [1]
        await asyncio.sleep(0.001)
        raise ZeroDivisionError("in the user's iterator")

    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        with pytest.raises(ZeroDivisionError, match="user's iterator"):
            async for _ in rollout.as_completed(broken(), sampling=LONG):
                pass
        assert is_idle(rollout, engine)


async def test_a_wrong_prompt_of_an_iterable_ends_the_loop_where_it_is_reached() -> None:
    prompts: list[Any] = [[1], [2], ["x"]]
    async with rollout_of() as rollout:
        with pytest.raises(sr.ConfigError) as caught:
            async for _ in rollout.as_completed(iter(prompts)):
                pass
        assert caught.value.field == "prompts[2]"


async def test_a_wrong_prompt_of_a_list_starts_nothing() -> None:
    engine = ScriptedEngine()
    prompts: list[Any] = [[1], [2], ["x"]]
    async with rollout_of(engine) as rollout:
        with pytest.raises(sr.ConfigError):
            await rollout.generate(prompts)
    assert engine.submitted == []


async def test_async_prompts_that_are_left_run_their_cleanup() -> None:
    cleaned = []

    async def prompts() -> AsyncIterator[Prompt]:
        try:
            while True:
                yield [1]
                await asyncio.sleep(0)
        finally:
            cleaned.append(True)

    async with rollout_of() as rollout:
        async with rollout.as_completed(prompts(), sampling=SHORT) as groups:
            await anext(groups)
        await turns()
        assert cleaned == [True]


# ------------------------------------------------------------ weight versions


async def test_a_completion_knows_the_version_of_every_token_across_a_change() -> None:
    engine = ScriptedEngine(weight_version=3)
    async with rollout_of(engine) as rollout:
        task = asyncio.ensure_future(
            rollout.generate([PROMPT, [9]], sampling=sr.Sampling(max_new_tokens=60, ignore_eos=True))
        )
        await until(lambda: engine.num_tokens >= 40)
        engine.weight_version = 4
        groups = await task
    for group in groups:
        (first, second) = group.completions[0].weight_versions
        assert (first.version, first.start, second.version, second.end) == (3, 0, 4, 60)
        assert first.end == second.start >= 20


@pytest.mark.parametrize("chunk_tokens", [1, 8])
async def test_a_chunk_never_mixes_two_versions(chunk_tokens: int) -> None:
    engine = ScriptedEngine(script=counting)
    async with rollout_of(engine) as rollout:
        stream = rollout.stream(PROMPT, sr.Sampling(max_new_tokens=50), chunk_tokens=chunk_tokens)
        chunks = [await anext(stream)]
        for version in range(1, 5):
            seen = engine.num_tokens
            await until(lambda seen=seen: engine.num_tokens >= seen + 5)
            engine.weight_version = version
        chunks += [chunk async for chunk in stream]
    tokens = [(token, chunk.weight_version) for chunk in chunks for token in chunk.token_ids]
    whole = [(i, span.version) for span in stream.completion.weight_versions for i in range(span.start, span.end)]
    assert tokens == whole
    assert {version for _, version in tokens} == {0, 1, 2, 3, 4}
    assert max(len(chunk.token_ids) for chunk in chunks) <= chunk_tokens


# ------------------------------------------------------------ life


async def test_start_raises_the_engines_own_error_and_ends_the_others() -> None:
    engines = [ScriptedEngine("engine-0", start_s=60), ScriptedEngine("engine-1", fail_start="no such model")]
    with anyio.fail_after(5), pytest.raises(sr.EngineStartError, match="engine-1: no such model"):
        async with rollout_of(*engines):
            pass
    assert engines[0].stage == "closed"


async def test_start_that_does_not_wait_returns_at_once_and_the_first_call_waits() -> None:
    engine = ScriptedEngine(start_s=0.05)
    rollout = rollout_of(engine)
    begun = time.monotonic()
    assert await rollout.start(wait=False) is rollout
    assert time.monotonic() - begun < 0.04
    assert not engine.alive
    groups = await rollout.generate([PROMPT], sampling=SHORT)
    assert len(groups) == 1
    assert time.monotonic() - begun >= 0.05
    await rollout.close()


async def test_start_that_does_not_wait_raises_its_failure_from_every_call() -> None:
    rollout = await rollout_of(ScriptedEngine(fail_start="no such model")).start(wait=False)
    for _ in range(2):
        with pytest.raises(sr.EngineStartError, match="no such model"):
            await rollout.generate([PROMPT])
    with pytest.raises(sr.EngineStartError):
        await anext(rollout.stream(PROMPT))
    await rollout.close()


async def test_a_cancelled_start_ends_the_engines() -> None:
    engine = ScriptedEngine(start_s=60)
    rollout = rollout_of(engine)
    task = asyncio.ensure_future(rollout.start())
    await turns()
    assert engine.stage == "starting"
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert engine.stage == "closed"


async def test_closing_while_engines_start_fails_those_who_wait() -> None:
    engine = ScriptedEngine(start_s=60)
    rollout = await rollout_of(engine).start(wait=False)
    call = asyncio.ensure_future(rollout.generate([PROMPT]))
    await turns()
    await rollout.close()
    await asyncio.wait([call], timeout=5)
    assert isinstance(call.exception(), sr.LifecycleError)
    assert engine.stage == "closed"


async def test_every_call_may_come_from_a_task_of_its_own_as_cells_of_a_notebook_do() -> None:
    rollout = rollout_of(ScriptedEngine(script=counting))
    await asyncio.create_task(rollout.start())
    (group,) = await asyncio.create_task(rollout.generate([[1, 2]]))
    stream = rollout.stream([1, 2])
    first = await asyncio.create_task(anext(stream))
    rest = await asyncio.create_task(_rest_of(stream))
    assert (*first.token_ids, *rest) == group.completions[0].token_ids
    await asyncio.create_task(rollout.close())


async def _rest_of(stream: sr.Stream) -> list[int]:
    return [token async for chunk in stream for token in chunk.token_ids]


async def test_a_stream_has_one_consumer_at_a_time() -> None:
    async with rollout_of(ScriptedEngine(hang=True)) as rollout:
        stream = rollout.stream([1, 2])
        first = asyncio.create_task(anext(stream))
        await turns()
        with pytest.raises(sr.LifecycleError, match="one consumer"):
            await anext(stream)
        first.cancel()


async def test_a_prompt_source_that_is_cancelled_fails_its_call_and_not_the_pool() -> None:
    async def prompts() -> AsyncIterator[Prompt]:
        yield [1, 2]
        sleeping = asyncio.create_task(asyncio.sleep(9))
        sleeping.cancel()
        await sleeping

    async with rollout_of(ScriptedEngine()) as rollout:
        with pytest.raises(sr.ConfigError, match="was cancelled while it was read"):
            assert [group async for group in rollout.as_completed(prompts())]
        assert len(await rollout.generate([[1, 2]])) == 1


async def test_closing_ends_a_call_whose_prompts_are_still_being_checked() -> None:
    rollout = await rollout_of(ScriptedEngine()).start()
    call = asyncio.create_task(rollout.generate([[1, 2]] * 500_000))
    await asyncio.sleep(0.02)
    await rollout.close()
    with anyio.fail_after(5), pytest.raises(sr.LifecycleError):
        await call


@pytest.mark.parametrize("timeout_s", ["x", 0, -1.0, float("inf"), 10**400, True])
async def test_a_flush_with_a_wrong_deadline_never_reaches_an_engine(timeout_s: Any) -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        with pytest.raises(sr.ConfigError, match="timeout_s must be a number of seconds"):
            await rollout.flush_cache(timeout_s)
        assert engine.commands == []


async def test_a_flush_with_no_engine_left_is_an_error() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        engine.die("gone")
        await turns()
        with pytest.raises(sr.NoEngineError):
            await rollout.flush_cache()


async def test_results_can_be_pickled() -> None:
    async with rollout_of(ScriptedEngine(script=counting)) as rollout:
        groups = await rollout.generate([[1, 2]], n=2)
        chunks = [chunk async for chunk in rollout.stream([1, 2])]
    assert pickle.loads(pickle.dumps(groups)) == groups
    assert pickle.loads(pickle.dumps(chunks)) == chunks
    with_text = dataclasses.replace(groups[0].completions[0], _detokenize=lambda completion: "what it said")
    assert pickle.loads(pickle.dumps(with_text)).text == "what it said"


async def test_starting_twice_is_refused() -> None:
    async with rollout_of() as rollout:
        with pytest.raises(sr.LifecycleError, match="started already"):
            await rollout.start()
        assert len(await rollout.generate([PROMPT], sampling=SHORT)) == 1
    with pytest.raises(sr.LifecycleError, match="started already"):
        await rollout.start()


async def test_use_before_start_says_how_to_start() -> None:
    rollout = rollout_of()
    for call in (rollout.generate([PROMPT]), anext(rollout.stream(PROMPT)), rollout.flush_cache()):
        with pytest.raises(sr.LifecycleError, match="not started"):
            await call
    assert rollout.engines == ()
    assert (rollout.num_queued, rollout.weight_version) == (0, 0)
    await rollout.close()


async def test_use_after_close_is_refused_and_closing_twice_is_not() -> None:
    async with rollout_of() as rollout:
        begun, unbegun = rollout.stream(PROMPT, LONG), rollout.stream(PROMPT, LONG)
        await anext(begun)
    await rollout.close()
    with pytest.raises(sr.LifecycleError, match="closed"):
        await rollout.generate([PROMPT])
    with pytest.raises(sr.LifecycleError, match="closed"):
        await anext(unbegun)
    with pytest.raises(sr.LifecycleError, match="closed"):
        async for _ in begun:
            pass


@pytest.mark.parametrize("on_error", ["raise", "return"])
@pytest.mark.parametrize("after_turns", [0, 1, 2, 3, 5, 8, 20, 60])
async def test_closing_while_generating_is_a_lifecycle_error(on_error: Any, after_turns: int) -> None:
    engine = ScriptedEngine()
    rollout = await rollout_of(engine, max_inflight=3).start()
    prompts = [[i] for i in range(50)]
    call = asyncio.ensure_future(rollout.generate(prompts, n=2, sampling=LONG, on_error=on_error))
    await turns(after_turns)
    await rollout.close()
    await asyncio.wait([call], timeout=2)
    assert call.done()
    assert isinstance(call.exception(), sr.LifecycleError)


async def test_a_call_that_comes_while_engines_end_is_a_lifecycle_error() -> None:
    class SlowToEnd(ScriptedEngine):
        async def close(self) -> None:
            await super().close()
            await asyncio.sleep(0.05)

    rollout = await rollout_of(SlowToEnd()).start()
    closing = asyncio.ensure_future(rollout.close())
    await turns()
    assert not closing.done()
    for call in (rollout.generate([PROMPT]), anext(rollout.stream(PROMPT)), rollout.flush_cache()):
        with pytest.raises(sr.LifecycleError, match="closed"):
            await call
    await closing


async def test_closing_while_prompts_are_being_checked_is_a_lifecycle_error() -> None:
    class SlowPrompt(list[int]):
        def __iter__(self) -> Iterator[int]:
            time.sleep(0.05)
            return super().__iter__()

    rollout = await rollout_of().start()
    call = asyncio.ensure_future(rollout.generate([SlowPrompt([1])]))
    await turns()
    await rollout.close()
    await asyncio.wait([call], timeout=2)
    assert isinstance(call.exception(), sr.LifecycleError)


async def test_closing_while_as_completed_waits_for_a_prompt_is_a_lifecycle_error() -> None:
    async def never() -> AsyncIterator[Prompt]:
        await asyncio.sleep(60)
        yield [1]

    rollout = await rollout_of().start()
    call = asyncio.ensure_future(anext(rollout.as_completed(never())))
    await turns()
    await rollout.close()
    await asyncio.wait([call], timeout=2)
    assert call.done()
    assert isinstance(call.exception(), sr.LifecycleError)


async def test_closing_while_a_stream_waits_for_a_slot_or_a_token_is_a_lifecycle_error(stuck: ScriptedEngine) -> None:
    rollout = await rollout_of(stuck, max_inflight=1).start()
    streams = [rollout.stream(PROMPT) for _ in range(3)]
    calls = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await turns()
    assert rollout.num_queued == 2
    await rollout.close()
    await asyncio.wait(calls, timeout=2)
    assert [type(call.exception()) for call in calls] == [sr.LifecycleError] * 3


async def test_the_rollout_ends_when_the_loop_ends_with_an_exception() -> None:
    engine = ScriptedEngine()

    async def user_code() -> None:
        async with rollout_of(engine) as rollout:
            await anext(rollout.stream(PROMPT, LONG))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await user_code()
    assert engine.stage == "closed"


async def test_use_from_another_loop_is_refused() -> None:
    async with rollout_of() as rollout:

        async def misuse() -> None:
            for call in (rollout.generate([PROMPT]), anext(rollout.stream(PROMPT)), rollout.flush_cache()):
                with pytest.raises(sr.LifecycleError, match="another event loop"):
                    await call

        await asyncio.to_thread(asyncio.run, misuse())
        assert len(await rollout.generate([PROMPT], sampling=SHORT)) == 1


async def test_closing_from_another_loop_is_refused_and_does_not_hang() -> None:
    async with rollout_of() as rollout:

        async def misuse() -> None:
            with pytest.raises(sr.LifecycleError, match="another event loop"):
                await asyncio.wait_for(rollout.close(), 2)

        await asyncio.to_thread(asyncio.run, misuse())
        assert len(await rollout.generate([PROMPT], sampling=SHORT)) == 1


def test_a_rollout_whose_loop_has_ended_is_closed() -> None:
    engine = ScriptedEngine()
    rollout = rollout_of(engine)

    async def forgets_to_close() -> None:
        await rollout.start()

    asyncio.run(forgets_to_close())
    assert engine.stage == "closed"
    asyncio.run(rollout.close())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_process_is_refused() -> None:
    async with rollout_of() as rollout:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                asyncio.events._set_running_loop(None)
                with pytest.raises(sr.LifecycleError, match="fork"):
                    asyncio.run(rollout.close())
                with pytest.raises(sr.LifecycleError, match="fork"):
                    asyncio.run(rollout.generate([PROMPT]))
                status = 0
            finally:
                os._exit(status)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert status == 0
        assert len(await rollout.generate([PROMPT], sampling=SHORT)) == 1


async def test_flush_cache_reaches_every_living_engine() -> None:
    engines = [ScriptedEngine(f"engine-{i}") for i in range(3)]
    async with rollout_of(*engines) as rollout:
        engines[1].die()
        await rollout.flush_cache()
        assert [engine.commands for engine in engines] == [["flush_cache"], [], ["flush_cache"]]
        async with rollout.stream(PROMPT, LONG) as stream:
            await anext(stream)
            with pytest.raises(sr.EngineRequestError, match="requests are running"):
                await rollout.flush_cache()


async def test_the_state_of_every_engine_can_be_read() -> None:
    engines = [ScriptedEngine("engine-0", max_running=7), ScriptedEngine("engine-1", max_running=9)]
    async with rollout_of(*engines) as rollout, rollout.stream(PROMPT, LONG) as stream:
        await anext(stream)
        await turns(2)
        first, second = rollout.engines
        assert (first.name, first.state, first.num_inflight, first.limit) == ("engine-0", "ready", 1, 7)
        assert (second.name, second.state, second.num_inflight, second.limit) == ("engine-1", "ready", 0, 9)
        assert first.load is not None
        assert first.load.num_running == 1


BAD_CALLS: list[tuple[Any, str]] = [
    (lambda r: r.stream(PROMPT, chunk_tokens=0), "chunk_tokens"),
    (lambda r: r.stream(PROMPT, chunk_tokens=True), "chunk_tokens"),
    (lambda r: r.stream(PROMPT, timeout_s=0), "timeout_s"),
    (lambda r: r.stream(PROMPT, sampling={}), "sampling"),
    (lambda r: r.as_completed("a text"), "prompts"),
    (lambda r: r.as_completed(7), "prompts"),
    (lambda r: r.as_completed([PROMPT], n=0), "n"),
    (lambda r: r.as_completed([PROMPT], n=True), "n"),
    (lambda r: r.as_completed([PROMPT], on_error="ignore"), "on_error"),
]


@pytest.mark.parametrize(("call", "field"), BAD_CALLS)
def test_a_bad_call_is_refused_where_it_is_made(call: Any, field: str) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        call(rollout_of())
    assert caught.value.field == field


@pytest.mark.parametrize("options", [{"model": "org/name"}, {"num_engines": 2}])
def test_a_config_stands_alone(options: dict[str, Any]) -> None:
    with pytest.raises(sr.ConfigError, match="none may be given beside it"):
        sr.AsyncRolloutEngine(config=CONFIG, **options)


async def test_a_close_that_is_cancelled_ends_all_engines_first() -> None:
    class SlowToEnd(ScriptedEngine):
        async def close(self) -> None:
            await anyio.sleep(0.1)
            await super().close()

    engine = SlowToEnd()
    rollout = await rollout_of(engine).start()
    closing = asyncio.ensure_future(rollout.close())
    for _ in range(2):  # as by Ctrl-C, once and again
        await asyncio.sleep(0.01)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert engine.stage == "closed"
