"""The two ways to run an engine host, each the one owner of what it starts: a child process, or a thread here.

A server of SGLang's own is a child process of the same kind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import anyio
import anyio.to_thread

from sglrollout.engine.environment import host_environment
from sglrollout.engine.processes import end_group
from sglrollout.engine.scratch import check_room, new_scratch, remove_scratch
from sglrollout.errors import ConfigError, LifecycleError

_POLL_S = 0.25
_TAIL_BYTES = 64 * 1024
_LINE_CHARACTERS = 500
"""Of a line in a tail: SGLang logs all its arguments in one of 12,000."""


class Launcher(Protocol):
    """A started host. It holds a scratch directory, which goes when it is destroyed."""

    scratch_dir: Path

    def log_tail(self, num_lines: int) -> str:
        """The last lines its processes wrote."""

    def how_it_ended(self) -> str:
        """In words, for an error message."""

    async def wait(self, timeout_s: float) -> None:
        """Wait for it to end by itself, at most so long."""

    async def ended(self) -> None:
        """Return once it has ended, however it did."""

    async def destroy(self, timeout_s: float) -> None:
        """End it and everything it started. Idempotent."""


class ModuleProcess:
    """A module of ours at the head of a session of its own: ``python -m MODULE FD PARENT_PID SCRATCH_DIR``.

    Args:
        module: its name.
        name: of what it runs, for its log.
        inherited: a file descriptor for it.
        devices: UUIDs of the GPUs it may see.
        log_dir: where its log stays; ``None``: its scratch directory.
    """

    def __init__(self, module: str, name: str, inherited: int, devices: Sequence[str], log_dir: str | None) -> None:
        log = None if log_dir is None else _log_in(log_dir, name)
        self.scratch_dir = new_scratch()
        self._log = log or self.scratch_dir / "engine.log"
        self._destroyed, self._destroying = False, anyio.Lock()
        command = [sys.executable, "-m", module, str(inherited), str(os.getpid()), str(self.scratch_dir)]
        try:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=host_environment(devices, str(self.scratch_dir)),
                    pass_fds=[inherited],
                    start_new_session=True,
                )
        except BaseException:
            remove_scratch(self.scratch_dir)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, number: int) -> None:
        """To the process itself, and not to what it started; nothing where it has ended."""
        self._process.send_signal(number)

    def log_tail(self, num_lines: int) -> str:
        return _tail(self._log, num_lines)

    def how_it_ended(self) -> str:
        code = self._process.poll()
        return f"exit code {code}" if code is not None else f"pid {self._process.pid} is still there"

    async def wait(self, timeout_s: float) -> None:
        await anyio.to_thread.run_sync(self._reap, timeout_s)

    async def ended(self) -> None:
        while self.running:  # noqa: ASYNC110 - a child that ends sets no event
            await anyio.sleep(_POLL_S)

    async def destroy(self, timeout_s: float) -> None:
        async with self._destroying:  # whoever comes second returns once it is gone, too
            if self._destroyed:  # its number may be another group's by now
                return
            self._destroyed = True
            await anyio.to_thread.run_sync(self._end, timeout_s)
            await anyio.to_thread.run_sync(remove_scratch, self.scratch_dir)

    def _end(self, timeout_s: float) -> None:
        end_group(self._process.pid, timeout_s)
        self._reap(timeout_s)

    def _reap(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


class HostProcess(ModuleProcess):
    """An engine's host in a process of its own, which has the other end of the channel."""

    def __init__(self, name: str, sock: socket.socket, devices: Sequence[str], log_dir: str | None) -> None:
        with sock:
            super().__init__("sglrollout.engine.host", name, sock.fileno(), devices, log_dir)


class HostThread:
    """The same host on a thread of this process. One at a time: SGLang keeps its configuration process-wide."""

    _occupied: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str, sock: socket.socket, devices: Sequence[str], log_dir: str | None) -> None:
        if not HostThread._occupied.acquire(blocking=False):
            sock.close()
            raise LifecycleError(
                'an engine with isolation="thread" is already running in this process, and SGLang allows one: '
                'close it first, or use isolation="process"'
            )
        self.scratch_dir = new_scratch()
        self._children: list[Any] = []
        self._given_up = self._released = False
        self._failure = ""
        self._thread = threading.Thread(target=self._serve, args=(sock,), name=f"{name}-host", daemon=True)
        self._thread.start()

    def _serve(self, sock: socket.socket) -> None:
        from sglrollout.engine.host import serve_socket

        try:
            serve_socket(sock, self._note_children)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"

    def _note_children(self, children: list[Any]) -> None:
        self._children = children
        if self._given_up:
            self._kill_children()

    def log_tail(self, num_lines: int) -> str:
        return self._failure

    def how_it_ended(self) -> str:
        return self._failure or ("its thread is still there" if self._thread.is_alive() else "its thread ended")

    async def wait(self, timeout_s: float) -> None:
        await anyio.to_thread.run_sync(self._thread.join, timeout_s)

    async def ended(self) -> None:
        while self._thread.is_alive():  # noqa: ASYNC110 - nor does a thread
            await anyio.sleep(_POLL_S)

    async def destroy(self, timeout_s: float) -> None:
        """A thread cannot be killed: its engine's processes are, on which a launch or a wait in it fails."""
        self._given_up = True
        self._kill_children()
        await anyio.to_thread.run_sync(self._thread.join, timeout_s)
        await anyio.to_thread.run_sync(remove_scratch, self.scratch_dir)
        if not self._released and not self._thread.is_alive():
            self._released = True
            HostThread._occupied.release()

    def _kill_children(self) -> None:
        for child in self._children:
            with contextlib.suppress(Exception):
                child.kill()


def _log_in(directory: str, name: str) -> Path:
    """The log of an engine in the user's directory, which is made if need be.

    Raises:
        ConfigError: it cannot be written there.
    """
    path = Path(directory) / f"{name}-{os.getpid()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_room(directory, "log_dir")
        path.touch()
    except OSError as error:
        raise ConfigError("log_dir", directory, f"must be a directory that can be written ({error})") from error
    return path


def _tail(path: Path, num_lines: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = [line for line in lines if line.strip()][-num_lines:]
    return "\n".join(f"{line[:_LINE_CHARACTERS]}..." if len(line) > _LINE_CHARACTERS else line for line in last)
