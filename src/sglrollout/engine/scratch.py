"""A host's scratch directory, and the list in it of files that SGLang keeps elsewhere (``/dev/shm``).

Whoever outlives the engine, its client or its host, removes both.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from sglrollout.errors import ConfigError

_LIST = "files-elsewhere"
_READY = "ready"
_SOCKET_PATH_ROOM = 60
_LEAST_FREE_BYTES = 16 << 20


def new_scratch() -> Path:
    """A private directory (mode 0700), short enough in name that sockets fit into it (their paths have 107 bytes).

    Raises:
        ConfigError: of ``TMPDIR``, where none can be made, or what is written into it would not fit.
    """
    try:
        root = tempfile.gettempdir()
        if len(root) > _SOCKET_PATH_ROOM:
            root = "/tmp"
        check_room(root, "TMPDIR")
        return Path(tempfile.mkdtemp(prefix="sglrollout-", dir=root))
    except OSError as error:
        rule = f"must be a directory in which files can be made ({error})"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR", tempfile.tempdir), rule) from error


def check_room(directory: str, field: str) -> None:
    """
    Raises:
        ConfigError: of ``field``: its file system is full, or nearly.
        OSError: there is no such directory.
    """
    free = shutil.disk_usage(directory).free
    if free < _LEAST_FREE_BYTES:
        rule = f"must be on a file system with {_LEAST_FREE_BYTES >> 20} MB free, and {free >> 20} MB are"
        raise ConfigError(field, directory, rule)


def note_file(scratch_dir: str, path: str) -> None:
    """Remember a file outside the scratch directory that must go with it."""
    with (Path(scratch_dir) / _LIST).open("a") as file:
        file.write(path + "\n")


def mark_ready(scratch_dir: str | Path) -> None:
    """Say that what runs there has come up."""
    (Path(scratch_dir) / _READY).touch()


def is_ready(scratch_dir: str | Path) -> bool:
    """Whether it has said so."""
    return (Path(scratch_dir) / _READY).exists()


def remove_scratch(scratch_dir: str | Path) -> None:
    """Remove the directory and every noted file; what is already gone is fine."""
    notes = Path(scratch_dir) / _LIST
    if notes.is_file():
        for line in notes.read_text().splitlines():
            Path(line).unlink(missing_ok=True)
    shutil.rmtree(scratch_dir, ignore_errors=True)
