"""An event loop whose clock is virtual: hours of waiting pass in the time that the work between them takes.

For tests and simulations of a rollout loop, the user's or ours:

    async def hours() -> float:
        await anyio.sleep(3600)
        return time.monotonic()

    assert run_virtually(hours) == 3600
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple
from unittest import mock

import anyio
import anyio.to_thread

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_MOST_TASKS_NAMED = 8
_RESOLUTION_S = time.get_clock_info("monotonic").resolution
_one_at_a_time = threading.Lock()


class DeadlockError(RuntimeError):
    """All that runs on a virtual clock waits for something that no timer will bring."""


def run_virtually(function: Callable[[*_Ts], Awaitable[_T]], *args: *_Ts, patience_s: float = 10.0) -> _T:
    """Run ``function(*args)`` as ``anyio.run`` does, on a clock that jumps to the next timer when nothing else is due.

    The clock starts at 0, and moves only when everything waits; code takes no time, however long it runs. While the
    call lasts, the event loop and ``time.monotonic`` read this clock, in every thread of the process;
    ``time.perf_counter``, ``time.time`` and a ``monotonic`` that was imported by its own name do not. Given the same
    program, two runs are the same, as far as it depends on time.

    The clock stands still while worker threads are busy (``anyio.to_thread`` with its default limiter,
    ``asyncio.to_thread``, ``run_in_executor``): a deadline never passes for their sake, but they must not wait for a
    timer of the loop. For what is outside of the process, a peer or a child, it does not wait: timers come first.

    A program that polls, by sleeping until something has happened, is never seen to be deadlocked; it needs a deadline
    of its own.

    Args:
        patience_s: real seconds to wait, when no timer can help, for a worker thread or a file descriptor.

    Raises:
        DeadlockError: nothing came in ``patience_s``. Names the tasks that wait.
        RuntimeError: another virtual clock runs in this process, or an event loop in this thread.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("another virtual clock runs in this process, and time.monotonic can only follow one")
    loop = _VirtualLoop(patience_s)
    try:
        with mock.patch.object(time, "monotonic", loop.time):
            return anyio.run(_watched, loop, function, args, backend_options={"loop_factory": lambda: loop})
    finally:
        loop.close()
        _one_at_a_time.release()


async def _watched(loop: _VirtualLoop, function: Callable[[*_Ts], Awaitable[_T]], args: tuple[*_Ts]) -> _T:
    loop.limiter = anyio.to_thread.current_default_thread_limiter()
    return await function(*args)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """Where the loop would wait for its next timer, the clock moves there instead."""

    def __init__(self, patience_s: float) -> None:
        self.now_s, self.patience_s = 0.0, patience_s
        self.limiter: anyio.CapacityLimiter | None = None
        self._num_in_executors = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s + _RESOLUTION_S == self.now_s:
            # asyncio calls what is due before now plus the clock's resolution. After some months that is now itself,
            # and what is due right now would never be called.
            self.now_s = math.nextafter(self.now_s, math.inf)

    @property
    def threads_are_busy(self) -> bool:
        return self._num_in_executors > 0 or (self.limiter is not None and self.limiter.borrowed_tokens > 0)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if when == math.inf:  # anyio.sleep_forever sets one; among the timers it would pass for something to come
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        future = super().run_in_executor(executor, func, *args)
        self._num_in_executors += 1
        future.add_done_callback(self._left_executor)
        return future

    def _left_executor(self, future: asyncio.Future[Any]) -> None:
        self._num_in_executors -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._num_in_executors += 1  # it waits for a thread that joins the others, from Python 3.12 on with a timer
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._num_in_executors -= 1

    def deadlock(self) -> DeadlockError:
        if self.threads_are_busy:
            reason = f"worker threads have been busy for {self.patience_s:g} real seconds, and all else waits for them"
        else:
            reason = "nothing is ready and no timer is set, so that nothing can happen any more"
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        waiting = [f"  {task.get_name()}: {_place(task)}" for task in tasks[:_MOST_TASKS_NAMED]]
        more = [f"  and {len(tasks) - len(waiting)} more"] if len(tasks) > len(waiting) else []
        return DeadlockError("\n".join([f"{reason}. At {self.now_s:g} s these tasks wait:", *waiting, *more]))


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is not None and not self._loop.threads_are_busy:
            self._loop.pass_time(timeout)
            return events
        events = super().select(self._loop.patience_s)
        if not events:
            raise self._loop.deadlock()
        return events


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: of the coroutines that await each other, the innermost one."""
    coroutine: Any = task.get_coro()
    while getattr(coroutine, "cr_await", None) is not None and hasattr(coroutine.cr_await, "cr_frame"):
        coroutine = coroutine.cr_await
    frame = getattr(coroutine, "cr_frame", None)
    return f"{frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}" if frame else repr(coroutine)
