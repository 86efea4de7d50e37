"""Collections over scripted engines: what a training loop relies on."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.engine.protocol import Request
from sglrollout.testing import ScriptedEngine

pytestmark = pytest.mark.timeout(60)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)
SHORT = sr.Sampling(max_new_tokens=8)
LONG = sr.Sampling(max_new_tokens=400, ignore_eos=True)


def rollout_of(*engines: ScriptedEngine, **options: Any) -> sr.AsyncRolloutEngine:
    return sr.AsyncRolloutEngine(config=CONFIG.replace(**options), engines=engines or (ScriptedEngine(),))


def prompts(count: int) -> list[list[int]]:
    return [[1, i] for i in range(count)]


def number_of(completion: sr.Completion) -> int:
    return completion.prompt_ids[1]


def numbers(batch: sr.RolloutBatch) -> list[int]:
    return [group.prompt_ids[1] for group in batch.groups]


async def until(condition: Any) -> None:
    with anyio.fail_after(10):
        while not condition():
            await asyncio.sleep(0)


def publish(rollout: sr.AsyncRolloutEngine, engines: Sequence[ScriptedEngine], version: int) -> None:
    """What a weight sync leaves behind."""
    for engine in engines:
        engine.weight_version = version
    pool = rollout._pool
    assert pool is not None
    pool.weight_version = version
    pool.changed()


def is_idle(rollout: sr.AsyncRolloutEngine, *engines: ScriptedEngine) -> bool:
    slots = sum(status.num_inflight for status in rollout.engines)
    return not (slots or rollout.num_queued or any(engine.num_running or engine.num_waiting for engine in engines))


# ------------------------------------------------------------ batches


async def test_every_prompt_comes_once_in_batches_of_the_asked_for_size() -> None:
    async with rollout_of(ScriptedEngine("a"), ScriptedEngine("b")) as rollout:
        batches = [batch async for batch in rollout.collect(prompts(20), n=3, sampling=SHORT, target_groups=8)]
    assert [len(batch.groups) for batch in batches] == [8, 8, 4]
    assert sorted(number for batch in batches for number in numbers(batch)) == list(range(20))
    assert [batch.batch_size for batch in batches] == [24, 24, 12]


async def test_awaiting_it_gives_the_next_batch() -> None:
    async with rollout_of() as rollout:
        assert len(await rollout.collect(prompts(5), sampling=SHORT)) == 5
        collector = rollout.collect(prompts(5), sampling=SHORT, target_groups=3)
        assert len(await collector) == 3
        assert len(await collector) == 2
        with pytest.raises(sr.LifecycleError, match="exhausted"):
            await collector


async def test_a_last_batch_that_is_not_full_can_be_left_out() -> None:
    async with rollout_of() as rollout:
        collector = rollout.collect(prompts(7), sampling=SHORT, target_groups=3, drop_last=True)
        assert [len(batch) async for batch in collector] == [3, 3]


@pytest.mark.parametrize("kind", ["list", "generator", "async", "tasks", "rows"])
async def test_prompts_may_come_from_anything_one_can_iterate_over(kind: str) -> None:
    async def slowly() -> AsyncIterator[list[int]]:
        for prompt in prompts(6):
            await asyncio.sleep(0)
            yield prompt

    sources: dict[str, Any] = {
        "list": prompts(6),
        "generator": iter(prompts(6)),
        "async": slowly(),
        "tasks": [sr.Task(prompt, prompt[1]) for prompt in prompts(6)],
        "rows": [{"prompt": prompt, "answer": prompt[1]} for prompt in prompts(6)],
    }
    async with rollout_of() as rollout:
        batch = await rollout.collect(sources[kind], sampling=SHORT)
    assert numbers(batch) == list(range(6))
    if kind == "tasks":
        assert [group.data for group in batch.groups] == list(range(6))
    if kind == "rows":
        assert batch.groups[2].data == {"prompt": [1, 2], "answer": 2}


async def test_an_endless_source_is_read_no_further_than_the_engines_need() -> None:
    num_read = 0

    def endless() -> Iterator[list[int]]:
        nonlocal num_read
        for i in itertools.count():
            num_read += 1
            yield [1, i]

    async with rollout_of(ScriptedEngine(max_running=4), max_inflight=4) as rollout:
        collector = rollout.collect(endless(), n=2, sampling=SHORT, target_groups=4)
        for _ in range(3):
            await collector
        for _ in range(500):
            await asyncio.sleep(0)
        assert num_read < 30


async def test_a_wrong_prompt_is_named_and_ends_the_collection() -> None:
    async with rollout_of() as rollout:
        collector = rollout.collect([[1], [2], "text"], sampling=SHORT, target_groups=3)
        with pytest.raises(sr.ConfigError, match=r"source\[2\]"):
            await collector
        with pytest.raises(sr.ConfigError, match='must have a "prompt"'):
            await rollout.collect([{"question": "?"}], sampling=SHORT)


async def test_an_exception_of_the_source_is_raised_from_the_loop() -> None:
    def broken() -> Iterator[list[int]]:
        yield [1, 2]
        raise KeyError("no such file")

    async with rollout_of() as rollout:
        with pytest.raises(KeyError, match="no such file"):
            await rollout.collect(broken(), sampling=SHORT, target_groups=2)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"target_groups": 0}, "target_groups"),
        ({"target_groups": True}, "target_groups"),
        ({"n": 0}, "n"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"over_sample": 0.5, "target_groups": 2}, "over_sample"),
        ({"over_sample": 1.5}, "over_sample"),
        ({"surplus": "keep"}, "surplus"),
        ({"surplus": "partial", "max_staleness": 0}, "surplus"),
        ({"surplus": "partial", "sampling": sr.Sampling(stop=["."])}, "surplus"),
        ({"max_failures": 2}, "max_failures"),
        ({"reward": 3}, "reward"),
        ({"reward": lambda: 1.0}, "reward"),
        ({"reward": lambda c: 1.0, "group_reward": lambda g: [1.0]}, "group_reward"),
        ({"filter": "zero_std"}, "filter"),
        ({"filter": 3}, "filter"),
        ({"padding": {"side": "left"}}, "padding"),
        ({"drop_last": "no"}, "drop_last"),
        ({"reward": lambda completion, task, third: 1.0}, "reward"),
        ({"reward": lambda completion, *, key: 1.0}, "reward"),
        ({"episode": lambda session, task: 1.0}, "episode"),
        ({"sampling": sr.Sampling(logprobs=False)}, "sampling.logprobs"),
        ({"reward_timeout_s": 0}, "reward_timeout_s"),
        ({"reward_workers": 0}, "reward_workers"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(options: dict[str, Any], field: str) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        rollout_of().collect(prompts(3), **options)
    assert caught.value.field == field


def test_a_report_says_in_words_what_it_counted() -> None:
    counted = (8, 64, 12345, 12.34, 4.56, 3, 0.4, 1, 0.2, 0.125, 192.89, 0.5625, 0.4961, 1, {"zero_std": 5})
    report = sr.CollectReport(*counted, num_resumed=2)
    assert str(report).splitlines() == [
        "version 3: 8 groups, 64 samples and 12,345 tokens in 12.3 s, of which the trainer waited 4.56 s",
        "  reward 0.562 (std 0.496), 192.9 tokens per sample, 12% truncated",
        "  staleness mean 0.4, max 1, 20% of several versions",
        "  1 failed, 2 resumed, 5 filtered (zero_std)",
    ]
    quiet = dataclasses.replace(report, reward_mean=None, reward_std=None, num_failed=0, filtered={}, num_resumed=0)
    assert str(quiet).splitlines()[1:] == [
        "  192.9 tokens per sample, 12% truncated",
        "  staleness mean 0.4, max 1, 20% of several versions",
    ]


@pytest.mark.parametrize("name", sorted({*sr.filters.__all__} - {"Verdict"}))
def test_what_makes_a_filter_is_no_filter(name: str) -> None:
    factory = getattr(sr.filters, name)
    for given in (factory, [lambda group: True, factory]):
        with pytest.raises(sr.ConfigError, match=rf"filter must be .*did you mean {name}\(\)\?"):
            rollout_of().collect(prompts(3), filter=given)


@pytest.mark.parametrize("source", ["a prompt", {"prompt": [1, 2]}, 3])
def test_a_single_prompt_is_no_source(source: Any) -> None:
    with pytest.raises(sr.ConfigError, match="put a single one into a list"):
        rollout_of().collect(source)


@pytest.mark.parametrize(
    "options", [{"sampling": sr.Sampling(seed=1)}, {"sampling": sr.Sampling(lora="a")}, {"seed": 1}]
)
async def test_what_the_engines_would_ignore_is_refused(options: dict[str, Any]) -> None:
    async with rollout_of() as rollout:
        with pytest.raises(sr.ConfigError):
            await rollout.collect(prompts(3), **options)


# ------------------------------------------------------------ rewards and filters


async def test_a_plain_reward_runs_in_a_thread_and_gets_completion_and_task() -> None:
    threads = set()

    def reward(completion: sr.Completion, task: sr.Task) -> float:
        threads.add(threading.current_thread())
        return float(task.data) + completion.index / 10

    source = [sr.Task(prompt, prompt[1]) for prompt in prompts(4)]
    async with rollout_of() as rollout:
        batch = await rollout.collect(source, n=2, sampling=SHORT, reward=reward)
    assert batch.rewards.tolist() == pytest.approx([0, 0.1, 1, 1.1, 2, 2.1, 3, 3.1])
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("kind", ["async", "callable object", "of a group"])
async def test_rewards_come_in_other_shapes(kind: str) -> None:
    async def slow(completion: sr.Completion) -> bool:
        await asyncio.sleep(0)
        return number_of(completion) % 2 == 0

    class Judge:
        async def __call__(self, completion: sr.Completion) -> bool:
            return await slow(completion)

    def of_group(group: sr.Group) -> list[float]:
        return [float(number_of(completion) % 2 == 0) for completion in group.completions]

    kinds: dict[str, dict[str, Any]] = {
        "async": {"reward": slow},
        "callable object": {"reward": Judge()},
        "of a group": {"group_reward": of_group},
    }
    async with rollout_of() as rollout:
        batch = await rollout.collect(prompts(4), n=2, sampling=SHORT, **kinds[kind])
    assert batch.rewards.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


async def test_rewards_overlap_generation_and_take_no_slot() -> None:
    release = asyncio.Event()

    async def reward(completion: sr.Completion) -> float:
        await release.wait()
        return 1.0

    engine = ScriptedEngine(max_running=1)
    async with rollout_of(engine, max_inflight=1) as rollout:
        collector = rollout.collect(prompts(4), sampling=SHORT, reward=reward)
        task = asyncio.ensure_future(anyio_await(collector))
        await until(lambda: collector.stats is not None and collector.stats.num_rewarding == 4)
        assert is_idle(rollout, engine)
        release.set()
        assert len(await task) == 4


async def anyio_await(collector: sr.Collector) -> sr.RolloutBatch:
    return await collector


async def test_filters_replace_groups_until_the_batch_is_full_and_count_their_reasons() -> None:
    def even(group: sr.Group) -> bool:
        return group.prompt_ids[1] % 2 == 0

    def not_four(group: sr.Group) -> sr.Verdict:
        return sr.Verdict(group.prompt_ids[1] != 4, "is four")

    async with rollout_of() as rollout:
        collector = rollout.collect(
            ([1, i] for i in itertools.count()),
            sampling=SHORT,
            target_groups=6,
            filter=[even, not_four],
            max_staleness=0,
        )
        batch = await collector
    assert numbers(batch) == [0, 2, 6, 8, 10, 12]
    assert batch.report is not None
    assert batch.report.filtered["is four"] == 1
    assert batch.report.filtered["even"] == 6


async def test_groups_without_an_advantage_are_left_out_by_zero_std() -> None:
    def reward(completion: sr.Completion) -> float:
        return float(completion.index) if number_of(completion) % 3 == 0 else 1.0

    async with rollout_of() as rollout:
        batch = await rollout.collect(prompts(9), n=2, sampling=SHORT, reward=reward, filter=sr.filters.zero_std())
    assert numbers(batch) == [0, 3, 6]


def group_of(rewards: list[float | None], reasons: list[Any] | None = None) -> sr.Group:
    made = [sr.Completion((1,), (2,), (-0.5,), reason) for reason in reasons or ["stop"] * len(rewards)]
    return sr.Group([1], (1,), tuple(made), rewards=tuple(rewards))


@pytest.mark.parametrize(
    ("made", "group", "kept"),
    [
        (sr.filters.zero_std(), group_of([1.0, 1.0]), False),
        (sr.filters.zero_std(), group_of([1.0, None]), False),
        (sr.filters.zero_std(), group_of([1.0, 0.0, None]), True),
        (sr.filters.mean_reward(least=0.2), group_of([0.0, 0.2]), False),
        (sr.filters.mean_reward(most=0.9), group_of([1.0, 1.0]), False),
        (sr.filters.mean_reward(0.2, 0.9), group_of([0.0, 1.0, None]), True),
        (sr.filters.truncated(0.5), group_of([1.0, 1.0], ["length", "stop"]), True),
        (sr.filters.truncated(), group_of([1.0, 1.0], ["length", "stop"]), False),
        (sr.filters.failed(), group_of([1.0, None]), False),
        (sr.filters.failed(0.5), group_of([1.0, None]), True),
    ],
)
def test_built_in_filters(made: Any, group: sr.Group, kept: bool) -> None:
    verdict = made(group)
    assert verdict.keep is kept
    assert verdict.reason


def test_a_filter_says_what_is_wrong_with_its_bounds() -> None:
    with pytest.raises(sr.ConfigError, match="most must be a number from 0 to 1"):
        sr.filters.truncated(3)


# ------------------------------------------------------------ failures


def some_fail(request: Request) -> str | None:
    return "out of luck" if request.prompt_ids[1] == 3 else None


async def test_a_failed_sample_is_data_in_its_group() -> None:
    calls: Counter[int] = Counter()

    def unlucky(request: Request) -> str | None:
        calls[request.prompt_ids[1]] += 1
        return "out of luck" if request.prompt_ids[1] == 3 and calls[3] == 1 else None

    async with rollout_of(ScriptedEngine(fail_request=unlucky)) as rollout:
        batch = await rollout.collect(prompts(8), n=2, sampling=SHORT, reward=lambda completion: 1.0)
    group = batch.groups[3]
    assert sorted(completion.finish_reason == "error" for completion in group.completions) == [False, True]
    assert sorted(group.rewards or (), key=str) == [1.0, None]
    assert batch.valid.sum() == 15
    assert batch.loss_mask[~batch.valid].sum() == 0
    assert batch.report is not None
    assert batch.report.num_failed == 1


async def test_a_group_of_which_all_samples_failed_is_left_out() -> None:
    async with rollout_of(ScriptedEngine(fail_request=some_fail)) as rollout:
        batch = await rollout.collect(prompts(20), n=2, sampling=SHORT)
    assert 3 not in numbers(batch)
    assert batch.report is not None
    assert batch.report.filtered == {"all_failed": 1}


@pytest.mark.parametrize("kind", ["raises", "not a number", "not finite", "too slow", "group too short"])
async def test_a_reward_that_fails_fails_its_sample_and_not_the_run(kind: str) -> None:
    def reward(completion: sr.Completion) -> Any:
        if number_of(completion) != 1:
            return 1.0
        if kind == "raises":
            raise ValueError("cannot parse")
        if kind == "too slow":
            time.sleep(3)
        return {"not a number": "good", "not finite": float("nan")}.get(kind, 1.0)

    def of_group(group: sr.Group) -> list[float]:
        return [1.0] * (len(group.completions) - (group.prompt_ids[1] == 1))

    options: dict[str, Any] = {"group_reward": of_group} if kind == "group too short" else {"reward": reward}
    async with rollout_of() as rollout:
        collector = rollout.collect(prompts(6), n=2, sampling=SHORT, reward_timeout_s=1, **options)
        batch = await collector
    assert numbers(batch) == [0, 2, 3, 4, 5]
    assert batch.report is not None
    assert batch.report.num_failed == 2


async def test_too_many_failures_stop_the_run_with_a_histogram_of_causes() -> None:
    async with rollout_of(ScriptedEngine(fail_request=lambda request: "out of memory")) as rollout:
        collector = rollout.collect(prompts(100), n=4, sampling=SHORT, target_groups=8)
        with pytest.raises(sr.FailureBudgetError) as caught:
            await collector
        assert caught.value.causes == {"EngineRequestError: engine-0: out of memory": caught.value.num_failed}
        with pytest.raises(sr.FailureBudgetError):
            await collector


async def test_a_run_in_which_everything_failed_says_so_however_short_it_is() -> None:
    async with rollout_of(ScriptedEngine(fail_request=lambda request: "no")) as rollout:
        with pytest.raises(sr.FailureBudgetError, match="1 x EngineRequestError"):
            await rollout.collect(prompts(1), sampling=SHORT, max_failures=1.0)


async def test_a_filter_that_fails_is_a_bug_and_is_raised() -> None:
    def broken(group: sr.Group) -> bool:
        raise ZeroDivisionError

    async with rollout_of() as rollout:
        with pytest.raises(ZeroDivisionError):
            await rollout.collect(prompts(3), sampling=SHORT, filter=broken)


async def test_samples_of_a_dead_engine_go_on_elsewhere_from_their_tokens() -> None:
    first, second = ScriptedEngine("a", die_after=600), ScriptedEngine("b")
    async with rollout_of(first, second) as rollout:
        batch = await rollout.collect(prompts(8), sampling=LONG)
    assert numbers(batch) == list(range(8))
    assert batch.generation_lengths.tolist() == [400] * 8
    assert batch.valid.all()
    assert any(len(request.prompt_ids) > 2 for request in second.submitted)


async def test_when_all_engines_are_dead_the_loop_ends_at_once() -> None:
    async with rollout_of(ScriptedEngine(die_after=50)) as rollout:
        with pytest.raises(sr.NoEngineError), anyio.fail_after(5):
            await rollout.collect(prompts(8), sampling=LONG)


# ------------------------------------------------------------ life


async def test_leaving_the_loop_frees_every_slot() -> None:
    engine = ScriptedEngine(token_s=0.001)
    async with rollout_of(engine) as rollout:
        async for _ in rollout.collect(prompts(64), sampling=LONG, target_groups=1):
            break
        gc.collect()
        await until(lambda: is_idle(rollout, engine))


async def test_cancelling_the_wait_loses_nothing() -> None:
    engine = ScriptedEngine(token_s=0.001)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect(prompts(12), sampling=SHORT, target_groups=4)
        seen: list[int] = []
        while len(seen) < 12:
            with anyio.move_on_after(0.002):
                seen += numbers(await collector)
    assert sorted(seen) == list(range(12))


async def test_async_with_waits_until_nothing_runs_any_more() -> None:
    engine = ScriptedEngine(token_s=0.001)
    async with rollout_of(engine) as rollout:
        async with rollout.collect(prompts(64), sampling=LONG, target_groups=1) as batches:
            await batches
        assert is_idle(rollout, engine)
        assert [batch async for batch in batches] == []


async def test_closing_the_rollout_ends_a_waiting_loop_with_a_typed_error() -> None:
    rollout = await rollout_of(ScriptedEngine(hang=True)).start()
    waiting = asyncio.ensure_future(anyio_await(rollout.collect(prompts(4), sampling=SHORT)))
    await asyncio.sleep(0.01)
    await rollout.close()
    with pytest.raises(sr.LifecycleError, match="closed"):
        await waiting


async def test_a_second_waiter_is_refused() -> None:
    async with rollout_of(ScriptedEngine(hang=True)) as rollout:
        collector = rollout.collect(prompts(4), sampling=SHORT)
        waiting = asyncio.ensure_future(anyio_await(collector))
        await asyncio.sleep(0.01)
        with pytest.raises(sr.LifecycleError, match="another task"):
            await collector
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_asleep_engines_are_an_error_that_says_what_to_do_and_the_collection_goes_on_after_it() -> None:
    engine = ScriptedEngine(memory_saver=True)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect(prompts(4), sampling=SHORT, target_groups=2)
        await rollout.sleep(["kv_cache"])
        with pytest.raises(sr.LifecycleError, match="wake"):
            await collector
        await rollout.wake()
        assert len(await collector) == 2
        assert len(await collector) == 2


async def test_samples_that_a_sleep_cut_go_on_after_it() -> None:
    engine = ScriptedEngine(memory_saver=True, token_s=0.0005)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect(prompts(4), sampling=LONG, target_groups=1)
        waiting = asyncio.ensure_future(anyio_await(collector))
        await until(lambda: engine.num_tokens > 200)
        assert collector.stats is not None
        waiting.cancel()
        await rollout.sleep(["kv_cache"], drain_s=0)
        await rollout.wake()
        lengths = [(await collector).generation_lengths.tolist() for _ in range(4)]
    assert lengths == [[400]] * 4


# ------------------------------------------------------------ staleness


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_no_sample_is_staler_than_the_bound_and_generation_runs_beside_training(max_staleness: int) -> None:
    engines = [ScriptedEngine(f"engine-{i}", max_running=4) for i in range(2)]
    async with rollout_of(*engines, max_inflight=4) as rollout:
        collector = rollout.collect(
            ([1, i] for i in itertools.count()),
            n=2,
            sampling=sr.Sampling(max_new_tokens=60),
            target_groups=4,
            max_staleness=max_staleness,
        )
        staleness: set[int] = set()
        order: list[int] = []
        for version in range(1, 30):
            batch = await collector
            staleness |= set(batch.staleness(rollout.weight_version).tolist())
            order += numbers(batch)
            await asyncio.sleep(0.002)  # the trainer trains
            publish(rollout, engines, version)
    assert max(staleness) <= max_staleness
    assert max(staleness) == max_staleness
    assert len(set(order)) == len(order)
    assert max(a - b for a, b in zip(order, range(len(order)), strict=True)) <= 4 * (max_staleness + 2)


async def test_a_loop_that_never_syncs_never_waits_for_a_sync() -> None:
    async with rollout_of() as rollout:
        collector = rollout.collect(prompts(40), sampling=SHORT, target_groups=4, max_staleness=0)
        assert [len(batch) async for batch in collector] == [4] * 10


async def test_what_two_syncs_in_a_row_make_too_stale_starts_over_and_no_prompt_is_lost() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        collector = rollout.collect(prompts(24), sampling=SHORT, target_groups=4, max_staleness=1)
        seen = numbers(await collector)
        await until(lambda: collector.stats is not None and collector.stats.num_ready >= 4)
        for version in (1, 2, 3):
            publish(rollout, [engine], version)
        async for batch in collector:
            assert batch.max_staleness(rollout.weight_version) <= 1
            seen += numbers(batch)
    assert sorted(seen) == list(range(24))
    assert collector.stats is not None
    assert collector.stats.num_restarted > 0


def lengths_by_number(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
    """Prompt ``[1, i]`` is answered by ``10 * (i + 1)`` tokens 0, 1, 2, ..., and goes on where its tokens end."""
    so_far = len(prompt_ids) - 2
    tokens = list(range(so_far, 10 * (prompt_ids[1] + 1)))
    return tokens, [-float(token) for token in tokens]


@pytest.mark.parametrize("max_staleness", [1, None])
@pytest.mark.parametrize("surplus", ["run", "abort", "partial"])
async def test_surplus_groups_are_taken_back_and_come_in_a_later_batch(surplus: Any, max_staleness: int | None) -> None:
    engine = ScriptedEngine(script=lengths_by_number, token_s=0.001)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect(
            prompts(12),
            sampling=sr.Sampling(max_new_tokens=500),
            target_groups=4,
            over_sample=1.5,
            max_staleness=max_staleness,
            surplus=surplus,
        )
        seen: list[int] = []
        for version in itertools.count(1):
            try:
                batch = await collector
            except sr.LifecycleError:
                break
            seen += numbers(batch)
            publish(rollout, [engine], version)
            for group in batch.groups:
                (completion,) = group.completions
                assert completion.token_ids == tuple(range(10 * (group.prompt_ids[1] + 1)))
                assert completion.logprobs == tuple(-float(token) for token in completion.token_ids)
                assert [span.start for span in completion.weight_versions[1:]] == [
                    span.end for span in completion.weight_versions[:-1]
                ]
                assert completion.weight_versions[-1].end == len(completion.token_ids)
                assert max_staleness is None or batch.max_staleness(version - 1) <= max_staleness
    assert sorted(seen) == list(range(12))
    stats = collector.stats
    assert stats is not None
    assert (stats.num_surplus > 0) == (surplus != "run")
    assert (stats.num_resumed > 0) == (surplus == "partial")


# ------------------------------------------------------------ checkpoints


async def test_a_restored_collection_loses_and_repeats_no_prompt() -> None:
    source = [sr.Task(prompt, {"answer": prompt[1]}) for prompt in prompts(40)]
    options: dict[str, Any] = {"n": 2, "sampling": sr.Sampling(max_new_tokens=60), "target_groups": 5}
    slow = ScriptedEngine(max_running=4, token_s=0.001)

    def reward(completion: sr.Completion, task: sr.Task) -> float:
        return float(task.data["answer"])

    async with rollout_of(slow, max_inflight=4) as rollout:
        collector = rollout.collect(source, reward=reward, **options)
        seen = [number for _ in range(3) for number in numbers(await collector)]
        await until(lambda: collector.stats is not None and collector.stats.num_active > 2)
        state = json.loads(json.dumps(collector.state_dict()))
    async with rollout_of(ScriptedEngine(max_running=4), max_inflight=4) as rollout:
        collector = rollout.collect(source, reward=reward, **options)
        collector.load_state_dict(state)
        async for batch in collector:
            seen += numbers(batch)
            assert batch.rewards.tolist() == [number for number in numbers(batch) for _ in range(2)]
    assert sorted(seen) == list(range(40))


async def test_a_restored_collection_goes_on_from_the_tokens_it_had() -> None:
    engine = ScriptedEngine(script=lengths_by_number, token_s=0.0005)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect([[1, 19]], sampling=sr.Sampling(max_new_tokens=500))
        waiting = asyncio.ensure_future(anyio_await(collector))
        await until(lambda: engine.num_tokens > 100)
        state = collector.state_dict()
        waiting.cancel()
    engine = ScriptedEngine(script=lengths_by_number, weight_version=7)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect([[1, 19]], sampling=sr.Sampling(max_new_tokens=500))
        collector.load_state_dict(state)
        (group,) = (await collector).groups
    (completion,) = group.completions
    assert completion.token_ids == tuple(range(200))
    assert [span.version for span in completion.weight_versions] == [0, 7]
    assert len(engine.submitted[0].prompt_ids) > 90


async def test_a_state_saved_after_the_end_of_its_block_has_all_that_there_was() -> None:
    engine = ScriptedEngine(script=lengths_by_number, token_s=0.0005)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect(prompts(30), sampling=sr.Sampling(max_new_tokens=500), target_groups=5)
        async with collector:
            seen = numbers(await collector)
        state = collector.state_dict()
        assert is_idle(rollout, engine)
    assert any(sample["prior"] for group in state["groups"] for sample in group["samples"])
    async with rollout_of(ScriptedEngine(script=lengths_by_number)) as rollout:
        collector = rollout.collect(prompts(30), sampling=sr.Sampling(max_new_tokens=500), target_groups=5)
        collector.load_state_dict(state)
        async for batch in collector:
            seen += numbers(batch)
            for group in batch.groups:
                assert group.completions[0].token_ids == tuple(range(10 * (group.prompt_ids[1] + 1)))
    assert sorted(seen) == list(range(30))


async def test_seeds_go_on_where_they_were() -> None:
    async def seeds(split: int | None) -> list[Any]:
        engine = ScriptedEngine(deterministic=True)
        state = None
        if split is not None:
            async with rollout_of(engine) as rollout:
                collector = rollout.collect(prompts(split), sampling=SHORT, target_groups=split, seed=5)
                await collector
                state = collector.state_dict()
        async with rollout_of(again := ScriptedEngine(deterministic=True)) as rollout:
            collector = rollout.collect(prompts(8), sampling=SHORT, seed=5)
            if state is not None:
                collector.load_state_dict(state)
            await collector
        return [request.sampling["seed"] for request in [*engine.submitted, *again.submitted]]

    assert await seeds(None) == await seeds(3)


@pytest.mark.parametrize("state", [{}, {"format": 99}, []])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(sr.ConfigError, match="state must be"):
        rollout_of().collect(prompts(3)).load_state_dict(state)


async def test_a_state_can_only_be_saved_of_json_values_and_loaded_before_the_start() -> None:
    async with rollout_of(ScriptedEngine(hang=True)) as rollout:
        collector = rollout.collect([sr.Task([1], object())], sampling=SHORT)
        with pytest.raises(sr.LifecycleError, match="not started"):
            collector.state_dict()
        waiting = asyncio.ensure_future(anyio_await(collector))
        await asyncio.sleep(0.01)
        with pytest.raises(sr.ConfigError, match="JSON"):
            collector.state_dict()
        with pytest.raises(sr.LifecycleError, match="before the first batch"):
            collector.load_state_dict({"format": 1})
        waiting.cancel()


# ------------------------------------------------------------ episodes


async def two_turns(session: sr.Session, task: sr.Task) -> float:
    """A turn, three tokens from outside, and another turn."""
    session.add_tokens(task.prompt)  # type: ignore[arg-type]
    await session.generate()
    session.add_tokens([7, 7, 7])
    await session.generate()
    return float(task.data)


async def test_an_episode_of_several_turns_is_a_sample_like_any_other() -> None:
    source = [sr.Task([1, i], i) for i in range(4)]
    async with rollout_of() as rollout:
        batch = await rollout.collect(
            source, n=2, sampling=sr.Sampling(max_new_tokens=5, ignore_eos=True), episode=two_turns
        )
    assert batch.rewards.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.prompt_lengths.tolist() == [2] * 8
    assert batch.generation_lengths.tolist() == [13] * 8
    assert batch.loss_mask[0].tolist() == [0, 0, *[1] * 5, 0, 0, 0, *[1] * 5]
    assert batch.output_ids[0, 7:10].tolist() == [7, 7, 7]


async def test_an_episode_that_leaves_the_reward_open_is_rewarded_as_a_whole() -> None:
    async def episode(session: sr.Session, task: sr.Task) -> None:
        await two_turns(session, task)

    def reward(completion: sr.Completion, task: sr.Task) -> float:
        return len(completion.token_ids) + float(task.data)

    async with rollout_of() as rollout:
        batch = await rollout.collect(
            [sr.Task([1, 5], 100)],
            sampling=sr.Sampling(max_new_tokens=5, ignore_eos=True),
            episode=episode,
            reward=reward,
        )
    assert batch.rewards.tolist() == [113]


async def test_an_episode_that_raises_is_a_failed_sample_with_what_it_had() -> None:
    async def episode(session: sr.Session, task: sr.Task) -> float:
        if task.data == 2:
            await two_turns(session, task)
        if task.data in (2, 3):
            raise ValueError("the environment broke")
        return await two_turns(session, task)

    source = [sr.Task([1, i], i) for i in range(5)]
    async with rollout_of() as rollout:
        collector = rollout.collect(source, sampling=SHORT, episode=episode)
        batch = await collector
    assert numbers(batch) == [0, 1, 4]
    assert batch.report is not None
    assert batch.report.num_failed == 2


async def test_leaving_the_loop_ends_its_episodes_and_frees_their_slots() -> None:
    engine = ScriptedEngine(token_s=0.001)
    ended = 0

    async def episode(session: sr.Session, task: sr.Task) -> float:
        nonlocal ended
        try:
            return await two_turns(session, task)
        finally:
            ended += 1

    source = [sr.Task([1, i], i) for i in range(8)]
    async with rollout_of(engine) as rollout:
        async with rollout.collect(source, sampling=LONG, target_groups=1, episode=episode) as batches:
            with anyio.move_on_after(0.05):
                await batches
            assert batches.stats is not None
            assert batches.stats.num_active == 8
        assert ended == 8
        assert is_idle(rollout, engine)


async def test_episodes_wait_while_the_engines_sleep_and_go_on_from_their_tokens() -> None:
    engine = ScriptedEngine(memory_saver=True, token_s=0.0005)
    async with rollout_of(engine) as rollout:
        source = [sr.Task([1, i], i) for i in range(3)]
        collector = rollout.collect(source, sampling=LONG, episode=two_turns)
        waiting = asyncio.ensure_future(anyio_await(collector))
        await until(lambda: engine.num_tokens > 300)
        waiting.cancel()
        await rollout.sleep(["kv_cache"], drain_s=0)
        await rollout.wake()
        batch = await collector
    assert batch.rewards.tolist() == [0, 1, 2]
    assert batch.generation_lengths.tolist() == [803] * 3
    assert any(len(request.prompt_ids) > 50 for request in engine.submitted)


@pytest.mark.parametrize(
    "options", [{"episode": 3}, {"session": {"max_turns": 2}}, {"episode": two_turns, "session": {"max_turns": 0}}]
)
def test_wrong_options_of_episodes_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(sr.ConfigError):
        rollout_of().collect(prompts(3), **options)


# ------------------------------------------------------------ moments at which things meet


def ends_early(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
    """Five tokens, and an end of its own."""
    return [9] * 5, [-0.5] * 5


async def test_a_sample_that_had_just_ended_is_not_sampled_on_when_it_is_saved_or_taken_back() -> None:
    seen: list[int] = []
    engine = ScriptedEngine(script=ends_early)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect(prompts(12), sampling=sr.Sampling(max_new_tokens=100))
        waiting = asyncio.ensure_future(anyio_await(collector))
        states: list[str] = []
        while not waiting.done():
            # At every step at first; then the batch is built on a thread, which wants its turn.
            await asyncio.sleep(0 if len(states) < 500 else 0.001)
            if collector.stats is not None:
                states.append(json.dumps(collector.state_dict()))
    for state in states[:: max(1, len(states) // 12)]:
        async with rollout_of(ScriptedEngine(script=ends_early)) as rollout:
            collector = rollout.collect(prompts(12), sampling=sr.Sampling(max_new_tokens=100))
            collector.load_state_dict(json.loads(state))
            async for batch in collector:
                seen = [len(completion.token_ids) for group in batch.groups for completion in group.completions]
                assert all(length == 5 for length in seen)


async def test_a_sync_while_a_batch_is_being_built_does_not_let_old_tensors_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine()
    real = sr.RolloutBatch.from_groups
    built = 0

    def slowly(groups: Any, **options: Any) -> sr.RolloutBatch:
        nonlocal built
        built += 1
        if built == 1:
            loop.call_soon_threadsafe(publish, rollout, [engine], 1)
            time.sleep(0.3)
        return real(groups, **options)

    monkeypatch.setattr(sr.RolloutBatch, "from_groups", slowly)
    async with rollout_of(engine) as rollout:
        loop = asyncio.get_running_loop()
        batch = await rollout.collect(prompts(4), sampling=SHORT, target_groups=4, max_staleness=0)
        assert batch.max_staleness(rollout.weight_version) == 0
        assert batch.report is not None
        assert batch.report.staleness_max == 0
    assert built == 2


async def test_a_restored_group_that_a_sync_expires_at_once_is_sampled_anew() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        collector = rollout.collect(prompts(6), sampling=SHORT, target_groups=2)
        await collector
        await until(lambda: collector.stats is not None and collector.stats.num_ready == 4)
        state = collector.state_dict()
    async with rollout_of(engine := ScriptedEngine()) as rollout:
        collector = rollout.collect(prompts(6), sampling=SHORT, target_groups=4, max_staleness=0)
        collector.load_state_dict(state)
        waiting = asyncio.ensure_future(anyio_await(collector))
        for version in range(1, 6):
            await asyncio.sleep(0)
            publish(rollout, [engine], version)
        assert len(await waiting) == 4


@pytest.mark.parametrize("kind", ["error of the library", "exit", "cancelled", "huge"])
async def test_whatever_a_reward_raises_is_about_its_sample(kind: str) -> None:
    async def reward(completion: sr.Completion) -> Any:
        if number_of(completion) != 1:
            return 1.0
        if kind == "error of the library":
            raise sr.RequestTimeoutError("of a judge")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "cancelled":
            raise asyncio.CancelledError
        return 10**400

    async with rollout_of() as rollout:
        batch = await rollout.collect(prompts(6), sampling=SHORT, reward=reward)
    assert numbers(batch) == [0, 2, 3, 4, 5]


async def test_the_wait_for_a_thread_is_not_counted_and_stuck_calls_do_not_pile_up_threads() -> None:
    def reward(completion: sr.Completion) -> float:
        time.sleep(0.05)
        return 1.0

    async with rollout_of() as rollout:
        batch = await rollout.collect(prompts(24), sampling=SHORT, reward=reward, reward_workers=2, reward_timeout_s=2)
        assert batch.valid.all()

        release = threading.Event()
        before = threading.active_count()
        with pytest.raises((sr.FailureBudgetError, sr.LifecycleError)):
            await rollout.collect(
                prompts(100),
                sampling=SHORT,
                reward=lambda completion: float(release.wait(20)),
                reward_workers=2,
                reward_timeout_s=0.01,
                max_failures=1.0,
            )
        assert threading.active_count() - before < 16
        release.set()


async def test_a_loop_that_waits_for_a_last_reward_while_the_engines_sleep_is_told_to_wake_them() -> None:
    release = asyncio.Event()

    async def reward(completion: sr.Completion) -> float:
        if number_of(completion) == 0:
            await release.wait()
        return 1.0

    engine = ScriptedEngine(memory_saver=True, max_running=2, token_s=0.001)
    async with rollout_of(engine, max_inflight=2) as rollout:
        collector = rollout.collect(prompts(8), n=2, sampling=SHORT, target_groups=8, reward=reward)
        waiting = asyncio.ensure_future(anyio_await(collector))
        await until(lambda: collector.stats is not None and collector.stats.num_rewarding > 0)
        await rollout.sleep(["kv_cache"], drain_s=0)
        await asyncio.sleep(0.01)
        release.set()
        with pytest.raises(sr.LifecycleError, match="wake"), anyio.fail_after(5):
            await waiting
        await rollout.wake()
        assert len(await collector) == 16


async def test_a_full_queue_is_waited_out() -> None:
    async with rollout_of(ScriptedEngine(max_running=1, token_s=0.001), max_inflight=1, max_queued=1) as rollout:
        collectors = [rollout.collect(prompts(5), sampling=SHORT, target_groups=5) for _ in range(3)]
        batches = await asyncio.gather(*(anyio_await(collector) for collector in collectors))
    assert [len(batch) for batch in batches] == [5, 5, 5]


@pytest.mark.parametrize("verdict", [(False, "why"), None, "no"])
async def test_a_filter_that_gives_no_verdict_is_refused(verdict: Any) -> None:
    async with rollout_of() as rollout:
        with pytest.raises(sr.ConfigError, match="must return a Verdict"):
            await rollout.collect(prompts(3), sampling=SHORT, filter=lambda group: verdict)


async def test_a_group_reward_need_not_know_what_failed() -> None:
    failed: list[int] = []

    def once(request: Request) -> str | None:
        failed.append(1)
        return "no" if len(failed) == 1 else None

    def reward(group: sr.Group) -> list[float | None]:
        return [None if completion.error else 1.0 for completion in group.completions]

    async with rollout_of(ScriptedEngine(fail_request=once)) as rollout:
        batch = await rollout.collect(prompts(3), n=2, sampling=SHORT, group_reward=reward)
    assert batch.valid.sum() == 5
    assert batch.report is not None
    assert batch.report.num_failed == 1


async def test_a_state_of_another_group_size_or_sampling_is_not_taken_for_this_one() -> None:
    engine = ScriptedEngine(script=lengths_by_number, token_s=0.0005)
    async with rollout_of(engine) as rollout:
        collector = rollout.collect([[1, 19]], sampling=sr.Sampling(max_new_tokens=500))
        waiting = asyncio.ensure_future(anyio_await(collector))
        await until(lambda: engine.num_tokens > 100)
        state = collector.state_dict()
        waiting.cancel()
    async with rollout_of(engine := ScriptedEngine(script=lengths_by_number)) as rollout:
        other = rollout.collect([[1, 19]], n=2)
        other.load_state_dict(state)
        with pytest.raises(sr.ConfigError, match="n must be that of the saved state, 1"):
            await other
        broken = rollout.collect([[1, 19]])
        broken.load_state_dict({"format": 1})
        with pytest.raises(sr.ConfigError, match="state must be"):
            await broken
        shorter = rollout.collect([[1, 19]], sampling=sr.Sampling(max_new_tokens=40))
        shorter.load_state_dict(state)
        assert (await shorter).generation_lengths.tolist() == [40]
        penalized = rollout.collect([[1, 19]], sampling=sr.Sampling(max_new_tokens=300, frequency_penalty=0.5))
        penalized.load_state_dict(state)
        await penalized
    assert all(len(request.prompt_ids) == 2 for request in engine.submitted)


async def test_closing_it_from_a_reward_ends_it_and_does_not_hang() -> None:
    async def reward(completion: sr.Completion) -> float:
        await collector.aclose()
        return 1.0

    async with rollout_of() as rollout:
        collector = rollout.collect(prompts(3), sampling=SHORT, reward=reward)
        with pytest.raises(sr.LifecycleError), anyio.fail_after(5):
            await collector


async def test_closing_it_while_the_engines_start_leaves_nothing_running() -> None:
    engine = ScriptedEngine(start_s=0.05)
    rollout = await rollout_of(engine).start(wait=False)
    try:
        collector = rollout.collect(prompts(50), sampling=SHORT)
        waiting = asyncio.ensure_future(anyio_await(collector))
        await asyncio.sleep(0.01)
        await collector.aclose()
        with pytest.raises(sr.LifecycleError, match="closed"):
            await waiting
        await asyncio.sleep(0.01)
        assert not engine.submitted
    finally:
        await rollout.close()


async def test_it_says_why_there_is_no_batch() -> None:
    async with rollout_of() as rollout:
        none = rollout.collect(prompts(4), sampling=SHORT, reward=lambda completion: 1.0, filter=sr.filters.zero_std())
        with pytest.raises(sr.LifecycleError, match="filtered out: 4 zero_std"):
            await none
        await none.aclose()
        closed = rollout.collect(prompts(4), sampling=SHORT)
        await closed.aclose()
        with pytest.raises(sr.LifecycleError, match="was closed"):
            await closed


async def test_a_sample_under_which_engine_after_engine_dies_is_given_up() -> None:
    engines = [ScriptedEngine(f"engine-{i}", die_after=10) for i in range(5)]
    async with rollout_of(*engines, ScriptedEngine("engine-5", token_s=100.0)) as rollout:
        collector = rollout.collect([[1, 0]], sampling=LONG)
        with pytest.raises(sr.FailureBudgetError, match="EngineDiedError"), anyio.fail_after(10):
            await collector


async def test_a_group_stays_together_on_one_engine() -> None:
    engines = [ScriptedEngine(f"engine-{i}") for i in range(3)]
    async with rollout_of(*engines) as rollout:
        batch = await rollout.collect(prompts(9), n=4, sampling=SHORT)
    assert all(len({completion.engine for completion in group.completions}) == 1 for group in batch.groups)


async def test_a_second_argument_with_a_default_is_not_taken_for_the_task() -> None:
    def scaled(completion: sr.Completion, scale: float = 2.0) -> float:
        return 1.0 * scale

    async with rollout_of() as rollout:
        assert (await rollout.collect(prompts(1), sampling=SHORT, reward=scaled)).rewards.tolist() == [2]


async def test_tokens_of_weights_that_the_engines_do_not_have_yet_are_not_taken_for_fresh_ones() -> None:
    async with rollout_of(ScriptedEngine(weight_version=57)) as rollout:
        collector = rollout.collect(prompts(6), sampling=SHORT, target_groups=2)
        seen = numbers(await collector)
        state = collector.state_dict()
    async with rollout_of(engine := ScriptedEngine()) as rollout:
        collector = rollout.collect(prompts(6), sampling=SHORT, target_groups=2)
        collector.load_state_dict(state)
        with pytest.raises(sr.LifecycleError, match="version=57"):
            await collector
        publish(rollout, [engine], 57)
        async for batch in collector:
            seen += numbers(batch)
    assert sorted(seen) == list(range(6))
