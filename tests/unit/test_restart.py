"""Engines that die and come back: when, how often, for whom work waits meanwhile, and with which weights."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglrollout as sr
from sglrollout.pool import catch_up
from sglrollout.pool.pool import EngineState, Member, Pool
from sglrollout.pool.sleep import sleep, wake
from sglrollout.pool.supervisor import Restarts
from sglrollout.testing import ScriptedEngine, SimulatedEngine, run_virtually
from sglrollout.testing._engine import FakeEngine
from sglrollout.weights.leader import Leader
from sglrollout.wire.messages import EngineInfo

pytestmark = pytest.mark.timeout(60)

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
SHORT = sr.Sampling(max_new_tokens=4, ignore_eos=True)
LONG = sr.Sampling(max_new_tokens=3000, ignore_eos=True)
PROMPT = [1, 2, 3]
READY, STALE, RESTARTING, DEAD = EngineState.READY, EngineState.STALE, EngineState.RESTARTING, EngineState.DEAD
ASLEEP = EngineState.ASLEEP

Test: TypeAlias = Callable[..., Awaitable[None]]


def virtual(test: Test) -> Callable[..., None]:
    """Run a test on a virtual clock, and let it leave no file open."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        before = len(os.listdir("/proc/self/fd"))
        run_virtually(functools.partial(test, **fixtures))
        assert len(os.listdir("/proc/self/fd")) == before

    return run


class Engine(ScriptedEngine):
    """Takes its time to come up and for some commands, and notes when it was started and what became of that."""

    def __init__(self, name: str = "engine-0", *, seconds: dict[str, float] | None = None, **options: Any) -> None:
        super().__init__(name, **{"start_s": 5.0, "memory_saver": True, **options})
        self.seconds = seconds or {}
        self.starts: list[float] = []
        self.num_given_up = 0

    async def start(self) -> EngineInfo:
        self.starts.append(time.monotonic())
        try:
            return await super().start()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        await anyio.sleep(self.seconds.get(name, 0.0))
        return await super().command(name, timeout_s, **arguments)


class Lingering(Engine):
    """Once it has died its processes are there for a while."""

    async def run(self) -> None:
        await super().run()
        await anyio.sleep(20)


def engines(count: int, **options: Any) -> list[Engine]:
    return [Engine(f"engine-{i}", **options) for i in range(count)]


@asynccontextmanager
async def running(
    members: Sequence[FakeEngine[Any]],
    most: int = 3,
    delay_s: float = 1.0,
    keep_snapshot: bool = False,
) -> AsyncIterator[Pool]:
    pool = Pool(members, "auto", 1000, Restarts(most, delay_s, 100.0, keep_snapshot))
    async with anyio.create_task_group() as tasks:
        try:
            await pool.start(tasks)
            yield pool
        finally:
            closed_s = time.monotonic()
            await pool.close()
    assert time.monotonic() - closed_s <= 2.0  # an export is given so long to be dropped
    assert all(member.engine.stage in ("closed", "dead") for member in pool.members)
    assert pool.watchers == []


async def sync(pool: Pool, seconds: float = 0.0, fails_in: str = "", plan_s: float = 0.0) -> None:
    """What a weight syncer does to a pool: it plans and moves weights in so many seconds."""
    leader = Leader(pool, 60.0)
    with pool.exclusive("a weight sync"):
        await leader.muster(waits=True)
        await anyio.sleep(plan_s)
        leader.keys = {member.name: member.name for member in leader.members}
        moving = False
        try:
            await leader.pause("retract", anyio.Event())
            await leader.wake_weights()
            if fails_in == "pause":
                raise sr.WeightSyncError("pause", "it was told to")
            pool.last_version += 1
            moving = True
            await anyio.sleep(seconds)
            await leader.load_portable({member.name: [b""] for member in leader.members})
            if fails_in == "transfer":
                raise sr.WeightSyncError("transfer", "it was told to")
            await leader.wake_rest()
            await leader.resume(pool.last_version, flush=True)
        except sr.WeightSyncError:
            await (leader.spoil("a weight sync failed") if moving else leader.call_off())
            return
        leader.publish(pool.last_version)


def states(pool: Pool) -> list[EngineState]:
    return [member.state for member in pool.members]


async def until(pool: Pool, *expected: EngineState) -> float:
    """Wait for these states, of all members; how long that took."""
    begun = time.monotonic()
    with anyio.fail_after(10_000):
        await pool.until(lambda: states(pool) == list(expected))
    check(pool)
    return time.monotonic() - begun


def check(pool: Pool) -> None:
    """Whoever serves has the current weights, and calls them so."""
    for member in pool.members:
        if member.ready:
            engine: Any = member.engine
            assert engine.weights == engine.weight_version == pool.weight_version


# ------------------------------------------------------------ when, and how often


@virtual
async def test_it_comes_back_after_a_delay_that_doubles_with_each_restart() -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines, most=4) as pool:
        for delay_s in (1, 2, 4, 8):
            died = time.monotonic()
            engine.die()
            assert states(pool) == [RESTARTING]
            await until(pool, READY)
            assert engine.starts[-1] - died == pytest.approx(delay_s)
            assert time.monotonic() - died == pytest.approx(delay_s + 5)
        engine.die("the fifth time")
        assert states(pool) == [DEAD]
        assert pool.members[0].num_restarts == 4
        assert engine.num_starts == 5
        with pytest.raises(sr.NoEngineError, match="every engine of the pool is dead; the last: engine-0: the fifth"):
            await pool.dispatcher.acquire()


@virtual
async def test_the_delay_grows_up_to_a_minute() -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines, most=12, delay_s=10.0) as pool:
        delays = []
        for _ in range(5):
            died = time.monotonic()
            engine.die()
            await until(pool, READY)
            delays.append(engine.starts[-1] - died)
        assert delays == pytest.approx([10, 20, 40, 60, 60])


@virtual
async def test_restarts_of_more_than_an_hour_ago_are_forgiven() -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines, most=2) as pool:
        for _ in range(3):
            for delay_s in (1, 2):
                died = time.monotonic()
                engine.die()
                await until(pool, READY)
                assert engine.starts[-1] - died == pytest.approx(delay_s)
            await anyio.sleep(3601)
        assert pool.members[0].num_restarts == 6


@virtual
async def test_a_start_that_fails_counts_and_the_end_of_the_budget_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    (engine,) = given_engines = engines(1, fail_restart=lambda number: f"no memory, {number}")
    async with running(given_engines, most=3) as pool:
        engine.die("it crashed")
        waiting = asyncio.ensure_future(pool.dispatcher.acquire())
        await until(pool, DEAD)
        assert engine.starts == pytest.approx([0, 5 + 1, 11 + 2, 18 + 4])
        with pytest.raises(sr.NoEngineError, match="engine-0: no memory, 3") as caught:
            await waiting
        assert isinstance(caught.value.__cause__, sr.EngineStartError)
    said = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert said == [
        "engine-0: it crashed",
        *(f"engine-0: no memory, {number}" for number in (1, 2, 3)),
        "engine-0 stays dead: it was restarted 3 times within an hour (max_restarts)",
    ]
    assert "engine-0 is restarted in 2 s (2 of 3 within an hour)" in caplog.text


@virtual
async def test_a_start_that_fails_once_is_tried_again() -> None:
    (engine,) = given_engines = engines(1, fail_restart=lambda number: "no memory" if number == 1 else None)
    async with running(given_engines) as pool:
        engine.die()
        assert await until(pool, READY) == pytest.approx(1 + 5 + 2 + 5)


@virtual
async def test_a_start_that_raises_anything_is_a_start_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Engine):
        async def start(self) -> EngineInfo:
            info = await super().start()
            if self.num_starts == 2:
                self.die()
                raise ZeroDivisionError("a bug")
            return info

    async with running([Broken()]) as pool:
        engine: Any = pool.members[0].engine
        engine.die()
        await until(pool, READY)
        assert engine.num_starts == 3
    assert "ZeroDivisionError" in caplog.text


@virtual
async def test_without_a_budget_it_is_dead_at_once_and_nothing_is_said_of_budgets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (engine, other) = given_engines = engines(2)
    async with running(given_engines, most=0) as pool:
        engine.die()
        assert states(pool) == [DEAD, READY]
        await anyio.sleep(1000)
        assert (states(pool), engine.num_starts) == ([DEAD, READY], 1)
        other.die()
    assert "max_restarts" not in caplog.text


async def test_an_engine_on_a_thread_is_never_restarted() -> None:
    engine = ScriptedEngine()
    rollout = sr.AsyncRolloutEngine(config=CONFIG.replace(isolation="thread"), engines=[engine])
    async with rollout:
        engine.die()
        assert [status.state for status in rollout.engines] == ["dead"]


@virtual
async def test_one_that_dies_while_others_still_start_comes_back_too() -> None:
    quick, slow = Engine("engine-0", start_s=1.0), Engine("engine-1", start_s=9.0)

    async def kill() -> None:
        await anyio.sleep(2)
        quick.die("too early")

    killer = asyncio.ensure_future(kill())
    async with running([quick, slow]) as pool:
        await killer
        assert states(pool) == [RESTARTING, READY]
        await until(pool, READY, READY)


@virtual
async def test_a_simulated_engine_comes_back_too() -> None:
    engine = SimulatedEngine(start_s=2.0)
    async with running([engine]) as pool, asyncio.timeout(100):
        for _ in range(2):
            engine.die()
            await until(pool, READY)


# ------------------------------------------------------------ what is seen, and who waits


@virtual
async def test_every_transition_is_told_and_the_status_counts_restarts() -> None:
    (engine,) = given_engines = engines(1)
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=given_engines) as rollout:
        pool = await rollout._ready_pool()
        seen = ["ready"]

        def look() -> None:
            state = rollout.engines[0].state
            if state != seen[-1]:
                seen.append(state)

        with pool.watched_by(look):
            for count in range(4):
                assert rollout.engines[0].num_restarts == count
                engine.die()
                await pool.until(lambda: rollout.engines[0].state in ("ready", "dead"))
        assert seen == ["ready", *["restarting", "ready"] * 3, "dead"]


@virtual
async def test_work_waits_for_the_only_engine_and_goes_to_others_where_there_are_some() -> None:
    (engine,) = given_engines = engines(1)
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=given_engines) as rollout:
        engine.die()
        waiting = asyncio.ensure_future(rollout.generate([PROMPT], sampling=SHORT))
        await anyio.sleep(5.9)
        assert not waiting.done()
        (group,) = await waiting
        assert group.completions[0].finish_reason == "length"
        assert time.monotonic() == pytest.approx(5 + 1 + 5)
    first, second = given_engines = engines(2)
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=given_engines) as rollout:
        first.die()
        begun = time.monotonic()
        (group,) = await rollout.generate([PROMPT], sampling=SHORT)
        assert (group.completions[0].engine, time.monotonic()) == ("engine-1", begun)
        await anyio.sleep(1)
        second.die()
        (group,) = await rollout.generate([PROMPT], sampling=SHORT)
        assert group.completions[0].engine == "engine-0"


@virtual
async def test_a_deadline_passes_while_it_waits() -> None:
    (engine,) = given_engines = engines(1)
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=given_engines) as rollout:
        engine.die()
        with pytest.raises(sr.RequestTimeoutError):
            await rollout.generate([PROMPT], sampling=SHORT, timeout_s=3.0)


@virtual
async def test_flushing_has_nothing_to_do_while_all_restart() -> None:
    (engine,) = given_engines = engines(1)
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=given_engines) as rollout:
        engine.die()
        await rollout.flush_cache()
        assert engine.commands == []


# ------------------------------------------------------------ asleep


async def put_to_sleep(pool: Pool, tags: Sequence[str] = ("kv_cache",)) -> None:
    await sleep(pool, tags, 1.0, 60.0)


@virtual
async def test_one_that_dies_asleep_waits_for_the_wake() -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines) as pool:
        await put_to_sleep(pool, ("kv_cache", "cuda_graph"))
        engine.die()
        assert states(pool) == [RESTARTING]
        with pytest.raises(sr.LifecycleError, match=r"asleep \(cuda_graph, kv_cache\): call wake\(\) first"):
            await pool.dispatcher.acquire()
        await anyio.sleep(1000)
        assert engine.num_starts == 1
        await wake(pool, ["cuda_graph"], 60.0)
        await anyio.sleep(1000)
        assert engine.num_starts == 1
        await wake(pool, None, 60.0)
        waiting = asyncio.ensure_future(pool.dispatcher.acquire())
        assert await until(pool, READY) == pytest.approx(5)
        assert (await waiting).target is pool.members[0]
        with pytest.raises(sr.LifecycleError, match="nothing is asleep"):
            await wake(pool, None, 60.0)


@virtual
async def test_one_that_dies_while_another_sleeps_waits_too() -> None:
    given_engines = engines(2)
    async with running(given_engines) as pool:
        await put_to_sleep(pool)
        given_engines[0].die()
        await anyio.sleep(100)
        assert states(pool) == [RESTARTING, ASLEEP]
        await wake(pool, None, 60.0)
        await until(pool, READY, READY)


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("after_s", [0.5, 3.0, 6.5, 9.0], ids=["backoff", "start", "export", "adoption"])
@virtual
async def test_a_sleep_calls_a_restart_off_and_it_begins_again_after_the_wake(after_s: float, most: int) -> None:
    given_engines = engines(2, seconds={"export_weights": 2.0, "adopt_weights": 3.0})
    async with running(given_engines, most) as pool:
        await sync(pool)
        given_engines[0].die()
        await anyio.sleep(after_s)
        assert states(pool) == [RESTARTING, READY]
        begun = time.monotonic()
        await put_to_sleep(pool)
        assert time.monotonic() == begun
        assert given_engines[0].stage in ("dead", "not started")
        num_starts = given_engines[0].num_starts
        await anyio.sleep(100)
        assert states(pool) == [RESTARTING, ASLEEP]
        assert given_engines[0].num_starts == num_starts
        await wake(pool, None, 60.0)
        await until(pool, READY, READY)
        assert pool.members[0].num_restarts == 1
        with pytest.raises(sr.LifecycleError, match="nothing is asleep"):
            await wake(pool, None, 60.0)
        given_engines[0].die()  # what was called off does not count
        assert states(pool) == [DEAD if most == 1 else RESTARTING, READY]


@virtual
async def test_nothing_is_restarted_while_engines_drain_for_a_sleep() -> None:
    first, second = given_engines = engines(2, hang=True)
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=given_engines) as rollout:
        running = asyncio.ensure_future(rollout.generate([PROMPT], sampling=SHORT, on_error="return"))
        await anyio.sleep(1)
        idle, busy = (first, second) if second.submitted else (second, first)
        idle.die()
        await rollout.sleep(["kv_cache"], drain_s=30.0)
        assert time.monotonic() == pytest.approx(5 + 1 + 30)
        assert (idle.num_starts, busy.num_starts) == (1, 1)
        await running


@pytest.mark.parametrize("most", [0, 3])
@virtual
async def test_a_sleep_returns_once_the_memory_of_an_engine_that_has_died_is_free(most: int) -> None:
    pair = [Lingering("engine-0"), Engine("engine-1")]
    async with running(pair, most) as pool:
        for _ in range(2 if most else 1):  # in its first life, and in another one
            pair[0].die()
            await anyio.sleep(5)
            begun = time.monotonic()
            await put_to_sleep(pool)
            assert time.monotonic() - begun == pytest.approx(15)
            await wake(pool, None, 60.0)
            await until(pool, READY if most else DEAD, READY)


@virtual
async def test_a_sleep_that_waits_for_an_engine_to_end_does_not_outlive_the_pool() -> None:
    engine = Lingering()
    async with running([engine]) as pool:
        engine.die()
        sleeping = asyncio.ensure_future(put_to_sleep(pool))
        await anyio.sleep(1)
        assert not sleeping.done()
    with anyio.fail_after(1):
        await sleeping


@virtual
async def test_an_engine_that_is_away_can_be_put_to_sleep() -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines) as pool:
        engine.die()
        await anyio.sleep(3)
        report = await sleep(pool, ["kv_cache"], 1.0, 60.0)
        assert (report.freed_bytes, engine.num_given_up) == ({}, 1)
        with pytest.raises(sr.LifecycleError, match="asleep already"):
            await put_to_sleep(pool)
        await anyio.sleep(100)
        assert engine.num_starts == 2
        await wake(pool, None, 60.0)
        await until(pool, READY)
    (engine,) = given_engines = engines(1, memory_saver=False)
    async with running(given_engines) as pool:
        engine.die()
        with pytest.raises(sr.LifecycleError, match="cannot sleep"):
            await put_to_sleep(pool)
        await until(pool, READY)


@virtual
async def test_a_sync_that_wakes_lets_the_dead_come_back() -> None:
    given_engines = engines(2)
    async with running(given_engines) as pool:
        await put_to_sleep(pool, ("kv_cache", "weights"))
        given_engines[0].die()
        await anyio.sleep(100)
        await sync(pool)
        assert states(pool) == [RESTARTING, READY]
        await until(pool, READY, READY)


@virtual
async def test_a_sync_waits_for_the_only_engine_and_restarts_it_if_it_died_asleep() -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines) as pool:
        await sync(pool)
        await put_to_sleep(pool, ("weights",))
        engine.die()
        await anyio.sleep(100)
        begun = time.monotonic()
        await sync(pool)
        assert time.monotonic() - begun == pytest.approx(5)
        assert (states(pool), engine.weights) == ([READY], 2)
        engine.die()
        await sync(pool)
        assert (states(pool), engine.weights) == ([READY], 3)
        check(pool)


# ------------------------------------------------------------ with which weights


@virtual
async def test_without_a_sync_the_first_weights_are_the_current_ones() -> None:
    given_engines = engines(2, weight_version=7)
    async with running(given_engines) as pool:
        given_engines[0].die()
        await until(pool, READY, READY)
        assert given_engines[0].commands == given_engines[1].commands == []


@virtual
async def test_it_takes_the_weights_of_another_engine_which_serves_meanwhile() -> None:
    first, second = given_engines = engines(2, seconds={"export_weights": 2.0, "adopt_weights": 3.0})
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=given_engines) as rollout:
        pool = await rollout._ready_pool()
        for _ in range(3):
            await sync(pool)
        first.die()
        running = asyncio.ensure_future(rollout.generate([PROMPT], sampling=LONG))
        assert await until(pool, READY, READY) == pytest.approx(1 + 5 + 2 + 3)
        assert second.commands[-2:] == ["export_weights", "drop_export"]
        assert first.commands[-2:] == ["adopt_weights", "resume"]
        assert (first.weights, first.weight_version) == (3, 3)
        (group,) = await running
        assert group.completions[0].engine == "engine-1"
        second.die()
        (group,) = await rollout.generate([PROMPT], sampling=SHORT)
        assert (group.completions[0].engine, group.completions[0].weight_versions[0].version) == ("engine-0", 3)


@virtual
async def test_without_another_engine_it_is_stale_until_the_next_sync() -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines) as pool:
        await sync(pool)
        engine.die()
        waiting = asyncio.ensure_future(pool.dispatcher.acquire())
        await until(pool, STALE)
        with pytest.raises(sr.StaleWeightsError, match=r"restarted with its start-up weights.*; sync first"):
            await waiting
        assert engine.commands[-1] == "resume"
        await sync(pool)
        check(pool)
        assert (states(pool), engine.weights) == ([READY], 2)


@virtual
async def test_engines_that_all_die_at_once_are_all_stale() -> None:
    given_engines = engines(3)
    async with running(given_engines) as pool:
        await sync(pool)
        for engine in given_engines:
            engine.die()
        await until(pool, STALE, STALE, STALE)
        await sync(pool)
        await until(pool, READY, READY, READY)


@virtual
async def test_a_kept_snapshot_is_the_current_weights_of_an_engine_without_others() -> None:
    (engine,) = given_engines = engines(1, seconds={"export_weights": 2.0})
    async with running(given_engines, keep_snapshot=True) as pool:
        await anyio.sleep(100)
        assert engine.commands == []  # its start-up weights are on the disk
        for version in (1, 2):
            await sync(pool)
            await anyio.sleep(3)
            assert engine.commands.count("export_weights") == version
            engine.die()
            await until(pool, READY)
            assert (engine.weights, engine.weight_version) == (version, version)
        await sync(pool)
        engine.die()  # before there is a snapshot
        await until(pool, STALE)
        await sync(pool)
        await anyio.sleep(3)
        engine.die()
        with pytest.raises(sr.EngineDiedError):
            await engine.command("flush_cache")


@virtual
async def test_a_kept_snapshot_spares_the_other_engines() -> None:
    first, second = given_engines = engines(2)
    async with running(given_engines, keep_snapshot=True) as pool:
        await sync(pool)
        await anyio.sleep(1)
        exports = [engine.commands.count("export_weights") for engine in given_engines]
        assert sum(exports) == 1
        first.die()
        await until(pool, READY, READY)
        assert second.commands.count("export_weights") == exports[1]


@virtual
async def test_the_memory_of_snapshots_is_freed_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def ftruncate(fd: int, size: int, truncate: Callable[[int, int], None] = os.ftruncate) -> None:
        threads.append(threading.current_thread())
        truncate(fd, size)

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    async with running(engines(2, seconds=SLOW), keep_snapshot=True) as pool:
        await dead_one_of_two(pool, 6.5)
        await sync(pool)
        await until(pool, READY, READY)
    async with running(engines(2, seconds=SLOW)) as pool:
        await dead_one_of_two(pool, 9.0)
        await put_to_sleep(pool)
    assert len(threads) == 3
    assert threading.main_thread() not in threads


@virtual
async def test_only_the_latest_snapshot_is_kept() -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines, keep_snapshot=True) as pool:
        await sync(pool)
        await anyio.sleep(1)
        num_fds = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            await sync(pool)
            await anyio.sleep(1)
            assert len(os.listdir("/proc/self/fd")) == num_fds
        assert engine.commands.count("export_weights") == 6


@virtual
async def test_a_snapshot_that_cannot_be_made_is_a_warning_and_the_next_one_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines, keep_snapshot=True) as pool:
        engine.fail_command = lambda name: "no memory" if name == "export_weights" else None
        await sync(pool)
        await anyio.sleep(100)
        assert engine.commands.count("export_weights") == 3
        assert "a snapshot of weight version 1 could not be made: engine-0: export_weights failed" in caplog.text
        assert "no snapshot of weight version 1 is kept: 3 tries failed" in caplog.text
        engine.fail_command = None
        await sync(pool)
        await anyio.sleep(1)
        engine.die()
        await until(pool, READY)


@virtual
async def test_a_snapshot_that_is_interrupted_is_made_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    (engine,) = given_engines = engines(1, seconds={"export_weights": 2.0})
    async with running(given_engines, keep_snapshot=True) as pool:
        await sync(pool)
        for _ in range(5):
            await anyio.sleep(1)
            await sync(pool, fails_in="pause")
        assert engine.commands.count("drop_export") == 5
        assert "export_weights" not in engine.commands  # not to its end
        await anyio.sleep(3)
        engine.die()
        await until(pool, READY)
    assert "snapshot" not in caplog.text


@virtual
async def test_a_flush_or_a_verification_interrupts_no_snapshot() -> None:
    (engine,) = given_engines = engines(1, seconds={"export_weights": 2.0})
    config = CONFIG.replace(keep_weights_snapshot=True)
    async with sr.AsyncRolloutEngine(config=config, engines=given_engines) as rollout:
        pool = await rollout._ready_pool()
        await sync(pool)
        for _ in range(4):
            await anyio.sleep(0.3)
            await rollout.flush_cache()
            with pool.exclusive("verify", changes=False):
                await anyio.sleep(0.1)
        await anyio.sleep(1)
        assert engine.commands.count("export_weights") == 1
        engine.die()
        await until(pool, READY)


@virtual
async def test_weights_for_which_the_host_has_no_memory_are_not_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    available = 100 << 20
    monkeypatch.setattr(catch_up, "available_bytes", lambda: available)

    class Large(Engine):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            answer = await super().command(name, timeout_s, **arguments)
            return {"num_bytes": 50 << 20} if name == "weights_size" else answer

    says = "a copy of engine-1's weights takes 0.05 GB of host memory, and 0.10 GB are available"
    async with running([Engine("engine-0"), Large("engine-1")]) as pool:
        first, second = await dead_one_of_two(pool, 0.0)
        await until(pool, STALE, READY)
        assert says in pool.members[0].stale
        assert "export_weights" not in second.commands
        await sync(pool)
        await until(pool, READY, READY)
        available = 200 << 20
        first.die()
        await until(pool, READY, READY)
    available = 100 << 20
    async with running([Large("engine-1")], keep_snapshot=True) as pool:
        await sync(pool)
        await anyio.sleep(1)
        assert f"no snapshot of weight version 1 is kept: {says}" in caplog.text
        available = 200 << 20
        await sync(pool)
        await anyio.sleep(1)
        pool.members[0].engine.die()  # type: ignore[attr-defined]
        await until(pool, READY)


# ------------------------------------------------------------ races


async def dead_one_of_two(pool: Pool, after_s: float) -> list[Engine]:
    """One died so long ago; each of a start, an export and an adoption takes 5, 2 and 3 seconds."""
    await sync(pool)
    pair: list[Any] = [member.engine for member in pool.members]
    pair[0].die()
    await anyio.sleep(after_s)
    return pair


SLOW = {"export_weights": 2.0, "adopt_weights": 3.0}


@pytest.mark.parametrize("after_s", [3.0, 6.5, 9.0], ids=["start", "export", "adoption"])
@pytest.mark.parametrize("seconds", [0.0, 1.0, 30.0])
@virtual
async def test_a_sync_meanwhile_goes_without_it_and_its_weights_are_fetched(after_s: float, seconds: float) -> None:
    async with running(engines(2, seconds=SLOW)) as pool:
        first, _ = await dead_one_of_two(pool, after_s)
        await sync(pool, seconds)
        assert "pause" not in first.commands[first.commands.index("resume") + 1 :]
        assert states(pool) == [RESTARTING, READY]
        await until(pool, READY, READY)
        assert first.weights == 2


@virtual
async def test_after_three_times_it_is_stale_and_the_next_sync_takes_it_along() -> None:
    async with running(engines(2, seconds=SLOW)) as pool:
        first, _ = await dead_one_of_two(pool, 6.5)
        for _ in range(3):
            assert states(pool) == [RESTARTING, READY]
            await sync(pool)
            await anyio.sleep(1.0)
        await until(pool, STALE, READY)
        assert "whenever it had got weights there were others already" in pool.members[0].stale
        await sync(pool)
        await until(pool, READY, READY)
        assert first.weights == 5


@virtual
async def test_flushes_meanwhile_change_nothing() -> None:
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=engines(2, seconds=SLOW)) as rollout:
        pool = await rollout._ready_pool()
        _, second = await dead_one_of_two(pool, 5.5)
        for _ in range(20):
            await anyio.sleep(0.3)
            await rollout.flush_cache()
        assert states(pool) == [READY, READY]
        assert second.commands.count("export_weights") == 1


@virtual
async def test_a_sync_that_fails_with_weights_half_loaded_leaves_it_stale_like_the_others() -> None:
    async with running(engines(2, seconds=SLOW)) as pool:
        await dead_one_of_two(pool, 3.0)
        await sync(pool, fails_in="transfer")
        failed_s = time.monotonic()
        with pytest.raises(sr.StaleWeightsError):
            await pool.dispatcher.acquire()
        assert time.monotonic() == failed_s  # it will be stale, too
        await until(pool, STALE, STALE)
        await sync(pool)
        await until(pool, READY, READY)


@pytest.mark.parametrize("keep_snapshot", [False, True])
@virtual
async def test_a_kept_snapshot_does_not_outlive_a_sync_that_failed(keep_snapshot: bool) -> None:
    (engine,) = given_engines = engines(1)
    async with running(given_engines, keep_snapshot=keep_snapshot) as pool:
        await sync(pool)
        await anyio.sleep(1)
        await sync(pool, fails_in="transfer")
        assert states(pool) == [STALE]
        engine.die()
        await until(pool, STALE)
        assert "a weight sync that failed" in pool.members[0].stale
        await sync(pool)
        await until(pool, READY)


@virtual
async def test_a_sync_that_fails_before_weights_move_only_delays_it() -> None:
    async with running(engines(2, seconds=SLOW)) as pool:
        first, _ = await dead_one_of_two(pool, 9.0)
        await sync(pool, fails_in="pause")
        await until(pool, READY, READY)
        assert first.commands.count("adopt_weights") == 1


@virtual
async def test_weights_that_arrive_while_a_sync_pauses_are_not_the_current_ones_after_it() -> None:
    async with running(engines(2, seconds={**SLOW, "pause": 2.0})) as pool:
        first, _ = await dead_one_of_two(pool, 10.0)
        assert "adopt_weights" not in first.commands  # which ends in the pause
        await sync(pool, seconds=5.0)
        await until(pool, READY, READY)
        assert first.weights == 2


@virtual
async def test_weights_are_not_asked_for_while_a_sync_is_planned() -> None:
    async with running(engines(3, seconds=SLOW)) as pool:
        await sync(pool)
        first, second, third = (member.engine for member in pool.members)
        first.die()  # type: ignore[attr-defined]
        second.die()  # type: ignore[attr-defined]
        await anyio.sleep(6.5)  # the one waits for the other's export
        await sync(pool, seconds=5.0, plan_s=1.0)
        assert third.commands.count("export_weights") <= 1  # type: ignore[attr-defined]
        await until(pool, READY, READY, READY)
        assert [first.weights, second.weights] == [2, 2]  # type: ignore[attr-defined]


@virtual
async def test_one_that_will_be_stale_is_not_let_in_during_a_sync() -> None:
    async with running(engines(2, seconds=SLOW)) as pool:
        (first, _) = pair = [member.engine for member in pool.members]
        pair[0].fail_command = lambda name: "it does not fit" if name == "adopt_weights" else None  # type: ignore[attr-defined]
        await dead_one_of_two(pool, 20.0)
        assert first.commands.count("adopt_weights") == 2  # type: ignore[attr-defined]
        await sync(pool, seconds=30.0)
        assert states(pool) == [RESTARTING, READY]
        await until(pool, STALE, READY)


@virtual
async def test_files_that_cannot_be_had_are_let_go_of() -> None:
    class Odd(Engine):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            answer = await super().command(name, timeout_s, **arguments)
            if name == "export_weights":
                answer["ranks"].append({"pid": os.getpid(), "fd": 1 << 20})
            return answer

    async with running([Engine("engine-0"), Odd("engine-1")]) as pool:
        await dead_one_of_two(pool, 6.5)
        await until(pool, STALE, READY)
        assert "No such file" in pool.members[0].stale


@virtual
async def test_one_that_takes_long_to_die_is_not_let_in_meanwhile() -> None:
    async with running([Lingering("engine-0", seconds=SLOW), Engine("engine-1", seconds=SLOW)]) as pool:
        first, _ = await dead_one_of_two(pool, 20 + 9.0)
        assert first.alive
        first.die("again")
        await until(pool, READY, READY)
        assert pool.members[0].num_restarts == 2


@virtual
async def test_one_that_never_had_a_sync_is_not_let_in_during_the_first() -> None:
    given_engines = engines(2)
    async with running(given_engines) as pool:
        given_engines[0].die()
        await anyio.sleep(5)
        await sync(pool, seconds=30.0)
        assert states(pool) == [RESTARTING, READY]
        await until(pool, READY, READY)
        assert given_engines[0].weights == 1


@pytest.mark.parametrize("how", ["dies", "fails"])
@virtual
async def test_another_engine_is_asked_when_one_fails(how: str) -> None:
    given_engines = engines(3, seconds=SLOW)
    async with running(given_engines) as pool:
        await sync(pool)
        first, second, third = given_engines
        first.die()
        await anyio.sleep(6.5)
        if how == "dies":
            second.die()
            await until(pool, READY, RESTARTING, READY)
        else:
            second.fail_command = lambda name: "no memory" if name == "export_weights" else None
            lease = [await pool.dispatcher.acquire() for _ in range(3)]  # so that the third is the idlest
            assert {held.target.name for held in lease} == {"engine-1", "engine-2"}
            next(held for held in lease if held.target.name == "engine-2").release()
            await until(pool, READY, READY, READY)
        assert "export_weights" in third.commands


@pytest.mark.parametrize("command", ["adopt_weights", "resume"])
@virtual
async def test_weights_that_do_not_fit_leave_it_stale_and_say_why(command: str) -> None:
    given_engines = engines(2)
    async with running(given_engines) as pool:
        await sync(pool)
        first = given_engines[0]
        first.fail_command = lambda name: "norm.weight differs" if name == command else None
        first.die()
        await until(pool, STALE, READY)
        assert first.commands.count("adopt_weights") == 3
        assert "norm.weight differs" in pool.members[0].stale
        first.fail_command = None
        await sync(pool)
        await until(pool, READY, READY)


@pytest.mark.parametrize("at", ["adopt_weights", "resume"])
@virtual
async def test_one_that_hangs_while_it_gets_weights_is_ended_and_started_again(at: str) -> None:
    class Hanging(Engine):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            if name == at and self.num_starts == 2:
                await anyio.sleep(660)
                raise sr.EngineRequestError(self.name, "it was not answered", timed_out=True)
            return await super().command(name, timeout_s, **arguments)

    async with running([Hanging("engine-0"), Engine("engine-1")]) as pool:
        await dead_one_of_two(pool, 0.0)
        assert await until(pool, READY, READY) == pytest.approx(1 + 5 + 660 + 2 + 5)
        assert pool.members[0].num_restarts == 2


@virtual
async def test_an_engine_is_not_ended_because_the_one_it_would_have_weights_from_does_not_answer() -> None:
    class Hanging(Engine):
        async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
            if name == "export_weights":
                raise sr.EngineRequestError(self.name, "it was not answered", timed_out=True)
            return await super().command(name, timeout_s, **arguments)

    async with running([Engine("engine-0"), Hanging("engine-1")]) as pool:
        await dead_one_of_two(pool, 0.0)
        await until(pool, STALE, READY)
        assert pool.members[0].num_restarts == 1


@pytest.mark.parametrize("at", ["export_weights", "adopt_weights", "resume"])
@virtual
async def test_one_that_dies_again_before_it_serves_counts_again(at: str) -> None:
    given_engines = engines(2, seconds={"export_weights": 1.0, "adopt_weights": 1.0, "resume": 1.0})
    async with running(given_engines) as pool:
        await sync(pool)
        first = given_engines[0]
        first.die()
        await anyio.sleep(6.5 + ["export_weights", "adopt_weights", "resume"].index(at))
        assert states(pool) == [RESTARTING, READY]
        assert first.alive
        first.die("again")
        assert states(pool) == [RESTARTING, READY]
        await until(pool, READY, READY)
        assert pool.members[0].num_restarts == 2


@virtual
async def test_two_that_come_back_at_once_both_get_weights() -> None:
    given_engines = engines(3, seconds=SLOW)
    async with running(given_engines) as pool:
        await sync(pool)
        given_engines[0].die()
        given_engines[1].die()
        await until(pool, READY, READY, READY)


# ------------------------------------------------------------ the end


@pytest.mark.parametrize("after_s", [0.5, 1.0, 3.0, 6.0, 6.5, 8.0, 9.5, 11.5, 20.0])
@pytest.mark.parametrize("keep_snapshot", [False, True])
@virtual
async def test_closing_ends_it_all_at_once_whatever_is_under_way(after_s: float, keep_snapshot: bool) -> None:
    given_engines = engines(2, seconds={**SLOW, "resume": 1.0})
    rollout = sr.AsyncRolloutEngine(config=CONFIG.replace(keep_weights_snapshot=keep_snapshot), engines=given_engines)
    async with rollout:
        pool = await rollout._ready_pool()
        await sync(pool)
        given_engines[0].die()
        await anyio.sleep(after_s)
        begun = time.monotonic()
    assert time.monotonic() - begun <= 2.0  # an export is given so long to be dropped
    assert not given_engines[0].alive
    assert [engine.stage for engine in given_engines][1] == "closed"
    assert {task.get_name() for task in asyncio.all_tasks()} == {asyncio.current_task().get_name()}  # type: ignore[union-attr]
    num_starts = given_engines[0].num_starts
    await anyio.sleep(1000)
    assert given_engines[0].num_starts == num_starts


OPERATIONS = st.one_of(
    st.tuples(st.just("die"), st.integers(0, 2)),
    st.tuples(st.just("sync"), st.tuples(st.sampled_from([0.0, 4.0]), st.sampled_from([0.0, 1.5]))),
    st.tuples(st.just("fail"), st.sampled_from(["pause", "transfer"])),
    st.tuples(st.just("sleep"), st.sampled_from([("kv_cache",), ("weights",), ("kv_cache", "weights")])),
    st.tuples(st.just("wake"), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 6.5, 9.0, 30.0])),
)


async def do(pool: Pool, operation: tuple[str, Any], members: list[Member]) -> None:
    kind, argument = operation
    try:
        match kind:
            case "die":
                engine: Any = members[argument].engine
                if engine.alive:
                    engine.die()
            case "sync":
                await sync(pool, argument[0], plan_s=argument[1])
            case "fail":
                await sync(pool, fails_in=argument)
            case "sleep":
                await put_to_sleep(pool, argument)
            case "wake":
                await wake(pool, None, 60.0)
            case "wait":
                await anyio.sleep(argument)
    except (sr.LifecycleError, sr.NoEngineError, sr.EngineDiedError):
        pass


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(OPERATIONS, st.booleans()), max_size=14), st.booleans())
def test_whatever_happens_who_serves_has_the_current_weights(operations: list[Any], keep_snapshot: bool) -> None:
    async def play() -> None:
        seconds = {**SLOW, "pause": 0.5, "load_portable": 0.5, "resume": 0.5, "sleep": 0.5, "wake": 0.5}
        async with running(engines(3, seconds=seconds), most=1000, keep_snapshot=keep_snapshot) as pool:
            with pool.watched_by(lambda: None if pool.busy else check(pool)):
                async with anyio.create_task_group() as tasks:
                    for operation, others_wait in operations:
                        if others_wait:
                            await do(pool, operation, pool.members)
                        else:
                            tasks.start_soon(do, pool, operation, pool.members)
                            await anyio.sleep(0.25)
                if any(member.asleep for member in pool.members):
                    await wake(pool, None, 60.0)
                await anyio.sleep(100)
                assert not any(member.state is RESTARTING for member in pool.members)
                await sync(pool)
                await until(pool, READY, READY, READY)

    run_virtually(play)
