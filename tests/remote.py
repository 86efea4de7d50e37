"""SGLang HTTP servers for tests: a scripted one, which can be broken in every way, and real ones on the CPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import anyio
import httpx
import psutil

import sglrollout as sr
from tests.leftovers import mapped_shared_memory

# ------------------------------------------------------------ a scripted one


def sampled(token_ids: Sequence[int]) -> int:
    """The token after these, so that whoever goes on from some of them says the same."""
    return (7 * sum(token_ids) + len(token_ids)) % 400 + 3


def continued(prompt_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What a scripted server samples after a prompt."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(sampled(ids))
    return tuple(ids[len(prompt_ids) :])


class Exchange:
    """One request to a scripted server, and the connection to answer it by."""

    def __init__(
        self, method: str, target: str, headers: dict[str, str], body: Any, writer: asyncio.StreamWriter
    ) -> None:
        self.method, (self.path, _, self.query) = method, target.partition("?")
        self.headers, self.body, self.writer = headers, body, writer
        self.keeps_open = True

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: Any, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.say(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)

    async def begin_stream(self) -> None:
        await self.say(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def piece(self, data: bytes) -> None:
        await self.say(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def event(self, value: Any) -> None:
        await self.piece(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")

    async def end_stream(self) -> None:
        await self.event(b"[DONE]")
        await self.say(b"0\r\n\r\n")

    def cut(self) -> None:
        """End the connection as a crash does."""
        self.keeps_open = False
        self.writer.transport.abort()


Fault = Callable[[Exchange], Awaitable[None]]


class ScriptedServer:
    """Answers as SGLang 0.5.21 does, or as ``faults`` say, by path. It samples :func:`continued`.

    Attributes:
        token_s: the time of a token.
        label: its weight version.
        running: ids of the requests that it works on.
        aborted: ids that it was told to drop.
        told: paths of all requests, in order, without probes.
        is_updating: a weight update is open.
    """

    def __init__(self, *, api_key: str = "", incremental: bool = False, token_s: float = 0.0, **info: Any) -> None:
        self.api_key, self.incremental, self.token_s = api_key, incremental, token_s
        self.info, self.label = info, "default"
        self.model: dict[str, Any] = {}
        self.faults: dict[str, Fault] = {}
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.told: list[str] = []
        self.bodies: list[Any] = []
        self.queries: dict[str, str] = {}
        self.num_probes = self.port = 0
        self.is_updating = False
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        """Listen, at the port that it had before, if it had one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End as by SIGKILL: listen no more, and cut all connections."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.running.clear()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while exchange := await self._next(reader, writer):
                await self._handle(exchange, reader)
                if not exchange.keeps_open:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange | None:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        return Exchange(method, target, headers, json.loads(data) if data else None, writer)

    async def _handle(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        if exchange.path == "/v1/loads":
            self.num_probes += 1
        else:
            self.told.append(exchange.path)
            self.bodies.append(exchange.body)
            self.queries[exchange.path] = exchange.query
        if exchange.path in self.faults:
            await self.faults[exchange.path](exchange)
        elif self.api_key and exchange.headers.get("authorization") != f"Bearer {self.api_key}":
            await exchange.answer({"error": "Unauthorized"}, 401)
        elif exchange.path == "/generate":
            await self._generate(exchange, reader)
        else:
            await exchange.answer(self._say(exchange))

    def _say(self, exchange: Exchange) -> Any:
        match exchange.path:
            case "/server_info":
                return {
                    **{"version": "0.5.21", "max_req_input_len": 2042, "max_total_num_tokens": 32768, "tp_size": 1},
                    **{"internal_states": [{"effective_max_running_requests_per_dp": 64}]},
                    **{"incremental_streaming_output": self.incremental, **self.info},
                }
            case "/model_info":
                return {"model_path": "m", "weight_version": self.label, "is_generation": True, **self.model}
            case "/v1/models":
                return {"data": [{"id": "m", "max_model_len": 2048}]}
            case "/v1/loads":
                load = {"num_running_reqs": len(self.running), "timestamp": time.time(), "max_running_requests": 64}
                return {"loads": [load]}
            case "/abort_request":
                self.aborted.append(exchange.body["rid"])
                self.running.discard(exchange.body["rid"])
            case "/pause_generation":
                self.goes_on.clear()
            case "/continue_generation":
                self.goes_on.set()
            case "/update_weight_version":
                self.label = exchange.body["new_version"]
            case "/begin_weight_update" | "/end_weight_update":
                begins = exchange.path == "/begin_weight_update"
                if self.is_updating is begins:
                    return {"success": False, "message": f"{'a' if begins else 'no'} weight-update session is open"}
                self.is_updating = begins
        return {"success": True, "message": ""}

    async def _generate(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        rid, wanted = exchange.body["rid"], exchange.body["sampling_params"].get("max_new_tokens", 128)
        streams, every = exchange.body["stream"], exchange.body["sampling_params"].get("stream_interval", 1)
        ids, sent = continued(exchange.body["input_ids"], wanted), 0
        if streams:
            await exchange.begin_stream()
        self.running.add(rid)
        spans: list[dict[str, Any]] = []
        try:
            for number in range(1, wanted + 1):
                await asyncio.sleep(self.token_s)
                await self.goes_on.wait()
                if not spans or spans[-1]["version"] != self.label:
                    spans.append({"version": self.label, "start": number - 1, "end": number})
                spans[-1]["end"] = number
                if rid not in self.running:
                    ids, wanted = ids[:number], number
                last = number == wanted
                if streams and (last or number == 1 or number % every == 0):
                    start = sent if self.incremental else 0
                    await exchange.event(self.part(rid, ids[start:number], number, last, spans, rid in self.running))
                    sent = number
                if last:
                    break
            if streams:
                await exchange.end_stream()
            else:
                await exchange.answer(self.part(rid, ids, wanted, True, spans, rid in self.running))
        finally:
            self.running.discard(rid)

    def part(
        self, rid: str, ids: Sequence[int], total: int, last: bool, spans: list[dict[str, Any]], whole: bool = True
    ) -> dict[str, Any]:
        """As SGLang says it."""
        reason = {"type": "length", "length": total} if whole else {"type": "abort", "message": "Abort"}
        meta = {
            **{"id": rid, "finish_reason": reason if last else None, "prompt_tokens": 3, "cached_tokens": 1},
            **{"weight_version": self.label, "completion_tokens": total},
            "output_token_logprobs": [[-token / 100, token, None] for token in ids],
        }
        return {"text": "", "output_ids": list(ids), "meta_info": {**meta, "weight_versions": spans} if last else meta}


class ScriptedRouter(ScriptedServer):
    """Hands requests to its workers in turn, as SGLang's router does."""

    def __init__(self, *workers: ScriptedServer) -> None:
        super().__init__()
        self.workers, self._turn = list(workers), 0

    async def _handle(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        self.told.append(exchange.path)
        if exchange.path == "/workers":
            await exchange.answer({"workers": [{"url": worker.url, "is_healthy": True} for worker in self.workers]})
        elif exchange.path == "/generate":
            self._turn += 1
            await self.workers[self._turn % len(self.workers)]._handle(exchange, reader)
        else:
            await exchange.answer(b"", 404)


@asynccontextmanager
async def rollout_of(
    model: Path, *servers: ScriptedServer, remote: Any = None, **options: Any
) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """A rollout of scripted servers alone. ``remote`` are options of each engine."""
    engines = [sr.RemoteEngine(server.url, **{"dead_after_s": 3.0, **(remote or {})}) for server in servers]
    given = {"restart_delay_s": 0.05, "engine_args": {"skip_tokenizer_init": True}, "progress": False, **options}
    async with sr.AsyncRolloutEngine(model, num_engines=0, remote=engines, **given) as rollout:
        yield rollout


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait for what comes of itself."""
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(0.01)


# ------------------------------------------------------------ real ones

_CPU = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--max-total-tokens", "32768", "--sleep-on-idle", "--skip-server-warmup", "--log-level", "warning"),
)


class RealServer:
    """A process that runs SGLang's own HTTP server, in a session of its own. Its log is shown if a test fails."""

    logs: ClassVar[dict[Path, None]] = {}

    def __init__(self, model: Path, log: Path, *arguments: str, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.arguments, self._model, self.log = arguments, model, log
        self.logs[log] = None
        command = [sys.executable, __file__, "--model-path", str(model), "--port", str(self.port), *_CPU, *arguments]
        roots = [str(Path(sr.__file__).parents[1]), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
            )

    def again(self) -> RealServer:
        """Another process at the same address."""
        return RealServer(self._model, self.log, *self.arguments, port=self.port)

    async def ready(self, within_s: float = 120.0) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            with anyio.fail_after(within_s):
                while self.process.poll() is None:
                    with contextlib.suppress(httpx.HTTPError):
                        await client.get(f"{self.url}/health_generate", timeout=5)
                        return
                    await anyio.sleep(0.2)
        raise AssertionError(self.log.read_text()[-4000:])

    async def num_running(self, key: str = "") -> int:
        """Requests that it works on, or has in its queue."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=20) as client:
            (load,) = (await client.get(f"{self.url}/v1/loads")).json()["loads"]
            return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    def signal(self, number: signal.Signals) -> None:
        """To all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """With what SGLang leaves in /dev/shm when it is killed."""
        pids = [pid for pid in psutil.pids() if _group_of(pid) == self.process.pid]
        shared = {Path(path) for pid in pids for path in mapped_shared_memory(pid)}
        self.signal(signal.SIGKILL)
        self.process.wait(10)
        for path in shared:
            if path.parent == Path("/dev/shm"):  # not the model, which may be below it
                path.unlink(missing_ok=True)


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@contextmanager
def real_servers(model: Path, log: Path, *arguments: Sequence[str]) -> Iterator[list[RealServer]]:
    """A server for each list of arguments, started together and not waited for."""
    servers = [RealServer(model, log.with_suffix(f".{i}"), *given) for i, given in enumerate(arguments)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()
            RealServer.logs.pop(server.log, None)


class Relay:
    """A TCP port before a server's, whose connections can be cut as a network may cut them."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in [*self._open]:
            if not writer.is_closing():
                _reset(writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:  # nobody is there
            _reset(writer)
            return
        both = {writer, far_writer}
        self._open |= both
        try:
            async with anyio.create_task_group() as ways:
                ways.start_soon(_pass_on, reader, far_writer, ways.cancel_scope)
                ways.start_soon(_pass_on, far_reader, writer, ways.cancel_scope)
        finally:
            self._open -= both
            for one in both:
                one.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """What is under way is lost, and the other side is told at once."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, both: anyio.CancelScope) -> None:
    """One way, until it ends; and with it the other one."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    both.cancel()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _serve() -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(sys.argv[1:]))


if __name__ in ("__main__", "__mp_main__"):  # the latter in the processes that SGLang spawns
    from sglrollout.engine import cpu_support

    cpu_support.enable(num_threads=1)  # more of them wait for each other where there are few cores
    if __name__ == "__main__":
        _serve()
