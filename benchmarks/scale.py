"""What the dispatcher itself costs with many engines and many requests in its queue. No SGLang, no GPU.

    python benchmarks/scale.py
    python benchmarks/scale.py --engines 1,64,1000 --queued 20000

A row per number of engines, each measured ``--repeats`` times, of which the medians are shown. Times are CPU time of
this process, which does nothing but compute. Garbage collections are part of them, of what the measurement itself made:
in a process that holds much else, each full one takes longer.

    free slot us     to take a slot that is free, and to release it
    from queue us    to release a slot and give it to the next in the queue
    wake one us      to look at one engine whose state or limit has changed, with a full queue
    wake all us      to look at all of them
    slot KiB         memory of a task that waits for a slot, the task included
    stream KiB       memory of a whole ``rollout.stream`` that waits
    cancel s         to cancel every ``rollout.stream`` in the queue, until all their tasks have ended
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import platform
import shlex
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import NamedTuple, TypeVar

import sglrollout as sr
from sglrollout.pool.dispatcher import Dispatcher, Lease
from sglrollout.testing import SimulatedEngine

_T = TypeVar("_T")
_SLOTS = 16
_GROUP = 8
_NUM_WAKES = 200
_CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
_COLUMNS = {
    "free slot us": "free_slot_us",
    "from queue us": "from_queue_us",
    "wake one us": "wake_one_us",
    "wake all us": "wake_all_us",
    "slot KiB": "slot_kib",
    "stream KiB": "stream_kib",
    "cancel s": "cancel_s",
}


class Cost(NamedTuple):
    """One row, or one measurement of it; see the columns above."""

    free_slot_us: float
    from_queue_us: float
    wake_one_us: float
    wake_all_us: float
    slot_kib: float
    stream_kib: float
    cancel_s: float


class Target:
    """An engine of which only this is known."""

    limit, ready = _SLOTS, True


class Timer:
    """Adds up the seconds of CPU time that are spent inside it."""

    seconds = 0.0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        begun_s = time.process_time()
        yield
        self.seconds += time.process_time() - begun_s

    def us_each(self, count: int) -> float:
        return self.seconds / count * 1e6


# ---------------------------------------------------------------- the dispatcher alone


async def cost_of_free_slots(num_engines: int, num_requests: int) -> float:
    """Half of all slots are taken, and the oldest is always released first."""
    dispatcher, timer, keys = Dispatcher([Target() for _ in range(num_engines)]), Timer(), itertools.count()
    held = deque([await dispatcher.acquire(next(keys) // _GROUP) for _ in range(num_engines * _SLOTS // 2)])
    with timer():
        for _ in range(num_requests):
            held.popleft().release()
            held.append(await dispatcher.acquire(next(keys) // _GROUP))
    return timer.us_each(num_requests)


class Queue:
    """A dispatcher without a free slot, and tasks that wait for one."""

    def __init__(self, num_engines: int) -> None:
        self.targets = [Target() for _ in range(num_engines)]
        self.dispatcher = Dispatcher(self.targets)
        self.held: deque[Lease[Target]] = deque()
        self.tasks: list[asyncio.Task[None]] = []

    async def _wait(self, number: int) -> None:
        self.held.append(await self.dispatcher.acquire(number // _GROUP))

    async def fill(self, num_queued: int) -> None:
        for number in range(len(self.targets) * _SLOTS):
            await self._wait(number)
        self.tasks = [asyncio.ensure_future(self._wait(number)) for number in range(num_queued)]
        await asyncio.sleep(0)
        assert self.dispatcher.num_queued == num_queued

    def wake(self, *targets: Target) -> float:
        timer = Timer()
        with timer():
            for _ in range(_NUM_WAKES):
                self.dispatcher.wake(*targets)
        return timer.us_each(_NUM_WAKES)

    async def drain(self) -> float:
        """Microseconds to give one slot on. The tasks' own steps are not counted."""
        timer = Timer()
        while self.dispatcher.num_queued:
            leases = [self.held.popleft() for _ in range(min(len(self.held), self.dispatcher.num_queued))]
            with timer():
                for lease in leases:
                    lease.release()
            await asyncio.sleep(0)
        await asyncio.wait(self.tasks)
        return timer.us_each(len(self.tasks))


async def cost_of_queue(num_engines: int, num_queued: int) -> tuple[float, float, float]:
    queue = Queue(num_engines)
    await queue.fill(num_queued)
    wakes = queue.wake(queue.targets[0]), queue.wake()
    return await queue.drain(), *wakes


async def memory_of_queue(num_engines: int, num_queued: int) -> float:
    queue = Queue(num_engines)
    await queue.fill(0)
    with traced() as num_bytes:
        queue.tasks = [asyncio.ensure_future(queue._wait(number)) for number in range(num_queued)]
        await asyncio.sleep(0)
    await queue.drain()
    return num_bytes[0] / num_queued / 1024


@contextlib.contextmanager
def traced() -> Iterator[list[int]]:
    """One number: the bytes that were taken inside, and are still in use at the end."""
    num_bytes = [0]
    gc.collect()
    tracemalloc.start()
    try:
        yield num_bytes
        num_bytes[0] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- whole requests


async def cost_of_streams(num_engines: int, num_queued: int, trace: bool) -> float:
    """KiB for each that waits, or else the seconds to cancel them all; tracing makes that slower."""
    engines = [SimulatedEngine(f"engine-{i}", max_running=_SLOTS, hang=True) for i in range(num_engines)]
    async with sr.AsyncRolloutEngine(config=_CONFIG, engines=engines) as rollout:

        async def stream(number: int) -> None:
            async for _ in rollout.stream([number // 1000, number % 1000]):
                pass

        num_slots = num_engines * _SLOTS
        running = [asyncio.ensure_future(stream(number)) for number in range(num_slots)]
        await _turns()
        with traced() if trace else contextlib.nullcontext([0]) as num_bytes:
            queued = [asyncio.ensure_future(stream(number)) for number in range(num_slots, num_slots + num_queued)]
            await _turns()
        assert rollout.num_queued == num_queued
        cancel_s = await _cancel(queued)
        assert rollout.num_queued == 0
        await _cancel(running)
        return num_bytes[0] / num_queued / 1024 if trace else cancel_s


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def _cancel(tasks: list[asyncio.Task[None]]) -> float:
    timer = Timer()
    with timer():
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return timer.seconds


# ---------------------------------------------------------------- the table


def measure(num_engines: int, num_queued: int) -> Cost:
    return Cost(
        _run(cost_of_free_slots(num_engines, num_queued)),
        *_run(cost_of_queue(num_engines, num_queued)),
        slot_kib=_run(memory_of_queue(num_engines, num_queued)),
        stream_kib=_run(cost_of_streams(num_engines, num_queued, trace=True)),
        cancel_s=_run(cost_of_streams(num_engines, num_queued, trace=False)),
    )


def _run(measurement: Coroutine[None, None, _T]) -> _T:
    gc.collect()
    gc.freeze()
    return asyncio.run(measurement)


def median(costs: list[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=_numbers, default=[1, 64, 1000], help="numbers of engines, with commas")
    parser.add_argument("--queued", type=int, default=20_000, help="requests that wait")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"{shlex.join(['python', *sys.argv])}\nPython {platform.python_version()}, {os.cpu_count()} cores\n")
    print("  ".join(["engines", *_COLUMNS]))
    for num_engines in args.engines:
        cost = median([measure(num_engines, args.queued) for _ in range(args.repeats)])
        cells = [f"{getattr(cost, field):{len(title)}.2f}" for title, field in _COLUMNS.items()]
        print("  ".join([f"{num_engines:7,}", *cells]), flush=True)


if __name__ == "__main__":
    main()
