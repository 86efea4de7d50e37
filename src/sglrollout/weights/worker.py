"""The syncer's own thread: for torch and sockets, which block. A daemon, so that a script can always exit."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio

T = TypeVar("T")
_STOP_S = 3.0


class Worker:
    """Runs calls one after the other on one thread, without gradients, with ``device`` as its CUDA device.

    Attributes:
        device: torch's device, or ``None`` on a CPU. Set it before the first call that needs it.
    """

    def __init__(self) -> None:
        self.device: Any = None
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    def is_cancelled(self) -> bool:
        """Whether the call that runs was given up; it should look now and then."""
        return self._cancelled.is_set()

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` there. Cancelling the wait tells the call, and gives it a moment to stop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="sglrollout-weights", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, call))
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await self._give_up(waiting)
            raise

    async def _give_up(self, waiting: asyncio.Future[Any]) -> None:
        self._cancelled.set()
        await asyncio.wait([waiting], timeout=_STOP_S)
        if not waiting.done():  # it waits on another rank, and has a deadline of its own: later calls cannot
            self._calls, self._thread = queue.SimpleQueue(), None
        elif not waiting.cancelled():
            waiting.exception()
        self._cancelled = threading.Event()

    def close(self) -> None:
        """End the thread once its call is over."""
        self._calls.put(None)
        self._thread = None

    def _serve(self) -> None:
        import torch

        calls = self._calls
        with torch.no_grad():
            while (item := calls.get()) is not None:
                future, call = item
                try:
                    if self.device is not None:
                        torch.cuda.set_device(self.device)
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
