"""A host's scratch directory, and the list in it of files that SGLang keeps elsewhere (``/dev/shm``).

Whoever outlives the engine, its client or its host, removes both.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

_LIST = "files-elsewhere"
_SOCKET_PATH_ROOM = 60


def new_scratch() -> Path:
    """A private directory (mode 0700), short enough in name that sockets fit into it (their paths have 107 bytes)."""
    root = tempfile.gettempdir()
    if len(root) > _SOCKET_PATH_ROOM:
        root = "/tmp"
    return Path(tempfile.mkdtemp(prefix="sglrollout-", dir=root))


def note_file(scratch_dir: str, path: str) -> None:
    """Remember a file outside the scratch directory that must go with it."""
    with (Path(scratch_dir) / _LIST).open("a") as file:
        file.write(path + "\n")


def remove_scratch(scratch_dir: str | Path) -> None:
    """Remove the directory and every noted file; what is already gone is fine."""
    notes = Path(scratch_dir) / _LIST
    if notes.is_file():
        for line in notes.read_text().splitlines():
            Path(line).unlink(missing_ok=True)
    shutil.rmtree(scratch_dir, ignore_errors=True)
