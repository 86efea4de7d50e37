"""The HTTP way: SGLang's server on this machine, and httpx."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from _measure import Delta, Row, Sample, collect, measure
from _raw import logprobs, token_ids
from _shapes import Work, sampling_params

_START_TIMEOUT_S = 300.0
_POLL_S = 0.5
_END_TIMEOUT_S = 10.0


def serve(server_args: str) -> None:
    """Be SGLang's HTTP server, with the JSON object ``server_args`` as its arguments."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**json.loads(server_args)))


def run_http(work: Work, script: Path) -> None:
    """Start a server as ``python SCRIPT --serve ARGS``, measure it, and end it."""
    _allow_many_files()
    port = _free_port()
    extra = {"host": "127.0.0.1", "port": port, "skip_server_warmup": True, "incremental_streaming_output": True}
    command = [sys.executable, str(script), "--serve", json.dumps({**work.engine_args(), **extra})]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        asyncio.run(_measure(work, f"http://127.0.0.1:{port}", server))
    finally:
        _end(server)


async def _measure(work: Work, url: str, server: subprocess.Popen[bytes]) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # No time limit of httpx's own: the server answers when a sample is done, and the whole way has a deadline.
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False) as client:
        await _until_healthy(client, server)
        await measure(_rows(client, work), work, server.pid)


async def _until_healthy(client: httpx.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"SGLang's server ended with exit code {server.returncode} while it started")
        try:
            if (await client.get("/health", timeout=_END_TIMEOUT_S)).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(_POLL_S)
    raise TimeoutError(f"SGLang's server was not healthy within {_START_TIMEOUT_S:.0f} s")


def _rows(client: httpx.AsyncClient, work: Work) -> dict[str, Row]:
    def body(prompt: list[int], num_tokens: int, interval: int | None = None) -> dict[str, Any]:
        params = sampling_params(num_tokens, interval)
        stream = interval is not None
        return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": stream}

    async def post(prompts: list[list[int]], num_tokens: int) -> list[Sample]:
        async def one(prompt: list[int]) -> Sample:
            out = (await client.post("/generate", json=body(prompt, num_tokens))).raise_for_status().json()
            return Sample(token_ids(out), logprobs(out))

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    def sse(interval: int) -> Row:
        async def deltas(prompt: list[int], num_tokens: int) -> AsyncIterator[Delta]:
            async with client.stream("POST", "/generate", json=body(prompt, num_tokens, interval)) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data and data != "[DONE]":
                        out = json.loads(data)
                        yield token_ids(out), logprobs(out)

        async def row(prompts: list[list[int]], num_tokens: int) -> list[Sample]:
            return list(await asyncio.gather(*(collect(deltas(prompt, num_tokens)) for prompt in prompts)))

        return row

    rows = {"http/post": post, "http/sse1": sse(1)}
    return {**rows, "http/sse8": sse(8)} if work.extra_rows else rows


def _end(server: subprocess.Popen[bytes]) -> None:
    """Kill the server and all it started."""
    try:
        root = psutil.Process(server.pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait(_END_TIMEOUT_S)
    psutil.wait_procs(processes, _END_TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _allow_many_files() -> None:
    """Every sample has a connection of its own, here and in the server."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
