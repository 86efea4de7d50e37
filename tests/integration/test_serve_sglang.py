"""Real servers of SGLang's on the CPU: who gets an answer, who can connect, and what is left however they end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import sglrollout as sr
from tests.leftovers import Leftovers
from tests.serve_command import ServeCommand

pytestmark = pytest.mark.slow

ASK: dict[str, Any] = {"text": "wombat", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


@pytest.fixture(scope="module")
async def server(tiny_model: Path) -> AsyncIterator[sr.SGLangServer]:
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:
        left = Leftovers(Path(temporary))
        async with sr.launch_server(tiny_model, device="cpu", dtype="float32") as server:
            yield server
            left.see(process.pid for process in processes(server))
            assert len(left.pids) >= 4
            assert [path for path in left.shared_memory if "sglang" in path]
        left.assert_nothing_left(within_s=1.0)


@pytest.fixture
def serve(tiny_model: Path) -> Iterator[Callable[..., ServeCommand]]:
    commands: list[ServeCommand] = []
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:

        def run(model: Path = tiny_model, *given: str, **environment: str) -> ServeCommand:
            commands.append(ServeCommand([str(model), "--port", "0", *given], Path(temporary), environment))
            return commands[-1]

        yield run
        for command in commands:
            command.close()


def processes(server: sr.SGLangServer) -> list[psutil.Process]:
    main = psutil.Process(server.pid)
    return [main, *main.children(recursive=True)]


def log_of(server: sr.SGLangServer) -> str:
    scratch = psutil.Process(server.pid).cmdline()[-1]
    return Path(scratch, "engine.log").read_text()


# ------------------------------------------------------------ who gets an answer, and who can connect


async def test_a_request_is_answered_with_the_key_and_refused_without(server: sr.SGLangServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": server.api_key}):
            for path in ("/generate", "/update_weights_from_disk", "/flush_cache"):
                assert (await client.post(path, json=ASK, headers=headers)).status_code == 401
        answer = await client.post("/generate", json=ASK, headers={"Authorization": f"Bearer {server.api_key}"})
        assert len(answer.json()["output_ids"]) == 4


def test_the_key_is_in_no_command_line_environment_or_log(server: sr.SGLangServer) -> None:
    shown = [str(process.cmdline()) + str(process.environ()) for process in processes(server)]
    assert len(shown) >= 4
    assert not [text for text in shown if server.api_key in text]
    log = log_of(server)
    assert "server_args=" in log
    assert "'api_key': '***'" in log
    assert server.api_key not in log


def test_prompts_are_not_logged(server: sr.SGLangServer) -> None:
    assert ASK["text"] not in log_of(server)


def test_a_server_listens_on_loopback_alone_and_its_sockets_are_its_users(server: sr.SGLangServer) -> None:
    connections = [c for process in processes(server) for c in process.net_connections("inet")]
    listening = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN or not c.raddr]
    assert int(server.url.rpartition(":")[2]) in {address.port for address in listening}
    assert not [address for address in listening if not ip_address(address.ip).is_loopback]
    named = {Path(str(c.laddr)) for p in processes(server) for c in p.net_connections("unix") if c.laddr}
    assert len(named) >= 2
    (scratch,) = {path.parent for path in named}
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700


def test_its_port_is_not_given_to_a_second_server(server: sr.SGLangServer, serve: Callable[..., ServeCommand]) -> None:
    port = server.url.rpartition(":")[2]
    command = serve(Path(server.config.model), "--port", port)
    assert command.wait() == 2
    assert f"port must be one that is free on 127.0.0.1 (Address already in use), got {port}" in command.said[-1]
    command.assert_nothing_left(within_s=0)


# ------------------------------------------------------------ how it ends


def test_when_the_command_is_killed_nothing_is_left_within_5_s(serve: Callable[..., ServeCommand]) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = serve(TORCHELASTIC_USE_AGENT_STORE="True", **torchrun)
    url = command.address()
    assert len(command.pids) >= 4
    assert command.shared_memory
    assert [*command.temporary.glob("sglrollout*")]
    command.process.kill()
    command.assert_nothing_left(within_s=5.0)
    assert_free(url)


def test_ctrl_c_while_it_starts_ends_it_and_leaves_nothing(serve: Callable[..., ServeCommand]) -> None:
    command = serve()
    command.wait_for_scheduler()
    begun = time.monotonic()
    assert command.end(signal.SIGINT) == 0, command.said
    assert time.monotonic() - begun < 30
    command.assert_nothing_left(within_s=1.0)
    assert not [line for line in command.said if "RemoteEngine" in line]


def test_a_model_that_sglang_does_not_know_is_an_error_with_the_reason(
    serve: Callable[..., ServeCommand], tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    settings = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**settings, "model_type": "wombat"}))
    command = serve(broken)
    assert command.wait() == 1
    said = "\n".join(command.said)
    assert "it ended while it started (ValueError: " in said
    assert "wombat" in said
    command.assert_nothing_left(within_s=1.0)


def test_a_model_that_is_not_there_is_refused_before_anything_starts(serve: Callable[..., ServeCommand]) -> None:
    command = serve(Path("/nowhere/model"))
    assert command.wait() == 2
    assert command.said == [
        "sglrollout serve: model must be an existing path or a Hugging Face Hub id, got '/nowhere/model'"
    ]


def assert_free(url: str) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((host, int(port)))
        free.listen()
