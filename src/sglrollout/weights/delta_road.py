"""The roads of :class:`sglrollout.Disk` with ``delta=True``: of weights that engines have, what changed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sglrollout.errors import WeightSyncError
from sglrollout.weights.assembly import Assembly
from sglrollout.weights.disk import DiskRoad
from sglrollout.weights.folders import FolderWriter, file_name
from sglrollout.weights.leader import Leader
from sglrollout.weights.remote import Kept, LastKept
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.transfer import Clock, Layout
from sglrollout.wire.delta import Manifest, bits, checksum, update

_log = logging.getLogger("sglrollout.weights")


class DeltaRoad(DiskRoad):
    """Writes what differs from the weights of the last sync, or all where no engine has those.

    Args:
        last: the weights of the last sync; it outlives this road, as ``written`` does.
    """

    method = "delta"

    def __init__(
        self,
        layout: Layout,
        source: WeightSource,
        bucket_bytes: int,
        folder: Path | None,
        written: list[Path],
        last: LastKept,
    ) -> None:
        super().__init__(layout, source, bucket_bytes, folder, written)
        self._last = last
        self._kept, self._base = Kept(), ""
        """The weights of this sync, as they come, and the id of those that they are written as changes of."""
        self._changed: list[str] = []
        self._takers: set[str] = set()
        """Engines that take what is written."""
        self.second: MendingRoad = MendingRoad(self._writer, self.num_buckets)

    async def connect(self, leader: Leader) -> None:
        await leader.mirrors("plan")

    def begin(self) -> None:
        super().begin()
        self.second.lacking.clear()

    async def open(self, leader: Leader) -> None:
        if self._writer is None:
            return
        kept, self._last.kept = self._last.kept, None  # it is nobody else's while it is a mixture
        engines = await leader.mirrors("transfer")
        self._takers, self._base, self._changed = set(engines), "", []
        if kept is not None and [bucket.segments for bucket in kept.buckets] == self._assembler.segments:
            up_to_date = {name for name, ids in engines.items() if ids == {kept.id}}
            if up_to_date:
                self._takers, self._base = up_to_date, kept.id
        else:
            kept = Kept()
        self._kept = kept
        self.second.lacking = set(engines) - self._takers

    def bucket(self, k: int, clock: Clock) -> None:
        bucket = self._assembler.bucket(k, clock.wait)
        if bucket is None:
            return
        assert self._writer is not None
        file, kept = file_name(k, self.num_buckets), self._kept
        changes = self._change(file, kept.buckets[k], bucket) if self._base else self._keep(file, k, bucket)
        if changes:
            self._changed.append(file)
            self._writer.add(file, changes)
        if k + 1 == self.num_buckets:
            kept.id = secrets.token_hex(8)
            self._writer.finish(Manifest(kept.id, self._base, kept.sums, self._changed))
            self._last.kept = self.second.kept = kept

    def _change(self, file: str, old: Assembly, new: Assembly) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for segment in new.segments:
            elements = bits(old.tensor(segment))
            changes = update(segment.name, elements, bits(new.tensor(segment)))
            if changes:
                written |= changes
                self._kept.sums[file][segment.name] = checksum(elements.numpy())
        return written

    def _keep(self, file: str, k: int, new: Assembly) -> dict[str, Any]:
        buckets = self._kept.buckets
        if k == len(buckets):
            buckets.append(Assembly(new.flat.to("cpu", copy=True), new.segments))
        else:
            buckets[k].flat.copy_(new.flat)
        self._kept.sums[file] = {s.name: checksum(bits(buckets[k].tensor(s)).numpy()) for s in new.segments}
        return _tensors(buckets[k])

    async def load(self, leader: Leader, k: int, made: list[Any]) -> None:
        if self._writer is None or k + 1 < self.num_buckets:
            return
        refusals = await _load(leader, self._writer.latest, self._kept.id, self._takers)
        if not self._base:
            _raise_first(refusals)
        for name, reason in refusals.items():
            _log.warning("%s gets all weights, for it could not take what has changed: %s", name, reason)
        self.second.lacking |= set(refusals)


class MendingRoad:
    """After a :class:`DeltaRoad`: all weights, as it kept them, for engines that could not take what has changed."""

    second = None

    def __init__(self, writer: FolderWriter | None, num_buckets: int) -> None:
        self._writer, self.num_buckets = writer, num_buckets
        self.lacking: set[str] = set()
        self.kept = Kept()
        self.num_written = 0

    @property
    def needed(self) -> bool:
        return bool(self.lacking)

    def begin(self) -> None:
        if self._writer is not None and self.needed:
            self._writer.begin()

    async def open(self, leader: Leader) -> None:
        """Nothing."""

    def bucket(self, k: int, clock: Clock) -> None:
        if self._writer is None or not self.needed:
            return
        self._writer.add(file_name(k, self.num_buckets), _tensors(self.kept.buckets[k]))
        if k + 1 == self.num_buckets:
            self._writer.finish(Manifest(self.kept.id, "", self.kept.sums, list(self.kept.sums)))

    async def load(self, leader: Leader, k: int, made: list[Any]) -> None:
        if self._writer is not None and self.needed and k + 1 == self.num_buckets:
            _raise_first(await _load(leader, self._writer.latest, self.kept.id, self.lacking))

    async def close_for(self, leader: Leader) -> None:
        """Nothing: the road before this one does it."""

    def close(self) -> None:
        """Nothing."""


async def _load(leader: Leader, folder: Path, new_id: str, engines: Collection[str]) -> dict[str, str]:
    """Have engines' copies updated, and loaded. Why some could not be, by engine."""
    refusals = await leader.update_mirrors(folder, new_id, engines)
    await leader.load_mirrors(new_id, set(engines) - set(refusals))
    return refusals


def _raise_first(refusals: dict[str, str]) -> None:
    for name, reason in refusals.items():
        raise WeightSyncError("transfer", f"its copy of the weights could not be updated: {reason}", engine=name)


def _tensors(kept: Assembly) -> dict[str, Any]:
    return {segment.name: kept.tensor(segment) for segment in kept.segments}
