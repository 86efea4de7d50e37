"""What a rollout tells of itself: its numbers, those for Prometheus, its timeline and its report."""

from __future__ import annotations

import asyncio
import builtins
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import sglrollout as sr
from sglrollout.config import Sampling
from sglrollout.generation.sample import Failover, Outlives, Prepared, Sample
from sglrollout.observe import recorder as recorder_module
from sglrollout.observe.recorder import PHASES, Recorder
from sglrollout.observe.series import WINDOW, Series
from sglrollout.observe.timeline import trace
from sglrollout.pool.pool import Pool
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.messages import Finish

pytestmark = pytest.mark.timeout(60)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)
PROMPT = [1, 2, 3]
SHORT = sr.Sampling(max_new_tokens=4, ignore_eos=True)
LONG = sr.Sampling(max_new_tokens=3000, ignore_eos=True)
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def rollout_of(*engines: ScriptedEngine, **options: Any) -> sr.AsyncRolloutEngine:
    return sr.AsyncRolloutEngine(config=CONFIG.replace(**options), engines=engines or (ScriptedEngine(),))


def pair(**options: Any) -> tuple[ScriptedEngine, ScriptedEngine]:
    return ScriptedEngine("engine-0", **options), ScriptedEngine("engine-1", **options)


async def until(condition: Any) -> None:
    with anyio.fail_after(10):
        while not condition():
            await asyncio.sleep(0)


def stopping_at_nine(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
    """Every other sample of a prompt ends at a stop token, with two tokens; others have all they may."""
    count = sampling["max_new_tokens"]
    return ([5, 9] if index % 2 else [5] * count), [-1.0] * (2 if index % 2 else count)


async def sync(rollout: sr.AsyncRolloutEngine, **options: Any) -> sr.SyncReport:
    async with sr.WeightSyncer(rollout, sr.TensorSource({"weight": torch.ones(4)})) as syncer:
        return await syncer.sync(**options)


async def eventful(tmp_path: Path) -> sr.AsyncRolloutEngine:
    """A rollout that is over, in which there was a bit of everything."""
    engines = pair(memory_saver=True, kv_usage=0.25)
    rollout = rollout_of(*engines, max_restarts=3, restart_delay_s=0)
    async with rollout:
        call = asyncio.create_task(rollout.generate([PROMPT, [4]], n=4, sampling=LONG))
        await until(lambda: engines[0].num_tokens > 20 and engines[1].num_tokens > 20)
        engines[0].die("it was told to")
        await until(lambda: rollout.engines[0].state == "ready")
        await call
        async for _ in rollout.collect([[1], [2]], n=2, sampling=SHORT, target_groups=1, reward=lambda sample: 1.0):
            pass
        await sync(rollout)
        await rollout.sleep(["kv_cache"])
        await rollout.wake()
        async for _ in rollout.stream(PROMPT, LONG):
            break
        rollout._recorder.tick()
    return rollout


# ------------------------------------------------------------ numbers


async def test_samples_tokens_prompts_and_finish_reasons_are_counted_by_engine_and_in_all() -> None:
    engines = pair(script=stopping_at_nine)
    async with rollout_of(*engines) as rollout:
        sampling = sr.Sampling(max_new_tokens=6, stop_token_ids=[9])
        groups = await rollout.generate([PROMPT, [4]], n=4, sampling=sampling)
        metrics = rollout.metrics()
    completions = [completion for group in groups for completion in group.completions]
    assert metrics.finish_reasons == {"length": 4, "stop": 4}
    assert (metrics.num_samples, metrics.truncated_ratio) == (8, 0.5)
    assert metrics.num_tokens == sum(len(completion.token_ids) for completion in completions) == 4 * 6 + 4 * 2
    assert metrics.num_prompt_tokens == 4 * 3 + 4 * 1
    for engine in metrics.engines:
        served = [completion for completion in completions if completion.engine == engine.name]
        assert sum(engine.finish_reasons.values()) == len(served) > 0
        assert engine.num_tokens == sum(len(completion.token_ids) for completion in served)
    assert (metrics.response_len.count, metrics.response_len.mean, metrics.response_len.max) == (8, 4, 6)


async def test_what_runs_waits_and_queues_is_told_while_it_does() -> None:
    engine = ScriptedEngine(max_running=2, kv_usage=0.5)
    async with rollout_of(engine, max_inflight=3) as rollout:
        call = asyncio.create_task(rollout.generate([PROMPT] * 4, n=2, sampling=LONG))
        await until(lambda: rollout.num_queued and engine.load is not None and engine.load.num_running == 2)
        metrics = rollout.metrics()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
    (one,) = metrics.engines
    assert (metrics.num_inflight, metrics.num_running, metrics.num_waiting, metrics.num_queued) == (3, 2, 1, 1)
    assert (one.num_inflight, one.limit, one.num_running, one.num_waiting) == (3, 3, 2, 1)
    assert (one.kv_usage, metrics.kv_usage_mean, metrics.kv_usage_max) == (0.5, 0.5, 0.5)


async def test_tokens_of_samples_that_still_run_count_and_make_the_rate() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        stream = rollout.stream(PROMPT, LONG, chunk_tokens=1)
        await anext(stream)
        await until(lambda: engine.num_tokens > 40)
        metrics = rollout.metrics()
        await stream.aclose()
        assert 40 <= metrics.num_tokens <= engine.num_tokens
        assert metrics.tokens_per_s > 0
        assert metrics.num_samples == 0
        await until(lambda: not engine.num_running)
        after = rollout.metrics()
    assert after.finish_reasons == {"abort": 1}
    assert after.num_tokens >= metrics.num_tokens
    assert after.total_s.count == 0, "of samples that ended whole"


async def test_times_of_queue_prefill_and_decode_add_up() -> None:
    engine = ScriptedEngine(first_token_s=0.05, token_s=0.01)
    async with rollout_of(engine, max_inflight=1) as rollout:
        await rollout.generate([PROMPT], n=2, sampling=SHORT)
        metrics = rollout.metrics()
    assert [s.count for s in (metrics.queue_s, metrics.prefill_s, metrics.decode_s, metrics.total_s)] == [2] * 4
    assert metrics.prefill_s.mean >= 0.05
    assert metrics.decode_s.mean >= 0.03
    parts = metrics.queue_s.mean + metrics.prefill_s.mean + metrics.decode_s.mean
    assert metrics.total_s.mean == pytest.approx(parts, rel=0.2)


async def test_the_prefix_hit_rate_is_of_the_prompts_of_samples_that_ended() -> None:
    async with rollout_of() as rollout:
        sample = await rollout_sample(rollout, Finish("stop", prompt_tokens=8, cached_tokens=6))
        assert sample.request.ended
        metrics = rollout.metrics()
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens, metrics.prefix_cache_hit_rate) == (8, 6, 0.75)


async def rollout_sample(rollout: sr.AsyncRolloutEngine, finish: Finish) -> Sample:
    """One that ends as it is told."""
    sampler = await rollout._sampler()
    sample = await sampler.start(sampler.prepare(PROMPT, "prompt"), SHORT)
    sample.request.end(finish)
    return sample


async def test_a_sample_cancelled_in_the_queue_is_an_abort_of_no_engine() -> None:
    async with rollout_of(max_inflight=1) as rollout:
        stream = rollout.stream(PROMPT, LONG)
        await anext(stream)
        call = asyncio.create_task(rollout.generate([PROMPT], sampling=SHORT))
        await until(lambda: rollout.num_queued)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        metrics = rollout.metrics()
        await stream.aclose()
    assert metrics.finish_reasons == {"abort": 1}
    assert metrics.engines[0].finish_reasons == {}
    assert metrics.queue_s.count == 0


async def test_a_death_a_restart_and_the_failovers_between_are_counted_of_the_engine_that_had_them() -> None:
    engines = pair()
    async with rollout_of(*engines, max_restarts=3, restart_delay_s=0) as rollout:
        call = asyncio.create_task(rollout.generate([PROMPT], n=2, sampling=LONG))
        await until(lambda: engines[0].num_running == 2 and engines[0].num_tokens > 20)
        engines[0].die()
        down = rollout.metrics()
        (group,) = await call
        await until(lambda: rollout.engines[0].state == "ready")
        metrics = rollout.metrics()
    assert (down.num_deaths, down.num_restarts, down.engines[0].state) == (1, 0, "restarting")
    assert down.engines[0].kv_usage is None
    assert [engine.num_deaths for engine in metrics.engines] == [1, 0]
    assert [engine.num_restarts for engine in metrics.engines] == [1, 0]
    assert [engine.num_failovers for engine in metrics.engines] == [2, 0]
    assert metrics.finish_reasons == {"length": 2}
    assert metrics.engines[1].finish_reasons == {"length": 2}
    assert metrics.engines[0].num_tokens > 0
    assert metrics.num_tokens == sum(len(completion.token_ids) for completion in group.completions)


async def test_tokens_that_a_sample_loses_when_it_begins_anew_were_sampled_all_the_same() -> None:
    engines = pair()
    async with rollout_of(*engines, failover="restart") as rollout:
        call = asyncio.create_task(rollout.generate([PROMPT], sampling=LONG))
        await until(lambda: engines[0].num_tokens > 100)
        engines[0].die()
        lost = rollout.metrics().num_tokens
        await call
        metrics = rollout.metrics()
    assert metrics.num_tokens == lost + 3000
    assert metrics.num_failovers == 1


async def test_a_sync_that_aborts_interrupts_what_outlives_it_and_a_batch_has_its_staleness() -> None:
    engine = ScriptedEngine()
    async with rollout_of(engine) as rollout:
        collector = rollout.collect([[1], [2]], sampling=LONG, target_groups=2, reward=lambda sample: 1.0)
        batch = asyncio.create_task(anext(collector))
        await until(lambda: engine.num_running == 2 and engine.num_tokens > 20)
        engine.hang = True  # so that they do not end before they are cut
        await sync(rollout, mode="abort")
        engine.hang = False
        await batch
        metrics = rollout.metrics()
    assert metrics.num_interrupted == 2
    assert metrics.num_failovers == 0
    assert (metrics.num_batches, metrics.batch_staleness_mean, metrics.batch_staleness_max) == (1, 1.0, 1)
    assert (metrics.staleness.count, metrics.staleness.max) == (2, 1)


async def test_syncs_are_counted_and_timed_by_phase_and_those_that_fail_are_counted_apart() -> None:
    failing: list[str] = []
    engine = ScriptedEngine(fail_command=lambda name: "out of luck" if name in failing else None)
    async with rollout_of(engine) as rollout:
        first, second = await sync(rollout), await sync(rollout)
        failing.append("load_portable")
        with pytest.raises(sr.WeightSyncError):
            await sync(rollout)
        metrics = rollout.metrics()
    assert (metrics.num_syncs, metrics.num_failed_syncs, metrics.weight_version) == (2, 1, 2)
    assert metrics.last_sync == second
    assert set(metrics.sync_s) == set(PHASES)
    for phase, summary in metrics.sync_s.items():
        seconds = [getattr(report, f"{phase}_s") for report in (first, second)]
        assert (summary.count, summary.max) == (2, max(seconds))
        assert summary.mean == pytest.approx(sum(seconds) / 2)


async def test_what_is_in_use_after_a_sleep_is_told_by_engine() -> None:
    async with rollout_of(*pair(memory_saver=True)) as rollout:
        before = rollout.metrics()
        report = await rollout.sleep(["kv_cache"])
        metrics = rollout.metrics()
    assert (before.num_sleeps, before.engines[0].used_bytes, before.engines[0].freed_bytes) == (0, None, {})
    assert metrics.num_sleeps == 1
    for engine in metrics.engines:
        assert engine.state == "asleep"
        assert engine.freed_bytes == report.freed_bytes[engine.name]
        assert engine.used_bytes == report.used_bytes[engine.name]
        assert engine.residual_bytes == report.residual_bytes[engine.name]


def counters(metrics: sr.Metrics) -> dict[str, float]:
    numbers = metrics.to_dict("")
    grows = re.compile(r"(.*/)?(num_(?!inflight|running|waiting|queued)\w+|finish_reasons/\w+|count)$")
    return {name: number for name, number in numbers.items() if grows.match(name)}


async def test_counters_never_fall_whatever_happens() -> None:
    engines = pair(memory_saver=True)
    seen: list[dict[str, float]] = []
    async with rollout_of(*engines, max_restarts=3, restart_delay_s=0) as rollout:

        async def look() -> None:
            while True:
                seen.append(counters(rollout.metrics()))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        call = asyncio.create_task(rollout.generate([PROMPT, [4]], n=4, sampling=LONG, on_error="return"))
        await until(lambda: engines[0].num_tokens > 40)
        engines[0].die()
        await until(lambda: rollout.engines[0].state == "ready")
        await sync(rollout, mode="abort")
        await call
        sleep = asyncio.create_task(rollout.sleep(["kv_cache"]))
        engines[1].die()  # its restart is called off, and counts no more
        await sleep
        await rollout.wake()
        looking.cancel()
    seen.append(counters(rollout.metrics()))
    assert len(seen) > 100
    for before, after in pairwise(seen):
        for name, number in before.items():
            assert after[name] >= number, name
    assert seen[-1]["num_deaths"] == 2


async def test_metrics_can_be_read_on_another_thread_while_samples_come_and_go() -> None:
    failures: list[BaseException] = []
    done = threading.Event()

    def read(rollout: sr.AsyncRolloutEngine) -> None:
        num_tokens = 0
        try:
            while not done.is_set():
                metrics = rollout.metrics()
                assert metrics.num_tokens >= num_tokens
                num_tokens = metrics.num_tokens
        except BaseException as error:
            failures.append(error)

    async with rollout_of(*pair()) as rollout:
        threads = [threading.Thread(target=read, args=(rollout,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            await rollout.generate([[i] for i in range(1, 40)], n=4, sampling=SHORT)
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []


async def test_before_the_start_there_is_nothing_and_after_the_end_it_is_as_it_was_then() -> None:
    rollout = rollout_of()
    before = rollout.metrics()
    assert (before.engines, before.num_samples, before.seconds) == ((), 0, 0.0)
    async with rollout:
        await rollout.generate([PROMPT], sampling=SHORT)
    first = rollout.metrics()
    await asyncio.sleep(0.01)
    assert rollout.metrics() == first
    assert first.num_samples == 1
    assert first.num_deaths == 0


async def test_metrics_print_as_a_few_lines(tmp_path: Path) -> None:
    text = str((await eventful(tmp_path)).metrics())
    assert "1 deaths" in text
    assert "1 restarts" in text
    assert "last sync: version 1" in text
    assert "engine-1 dead" not in text
    assert len(text.splitlines()) < 12


async def test_the_flat_numbers_are_those_of_the_object(tmp_path: Path) -> None:
    metrics = (await eventful(tmp_path)).metrics()
    numbers = metrics.to_dict()
    assert all(type(value) is float for value in numbers.values())
    assert numbers["pool/num_tokens"] == metrics.num_tokens
    assert numbers["pool/queue_s/p95"] == metrics.queue_s.p95
    assert numbers["pool/sync_s/total/mean"] == metrics.sync_s["total"].mean
    assert numbers["pool/finish_reasons/length"] == metrics.finish_reasons["length"]
    assert numbers["pool/engine-0/num_deaths"] == 1
    assert all(name.startswith("mine/") for name in metrics.to_dict("mine/"))


# ------------------------------------------------------------ bounds


def test_a_summary_is_of_the_latest_numbers_and_counts_all() -> None:
    series = Series()
    assert series.summary() == sr.Summary()
    for number in range(1, WINDOW + 101):
        series.add(number)
    summary = series.summary()
    assert (summary.count, summary.max) == (WINDOW + 100, WINDOW + 100)
    assert summary.mean == (101 + WINDOW + 100) / 2
    assert (summary.p50, summary.p95) == (100 + WINDOW // 2, 100 + 973)


def test_a_histogram_counts_what_is_at_most_so_large() -> None:
    series = Series((1, 2))
    for number in (0.5, 1, 1.5, 2, 99):
        series.add(number)
    assert series.buckets() == [(1, 2), (2, 4), (float("inf"), 5)]


def ended(recorder: Recorder, engine: str) -> None:
    sample = Sample(
        Prepared(PROMPT, (1, 2, 3), 100),
        Sampling(),
        {},
        index=0,
        key=None,
        chunk_tokens=0,
        deadline=None,
        outlives=Outlives.DEATHS,
        failover=Failover(False, False, 0),
        on_lost=lambda sample, error: None,
        observer=recorder,
    )
    sample.request.engine, sample.held_s = engine, sample.asked_s
    recorder.held(sample)
    sample.request.end(Finish("stop"))


async def test_a_hundred_thousand_samples_and_days_of_points_take_no_more_memory_than_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, now = Recorder(1000), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pool = Pool([ScriptedEngine()], "auto", 10)
    with recorder.watching(pool):
        for _ in range(100_000):
            ended(recorder, "engine-0")
            now[0] += 2
            recorder.tick()
        assert recorder.metrics().num_samples == 100_000
        assert len(recorder.stays) == 1000
        assert not recorder._live
        points = recorder.points
        assert recorder_module.NUM_POINTS / 2 <= len(points) <= recorder_module.NUM_POINTS
        assert points[0].when_s < 200
        assert points[-1].when_s > 199_000
        gaps = {after.when_s - before.when_s for before, after in pairwise(points)}
        assert max(gaps) <= 2 * min(gaps)


async def test_without_events_nothing_is_kept_for_a_timeline_and_it_says_so(tmp_path: Path) -> None:
    async with rollout_of(timeline_events=0) as rollout:
        await rollout.generate([PROMPT], sampling=SHORT)
        with pytest.raises(sr.ConfigError, match="timeline_events must be at least 1"):
            await rollout.timeline(tmp_path / "timeline.json")
        assert rollout.metrics().num_samples == 1
        assert rollout._recorder.stays == []


# ------------------------------------------------------------ Prometheus


def families(registry: prometheus_client.CollectorRegistry) -> dict[str, Any]:
    text = prometheus_client.generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: dict[str, Any], name: str, **labels: str) -> float:
    samples = [sample for family in found.values() for sample in family.samples]
    (one,) = [sample.value for sample in samples if sample.name == name and sample.labels == labels]
    return float(one)


async def test_prometheus_gets_the_same_numbers() -> None:
    registry = prometheus_client.CollectorRegistry()
    engines = pair(memory_saver=True, kv_usage=0.25)
    async with rollout_of(*engines, max_restarts=3, restart_delay_s=0) as rollout:
        rollout.export_metrics(registry)
        call = asyncio.create_task(rollout.generate([PROMPT], n=2, sampling=LONG))
        await until(lambda: engines[0].num_running == 2 and engines[0].num_tokens > 20)
        engines[0].die()
        await call
        await until(lambda: rollout.engines[0].state == "ready")
        await sync(rollout)
        await rollout.sleep(["kv_cache"])
        metrics, found = rollout.metrics(), families(registry)
    engine = metrics.engines[1]
    assert value(found, "sglrollout_engine_generation_tokens_total", engine="engine-1") == engine.num_tokens > 0
    assert value(found, "sglrollout_engine_failovers_total", engine="engine-0") == 2
    assert value(found, "sglrollout_engine_deaths_total", engine="engine-0") == 1
    assert value(found, "sglrollout_engine_restarts_total", engine="engine-0") == 1
    assert value(found, "sglrollout_engine_kv_usage_ratio", engine="engine-1") == 0.25
    assert value(found, "sglrollout_engine_state", engine="engine-1", state="asleep") == 1
    assert value(found, "sglrollout_engine_state", engine="engine-1", state="ready") == 0
    assert value(found, "sglrollout_samples_total", finish_reason="length") == 2
    assert value(found, "sglrollout_syncs_total", outcome="ok") == 1
    assert value(found, "sglrollout_sync_seconds_count", phase="transfer") == 1
    assert value(found, "sglrollout_sample_decode_seconds_count") == 2
    assert value(found, "sglrollout_sample_decode_seconds_bucket", le="+Inf") == 2
    assert value(found, "sglrollout_weight_version") == 1
    assert value(found, "sglrollout_sleeps_total") == 1


async def test_names_for_prometheus_have_units_and_a_prefix_and_help(tmp_path: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    async with rollout_of() as rollout:
        rollout.export_metrics(registry)
        found = families(registry)
    assert len(found) > 20
    for name, family in found.items():
        assert name.startswith("sglrollout_")
        assert family.documentation.endswith(".")
        assert (family.type == "counter") == any(sample.name.endswith("_total") for sample in family.samples)
        assert not re.search(r"_(s|ms|ns|kib|percent)$", name)


async def test_a_rollout_that_never_came_up_leaves_the_registry_when_it_is_closed() -> None:
    registry = prometheus_client.CollectorRegistry()
    never_started = sr.AsyncRolloutEngine(config=CONFIG, engines=[ScriptedEngine()])
    never_started.export_metrics(registry)
    await never_started.close()
    in_vain = sr.AsyncRolloutEngine(config=CONFIG, engines=[ScriptedEngine(fail_start="no room")])
    in_vain.export_metrics(registry)
    with pytest.raises(sr.EngineStartError):
        await in_vain.start()
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=[ScriptedEngine()]) as rollout:
        rollout.export_metrics(registry)
        assert families(registry)


async def test_a_closed_rollout_leaves_the_registry_and_its_successor_may_come() -> None:
    registry = prometheus_client.CollectorRegistry()
    async with rollout_of() as rollout:
        rollout.export_metrics(registry)
        with pytest.raises(sr.ConfigError, match="registry must not have a rollout in it"):
            rollout.export_metrics(registry)
    assert families(registry) == {}
    with pytest.raises(sr.LifecycleError):
        rollout.export_metrics(registry)
    async with rollout_of() as successor:
        successor.export_metrics(registry)
        assert families(registry)


async def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=re.escape('pip install "sglrollout[metrics]"')):
        rollout_of().export_metrics()


# ------------------------------------------------------------ timeline


async def test_the_timeline_is_a_trace_whose_slices_end_and_whose_times_go_on(tmp_path: Path) -> None:
    rollout = await eventful(tmp_path)
    await rollout.timeline(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(rows) == ["rollout", "engine-0", "engine-1"]
    timed = [event for event in events if event["ph"] != "M"]
    latest: defaultdict[tuple[int, int], float] = defaultdict(float)
    open_: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    for event in timed:
        track = event["pid"], event["tid"]
        assert event["ts"] >= latest[track]
        assert event.get("dur", 0) >= 0
        latest[track] = event["ts"]
        if event["ph"] == "b":
            open_[event["pid"], event["id"]].append(event["name"])
        elif event["ph"] == "e":
            assert open_[event["pid"], event["id"]].pop() == event["name"]
    assert not any(open_.values())
    names = {(event["ph"], event["name"]) for event in timed}
    assert names >= {
        *(("b", phase) for phase in ("sample", "queue", "prefill", "decode", "prefill and decode")),
        *(("X", what) for what in ("a weight sync", "sleep", "wake", "transfer", "restarting", "asleep", "held")),
        ("i", "died"),
        ("C", "samples"),
    }
    outcomes = [event["args"]["outcome"] for event in timed if event["name"] == "sample" and event["ph"] == "b"]
    assert {"failover", "length", "abort"} <= set(outcomes)


async def test_slices_of_one_track_do_not_overlap(tmp_path: Path) -> None:
    rollout = await eventful(tmp_path)
    ends: defaultdict[tuple[int, int], float] = defaultdict(float)
    for event in trace(rollout._recorder):
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["ts"] >= ends[track] - 0.01, event
            ends[track] = event["ts"] + event["dur"]


async def test_a_sample_that_still_runs_is_in_the_timeline() -> None:
    async with rollout_of() as rollout:
        stream = rollout.stream(PROMPT, LONG)
        await anext(stream)
        begins = [event for event in trace(rollout._recorder) if event["ph"] == "b" and event["name"] == "sample"]
        await stream.aclose()
    (begin,) = begins
    assert begin["args"]["outcome"] == "running"
    assert begin["args"]["num_tokens"] > 0


# ------------------------------------------------------------ report

SECTIONS = [
    "throughput",
    "running-and-queued",
    "kv-use",
    "staleness-of-batches",
    "weight-syncs",
    "finish-reasons",
    "times-of-samples",
    "engines",
    "all-in-words",
]


class Page(HTMLParser):
    """Finds sections, and what would be loaded; refuses tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sections: dict[str, list[str]] = {}
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [str(given[name]) for name in ("src", "href") if name in given]
        if tag == "section":
            self.sections[str(given["id"])] = []
        if self.sections:
            list(self.sections.values())[-1].append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    page.close()
    assert page.open == []
    return page


async def test_the_report_is_one_page_with_every_section_that_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_TICK_S", 0.001)
    rollout = await eventful(tmp_path)
    await rollout.report(tmp_path / "report.html")
    page = parsed(tmp_path / "report.html")
    assert list(page.sections) == SECTIONS
    assert page.loads == []
    for name in SECTIONS[:5]:
        assert "polyline" in page.sections[name], name
    assert "rect" in page.sections["finish-reasons"]
    assert page.sections["engines"].count("tr") == 3


async def test_a_report_on_nothing_has_every_section_too(tmp_path: Path) -> None:
    await rollout_of().report(tmp_path / "report.html")
    page = parsed(tmp_path / "report.html")
    assert list(page.sections) == SECTIONS
    assert page.sections["throughput"] == ["section", "h2", "p"]


async def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    async with rollout_of() as rollout:
        for write in (rollout.report, rollout.timeline):
            with pytest.raises(OSError, match="nowhere"):
                await write(tmp_path / "nowhere" / "file")


# ------------------------------------------------------------ the blocking twin, and the page


def test_the_blocking_rollout_shows_the_same(tmp_path: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    rollout = sr.RolloutEngine(config=CONFIG, engines=[ScriptedEngine()])
    for call in (rollout.metrics, lambda: rollout.export_metrics(registry)):
        with pytest.raises(sr.LifecycleError):
            call()
    with rollout:
        rollout.export_metrics(registry)
        rollout.generate([PROMPT], n=2, sampling=SHORT)
        assert value(families(registry), "sglrollout_samples_total", finish_reason="length") == 2
    assert rollout.metrics().num_samples == 2
    rollout.timeline(tmp_path / "timeline.json")
    rollout.report(tmp_path / "report.html")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert list(parsed(tmp_path / "report.html").sections) == SECTIONS


async def test_every_name_is_in_the_documentation(tmp_path: Path) -> None:
    page = DOCS.read_text(encoding="utf-8")
    registry = prometheus_client.CollectorRegistry()
    async with rollout_of() as rollout:
        rollout.export_metrics(registry)
        exported = {
            name + ("_total" if family.type == "counter" else "") for name, family in families(registry).items()
        }
    names = {*sr.Metrics.__slots__, *sr.EngineMetrics.__slots__} - {"engines", "last_sync", "name"}
    assert [name for name in sorted(names | exported) if f"`{name}`" not in page] == []
    listed = set(re.findall(r"`(sglrollout_\w+)`", page))
    assert listed - exported <= {"sglrollout_batch_staleness_mean_versions", "sglrollout_batch_staleness_max_versions"}
