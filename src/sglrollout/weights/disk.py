"""The road of :class:`sglrollout.Disk`: safetensors files, as a model's folder on the Hub has them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from safetensors import SafetensorError
from safetensors.torch import save_file

from sglrollout.errors import WeightSyncError
from sglrollout.weights.assembly import Assembler
from sglrollout.weights.leader import Leader
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.transfer import Clock, Layout

_PART, _INDEX = "model-{:05}-of-{:05}.safetensors", "model.safetensors.index.json"


class DiskRoad:
    """See :class:`sglrollout.weights.roads.Road`.

    Args:
        folder: where folders of weights are written; ``None`` on a rank without remote engines.
        written: those that this syncer has written and not removed, the latest last; it outlives this road.
    """

    method = "disk"

    def __init__(
        self, layout: Layout, source: WeightSource, bucket_bytes: int, folder: Path | None, written: list[Path]
    ) -> None:
        self._folder, self._written = folder, written
        self._assembler = Assembler(layout, source, bucket_bytes, assembles=folder is not None, packed=True)
        self._unfinished: Path | None = None
        self._index: dict[str, str] = {}
        self._num_bytes = 0

    @property
    def num_buckets(self) -> int:
        return self._assembler.num_buckets

    async def connect(self, leader: Leader) -> None:
        """Nothing: engines know the disk."""

    async def prove(self, leader: Leader) -> None:
        """Nothing: whether an engine sees the folder shows when it is to read it."""

    def begin(self) -> None:
        self._assembler.begin()
        self._discard()
        if self._folder is not None:
            self._unfinished = self._folder / f".unfinished-{secrets.token_hex(4)}"
            self._unfinished.mkdir()
            self._index, self._num_bytes = {}, 0

    async def open(self, leader: Leader) -> None:
        """Nothing: engines read once all is there."""

    def bucket(self, k: int, clock: Clock) -> None:
        bucket = self._assembler.bucket(k, clock.wait)
        if bucket is None:
            return
        assert self._unfinished is not None
        path = self._unfinished / _PART.format(k + 1, self.num_buckets)
        try:
            save_file({s.name: bucket.tensor(s) for s in bucket.segments}, path, metadata={"format": "pt"})
            _settle(path)
            self._index |= {segment.name: path.name for segment in bucket.segments}
            self._num_bytes += bucket.flat.numel()
            if k + 1 == self.num_buckets:
                self._finish()
        except (OSError, SafetensorError) as error:
            raise WeightSyncError("transfer", f"{path} could not be written: {error}") from error

    def _finish(self) -> None:
        """All is there: give it the name that engines are told."""
        assert self._unfinished is not None
        index = self._unfinished / _INDEX
        index.write_text(json.dumps({"metadata": {"total_size": self._num_bytes}, "weight_map": self._index}))
        _settle(index)
        _settle(self._unfinished)
        whole = self._unfinished.with_name(self._unfinished.name.replace(".unfinished", "weights"))
        self._unfinished.rename(whole)
        _settle(whole.parent)
        self._written.append(whole)
        self._unfinished = None

    async def load(self, leader: Leader, k: int, made: list[Any]) -> None:
        if self._folder is not None and k + 1 == self.num_buckets:
            await leader.load_from_disk(str(self._written[-1]))

    async def close_for(self, leader: Leader) -> None:
        await anyio.to_thread.run_sync(self._remove_outdated)

    def _remove_outdated(self) -> None:
        """Also what syncs that failed have left."""
        while len(self._written) > 1:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    def close(self) -> None:
        self._discard()
        self._assembler.close()

    def _discard(self) -> None:
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
