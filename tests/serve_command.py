"""``sglrollout serve`` as a process, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import psutil

from tests.leftovers import Leftovers

COMMAND = (sys.executable, "-m", "sglrollout", "serve")
PATIENCE_S = 240


class ServeCommand(Leftovers):
    """The command on a CPU, in a session and with a directory of temporary files of its own.

    Args:
        given: its arguments.
        temporary: that directory.
        environment: what is set besides that of this process.
        popen: starts it, perhaps on another host.
    """

    def __init__(
        self,
        given: Sequence[str],
        temporary: Path,
        environment: Mapping[str, str] | None = None,
        popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
    ) -> None:
        super().__init__(temporary)
        self.said, self._lines = list[str](), SimpleQueue[str]()
        self.process = popen(
            [*COMMAND, *given, "--device", "cpu", "--dtype", "float32"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(temporary), **(environment or {})},
            start_new_session=True,
            text=True,
        )
        # Both are read all the time, so that it never waits for a reader.
        self._readers = [
            threading.Thread(target=self._read, args=(name,), daemon=True) for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        for line in getattr(self.process, name):
            self.said.append(line.rstrip())
            if name == "stdout":
                self._lines.put(line.rstrip())

    def address(self) -> str:
        """The URL, once it is up."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                line = self._lines.get(timeout=0.2)
            except Empty:
                continue
            self.see_all()
            found = re.search(r"https?://[^\s:]+:\d+", line)
            assert found, line
            return found[0]
        raise AssertionError("\n".join(self.said))

    def see_all(self) -> None:
        """Remember the processes that run now."""
        self.see(process.pid for process in psutil.Process(self.process.pid).children(recursive=True))

    def wait_for_scheduler(self) -> None:
        """Until SGLang has begun to load."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.pids) < 3 and time.monotonic() < deadline:  # the server, Python's tracker, a scheduler
            assert self.process.poll() is None, self.said
            self.see_all()
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit code, once it has ended by itself."""
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(10)
        return code

    def close(self) -> None:
        """Whatever became of it."""
        self.process.kill()
        self.process.wait()
        for reader, stream in zip(self._readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(10)
            assert stream is not None
            stream.close()
