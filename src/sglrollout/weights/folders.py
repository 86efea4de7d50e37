"""Folders of weights on a disk that trainer and engines share, each under its name once it is whole."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from sglrollout.errors import WeightSyncError
from sglrollout.wire.delta import Manifest

_PART, _INDEX = "model-{:05}-of-{:05}.safetensors", "model.safetensors.index.json"


def file_name(k: int, num_files: int) -> str:
    """Of bucket ``k``, as a model's folder on the Hub has it."""
    return _PART.format(k + 1, num_files)


class FolderWriter:
    """Writes one folder after the other.

    Args:
        root: in which they are made.
        written: those that there are, the latest last; it outlives this object.
    """

    def __init__(self, root: Path, written: list[Path]) -> None:
        self._root, self._written = root, written
        self._unfinished: Path | None = None
        self._index: dict[str, str] = {}
        self._num_bytes = 0
        self.num_written = 0
        """Bytes of weights, or of changes, since it was last set to 0."""

    @property
    def latest(self) -> Path:
        return self._written[-1]

    def begin(self) -> None:
        self.discard()
        self._unfinished = self._root / f".unfinished-{secrets.token_hex(4)}"
        self._index, self._num_bytes = {}, 0
        try:
            self._unfinished.mkdir()
        except OSError as error:
            raise WeightSyncError("transfer", f"{self._unfinished} could not be made: {error}") from error

    def add(self, file: str, tensors: Mapping[str, Any]) -> None:
        """Write a file.

        Raises:
            WeightSyncError: it could not be written.
        """
        assert self._unfinished is not None
        path = self._unfinished / file
        try:
            save_file(dict(tensors), path, metadata={"format": "pt"})
            _settle(path)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError("transfer", f"{path} could not be written: {error}") from error
        self._index |= dict.fromkeys(tensors, file)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._num_bytes += num_bytes
        self.num_written += num_bytes

    def finish(self, manifest: Manifest | None = None) -> None:
        """All is there: give it the name that engines are told.

        Args:
            manifest: to be written with it. A folder without one, and one of whole weights, has an index, as a model's
                folder has.

        Raises:
            WeightSyncError: it could not be written.
        """
        assert self._unfinished is not None
        is_whole = manifest is None or not manifest.base
        kind = "weights" if is_whole else "changes"
        whole = self._unfinished.with_name(self._unfinished.name.replace(".unfinished", kind))
        try:
            if manifest is not None:
                _settle(manifest.write(self._unfinished))
            if is_whole:
                index = self._unfinished / _INDEX
                index.write_text(json.dumps({"metadata": {"total_size": self._num_bytes}, "weight_map": self._index}))
                _settle(index)
            _settle(self._unfinished)
            self._unfinished.rename(whole)
            _settle(whole.parent)
        except OSError as error:
            raise WeightSyncError("transfer", f"{whole} could not be written: {error}") from error
        self._written.append(whole)
        self._unfinished = None

    def remove_outdated(self) -> None:
        """All but the latest, also what syncs that failed have left."""
        while len(self._written) > 1:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    def discard(self) -> None:
        """Remove what was begun and not finished."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)


def _settle(path: Path) -> None:
    """Have it on the disk, so that no reader on another machine finds a part of it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
