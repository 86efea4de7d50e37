"""SGLang's own HTTP server as this library starts it: for engines on a machine that the trainer is not on."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import httpx

from sglrollout._address import bound_socket, check_address, local_address, reached_at, url_of
from sglrollout.config import RolloutConfig, config_of
from sglrollout.engine.launch import check_installed, server_args
from sglrollout.engine.launcher import ModuleProcess
from sglrollout.engine.placement import Placement, plan
from sglrollout.engine.scratch import is_ready
from sglrollout.errors import ConfigError, EngineDiedError, EngineStartError, LifecycleError

SERVER_OPTIONS = (
    *("model", "tokenizer", "revision", "trust_remote_code", "tp_size", "device", "devices", "dtype", "mem_fraction"),
    *("context_length", "seed", "deterministic", "memory_saver", "load_format", "quantization", "lora_rank"),
    *("lora_target_modules", "engine_args"),
    *("start_timeout_s", "close_timeout_s", "log_dir", "log_level"),
)
"""Those of RolloutConfig that say something of one server. The others are of a pool of engines."""

_OTHER_SERVERS = ("encoder_only", "grpc_mode", "smg_grpc_mode", "use_ray")
_POLL_S = 0.25
_HEALTH_S = 10.0
_END_S = 5.0
_TAIL_LINES = 30
_REASON_LINES = 400
_REASON = re.compile(r"^(?:\[[^]]*\] )?((?:[\w.]+\.)?\w*(?:Error|Exception)\b(?:: .*)?)$")


@dataclass(frozen=True, slots=True)
class Nodes:
    """Which of the machines that one server's TP ranks are spread over this is.

    Attributes:
        nnodes: their number.
        node_rank: this one's number, from 0, which is the one that takes requests.
        dist_init_addr: ``HOST:PORT`` of node 0, where they meet; ``None`` for one machine.
    """

    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None

    def check(self, config: RolloutConfig) -> None:
        """
        Raises:
            ConfigError: they do not go together, or not with ``config``.
        """
        nnodes, rank, address = self.nnodes, self.node_rank, self.dist_init_addr
        if type(nnodes) is not int or nnodes < 1:
            raise ConfigError("nnodes", nnodes, "must be an integer of at least 1")
        if type(rank) is not int or not 0 <= rank < nnodes:
            raise ConfigError("node_rank", rank, f"must be an integer from 0 to nnodes - 1 ({nnodes - 1})")
        if nnodes == 1:
            if address is not None:
                raise ConfigError("dist_init_addr", address, "must be None with nnodes=1: nobody else is to join")
            return
        if not isinstance(address, str) or not _is_host_and_port(address):
            raise ConfigError("dist_init_addr", address, 'must be "HOST:PORT" of node 0 with nnodes above 1')
        if config.tp_size % nnodes:
            raise ConfigError("tp_size", config.tp_size, f"must be a multiple of nnodes ({nnodes})")
        if config.devices is not None:
            rule = "must be None with nnodes above 1: set CUDA_VISIBLE_DEVICES on each machine"
            raise ConfigError("devices", config.devices, rule)

    def arguments(self) -> dict[str, Any]:
        """Those of SGLang, for more than one machine."""
        if self.nnodes == 1:
            return {}
        return {"nnodes": self.nnodes, "node_rank": self.node_rank, "dist_init_addr": self.dist_init_addr}


class SGLangServer:
    """SGLang's own HTTP server in a child process, made by :func:`launch_server`.

    ``async with`` starts it, waits until it is healthy, and ends it with all that it started. If this process is
    killed, the server ends by itself within a second or two.
    """

    def __init__(self, config: RolloutConfig, host: str, port: int, api_key: str | None, nodes: Nodes) -> None:
        check_address(host, port, api_key)
        _check(config)
        nodes.check(config)
        self.config, self._nodes = config, nodes
        self._host, self._port = host, port
        self._key = secrets.token_urlsafe(32) if api_key is None else api_key
        self._scheme = "https" if config.engine_args.get("ssl_certfile") else "http"
        self._process: ModuleProcess | None = None
        self._up = self._closed = self._killed = False

    # ------------------------------------------------------------ life

    async def start(self) -> Self:
        """Check the options against this machine, start, and wait until it is healthy.

        Raises:
            UnsupportedVersionError, ConfigError, PlacementError: nothing was started; among others, the port is taken.
            EngineStartError: it ended, or is not healthy after ``start_timeout_s``; nothing of it is left.
            LifecycleError: it was started before.
        """
        if self._process is not None or self._closed:
            raise LifecycleError("this server was started before: make a new one")
        placement = await anyio.to_thread.run_sync(partial(_place, self.config, self._nodes))
        with bound_socket(self._host, self._port) as reserved:  # nobody is given the port meanwhile
            self._port = reserved.getsockname()[1]
            self._process = self._begin(placement)
            try:
                with anyio.fail_after(self.config.start_timeout_s):
                    await self._until_healthy()
            except TimeoutError:
                waited = f"not healthy after start_timeout_s={self.config.start_timeout_s:g} s"
                await self._give_up(EngineStartError(self.name, waited, self.log_tail()))
            except BaseException as error:
                await self._give_up(error)
        self._up = True
        return self

    async def close(self) -> None:
        """End it: it may finish what it serves within ``close_timeout_s``, then it is killed. Idempotent."""
        self._closed = True
        process = self._process
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            if self._up:
                process.send_signal(signal.SIGINT)
                await process.wait(self.config.close_timeout_s)
                self._killed = self._killed or process.running
            await process.destroy(_END_S)

    def kill(self) -> None:
        """End it at once: for whoever waits in :meth:`close` and is tired of it."""
        if self._process is not None:
            self._killed = True
            self._process.send_signal(signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until it ends unasked.

        Raises:
            EngineDiedError: it did.
            LifecycleError: it is not up.
        """
        if self._process is None or not self._up:
            raise LifecycleError('this server is not up: use "async with"')
        await self._process.ended()
        if not self._closed:
            raise EngineDiedError(self.name, self._why("it ended unasked"), self.log_tail())

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ what it is

    @property
    def name(self) -> str:
        """As errors and its log name it, for example ``server-30000``."""
        return f"server-{self._port}"

    @property
    def url(self) -> str:
        """Where others reach it; with ``host="0.0.0.0"`` at this machine's address on the way out.

        Raises:
            LifecycleError: it was never up, so that its port may not be known.
        """
        if not self._up:
            raise LifecycleError('this server is not up: use "async with"')
        return url_of(reached_at(self._host), self._port, self._scheme)

    @property
    def api_key(self) -> str:
        """The key that requests must have, as ``Authorization: Bearer KEY``."""
        return self._key

    @property
    def pid(self) -> int:
        """Of its main process, the head of a process group of its own.

        Raises:
            LifecycleError: it was not started.
        """
        if self._process is None:
            raise LifecycleError('this server was not started: use "async with"')
        return self._process.pid

    @property
    def node_rank(self) -> int:
        """Which of its machines this is; only node 0 takes requests."""
        return self._nodes.node_rank

    @property
    def was_killed(self) -> bool:
        """Whether it had to be, since it did not end in time or :meth:`kill` was called."""
        return self._killed

    @property
    def stage(self) -> str:
        """What it is at, in a line: the last one of its log, while it starts."""
        if self._process is None:
            return "not started"
        last = re.sub(r"^\[[^]]*\] ", "", self._process.log_tail(1).strip())
        return "up" if self._up else (last[:90] or "starting")

    def log_tail(self, num_lines: int = _TAIL_LINES) -> str:
        """The last lines that its processes wrote; nothing after the end, unless ``log_dir`` keeps them."""
        return self._process.log_tail(num_lines) if self._process is not None else ""

    # ------------------------------------------------------------ inside

    def _begin(self, placement: Placement) -> ModuleProcess:
        arguments = served_args(self.config, placement, self._nodes, self._host, self._port, self._key)
        devices = [device.uuid for device in placement.devices]
        launch = os.memfd_create("sglrollout-server")
        try:
            with open(launch, "wb", closefd=False) as file:
                file.write(json.dumps(arguments).encode())
            os.lseek(launch, 0, os.SEEK_SET)
            return ModuleProcess("sglrollout.engine.server_main", self.name, launch, devices, self.config.log_dir)
        except OSError as error:
            raise EngineStartError(self.name, f"its process could not be started: {error}") from error
        finally:
            os.close(launch)

    async def _until_healthy(self) -> None:
        process = self._process
        assert process is not None
        url = url_of(local_address(self._host), self._port, self._scheme)
        # verify: of a certificate for other names; the process that answers is the one that was started here.
        async with httpx.AsyncClient(trust_env=False, timeout=_HEALTH_S, verify=False) as client:
            while True:
                if not process.running:
                    raise EngineStartError(self.name, self._why("it ended while it started"), self.log_tail())
                # Until it has said so itself, another one may answer at the port. Nodes but the first never say so.
                if (is_ready(process.scratch_dir) or self._nodes.node_rank) and await _is_healthy(client, url):
                    return
                await anyio.sleep(_POLL_S)

    async def _give_up(self, error: BaseException) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()
        raise error

    def _why(self, what: str) -> str:
        assert self._process is not None
        reason = reason_in(self._process.log_tail(_REASON_LINES))
        return f"{what} ({reason or self._process.how_it_ended()})"


def launch_server(
    model: str | os.PathLike[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    dist_init_addr: str | None = None,
    config: RolloutConfig | None = None,
    **options: Any,
) -> SGLangServer:
    """SGLang's own HTTP server, for trainers that outgrow one machine.

    ``async with sr.launch_server(model) as server:`` waits until it is healthy, and ends it.

    Args:
        model: path of a model directory, or a Hugging Face Hub id.
        host: address to listen on; ``0.0.0.0`` is all of this machine's.
        port: 0 is a free one.
        api_key: what requests must bring; by default a random one. SGLang answers ``/health`` and ``/metrics``
            without it.
        nnodes: machines that the server's TP ranks are spread over; the same is started on each.
        node_rank: this machine's number, from 0; only node 0 takes requests.
        dist_init_addr: ``HOST:PORT`` of node 0, where they meet.
        config: all options in one, instead of ``model`` and ``options``.
        options: those of :class:`RolloutConfig` that are of one server: :data:`SERVER_OPTIONS`.

    Raises:
        ConfigError: an option is wrong, or says nothing to a server.
    """
    nodes = Nodes(nnodes, node_rank, dist_init_addr)
    return SGLangServer(config_of(model, config, options), host, port, api_key, nodes)


def served_args(
    config: RolloutConfig, placement: Placement, nodes: Nodes, host: str, port: int, api_key: str
) -> dict[str, Any]:
    """Arguments of SGLang's ``ServerArgs`` for a server."""
    of_the_server = {"host": host, "port": port, "api_key": api_key, **nodes.arguments()}
    # At SGLang's own level each request is a line, and the log has no bound. Else each part of a stream repeats all.
    defaults = {"log_level_http": "warning", "incremental_streaming_output": True}
    return {**defaults, **server_args(config, placement, 0), **of_the_server}


def reason_in(log: str) -> str:
    """The last exception that a log tells of, in a line; empty if it tells of none."""
    found = [match[1] for line in log.splitlines() if (match := _REASON.match(line.strip()))]
    return found[-1][:300] if found else ""


def _check(config: RolloutConfig) -> None:
    for name in sorted(config.model_fields_set - set(SERVER_OPTIONS)):
        rule = "is an option of a pool of engines, and says nothing to a server: leave it out"
        raise ConfigError(name, getattr(config, name), rule)
    for name in _OTHER_SERVERS:
        if config.engine_args.get(name):
            raise ConfigError(f"engine_args.{name}", config.engine_args[name], "is another server than the HTTP one")
    if config.devices is not None and len(config.devices) != 1:
        raise ConfigError("devices", config.devices, "must be one list, of the server's tp_size devices")


def _place(config: RolloutConfig, nodes: Nodes) -> Placement:
    """Where it runs on this machine; checks all that only this machine can say. Blocks, where it asks the driver."""
    check_installed(config)
    (placement,) = plan(config.replace(num_engines=1, tp_size=config.tp_size // nodes.nnodes))
    return placement


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == 200
    except httpx.HTTPError:
        return False


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
