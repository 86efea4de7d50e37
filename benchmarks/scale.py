"""What this library itself costs with many engines and many requests in its queue. No SGLang, no GPU.

    python benchmarks/scale.py
    python benchmarks/scale.py --engines 1,64,1000 --queued 20000

Engines are simulated, and scripted ones for syncs; torch is needed. A row per number of engines, each measured
``--repeats`` times, of which the medians are shown. Times are CPU time of all threads of this process, which does
nothing but compute. Garbage collections are part of them, of what the measurement itself made: in a process that holds
much else, each full one takes longer.

The dispatcher and requests:

    free slot us     to take a slot that is free, and to release it
    from queue us    to release a slot and give it to the next in the queue
    wake one us      to look at one engine whose state or limit has changed, with a full queue
    wake all us      to look at all of them
    slot KiB         memory of a task that waits for a slot, the task included
    stream KiB       memory of a whole ``rollout.stream`` that waits
    cancel s         to cancel every ``rollout.stream`` in the queue, until all their tasks have ended
    engine KiB       memory of an engine in a started rollout, without what stands for it in a real one: its client
    sample us        a sample of a ``rollout.generate`` of many prompts, the simulated engine's part included
    call us          a ``rollout.generate`` of one prompt, the same

Weight syncs, of one tensor of 8 numbers, over the portable path:

    start us         to start a rollout, for each engine
    first ms         a sync that plans
    again ms         one with a plan that holds: pause, three commands, resume
    again us         the same, for each engine
    died ms          one after an engine has died: it plans anew, without that
    back ms          one after that engine has come back: it plans anew
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import logging
import math
import os
import platform
import shlex
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import NamedTuple, TypeVar

import anyio
import torch

import sglrollout as sr
from sglrollout.pool.dispatcher import Dispatcher, Lease
from sglrollout.testing import ScriptedEngine, SimulatedEngine

_T = TypeVar("_T")
_SLOTS = 16
_GROUP = 8
_NUM_WAKES = 200
_NUM_CALLS, _NUM_SAMPLES = 200, 2000
_NUM_SYNCS = 5
_RESTART_S = 30
_CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
_REQUEST_COLUMNS = [
    "free slot us",
    "from queue us",
    "wake one us",
    "wake all us",
    "slot KiB",
    "stream KiB",
    "cancel s",
    "engine KiB",
    "sample us",
    "call us",
]
_SYNC_COLUMNS = [
    "start us",
    "first ms",
    "again ms",
    "again us",
    "died ms",
    "back ms",
]


class RequestCost(NamedTuple):
    """One row, or one measurement of it; see the columns above."""

    free_slot_us: float
    from_queue_us: float
    wake_one_us: float
    wake_all_us: float
    slot_kib: float
    stream_kib: float
    cancel_s: float
    engine_kib: float
    sample_us: float
    call_us: float


class SyncCost(NamedTuple):
    """The same of syncs."""

    start_us: float
    first_ms: float
    again_ms: float
    again_us: float
    died_ms: float
    back_ms: float


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


async def memory_of_engines(num_engines: int) -> float:
    """KiB for each, beside those of a rollout of one."""
    return (await _memory_of_rollout(num_engines + 1) - await _memory_of_rollout(1)) / num_engines


async def _memory_of_rollout(num_engines: int) -> float:
    engines = [SimulatedEngine(f"engine-{i}") for i in range(num_engines)]
    with traced() as num_bytes:
        rollout = sr.AsyncRolloutEngine(config=_CONFIG, engines=engines)
        await rollout.start()
        await _turns()
    await rollout.close()
    return num_bytes[0] / 1024


async def cost_of_calls(num_engines: int) -> tuple[float, float]:
    """Microseconds of a sample among many, and of a call of its own."""
    engines = [SimulatedEngine(f"engine-{i}", max_running=_SLOTS, token_s=0) for i in range(num_engines)]
    prompts = [[number // 1000, number % 1000] for number in range(_NUM_SAMPLES)]
    many, single = Timer(), Timer()
    async with sr.AsyncRolloutEngine(config=_CONFIG, engines=engines) as rollout:
        await rollout.generate(prompts[:1])
        with many():
            await rollout.generate(prompts)
        with single():
            for prompt in prompts[:_NUM_CALLS]:
                await rollout.generate([prompt])
    return many.us_each(_NUM_SAMPLES), single.us_each(_NUM_CALLS)


# ---------------------------------------------------------------- weight syncs


async def cost_of_syncs(num_engines: int) -> SyncCost:
    engines = [ScriptedEngine(f"engine-{i}", max_running=_SLOTS) for i in range(num_engines)]
    rollout = sr.AsyncRolloutEngine(config=_CONFIG.replace(max_restarts=1, restart_delay_s=0.2), engines=engines)
    starting = Timer()
    async with contextlib.AsyncExitStack() as stack:
        with starting():
            await stack.enter_async_context(rollout)
        source = sr.TensorSource({"weight": torch.zeros(8)})
        syncer = await stack.enter_async_context(sr.WeightSyncer(rollout, source))

        async def sync_ms(num_expected: int) -> float:
            timer = Timer()
            with timer():
                report = await syncer.sync()
            assert report.num_engines == num_expected
            return timer.seconds * 1e3

        first_ms = await sync_ms(num_engines)
        again_ms = statistics.median([await sync_ms(num_engines) for _ in range(_NUM_SYNCS)])
        engines[0].die()
        died_ms = await sync_ms(num_engines - 1) if num_engines > 1 else math.nan
        with anyio.fail_after(_RESTART_S):
            while rollout.engines[0].state == "restarting":  # noqa: ASYNC110 - there is no event for that
                await anyio.sleep(0.02)
        back_ms = await sync_ms(num_engines)
    start_us = starting.us_each(num_engines)
    return SyncCost(start_us, first_ms, again_ms, again_ms / num_engines * 1e3, died_ms, back_ms)


# ---------------------------------------------------------------- the tables


def cost_of_requests(num_engines: int, num_queued: int) -> RequestCost:
    num_traced = num_queued // 4  # tracing is slow
    return RequestCost(
        _run(cost_of_free_slots(num_engines, num_queued)),
        *_run(cost_of_queue(num_engines, num_queued)),
        _run(memory_of_queue(num_engines, num_traced)),
        _run(cost_of_streams(num_engines, num_traced, trace=True)),
        _run(cost_of_streams(num_engines, num_queued, trace=False)),
        _run(memory_of_engines(num_engines)),
        *_run(cost_of_calls(num_engines)),
    )


def _run(measurement: Coroutine[None, None, _T]) -> _T:
    gc.collect()
    gc.freeze()
    return asyncio.run(measurement)


def show(columns: list[str], engines: list[int], repeats: int, measure: Callable[[int], tuple[float, ...]]) -> None:
    """A table, row by row, and a line on the standard error of how far it is."""
    print("  ".join(["engines", *columns]), flush=True)
    begun_s = time.monotonic()
    for num_engines in engines:
        costs = []
        for repeat in range(repeats):
            _say(f"{num_engines:,} engines, repeat {repeat + 1} of {repeats}, {time.monotonic() - begun_s:.0f} s")
            costs.append(measure(num_engines))
        _say("")
        medians = [statistics.median(column) for column in zip(*costs, strict=True)]
        cells = [f"{value:{len(title)}.2f}" for title, value in zip(columns, medians, strict=True)]
        print("  ".join([f"{num_engines:7,}", *cells]), flush=True)


def _say(line: str) -> None:
    print(f"\r{line:<60}\r", end="", file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", type=_numbers, default=[1, 8, 64, 256, 1000], help="numbers of engines, with commas"
    )
    parser.add_argument("--queued", type=int, default=20_000, help="requests that wait")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.disable()  # engines that die say so
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{shlex.join(['python', *sys.argv])}\nPython {platform.python_version()}, {machine}\n")
    show(_REQUEST_COLUMNS, args.engines, args.repeats, lambda number: cost_of_requests(number, args.queued))
    print()
    _run(cost_of_syncs(1))  # which loads what a sync needs
    show(_SYNC_COLUMNS, args.engines, args.repeats, lambda number: _run(cost_of_syncs(number)))


if __name__ == "__main__":
    main()
