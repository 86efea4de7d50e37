"""Samples whose engine is lost: they go on in another one, and nobody sees a token twice, or misses one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import pytest
import torch

import sglrollout as sr
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.messages import Output

pytestmark = pytest.mark.timeout(30)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)
PROMPT = [7, 8, 9]
LONG = sr.Sampling(max_new_tokens=100, ignore_eos=True)
PENALIZED = LONG.replace(frequency_penalty=0.5)


def continuing(prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int) -> Any:
    """Each token is the length of what is before it, whichever engine makes it, and minus that is its logprob."""
    start, count = len(prompt_ids), sampling["max_new_tokens"]
    return list(range(start, start + count)), [-float(i) for i in range(start, start + count)]


WHOLE = tuple(range(3, 103))


def engine(name: str = "engine-0", **options: Any) -> ScriptedEngine:
    return ScriptedEngine(name, continuing, **options)


def rollout_of(*engines: ScriptedEngine, **options: Any) -> sr.AsyncRolloutEngine:
    return sr.AsyncRolloutEngine(config=CONFIG.replace(**options), engines=engines)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await asyncio.sleep(0)


def is_idle(rollout: sr.AsyncRolloutEngine, *engines: ScriptedEngine) -> bool:
    slots = sum(status.num_inflight for status in rollout.engines)
    return not (slots or rollout.num_queued or any(e.num_running or e.num_waiting for e in engines if e.alive))


# ------------------------------------------------------------ from the tokens it has


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
async def test_a_stream_goes_on_without_repeating_or_losing_a_token(chunk_tokens: int) -> None:
    engines = [engine("engine-0", die_after=30), engine("engine-1", die_after=30, weight_version=4), engine("engine-2")]
    async with rollout_of(*engines) as rollout:
        stream = rollout.stream(PROMPT, LONG, chunk_tokens=chunk_tokens)
        chunks = [chunk async for chunk in stream]
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == WHOLE
    assert tuple(value for chunk in chunks for value in chunk.logprobs or ()) == tuple(-float(i) for i in WHOLE)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert stream.completion.token_ids == WHOLE


async def test_a_group_goes_on_with_the_logprobs_and_versions_of_the_tokens_it_has() -> None:
    engines = [engine("engine-0", hang=True), engine("engine-1", weight_version=5)]
    async with rollout_of(*engines) as rollout:
        task = asyncio.ensure_future(rollout.generate([PROMPT], n=4, sampling=LONG))
        await until(lambda: len(engines[0].submitted) == 4)
        for request in engines[0].submitted:
            request.deliver(Output(request.request_id, [3, 4, 5], [-3.0, -4.0, -5.0], None), 3)
        engines[0].die("out of memory")
        (group,) = await task
        assert is_idle(rollout, *engines)
    for index, completion in enumerate(group.completions):
        assert (completion.token_ids, completion.prompt_ids, completion.index) == (WHOLE, tuple(PROMPT), index)
        assert completion.logprobs == tuple(-float(i) for i in WHOLE)
        assert completion.weight_versions == ((3, 0, 3), (5, 3, 100))
        assert (completion.finish_reason, completion.error, completion.engine) == ("length", None, "engine-1")
    assert [tuple(request.prompt_ids) for request in engines[1].submitted] == [(*PROMPT, 3, 4, 5)] * 4
    assert [request.sampling["max_new_tokens"] for request in engines[1].submitted] == [97] * 4


async def test_what_is_left_to_sample_gets_smaller_with_the_tokens_there_are() -> None:
    first, second = engine("engine-0", hang=True), engine("engine-1")
    async with rollout_of(first, second) as rollout:
        task = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG.replace(min_new_tokens=60)))
        await until(lambda: len(first.submitted) == 1)
        first.submitted[0].deliver(Output(0, [*range(3, 23)], [-float(i) for i in range(3, 23)], None), 0)
        first.die()
        (group,) = await task
        assert group.completions[0].token_ids == WHOLE
    given = second.submitted[0].sampling
    assert (given["max_new_tokens"], given["min_new_tokens"]) == (80, 40)


async def test_a_sample_whose_last_token_came_before_its_end_did_has_ended() -> None:
    first, second = engine("engine-0", hang=True), engine("engine-1")
    async with rollout_of(first, second) as rollout:
        task = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG))
        await until(lambda: len(first.submitted) == 1)
        first.submitted[0].deliver(Output(0, [*WHOLE], [-float(i) for i in WHOLE], None), 0)
        first.die()
        (group,) = await task
    assert (group.completions[0].token_ids, group.completions[0].finish_reason) == (WHOLE, "length")
    assert second.submitted == []


async def test_a_seed_stays_the_same() -> None:
    engines = [engine(f"engine-{i}", deterministic=True) for i in range(2)]
    engines[0].hang = True
    async with rollout_of(*engines) as rollout:
        task = asyncio.ensure_future(rollout.generate([PROMPT], n=3, sampling=LONG))
        await until(lambda: len(engines[0].submitted) == 3)
        seeds = [request.sampling["seed"] for request in engines[0].submitted]
        engines[0].die()
        await task
    assert [request.sampling["seed"] for request in engines[1].submitted] == seeds
    assert len(set(seeds)) == 3


# ------------------------------------------------------------ anew


@pytest.mark.parametrize(("sampling", "options"), [(LONG, {"failover": "restart"}), (PENALIZED, {})])
async def test_what_cannot_or_is_not_to_go_on_from_its_tokens_begins_anew(
    sampling: sr.Sampling, options: dict[str, Any]
) -> None:
    engines = [engine("engine-0", die_after=60, weight_version=1), engine("engine-1", weight_version=2)]
    async with rollout_of(*engines, **options) as rollout:
        (group,) = await rollout.generate([PROMPT], sampling=sampling)
    (completion,) = group.completions
    assert (completion.token_ids, completion.weight_versions) == (WHOLE, ((2, 0, 100),))
    assert completion.logprobs == tuple(-float(i) for i in WHOLE)
    assert [tuple(request.prompt_ids) for request in engines[1].submitted] == [tuple(PROMPT)]


async def test_a_stream_begins_anew_only_where_no_token_was_given_out() -> None:
    engines = [engine("engine-0", hang=True), engine("engine-1", die_after=20), engine("engine-2")]
    async with rollout_of(*engines) as rollout:
        stream = rollout.stream(PROMPT, PENALIZED, chunk_tokens=5)
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: len(engines[0].submitted) == 1)
        engines[0].die()
        assert (await first).token_ids == (3, 4, 5, 6, 7)
        with pytest.raises(sr.EngineDiedError, match="engine-1"):
            async for _ in stream:
                pass
        assert engines[2].submitted == []


# ------------------------------------------------------------ not at all


async def test_without_failover_a_sample_fails_with_its_engine() -> None:
    async with rollout_of(engine("engine-0", die_after=20), engine("engine-1"), failover="none") as rollout:
        (group,) = await rollout.generate([PROMPT], sampling=LONG, on_error="return")
    assert isinstance(group.completions[0].error, sr.EngineDiedError)


@pytest.mark.parametrize("most", [0, 2])
async def test_a_sample_loses_no_more_engines_than_it_may(most: int) -> None:
    engines = [engine(f"engine-{i}", die_after=10) for i in range(5)]
    async with rollout_of(*engines, max_failovers=most) as rollout:
        with pytest.raises(sr.EngineDiedError, match=f"engine-{most}"):
            await rollout.generate([PROMPT], sampling=LONG)
        assert sum(not e.alive for e in engines) == most + 1


async def test_where_no_engine_is_left_a_sample_fails_with_what_killed_the_last() -> None:
    async with rollout_of(engine("engine-0", die_after=20), engine("engine-1", die_after=20)) as rollout:
        with pytest.raises(sr.EngineDiedError, match="engine-1: it was told to die after 20 tokens"):
            await rollout.generate([PROMPT], sampling=LONG)
        with pytest.raises(sr.NoEngineError):
            await rollout.generate([PROMPT])


async def test_a_request_that_an_engine_refuses_is_not_tried_elsewhere() -> None:
    engines = [engine("engine-0", fail_request=lambda request: "too long"), engine("engine-1")]
    async with rollout_of(*engines) as rollout:
        with pytest.raises(sr.EngineRequestError, match="too long"):
            await rollout.generate([PROMPT], sampling=LONG)
    assert engines[1].submitted == []


# ------------------------------------------------------------ while it looks for another


async def lost(rollout: sr.AsyncRolloutEngine, *engines: ScriptedEngine, **options: Any) -> asyncio.Future[Any]:
    """A sample that has lost the first engine, and waits for the second, which is full."""
    task = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG, **options))
    await until(lambda: len(engines[0].submitted) == 1)
    full = asyncio.ensure_future(rollout.generate([[1]], sampling=LONG.replace(max_new_tokens=30000)))
    await until(lambda: len(engines[1].submitted) == 1)
    engines[0].die()
    await until(lambda: rollout.num_queued == 1)
    full.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def test_one_that_is_cancelled_leaves_the_queue() -> None:
    engines = [engine("engine-0", hang=True), engine("engine-1", token_s=0.001)]
    async with rollout_of(*engines, max_inflight=1) as rollout:
        task = await lost(rollout, *engines)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: rollout.num_queued == 0)
        assert len(engines[1].submitted) == 1


async def test_its_deadline_is_that_of_the_whole() -> None:
    engines = [engine("engine-0", hang=True), engine("engine-1", token_s=0.001)]
    async with rollout_of(*engines, max_inflight=1) as rollout:
        task = await lost(rollout, *engines, timeout_s=0.3)
        with anyio.fail_after(2), pytest.raises(sr.RequestTimeoutError):
            await task
        await until(lambda: rollout.num_queued == 0)


async def test_closing_ends_it() -> None:
    engines = [engine("engine-0", hang=True), engine("engine-1", token_s=0.001)]
    async with rollout_of(*engines, max_inflight=1) as rollout:
        task = await lost(rollout, *engines)
    with anyio.fail_after(2), pytest.raises(sr.LifecycleError):
        await task


async def test_it_stands_before_those_that_never_had_a_slot() -> None:
    engines = [engine("engine-0", hang=True), engine("engine-1", hang=True)]
    async with rollout_of(*engines, max_inflight=1) as rollout:
        first = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG))
        await until(lambda: len(engines[0].submitted) == 1)
        others = [asyncio.ensure_future(rollout.generate([[i]], sampling=LONG)) for i in range(3)]
        await until(lambda: rollout.num_queued == 2)
        engines[0].die()
        await until(lambda: rollout.num_queued == 3)
        engines[1].hang = False
        await asyncio.gather(first, *others)
    assert [len(request.prompt_ids) for request in engines[1].submitted] == [1, 3, 1, 1]


async def test_those_of_many_callers_all_go_on_and_nothing_is_left_over() -> None:
    engines = [engine(f"engine-{i}", die_after=400 * (i + 1)) for i in range(3)] + [engine("engine-3")]
    async with rollout_of(*engines, max_inflight=4, max_failovers=9) as rollout:
        groups = await rollout.generate([[i, i, i] for i in range(40)], n=2, sampling=LONG)
        assert is_idle(rollout, *engines)
    assert all(completion.token_ids == WHOLE for group in groups for completion in group.completions)
    assert [e.alive for e in engines[:3]] == [False] * 3


# ------------------------------------------------------------ what is no loss


@pytest.mark.parametrize("failover", ["resume", "restart", "none"])
async def test_what_a_sync_cuts_goes_on_from_its_tokens_whatever_becomes_of_those_that_lose_their_engine(
    failover: str,
) -> None:
    only = engine(token_s=0.0005)
    async with (
        rollout_of(only, failover=failover) as rollout,
        sr.WeightSyncer(rollout, sr.TensorSource({"w": torch.zeros(2)})) as syncer,
        rollout.session(sampling=LONG) as session,
    ):
        session.add_tokens(PROMPT)
        turn = asyncio.ensure_future(session.generate())
        await until(lambda: only.num_tokens > 40)
        only.hang = True  # so that it does not come to its end before the sync
        await syncer.sync("abort")
        only.hang = False
        completion = (await turn).completion
    assert completion.token_ids == WHOLE
    assert [span.version for span in completion.weight_versions] == [0, 1]
    assert completion.weight_versions[0].end >= 32


# ------------------------------------------------------------ an engine that takes nothing


class Deaf(ScriptedEngine):
    """Its channel is full: a request is its own, and the wait for it to be sent has no end."""

    num_waiting_callers = 0

    async def submit(self, request: Any) -> None:
        await super().submit(request)
        self.num_waiting_callers += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_waiting_callers -= 1


async def test_a_deadline_ends_the_wait_for_an_engine_that_takes_nothing() -> None:
    deaf = Deaf("engine-0", continuing, hang=True)
    async with rollout_of(deaf) as rollout:
        with anyio.fail_after(2), pytest.raises(sr.RequestTimeoutError):
            await rollout.generate([PROMPT], sampling=LONG, timeout_s=0.1)
        with anyio.fail_after(2), pytest.raises(sr.RequestTimeoutError):
            await anext(rollout.stream(PROMPT, LONG, timeout_s=0.1))
        await until(lambda: deaf.num_waiting_callers == 0 and is_idle(rollout, deaf))


async def test_the_death_of_an_engine_that_takes_nothing_ends_the_wait_for_it() -> None:
    engines = [Deaf("engine-0", continuing, hang=True), engine("engine-1")]
    async with rollout_of(*engines) as rollout:
        task = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG))
        await until(lambda: len(engines[0].submitted) == 1)
        engines[0].die()
        assert (await task)[0].completions[0].token_ids == WHOLE


async def test_one_that_loses_a_second_engine_at_once_can_still_be_left() -> None:
    deaf = Deaf("engine-1", continuing, hang=True)
    engines = [engine("engine-0", hang=True), deaf, engine("engine-2", hang=True)]
    async with rollout_of(*engines, max_inflight=1) as rollout:
        stream = rollout.stream(PROMPT, LONG)
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: len(engines[0].submitted) == 1)
        full = asyncio.ensure_future(rollout.generate([[1]], sampling=LONG))
        await until(lambda: len(deaf.submitted) + len(engines[2].submitted) == 1)
        engines[0].die()
        other = next(e for e in engines[1:] if any(len(request.prompt_ids) == 1 for request in e.submitted) is False)
        await until(lambda: len(other.submitted) == 1)
        other.die()
        await until(lambda: rollout.num_queued == 1)
        first.cancel()
        await until(lambda: rollout.num_queued == 0)
        full.cancel()


async def test_those_that_lost_their_engine_are_served_in_their_own_order() -> None:
    engines = [engine("engine-0", hang=True), engine("engine-1", hang=True)]
    async with rollout_of(*engines, max_inflight=4) as rollout:
        full = [asyncio.ensure_future(rollout.generate([[9] * 9], sampling=LONG)) for _ in range(4)]
        await until(lambda: sum(len(e.submitted) for e in engines) == 4)
        lost_ones = [asyncio.ensure_future(rollout.generate([[1] * (i + 1)], sampling=LONG)) for i in range(4)]
        await until(lambda: sum(len(e.submitted) for e in engines) == 8)
        engines[0].die()
        await until(lambda: rollout.num_queued == 4)
        order = [len(request.prompt_ids) for request in engines[0].submitted]
        num_before = len(engines[1].submitted)
        engines[1].hang = False
        await asyncio.gather(*full, *lost_ones)
    assert [len(request.prompt_ids) for request in engines[1].submitted[num_before:]] == order
