"""A host's scratch directory, and the list in it of files that SGLang keeps elsewhere (``/dev/shm``).

Whoever outlives the engine, its client or its host, removes both.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_LIST = "files-elsewhere"


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
