"""An engine that is an SGLang HTTP server: on another machine, or on this one, and started by others."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from sglrollout.concurrency import in_parallel, unwrapped
from sglrollout.config import RolloutConfig
from sglrollout.engine.http import Http, RefusedError, UnreachableError, Verify, refusal
from sglrollout.engine.protocol import Request
from sglrollout.engine.remote_commands import CannotError, Commands
from sglrollout.engine.remote_flights import Flights
from sglrollout.engine.remote_health import Health
from sglrollout.engine.remote_model import facts_of
from sglrollout.engine.remote_options import check_key, check_seconds, checked_url
from sglrollout.engine.remote_router import DROPPED, workers_of
from sglrollout.engine.remote_server import (
    Access,
    Facts,
    NotSGLangError,
    Server,
    ServerLoad,
    UnsuitableError,
    describe,
    label_of,
    merged,
)
from sglrollout.errors import (
    ConfigError,
    EngineDiedError,
    EngineRequestError,
    EngineStartError,
    LifecycleError,
    fresh,
)
from sglrollout.wire.messages import HOST_ALONE, EngineInfo, Finish, Load

_POLL_S = 1.0
_FACTS_S = 30.0
_LAST_WORDS_S = 2.0
_log = logging.getLogger("sglrollout.engine")


class RemoteEngine:
    """An SGLang HTTP server (``python -m sglang.launch_server``) as an engine of a pool, beside local ones or alone.

    It is never started or stopped: when it is gone its samples go on in other engines, and it is waited for. See
    :class:`sglrollout.engine.protocol.Engine` for its contract. The server is to be this pool's alone.

    Args:
        url: scheme, host and port: ``http://10.0.0.2:30000``.
        api_key: the server's ``--api-key``.
        admin_api_key: its ``--admin-api-key``, if it has one: for pauses, aborts, versions and weights.
        name: for messages; ``remote-0`` and so on by default.
        router: the url is that of an SGLang router, whose workers are one engine together: samples go through the
            router, and what they are told goes to each.
        verify: TLS certificates are checked: ``True``, ``False``, a file of CA certificates, or an ``ssl.SSLContext``.
        trust_env: take proxies from the environment.
        dead_after_s: without an answer to three probes, it is taken for dead. A refused connection is known at once.
        idle_timeout_s: between two parts of a stream, unless it is paused. ``None`` is no bound.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        admin_api_key: str | None = None,
        name: str | None = None,
        router: bool = False,
        verify: Verify = True,
        trust_env: bool = False,
        dead_after_s: float = 30.0,
        idle_timeout_s: float | None = 60.0,
    ) -> None:
        self.url = checked_url(url)
        check_key("api_key", api_key)
        check_key("admin_api_key", admin_api_key)
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise ConfigError("remote.name", name, "must be a text that is not empty")
        check_seconds("dead_after_s", dead_after_s)
        if idle_timeout_s is not None:
            check_seconds("idle_timeout_s", idle_timeout_s)
        self.given_name = name
        self.name = name or "remote"
        self.devices: Sequence[str] = ()
        self.on_load: Callable[[Load], None] | None = None
        self.on_death: Callable[[Exception], None] | None = None
        self._access, self._is_router = Access(api_key, admin_api_key, verify, trust_env), router
        self._dead_after_s, self._idle_s = dead_after_s, float("inf") if idle_timeout_s is None else idle_timeout_s
        self._config: RolloutConfig | None = None
        self._next_id = 0
        self._prefix = secrets.token_hex(8)  # SGLang aborts by prefix: ids are of one width, and begin as no other's
        self._orphans: dict[str, None] = {}
        self._death: Exception | None = None
        self._closing = False
        self._winding_up = anyio.Lock()
        self._begin_life()

    def __repr__(self) -> str:
        return f"RemoteEngine({self.url!r}, name={self.name!r})"

    def join(self, config: RolloutConfig, name: str) -> None:
        """Become an engine of the pool that ``config`` describes.

        Raises:
            ConfigError: it is one of another.
        """
        if self._config is not None:
            raise ConfigError("remote", self.url, "must be an engine of one rollout, and is given to a second one")
        self._config, self.name = config, name

    def _begin_life(self) -> None:
        self.info: EngineInfo | None = None
        self.load: Load | None = None
        self.progress = self.num_outputs = self.num_unanswered = 0
        self._stage = "not started"
        self._http: Http | None = None
        self._servers: list[Server] = []
        self._flights: Flights | None = None
        self._commands: Commands | None = None
        self._pending: dict[int, tuple[str, anyio.CancelScope]] = {}
        self._over, self._ended = anyio.Event(), anyio.Event()
        self._runs = False
        self._health = Health(self._probe, self._dead_after_s)

    # ------------------------------------------------------------ life

    @property
    def alive(self) -> bool:
        return self.info is not None and self._death is None and not self._closing

    @property
    def stage(self) -> str:
        return "ready" if self.alive else self._stage

    async def start(self) -> EngineInfo:
        """Wait for the server, and ask it what it is. Once it was lost, and :meth:`run` returned, it may start again.

        Raises:
            EngineStartError: it did not answer in time, refuses the key, or cannot be an engine of this pool.
            LifecycleError: it is up, or closed.
        """
        if self._closing or self.alive:
            raise LifecycleError(f"{self.name} cannot start: it is {'closed' if self._closing else 'up'}")
        self._begin_life()
        timeout_s = 600.0 if self._config is None else self._config.start_timeout_s
        try:
            with anyio.fail_after(timeout_s):
                self.info = await self._connect()
        except TimeoutError:
            await self._wind_up()
            message = f"{self.url} did not answer within start_timeout_s={timeout_s:g} s ({self._stage})"
            raise EngineStartError(self.name, message) from None
        except UnsuitableError as error:
            await self._wind_up()
            raise EngineStartError(self.name, f"{self.url}: {error}") from None
        except BaseException:
            await self._wind_up()
            raise
        self._death = None
        return self.info

    async def _connect(self) -> EngineInfo:
        begun = time.monotonic()
        self._stage = f"asking {self.url}"
        model = await anyio.to_thread.run_sync(facts_of, self._config, abandon_on_cancel=True)
        access = self._access
        self._http = Http(  # the pool's throttle bounds its connections
            self.url, access.api_key, access.verify, most_connections=None, trust_env=access.trust_env
        )
        facts = await self._facts(self._http)
        info = describe(facts, model, time.monotonic() - begun)
        commands = self._commands = Commands(self._servers, info, label_of(facts))
        self._flights = Flights(
            self.name,
            self.url,
            self._http,
            self._servers,
            self._health,
            incremental=facts[0].incremental,
            idle_s=self._idle_s,
            refused=DROPPED if self._is_router else (),
            orphans=self._orphans,
            is_paused=lambda: commands.paused,
            on_output=self._note_output,
            on_broken=self._die,
        )
        try:  # a trainer that is gone may have paused it, and a former life may have left requests there
            for server in self._servers:
                await server.tell("/continue_generation", timeout_s=_FACTS_S)
            await self._flights.drop_orphans()
        except RefusedError as error:
            raise UnsuitableError(refusal(error, "admin_api_key")) from None
        except UnreachableError as error:
            raise UnsuitableError(f"it answers, and does not do as it is told: {error}") from None
        return info

    async def _facts(self, http: Http) -> list[Facts]:
        """What the server is, once it answers: it may still be loading."""
        while True:
            try:
                urls = await workers_of(http, _FACTS_S) if self._is_router else [self.url]
                self._servers = [Server(url, self._access) for url in urls]
                return [await server.facts(_FACTS_S) for server in self._servers]
            except NotSGLangError as error:
                raise UnsuitableError(str(error)) from None
            except RefusedError as error:
                hint = "" if error.status != 404 or self._is_router else ": for a router, give router=True"
                raise UnsuitableError(f"{refusal(error, 'api_key')}{hint}") from None
            except UnreachableError as error:
                if error.untrusted:
                    raise UnsuitableError(f"{error} (verify= of RemoteEngine says whom to trust)") from None
                self._stage = f"waiting for {self.url}: {error}"
            await self._close_servers()
            await anyio.sleep(_POLL_S)

    async def run(self) -> None:
        """Serve until closed, or dead."""
        assert self._flights is not None
        self._runs = True
        try:
            async with anyio.create_task_group() as tasks:
                self._flights.begin(tasks)
                tasks.start_soon(self._watch)
                await self._over.wait()
                tasks.cancel_scope.cancel()
        except Exception as error:
            _log.exception("%s: its client failed", self.name)
            self._die(f"its client failed: {type(error).__name__}: {unwrapped(error)}")
        finally:
            self._flights.stop()
            await self._wind_up()
            self._ended.set()

    async def kill(self, reason: str) -> None:
        """Leave the server, as if it had died; it goes on, without what it ran of this pool's."""
        self._die(reason)
        await self._until_over()

    async def _until_over(self) -> None:
        """Until nothing of this life is left."""
        if self._runs:
            await self._ended.wait()
        await self._wind_up()

    def _die(self, reason: str) -> None:
        """Fail all it held, then tell the pool. Once in a life."""
        if not self.alive:
            return
        self._death = EngineDiedError(self.name, f"{self.url}: {reason}")
        for request in self._give_up():
            request.end(Finish("error", message=reason), self._death)
        if self.on_death is not None:
            self.on_death(self._death)

    async def close(self) -> None:
        """Drop what it runs of this pool's, and close the connections. The server goes on."""
        self._closing = True
        for request in self._give_up():
            request.end(Finish("abort", message="the rollout was closed"), LifecycleError("the rollout was closed"))
        await self._until_over()

    def _give_up(self) -> list[Request]:
        """End commands and tasks; the requests, which nothing more comes of."""
        self._over.set()
        for _, scope in self._pending.values():
            scope.cancel()
        if self._flights is None:
            return []
        self._flights.stop()
        return self._flights.leave_all()

    async def _wind_up(self) -> None:
        """Abort what may run there, and close the connections. Idempotent."""
        with anyio.CancelScope(shield=True):
            async with self._winding_up:
                if self._flights is not None and self._http is not None and self._orphans:
                    with anyio.move_on_after(_LAST_WORDS_S):
                        await self._flights.drop_orphans()
                if self._http is not None:
                    await self._http.aclose()
                    self._http = None
                await self._close_servers()

    async def _close_servers(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            await server.aclose()

    # ------------------------------------------------------------ health

    async def _probe(self, timeout_s: float) -> None:
        loads: list[ServerLoad] = [ServerLoad()] * len(self._servers)

        async def ask(i: int, server: Server) -> None:
            loads[i] = await server.load(timeout_s)

        await in_parallel(partial(ask, i, server) for i, server in enumerate(self._servers))
        last, load = self.load, merged(loads, self._num_inflight)
        if last is None or last.published_s != load.published_s:
            self.progress += 1
            self.num_unanswered = 0
        self.load = load
        news = last is None or load.num_inflight or not load.says_the_same_as(last)
        if news and self.on_load is not None:
            self.on_load(load)

    @property
    def _num_inflight(self) -> int:
        return len(self._flights) if self._flights is not None else 0

    async def _watch(self) -> None:
        """Ask for its load until it does not answer, and what its weights are, which only this pool changes."""
        while not (reason := await self._health.look(busy=bool(self._num_inflight))):
            if self._health.is_due:
                try:
                    reason = await self._foreign_workers() or await self._foreign_weights()
                except (UnreachableError, RefusedError):
                    continue  # the next look will say
                if reason:
                    break
        self._die(reason)

    async def _foreign_workers(self) -> str:
        """Why a router's workers are not those that are told what this pool wants, if so."""
        if not self._is_router or self._http is None:
            return ""
        known, found = {server.url for server in self._servers}, set(await workers_of(self._http, self._dead_after_s))
        return "" if known == found else f"its workers were {sorted(known)}, and are {sorted(found)}"

    async def _foreign_weights(self) -> str:
        """Why its weights are not this pool's any more, if so: it was restarted too quickly for a probe to see it."""
        commands = self._commands
        assert commands is not None
        if self._pending or commands.paused:
            return ""
        expected = commands.label
        labels = [await server.label(self._dead_after_s) for server in self._servers]
        if self._pending or commands.label != expected or all(label == expected for label in labels):
            return ""
        found = ", ".join(map(repr, labels))
        return f"its weight version is {found}, and was {expected!r}: it was restarted, or others change its weights"

    # ------------------------------------------------------------ work

    @property
    def num_pending(self) -> int:
        return sum(name != HOST_ALONE for name, _ in self._pending.values())

    async def submit(self, request: Request) -> None:
        """Hand a request to the engine.

        Raises:
            EngineDiedError: the engine is gone.
        """
        self._check_alive()
        assert self._flights is not None
        request.request_id = self._next_id
        self._next_id += 1
        if not len(self._flights):
            self._health.hurry()
        self._flights.add(request, f"{self._prefix}{request.request_id:016x}")

    def _check_alive(self) -> None:
        if self._death is not None:
            raise fresh(self._death)
        if not self.alive:
            raise LifecycleError(f"{self.name} is not running: the rollout is closed, or not started")

    def abort(self, request: Request) -> None:
        if self._flights is not None:
            self._flights.leave(request)

    def drop(self, error: Exception) -> None:
        for request in self._flights.leave_all() if self._flights is not None else []:
            request.end(Finish("error", message=str(error)), fresh(error))

    def _note_output(self) -> None:
        self.progress += 1
        self.num_outputs += 1
        self.num_unanswered = 0

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Have the server do something.

        Args:
            timeout_s: how long it may take; ``control_timeout_s`` where there is none.

        Raises:
            EngineRequestError: it failed there, was not answered in time, or is not to be had of a remote engine.
            EngineDiedError: the engine ended meanwhile.
        """
        self._check_alive()
        command_id, scope = self._next_id, anyio.CancelScope()
        self._next_id += 1
        self._pending[command_id] = (name, scope)
        answer: dict[str, Any] = {}
        try:
            with scope:
                answer = await self._command(name, timeout_s, arguments)
        finally:
            self._pending.pop(command_id, None)
            if self._flights is not None:
                self._flights.time_anew()  # for it may have paused, or ended a pause
        if scope.cancelled_caught:
            raise fresh(self._death) if self._death else EngineRequestError(self.name, f"it was closed during {name}")
        self.num_unanswered = 0
        return answer

    async def _command(self, name: str, timeout_s: float | None, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self._commands is not None
        control_s = 60.0 if self._config is None else self._config.control_timeout_s
        within_s = control_s + (timeout_s or 0.0)
        try:
            with anyio.fail_after(within_s):
                return await self._commands.run(name, timeout_s or control_s, arguments)
        except TimeoutError:
            timed_out, message = True, f"was not answered within {within_s:g} s"
        except UnreachableError as error:
            await self._health.verdict()  # it is dead, and this is cancelled, or it answers
            timed_out, message = error.timed_out, f"failed: {error}"
        except RefusedError as error:
            timed_out, message = False, f"failed: {refusal(error, 'admin_api_key')}"
        except CannotError as error:
            timed_out, message = False, f"failed: {error}"
        self.num_unanswered += timed_out and name != HOST_ALONE
        raise EngineRequestError(self.name, f"{name} {message}", timed_out)


def checked_remote(
    remote: Sequence[RemoteEngine], config: RolloutConfig, builds_engines: bool
) -> list[tuple[RemoteEngine, str]]:
    """The remote engines of a rollout, with their names.

    Args:
        builds_engines: the rollout has those that ``config`` describes beside them.

    Raises:
        ConfigError: they are none, two are one server, or there is no engine at all.
    """
    if isinstance(remote, (str, RemoteEngine)) or not all(isinstance(engine, RemoteEngine) for engine in remote):
        raise ConfigError("remote", remote, "must be a list of sglrollout.RemoteEngine")
    if builds_engines and config.num_engines == 0 and not remote:
        raise ConfigError("num_engines", 0, "must be at least 1 where no remote engines are given")
    named = [(engine, engine.given_name or f"remote-{index}") for index, engine in enumerate(remote)]
    for field, values in (("url", [engine.url for engine, _ in named]), ("name", [name for _, name in named])):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(f"remote.{field}", twice, "must not be given twice")
    local = next((name for _, name in named if name.startswith("engine-")), None)
    if local is not None:
        raise ConfigError("remote.name", local, 'must not begin with "engine-", as the names of local engines do')
    return named
