"""Threads for the user's blocking code: rewards, filters, tools and environments.  Imports nothing of ours."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import anyio
from anyio.lowlevel import RunVar

MOST_TOOLS = 128
_numbers = itertools.count()


class Worker:
    """One thread that makes calls one after another. Cancelling a wait leaves its call to itself.

    Not anyio's worker threads: they are no daemons, so that a tool that hangs would keep the script from exiting, and
    an environment's calls would come on one thread now and on another then, which sqlite3 or a browser would refuse.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[[], Any], on_end: Callable[[], None] | None = None) -> Any:
        """What ``function`` gives, or raises.

        Args:
            on_end: called on the event loop once the thread has made the call, also when nobody waits for it any more.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def report(value: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result((value, error))  # an exception set on a future must not be a StopIteration
            if on_end is not None:
                on_end()

        def job() -> None:
            value, error = None, None
            try:
                value = context.run(function)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(report, value, error)

        self.start()
        self._jobs.put(job)
        value, error = await future
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        """End the thread, once it has made the call it is at."""
        self._jobs.put(None)

    def start(self) -> None:
        """Have the thread.

        Raises:
            RuntimeError: this machine has none left.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"sglrollout-user-{next(_numbers)}", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job


class StuckThreadsError(RuntimeError):
    """So many calls run on past their timeout that there is no end of it."""


class CallTimeoutError(TimeoutError):
    """A call did not end in time. What the call itself raises is never this."""


class Workers:
    """So many threads for short calls, which end when there is nothing to call.

    A call that outlives its timeout keeps its thread, and is counted.

    Args:
        most: threads that make calls at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots = anyio.Semaphore(most)
        self._idle: list[Worker] = []
        self._num_busy = self.num_stuck = 0
        """Calls that still run, past their timeout."""

    async def call(self, function: Callable[[], Any], timeout_s: float | None) -> Any:
        """What ``function`` gives, or raises; the wait for a thread is not counted.

        Raises:
            CallTimeoutError: it takes longer; its thread is left to it.
            StuckThreadsError: too many calls did.
        """
        async with self._slots:
            if self.num_stuck >= 4 * self._most:
                raise StuckThreadsError(f"{self.num_stuck} calls run on past their timeout")
            worker = self._idle.pop() if self._idle else Worker()
            worker.start()
            self._num_busy += 1
            made = left = False

            def back() -> None:
                nonlocal made
                made = True
                self._num_busy -= not left
                self.num_stuck -= left
                worker.end() if left else self._idle.append(worker)
                if not self._num_busy:
                    self._end_idle()

            try:
                with anyio.move_on_after(timeout_s):
                    return await worker.call(function, back)
                raise CallTimeoutError(f"it did not finish within {timeout_s:g} s")
            finally:
                if not made:
                    left = True
                    self._num_busy -= 1
                    self.num_stuck += 1
                    if not self._num_busy:
                        self._end_idle()

    def _end_idle(self) -> None:
        while self._idle:
            self._idle.pop().end()


_tool_workers: RunVar[Workers] = RunVar("sglrollout_tool_workers")


def tool_workers() -> Workers:
    """The threads of all blocking tools on this event loop."""
    try:
        return _tool_workers.get()
    except LookupError:
        _tool_workers.set(Workers(MOST_TOOLS))
        return _tool_workers.get()


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is to be awaited: a coroutine function, or an object with such a ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def outcome(function: Callable[[], Any], asynchronous: bool, worker: Worker) -> Any:
    """What a user's function gives: awaited, or called on ``worker``'s thread."""
    value = function() if asynchronous else await worker.call(function)
    return await value if inspect.isawaitable(value) else value
