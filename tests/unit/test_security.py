"""Nobody else reaches what is between the processes, and no code of others runs unless it is asked for."""

from __future__ import annotations

import ast
import hmac
import json
import os
import pickle
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest

import sglrollout as sr
from sglrollout.engine import launcher
from sglrollout.engine.environment import host_environment, within_the_engine
from sglrollout.engine.launch import server_args
from sglrollout.engine.placement import Placement
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import ChannelError
from sglrollout.serve.problems import problem_of
from sglrollout.testing import ScriptedEngine
from sglrollout.weights.transfer import _who_joined
from sglrollout.wire.channel import client_channel
from sglrollout.wire.link import FromEngine, Joined, Link, Listener, connect
from sglrollout.wire.messages import Command, Reply
from tests.serving import client_of, serving

pytestmark = pytest.mark.timeout(60)

SOURCES = sorted(Path(sr.__file__).parent.rglob("*.py"))


def mode_of(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


# ------------------------------------------------------------ who can connect


@pytest.fixture
def open_to_all() -> Iterator[None]:
    """The most permissive umask."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_to_all")
@pytest.mark.parametrize("depth", [0, 20], ids=["where TMPDIR is", "where TMPDIR is too long for sockets"])
def test_the_directory_of_sockets_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    temporary = tmp_path.joinpath(*["long"] * depth)
    temporary.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    scratch = new_scratch()
    try:
        assert mode_of(scratch) == 0o700
        assert scratch.stat().st_uid == os.getuid()
        with closing(Listener(scratch)) as listener:
            assert Path(listener.path).parent == scratch
    finally:
        remove_scratch(scratch)


@pytest.mark.usefixtures("open_to_all")
async def test_a_weight_syncer_listens_in_such_a_directory(config: sr.RolloutConfig) -> None:
    import torch

    before = named_sockets()
    async with sr.AsyncRolloutEngine(config=config, engines=[ScriptedEngine()]) as rollout:
        async with sr.WeightSyncer(rollout, sr.TensorSource({"w": torch.zeros(2)})):
            (path,) = named_sockets() - before
            assert mode_of(Path(path).parent) == 0o700
        assert not Path(path).exists()


def named_sockets() -> set[str]:
    return {str(c.laddr) for c in psutil.Process().net_connections("unix") if c.laddr}


def test_a_host_has_one_end_of_a_socket_pair_which_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    def start(command: list[str], **given: Any) -> Any:
        started.update(given, command=command)
        raise OSError("not started")

    monkeypatch.setattr(subprocess, "Popen", start)
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(OSError, match="not started"):
            launcher.HostProcess("engine-0", theirs, ["GPU-1"], str(tmp_path))
        assert ours.getsockname() == ours.getpeername() == ""
    number, _, scratch = started["command"][-3:]
    remove_scratch(scratch)
    assert started["pass_fds"] == [int(number)]
    assert set(started["env"]) <= {*os.environ, "TMPDIR", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "PYTHONPATH"}


def test_an_engines_processes_meet_in_the_scratch_directory_and_talk_over_loopback() -> None:
    variables = within_the_engine("/tmp/sglrollout-x")
    assert variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "file:///tmp/sglrollout-x/rendezvous"
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "lo"
    assert variables["MASTER_PORT"] != within_the_engine("/tmp/sglrollout-y")["MASTER_PORT"]


def test_a_host_is_told_nothing_of_the_ranks_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    assert not {"RANK", "MASTER_ADDR", "MASTER_PORT"} & host_environment([], "/tmp/x").keys()


# ------------------------------------------------------------ tokens and keys

TOKEN = secrets.token_hex(16)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What is compared in constant time."""
    seen: list[tuple[Any, Any]] = []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return one == other

    for module in (hmac, secrets):
        monkeypatch.setattr(module, "compare_digest", compare)
    return seen


WRONG_TOKENS = ["", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "ü", "\x00", TOKEN + "\x00", "x" * 100_000]


@pytest.mark.parametrize("token", WRONG_TOKENS, ids=range(len(WRONG_TOKENS)))
def test_who_joins_a_weight_link_without_the_token_is_nobody(compared: list[Any], token: str) -> None:
    one, other = socket.socketpair()
    with closing(Link(one, FromEngine)) as trainer, closing(Link(other, FromEngine)) as stranger:
        stranger.send(Joined(token, "engine-0", 0))
        assert _who_joined(trainer, TOKEN, 1) is None
        assert compared == [(token.encode(), TOKEN.encode())]
        stranger.send(Joined(TOKEN, "engine-0", 0))
        assert _who_joined(trainer, TOKEN, 1) == ("engine-0", 0)


def test_who_joins_and_says_something_else_or_nothing_is_nobody(tmp_path: Path) -> None:
    scratch = new_scratch()
    with closing(Listener(scratch)) as listener:
        for sent in (b"", b"\x00" * 4, b"\xff" * 100, b"\x05\x00\x00\x00\x91\x91\x91\x91\x91"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(listener.path)
                stranger.sendall(sent)
                with closing(listener.accept(1)) as link:
                    assert _who_joined(link, TOKEN, 0.05) is None
        with closing(connect(listener.path, 1)):
            pass
    remove_scratch(scratch)


def test_a_token_is_not_written_where_a_message_is() -> None:
    joined = Joined(TOKEN, "engine-0", 1)
    for written in (repr(joined), str(joined), f"{[joined]}", str(ChannelError(joined))):
        assert TOKEN not in written
        assert "engine-0" in written


async def test_the_endpoints_key_is_compared_in_constant_time(tiny_model: Path, compared: list[Any]) -> None:
    async with serving(tiny_model) as s, client_of(s.endpoint, "wrong") as stranger:
        compared.clear()
        assert (await stranger.get("/models")).status_code == 401
        assert compared == [(b"wrong", s.endpoint.api_key.encode())]
        assert s.endpoint.api_key not in repr(s.endpoint) + repr(vars(s.rollout)) + str(os.environ)


# ------------------------------------------------------------ no pickle

UNPICKLE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
WITH_PICKLE = {
    "weights/control.py",  # between the ranks of the user's own trainer, over their own process group
    "weights/portable.py",  # writes what SGLang reads: a payload made here, sent to our own engines
}


def imported(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def test_only_what_needs_pickle_imports_it() -> None:
    root = Path(sr.__file__).parent
    found = {str(source.relative_to(root)) for source in SOURCES if UNPICKLE & imported(source)}
    assert found == WITH_PICKLE


def test_nothing_loads_a_checkpoint_that_may_hold_code() -> None:
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in ("torch.load", "eval", "exec", "yaml.load", "os.system"), f"{source}: {called}"
            if isinstance(node, ast.Call) and any(word.arg == "shell" for word in node.keywords):
                raise AssertionError(f"{source}: {called} with a shell")


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


async def test_a_pickle_on_the_channel_is_an_error_or_bytes_and_never_an_object(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        payload = pickle.dumps(Bomb(mark), protocol)
        extension = msgspec.msgpack.Ext(5, payload)
        for value in (payload, msgspec.Raw(payload), extension):
            ours, theirs = socket.socketpair()
            channel = await client_channel(theirs)
            body = payload if isinstance(value, msgspec.Raw) else msgspec.msgpack.encode(Reply(1, value={"x": value}))
            with ours, anyio.fail_after(5):
                ours.sendall(len(body).to_bytes(4, "little") + body)
                if isinstance(value, msgspec.Raw):
                    with pytest.raises(ChannelError):
                        await channel.receive()
                else:
                    assert await channel.receive() == Reply(1, value={"x": value})
            await channel.close()
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()


def test_a_command_is_one_of_a_list() -> None:
    """The host calls a method of that name."""
    for name in ("__init__", "receive", "_on_pause", "pause.__class__", ""):
        body = msgspec.msgpack.encode({"type": "command", "command_id": 1, "name": name})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(body, type=Command)


# ------------------------------------------------------------ code that comes with a model


@pytest.fixture
def config(tiny_model: Path) -> sr.RolloutConfig:
    return sr.RolloutConfig(model=str(tiny_model), progress=False)


def with_code(model: Path, path: Path, mark: Path) -> Path:
    """A copy of a model that brings code of its own, which leaves a mark when it is run."""
    shutil.copytree(model, path)
    code = f"import os\nos.makedirs({str(mark)!r}, exist_ok=True)\n"
    tokenizer = "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    (path / "own_code.py").write_text(code + tokenizer)
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "own_code.Own"]}
    settings["tokenizer_class"] = "Own"
    file.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("asked", [False, True])
async def test_code_that_comes_with_a_tokenizer_runs_only_if_asked_for(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "mark"
    model = with_code(tiny_model, tmp_path / f"model_{secrets.token_hex(4)}", mark)
    options: dict[str, Any] = {"trust_remote_code": True} if asked else {}
    rollout = sr.AsyncRolloutEngine(model, progress=False, engines=[ScriptedEngine(vocab_size=512)], **options)
    try:
        async with rollout:
            await rollout.generate(["hi"], sampling=sr.Sampling(max_new_tokens=2))
    except ValueError as error:
        assert "trust_remote_code" in str(error)  # noqa: PT017 - it may as well load without that code
    assert mark.exists() == asked


def test_an_engine_is_told_to_run_a_models_code_only_if_asked_to(config: sr.RolloutConfig) -> None:
    placement = Placement("cpu", ())
    assert not server_args(config, placement, 0).get("trust_remote_code", False)
    asked = config.replace(trust_remote_code=True)
    assert server_args(asked, placement, 0)["trust_remote_code"] is True
    with pytest.raises(sr.ConfigError, match="is set by the option trust_remote_code"):
        config.replace(engine_args={"trust_remote_code": True})


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
    "{{ self.__init__.__globals__.__builtins__.open('MARK', 'w') }}",
    "{{ messages.append(5) }}",
    "{% include '/etc/passwd' %}",
]


@pytest.fixture
def with_template(tiny_model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the tiny model with another chat template."""

    def copy(template: str) -> Path:
        path = tmp_path / "model"
        shutil.copytree(tiny_model, path)
        (path / "chat_template.jinja").write_text(template.replace("MARK", str(tmp_path / "mark")))
        return path

    return copy


@pytest.mark.parametrize("template", ESCAPES)
async def test_a_models_chat_template_cannot_leave_its_sandbox(
    with_template: Callable[[str], Path], tmp_path: Path, template: str
) -> None:
    message: sr.Message = {"role": "user", "content": "hi"}
    rollout = sr.AsyncRolloutEngine(with_template(template), progress=False, engines=[ScriptedEngine(vocab_size=512)])
    async with rollout:
        with pytest.raises(sr.ConfigError):
            await rollout.generate([[message]])
        async with rollout.session() as session:
            session.add(message)
            with pytest.raises(sr.RolloutError):
                await session.generate()
    assert not (tmp_path / "mark").exists()


# ------------------------------------------------------------ logs


def test_sglang_is_not_asked_to_log_requests(config: sr.RolloutConfig) -> None:
    given = server_args(config, Placement("cpu", ()), 0)
    assert not {"log_requests", "log_requests_level", "crash_dump_folder"} & given.keys()
    assert given["log_level"] != "debug"


def test_what_an_engine_wrote_before_it_died_is_not_sent_to_clients_of_the_endpoint() -> None:
    died = sr.EngineDiedError("engine-0", "its host is gone", "a line of its log")
    for error in (died, sr.NoEngineError(f"every engine of the pool is dead; the last: {died}")):
        problem = problem_of(error)
        assert problem.status == 503
        assert "its host is gone" in problem.message
        assert "a line of its log" not in problem.message
