from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import pytest

from sglrollout.engine.protocol import Request
from sglrollout.errors import EngineDiedError, EngineError, EngineStartError, LifecycleError, NoEngineError
from sglrollout.pool.pool import EngineState, Pool
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.messages import EngineInfo, Finish

ENDLESS = {"max_new_tokens": 3000, "ignore_eos": True}


@asynccontextmanager
async def running(
    engines: Sequence[ScriptedEngine], max_inflight: int | Literal["auto"] = "auto", max_queued: int = 1000
) -> AsyncIterator[Pool]:
    pool = Pool(engines, max_inflight, max_queued)
    async with anyio.create_task_group() as tasks:
        try:
            await pool.start(tasks)
            yield pool
        finally:
            await pool.close()
            tasks.cancel_scope.cancel()


async def submitted(pool: Pool, sampling: dict[str, Any] | None = None) -> Request:
    """A request in whichever engine the dispatcher chose, its slot freed at its end."""
    lease = await pool.dispatcher.acquire()
    request = Request([1, 2, 3], sampling or {"max_new_tokens": 3, "ignore_eos": True})
    request.on_end = lambda _: lease.release()
    await lease.target.engine.submit(request)
    return request


async def ended(request: Request) -> Request:
    with anyio.fail_after(5):
        while not request.ended:
            await request.progress()
    return request


def leave(*requests: Request) -> None:
    """As their callers leave them."""
    for request in requests:
        request.end(Finish("abort"))


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ------------------------------------------------------------ many engines


@pytest.mark.parametrize("num_engines", [1, 50])
async def test_a_start_is_told_once_however_many_engines_come_up(num_engines: int) -> None:
    """Each time it is told, somebody looks at every engine."""
    told: list[int] = []
    pool = Pool([ScriptedEngine(f"engine-{i}") for i in range(num_engines)], "auto", 1000)
    pool.watchers.append(lambda: told.append(sum(member.ready for member in pool.members)))
    async with anyio.create_task_group() as tasks:
        await pool.start(tasks)
        assert told == [num_engines]
        await pool.close()
        tasks.cancel_scope.cancel()


def in_flight(pool: Pool) -> list[int]:
    return [pool.dispatcher.num_inflight(member) for member in pool.members]


# ------------------------------------------------------------ start and close


async def test_engines_start_in_parallel() -> None:
    engines = [ScriptedEngine(f"engine-{i}", start_s=0.5) for i in range(20)]
    with anyio.fail_after(5):
        async with running(engines) as pool:
            assert all(member.state is EngineState.READY for member in pool.members)


async def test_one_engine_that_fails_to_start_ends_the_others_and_raises_its_own_error() -> None:
    engines = [ScriptedEngine("engine-0", start_s=60), ScriptedEngine("engine-1", fail_start="no such model")]
    pool = Pool(engines, "auto", 10)
    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(5), pytest.raises(EngineStartError, match="engine-1: no such model") as caught:
            await pool.start(tasks)
        assert type(caught.value) is EngineStartError
        await pool.close()
    assert [engine.stage for engine in engines] == ["closed", "dead"]


async def test_when_several_fail_one_of_their_errors_is_raised_and_not_a_group() -> None:
    engines = [ScriptedEngine(f"engine-{i}", fail_start="no such model") for i in range(3)]
    pool = Pool(engines, "auto", 10)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(EngineStartError):
            await pool.start(tasks)


async def test_an_engines_unexpected_exception_keeps_its_type() -> None:
    class Broken(ScriptedEngine):
        async def start(self) -> EngineInfo:
            raise ZeroDivisionError("a bug")

    pool = Pool([ScriptedEngine(), Broken()], "auto", 10)
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ZeroDivisionError):
            await pool.start(tasks)


async def test_nothing_is_served_before_all_engines_are_up() -> None:
    engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1", start_s=60)]
    pool = Pool(engines, "auto", 10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.start, tasks)
        await turns()
        assert not any(member.ready for member in pool.members)
        tasks.cancel_scope.cancel()


async def test_what_an_engine_warns_of_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Warning(ScriptedEngine):
        async def start(self) -> EngineInfo:
            info = await super().start()
            info.warnings.append("runs on the slow path")
            return info

    with caplog.at_level(logging.WARNING, "sglrollout.pool"):
        async with running([Warning("engine-7")]):
            pass
    assert "engine-7: runs on the slow path" in caplog.text


async def test_closing_ends_what_runs_and_takes_no_more() -> None:
    engine = ScriptedEngine()
    async with running([engine]) as pool:
        request = await submitted(pool, ENDLESS)
    assert request.finish_reason == "abort"
    assert isinstance(request.error, LifecycleError)
    assert in_flight(pool) == [0]
    with pytest.raises(EngineError, match="not running"):
        await engine.submit(Request([1], {}))
    await pool.close()


# ------------------------------------------------------------ serving


async def test_a_limit_holds_per_engine() -> None:
    engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1")]
    async with running(engines, max_inflight=3) as pool:

        async def one() -> None:
            await ended(await submitted(pool))

        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                tasks.start_soon(one)
        assert [engine.peak_running for engine in engines] == [3, 3]
        assert [len(engine.submitted) for engine in engines] == [15, 15]
        assert in_flight(pool) == [0, 0]


async def test_load_reports_move_an_adaptive_limit_and_wake_waiters() -> None:
    engine = ScriptedEngine(max_running=20)
    async with running([engine]) as pool:
        (member,) = pool.members
        engine.kv_usage = 0.99
        request = await submitted(pool, ENDLESS)
        await turns()
        assert member.limit < 20
        lowered = member.limit
        engine.kv_usage = 0.1
        others = [await submitted(pool, ENDLESS) for _ in range(lowered - 1)]
        with anyio.fail_after(5):
            others.append(await submitted(pool, ENDLESS))  # waits until a report raises the limit
        assert member.limit > lowered
        leave(request, *others)


# ------------------------------------------------------------ death


async def test_when_one_of_two_engines_dies_its_requests_fail_and_the_other_keeps_serving() -> None:
    engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1")]
    async with running(engines, max_inflight=2) as pool:
        requests = [await submitted(pool, ENDLESS) for _ in range(4)]
        engines[0].die("out of memory")
        failed = [request for request in requests if request.ended]
        assert failed == engines[0].submitted
        for request in failed:
            assert request.finish_reason == "error"
            assert isinstance(request.error, EngineDiedError)
            assert str(request.error) == "engine-0: out of memory"
        assert [member.state for member in pool.members] == [EngineState.DEAD, EngineState.READY]
        assert in_flight(pool) == [0, 2]
        leave(*requests)
        assert (await ended(await submitted(pool))).finish_reason == "length"
        assert len(engines[0].submitted) == 2


async def test_waiters_get_no_slot_of_an_engine_that_is_dying_and_keep_their_order() -> None:
    engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1")]
    async with running(engines, max_inflight=2) as pool:
        requests = [await submitted(pool, ENDLESS) for _ in range(4)]
        waiters = [asyncio.ensure_future(pool.dispatcher.acquire()) for _ in range(4)]
        await turns()
        engines[0].die()
        await turns()
        assert not any(waiter.done() for waiter in waiters)
        leave(*requests)
        await turns()
        assert [waiter.done() for waiter in waiters] == [True, True, False, False]
        assert all(waiter.result().target.engine is engines[1] for waiter in waiters[:2])
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)


async def test_when_all_engines_are_dead_waiters_and_later_calls_are_told() -> None:
    engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1")]
    async with running(engines, max_inflight=1) as pool:
        for _ in engines:
            await submitted(pool, ENDLESS)
        waiters = [asyncio.ensure_future(pool.dispatcher.acquire()) for _ in range(3)]
        await turns()
        engines[0].die("first")
        await turns()
        assert not any(waiter.done() for waiter in waiters)
        engines[1].die("second")
        await asyncio.wait(waiters, timeout=5)
        for waiter in waiters:
            error = waiter.exception()
            assert isinstance(error, NoEngineError)
            assert "engine-1: second" in str(error)
            assert isinstance(error.__cause__, EngineDiedError)
        with pytest.raises(NoEngineError):
            await pool.dispatcher.acquire()


async def test_an_engine_that_dies_while_others_still_start_never_gets_work() -> None:
    engines = [ScriptedEngine("engine-0"), ScriptedEngine("engine-1", start_s=0.05)]

    async def kill() -> None:
        while not engines[0].alive:
            await asyncio.sleep(0)
        engines[0].die("too early")

    killer = asyncio.ensure_future(kill())
    async with running(engines) as pool:
        await killer
        assert [member.state for member in pool.members] == [EngineState.DEAD, EngineState.READY]
        with anyio.fail_after(5):
            assert (await ended(await submitted(pool))).finish_reason == "length"


async def test_who_waits_for_a_pool_that_sleeps_goes_on_when_it_wakes_and_fails_when_it_ends() -> None:
    async with running([ScriptedEngine()]) as pool:
        await pool.until_open()
        pool.members[0].asleep = {"kv_cache": 0}
        pool.changed()
        waiting = [asyncio.ensure_future(pool.until_open()) for _ in range(2)]
        await turns()
        assert not any(task.done() for task in waiting)
        pool.members[0].asleep = {}
        pool.changed()
        await asyncio.gather(*waiting)

        pool.members[0].asleep = {"kv_cache": 0}
        pool.changed()
        last = asyncio.ensure_future(pool.until_open())
        await turns()
        pool.shut(LifecycleError("the end"))
        with pytest.raises(LifecycleError, match="the end"):
            await last
        assert pool.watchers == []
