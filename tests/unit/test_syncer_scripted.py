"""A weight syncer over scripted engines: what they are told, in which order, and what they are after a failure."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import torch

import sglrollout as sr
from sglrollout.testing import ScriptedEngine
from sglrollout.weights import leader as leader_module
from sglrollout.weights.leader import PauseMode
from sglrollout.wire.messages import EngineInfo

pytestmark = pytest.mark.timeout(30)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)
PROMPT = [1, 2, 3]
SHORT = sr.Sampling(max_new_tokens=4, ignore_eos=True)
LONG = sr.Sampling(max_new_tokens=3000, ignore_eos=True)
BUCKET_BYTES = 1024
MODES: list[PauseMode] = ["abort", "retract", "in_place"]


class Engine(ScriptedEngine):
    """Notes the arguments of its commands, and says of weights what a test wants it to."""

    def __init__(self, name: str = "engine-0", **options: Any) -> None:
        super().__init__(name, **{"memory_saver": True, **options})
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.report: dict[str, Any] = {}
        self.free = 1 << 40
        self.before: Callable[[str], Any] | None = None

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        self.calls.append((name, arguments))
        if self.before is not None:
            await self.before(name)
        answer = await super().command(name, timeout_s, **arguments)
        if name == "describe_weights":
            return {"reports": [{**report, **self.report} for report in answer["reports"]]}
        if name == "memory":
            return {"ranks": [{"free": self.free, "total": 1 << 40, "reserved": 0}]}
        return answer

    def arguments(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.calls if called == name]


def weights() -> dict[str, Any]:
    return {"large": torch.randn(40, 16), "small": torch.randn(8).bfloat16(), "scalar": torch.tensor(2.0)}


class Bench:
    """A rollout and its syncer."""

    def __init__(self, rollout: sr.AsyncRolloutEngine, syncer: sr.WeightSyncer) -> None:
        self.rollout, self.syncer = rollout, syncer

    @property
    def states(self) -> list[str]:
        return [engine.state for engine in self.rollout.engines]


@asynccontextmanager
async def bench(*engines: ScriptedEngine, source: Any = None, **options: Any) -> AsyncIterator[Bench]:
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=engines or (Engine(),)) as rollout:
        source = source or sr.TensorSource(weights())
        async with sr.WeightSyncer(rollout, source, bucket_bytes=BUCKET_BYTES, **options) as syncer:
            yield Bench(rollout, syncer)


def failing(*names: str, reason: str = "out of luck") -> Callable[[str], str | None]:
    return lambda name: reason if name in names else None


async def until(condition: Callable[[], Any]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await asyncio.sleep(0)


def counting(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
    count = sampling["max_new_tokens"]
    return list(range(count)), [-float(i) for i in range(count)]


TRANSFER = ["begin_portable", "load_portable", "load_portable", "end_portable"]  # of weights(): one cannot be cut
SYNC = ["pause", *TRANSFER, "resume"]


# ------------------------------------------------------------ a good sync


async def test_a_sync_tells_every_engine_the_same_in_order_and_plans_once() -> None:
    engines = [Engine("engine-0"), Engine("engine-1")]
    async with bench(*engines) as b:
        await b.syncer.sync()
        await b.syncer.sync()
        for engine in engines:
            assert engine.commands == ["describe_weights", *SYNC, *SYNC]
            assert [arguments["version"] for arguments in engine.arguments("resume")] == [1, 2]
            assert [arguments["mode"] for arguments in engine.arguments("pause")] == ["retract", "retract"]
        assert b.states == ["ready", "ready"]


async def test_its_report_says_what_was_done() -> None:
    async with bench(Engine("engine-0"), Engine("engine-1")) as b:
        report = await b.syncer.sync()
        assert (report.version, report.mode, report.num_engines, report.num_tensors) == (1, "retract", 2, 3)
        assert report.num_bytes == 40 * 16 * 4 + 8 * 2 + 4
        assert report.num_buckets == 2
        assert report.method == "portable"
        assert report.why_portable == "a scripted engine has no parameters"
        assert report.total_s >= report.plan_s + report.transfer_s > report.plan_s > 0
        assert report.wake_s == 0
        assert report.copy_bytes_per_s > 0
        assert report.gb_per_s == pytest.approx(report.num_bytes / report.transfer_s / 1e9)
        text = str(report)
        for part in ("version 1:", "3 tensors", "2 buckets", "2 engines", "portable because a scripted engine"):
            assert part in text
        assert (await b.syncer.sync()).plan_s < report.plan_s


async def test_portable_that_was_asked_for_needs_no_reason() -> None:
    engine = Engine()
    engine.report = {"unsuited": ""}
    async with bench(engine, method="portable") as b:
        report = await b.syncer.sync()
        assert (report.method, report.why_portable) == ("portable", "")
        assert "because" not in str(report)


async def test_engines_are_described_what_will_come() -> None:
    engine = Engine()
    async with bench(engine, allow_missing=["visual.*"]) as b:
        await b.syncer.sync()
        (arguments,) = engine.arguments("describe_weights")
        assert arguments["allow_missing"] == ["visual.*"]
        assert [list(weight[:3]) for weight in arguments["weights"]] == [
            ["large", [40, 16], "float32"],
            ["small", [8], "bfloat16"],
            ["scalar", [], "float32"],
        ]


async def test_payloads_hold_the_weights_of_the_time_of_each_sync() -> None:
    class Unpacking(Engine):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            if name == "load_portable":
                (payload,) = arguments["payloads"]
                bucket = pickle.loads(payload)
                for part in bucket["metadata"]:
                    data = bucket["flattened_tensor"][part.start_idx : part.end_idx]
                    found[part.name] = data.clone().view(part.dtype).view(part.shape)
            return await super().command(name, timeout_s, **arguments)

    found: dict[str, Any] = {}
    values = weights()
    async with bench(Unpacking(), source=sr.TensorSource(values)) as b:
        for _ in range(3):
            found.clear()
            values.update(weights())
            await b.syncer.sync()
            assert found.keys() == values.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in values.items())


async def test_versions_count_up_unless_one_is_given() -> None:
    engine = Engine()
    async with bench(engine) as b:
        assert b.rollout.weight_version == 0
        for given, expected in ((None, 1), (None, 2), (10, 10), (None, 11)):
            assert (await b.syncer.sync(version=given)).version == expected
            assert b.rollout.weight_version == engine.weight_version == expected
            (group,) = await b.rollout.generate([PROMPT], sampling=SHORT)
            assert group.completions[0].weight_versions == (sr.VersionSpan(expected, 0, 4),)


async def test_versions_go_on_from_those_that_engines_came_up_with() -> None:
    async with bench(Engine(weight_version=7)) as b:
        assert (await b.syncer.sync()).version == 8


@pytest.mark.parametrize("version", [3, 2, 0, -1])
async def test_a_version_that_is_not_newer_is_refused_and_engines_go_on(version: int) -> None:
    engine = Engine()
    async with bench(engine) as b:
        await b.syncer.sync(version=3)
        with pytest.raises(sr.ConfigError, match="version must be greater than 3, the last one"):
            await b.syncer.sync(version=version)
        assert b.states == ["ready"]
        assert engine.arguments("resume")[-1] == {"version": 3, "flush": False}
        assert (await b.syncer.sync()).version == 4


async def test_a_change_of_the_weights_is_planned_for() -> None:
    engine, module = Engine(), torch.nn.Linear(3, 3)
    async with bench(engine, source=sr.ModuleSource(module)) as b:
        await b.syncer.sync()
        await b.syncer.sync()
        assert engine.commands.count("describe_weights") == 1
        module.bias = None
        report = await b.syncer.sync()
        assert engine.commands.count("describe_weights") == 2
        assert report.num_tensors == 1


async def test_two_syncers_may_take_turns() -> None:
    engine = Engine()
    async with bench(engine) as b, sr.WeightSyncer(b.rollout, sr.TensorSource(weights())) as other:
        assert [(await syncer.sync()).version for syncer in (b.syncer, other, b.syncer)] == [1, 2, 3]


# ------------------------------------------------------------ running requests


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_running_requests_go_on_and_know_which_tokens_are_of_which_version(mode: PauseMode) -> None:
    engine = Engine(script=counting)
    async with bench(engine) as b:
        running = asyncio.ensure_future(b.rollout.generate([PROMPT], sampling=LONG))
        for num_tokens in (50, 200):
            await until(lambda: engine.num_tokens > num_tokens)  # noqa: B023
            engine.hang = True  # a sync takes longer than this engine does
            await b.syncer.sync(mode)
            engine.hang = False
        (group,) = await running
        completion = group.completions[0]
        assert completion.token_ids == tuple(range(3000))
        assert [span.version for span in completion.weight_versions] == [0, 1, 2]
        ends = [0, *(span.end for span in completion.weight_versions)]
        assert [span.start for span in completion.weight_versions] == ends[:-1]
        assert ends[-1] == 3000
        assert engine.aborted == []


async def test_aborted_requests_end_with_the_tokens_they_have() -> None:
    engine = Engine(script=counting)
    async with bench(engine) as b:
        running = asyncio.ensure_future(b.rollout.generate([PROMPT], sampling=LONG))
        await until(lambda: engine.num_tokens > 50)
        engine.hang = True
        await b.syncer.sync("abort")
        (group,) = await running
        completion = group.completions[0]
        assert completion.finish_reason == "abort"
        assert 50 < len(completion.token_ids) < 3000
        assert completion.token_ids == tuple(range(len(completion.token_ids)))
        assert completion.weight_versions == (sr.VersionSpan(0, 0, len(completion.token_ids)),)
        assert b.states == ["ready"]


@pytest.mark.parametrize("mode", MODES)
async def test_prefix_caches_are_emptied_unless_requests_go_on_with_what_is_in_them(mode: PauseMode) -> None:
    engine = Engine()
    async with bench(engine) as b:
        report = await b.syncer.sync(mode)
        assert report.mode == engine.arguments("pause")[0]["mode"] == mode
        assert engine.arguments("resume")[0]["flush"] == (mode != "in_place")


async def test_who_asks_during_a_sync_waits_and_gets_the_new_weights() -> None:
    engine, release = Engine(), asyncio.Event()

    async def before(name: str) -> None:
        if name == "load_portable":
            await release.wait()

    engine.before = before
    async with bench(engine) as b:
        syncing = asyncio.ensure_future(b.syncer.sync())
        await until(lambda: "load_portable" in [name for name, _ in engine.calls])
        assert b.states == ["held"]
        late = asyncio.ensure_future(b.rollout.generate([PROMPT], sampling=SHORT))
        await until(lambda: b.rollout.num_queued == 1)
        assert engine.submitted == []
        release.set()
        await syncing
        (group,) = await late
        assert group.completions[0].weight_versions == (sr.VersionSpan(1, 0, 4),)


async def test_one_sync_excludes_another_and_a_sleep() -> None:
    engine, release = Engine(), asyncio.Event()

    async def before(name: str) -> None:
        if name == "pause":
            await release.wait()

    engine.before = before
    async with bench(engine) as b:
        syncing = asyncio.ensure_future(b.syncer.sync())
        await until(lambda: "pause" in [name for name, _ in engine.calls])
        message = "cannot begin: a weight sync is under way on this rollout"
        with pytest.raises(sr.LifecycleError, match=f"a weight sync {message}"):
            await b.syncer.sync()
        with pytest.raises(sr.LifecycleError, match=f"sleep {message}"):
            await b.rollout.sleep()
        with pytest.raises(sr.LifecycleError, match=f"flush_cache {message}"):
            await b.rollout.flush_cache()
        release.set()
        assert (await syncing).version == 1
        assert (await b.syncer.sync()).version == 2


# ------------------------------------------------------------ failures


async def test_engines_that_cannot_plan_are_left_alone() -> None:
    engines = [Engine("engine-0"), Engine("engine-1", fail_command=failing("describe_weights"))]
    async with bench(*engines) as b:
        with pytest.raises(
            sr.WeightSyncError, match="weight sync failed in plan: engine-1: describe_weights"
        ) as caught:
            await b.syncer.sync()
        assert (caught.value.phase, caught.value.engine, caught.value.rank) == ("plan", "engine-1", None)
        assert b.states == ["ready", "ready"]
        assert "pause" not in engines[0].commands + engines[1].commands
        await b.rollout.generate([PROMPT], sampling=SHORT)


async def test_a_sync_that_fails_before_anything_moved_is_called_off_and_requests_go_on() -> None:
    engines = [Engine("engine-0"), Engine("engine-1", fail_command=failing("pause"))]
    async with bench(*engines) as b:
        running = asyncio.ensure_future(b.rollout.generate([PROMPT], n=2, sampling=LONG))
        await until(lambda: engines[0].num_tokens + engines[1].num_tokens > 10)
        for engine in engines:
            engine.hang = True
        with pytest.raises(sr.WeightSyncError, match="engine-1: pause failed: out of luck") as caught:
            await b.syncer.sync()
        assert (caught.value.phase, caught.value.engine) == ("pause", "engine-1")
        assert b.states == ["ready", "ready"]
        assert b.rollout.weight_version == 0
        for engine in engines:
            assert engine.arguments("resume") == [{"version": 0, "flush": False}]
            assert "begin_portable" not in engine.commands
            engine.hang = False
        (group,) = await running
        assert {completion.finish_reason for completion in group.completions} == {"length"}
        assert {completion.weight_versions for completion in group.completions} == {(sr.VersionSpan(0, 0, 3000),)}


async def test_engines_that_do_not_go_on_after_it_was_called_off_are_stale() -> None:
    engine = Engine(fail_command=failing("pause", "resume"))
    async with bench(engine) as b:
        with pytest.raises(sr.WeightSyncError) as caught:
            await b.syncer.sync()
        assert caught.value.phase == "pause"
        assert b.states == ["stale"]
        engine.fail_command = None
        await b.syncer.sync()
        assert b.states == ["ready"]


@pytest.mark.parametrize(
    ("command", "phase"),
    [
        ("begin_portable", "transfer"),
        ("load_portable", "transfer"),
        ("end_portable", "transfer"),
        ("resume", "resume"),
    ],
)
async def test_once_weights_move_a_failure_leaves_every_engine_stale_until_the_next_sync(
    command: str, phase: str
) -> None:
    engines = [Engine("engine-0"), Engine("engine-1", fail_command=failing(command))]
    async with bench(*engines) as b:
        await b.rollout.generate([PROMPT], sampling=SHORT)
        with pytest.raises(sr.WeightSyncError, match=f"engine-1: {command} failed: out of luck") as caught:
            await b.syncer.sync()
        assert (caught.value.phase, caught.value.engine) == (phase, "engine-1")
        assert b.states == ["stale", "stale"]
        assert b.rollout.weight_version == 0
        with pytest.raises(sr.StaleWeightsError, match=r"no engine has the trainer's weights: a weight sync failed.*;"):
            await b.rollout.generate([PROMPT], sampling=SHORT)

        engines[1].fail_command = None
        report = await b.syncer.sync()
        assert b.states == ["ready", "ready"]
        assert report.plan_s > 0
        assert engines[0].commands.count("describe_weights") == 2
        (group,) = await b.rollout.generate([PROMPT], sampling=SHORT)
        assert group.completions[0].weight_versions == (sr.VersionSpan(report.version, 0, 4),)


async def test_requests_in_engines_that_became_stale_fail_and_so_do_those_that_wait() -> None:
    engine = Engine(fail_command=failing("load_portable"), max_running=1)
    config, endless = CONFIG.replace(max_inflight=1), sr.Sampling(max_new_tokens=30000, ignore_eos=True)
    async with sr.AsyncRolloutEngine(config=config, engines=[engine]) as rollout:
        running = asyncio.ensure_future(rollout.generate([PROMPT], sampling=endless, on_error="return"))
        await until(lambda: engine.num_tokens > 10)
        waiting = asyncio.ensure_future(rollout.generate([PROMPT], sampling=endless, on_error="return"))
        await until(lambda: rollout.num_queued == 1)
        engine.hang = True
        async with sr.WeightSyncer(rollout, sr.TensorSource(weights())) as syncer:
            with pytest.raises(sr.WeightSyncError):
                await syncer.sync()
            (group,) = await running
            completion = group.completions[0]
            assert completion.finish_reason == "error"
            assert isinstance(completion.error, sr.StaleWeightsError)
            assert "engine-0 was given up" in str(completion.error)
            with pytest.raises(sr.StaleWeightsError, match="sync first"):
                await waiting
            engine.fail_command, engine.hang = None, False
            await syncer.sync()
            await rollout.generate([PROMPT], sampling=SHORT)


def dying(engine: Engine, command: str, times: int = 1) -> Engine:
    """Let it die when it is told a command, so often."""
    deaths: list[str] = []

    async def before(name: str) -> None:
        if name == command and len(deaths) < times:
            deaths.append(name)
            engine.die("out of memory")

    engine.before = before
    return engine


COMMANDS = ["describe_weights", "pause", "begin_portable", "load_portable", "end_portable", "resume"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("command", COMMANDS)
async def test_a_sync_in_which_an_engine_dies_goes_on_without_it(
    command: str, mode: PauseMode, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [Engine("engine-0"), dying(Engine("engine-1"), command)]
    async with bench(*engines) as b:
        report = await b.syncer.sync(mode, version=7)
        assert (report.version, report.num_engines, report.lost_engines) == (7, 1, ("engine-1",))
        assert "to 1 engines (lost: engine-1)" in str(report)
        assert "lost: engine-1" in report._repr_html_()
        assert (b.states, b.rollout.weight_version) == (["ready", "dead"], 7)
        assert "engine-1 died in a weight sync, which begins again: weight sync failed in" in caplog.text
        assert (await b.syncer.verify()).num_engines == 1
        again = await b.syncer.sync()
        assert (again.version, again.lost_engines) == (8, ())


@pytest.mark.parametrize("command", COMMANDS[1:])
async def test_what_runs_in_the_other_engines_does_not_notice_that_one_died_in_a_sync(command: str) -> None:
    engines = [Engine("engine-0"), dying(Engine("engine-1"), command)]
    async with bench(*engines) as b:
        running = asyncio.ensure_future(b.rollout.generate([PROMPT] * 4, sampling=LONG.replace(max_new_tokens=12000)))
        await until(lambda: all(engine.num_tokens > 50 for engine in engines))
        await b.syncer.sync()
        completions = [group.completions[0] for group in await running]
        for completion in completions:
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == 12000
            assert [span.version for span in completion.weight_versions] == [0, 1]
        assert {completion.engine for completion in completions} == {"engine-0"}
        assert b.rollout.metrics().num_failovers == 2


@pytest.mark.parametrize("command", ["pause", "load_portable", "resume"])
async def test_a_sync_begins_again_only_so_often(command: str) -> None:
    engines = [Engine(f"engine-{i}") for i in range(4)]

    async def before(name: str) -> None:
        victim = next((engine for engine in engines[1:] if engine.alive), None)
        if name == command and victim is not None:
            victim.die("out of memory")

    engines[0].before = before
    async with bench(*engines) as b:
        with pytest.raises(sr.WeightSyncError, match="engine-3: out of memory"):
            await b.syncer.sync()
        assert b.states == ["ready" if command == "pause" else "stale", "dead", "dead", "dead"]
        assert (await b.syncer.sync()).num_engines == 1


@pytest.mark.parametrize("command", ["pause", "load_portable", "resume"])
async def test_a_sync_waits_for_the_only_engine_that_died_in_it(command: str) -> None:
    engine = dying(Engine(start_s=0.1), command)
    async with restarting_bench(engine) as b:
        report = await b.syncer.sync()
        assert (report.num_engines, report.lost_engines) == (1, ("engine-0",))
        assert (b.states, engine.weights) == (["ready"], report.version)
        assert report.total_s >= 0.1


async def test_the_only_engine_that_died_in_a_sync_and_does_not_come_back_in_time_is_what_the_error_tells() -> None:
    engine = dying(Engine(), "load_portable")
    async with restarting_bench(engine) as b:
        engine.start_s = 60.0
        async with sr.WeightSyncer(b.rollout, sr.TensorSource(weights()), timeout_s=0.1) as syncer:
            with anyio.fail_after(5), pytest.raises(sr.WeightSyncError, match="engine-0: out of memory") as caught:
                await syncer.sync()
        assert caught.value.engine == "engine-0"
        assert "no rank owns a running engine" in str(caught.value.__cause__)
        assert b.states == ["restarting"]


async def test_an_engine_that_failed_and_is_alive_is_not_tried_again() -> None:
    engines = [Engine("engine-0"), Engine("engine-1", fail_command=failing("load_portable"))]
    async with bench(*engines) as b:
        with pytest.raises(sr.WeightSyncError, match="out of luck"):
            await b.syncer.sync()
        assert engines[0].commands.count("load_portable") == 1


@pytest.mark.parametrize("command", ["pause", "load_portable", "resume"])
async def test_an_engine_that_dies_in_a_sync_is_named_and_the_next_sync_goes_without_it(command: str) -> None:
    engines = [Engine("engine-0"), dying(Engine("engine-1"), command)]
    async with bench(*engines, max_retries=0) as b:
        with pytest.raises(sr.WeightSyncError, match="engine-1: out of memory") as caught:
            await b.syncer.sync()
        assert caught.value.engine == "engine-1"
        assert b.states == ["ready" if command == "pause" else "stale", "dead"]
        report = await b.syncer.sync()
        assert report.num_engines == 1
        assert b.states == ["ready", "dead"]


async def test_engines_that_died_before_are_left_out_and_the_plan_is_made_anew() -> None:
    engines = [Engine("engine-0"), Engine("engine-1")]
    async with bench(*engines) as b:
        assert (await b.syncer.sync()).num_engines == 2
        engines[0].die()
        report = await b.syncer.sync()
        assert report.num_engines == 1
        assert engines[1].commands.count("describe_weights") == 2
        assert engines[0].commands.count("pause") == 1
        assert b.states == ["dead", "ready"]


async def test_without_a_living_engine_there_is_nothing_to_sync() -> None:
    engine = Engine()
    async with bench(engine) as b:
        engine.die()
        with pytest.raises(sr.WeightSyncError, match="no rank owns a running engine") as caught:
            await b.syncer.sync()
        assert caught.value.phase == "plan"


@asynccontextmanager
async def restarting_bench(*engines: Engine) -> AsyncIterator[Bench]:
    config = CONFIG.replace(max_restarts=3, restart_delay_s=0.0)
    async with (
        sr.AsyncRolloutEngine(config=config, engines=engines) as rollout,
        sr.WeightSyncer(rollout, sr.TensorSource(weights()), bucket_bytes=BUCKET_BYTES) as syncer,
    ):
        yield Bench(rollout, syncer)


async def test_an_engine_that_was_restarted_is_planned_for_anew_and_verified_only_then() -> None:
    engines = [Engine("engine-0"), Engine("engine-1")]
    async with restarting_bench(*engines) as b:
        await b.syncer.sync()
        engines[0].die()
        await until(lambda: b.states == ["ready", "ready"])
        assert engines[0].weights == engines[1].weights == 1
        with pytest.raises(sr.LifecycleError, match="restarted, since the last sync: sync again, then verify"):
            await b.syncer.verify()
        report = await b.syncer.sync()
        assert (report.num_engines, report.version) == (2, 2)
        assert report.plan_s > 0
        for engine in engines:
            assert engine.commands.count("describe_weights") == 2
            assert engine.weights == 2
        assert (await b.syncer.verify()).num_engines == 2
        assert (await b.syncer.sync()).plan_s == 0


async def test_a_sync_waits_for_the_only_engine_to_be_restarted() -> None:
    engine = Engine(start_s=0.2)
    async with restarting_bench(engine) as b:
        await b.syncer.sync()
        engine.die()
        assert b.states == ["restarting"]
        await b.syncer.sync()
        assert (b.states, engine.weights) == (["ready"], 2)
        await b.syncer.verify()


async def test_a_sync_waits_no_longer_for_it_than_a_phase_may_take() -> None:
    engine = Engine()
    async with restarting_bench(engine) as b:
        engine.start_s = 60.0
        engine.die()
        async with sr.WeightSyncer(b.rollout, sr.TensorSource(weights()), timeout_s=0.1) as syncer:
            with anyio.fail_after(5), pytest.raises(sr.WeightSyncError, match="no rank owns a running engine"):
                await syncer.sync()


async def test_a_sync_wakes_the_only_engine_that_died_asleep() -> None:
    engine = Engine()
    async with restarting_bench(engine) as b:
        await b.rollout.sleep()
        engine.die()
        await anyio.sleep(0.1)
        assert (b.states, engine.num_starts) == (["restarting"], 1)
        await b.syncer.sync()
        assert b.states == ["ready"]
        await b.rollout.sleep()
        engine.die()
        with pytest.raises(sr.LifecycleError, match="engine-0 is asleep"):
            await b.syncer.verify()
        await b.syncer.sync()
        assert (b.states, engine.weights) == (["ready"], 2)


async def test_an_engine_that_does_not_answer_ends_the_sync_within_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def before(name: str) -> None:
        if name == "load_portable":
            await anyio.sleep(60)

    monkeypatch.setattr(leader_module, "_MARGIN_S", 0.0)
    engine = Engine()
    async with bench(engine, timeout_s=0.1) as b:
        engine.before = before
        with anyio.fail_after(5), pytest.raises(sr.WeightSyncError, match=r"did not answer within 0\.1 s") as caught:
            await b.syncer.sync()
        assert caught.value.phase == "transfer"
        assert b.states == ["stale"]
        engine.before = None
        await b.syncer.sync()
        assert b.states == ["ready"]


async def test_a_source_that_cannot_read_fails_the_transfer_and_keeps_its_reason() -> None:
    def pairs() -> Iterator[tuple[str, Any]]:
        if broken:
            raise OSError("the adapter is gone")
        yield from weights().items()

    broken: list[bool] = []
    engine = Engine()

    async def before(name: str) -> None:
        if name == "pause":
            broken.append(True)

    engine.before = before
    async with bench(engine, source=sr.TensorSource(pairs)) as b:
        with pytest.raises(sr.WeightSyncError, match="OSError: the adapter is gone") as caught:
            await b.syncer.sync()
        assert (caught.value.phase, caught.value.engine) == ("transfer", None)
        assert b.states == ["stale"]
        engine.before = None
        broken.clear()
        await b.syncer.sync()
        assert b.states == ["ready"]


@pytest.mark.parametrize(
    ("command", "state"), [("describe_weights", "ready"), ("pause", "ready"), ("load_portable", "stale")]
)
async def test_a_sync_that_is_cancelled_leaves_engines_in_a_state_that_is_true(command: str, state: str) -> None:
    async def before(name: str) -> None:
        if name == command:
            reached.set()
            await anyio.sleep_forever()

    engine, reached = Engine(), asyncio.Event()
    engine.before = before
    async with bench(engine) as b:
        syncing = asyncio.ensure_future(b.syncer.sync())
        await reached.wait()
        syncing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await syncing
        assert b.states == [state]
        engine.before = None
        await b.syncer.sync()
        assert b.states == ["ready"]


# ------------------------------------------------------------ names


@pytest.mark.parametrize("kind", ["missing", "unexpected", "duplicates", "mismatched"])
async def test_names_that_do_not_fit_are_listed_once_before_anything_is_sent(kind: str) -> None:
    engines = [Engine("engine-0"), Engine("engine-1")]
    for engine in engines:
        engine.report = {kind: ["model.norm.weight", "lm_head.weight"]}
    async with bench(*engines) as b:
        with pytest.raises(sr.WeightNamesError, match=rf"{kind} \(2\): model.norm.weight, lm_head.weight") as caught:
            await b.syncer.sync()
        assert getattr(caught.value, kind) == ("model.norm.weight", "lm_head.weight")
        assert b.states == ["ready", "ready"]
        assert engines[0].commands == ["describe_weights"]
        for engine in engines:
            engine.report = {}
        await b.syncer.sync()


async def test_names_that_fit_no_more_are_refused_and_engines_go_on_as_they_were() -> None:
    engine, module = Engine(), torch.nn.Linear(3, 3)
    async with bench(engine, source=sr.ModuleSource(module)) as b:
        await b.syncer.sync()
        module.bias = None
        engine.report = {"missing": ["bias"]}
        with pytest.raises(sr.WeightNamesError, match=r"missing \(1\): bias"):
            await b.syncer.sync()
        assert b.states == ["ready"]
        assert engine.arguments("resume")[-1]["version"] == 1
        assert engine.commands.count("begin_portable") == 1
        (group,) = await b.rollout.generate([PROMPT], sampling=SHORT)
        assert group.completions[0].weight_versions == (sr.VersionSpan(1, 0, 4),)


async def test_a_trainer_that_has_a_name_twice_is_told_before_engines_are() -> None:
    engine = Engine()
    pairs = [("a", torch.ones(2)), ("b", torch.ones(2)), ("a", torch.ones(3))]
    async with bench(engine, source=sr.TensorSource(pairs)) as b:
        with pytest.raises(sr.WeightNamesError, match=r"duplicates \(1\): a"):
            await b.syncer.sync()
        assert engine.commands == []


async def test_a_source_without_weights_is_refused() -> None:
    engine = Engine()
    async with bench(engine, source=sr.TensorSource({})) as b:
        with pytest.raises(sr.ConfigError, match="source must have at least one weight"):
            await b.syncer.sync()
        assert engine.commands == []


async def test_fast_that_was_asked_for_is_refused_where_it_does_not_suit() -> None:
    async with bench(method="fast") as b:
        with pytest.raises(sr.WeightSyncError, match='method="fast" does not suit this model: a scripted engine') as e:
            await b.syncer.sync()
        assert e.value.phase == "plan"
        assert b.states == ["ready"]


# ------------------------------------------------------------ options and life


@pytest.mark.parametrize(
    "options",
    [
        {"method": "quick"},
        {"bucket_bytes": 1023},
        {"bucket_bytes": 1e9},
        {"bucket_bytes": True},
        {"num_slots": 1},
        {"num_slots": 2.0},
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": "60"},
        {"max_retries": -1},
        {"max_retries": 1.0},
        {"max_retries": True},
        {"allow_missing": "model.*"},
        {"source": {"a": torch.ones(1)}},
        {"source": torch.nn.Linear(1, 1)},
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_by_its_name(options: dict[str, Any]) -> None:
    (field,) = options
    given = {"source": sr.TensorSource({}), **options}
    with pytest.raises(sr.ConfigError, match=f"^{field} must be") as caught:
        sr.WeightSyncer(None, **given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"mode": "pause"}, "mode"),
        ({"mode": None}, "mode"),
        ({"version": 1.5}, "version"),
        ({"version": True}, "version"),
    ],
)
async def test_a_wrong_argument_of_a_sync_is_refused_and_nothing_is_done(arguments: dict[str, Any], field: str) -> None:
    engine = Engine()
    async with bench(engine) as b:
        with pytest.raises(sr.ConfigError, match=f"^{field} must be"):
            await b.syncer.sync(**arguments)
        assert engine.commands == []


async def test_a_closed_syncer_syncs_no_more_and_closes_twice() -> None:
    engine = Engine()
    async with bench(engine) as b:
        await b.syncer.sync()
        await b.syncer.close()
        await b.syncer.close()
        with pytest.raises(sr.LifecycleError, match="this weight syncer is closed"):
            await b.syncer.sync()
        assert b.states == ["ready"]
        async with sr.WeightSyncer(b.rollout, sr.TensorSource(weights())) as another:
            assert (await another.sync()).version == 2


async def test_a_rollout_that_is_not_up_cannot_be_synced() -> None:
    rollout = sr.AsyncRolloutEngine(config=CONFIG, engines=[Engine()])
    async with sr.WeightSyncer(rollout, sr.TensorSource(weights())) as syncer:
        with pytest.raises(sr.LifecycleError, match="not started"):
            await syncer.sync()
        async with rollout:
            await syncer.sync()
        with pytest.raises(sr.LifecycleError, match="closed"):
            await syncer.sync()


async def test_a_single_rank_without_a_rollout_is_refused() -> None:
    async with sr.WeightSyncer(None, sr.TensorSource(weights())) as syncer:
        with pytest.raises(sr.ConfigError, match="rollout must be given"):
            await syncer.sync()


# ------------------------------------------------------------ sleeping engines


async def test_sleeping_engines_are_woken_in_stages_around_the_transfer() -> None:
    engine = Engine()
    async with bench(engine) as b:
        await b.rollout.sleep()
        begin = len(engine.calls)
        report = await b.syncer.sync()
        assert [name for name, _ in engine.calls[begin:]] == [
            "describe_weights",
            "pause",
            "memory",
            "wake",
            *TRANSFER,
            "memory",
            "wake",
            "resume",
        ]
        assert [arguments["tags"] for arguments in engine.arguments("wake")] == [
            ["weights"],
            ["cuda_graph", "kv_cache"],
        ]
        assert report.wake_s > 0
        assert b.states == ["ready"]
        await b.rollout.generate([PROMPT], sampling=SHORT)


@pytest.mark.parametrize(
    ("asleep", "woken"),
    [
        (["kv_cache"], [["kv_cache"]]),
        (["weights"], [["weights"]]),
        (["weights", "kv_cache"], [["weights"], ["kv_cache"]]),
    ],
)
async def test_a_sync_wakes_all_that_is_asleep(asleep: list[str], woken: list[list[str]]) -> None:
    engine = Engine()
    async with bench(engine) as b:
        await b.syncer.sync()
        await b.rollout.sleep(asleep)
        await b.syncer.sync()
        assert [arguments["tags"] for arguments in engine.arguments("wake")] == woken
        assert b.states == ["ready"]


async def test_engines_do_not_wake_onto_a_device_that_is_too_full_and_say_what_they_need() -> None:
    class Full(Engine):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            answer = await super().command(name, timeout_s, **arguments)
            self.free += (1 << 30) if name == "sleep" else 0
            return answer

    engine = Full()
    engine.free = 0
    async with bench(engine) as b:
        await b.rollout.sleep()
        engine.free = 0
        with pytest.raises(sr.DeviceMemoryError, match=r"engine-0 needs 3\.22 GB to wake") as caught:
            await b.syncer.sync()
        assert caught.value.needed_bytes == dict.fromkeys(["weights", "kv_cache", "cuda_graph"], 1 << 30)
        assert b.states == ["asleep"]
        assert "wake" not in engine.commands
        engine.free = 4 << 30
        await b.syncer.sync()
        assert b.states == ["ready"]


async def test_a_sync_heals_engines_that_were_woken_by_hand() -> None:
    engine = Engine()
    async with bench(engine) as b:
        await b.rollout.sleep()
        await b.rollout.wake()
        assert b.states == ["stale"]
        await b.syncer.sync()
        assert b.states == ["ready"]


async def test_engines_whose_weights_cannot_wake_stay_asleep_and_can_be_tried_again() -> None:
    engine = Engine()
    async with bench(engine) as b:
        await b.rollout.sleep()
        engine.fail_command = failing("wake")
        with pytest.raises(sr.WeightSyncError, match="engine-0: wake failed") as caught:
            await b.syncer.sync()
        assert caught.value.phase == "wake"
        assert b.states == ["asleep"]
        assert "begin_portable" not in engine.commands
        engine.fail_command = None
        await b.syncer.sync()
        assert b.states == ["ready"]


async def test_a_cache_that_cannot_wake_after_the_transfer_leaves_the_engine_asleep_and_stale() -> None:
    engine = Engine()
    async with bench(engine) as b:
        await b.rollout.sleep()
        engine.fail_command = lambda name: "no" if name == "wake" and "end_portable" in engine.commands else None
        with pytest.raises(sr.WeightSyncError) as caught:
            await b.syncer.sync()
        assert caught.value.phase == "wake"
        assert b.states == ["asleep"]
        engine.fail_command = None
        await b.rollout.wake()
        assert b.states == ["stale"]
        await b.syncer.sync()
        assert b.states == ["ready"]


async def test_engines_that_keep_their_weights_are_synced_like_any_others() -> None:
    class Keeping(Engine):
        def _describe(self) -> EngineInfo:
            return msgspec.structs.replace(super()._describe(), keeps_weights=True)

    async with bench(Keeping()) as b:
        await b.rollout.sleep()
        await b.rollout.wake()
        assert b.states == ["ready"]
        await b.syncer.sync()
        assert b.states == ["ready"]


# ------------------------------------------------------------ verification


async def test_engines_without_comparable_weights_are_verified_by_their_answers() -> None:
    engines = [Engine("engine-0"), Engine("engine-1")]
    async with bench(*engines) as b:
        await b.syncer.sync()
        pool = await b.rollout._ready_pool()
        num_changes = pool.num_changes
        report = await b.syncer.verify()
        assert pool.num_changes == num_changes
        assert (report.version, report.num_engines, report.num_weights, report.num_bytes) == (1, 2, 0, 0)
        assert len(report.canary_tokens) == len(report.canary_logprobs) == 16
        assert engines[0].submitted[0].sampling["temperature"] == 0.0
        assert [len(engine.submitted) for engine in engines] == [1, 1]
        assert "version 1" in str(report)


async def test_an_engine_that_answers_differently_is_named() -> None:
    def other(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
        tokens, logprobs = counting(prompt_ids, sampling, index)
        return tokens, [*logprobs[:5], logprobs[5] - 0.2, *logprobs[6:]]

    async with bench(Engine("engine-0", script=counting), Engine("engine-1", script=other)) as b:
        await b.syncer.sync()
        with pytest.raises(
            sr.WeightSyncError, match=r"engine-1 gives token 5 .* 0\.2000 away from that of engine-0"
        ) as e:
            await b.syncer.verify()
        assert (e.value.phase, e.value.engine) == ("verify", "engine-1")
        await b.syncer.verify(tolerance=0.3)


async def test_an_engine_whose_logprobs_are_not_numbers_is_named() -> None:
    def broken(prompt_ids: Sequence[int], sampling: Any, index: int) -> tuple[list[int], list[float]]:
        return list(range(16)), [float("nan")] * 16

    async with bench(Engine(script=broken)) as b:
        await b.syncer.sync()
        with pytest.raises(sr.WeightSyncError, match="the canary's logprobs are not finite") as caught:
            await b.syncer.verify()
        assert (caught.value.phase, caught.value.engine) == ("verify", "engine-0")


async def test_there_is_nothing_to_verify_before_a_sync_or_after_one_that_failed() -> None:
    engine = Engine()
    async with bench(engine) as b:
        with pytest.raises(sr.LifecycleError, match="nothing to verify: sync first"):
            await b.syncer.verify()
        await b.syncer.sync()
        engine.fail_command = failing("load_portable")
        with pytest.raises(sr.WeightSyncError):
            await b.syncer.sync()
        with pytest.raises(sr.LifecycleError, match="nothing to verify"):
            await b.syncer.verify()


async def test_a_function_of_tensors_is_called_once_to_plan_and_once_for_each_sync() -> None:
    calls = []

    def tensors() -> Any:
        calls.append(1)
        return weights().items()

    async with bench(source=sr.TensorSource(tensors)) as it:
        await it.syncer.sync()
        assert len(calls) == 2
        await it.syncer.sync()
        assert len(calls) == 3


async def test_tensors_of_all_dtypes_and_odd_sizes_travel_the_portable_way() -> None:
    import torch

    odd = {
        "a": torch.ones(7).bfloat16(),
        "b": torch.ones(3),
        "c": torch.ones(5, dtype=torch.uint8),
        "d": torch.ones(()),
    }
    async with bench(source=sr.TensorSource(odd)) as it:
        assert (await it.syncer.sync()).num_tensors == 4


async def test_engines_that_sleep_cannot_be_verified() -> None:
    async with bench(ScriptedEngine(memory_saver=True)) as it:
        await it.syncer.sync()
        await it.rollout.sleep()
        with pytest.raises(sr.LifecycleError, match="asleep"):
            await it.syncer.verify()


async def test_an_engine_that_cannot_pause_does_not_take_the_others_along() -> None:
    broken, well = Engine("engine-0"), Engine("engine-1")
    async with bench(broken, well) as it:
        await it.syncer.sync()
        task = asyncio.ensure_future(it.rollout.generate([PROMPT, [9, 9]], sampling=LONG, on_error="return"))
        await until(lambda: well.num_tokens > 10 and broken.num_tokens > 10)
        broken.fail_command, broken.token_s = failing("pause", "resume"), 0.5
        with pytest.raises(sr.WeightSyncError, match="engine-0"):
            await it.syncer.sync()
        assert it.states == ["stale", "ready"]
        groups = await task
        assert [(group.completions[0].finish_reason, group.completions[0].engine) for group in groups] == [
            ("length", "engine-1")
        ] * 2
        broken.fail_command = None
        await it.syncer.sync()
        assert it.states == ["ready", "ready"]


async def test_a_version_that_a_failed_sync_began_with_is_not_given_to_other_weights() -> None:
    engine = Engine(fail_command=failing("resume"))
    async with bench(engine) as it:
        with pytest.raises(sr.WeightSyncError):
            await it.syncer.sync()
        assert it.rollout.weight_version == 0
        engine.fail_command = None
        assert (await it.syncer.sync()).version == 2 == it.rollout.weight_version


async def test_garbage_that_a_sync_would_leave_is_refused() -> None:
    class Partial(ScriptedEngine):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            answer = await super().command(name, timeout_s, **arguments)
            if name == "describe_weights":
                answer["reports"][0]["unwritten"] = ["head.weight"]
            return answer

    async with bench(Partial(memory_saver=True), allow_missing=["head.*"]) as it:
        await it.syncer.sync()
        await it.rollout.sleep(["kv_cache"])
        await it.syncer.sync()
        await it.rollout.sleep(["weights"])
        with pytest.raises(sr.WeightNamesError, match=r"head\.weight"):
            await it.syncer.sync()
        assert it.states == ["stale"]
