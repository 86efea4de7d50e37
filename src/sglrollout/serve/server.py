"""uvicorn inside the user's event loop: without its signal handlers, its logging setup, or a port of its own choice."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglrollout.errors import LifecycleError
from sglrollout.serve.app import Gate, build_app
from sglrollout.serve.service import Service

_log = logging.getLogger("sglrollout.serve")

START_S = 10.0
HEAD_S = 20.0
"""For a request's head to arrive whole; a connection that was served may also idle so long."""
GRACE_S = 2
"""For answers that are being sent, when the endpoint is closed; those that are being made are ended at once."""


class _Config(uvicorn.Config):
    def configure_logging(self) -> None:
        """Leave the user's logging alone."""


class _Protocol(H11Protocol):
    """Ends a connection on which no whole head comes: each takes a file descriptor of the trainer's, key or no key."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._stop_waiting()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()


class _Uvicorn(uvicorn.Server):
    """Signals are the user's; and it says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = anyio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class Server:
    """An endpoint's HTTP server.

    Args:
        bound: the socket it listens on, which it closes in the end.
    """

    def __init__(self, service: Service, api_key: str, bound: socket.socket) -> None:
        self._gate, self._bound = Gate(), bound
        config = _Config(
            build_app(service, self._gate, api_key),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            workers=1,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._uvicorn = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once it takes requests.

        Raises:
            LifecycleError: it did not come up.
        """
        serving = self._uvicorn.serve(sockets=[self._bound])
        self._task = asyncio.get_running_loop().create_task(serving, name="sglrollout-openai")
        self._task.add_done_callback(lambda task: self._uvicorn.up.set())
        with anyio.move_on_after(START_S):
            await self._uvicorn.up.wait()
        if self._task.done() or not self._uvicorn.started:
            await self.close()
            raise LifecycleError("the HTTP server did not come up: see the log")

    async def close(self) -> None:
        """Take nothing more, end what is being served, and wait for all of it. Safe to call twice."""
        self._gate.close()
        for listener in getattr(self._uvicorn, "servers", ()):
            listener.close()
        self._uvicorn.should_exit = True
        await _end(self._task, GRACE_S + 3.0)
        for connection in tuple(self._uvicorn.server_state.connections):
            connection.transport.abort()
        for task in tuple(self._uvicorn.server_state.tasks):
            await _end(task, 0.0)
        self._bound.close()


async def _end(task: asyncio.Task[None] | None, within_s: float) -> None:
    """Wait for a task; cancel one that takes longer. A failure of it is logged."""
    if task is None:
        return
    await asyncio.wait([task], timeout=within_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
    if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
        _log.error("the HTTP server failed", exc_info=failure)
