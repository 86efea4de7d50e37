"""The road of :class:`sglrollout.Disk`: safetensors files, as a model's folder on the Hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread

from sglrollout.weights.assembly import Assembler
from sglrollout.weights.folders import FolderWriter, file_name
from sglrollout.weights.leader import Leader
from sglrollout.weights.roads import SecondRoad
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.transfer import Clock, Layout


class DiskRoad:
    """See :class:`sglrollout.weights.roads.Road`.

    Args:
        folder: where folders of weights are written; ``None`` on a rank without remote engines.
        written: those that this syncer has written and not removed, the latest last; it outlives this road.
    """

    method = "disk"
    second: SecondRoad | None = None

    def __init__(
        self, layout: Layout, source: WeightSource, bucket_bytes: int, folder: Path | None, written: list[Path]
    ) -> None:
        self._writer = FolderWriter(folder, written) if folder is not None else None
        self._assembler = Assembler(layout, source, bucket_bytes, assembles=folder is not None, packed=True)

    @property
    def num_buckets(self) -> int:
        return self._assembler.num_buckets

    @property
    def num_written(self) -> int:
        return self._writer.num_written if self._writer is not None else 0

    async def connect(self, leader: Leader) -> None:
        """Nothing: engines know the disk."""

    async def prove(self, leader: Leader) -> None:
        """Nothing: whether an engine sees the folder, or was started anew, shows when it is to read it."""

    def begin(self) -> None:
        self._assembler.begin()
        if self._writer is not None:
            self._writer.begin()
            self._writer.num_written = 0

    async def open(self, leader: Leader) -> None:
        """Nothing: engines read once all is there."""

    def bucket(self, k: int, clock: Clock) -> None:
        bucket = self._assembler.bucket(k, clock.wait)
        if bucket is None:
            return
        assert self._writer is not None
        self._writer.add(file_name(k, self.num_buckets), {s.name: bucket.tensor(s) for s in bucket.segments})
        if k + 1 == self.num_buckets:
            self._writer.finish()

    async def load(self, leader: Leader, k: int, made: list[Any]) -> None:
        if self._writer is not None and k + 1 == self.num_buckets:
            await leader.load_from_disk(str(self._writer.latest))

    async def close_for(self, leader: Leader) -> None:
        if self._writer is not None:
            await anyio.to_thread.run_sync(self._writer.remove_outdated)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        self._assembler.close()
