"""Sleep and wake with scripted engines: what is given back and taken again, and who is refused meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglrollout as sr
from sglrollout.pool.sleep import TAGS
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.messages import EngineInfo

pytestmark = pytest.mark.timeout(30)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)
PROMPT = [1, 2, 3]
SHORT = sr.Sampling(max_new_tokens=4, ignore_eos=True)
LONG = sr.Sampling(max_new_tokens=3000, ignore_eos=True)
GB = 1 << 30
SIZES = {"kv_cache": 4 * GB, "weights": 2 * GB, "cuda_graph": GB}
TOTAL = 10 * GB


class Sleeper(ScriptedEngine):
    """An engine on a device: it keeps the books of its memory."""

    def __init__(self, name: str = "engine-0", *, keeps_weights: bool = False, **options: Any) -> None:
        super().__init__(name, memory_saver=True, **options)
        self.keeps_weights = keeps_weights
        self.free, self.reserved = TOTAL - sum(SIZES.values()), 8 * GB
        self.asleep: list[str] = []
        self.orders: list[tuple[str, list[str]]] = []

    def _describe(self) -> EngineInfo:
        return msgspec.structs.replace(super()._describe(), keeps_weights=self.keeps_weights)

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        answer = await super().command(name, timeout_s, **arguments)
        if name == "memory":
            return {"ranks": [{"free": self.free, "total": TOTAL, "reserved": self.reserved}]}
        if name in ("sleep", "wake"):
            tags = list(arguments["tags"])
            self.orders.append((name, tags))
            size = sum(SIZES[tag] for tag in tags)
            if name == "sleep":
                assert not set(tags) & set(self.asleep), "asleep already"
                self.asleep += tags
                self.free, self.reserved = self.free + size, self.reserved - size
            else:
                assert set(tags) <= set(self.asleep), "awake already"
                self.asleep = [tag for tag in self.asleep if tag not in tags]
                self.free, self.reserved = self.free - size, self.reserved + size
        return answer


def rollout_of(*engines: ScriptedEngine, **options: Any) -> sr.AsyncRolloutEngine:
    return sr.AsyncRolloutEngine(config=CONFIG.replace(**options), engines=engines or (Sleeper(),))


def states(rollout: sr.AsyncRolloutEngine) -> list[str]:
    return [engine.state for engine in rollout.engines]


async def until(condition: Any) -> None:
    with anyio.fail_after(5):
        while not condition():
            await asyncio.sleep(0)


# ------------------------------------------------------------ what is given back


async def test_an_asleep_engine_has_given_all_back_and_says_how_much() -> None:
    engine = Sleeper()
    async with rollout_of(engine) as rollout:
        report = await rollout.sleep()
        assert states(rollout) == ["asleep"]
        assert report.freed_bytes == {"engine-0": SIZES}
        assert report.used_bytes == {"engine-0": TOTAL - engine.free}
        assert report.residual_bytes == {"engine-0": GB}
        assert report.seconds >= 0
        assert "engine-0: gave back kv_cache 4.29, weights 2.15, cuda_graph 1.07 GB" in str(report)


@pytest.mark.parametrize("tags", list(itertools.permutations(TAGS)))
async def test_memory_is_given_up_in_one_order_whatever_was_asked_for_first(tags: tuple[str, ...]) -> None:
    engine = Sleeper()
    async with rollout_of(engine) as rollout:
        await rollout.sleep(tags)
        assert engine.orders == [("sleep", ["kv_cache"]), ("sleep", ["weights"]), ("sleep", ["cuda_graph"])]
        assert engine.commands == ["memory", *["sleep", "memory"] * 3, "memory"]


async def test_a_part_may_sleep_and_more_of_it_later() -> None:
    engine = Sleeper()
    async with rollout_of(engine) as rollout:
        report = await rollout.sleep(["kv_cache"])
        assert report.freed_bytes == {"engine-0": {"kv_cache": 4 * GB}}
        report = await rollout.sleep(["weights"])
        assert report.freed_bytes == {"engine-0": {"weights": 2 * GB}}
        assert engine.asleep == ["kv_cache", "weights"]
        await rollout.wake()
        assert engine.orders[-1] == ("wake", ["kv_cache", "weights"])
        assert engine.free == TOTAL - sum(SIZES.values())


async def test_every_engine_sleeps_and_is_in_the_report() -> None:
    engines = [Sleeper(f"engine-{i}") for i in range(3)]
    async with rollout_of(*engines) as rollout:
        report = await rollout.sleep(["kv_cache"])
        assert list(report.freed_bytes) == list(report.used_bytes) == ["engine-0", "engine-1", "engine-2"]
        assert states(rollout) == ["asleep"] * 3
        await rollout.wake()
        assert states(rollout) == ["ready"] * 3


async def test_the_fullest_device_of_an_engine_counts() -> None:
    class Wide(Sleeper):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            answer = await super().command(name, timeout_s, **arguments)
            if name == "memory":
                (rank,) = answer["ranks"]
                return {"ranks": [rank, {**rank, "free": rank["free"] - GB, "reserved": rank["reserved"] + GB}]}
            return answer

    engine = Wide()
    async with rollout_of(engine) as rollout:
        report = await rollout.sleep()
        assert report.used_bytes == {"engine-0": TOTAL - engine.free + GB}
        assert report.residual_bytes == {"engine-0": 2 * GB}
        assert report.freed_bytes == {"engine-0": SIZES}


async def test_an_engine_that_knows_nothing_of_its_memory_sleeps_all_the_same() -> None:
    class Blind(Sleeper):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            answer = await super().command(name, timeout_s, **arguments)
            return {"ranks": [{}]} if name == "memory" else answer

    async with rollout_of(Blind()) as rollout:
        report = await rollout.sleep()
        assert report.freed_bytes == {"engine-0": dict.fromkeys(TAGS, 0)}
        assert report.used_bytes == report.residual_bytes == {"engine-0": 0}
        await rollout.wake()


# ------------------------------------------------------------ generation


async def test_generation_is_refused_while_engines_are_asleep_and_says_what_to_do() -> None:
    async with rollout_of() as rollout:
        await rollout.sleep(["kv_cache", "cuda_graph"])
        message = r"the engines are asleep \(cuda_graph, kv_cache\): call wake\(\) first"
        with pytest.raises(sr.LifecycleError, match=message):
            await rollout.generate([PROMPT], sampling=SHORT)
        with pytest.raises(sr.LifecycleError, match=message):
            async for _ in rollout.stream(PROMPT, SHORT):
                pass
        await rollout.wake()
        (group,) = await rollout.generate([PROMPT], sampling=SHORT)
        assert group.completions[0].finish_reason == "length"


async def test_a_kv_cache_that_comes_back_leaves_the_engine_ready() -> None:
    async with rollout_of() as rollout:
        await rollout.sleep(["kv_cache"])
        await rollout.wake(["kv_cache"])
        assert states(rollout) == ["ready"]


async def test_weights_come_back_as_garbage_and_engines_wait_for_a_sync() -> None:
    async with rollout_of() as rollout:
        await rollout.sleep(["weights", "kv_cache"])
        await rollout.wake(["weights"])
        assert states(rollout) == ["asleep"]
        await rollout.wake()
        assert states(rollout) == ["stale"]
        with pytest.raises(sr.StaleWeightsError, match="its weights were given up in a sleep; sync first"):
            await rollout.generate([PROMPT], sampling=SHORT)


async def test_an_engine_that_keeps_a_copy_of_its_weights_is_ready_at_once() -> None:
    async with rollout_of(Sleeper(keeps_weights=True)) as rollout:
        await rollout.sleep()
        await rollout.wake()
        assert states(rollout) == ["ready"]
        await rollout.generate([PROMPT], sampling=SHORT)


async def test_what_runs_may_end_before_engines_sleep() -> None:
    engine = Sleeper(token_s=0.001)
    async with rollout_of(engine) as rollout:
        running = asyncio.ensure_future(rollout.generate([PROMPT], sampling=sr.Sampling(max_new_tokens=20)))
        await until(lambda: engine.num_running)
        await rollout.sleep(drain_s=5)
        (group,) = await running
        assert group.completions[0].finish_reason in ("length", "stop")
        assert engine.aborted == []


async def test_what_still_runs_after_the_drain_is_aborted_and_told_why() -> None:
    engine = Sleeper(hang=True)
    async with rollout_of(engine) as rollout:
        running = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG))
        await until(lambda: engine.submitted)
        with anyio.fail_after(2):
            await rollout.sleep(drain_s=0.02)
        with pytest.raises(sr.LifecycleError, match=r"aborted by sleep\(\), which waited drain_s=0\.02 s for it"):
            await running
        assert len(engine.aborted) == 1
        assert [status.num_inflight for status in rollout.engines] == [0]
        engine.hang = False
        await rollout.wake(["kv_cache", "cuda_graph"])


async def test_who_asks_while_engines_drain_waits_and_is_refused_once_they_sleep() -> None:
    engine = Sleeper(hang=True)
    async with rollout_of(engine) as rollout:
        running = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG, on_error="return"))
        await until(lambda: engine.submitted)
        sleeping = asyncio.ensure_future(rollout.sleep(["kv_cache"], drain_s=0.1))
        await until(lambda: states(rollout) == ["held"])
        late = asyncio.ensure_future(rollout.generate([PROMPT], sampling=SHORT))
        await until(lambda: rollout.num_queued)
        assert not late.done()
        await sleeping
        with pytest.raises(sr.LifecycleError, match="asleep"):
            await late
        assert len(engine.submitted) == 1
        await running


async def test_an_awake_engine_serves_while_another_sleeps() -> None:
    sleeper = Sleeper("engine-0")
    async with rollout_of(sleeper, Sleeper("engine-1")) as rollout:
        await rollout.sleep(["kv_cache"])
        sleeper.die()
        await rollout.wake()
        assert states(rollout) == ["dead", "ready"]
        (group,) = await rollout.generate([PROMPT], sampling=SHORT)
        assert group.completions[0].engine == "engine-1"


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize("tags", [["weight"], ["kv_cache", "all"], "weights", [""]])
async def test_an_unknown_tag_is_refused_by_both(tags: Any) -> None:
    engine = Sleeper()
    async with rollout_of(engine) as rollout:
        with pytest.raises(sr.ConfigError, match="tags must be a list of kv_cache, weights, cuda_graph"):
            await rollout.sleep(tags)
        assert engine.orders == []
        await rollout.sleep(["kv_cache"])
        with pytest.raises(sr.ConfigError, match="tags must be a list"):
            await rollout.wake(tags)
        assert engine.asleep == ["kv_cache"]


@pytest.mark.parametrize("timeout_s", [0, -1, "5", None, True])
async def test_a_timeout_is_a_number_of_seconds(timeout_s: Any) -> None:
    async with rollout_of() as rollout:
        with pytest.raises(sr.ConfigError, match="timeout_s"):
            await rollout.sleep(timeout_s=timeout_s)
        with pytest.raises(sr.ConfigError, match="timeout_s"):
            await rollout.wake(timeout_s=timeout_s)


async def test_engines_without_a_memory_saver_cannot_sleep_and_none_of_them_does() -> None:
    engines = [Sleeper("engine-0"), ScriptedEngine("engine-1")]
    async with rollout_of(*engines) as rollout:
        with pytest.raises(sr.LifecycleError, match=r"engine-1 cannot sleep: .*memory_saver=True"):
            await rollout.sleep()
        assert [engine.commands for engine in engines] == [[], []]
        assert states(rollout) == ["ready", "ready"]


async def test_what_is_asleep_cannot_sleep_again_and_what_is_awake_not_wake() -> None:
    engine = Sleeper()
    async with rollout_of(engine) as rollout:
        with pytest.raises(sr.LifecycleError, match="nothing is asleep"):
            await rollout.wake()
        with pytest.raises(sr.LifecycleError, match="weights is not asleep"):
            await rollout.wake(["weights"])
        await rollout.sleep(["kv_cache"])
        orders = list(engine.orders)
        with pytest.raises(sr.LifecycleError, match="engine-0's kv_cache is asleep already"):
            await rollout.sleep()
        with pytest.raises(sr.LifecycleError, match="weights is not asleep"):
            await rollout.wake(["kv_cache", "weights"])
        assert engine.orders == orders
        assert states(rollout) == ["asleep"]


async def test_one_change_of_the_pool_excludes_another() -> None:
    engine = Sleeper(hang=True)
    async with rollout_of(engine) as rollout:
        running = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG, on_error="return"))
        await until(lambda: engine.submitted)
        sleeping = asyncio.ensure_future(rollout.sleep(["kv_cache"], drain_s=0.1))
        await until(lambda: states(rollout) == ["held"])
        with pytest.raises(sr.LifecycleError, match="sleep cannot begin: sleep is under way on this rollout"):
            await rollout.sleep(["weights"])
        with pytest.raises(sr.LifecycleError, match="flush_cache cannot begin: sleep is under way"):
            await rollout.flush_cache()
        async with sr.WeightSyncer(rollout, sr.TensorSource({})) as syncer:
            with pytest.raises(sr.LifecycleError, match="a weight sync cannot begin: sleep is under way"):
                await syncer.sync()
        await sleeping
        await running
        await rollout.wake()


async def test_a_closed_rollout_neither_sleeps_nor_wakes() -> None:
    rollout = rollout_of()
    async with rollout:
        pass
    with pytest.raises(sr.LifecycleError, match="closed"):
        await rollout.sleep()
    with pytest.raises(sr.LifecycleError, match="closed"):
        await rollout.wake()


# ------------------------------------------------------------ too little memory


async def test_engines_do_not_wake_onto_a_device_that_is_too_full_and_say_what_they_need() -> None:
    engine = Sleeper()
    async with rollout_of(engine) as rollout:
        await rollout.sleep()
        engine.free = 3 * GB
        with pytest.raises(sr.DeviceMemoryError) as caught:
            await rollout.wake()
        assert caught.value.engine == "engine-0"
        assert caught.value.needed_bytes == SIZES
        assert caught.value.free_bytes == 3 * GB
        for part in ("7.52 GB to wake", "kv_cache 4.29 GB", "weights 2.15 GB", "3.22 GB of 10.74 GB are free"):
            assert part in str(caught.value)
        assert engine.orders[-1][0] == "sleep"
        assert states(rollout) == ["asleep"]

        await rollout.wake(["weights"])  # fewer tags fit
        assert engine.asleep == ["kv_cache", "cuda_graph"]
        engine.free = TOTAL
        await rollout.wake()
        assert engine.asleep == []


async def test_none_wakes_when_one_cannot() -> None:
    engines = [Sleeper("engine-0"), Sleeper("engine-1")]
    async with rollout_of(*engines) as rollout:
        await rollout.sleep(["kv_cache"])
        engines[1].free = GB
        with pytest.raises(sr.DeviceMemoryError, match=r"engine-1 needs 4\.29 GB to wake"):
            await rollout.wake()
        assert [engine.asleep for engine in engines] == [["kv_cache"], ["kv_cache"]]


async def test_a_device_with_just_enough_memory_is_left_a_margin() -> None:
    engine = Sleeper()
    async with rollout_of(engine) as rollout:
        await rollout.sleep(["cuda_graph"])
        engine.free = GB + (64 << 20) - 1
        with pytest.raises(sr.DeviceMemoryError):
            await rollout.wake()
        engine.free += 1
        await rollout.wake()


# ------------------------------------------------------------ engines that fail


async def test_a_sleep_that_fails_half_way_leaves_the_engine_asleep_with_what_it_gave_up() -> None:
    engine = Sleeper()
    engine.fail_command = lambda name: "no" if name == "sleep" and engine.asleep else None
    async with rollout_of(engine) as rollout:
        with pytest.raises(sr.EngineRequestError, match="engine-0: sleep failed: no"):
            await rollout.sleep()
        assert engine.asleep == ["kv_cache"]
        assert states(rollout) == ["asleep"]
        engine.fail_command = None
        await rollout.wake()
        assert states(rollout) == ["ready"]
        await rollout.sleep()
        assert engine.asleep == list(TAGS)


async def test_a_sleep_that_fails_at_once_leaves_the_engine_ready() -> None:
    engine = Sleeper(fail_command=lambda name: "no" if name == "sleep" else None)
    async with rollout_of(engine) as rollout:
        with pytest.raises(sr.EngineRequestError):
            await rollout.sleep()
        assert states(rollout) == ["ready"]
        await rollout.generate([PROMPT], sampling=SHORT)


async def test_a_wake_that_fails_can_be_tried_again() -> None:
    engine = Sleeper()
    async with rollout_of(engine) as rollout:
        await rollout.sleep(["kv_cache"])
        engine.fail_command = lambda name: "no" if name == "wake" else None
        with pytest.raises(sr.EngineRequestError, match="wake failed: no"):
            await rollout.wake()
        assert states(rollout) == ["asleep"]
        engine.fail_command = None
        await rollout.wake()
        assert states(rollout) == ["ready"]


async def test_dead_engines_are_passed_over() -> None:
    engines = [Sleeper("engine-0"), Sleeper("engine-1")]
    async with rollout_of(*engines) as rollout:
        engines[0].die()
        report = await rollout.sleep(["kv_cache"])
        assert list(report.freed_bytes) == ["engine-1"]
        await rollout.wake()
        assert states(rollout) == ["dead", "ready"]
        assert engines[0].commands == []


async def test_an_engine_that_dies_while_it_drains_fails_the_call_and_leaves_none_held() -> None:
    engines = [Sleeper("engine-0", hang=True), Sleeper("engine-1")]
    async with rollout_of(*engines) as rollout:
        running = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG, on_error="return"))
        await until(lambda: engines[0].submitted or engines[1].submitted)
        engines[1].hang = True
        sleeping = asyncio.ensure_future(rollout.sleep(["kv_cache"], drain_s=0.1))
        await until(lambda: "held" in states(rollout))
        engines[0].die()
        with pytest.raises(sr.EngineDiedError):
            await sleeping
        await running
        assert states(rollout)[0] == "dead"
        assert states(rollout)[1] in ("ready", "asleep")


# ------------------------------------------------------------ any order

TAG_LISTS = st.lists(st.sampled_from(TAGS), min_size=1, max_size=3, unique=True)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.booleans(), TAG_LISTS), max_size=8), st.booleans())
def test_states_tell_the_truth_after_any_calls(calls: list[tuple[bool, list[str]]], keeps_weights: bool) -> None:
    async def run() -> None:
        engine = Sleeper(keeps_weights=keeps_weights)
        asleep: set[str] = set()
        stale = False
        async with rollout_of(engine) as rollout:
            for sleeps, tags in calls:
                allowed = not asleep & set(tags) if sleeps else set(tags) <= asleep
                try:
                    await (rollout.sleep(tags) if sleeps else rollout.wake(tags))
                except sr.LifecycleError:
                    assert not allowed
                else:
                    assert allowed
                    asleep = asleep | set(tags) if sleeps else asleep - set(tags)
                    stale = stale or (not sleeps and "weights" in tags and not keeps_weights)
                assert set(engine.asleep) == asleep
                assert states(rollout) == ["asleep" if asleep else "stale" if stale else "ready"]
                assert engine.free == TOTAL - sum(size for tag, size in SIZES.items() if tag not in asleep)

    asyncio.run(run())


async def test_an_engine_that_fails_to_sleep_or_wake_says_nothing_about_the_others() -> None:
    class Slow(Sleeper):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            answer = await super().command(name, timeout_s, **arguments)
            if name in ("sleep", "wake"):
                await anyio.sleep(0.05)
            return answer

    broken, slow = Sleeper("engine-0"), Slow("engine-1")
    async with rollout_of(broken, slow) as rollout:
        broken.fail_command = lambda name: "no" if name == "sleep" else None
        with pytest.raises(sr.EngineRequestError, match="engine-0"):
            await rollout.sleep()
        assert states(rollout) == ["ready", "asleep"]
        assert slow.asleep == list(TAGS)
        broken.fail_command = None
        await rollout.wake()
        await rollout.sleep(["kv_cache"])
        broken.fail_command = lambda name: "no" if name == "wake" else None
        with pytest.raises(sr.EngineRequestError, match="engine-0"):
            await rollout.wake()
        assert (states(rollout)[0], slow.asleep) == ("asleep", [])


async def test_sleeping_without_tags_or_with_a_senseless_drain_is_refused() -> None:
    async with rollout_of() as rollout:
        with pytest.raises(sr.ConfigError, match="tags"):
            await rollout.sleep([])
        with pytest.raises(sr.ConfigError, match="drain_s"):
            await rollout.sleep(drain_s=-1)


async def test_a_sleep_or_wake_that_is_cancelled_leaves_the_truth_behind() -> None:
    class Slow(Sleeper):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            answer = await super().command(name, timeout_s, **arguments)
            await anyio.sleep(0.02)
            return answer

    engine = Slow()
    async with rollout_of(engine) as rollout:
        for delay_s in (0.0, 0.01, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2):
            with anyio.move_on_after(delay_s):
                await rollout.sleep()
            assert states(rollout) == ["asleep" if engine.asleep else "ready"]
            while engine.asleep:
                with anyio.move_on_after(delay_s):
                    await rollout.wake()
                if engine.asleep:
                    assert states(rollout) == ["asleep"]
                    await rollout.wake()
            for member in (await rollout._ready_pool()).members:
                member.stale, member.garbage, member.paused = "", False, False
            engine._paused = False
            (await rollout._ready_pool()).changed()
