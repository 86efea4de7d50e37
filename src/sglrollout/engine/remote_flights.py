"""The requests that one remote server has of this pool: sent, read as they are answered, and dropped there."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial

import anyio
from anyio.abc import TaskGroup

from sglrollout.concurrency import in_parallel
from sglrollout.engine.http import Http, RefusedError, UnreachableError, refusal, whole
from sglrollout.engine.protocol import Request
from sglrollout.engine.remote_answers import AnswerReader, body_of
from sglrollout.engine.remote_health import Health
from sglrollout.engine.remote_server import Server
from sglrollout.engine.sse import EventReader, EventTooLongError
from sglrollout.errors import EngineConnectionError, EngineRequestError
from sglrollout.wire.messages import Finish

_MOST_EVENT_BYTES = 64 << 20
_MOST_TRIES = 3
_MOST_BROKEN = 3
_PATIENCE_S = 0.25
_DRAIN_S = 1.0
_ABORT_S = 2.0
_MOST_ABORTS_AT_ONCE = 8
_SECOND_ABORT_S = 0.5
_MOST_ORPHANS = 10_000
_DONE = b"[DONE]"
_NEVER = float("inf")
_log = logging.getLogger("sglrollout.engine")


class _Flight:
    """One request on its way.

    Attributes:
        scope: of its task, for ends that come from here.
        idle: of one try, with a deadline for the next part.
        timed: something has come, so that time counts.
        left: it is another's, or has ended; nothing that comes may reach the request.
    """

    __slots__ = ("begun_s", "idle", "left", "request", "rid", "scope", "timed")

    def __init__(self, request: Request, rid: str) -> None:
        self.request, self.rid = request, rid
        self.scope, self.idle = anyio.CancelScope(), anyio.CancelScope()
        self.left = self.timed = False
        self.begun_s = time.monotonic()


class Flights:
    """All of one life of an engine.

    Args:
        name, url: of the engine, for messages.
        http: what requests are sent by.
        servers: what they are dropped by.
        incremental: streams bring new tokens alone.
        idle_s: between two parts of a stream, unless the engine ``is_paused``.
        refused: options of sampling that would not reach the server.
        orphans: ids of requests that a server may still run, and nobody wants; they outlive this life.
        on_output: something has come.
        on_broken: called with the reason when it answers probes and no request.
    """

    def __init__(
        self,
        name: str,
        url: str,
        http: Http,
        servers: Sequence[Server],
        health: Health,
        *,
        incremental: bool,
        idle_s: float,
        refused: Collection[str],
        orphans: dict[str, None],
        is_paused: Callable[[], bool],
        on_output: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._name, self._url, self._http, self._servers, self._health = name, url, http, servers, health
        self._incremental, self._idle_s, self._orphans = incremental, idle_s, orphans
        self._refused = refused
        self._is_paused, self._on_output, self._on_broken = is_paused, on_output, on_broken
        self._flights: dict[int, _Flight] = {}
        self._tasks: TaskGroup | None = None
        self._aborts = anyio.CapacityLimiter(_MOST_ABORTS_AT_ONCE)
        self._num_broken, self._broken_s = 0, 0.0

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, tasks: TaskGroup) -> None:
        """Requests run in ``tasks`` from now on, those that came before, too."""
        self._tasks = tasks
        for flight in self._flights.values():
            tasks.start_soon(self._fly, flight)

    def stop(self) -> None:
        """Nothing is begun any more. What is left here, or dropped later, waits for :meth:`drop_orphans`."""
        self._tasks = None
        self._orphans |= dict.fromkeys(flight.rid for flight in self._flights.values())

    def add(self, request: Request, rid: str) -> None:
        flight = self._flights[request.request_id] = _Flight(request, rid)
        if self._tasks is not None:
            self._tasks.start_soon(self._fly, flight)

    # ------------------------------------------------------------ ends from here

    def leave(self, request: Request) -> None:
        """Nothing of it may come any more, and the server is to drop it. It has not ended by that."""
        flight = self._flights.pop(request.request_id, None)
        if flight is not None:
            self._leave(flight)

    def leave_all(self) -> list[Request]:
        """Those that it had."""
        flights, self._flights = list(self._flights.values()), {}
        for flight in flights:
            self._leave(flight)
        return [flight.request for flight in flights]

    def _leave(self, flight: _Flight) -> None:
        flight.left = True
        flight.scope.cancel()
        self._orphan(flight)

    def _orphan(self, flight: _Flight) -> None:
        self._orphans[flight.rid] = None
        if self._tasks is not None:
            self._tasks.start_soon(self._abort, flight)

    async def _abort(self, flight: _Flight) -> None:
        await self._drop(flight.rid)
        if time.monotonic() - flight.begun_s < 2 * _SECOND_ABORT_S or self._is_paused():
            await anyio.sleep(_SECOND_ABORT_S)  # the server may not have known it yet
            await self._drop(flight.rid)

    async def drop_orphans(self) -> None:
        """Have servers drop what nobody wants. What they could not be told of stays an orphan."""
        await in_parallel(partial(self._drop, rid) for rid in list(self._orphans)[:_MOST_ORPHANS])

    async def _drop(self, rid: str) -> None:
        """Tell all servers: which of a router's has it, it does not say."""
        async with self._aborts:
            told = [await self._tell(server, rid) for server in self._servers]
        if all(told):
            self._orphans.pop(rid, None)

    async def _tell(self, server: Server, rid: str) -> bool:
        try:
            await server.tell("/abort_request", {"rid": rid}, _ABORT_S)
        except RefusedError as error:
            _log.warning("%s: a request could not be aborted: %s", self._name, refusal(error, "admin_api_key"))
        except UnreachableError as error:
            _log.debug("%s: a request could not be aborted: %s", self._name, error)
            return False
        return True

    def time_anew(self) -> None:
        """A pause has begun or ended: time does not count, or counts, for what has begun to come."""
        for flight in self._flights.values():
            if flight.timed:
                self._rest(flight)

    # ------------------------------------------------------------ one request

    async def _fly(self, flight: _Flight) -> None:
        """Its life in the server. Whatever happens it ends, unless it is another's by then."""
        with flight.scope:
            try:
                await self._generate(flight)
            except RefusedError as error:
                message = refusal(error, "api_key")
                self._end(flight, message, EngineRequestError(self._name, message))
            except UnreachableError as error:
                await self._break(flight, error)
            except Exception as error:
                _log.exception("%s: a request failed", self._name)
                message = f"its client failed: {type(error).__name__}: {error}"
                self._end(flight, message, EngineRequestError(self._name, message))

    def _end(self, flight: _Flight, message: str, error: Exception) -> None:
        if not flight.left:
            self._flights.pop(flight.request.request_id, None)
            flight.left = True
            flight.request.end(Finish("error", message=message), error)

    async def _generate(self, flight: _Flight) -> None:
        """Ask, and take what comes. What was not sent may be sent again, and nothing else.

        Raises:
            UnreachableError, RefusedError
        """
        for name in self._refused:
            if name in flight.request.sampling:
                raise RefusedError(400, f"SGLang's router drops sampling.{name} without a word")
        for number in itertools.count(1):
            try:
                await self._ask(flight)
                return
            except UnreachableError as error:
                if error.sent or number == _MOST_TRIES:
                    raise
                await anyio.sleep(_PATIENCE_S)
                await self._health.verdict()  # it is dead, and this is cancelled, or it may be tried again

    async def _ask(self, flight: _Flight) -> None:
        body = body_of(flight.request, flight.rid, self._incremental)
        reader = AnswerReader(flight.request, self._incremental, partial(self._finished, flight))
        with anyio.CancelScope() as flight.idle:
            async with self._http.opened("POST", "/generate", body) as response:
                if body["stream"]:
                    await self._read(flight, reader, response.aiter_raw())
                else:
                    self._rest(flight)
                    self._note(reader.take(await whole(response)))
        if flight.left:
            return
        if flight.idle.cancelled_caught:
            raise UnreachableError(f"nothing came of a request for idle_timeout_s={self._idle_s:g} s")
        if not reader.finished:
            raise UnreachableError("its answer ended in the middle")

    async def _read(self, flight: _Flight, reader: AnswerReader, pieces: AsyncIterator[bytes]) -> None:
        events = EventReader(_MOST_EVENT_BYTES)
        async for piece in pieces:
            try:
                found = events.feed(piece)
            except EventTooLongError as error:
                raise UnreachableError(str(error)) from None
            for event in found:
                # Once it has ended the rest is read, and not looked at, so that the connection can be used again.
                if not flight.left and event != _DONE:
                    self._note(reader.take(event))
                    self._rest(flight)

    def _note(self, new: bool) -> None:
        if new:
            self._on_output()

    def _rest(self, flight: _Flight) -> None:
        """From now on the next part, or the rest, is due within a time."""
        flight.timed = True
        patience_s = _DRAIN_S if flight.left else _NEVER if self._is_paused() else self._idle_s
        flight.idle.deadline = anyio.current_time() + patience_s

    def _finished(self, flight: _Flight) -> None:
        """Its end has come, and is told to it next."""
        self._num_broken = 0
        self._flights.pop(flight.request.request_id, None)
        flight.left = True
        self._rest(flight)

    async def _break(self, flight: _Flight, error: UnreachableError) -> None:
        """The way to the server broke under a request. First of all: does the server live?"""
        if flight.left:
            return
        if flight.begun_s > self._broken_s:  # else it broke together with others
            self._num_broken, self._broken_s = self._num_broken + 1, time.monotonic()
        num_broken = self._num_broken
        await self._health.verdict()  # it is dead, and this is cancelled, or it answers
        if num_broken >= _MOST_BROKEN:
            self._on_broken(f"{num_broken} requests in a row broke, though it answers probes; the last: {error}")
            return
        await anyio.sleep(_PATIENCE_S * 2 ** (num_broken - 1))  # its slot stays taken: others are to go elsewhere
        self._orphan(flight)
        self._end(flight, str(error), EngineConnectionError(self._name, f"{self._url}: {error}"))
