"""The plan of a sync: which part of which weight travels in which bucket, at which place.

Every rank computes it from the same facts. A bucket's memory is divided evenly among the ranks that gather it; each
rank packs its own parts, one after the other, into its share, and one all-gather of the shares fills the bucket. So
nothing is rearranged: an engine takes each part from where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglrollout.boxes import Box
from sglrollout.wire.link import STAGING, Piece

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Planned:
    """A weight as the plan sees it.

    Attributes:
        shape: of the whole.
        itemsize: bytes of an element on the way.
        ranks: the global ranks that gather it; empty when every rank that sends it holds it whole.
        boxes: what each of ``ranks`` holds; the whole, once, when there are none.
        addresses: where engines can read each of ``boxes`` themselves: a region and an offset in it; ``None``: it must
            be staged.
        sent: whether this rank has a part in sending it.
    """

    shape: tuple[int, ...]
    itemsize: int
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    addresses: tuple[tuple[int, int], ...] | None = None
    sent: bool = True


@dataclass
class Bucket:
    """What travels together.

    Attributes:
        ranks: that gather it; empty when it is not gathered.
        share: bytes of each rank's part of the bucket.
        parts: for each rank (for the only one, when it is not gathered) its pieces. Offsets count from the start of
            that rank's share.
        direct: pieces that engines read from where they are; then there is nothing else in the bucket.
    """

    ranks: tuple[int, ...] = ()
    share: int = 0
    parts: list[list[Piece]] = field(default_factory=list)
    direct: list[Piece] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.share * len(self.parts)

    def pieces(self, start: int) -> list[Piece]:
        """All of them, by their offsets in the region, for a bucket that begins at ``start``."""
        placed = [
            Piece(piece.entry, piece.box, piece.region, start + i * self.share + piece.offset)
            for i, part in enumerate(self.parts)
            for piece in part
        ]
        return placed + self.direct


def plan_buckets(weights: Sequence[Planned], bucket_bytes: int, split: bool = True) -> list[Bucket]:
    """Pack weights into buckets of at most ``bucket_bytes``: what is gathered first, as all ranks must agree on that.

    Args:
        split: cut what is larger than a bucket along its first dimension. Otherwise it travels alone, whole.
    """
    direct = [
        Piece(i, box, *address)
        for i, weight in enumerate(weights)
        if weight.sent
        for box, address in zip(weight.boxes, weight.addresses or (), strict=weight.addresses is not None)
        if box.numel
    ]
    buckets = [Bucket(direct=direct)] if direct else []
    packer = _Packer(bucket_bytes)
    staged = [(i, weight) for i, weight in enumerate(weights) if weight.sent and weight.addresses is None]
    for i, weight in sorted(staged, key=lambda item: not item[1].ranks):
        for boxes in _cut(weight, bucket_bytes) if split else [weight.boxes]:
            packer.add(i, weight, boxes)
    return buckets + packer.buckets


class _Packer:
    """Fills one bucket after the other."""

    def __init__(self, bucket_bytes: int) -> None:
        self.buckets: list[Bucket] = []
        self._bucket_bytes = bucket_bytes
        self._used: list[int] = []

    def add(self, entry: int, weight: Planned, boxes: Sequence[Box]) -> None:
        sizes = [aligned(box.numel * weight.itemsize) for box in boxes]
        bucket = self.buckets[-1] if self.buckets else None
        if bucket is None or bucket.ranks != weight.ranks or self._is_full(sizes):
            bucket = Bucket(weight.ranks, 0, [[] for _ in boxes])
            self.buckets.append(bucket)
            self._used = [0] * len(boxes)
        for i, (box, size) in enumerate(zip(boxes, sizes, strict=True)):
            if box.numel:
                bucket.parts[i].append(Piece(entry, box, STAGING, self._used[i]))
                self._used[i] += size
        bucket.share = max(self._used)

    def _is_full(self, sizes: list[int]) -> bool:
        share = max(used + size for used, size in zip(self._used, sizes, strict=True))
        return share * len(sizes) > self._bucket_bytes


def _cut(weight: Planned, bucket_bytes: int) -> list[tuple[Box, ...]]:
    """The boxes of each rank in as many parts as it takes for a part of all of them to fit into a bucket."""
    share = max(aligned(box.numel * weight.itemsize) for box in weight.boxes)
    rows = max((box.size[0] for box in weight.boxes if box.size), default=1)
    num_parts = min(max(1, math.ceil(share * len(weight.boxes) / bucket_bytes)), max(1, rows))
    while num_parts < rows and _largest_part(weight, num_parts) * len(weight.boxes) > bucket_bytes:
        num_parts += 1
    parts = [box.split(num_parts) for box in weight.boxes]
    return list(zip(*parts, strict=True))


def _largest_part(weight: Planned, num_parts: int) -> int:
    return max(
        aligned(math.ceil(box.size[0] / num_parts) * math.prod(box.size[1:]) * weight.itemsize) for box in weight.boxes
    )


def aligned(num_bytes: int) -> int:
    """The next place at which a tensor of any dtype may begin."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
