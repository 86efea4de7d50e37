"""The syncer's own thread: for torch and sockets, which block. A daemon, so that a script can always exit."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import anyio

T = TypeVar("T")
_STOP_S = 3.0


class _Call(NamedTuple):
    future: Future[Any]
    call: Callable[[], Any]
    cancelled: threading.Event


class Worker:
    """Runs calls one after the other on one thread, without gradients.

    Args:
        device: torch's device for it, or ``None`` on a CPU.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._here = threading.local()
        self._thread: threading.Thread | None = None

    def is_cancelled(self) -> bool:
        """Whether the call that asks, on this thread, was given up. It should ask now and then."""
        return bool(self._here.cancelled.is_set())

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` there. Cancelling the wait tells the call, and gives it a moment to stop."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, args=(self._calls,), name="sglrollout-weights", daemon=True
            )
            self._thread.start()
        future: Future[T] = Future()
        item = _Call(future, call, threading.Event())
        self._calls.put(item)
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            item.cancelled.set()
            with anyio.CancelScope(shield=True):
                await self._give_up(waiting)
            raise

    async def _give_up(self, waiting: asyncio.Future[Any]) -> None:
        await asyncio.wait([waiting], timeout=_STOP_S)
        if not waiting.done():  # it waits on another rank, and has a deadline of its own: later calls cannot
            self._calls.put(None)
            self._calls, self._thread = queue.SimpleQueue(), None
            waiting.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody will ask for it
        elif not waiting.cancelled():
            waiting.exception()

    def close(self) -> None:
        """End the thread once its call is over."""
        self._calls.put(None)
        self._thread = None

    def _serve(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        import torch

        with torch.no_grad():
            while self._serve_one(calls.get()):
                pass  # nothing of a call is held until the next one comes

    def _serve_one(self, item: _Call | None) -> bool:
        if item is None:
            return False
        import torch

        self._here.cancelled = item.cancelled
        try:
            if self.device is not None:
                torch.cuda.set_device(self.device)
            item.future.set_result(item.call())
        except BaseException as error:
            item.future.set_exception(error)
        return True
