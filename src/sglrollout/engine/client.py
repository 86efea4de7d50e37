"""The client of one engine: starts its host, talks to it, and knows when it is gone."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import anyio

from sglrollout.concurrency import unwrapped
from sglrollout.engine.launcher import HostProcess, HostThread, Launcher
from sglrollout.engine.protocol import Request
from sglrollout.errors import (
    ChannelError,
    EngineDiedError,
    EngineRequestError,
    EngineStartError,
    LifecycleError,
    fresh,
)
from sglrollout.version import __version__
from sglrollout.wire.channel import Channel, client_channel
from sglrollout.wire.messages import (
    HOST_ALONE,
    PROTOCOL,
    Abort,
    Command,
    Died,
    EngineInfo,
    Finish,
    FromHost,
    Generate,
    Hello,
    Launch,
    LaunchFailed,
    Load,
    Outputs,
    Reply,
    Stop,
    ToHost,
)

_LOG_TAIL_LINES = 30
_LAST_WORDS_S = 0.25
_log = logging.getLogger("sglrollout.engine")

T = TypeVar("T")


class EngineClient:
    """One engine and the host that runs it. See :class:`sglrollout.engine.protocol.Engine` for its contract.

    Args:
        name: for messages, for example ``engine-0``.
        launch: the engine's arguments; its scratch directory is filled in here.
        devices: UUIDs of the GPUs it may see, in TP rank order; empty on a CPU.
        isolation: ``process`` or ``thread``.
        start_timeout_s, close_timeout_s, control_timeout_s: deadlines of the waits on the host.
        log_dir: where its log stays after it is closed; ``None``: a temporary place.
    """

    def __init__(
        self,
        name: str,
        launch: Launch,
        devices: Sequence[str] = (),
        *,
        isolation: str = "process",
        start_timeout_s: float = 600.0,
        close_timeout_s: float = 10.0,
        control_timeout_s: float = 60.0,
        log_dir: str | None = None,
    ) -> None:
        self.name, self.url = name, ""
        self.devices: Sequence[str] = tuple(devices)
        self.on_load: Callable[[Load], None] | None = None
        self.on_death: Callable[[Exception], None] | None = None
        self._launch, self._isolation = launch, isolation
        self._start_timeout_s, self._close_timeout_s = start_timeout_s, close_timeout_s
        self._control_timeout_s = control_timeout_s
        self._log_dir = log_dir
        self._next_id = 0  # goes on from life to life: what is of an earlier one is never taken for one of this
        self._death: Exception | None = None
        self._closing = False
        self._begin_life()

    def _begin_life(self) -> None:
        self.info: EngineInfo | None = None
        self.load: Load | None = None
        self.progress = self.num_outputs = self.num_unanswered = 0
        self._host: Launcher | None = None
        self._channel: Channel[FromHost, ToHost] | None = None
        self._requests: dict[int, Request] = {}
        self._replies: dict[int, _Awaited] = {}

    # ------------------------------------------------------------ life

    @property
    def alive(self) -> bool:
        return self.info is not None and self._death is None and not self._closing

    @property
    def stage(self) -> str:
        if self._host is None:
            return "not started"
        return "ready" if self.alive else (self._host.log_tail(1).strip()[-90:] or "starting")

    async def start(self) -> EngineInfo:
        """Start the host and build the engine in it. Once it has died, and :meth:`run` returned, it may start again.

        Raises:
            EngineStartError: it failed, or the deadline passed; with the tail of the log.
            LifecycleError: it is up, or closed.
        """
        if self._closing or self.alive:
            raise LifecycleError(f"{self.name} cannot start: it is {'closed' if self._closing else 'up'}")
        self._begin_life()
        try:
            with anyio.fail_after(self._start_timeout_s):
                self.info = await self._beside_the_host(self._bring_up)
            self._death = None
        except TimeoutError:
            tail = self._log_tail()
            await self._give_up()
            message = f"not ready after start_timeout_s={self._start_timeout_s:g} s"
            raise EngineStartError(self.name, message, tail) from None
        except (_LaunchError, ChannelError) as error:
            tail = self._log_tail()
            await self._give_up()
            raise EngineStartError(self.name, str(error), tail) from None
        except BaseException:
            await self._give_up()
            raise
        return self.info

    async def _bring_up(self) -> EngineInfo:
        channel = self._channel
        assert channel is not None
        assert self._host is not None
        hello = Hello(PROTOCOL, os.getpid(), __version__)
        await channel.handshake(hello)
        channel.send(self._launch)
        answer = await channel.receive()
        match answer:
            case EngineInfo():
                return answer
            case LaunchFailed():
                raise _LaunchError(answer.reason)
            case None:
                raise _LaunchError(f"its host ended while the engine was starting ({self._how_it_ended()})")
            case _:
                raise ChannelError(f"expected the launch's result, got {type(answer).__name__}")

    async def run(self) -> None:
        """Take the host's messages until the channel ends."""
        reason = "its host is gone"
        try:
            reason = await self._beside_the_host(self._receive) or f"{reason} ({self._how_it_ended()})"
        except ChannelError as error:
            reason = str(error)
        except Exception as error:
            _log.exception("%s: its client failed", self.name)
            reason = f"its client failed: {type(error).__name__}: {error}"
        if not self._closing:
            self._die(reason)
            await self._give_up()

    async def kill(self, reason: str) -> None:
        """End it by force, as a crash would."""
        if self.alive:
            self._die(reason)
        await self._give_up()

    async def _receive(self) -> str:
        """Until the channel ends, or the host says that its engine did, of which it then may take long to clear up.

        Returns:
            the reason, if the host gave one.
        """
        channel = self._channel
        assert channel is not None
        while (message := await channel.receive()) is not None:
            if isinstance(message, Died):
                return message.reason
            self._take(message)
        return ""

    async def _beside_the_host(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run ``call``, which waits on the channel, and end the channel once the host has ended.

        The kernel does that too, unless a process that was forked from this one at the wrong moment (a DataLoader's
        worker) holds the host's end of it.
        """
        if self._host is None:
            await self._connect()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._close_after_host)
                result = await call()
                tasks.cancel_scope.cancel()
        except ExceptionGroup as group:
            raise unwrapped(group) from None
        return result

    async def _connect(self) -> None:
        ours, theirs = socket.socketpair()
        host_class = HostProcess if self._isolation == "process" else HostThread
        try:
            self._host = host_class(self.name, theirs, self.devices, self._log_dir)
        except BaseException as error:
            ours.close()
            theirs.close()
            if isinstance(error, OSError):
                raise _LaunchError(f"its host could not be started: {error}") from error
            raise
        self._launch.scratch_dir = str(self._host.scratch_dir)
        self._channel = await client_channel(ours)

    async def _close_after_host(self) -> None:
        assert self._host is not None
        assert self._channel is not None
        await self._host.ended()
        await anyio.sleep(_LAST_WORDS_S)
        await self._channel.abort()

    def _how_it_ended(self) -> str:
        return self._host.how_it_ended() if self._host is not None else "never started"

    def _take(self, message: FromHost) -> None:
        match message:
            case Outputs():
                self.progress += 1
                self.num_outputs += 1
                self.num_unanswered = 0
                requests, version = self._requests, message.weight_version
                for output in message.outputs:
                    request = requests.get(output.request_id)
                    if request is None:
                        continue
                    if output.finish is not None:
                        del requests[output.request_id]
                    request.deliver(output, version)
            case Load():
                if self.load is None or self.load.published_s != message.published_s:
                    self.progress += 1
                    self.num_unanswered = 0
                self.load = message
                if self.on_load is not None:
                    self.on_load(message)
            case Reply():
                if not message.timed_out:  # also of one that nobody waits for any more
                    self.num_unanswered = 0
                awaited = self._replies.pop(message.command_id, None)
                if awaited is not None:
                    awaited.answers.append(message)
                    awaited.event.set()
            case _:
                raise ChannelError(f"unexpected {type(message).__name__}")

    def _die(self, reason: str) -> None:
        """Fail all it held, then tell the pool. Once in a life."""
        if self._death is not None:
            return
        self._death = EngineDiedError(self.name, reason, self._log_tail())
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.end(Finish("error", message=reason), self._death)
        for awaited in self._replies.values():
            awaited.event.set()
        if self.on_death is not None:
            self.on_death(self._death)

    async def close(self) -> None:
        """Ask the host to stop, then make sure: no process, socket or file of it stays."""
        self._closing = True
        for request in list(self._requests.values()):
            request.end(Finish("abort", message="the rollout was closed"), LifecycleError("the rollout was closed"))
        self._requests.clear()
        for awaited in self._replies.values():
            awaited.event.set()
        with anyio.CancelScope(shield=True):
            if self._channel is not None and self.info is not None and self._death is None:
                self._channel.send(Stop())
                if self._host is not None:
                    await self._host.wait(self._close_timeout_s)
            await self._give_up()

    async def _give_up(self) -> None:
        """End the host by force and free what it held. Idempotent."""
        with anyio.CancelScope(shield=True):
            if self._host is not None:
                await self._host.destroy(self._close_timeout_s)
            if self._channel is not None:
                await self._channel.abort()

    def _log_tail(self) -> str:
        return self._host.log_tail(_LOG_TAIL_LINES) if self._host is not None else ""

    # ------------------------------------------------------------ work

    @property
    def num_pending(self) -> int:
        return sum(awaited.name != HOST_ALONE for awaited in self._replies.values())

    async def submit(self, request: Request) -> None:
        """Hand a request to the engine.

        Raises:
            EngineDiedError: the engine is gone.
        """
        self._check_alive()
        assert self._channel is not None
        request.request_id = self._next_id
        self._next_id += 1
        self._requests[request.request_id] = request
        self._channel.send(
            Generate(request.request_id, list(request.prompt_ids), request.sampling, request.chunk_tokens)
        )
        with contextlib.suppress(ChannelError):  # run() finds the channel closed too, and fails all requests with why
            await self._channel.drain()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise fresh(self._death)
        if not self.alive:
            raise LifecycleError(f"{self.name} is not running: the rollout is closed, or not started")

    def abort(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None and self._channel is not None:
            self._channel.send(Abort([request.request_id]))

    def drop(self, error: Exception) -> None:
        requests, self._requests = self._requests, {}
        if requests and self._channel is not None:
            self._channel.send(Abort(list(requests)))
        for request in requests.values():
            request.end(Finish("error", message=str(error)), fresh(error))

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Run ``name`` in the host.

        Args:
            timeout_s: passed on to the method, if given. Its answer is waited for ``control_timeout_s`` longer, or for
                so long where there is none.

        Raises:
            EngineRequestError: it failed there, or did not answer in time.
            EngineDiedError: the engine ended meanwhile.
        """
        self._check_alive()
        assert self._channel is not None
        command_id, event, answers = self._next_id, anyio.Event(), list[Reply]()
        self._next_id += 1
        self._replies[command_id] = _Awaited(name, event, answers)
        given = {} if timeout_s is None else {"timeout_s": timeout_s}
        self._channel.send(Command(command_id, name, {**arguments, **given}))  # type: ignore[arg-type]
        within_s = self._control_timeout_s + (timeout_s or 0.0)
        try:
            with anyio.fail_after(within_s):
                await event.wait()
        except TimeoutError:
            self.num_unanswered += 1
            raise EngineRequestError(self.name, f"{name} was not answered within {within_s:g} s", True) from None
        finally:
            self._replies.pop(command_id, None)
        if not answers:
            raise (
                fresh(self._death)
                if self._death
                else EngineRequestError(self.name, f"it was closed before {name} was answered")
            )
        self.num_unanswered += answers[0].timed_out
        if answers[0].error:
            raise EngineRequestError(self.name, f"{name} failed: {answers[0].error}", answers[0].timed_out)
        return answers[0].value


class _Awaited(NamedTuple):
    """A command whose answer has not come."""

    name: str
    event: anyio.Event
    answers: list[Reply]


class _LaunchError(Exception):
    """The host said that, or the channel showed that, the launch failed."""
