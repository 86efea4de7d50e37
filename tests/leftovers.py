"""What processes leave behind."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mapped_shared_memory(pid: int) -> set[str]:
    """The files of /dev/shm that a process uses: SGLang's load snapshots, and semaphores."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[-1] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


class Leftovers:
    """What was seen of some processes, and is to be gone after them.

    Args:
        temporary: their directory of temporary files.
    """

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self.pids: list[int] = []
        self.shared_memory: set[str] = set()

    def see(self, pids: Iterable[int]) -> None:
        """These are running now."""
        self.pids = [*pids]
        self.shared_memory |= {path for pid in self.pids for path in mapped_shared_memory(pid)}

    def left_behind(self) -> list[str]:
        """Processes, temporary files and shared memory that are still there."""
        alive = [f"process {pid}" for pid in self.pids if is_running(pid)]
        files = [str(path) for path in self.temporary.glob("sglrollout*")]
        return alive + files + [path for path in sorted(self.shared_memory) if Path(path).exists()]

    def assert_nothing_left(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while (left := self.left_behind()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
