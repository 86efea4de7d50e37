"""``sglrollout serve``: one of SGLang's own HTTP servers in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import anyio
import yaml

from sglrollout.config import RolloutConfig
from sglrollout.engine.server import SERVER_OPTIONS, SGLangServer, launch_server
from sglrollout.errors import ConfigError, EngineError, RolloutError

KEY_VARIABLE = "SGLROLLOUT_API_KEY"
ENDED, FAILED, REFUSED, KILLED = 0, 1, 2, 3
"""Exit codes."""

_PROGRESS_S = 10.0
_EPILOG = f"""\
On the standard output is one line, once the server is healthy: where it is and how to connect. The rest is on the
standard error. Ctrl-C or SIGTERM ends it: it may finish what it serves within --close-timeout-s. A second one kills it.

The key that clients must bring is that of --api-key-file, or of the variable {KEY_VARIABLE}, or else a random one,
which is in that line. There is no option for it: others would see it in the process list.

exit codes: {ENDED} it was asked to end, and did; {FAILED} it did not come up, or ended unasked; {REFUSED} an option is
wrong, and nothing was started; {KILLED} it was asked to end, and had to be killed.
"""
_ABOUT = {
    "engine_args": "Another argument of SGLang's ServerArgs, by its name there; may be given again.",
    "seed": "Seed of the engine. By default a random one.",
    "start_timeout_s": "Seconds for it to come up.",
    "close_timeout_s": "Seconds for it to end by itself before it is killed.",
    "log_dir": "Directory for its log, which is a temporary one otherwise.",
    "devices": "The tp_size devices to run on: indices, or UUIDs. By default the first ones.",
}


def add_serve(commands: Any) -> None:
    """The parser of ``sglrollout serve``."""
    about = "un SGLang's own HTTP server, for a trainer on another machine"
    parser = commands.add_parser(
        "serve",
        help=f"r{about}",
        description=f"R{about}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_help("model"))
    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", help="Address; 127.0.0.1 by default, which is this machine alone. 0.0.0.0 is all.")
    where.add_argument("--port", type=int, help="30000 by default; 0 is a free one.")
    where.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="File with the key. If there is none, it is made: with a random key, for its owner alone.",
    )
    nodes = parser.add_argument_group("one server over several machines")
    nodes.add_argument("--nnodes", type=int, help="Number of machines, on each of which this is started.")
    nodes.add_argument("--node-rank", type=int, help="This one's number, from 0, which takes the requests.")
    nodes.add_argument("--dist-init-addr", metavar="HOST:PORT", help="Of machine 0, where they meet.")
    options = parser.add_argument_group("options", "Those of RolloutConfig that are of one server.")
    options.add_argument("--config", type=Path, metavar="FILE", help="YAML, TOML or JSON file of these options.")
    for name in SERVER_OPTIONS:
        if name != "model":
            _add_option(options, name)
    parser.set_defaults(run=run_serve)


def _add_option(options: Any, name: str) -> None:
    flag, kinds = f"--{name.replace('_', '-')}", _kinds(name)
    if name == "engine_args":
        options.add_argument(
            "--engine-arg", dest=name, action="append", type=_pair, metavar="NAME=VALUE", help=_help(name)
        )
    elif name == "devices":
        options.add_argument(flag, dest=name, nargs="+", type=_scalar, metavar="DEVICE", help=_help(name))
    elif name == "lora_target_modules":
        options.add_argument(flag, dest=name, nargs="+", metavar="MODULE", help=_help(name))
    elif bool in kinds:
        options.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=_help(name))
    else:
        convert = str if str in kinds or get_origin(kinds[0]) is Literal else _scalar
        options.add_argument(flag, dest=name, type=convert, metavar=_metavar(kinds), help=_help(name))


def _kinds(name: str) -> tuple[Any, ...]:
    """The types that an option may have."""
    annotation: Any = RolloutConfig.model_fields[name].annotation
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for kind in get_args(annotation) if kind is not NoneType)
    return (annotation,)


def _metavar(kinds: tuple[Any, ...]) -> str:
    choices = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ()
    return "|".join(choices) or ("TEXT" if str in kinds else "N")


def _help(name: str) -> str:
    return (_ABOUT.get(name) or str(RolloutConfig.model_fields[name].description)).replace("%", "%%")


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name.replace("-", "_"), _scalar(value)


# ------------------------------------------------------------ running it


def run_serve(given: argparse.Namespace) -> int:
    """Serve until asked to end; the exit code."""
    try:
        server, connect = server_of(given)
        return anyio.run(_Foreground(server, connect).run)
    except EngineError as error:
        _say(str(error))
        return FAILED
    except RolloutError as error:
        _say(str(error))
        return REFUSED


def server_of(given: argparse.Namespace) -> tuple[SGLangServer, str]:
    """The server that a command line describes, and how a script says its key.

    Raises:
        ConfigError: an option is wrong.
    """
    options = {name: value for name, value in vars(given).items() if name in SERVER_OPTIONS}
    if "devices" in options:
        options["devices"] = [options["devices"]]
    if "engine_args" in options:
        options["engine_args"] = dict(options["engine_args"])
    file = getattr(given, "config", None)
    config = RolloutConfig(**options) if file is None else RolloutConfig.from_file(file, **options)
    names = ("host", "nnodes", "node_rank", "dist_init_addr")
    where = {name: getattr(given, name) for name in names if hasattr(given, name)}
    port = getattr(given, "port", 30000)
    key, said = _key(getattr(given, "api_key_file", None))
    server = launch_server(config=config, port=port, api_key=key, **where)
    return server, said or repr(server.api_key)


def _key(file: Path | None) -> tuple[str | None, str]:
    """The key, if one is given, and how a script says it without showing it."""
    variable = os.environ.pop(KEY_VARIABLE, None)  # which the server's processes need not have
    if file is not None:
        path = file.expanduser().absolute()
        return read_key(path), f"pathlib.Path({str(path)!r}).read_text().strip()"
    return (variable, f'os.environ["{KEY_VARIABLE}"]') if variable is not None else (None, "")


def read_key(path: Path) -> str:
    """The key in that file, which is made with a random one if there is none.

    Raises:
        ConfigError: it can be neither read nor made, others may read it, or there is no key in it.
    """
    if not path.exists():
        _make_key(path)
    try:
        mode, key = stat.S_IMODE(path.stat().st_mode), path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", str(path), f"must be a file of text that can be read ({error})") from error
    if mode & 0o077:
        rule = f"must be its owner's alone, and has mode {mode:04o}: chmod 600 {path}"
        raise ConfigError("api_key_file", str(path), rule)
    if not key:
        raise ConfigError("api_key_file", str(path), "must hold a key, and is empty")
    return key


def _make_key(path: Path) -> None:
    """A file with a random key, whole as soon as it is there: of several servers that start at once one makes it."""
    try:
        number, made = tempfile.mkstemp(dir=path.parent)  # of mode 0600
        with open(number, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
        os.unlink(made)
    except OSError as error:
        raise ConfigError("api_key_file", str(path), f"must be a file that can be made ({error.strerror})") from error


class _Foreground:
    """A server's life under a command.

    Args:
        server: not started.
        key: how a script says its key.
    """

    def __init__(self, server: SGLangServer, key: str) -> None:
        self._server, self._key = server, key
        self._num_signals, self._is_up = 0, False

    async def run(self) -> int:
        """Until a signal, or the server's end; the exit code.

        Raises:
            RolloutError: it did not come up, or ended unasked.
        """
        failure: RolloutError | None = None
        life = anyio.CancelScope()
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._obey, signals, life)
                beside.start_soon(self._tell_progress)
                try:
                    with life:
                        await self._live()
                except RolloutError as error:
                    failure = error
                beside.cancel_scope.cancel()
        if failure is not None and not self._num_signals:
            raise failure
        return KILLED if self._server.was_killed else ENDED

    async def _live(self) -> None:
        async with self._server:
            self._is_up = True
            self._tell_address()
            await self._server.wait()

    async def _obey(self, signals: AsyncIterator[signal.Signals], life: anyio.CancelScope) -> None:
        async for number in signals:
            self._num_signals += 1
            if self._num_signals == 1:
                within = f"within {self._server.config.close_timeout_s:g} s"
                _say(f"{number.name}: it ends {within}; once more kills it")
                life.cancel()
            else:
                self._server.kill()

    async def _tell_progress(self) -> None:
        begun = time.monotonic()
        while not self._is_up:
            _say(f"starting, {time.monotonic() - begun:.0f} s: {self._server.stage}")
            await anyio.sleep(_PROGRESS_S)

    def _tell_address(self) -> None:
        server = self._server
        sys.stdout.write(connect_line(server, self._key) + "\n")
        sys.stdout.flush()


def connect_line(server: SGLangServer, key: str) -> str:
    """What is said of a server that is up."""
    if server.node_rank:
        return f"{server.config.model}: node {server.node_rank} is up; requests go to node 0"
    return f'{server.config.model} is at {server.url}: sr.RemoteEngine("{server.url}", api_key={key})'


def _say(text: str) -> None:
    sys.stderr.write(f"sglrollout serve: {text}\n")
    sys.stderr.flush()
