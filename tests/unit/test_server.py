"""Servers of SGLang's own: what they are given, and their lives, with a child that only plays one."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import sglrollout as sr
from sglrollout import _serve_command
from sglrollout._address import is_loopback, reached_at, url_of
from sglrollout.cli import main
from sglrollout.engine import server as server_module
from sglrollout.engine.environment import host_environment
from sglrollout.engine.installed import server_arg_names
from sglrollout.engine.launcher import ModuleProcess
from sglrollout.engine.placement import Device, Placement
from sglrollout.engine.scheduler_main import _Ready, keep_out_of_logs
from sglrollout.engine.server import SERVER_OPTIONS, Nodes, launch_server, reason_in, served_args
from sglrollout.engine.server_main import start_environment
from tests.leftovers import is_running

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
MODEL = "org/name"
TWO: dict[str, Any] = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000"}


def arguments(nodes: Nodes | None = None, **options: Any) -> dict[str, Any]:
    config = sr.RolloutConfig(model=MODEL, **options)
    return served_args(config, Placement("cpu"), nodes or Nodes(), "10.0.0.1", 30000, "the-key")


# ------------------------------------------------------------ what SGLang is given


def test_sglang_is_given_the_options_under_its_own_names() -> None:
    given = arguments(tp_size=2, mem_fraction=0.5, context_length=512, engine_args={"max_running_requests": 8})
    assert (
        given
        | {
            **{"model_path": MODEL, "tp_size": 2, "mem_fraction_static": 0.5, "context_length": 512},
            **{"max_running_requests": 8, "host": "10.0.0.1", "port": 30000, "api_key": "the-key", "device": "cpu"},
        }
        == given
    )
    assert "nnodes" not in given


def test_the_log_does_not_grow_with_each_request_unless_asked_for() -> None:
    assert arguments()["log_level_http"] == "warning"
    assert arguments(engine_args={"log_level_http": "info"})["log_level_http"] == "info"
    assert arguments()["incremental_streaming_output"] is True


def test_nodes_are_passed_on() -> None:
    given = arguments(Nodes(**TWO), tp_size=4)
    assert {name: given[name] for name in TWO} == TWO
    assert given["tp_size"] == 4


def test_of_a_server_over_machines_each_takes_its_share_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Device(index, f"GPU-{index}", "a GPU", 0) for index in range(2)]
    monkeypatch.setattr("sglrollout.engine.placement.visible_devices", lambda: found)
    monkeypatch.setattr(server_module, "check_installed", lambda config: None)
    placement = server_module._place(sr.RolloutConfig(model=MODEL, tp_size=4), Nodes(**TWO))
    assert [device.uuid for device in placement.devices] == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize(
    ("given", "field", "rule"),
    [
        ({"nnodes": 0}, "nnodes", "must be an integer of at least 1"),
        ({"node_rank": 1}, "node_rank", r"from 0 to nnodes - 1 \(0\)"),
        ({"dist_init_addr": "a:1"}, "dist_init_addr", "must be None with nnodes=1"),
        ({**TWO, "dist_init_addr": None}, "dist_init_addr", 'must be "HOST:PORT"'),
        ({**TWO, "dist_init_addr": "a:70000"}, "dist_init_addr", 'must be "HOST:PORT"'),
        ({**TWO, "tp_size": 3}, "tp_size", r"must be a multiple of nnodes \(2\)"),
        ({**TWO, "tp_size": 2, "devices": [[0, 1]]}, "devices", "must be None with nnodes above 1"),
        ({"devices": [[0], [1]]}, "devices", "must be one list"),
        ({"num_engines": 2}, "num_engines", "is an option of a pool of engines"),
        ({"max_inflight": 4}, "max_inflight", "is an option of a pool of engines"),
        ({"engine_args": {"api_key": "x"}}, "engine_args.api_key", "is sglrollout's own"),
        ({"engine_args": {"grpc_mode": True}}, "engine_args.grpc_mode", "is another server"),
        ({"port": 70000}, "port", "must be an integer from 0 to 65535"),
        ({"host": " "}, "host", "must be a text that is not empty"),
        ({"api_key": "two words"}, "api_key", "must be a text of ASCII characters without spaces"),
        ({"tp_sze": 2}, "tp_sze", 'did you mean "tp_size"'),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_looked_at(given: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(sr.ConfigError, match=rule) as caught:
        launch_server(MODEL, **given)
    assert caught.value.field == field


def test_every_option_of_a_server_is_one_of_the_config() -> None:
    assert set(SERVER_OPTIONS) <= set(sr.RolloutConfig.model_fields)


# ------------------------------------------------------------ keys


def test_a_key_that_is_not_given_is_random_and_long() -> None:
    keys = {launch_server(MODEL).api_key for _ in range(8)}
    assert len(keys) == 8
    assert min(map(len, keys)) >= 40


async def test_neither_command_line_nor_environment_has_the_key_or_what_torchrun_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: dict[str, Any] = {}

    def start(command: list[str], **given: Any) -> Any:
        received = Path(f"/proc/self/fd/{given['pass_fds'][0]}").read_bytes()
        started.update(given, command=command, arguments=json.loads(received))
        raise OSError("not started")

    for name in ("RANK", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(sr.EngineStartError, match="could not be started: not started"):
        await launch_server(MODEL, api_key="the-key", device="cpu").start()
    assert started["arguments"]["api_key"] == "the-key"
    assert "the-key" not in str(started["command"]) + str(started["env"])
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"} & set(started["env"])


@pytest.fixture
def record_factory() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.usefixtures("record_factory")
def test_a_key_is_not_logged_however_it_comes_into_the_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keep_out_of_logs(["the-key", "another"])
    log = logging.getLogger("test")
    log.info("server_args={'api_key': 'the-key'}")
    log.info("%s and %s", ["the-key"], "another")
    log.info("as it %s", "was")
    assert [record.getMessage() for record in caplog.records] == [
        "server_args={'api_key': '***'}",
        "['***'] and ***",
        "as it was",
    ]


def test_a_key_file_is_made_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        key = _serve_command.read_key(tmp_path / "key")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert len(key) >= 40
    assert _serve_command.read_key(tmp_path / "key") == key


def test_servers_that_start_at_once_have_the_same_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a loop over GPUs, whose servers all find no file."""
    path, link, others = tmp_path / "key", os.link, list[str]()

    def link_second(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        others.append(_serve_command.read_key(path))
        link(source, target)

    monkeypatch.setattr(os, "link", link_second)
    assert [_serve_command.read_key(path)] == others
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "mode", "rule"),
    [
        (b"key", 0o640, "must be its owner's alone, and has mode 0640"),
        (b"key", 0o604, "must be its owner's alone"),
        (b" \n", 0o600, "must hold a key, and is empty"),
        (b"\xff\xfe", 0o600, "must be a file of text"),
    ],
)
def test_a_key_file_that_is_none_or_that_others_may_read_is_refused(
    tmp_path: Path, content: bytes, mode: int, rule: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(sr.ConfigError, match=rule):
        _serve_command.read_key(path)


def test_a_key_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sr.ConfigError, match="must be a file that can be made"):
        _serve_command.read_key(tmp_path / "missing" / "key")


# ------------------------------------------------------------ who is reached how


def test_one_machines_processes_meet_in_a_file_and_talk_over_loopback_while_they_start() -> None:
    alone = start_environment("/tmp/x", "127.0.0.1", 1)
    assert alone["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "file:///tmp/x/rendezvous"
    assert alone["GLOO_SOCKET_IFNAME"] == alone["NCCL_SOCKET_IFNAME"] == "lo"


def test_nccl_may_use_the_users_interface_where_a_trainer_may_be_elsewhere() -> None:
    reached = start_environment("/tmp/x", "10.0.0.1", 1)
    assert "NCCL_SOCKET_IFNAME" not in reached
    assert reached["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(("host", "nnodes"), [("127.0.0.1", 1), ("10.0.0.1", 1), ("10.0.0.1", 2)])
def test_nccl_shares_memory_in_its_own_way_unless_the_user_says_how(
    host: str, nnodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    assert start_environment("/tmp/x", host, nnodes)["NCCL_CUMEM_ENABLE"] == "-2"  # where SGLang would set 0
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert "NCCL_CUMEM_ENABLE" not in start_environment("/tmp/x", host, nnodes)


def test_machines_of_one_server_are_told_the_address_at_which_they_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HOST_IP", raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert start_environment("/tmp/x", "10.0.0.1", 2) == {"SGLANG_HOST_IP": "10.0.0.1"}
    assert start_environment("/tmp/x", "0.0.0.0", 2) == {}
    monkeypatch.setenv("SGLANG_HOST_IP", "10.0.0.9")
    assert start_environment("/tmp/x", "10.0.0.1", 2) == {}


def test_once_a_scheduler_is_up_the_environment_is_the_users_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_PORT", "x")
    ours, theirs = Pipe()
    with ours, theirs:
        ready = _Ready(theirs, {"GLOO_SOCKET_IFNAME": "eth1", "MASTER_PORT": None})
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        ready.send("up")
        assert ours.recv() == "up"
        assert ready.fileno() == theirs.fileno()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "MASTER_PORT" not in os.environ


def test_an_address_is_written_as_a_url_and_known_for_loopback() -> None:
    assert url_of("::1", 80) == "http://[::1]:80"
    assert url_of("node", 80, "https") == "https://node:80"
    assert [host for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "0.0.0.0", "10.0.0.1") if is_loopback(host)]
    assert not [host for host in ("0.0.0.0", "::", "10.0.0.1", "node-b") if is_loopback(host)]


def test_what_listens_everywhere_is_reached_at_one_address() -> None:
    assert reached_at("10.0.0.1") == "10.0.0.1"
    assert reached_at("0.0.0.0") not in ("0.0.0.0", "")
    assert reached_at("::") not in ("::", "")


# ------------------------------------------------------------ its life


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., sr.SGLangServer]:
    """Servers whose process is tests/fake_server.py."""

    def start(module: str, *args: Any) -> ModuleProcess:
        assert module == "sglrollout.engine.server_main"
        return ModuleProcess("tests.fake_server", *args)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(server_module, "ModuleProcess", start)

    def make(behaviour: str, engine_args: dict[str, Any] | None = None, **options: Any) -> sr.SGLangServer:
        named = {"served_model_name": behaviour, **(engine_args or {})}
        return launch_server(MODEL, device="cpu", engine_args=named, **options)

    return make


async def test_a_server_is_up_in_its_block_and_nothing_is_left_of_it(fake: Callable[..., sr.SGLangServer]) -> None:
    server = fake("obeys")
    assert server.stage == "not started"
    with pytest.raises(sr.LifecycleError, match="not up"):
        _ = server.url
    async with server:
        assert server.stage == "up"
        assert server.url.startswith("http://127.0.0.1:")
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{server.url}/health")).status_code == 200
        pid, scratch = server.pid, server._process.scratch_dir if server._process else Path()
        assert scratch.is_dir()
        assert os.getpgid(pid) == pid
    assert not is_running(pid)
    assert not scratch.exists()
    assert not server.was_killed
    await server.close()
    with pytest.raises(sr.LifecycleError, match="started before"):
        await server.start()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
async def test_one_with_a_certificate_is_reached_by_https(fake: Callable[..., sr.SGLangServer], tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "2"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key]
    await anyio.run_process(made)
    async with fake("obeys", engine_args={"ssl_certfile": certificate, "ssl_keyfile": key}) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=certificate)
        async with httpx.AsyncClient(trust_env=False, verify=trusting) as client:
            assert (await client.get(f"{server.url}/health")).status_code == 200


async def test_what_it_is_at_is_the_last_line_of_its_log(fake: Callable[..., sr.SGLangServer]) -> None:
    server = fake("loads")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.start)
        with anyio.fail_after(30):
            while server.stage != "Load weight begin.":
                await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    assert not is_running(server.pid)


async def test_one_that_does_not_end_in_time_is_killed(fake: Callable[..., sr.SGLangServer]) -> None:
    async with fake("stubborn", close_timeout_s=0.5) as server:
        pid = server.pid
    assert server.was_killed
    assert not is_running(pid)


async def test_one_that_fails_to_start_says_why_and_shows_its_log(fake: Callable[..., sr.SGLangServer]) -> None:
    server = fake("fails")
    with pytest.raises(sr.EngineStartError, match=r"while it started \(ValueError: no such model\)") as caught:
        await server.start()
    assert "Traceback" in caught.value.log_tail
    assert not is_running(server.pid)


async def test_another_server_at_its_port_is_not_taken_for_it(fake: Callable[..., sr.SGLangServer]) -> None:
    server = fake("loads", start_timeout_s=2.0)
    with pytest.raises(sr.EngineStartError, match=r"not healthy after start_timeout_s=2 s"):
        await server.start()
    assert not is_running(server.pid)


async def test_a_start_that_is_cancelled_leaves_nothing(fake: Callable[..., sr.SGLangServer]) -> None:
    server = fake("loads")
    with anyio.move_on_after(1.0) as scope:
        await server.start()
    assert scope.cancelled_caught
    assert not is_running(server.pid)


async def test_one_that_dies_is_told_to_whoever_waits(fake: Callable[..., sr.SGLangServer]) -> None:
    async with fake("dies") as server:
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(trust_env=False) as client:
                await client.get(f"{server.url}/die")
        with pytest.raises(sr.EngineDiedError, match=r"unasked \(torch.OutOfMemoryError: no memory\)") as caught:
            await server.wait()
    assert "no memory" in caught.value.log_tail


async def test_a_port_that_is_taken_is_refused_before_anything_starts(
    fake: Callable[..., sr.SGLangServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **given: pytest.fail("something was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(sr.ConfigError, match=rf"port must be one that is free on 127.0.0.1 .*got {port}"):
            await fake("obeys", port=port).start()
    with pytest.raises(sr.ConfigError, match="host must be an address of this machine"):
        await fake("obeys", host="192.0.2.1").start()


async def test_an_argument_that_sglang_does_not_know_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not server_arg_names():
        pytest.skip("SGLang is not installed")
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **given: pytest.fail("something was started"))
    with pytest.raises(sr.ConfigError, match=r'chunked_prefil_size.*did you mean "chunked_prefill_size"'):
        await launch_server(MODEL, device="cpu", engine_args={"chunked_prefil_size": 64}).start()


def test_the_reason_is_the_last_exception_of_the_log() -> None:
    log = """
[2026-01-01 00:00:00] Load weight begin. Error: none
Traceback (most recent call last):
  File "x.py", line 3, in f
    raise KeyError("x")
KeyError: 'x'
[2026-01-01 00:00:01] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
[2026-01-01 00:00:02] Received sigquit from a child process. It usually means the child failed.
"""
    assert reason_in(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert reason_in("all is well\n") == ""


def test_a_server_inherits_what_a_host_does(tmp_path: Path) -> None:
    assert host_environment([], str(tmp_path))["TMPDIR"] == str(tmp_path)


# ------------------------------------------------------------ the command


def serve(behaviour: str, *given: str) -> int:
    engine = ["--engine-arg", f"served_model_name={behaviour}"]
    return main(["serve", MODEL, "--device", "cpu", "--port", "0", *engine, *given])


def interrupted(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Send this process signals once the server is up, one after another."""
    tell = _serve_command._Foreground._tell_address

    def then_interrupt(self: Any) -> None:
        tell(self)
        for place, number in enumerate(numbers):
            threading.Timer(0.5 * place, os.kill, (os.getpid(), number)).start()

    monkeypatch.setattr(_serve_command._Foreground, "_tell_address", then_interrupt)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_says_how_to_connect_in_one_line_and_ends_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    interrupted(monkeypatch, number)
    assert serve("obeys") == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert line.startswith(f"{MODEL} is at http://127.0.0.1:")
    assert 'sr.RemoteEngine("http://127.0.0.1:' in line
    assert "api_key='" in line
    assert "starting, 0 s" in err
    assert signal.Signals(number).name in err


@pytest.mark.usefixtures("fake")
def test_the_command_ends_with_3_where_the_server_had_to_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, signal.SIGINT)
    assert serve("stubborn", "--close-timeout-s", "0.5") == 3


@pytest.mark.usefixtures("fake")
def test_a_second_signal_kills_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(monkeypatch, signal.SIGINT, signal.SIGINT)
    begun = time.monotonic()
    assert serve("stubborn", "--close-timeout-s", "50") == 3
    assert time.monotonic() - begun < 25


@pytest.mark.usefixtures("fake")
def test_the_command_ends_with_1_and_the_log_where_sglang_does_not_come_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("fails") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "(ValueError: no such model)" in err
    assert "last lines of its log" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tp-size", "two"], "tp_size must be an integer"),
        (["--node-rank", "1"], "node_rank must be"),
        (["--host", "192.0.2.1"], "host must be an address of this machine"),
        (["--config", "missing.yaml"], "path must name an existing file"),
    ],
)
def test_the_command_ends_with_2_where_an_option_is_wrong(
    capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert serve("obeys", *given) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--tp", "2", "--wrong"], ["--engine-arg", "name"], ["--port", "http"]])
def test_what_is_no_option_is_a_usage_error(given: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve("obeys", *given)
    assert caught.value.code == 2


def parsed(*given: str) -> tuple[sr.SGLangServer, str]:
    return _serve_command.server_of(main_parser().parse_args(["serve", *given]))


def main_parser() -> Any:
    from sglrollout.cli import _parser

    return _parser()


def test_options_of_the_command_are_those_of_the_config() -> None:
    given = ["--tp-size", "2", "--devices", "0", "GPU-1", "--mem-fraction", "0.5", "--memory-saver", "--seed", "3"]
    given += ["--engine-arg", "max-running-requests=8", "--engine-arg", "attention_backend=triton", "--tokenizer", "1"]
    server, _ = parsed(MODEL, *given)
    assert server.config == sr.RolloutConfig(
        model=MODEL,
        tokenizer="1",
        tp_size=2,
        devices=[[0, "GPU-1"]],
        mem_fraction=0.5,
        memory_saver=True,
        seed=3,
        engine_args={"max_running_requests": 8, "attention_backend": "triton"},
    )


def test_the_command_takes_a_file_of_options_over_which_its_own_win(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"model: {MODEL}\ntp_size: 4\ndtype: float16\nengine_args: {{max_running_requests: 8}}\n")
    server, _ = parsed("--config", str(path), "--tp-size", "2")
    assert (server.config.model, server.config.tp_size, server.config.dtype) == (MODEL, 2, "float16")
    assert server.config.engine_args == {"max_running_requests": 8}
    path.write_text(f"model: {MODEL}\nnum_engines: 4\n")
    with pytest.raises(sr.ConfigError, match="num_engines is an option of a pool"):
        parsed("--config", str(path))


def test_the_key_is_taken_from_a_file_or_the_environment_and_then_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, said = parsed(MODEL, "--api-key-file", str(tmp_path / "key"))
    assert server.api_key == (tmp_path / "key").read_text().strip()
    assert eval(said, {"pathlib": pathlib}) == server.api_key
    monkeypatch.setenv("SGLROLLOUT_API_KEY", "the-key")
    server, said = parsed(MODEL)
    assert server.api_key == "the-key"
    assert said == 'os.environ["SGLROLLOUT_API_KEY"]'
    assert "SGLROLLOUT_API_KEY" not in os.environ


def test_the_help_names_every_option_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    flags = {name.replace("_", "-") for name in SERVER_OPTIONS} - {"model", "engine-args"} | {"engine-arg"}
    assert [flag for flag in sorted(flags) if f"--{flag}" not in shown] == []
    assert "exit codes: 0" in shown
