"""The road of :class:`sglrollout.Disk` with ``delta=True``: of weights that engines have, what changed."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import anyio.to_thread

from sglrollout.checksum import checksum
from sglrollout.errors import WeightSyncError
from sglrollout.weights.assembly import Assembler, Assembly
from sglrollout.weights.folders import FolderWriter, file_name
from sglrollout.weights.leader import Leader
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.transfer import Clock, Layout
from sglrollout.wire.delta import Manifest, bits, update


class DeltaRoad:
    """See :class:`sglrollout.weights.roads.Road`. Keeps the weights of the last sync in this rank's memory, and writes
    what differs, or all where no engine has those of the last sync.

    Args:
        folder: where folders of weights are written; ``None`` on a rank without remote engines.
        written: those that this syncer has written and not removed, the latest last; it outlives this road.
    """

    method = "delta"

    def __init__(
        self, layout: Layout, source: WeightSource, bucket_bytes: int, folder: Path | None, written: list[Path]
    ) -> None:
        self._writer = FolderWriter(folder, written) if folder is not None else None
        self._assembler = Assembler(layout, source, bucket_bytes, assembles=folder is not None, packed=True)
        self._kept: list[Assembly] = []
        """All weights as they were last written, by bucket, on the CPU."""
        self._id = ""
        """Of them; empty while they are a mixture."""
        self._sums: dict[str, dict[str, int]] = {}
        self._base, self._up_to_date = "", set[str]()
        """What this sync builds on, empty where it writes all; and the engines that have that."""

    @property
    def num_buckets(self) -> int:
        return self._assembler.num_buckets

    @property
    def num_written(self) -> int:
        return self._writer.num_written if self._writer is not None else 0

    async def connect(self, leader: Leader) -> None:
        await leader.mirrors()

    async def prove(self, leader: Leader) -> None:
        """Nothing: an engine that was started anew since says so when it is asked what it has."""

    def begin(self) -> None:
        self._assembler.begin()
        if self._writer is not None:
            self._writer.begin()
            self._writer.num_written = 0

    async def open(self, leader: Leader) -> None:
        if self._writer is not None:
            held = await leader.mirrors()
            self._up_to_date = {name for name, ids in held.items() if self._id and ids == {self._id}}
            self._base = self._id if self._up_to_date else ""
            self._id, self._sums = "", {}

    def bucket(self, k: int, clock: Clock) -> None:
        bucket = self._assembler.bucket(k, clock.wait)
        if bucket is None:
            return
        assert self._writer is not None
        file = file_name(k, self.num_buckets)
        tensors = self._update(k, bucket) if self._base else self._keep(k, bucket)
        if tensors:
            changed = {name.rpartition(":")[0] for name in tensors} if self._base else set(tensors)
            self._sums[file] = {s.name: checksum(bucket.tensor(s)) for s in bucket.segments if s.name in changed}
            self._writer.add(file, tensors)
        if k + 1 == self.num_buckets:
            self._id = secrets.token_hex(8)
            self._writer.finish(Manifest(self._id, self._base, self._sums))

    def _update(self, k: int, bucket: Assembly) -> dict[str, Any]:
        kept, changes = self._kept[k], dict[str, Any]()
        for segment in bucket.segments:
            changes |= update(segment.name, bits(kept.tensor(segment)), bits(bucket.tensor(segment)))
        return changes

    def _keep(self, k: int, bucket: Assembly) -> dict[str, Any]:
        if k == len(self._kept):
            self._kept.append(Assembly(bucket.flat.to("cpu", copy=True), bucket.segments))
        else:
            self._kept[k].flat.copy_(bucket.flat)
        return _tensors(self._kept[k])

    async def load(self, leader: Leader, k: int, made: list[Any]) -> None:
        if self._writer is None or k + 1 < self.num_buckets:
            return
        lacking = {member.name for member in leader.remote}
        if self._base:
            refusals = await leader.load_written(self._writer.latest, self._up_to_date)
            lacking = lacking - self._up_to_date | set(refusals)
            if lacking:
                await anyio.to_thread.run_sync(self._write_all)
        for name, refusal in (await leader.load_written(self._writer.latest, lacking)).items():
            raise WeightSyncError("transfer", refusal, engine=name)

    def _write_all(self) -> None:
        """For engines that cannot use the changes: the weights, as they are kept."""
        assert self._writer is not None
        self._writer.begin()
        sums: dict[str, dict[str, int]] = {}
        for k, kept in enumerate(self._kept):
            file, tensors = file_name(k, self.num_buckets), _tensors(kept)
            sums[file] = {name: checksum(tensor) for name, tensor in tensors.items()}
            self._writer.add(file, tensors)
        self._writer.finish(Manifest(self._id, "", sums))

    async def close_for(self, leader: Leader) -> None:
        if self._writer is not None:
            await anyio.to_thread.run_sync(self._writer.remove_outdated)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        self._kept.clear()
        self._id = ""
        self._assembler.close()


def _tensors(kept: Assembly) -> dict[str, Any]:
    return {segment.name: kept.tensor(segment) for segment in kept.segments}
