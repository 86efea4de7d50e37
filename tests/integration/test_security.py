"""Real SGLang on the CPU: who can reach an engine, what of a model's code runs, and what is written to logs."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest

import sglrollout as sr
from sglrollout.engine.installed import sglang_version
from tests.leftovers import mapped_shared_memory

pytestmark = pytest.mark.slow

SAID = "wombat-" + secrets.token_hex(6)
"""In prompts, and in what is asked for wrongly."""
LONG = sr.Sampling(max_new_tokens=1500, ignore_eos=True)
NOBODY = 65534


@dataclass
class Running:
    """An engine with TP 2 and default options, its endpoint, and what is known of its processes."""

    rollout: sr.AsyncRolloutEngine
    endpoint: sr.OpenAIEndpoint
    mark: Path

    @property
    def info(self) -> Any:
        return self.rollout.engines[0].info

    @property
    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in (self.info.pid, *self.info.child_pids)]

    @property
    def scratch(self) -> Path:
        return Path(self.processes[0].cmdline()[-1])

    @property
    def log(self) -> str:
        return (self.scratch / "engine.log").read_text()

    def client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.endpoint.api_key}"}
        return httpx.AsyncClient(base_url=self.endpoint.url, headers=headers, trust_env=False, timeout=60)


@pytest.fixture(scope="module")
def trapped_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that brings code of its own for all that it can, which leaves a mark beside it when it is run."""
    path = tmp_path_factory.mktemp("trapped") / "model"
    shutil.copytree(tiny_model, path)
    (path / "own_code.py").write_text(f"import os\nos.makedirs({str(path.parent / 'mark')!r}, exist_ok=True)\n")
    own = {
        "config.json": {"AutoConfig": "own_code.C", "AutoModel": "own_code.M", "AutoModelForCausalLM": "own_code.M"},
        "tokenizer_config.json": {"AutoTokenizer": ["own_code.T", "own_code.T"]},
    }
    for name, classes in own.items():
        settings = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**settings, "auto_map": classes}))
    return path


@pytest.fixture(scope="module")
async def running(trapped_model: Path) -> AsyncIterator[Running]:
    before = dict(os.environ)
    # What a trainer on a cluster has set. None of these interfaces is there, so whoever used one would fail.
    os.environ |= {"GLOO_SOCKET_IFNAME": "none0", "NCCL_SOCKET_IFNAME": "none0", "MASTER_ADDR": "192.0.2.1"}
    try:
        rollout = sr.AsyncRolloutEngine(trapped_model, device="cpu", dtype="float32", tp_size=2, max_restarts=0)
        async with rollout, rollout.serve_openai(model_name="tiny") as endpoint:
            yield Running(rollout, endpoint, trapped_model.parent / "mark")
    finally:
        os.environ.clear()
        os.environ.update(before)


# ------------------------------------------------------------ who can connect


def test_an_engine_listens_on_the_loopback_interface_alone(running: Running) -> None:
    listening = [
        connection.laddr
        for process in (*running.processes, psutil.Process())
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or not connection.raddr
    ]
    assert listening  # gloo's, between the TP ranks, and the endpoint's
    assert not [address for address in listening if not ip_address(address.ip).is_loopback]


def named_sockets(running: Running) -> set[Path]:
    connections = [c for process in running.processes for c in process.net_connections("unix")]
    return {Path(str(connection.laddr)) for connection in connections if connection.laddr}


def test_an_engines_named_sockets_are_in_a_directory_that_only_its_user_can_enter(running: Running) -> None:
    sockets = named_sockets(running)
    assert len(sockets) >= 4  # SGLang's, and ours
    assert {path.parent for path in sockets} == {running.scratch}
    status = running.scratch.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.getuid())
    assert (running.scratch / "rendezvous").is_file()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_reaches_none_of_an_engines_sockets_and_files(running: Running) -> None:
    code = (
        f"import os, socket, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "for path in sys.argv[1:]:\n"
        "    for reach in (lambda: socket.socket(socket.AF_UNIX).connect(path), lambda: open(path)):\n"
        "        try: reach()\n"
        "        except PermissionError: continue\n"
        "        sys.exit(path)\n"
    )
    paths = [str(path) for path in (*named_sockets(running), *running.scratch.iterdir(), *shared_memory(running))]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=60)


def shared_memory(running: Running) -> set[str]:
    found = {path for process in running.processes for path in mapped_shared_memory(process.pid)}
    assert found
    return found


# ------------------------------------------------------------ secrets


def assert_no_process_shows(running: Running, secret: str) -> None:
    for process in (*running.processes, psutil.Process()):
        assert secret not in " ".join(process.cmdline())
        assert secret not in str(process.environ())
    assert secret not in str(os.environ)


def test_the_endpoints_key_is_in_no_environment_command_line_or_log(running: Running) -> None:
    assert_no_process_shows(running, running.endpoint.api_key)
    assert running.endpoint.api_key not in running.log


@pytest.mark.parametrize("fails", [False, True])
async def test_the_token_of_a_weight_link_is_in_no_environment_command_line_log_or_error(
    running: Running,
    trapped_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    fails: bool,
) -> None:
    from safetensors.torch import load_file

    caplog.set_level(logging.DEBUG)
    token, errors = secrets.token_hex(16), ""
    monkeypatch.setattr("sglrollout.weights.planning.secrets.token_hex", lambda size: token)
    if fails:
        monkeypatch.setattr("sglrollout.weights.transfer._who_joined", lambda *given: None)
    weights = load_file(trapped_model / "model.safetensors")
    async with sr.WeightSyncer(running.rollout, sr.TensorSource(weights), timeout_s=10 if fails else 60) as syncer:
        try:
            assert (await syncer.sync()).method == "fast"
            assert not fails
        except sr.RolloutError as error:
            errors = str(error)
            assert fails, errors
        assert_no_process_shows(running, token)
    assert bool(errors) == fails
    for written in (errors, running.log, caplog.text, *capfd.readouterr()):
        assert token not in written


# ------------------------------------------------------------ code that comes with a model


async def test_a_models_own_code_is_not_run_by_default(running: Running) -> None:
    (group,) = await running.rollout.generate(["hi"], sampling=sr.Sampling(max_new_tokens=2))
    assert group.completions[0].text
    assert not running.mark.exists()


# ------------------------------------------------------------ logs


def marks_of(*completions: sr.Completion) -> list[str]:
    """What of prompts and completions must not be found: texts, and token ids, as Python writes them."""
    ids = [", ".join(map(str, part[:8])) for c in completions for part in (c.prompt_ids, c.token_ids) if len(part) > 7]
    return [SAID, *ids, *(completion.text for completion in completions if len(completion.text) > 7)]


async def test_prompts_completions_and_keys_are_not_logged_whatever_becomes_of_a_request(
    running: Running, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    message: Any = {"role": "user", "content": f"Tell me of {SAID}."}
    groups = await running.rollout.generate([f"{SAID} is", [message]], sampling=sr.Sampling(max_new_tokens=24))
    completions = [completion for group in groups for completion in group.completions]
    async with running.rollout.stream(SAID, LONG) as stream:
        await anext(stream)  # and is aborted
    with pytest.raises(sr.RequestTimeoutError):
        await running.rollout.generate([SAID], sampling=LONG, timeout_s=0.2)
    await running.rollout.generate([SAID * 500])  # which leaves no room in the context
    async with running.client() as client:
        ask: dict[str, Any] = {"model": "tiny", "messages": [message], "max_tokens": 24}
        answer = await client.post("/chat/completions", json=ask)
        assert answer.status_code == 200
        completions.append(running.endpoint.completion(answer.json()["id"]))
        wrongs: list[dict[str, Any]] = [{"messages": SAID}, {"messages": [{"role": SAID, "content": SAID}]}, {SAID: 1}]
        for wrong in wrongs:
            assert (await client.post("/chat/completions", json={**ask, **wrong})).status_code == 400
        assert (await client.post("/chat/completions", content=f'{{"messages": {SAID}')).status_code == 400
        assert (await client.post("/completions", json={"model": "tiny", "prompt": SAID * 500})).status_code == 400
        stranger = await client.post("/chat/completions", json=ask, headers={"Authorization": f"Bearer {SAID}"})
        assert stranger.status_code == 401
    ours = "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith("httpx"))
    written = [running.log, ours, *capfd.readouterr()]
    for mark in [*marks_of(*completions), running.endpoint.api_key]:
        assert not [text for text in written if mark in text], mark


@pytest.mark.skipif(sglang_version() == "0.5.17", reason="its grammars pin memory, which a CPU cannot")
async def test_what_a_grammar_makes_a_model_say_and_what_fails_in_sglang_is_not_logged(running: Running) -> None:
    said = "numbat" + secrets.token_hex(6)
    (group,) = await running.rollout.generate(
        ["hi"], sampling=sr.Sampling(max_new_tokens=len(said) + 1, regex=said, temperature=0.0)
    )
    assert group.completions[0].text == said
    with pytest.raises(sr.EngineRequestError, match="grammar"):
        await running.rollout.generate([f"{SAID} fails"], sampling=sr.Sampling(ebnf="root ::= ("))
    for mark in (said, SAID, *marks_of(*group.completions)):
        assert mark not in running.log


def test_a_request_that_sglang_logs_is_written_as_its_id() -> None:
    code = (
        "from sglrollout.engine import cpu_support, scheduler_main\n"
        "cpu_support.enable()\n"
        "scheduler_main.keep_tokens_out_of_logs()\n"
        "from sglang.srt.managers.schedule_batch import Req\n"
        "request = object.__new__(Req)\n"
        "request.rid, request.origin_input_ids = '7', [4711]\n"
        "assert f'{[request]}' == '[Req(rid=7)]'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


async def test_the_death_of_an_engine_tells_nothing_of_what_it_served(
    running: Running, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last of these tests: its error and the answers of the endpoint carry the end of the log."""
    caplog.set_level(logging.INFO)
    stream = running.rollout.stream(f"{SAID} is", LONG)
    chunk = await anext(stream)
    os.kill(running.info.child_pids[-1], signal.SIGABRT)
    with pytest.raises(sr.EngineDiedError) as caught:
        assert [chunk async for chunk in stream]
    assert caught.value.log_tail
    with anyio.fail_after(10):
        while running.rollout.engines[0].state != "dead":
            await anyio.sleep(0.02)
    async with running.client() as client:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": SAID}]}
        answer = await client.post("/chat/completions", json=ask)
    assert answer.status_code == 503
    written = [str(caught.value), caught.value.log_tail, answer.text, caplog.text, *capfd.readouterr()]
    for mark in [*marks_of(stream.completion), running.endpoint.api_key]:
        assert not [text for text in written if mark in text], mark
    assert chunk.token_ids
