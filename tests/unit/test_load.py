"""20,000 requests that wait for a slot in one pool: what they take of memory and time, and that none is passed over."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.testing import SimulatedEngine

pytestmark = pytest.mark.timeout(120)

NUM_QUEUED = 20_000
NUM_ENGINES, SLOTS_PER_ENGINE = 8, 32
NUM_SLOTS = NUM_ENGINES * SLOTS_PER_ENGINE
NUM_CALLERS = NUM_SLOTS + NUM_QUEUED
SAMPLING = sr.Sampling(max_new_tokens=4, ignore_eos=True)
BURST = 500
NUM_TRACED = 2000  # of those whose memory is measured, the last to come: tracing makes them slow
Call = Callable[[sr.AsyncRolloutEngine, int], Awaitable[None]]


@pytest.fixture(autouse=True, scope="module")
def unfrozen_afterwards() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def freeze_what_other_tests_left(unfrozen_afterwards: None) -> None:
    """A full garbage collection looks at all that is alive, for half a second where many modules are loaded."""
    gc.collect()
    gc.freeze()


async def stream(rollout: sr.AsyncRolloutEngine, number: int) -> None:
    async for _ in rollout.stream([1, number], SAMPLING):
        pass


async def generate(rollout: sr.AsyncRolloutEngine, number: int) -> None:
    await rollout.generate([[1, number]], sampling=SAMPLING)


class Load:
    """A pool whose engines hang, and callers that stand in its queue.

    Attributes:
        arrived: the numbers of the callers, in the order in which engines were given their requests.
    """

    def __init__(self, call: Call = stream, max_queued: int = 65536) -> None:
        self.call, self.arrived = call, list[int]()
        options: dict[str, Any] = {"max_running": SLOTS_PER_ENGINE, "token_s": 0.0, "hang": True}
        self.engines = [SimulatedEngine(f"engine-{i}", self._plan, **options) for i in range(NUM_ENGINES)]
        config = sr.RolloutConfig(
            model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_queued=max_queued
        )
        self.rollout = sr.AsyncRolloutEngine(config=config, engines=self.engines)
        self.tasks: list[asyncio.Task[None]] = []

    def _plan(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int) -> int:
        self.arrived.append(prompt_ids[1])
        return 1

    @property
    def num_inflight(self) -> int:
        return sum(status.num_inflight for status in self.rollout.engines)

    def add(self, number: int) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self.call(self.rollout, number))
        self.tasks.append(task)
        return task

    async def fill(self, num_queued: int = NUM_QUEUED) -> None:
        """Take every slot, and queue callers until there are so many."""
        num_callers = NUM_SLOTS + num_queued
        for begin in range(len(self.tasks), num_callers, BURST):
            for number in range(begin, min(begin + BURST, num_callers)):
                self.add(number)
            await asyncio.sleep(0)
        await until(lambda: self.rollout.num_queued == num_queued)
        assert self.num_inflight == NUM_SLOTS

    def go_on(self) -> None:
        for engine in self.engines:
            engine.hang = False


@asynccontextmanager
async def full_pool(call: Call = stream, max_queued: int = 65536) -> AsyncIterator[Load]:
    load = Load(call, max_queued)
    async with load.rollout:
        await load.fill()
        try:
            yield load
        finally:
            for task in load.tasks:
                task.cancel()
            await asyncio.wait(load.tasks)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Of this process's time: a machine that is busy with something else is no reason to fail."""
    begun_s, cpu_s = time.monotonic(), time.process_time()
    yield
    assert time.process_time() - cpu_s < seconds
    assert time.monotonic() - begun_s < 10 * seconds


class Gaps:
    longest_s = 0.0


@asynccontextmanager
async def ticking() -> AsyncIterator[Gaps]:
    """How long the event loop computes while somebody else waits for a turn, in this process's time, as above."""
    gaps = Gaps()

    async def tick() -> None:
        last_s = time.process_time()
        while True:
            await asyncio.sleep(0.005)
            now_s = time.process_time()
            gaps.longest_s, last_s = max(gaps.longest_s, now_s - last_s), now_s

    task = asyncio.ensure_future(tick())
    yield gaps
    await asyncio.sleep(0.01)  # it notices the last gap
    task.cancel()
    await asyncio.wait([task])


# ------------------------------------------------------------ memory


@pytest.mark.parametrize(("call", "most_kib"), [(stream, 8), pytest.param(generate, 32, marks=pytest.mark.slow)])
async def test_a_request_that_waits_takes_a_few_kib(call: Call, most_kib: int) -> None:
    load = Load(call)
    async with load.rollout:
        await load.fill(NUM_QUEUED - NUM_TRACED)
        tracemalloc.start()
        try:
            await load.fill()
            num_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert num_bytes / NUM_TRACED < most_kib * 1024
        load.go_on()
        await asyncio.wait(load.tasks)
    assert sorted(load.arrived) == list(range(NUM_CALLERS))
    assert all(task.exception() is None for task in load.tasks)


# ------------------------------------------------------------ order


async def test_they_are_served_in_the_order_in_which_they_came_and_the_loop_stays_responsive() -> None:
    async with ticking() as gaps, full_pool() as load:
        load.go_on()
        await asyncio.wait(load.tasks)
        assert load.arrived == list(range(NUM_CALLERS))
        assert load.rollout.num_queued == load.num_inflight == 0
    assert gaps.longest_s < 1.0


async def test_those_that_leave_do_not_change_the_order_of_the_others() -> None:
    async with full_pool() as load:
        left = range(NUM_SLOTS, NUM_CALLERS, 3)
        for number in left:
            load.tasks[number].cancel()
        load.go_on()
        await asyncio.wait(load.tasks)
        assert load.arrived == sorted(set(range(NUM_CALLERS)) - set(left))


# ------------------------------------------------------------ cancelling


async def test_one_that_is_cancelled_is_gone_at_once_and_its_place_is_free() -> None:
    async with full_pool(max_queued=NUM_QUEUED) as load:
        with pytest.raises(sr.QueueFullError):
            await stream(load.rollout, 0)
        cancelled = load.tasks[NUM_CALLERS // 2]
        with at_most(1.0):
            cancelled.cancel()
            await asyncio.wait([cancelled])
            assert load.rollout.num_queued == NUM_QUEUED - 1
            newcomer = load.add(NUM_CALLERS)
            await until(lambda: load.rollout.num_queued == NUM_QUEUED)
        load.go_on()
        await asyncio.wait(load.tasks)
        assert newcomer.exception() is None
        assert load.arrived == [number for number in range(NUM_CALLERS + 1) if number != NUM_CALLERS // 2]


async def test_one_that_has_a_slot_gives_it_to_the_next_when_it_is_cancelled() -> None:
    async with full_pool() as load:
        with at_most(1.0):
            load.tasks[0].cancel()
            await until(lambda: len(load.arrived) == NUM_SLOTS + 1)
        assert load.arrived[-1] == NUM_SLOTS
        assert load.rollout.num_queued == NUM_QUEUED - 1
        assert load.num_inflight == NUM_SLOTS


@pytest.mark.parametrize("first_come_last", [False, True])
async def test_all_that_are_cancelled_are_gone_within_a_second(first_come_last: bool) -> None:
    async with full_pool() as load, ticking() as gaps:
        queued = load.tasks[NUM_SLOTS:]
        with at_most(1.0):
            for task in reversed(queued) if first_come_last else queued:
                task.cancel()
            await until(lambda: load.rollout.num_queued == 0)
        await asyncio.wait(queued)
        assert all(task.cancelled() for task in queued)
        assert load.num_inflight == NUM_SLOTS
        load.go_on()
        await asyncio.wait(load.tasks)
        assert load.arrived == list(range(NUM_SLOTS))
        await asyncio.wait_for(load.add(0), 5)
    assert gaps.longest_s < 1.0


async def test_deadlines_that_pass_empty_the_queue() -> None:
    async def brief(rollout: sr.AsyncRolloutEngine, number: int) -> None:
        timeout_s = None if number < NUM_SLOTS else 0.5
        async for _ in rollout.stream([1, number], SAMPLING, timeout_s=timeout_s):
            pass

    load = Load(brief)
    async with load.rollout, ticking() as gaps:
        for number in range(NUM_CALLERS):
            load.add(number)
        late = load.tasks[NUM_SLOTS:]
        done, _ = await asyncio.wait(late, timeout=30)
        assert len(done) == NUM_QUEUED
        assert all(isinstance(task.exception(), sr.RequestTimeoutError) for task in late)
        assert load.rollout.num_queued == 0
        load.go_on()
        await asyncio.wait(load.tasks)
    assert load.arrived == list(range(NUM_SLOTS))
    assert gaps.longest_s < 3.0  # they all came in one turn of the loop


async def test_closing_the_rollout_ends_them_all_with_a_reason() -> None:
    async with full_pool() as load:
        with at_most(2.0):
            await load.rollout.close()
        await asyncio.wait(load.tasks)
        assert all(isinstance(task.exception(), sr.LifecycleError) for task in load.tasks)
