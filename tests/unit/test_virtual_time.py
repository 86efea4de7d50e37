from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from sglrollout.testing import DeadlockError, run_virtually

pytestmark = pytest.mark.timeout(60)

DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def real_monotonic() -> Iterator[Callable[[], float]]:
    """Whatever a test does, the clock is the real one afterwards."""
    before = time.monotonic
    yield before
    assert time.monotonic is before


async def monotonic_after(seconds: float) -> float:
    await anyio.sleep(seconds)
    return time.monotonic()


# ------------------------------------------------------------ the clock


def test_an_hour_passes_in_no_time() -> None:
    begun = time.perf_counter()
    assert run_virtually(monotonic_after, 3600.0) == 3600.0
    assert time.perf_counter() - begun < 30


def test_years_pass_as_well() -> None:
    assert run_virtually(monotonic_after, 1000 * DAY_S) == pytest.approx(1000 * DAY_S)


def test_the_clock_starts_at_zero_each_time() -> None:
    assert [run_virtually(monotonic_after, 0.0) for _ in range(2)] == [0.0, 0.0]


def test_timers_fire_in_order_each_at_its_time() -> None:
    delays = [random.Random(7).uniform(0, 1000) for _ in range(300)]
    fired: list[float] = []

    async def wait(delay: float) -> None:
        await anyio.sleep(delay)
        assert time.monotonic() == pytest.approx(delay)
        assert asyncio.get_running_loop().time() == time.monotonic()
        fired.append(delay)

    async def all_of_them() -> None:
        async with anyio.create_task_group() as tasks:
            for delay in delays:
                tasks.start_soon(wait, delay)

    run_virtually(all_of_them)
    assert fired == sorted(delays)


def test_code_takes_no_time() -> None:
    def work() -> None:
        time.sleep(0.01)

    async def working() -> float:
        work()
        await anyio.sleep(1)
        work()
        return time.monotonic()

    assert run_virtually(working) == 1.0


def test_deadlines_pass_on_the_virtual_clock() -> None:
    async def late() -> list[float]:
        passed = []
        with anyio.move_on_after(60):
            await anyio.sleep_forever()
        passed.append(time.monotonic())
        with pytest.raises(TimeoutError), anyio.fail_after(60):
            await anyio.sleep(61)
        passed.append(time.monotonic())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(61), 60)
        passed.append(time.monotonic())
        with anyio.fail_after(60):
            await anyio.sleep(59)
        return [*passed, time.monotonic()]

    assert run_virtually(late) == [60, 120, 180, 239]


def test_what_is_ready_comes_before_any_timer() -> None:
    async def turns() -> float:
        asyncio.get_running_loop().call_later(1e-6, pytest.fail, "a timer fired")
        for _ in range(1000):
            await asyncio.sleep(0)
        return time.monotonic()

    assert run_virtually(turns) == 0.0


def test_arguments_are_passed_and_the_result_is_returned() -> None:
    async def joined(left: str, right: str) -> str:
        return left + right

    assert run_virtually(joined, "a", "b") == "ab"


def test_time_monotonic_is_restored_after_an_exception(real_monotonic: Callable[[], float]) -> None:
    async def fail() -> None:
        assert time.monotonic is not real_monotonic
        await anyio.sleep(10)
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        run_virtually(fail)
    assert time.monotonic is real_monotonic


def test_there_is_one_virtual_clock_at_a_time() -> None:
    async def nested() -> None:
        with pytest.raises(RuntimeError, match="another virtual clock"):
            run_virtually(monotonic_after, 1.0)
        with pytest.raises(RuntimeError, match="another virtual clock"):
            await anyio.to_thread.run_sync(run_virtually, monotonic_after, 1.0)
        assert await monotonic_after(2.0) == 2.0

    run_virtually(nested)


async def test_it_is_refused_on_a_running_loop(real_monotonic: Callable[[], float]) -> None:
    with pytest.raises(RuntimeError, match="Already running"):
        run_virtually(monotonic_after, 1.0)
    assert time.monotonic is real_monotonic
    assert await anyio.to_thread.run_sync(run_virtually, monotonic_after, 5.0) == 5.0


# ------------------------------------------------------------ threads


async def by_anyio(function: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(function)


async def by_asyncio(function: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(function)


async def by_an_executor(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor() as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, function)


THREADS = pytest.mark.parametrize("in_a_thread", [by_anyio, by_asyncio, by_an_executor])


@THREADS
def test_time_stands_still_for_a_busy_thread(in_a_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
    def work() -> float:
        time.sleep(0.05)
        return time.monotonic()

    async def working() -> tuple[float, float]:
        await anyio.sleep(5)
        with anyio.fail_after(1e-3):
            seen = await in_a_thread(work)
        await anyio.sleep(5)
        return seen, time.monotonic()

    assert run_virtually(working) == (5, 10)


def test_a_thread_is_waited_for_without_any_timer() -> None:
    assert run_virtually(anyio.to_thread.run_sync, time.sleep, 0.05) is None


def test_a_thread_may_call_into_the_loop() -> None:
    async def here() -> float:
        await asyncio.sleep(0)
        return time.monotonic()

    async def working() -> float:
        await anyio.sleep(3)
        return await anyio.to_thread.run_sync(anyio.from_thread.run, here)

    assert run_virtually(working) == 3


def test_a_thread_of_the_users_own_wakes_the_loop() -> None:
    async def working() -> str:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        timer = threading.Timer(0.05, loop.call_soon_threadsafe, (future.set_result, "woken"))
        timer.start()
        return await future

    assert run_virtually(working) == "woken"


def test_a_socket_wakes_the_loop() -> None:
    async def reading() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            threading.Timer(0.05, theirs.sendall, (b"hello",)).start()
            return await asyncio.get_running_loop().sock_recv(ours, 5)

    assert run_virtually(reading) == b"hello"


# ------------------------------------------------------------ deadlocks


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("beside", [wait_for_ever, anyio.sleep_forever])
def test_a_deadlock_is_an_error_and_not_a_hang(beside: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def stuck() -> None:
        await anyio.sleep(30)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beside, name="the one beside")
            await wait_for_ever()

    with pytest.raises(DeadlockError) as caught:
        run_virtually(stuck, patience_s=0.05)
    message = str(caught.value)
    assert "no timer is set" in message
    assert "At 30 s" in message
    assert "the one beside: " in message
    assert "wait_for_ever, " in message
    assert "test_virtual_time.py:" in message


def test_many_tasks_of_a_deadlock_are_counted() -> None:
    async def stuck() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(wait_for_ever)

    with pytest.raises(DeadlockError, match="and 93 more"):
        run_virtually(stuck, patience_s=0.05)


def test_tasks_clean_up_after_a_deadlock() -> None:
    cleaned: list[float] = []

    async def stuck() -> None:
        try:
            await wait_for_ever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(10)
            cleaned.append(time.monotonic())

    with pytest.raises(DeadlockError):
        run_virtually(stuck, patience_s=0.05)
    assert cleaned == [10]


def test_a_thread_that_never_comes_back_is_an_error_even_while_timers_are_set() -> None:
    release = threading.Event()

    async def stuck() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 10)
            await asyncio.get_running_loop().run_in_executor(pool, release.wait)

    with ThreadPoolExecutor() as pool:
        try:
            with pytest.raises(DeadlockError, match=r"busy for 0\.05 real seconds"):
                run_virtually(stuck, patience_s=0.05)
        finally:
            release.set()
