from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import anyio
import pytest

import sglrollout as sr
from sglrollout.engine.protocol import Engine, Request
from sglrollout.errors import EngineDiedError, EngineError, EngineRequestError, LifecycleError
from sglrollout.testing import ScriptedEngine, SimulatedEngine, run_virtually
from sglrollout.types import Completion, Group
from sglrollout.wire.messages import Finish, Load

pytestmark = pytest.mark.timeout(120)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
TEN = {"max_new_tokens": 10, "ignore_eos": True}
MANY = {"max_new_tokens": 1000, "ignore_eos": True}

Double: TypeAlias = ScriptedEngine | SimulatedEngine
Test: TypeAlias = Callable[..., Awaitable[None]]


def virtual(test: Test) -> Callable[..., None]:
    """Run a test on a virtual clock."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_virtually(functools.partial(test, **fixtures))

    return run


class Counted(Request):
    """Counts its ends."""

    def __init__(self, prompt_ids: list[int], sampling: dict[str, Any], chunk_tokens: int = 0) -> None:
        super().__init__(prompt_ids, sampling, chunk_tokens)
        self.num_ends = 0
        self.on_end = self._count

    def _count(self, request: Request) -> None:
        self.num_ends += 1


async def started(engine: Double) -> asyncio.Task[None]:
    await engine.start()
    return asyncio.ensure_future(engine.run())


async def submitted(engine: Double, count: int, sampling: dict[str, Any] = TEN) -> list[Counted]:
    requests = [Counted([i], sampling) for i in range(count)]
    for request in requests:
        await engine.submit(request)
    return requests


async def ended(*requests: Request) -> None:
    for request in requests:
        while not request.ended:
            await request.progress()


def simulated(**options: Any) -> SimulatedEngine:
    """A token every second, the first one included."""
    return SimulatedEngine(**{"token_s": 1.0, "first_token_s": 1.0, **options})


def scripted(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(**{"token_s": 1.0, **options})


# ------------------------------------------------------------ as the scripted engine

BOTH = pytest.mark.parametrize("make", [scripted, simulated])
Make: TypeAlias = Callable[..., Double]


@BOTH
@virtual
async def test_it_is_an_engine(make: Make) -> None:
    engine: Engine = make(start_s=60.0)
    assert not engine.alive
    assert await engine.start() is engine.info
    assert time.monotonic() == 60.0
    assert engine.alive
    await engine.close()
    assert not engine.alive


@BOTH
@virtual
async def test_more_than_it_can_run_waits_in_it_and_is_served_in_order(make: Make) -> None:
    engine = make(max_running=3)
    running = await started(engine)
    requests = await submitted(engine, 9)
    await anyio.sleep(9.5)
    assert (engine.num_running, engine.num_waiting) == (3, 6)
    for served in (3, 6, 9):
        await anyio.sleep(10 if served > 3 else 1)
        assert [request.num_ends for request in requests] == [1] * served + [0] * (9 - served)
    assert engine.peak_running == 3
    assert all(len(request.token_ids) == 10 for request in requests)
    assert all(request.finish == Finish("length", prompt_tokens=1) for request in requests)
    await engine.close()
    await running


@BOTH
@virtual
async def test_an_aborted_request_keeps_its_tokens_and_frees_its_place(make: Make) -> None:
    engine = make(max_running=1)
    running = await started(engine)
    first, second, third = [Counted([i], MANY, chunk_tokens=64) for i in range(3)]
    for request in (first, second, third):
        await engine.submit(request)
    await anyio.sleep(5.5)
    assert first.token_ids == []
    engine.abort(second)
    engine.abort(first)
    engine.abort(first)
    engine.abort(Request([1], TEN))
    assert (len(first.token_ids), first.num_ends) == (5, 0)
    await anyio.sleep(5)
    assert (len(first.token_ids), len(second.token_ids)) == (5, 0)
    assert (engine.num_running, engine.num_waiting) == (1, 0)
    engine.abort(third)
    assert len(third.token_ids) == 5
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    await engine.close()
    await running


@BOTH
@virtual
async def test_its_death_ends_everything_once_and_is_told_once(make: Make) -> None:
    engine = make(max_running=2)
    deaths: list[Exception] = []
    engine.on_death = deaths.append
    running = await started(engine)
    requests = await submitted(engine, 4)
    await anyio.sleep(3)
    engine.die("first")
    engine.die("second")
    assert [str(death) for death in deaths] == ["engine-0: first"]
    for request in requests:
        assert (request.num_ends, request.finish_reason, request.error) == (1, "error", deaths[0])
    with pytest.raises(EngineDiedError, match="first"):
        await engine.submit(Request([1], TEN))
    with pytest.raises(EngineDiedError):
        await engine.command("flush_cache")
    await running
    await engine.close()
    await anyio.sleep(100)
    assert [request.num_ends for request in requests] == [1] * 4
    assert len(deaths) == 1


@BOTH
@virtual
async def test_closing_ends_everything_once_and_is_no_death(make: Make) -> None:
    engine = make(hang=True)
    deaths: list[Exception] = []
    engine.on_death = deaths.append
    running = await started(engine)
    (request,) = await submitted(engine, 1)
    await engine.close()
    await engine.close()
    engine.die()
    await running
    assert (request.num_ends, request.finish_reason, type(request.error)) == (1, "abort", LifecycleError)
    assert deaths == []
    with pytest.raises(EngineError, match="closed"):
        await engine.submit(Request([1], TEN))


@BOTH
@virtual
async def test_a_request_that_is_to_fail_fails_with_the_engines_name(make: Make) -> None:
    engine = make(fail_request=lambda request: "refused" if request.prompt_ids == [1] else None)
    running = await started(engine)
    requests = await submitted(engine, 3)
    await ended(*requests)
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert isinstance(requests[1].error, EngineRequestError)
    assert str(requests[1].error) == "engine-0: refused"
    await engine.close()
    await running


@BOTH
@virtual
async def test_dropping_ends_what_it_holds_with_the_error(make: Make) -> None:
    engine = make(max_running=1)
    running = await started(engine)
    requests = await submitted(engine, 3)
    await anyio.sleep(4.5)
    error = ZeroDivisionError("spoiled")
    engine.drop(error)
    assert [(request.num_ends, request.error) for request in requests] == [(1, error)] * 3
    assert [len(request.token_ids) for request in requests] == [4, 0, 0]
    assert engine.peak_running == 1
    await engine.close()
    await running


@BOTH
@virtual
async def test_tokens_are_handed_over_under_the_version_they_were_sampled_under(make: Make) -> None:
    engine = make()
    running = await started(engine)
    request = Counted([1], TEN, chunk_tokens=64)
    await engine.submit(request)
    await anyio.sleep(3.5)
    engine.weight_version = 4
    assert list(request.spans) == [(0, 0, 3)]
    assert engine.info is not None
    assert engine.info.weight_version == 4
    await anyio.sleep(2)
    engine.weight_version = 5
    await ended(request)
    assert list(request.spans) == [(0, 0, 3), (4, 3, 5), (5, 5, 10)]
    await engine.close()
    await running


@BOTH
@virtual
async def test_no_time_passes_for_what_it_holds_while_it_is_paused(make: Make) -> None:
    engine = make(max_running=1)
    running = await started(engine)
    first, second = await submitted(engine, 2)
    await anyio.sleep(3.5)
    await engine.command("pause", mode="in_place")
    await anyio.sleep(1000)
    (third,) = await submitted(engine, 1)
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    with pytest.raises(EngineError):
        await make().submit(third)
    await engine.command("resume", version=1, flush=False)
    begun = time.monotonic()
    await ended(first, second, third)
    assert time.monotonic() - begun == pytest.approx(26.5, abs=1)  # the step that is under way ends, or begins anew
    num_before = first.spans[0].end
    assert num_before in ((3,) if isinstance(engine, SimulatedEngine) else (3, 4))
    assert list(first.spans) == [(0, 0, num_before), (1, num_before, 10)]
    await engine.close()
    await running


@BOTH
@virtual
async def test_a_sync_that_aborts_leaves_what_was_sampled(make: Make) -> None:
    engine = make(max_running=1)
    running = await started(engine)
    requests = await submitted(engine, 3)
    await anyio.sleep(3.5)
    await engine.command("pause", mode="abort")
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert [len(request.token_ids) for request in requests] == [3, 0, 0]
    await engine.command("flush_cache")
    await engine.command("resume", version=1, flush=False)
    assert engine.commands == ["pause", "flush_cache", "resume"]
    await engine.close()
    await running


@BOTH
@virtual
async def test_a_hanging_engine_goes_on_when_it_is_let(make: Make) -> None:
    engine = make(hang=True)
    running = await started(engine)
    (request,) = await submitted(engine, 1)
    await anyio.sleep(100)
    assert request.token_ids == []
    engine.hang = False
    await ended(request)
    assert time.monotonic() == 110
    await engine.close()
    await running


@BOTH
@virtual
async def test_commands_it_does_not_know_are_refused(make: Make) -> None:
    engine = make(fail_command=lambda name: "out of order" if name == "memory" else None)
    running = await started(engine)
    with pytest.raises(EngineRequestError, match="no such command"):
        await engine.command("fly")
    with pytest.raises(EngineRequestError, match="out of order"):
        await engine.command("memory")
    await submitted(engine, 1)
    with pytest.raises(EngineRequestError, match="requests are running"):
        await engine.command("flush_cache")
    await engine.close()
    await running


# ------------------------------------------------------------ times and lengths


@virtual
async def test_a_request_takes_its_first_token_and_a_step_for_each_other() -> None:
    engine = SimulatedEngine(token_s=0.25, first_token_s=3.0)
    running = await started(engine)
    (request,) = await submitted(engine, 1)
    await ended(request)
    assert time.monotonic() == 3.0 + 9 * 0.25
    assert set(request.token_ids) == {1}
    assert request.logprobs == [-1.0] * 10
    await engine.close()
    await running


@virtual
async def test_steps_may_be_slower_under_load() -> None:
    engine = SimulatedEngine(token_s=lambda num_running: 0.5 * num_running)
    running = await started(engine)
    requests = await submitted(engine, 3)
    await ended(*requests)
    assert [request.finished_s for request in requests] == [9 * 0.5, 9 * 1.0, 9 * 1.5]
    await engine.close()
    await running


@virtual
async def test_without_token_s_all_tokens_come_at_once() -> None:
    engine = SimulatedEngine(token_s=0.0, first_token_s=1.0)
    running = await started(engine)
    (request,) = await submitted(engine, 1)
    await anyio.sleep(0.5)
    engine.weight_version = 1
    await ended(request)
    assert list(request.spans) == [(1, 0, 10)]
    assert request.finished_s == 1.0
    await engine.close()
    await running


@virtual
async def test_logprobs_can_be_left_out() -> None:
    engine = simulated()
    running = await started(engine)
    (request,) = await submitted(engine, 1, {**TEN, "logprobs": False})
    await ended(request)
    assert (len(request.token_ids), request.logprobs) == (10, None)
    await engine.close()
    await running


@virtual
async def test_chunks_come_when_they_are_asked_for() -> None:
    arrivals: dict[bool, list[tuple[float, int]]] = {}
    for chunks in (True, False):
        engine = simulated(chunks=chunks)
        running = await started(engine)
        request = Counted([1], TEN, chunk_tokens=4)
        begun = time.monotonic()
        await engine.submit(request)
        seen = arrivals[chunks] = []
        while not request.ended:
            await request.progress()
            seen.append((time.monotonic() - begun, len(request.token_ids)))
        await engine.close()
        await running
    assert arrivals == {True: [(4, 4), (8, 8), (10, 10)], False: [(10, 10)]}


@virtual
async def test_a_chunk_goes_on_after_a_change_of_version() -> None:
    engine = simulated(chunks=True)
    running = await started(engine)
    request = Counted([1], TEN, chunk_tokens=4)
    await engine.submit(request)
    await anyio.sleep(2.5)
    engine.weight_version = 1
    assert len(request.token_ids) == 2
    await ended(request)
    assert list(request.spans) == [(0, 0, 2), (1, 2, 10)]
    assert time.monotonic() == 10
    await engine.close()
    await running


@virtual
async def test_a_request_that_ends_may_end_others() -> None:
    engine = simulated(max_running=2)
    running = await started(engine)
    first, second, third = await submitted(engine, 3)

    def end_the_others(request: Request) -> None:
        for other in (second, third):
            engine.abort(other)
            other.end(Finish("abort"))

    first.on_end = end_the_others
    await ended(first, second, third)
    assert [request.finish_reason for request in (first, second, third)] == ["length", "abort", "abort"]
    assert (len(second.token_ids), second.num_ends, len(third.token_ids)) == (10, 1, 0)
    await anyio.sleep(100)
    assert (engine.num_running, engine.num_waiting, third.num_ends) == (0, 0, 1)
    await engine.close()
    await running


@virtual
async def test_load_is_reported_now_and_then_and_when_it_falls_idle() -> None:
    engine = simulated(max_running=2)
    reports: list[tuple[float, int, int]] = []

    def note(load: Load) -> None:
        reports.append((time.monotonic(), load.num_running, load.num_waiting))

    engine.on_load = note
    running = await started(engine)
    requests = await submitted(engine, 4)
    await ended(*requests)
    assert reports == [(0, 1, 0), (10, 2, 0), (20, 0, 0)]
    await engine.close()
    await running


def lengths(engine: SimulatedEngine, count: int = 2000, **sampling: Any) -> list[int]:
    options = {"max_new_tokens": 4096, **sampling}
    return [engine.num_tokens((i, 2, 3), options, 0) for i in range(count)]


def test_lengths_are_lognormal_by_default() -> None:
    drawn = lengths(SimulatedEngine(mean_tokens=200, sigma=0.5))
    assert statistics.mean(drawn) == pytest.approx(200, rel=0.03)
    assert statistics.median(drawn) == pytest.approx(200 / 2.71828 ** (0.5**2 / 2), rel=0.03)
    assert set(lengths(SimulatedEngine(mean_tokens=200, sigma=0.0))) == {200}


def test_lengths_follow_the_seed_the_prompt_and_the_index_alone() -> None:
    one, same, other = SimulatedEngine("a"), SimulatedEngine("b"), SimulatedEngine("a", seed=1)
    assert lengths(one) == lengths(same) != lengths(other)
    assert one.num_tokens([5], MANY | {"ignore_eos": False}, 0) != one.num_tokens([5], MANY | {"ignore_eos": False}, 1)
    assert lengths(one, 3) == [1099, 104, 391]  # in every process, on every machine


def test_lengths_keep_to_what_sampling_says() -> None:
    engine = SimulatedEngine(mean_tokens=50, sigma=1.0)
    assert min(lengths(engine, min_new_tokens=30)) == 30
    assert set(lengths(engine, max_new_tokens=70, ignore_eos=True)) == {70}


@virtual
async def test_completions_are_cut_at_max_new_tokens_and_say_so() -> None:
    engine = simulated(num_tokens=lambda prompt_ids, sampling, index: 4 * index)
    running = await started(engine)
    requests = [Counted([1], {"max_new_tokens": 10}) for _ in range(4)]
    for request in requests:
        await engine.submit(request)
    await ended(*requests)
    assert [len(request.token_ids) for request in requests] == [1, 4, 8, 10]
    assert [request.finish_reason for request in requests] == ["stop", "stop", "stop", "length"]
    await engine.close()
    await running


# ------------------------------------------------------------ behind a rollout


def generated(
    num_engines: int, num_prompts: int, n: int = 1, *, max_new_tokens: int = 512, **options: Any
) -> tuple[list[Group], float]:
    """What a rollout over simulated engines answers, and in how many seconds."""

    async def generate() -> tuple[list[Group], float]:
        asked: dict[tuple[int, ...], int] = {}
        engines = [SimulatedEngine(f"engine-{i}", times_asked=asked, **options) for i in range(num_engines)]
        async with sr.AsyncRolloutEngine(config=CONFIG, engines=engines) as rollout:
            begun = time.monotonic()
            prompts = [[i, 2, 3] for i in range(num_prompts)]
            groups = await rollout.generate(prompts, n, sr.Sampling(max_new_tokens=max_new_tokens))
            return groups, time.monotonic() - begun

    return run_virtually(generate)


def completions(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def test_64_engines_serve_20_000_samples_in_little_more_than_the_ideal_time() -> None:
    groups, seconds = generated(64, 20_000, mean_tokens=100.0, token_s=0.02, max_running=4)
    samples = completions(groups)
    assert len(samples) == 20_000
    ideal_s = sum(len(sample.token_ids) - 1 for sample in samples) * 0.02 / (64 * 4)
    assert ideal_s <= seconds < 1.05 * ideal_s
    assert len({sample.engine for sample in samples}) == 64


def test_the_same_seed_is_the_same_run() -> None:
    def run(seed: int) -> list[Any]:
        groups, seconds = generated(8, 300, 4, mean_tokens=40.0, token_s=0.013, max_running=5, seed=seed)
        return [seconds, *((sample.engine, sample.timings, len(sample.token_ids)) for sample in completions(groups))]

    assert run(1) == run(1) != run(2)


def test_lengths_do_not_depend_on_the_number_of_engines() -> None:
    def run(num_engines: int, max_running: int) -> list[list[int]]:
        groups, _ = generated(num_engines, 100, 8, mean_tokens=40.0, max_running=max_running)
        return [sorted(len(sample.token_ids) for sample in group.completions) for group in groups]

    assert run(1, 64) == run(16, 2)


@virtual
async def test_deadlines_pass_on_the_virtual_clock_and_leave_what_was_sampled() -> None:
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=[simulated()]) as rollout:
        long = sr.Sampling(max_new_tokens=1000, ignore_eos=True)
        (group,) = await rollout.generate([[1]], sampling=long, timeout_s=60.5, on_error="return")
        (sample,) = group.completions
        assert isinstance(sample.error, sr.RequestTimeoutError)
        assert len(sample.token_ids) == 60
        assert time.monotonic() == 60.5


@virtual
async def test_a_stream_of_a_simulated_engine_comes_in_chunks() -> None:
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=[simulated(chunks=True)]) as rollout:
        sampling = sr.Sampling(max_new_tokens=10, ignore_eos=True)
        sizes = [len(chunk.token_ids) async for chunk in rollout.stream([1], sampling, chunk_tokens=4)]
        assert sizes == [4, 4, 2]
        assert time.monotonic() == 10


@virtual
async def test_the_samples_of_a_dead_engine_fail_and_the_others_go_on() -> None:
    engines = [simulated(name=f"engine-{i}", max_running=4) for i in range(4)]
    async with sr.AsyncRolloutEngine(config=CONFIG.replace(failover="none"), engines=engines) as rollout:
        asyncio.get_running_loop().call_later(15, engines[2].die)
        sampling = sr.Sampling(max_new_tokens=10, ignore_eos=True)
        groups = await rollout.generate([[i] for i in range(64)], sampling=sampling, on_error="return")
    failed = [sample for sample in completions(groups) if sample.error is not None]
    assert [sample.engine for sample in failed] == ["engine-2"] * 4
    assert all(isinstance(sample.error, EngineDiedError) for sample in failed)
