"""What the control groups of this process grant, and how much host memory is available to it.

Imports nothing of ours.
"""

from __future__ import annotations

from pathlib import Path

import psutil

UNLIMITED = 1 << 60
_GROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Host memory that may be had without swapping, and within the limits of the control groups."""
    limit, used = memory_limit()
    available: int = psutil.virtual_memory().available
    return available if limit is None else min(available, max(0, limit - used))


def memory_limit() -> tuple[int | None, int]:
    """The tightest limit of this process's control groups, of version 1 or 2, and how much of it is used."""
    limits = []
    for directory, is_new in groups_of("memory"):
        limit = number_in(directory / ("memory.max" if is_new else "memory.limit_in_bytes"))
        if limit is not None and limit < UNLIMITED:
            used = number_in(directory / ("memory.current" if is_new else "memory.usage_in_bytes")) or 0
            used -= _droppable(directory)
            limits.append((limit - used, limit, used))
    if not limits:
        return None, 0
    _, limit, used = min(limits)
    return limit, max(0, used)


def groups_of(controller: str) -> list[tuple[Path, bool]]:
    """Directories of this process's groups, and of those above, and whether they are of version 2."""
    found = []
    for line in text_in(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        is_new = number == "0" and not controllers
        if is_new or controller in controllers.split(","):
            root = _GROUPS if is_new else _GROUPS / controller
            below = root / path.strip("/")
            found += [(directory, is_new) for directory in (below, *below.parents) if directory.is_relative_to(root)]
    return found


def _droppable(directory: Path) -> int:
    """Bytes of files that the kernel keeps as long as nobody needs the memory."""
    counts = dict(line.split(" ", 1) for line in text_in(directory / "memory.stat").splitlines() if " " in line)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))


def number_in(file: Path) -> int | None:
    text = text_in(file)
    return int(text) if text.isdecimal() else None


def text_in(file: Path) -> str:
    """Empty where there is no such file."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
