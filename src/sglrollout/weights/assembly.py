"""Whole weights, bucket by bucket, for engines that do not read the trainer's memory: gathered, and laid end to end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglrollout.boxes import narrowed
from sglrollout.weights.plan import aligned, plan_buckets
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.transfer import Gatherer, Layout

Wait = Callable[[Callable[[], bool], str], None]
"""``wait(is_done, what)``, with a deadline."""


class Segment(NamedTuple):
    """A weight in a buffer, under one of its names: the bytes from ``start`` to ``end``."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    end: int


class Assembly(NamedTuple):
    """A bucket: ``flat`` are its bytes. They stay as they are until the second next bucket."""

    flat: torch.Tensor
    segments: list[Segment]

    def tensor(self, segment: Segment) -> torch.Tensor:
        return self.flat[segment.start : segment.end].view(segment.dtype).view(segment.shape)


class Assembler:
    """Gathers buckets of whole weights, in turn into one of two buffers.

    Args:
        layout, source: of this rank.
        bucket_bytes: a weight that is larger travels alone.
        assembles: whether this rank has a use for the buckets. Others take part in the gathers.
        packed: without gaps, and once for each name, as SGLang's ``FlattenedTensorBucket`` lays tensors out. Else each
            weight begins at an aligned place, and has all its names.
    """

    def __init__(
        self, layout: Layout, source: WeightSource, bucket_bytes: int, *, assembles: bool, packed: bool
    ) -> None:
        self._layout, self._source, self._assembles, self._packed = layout, source, assembles, packed
        planned = plan_buckets(layout.planned({}, whole=True), bucket_bytes, split=False)
        buckets = [bucket for bucket in planned if any(bucket.parts)]  # weights without elements may fill one
        self._gatherer = Gatherer(layout, buckets, num_slots=1, shared=False)
        self.segments = [self._lay_out(k) for k in range(len(buckets))]
        """By bucket."""
        self._flat: list[torch.Tensor] = []
        self._read: Any = None

    @property
    def num_buckets(self) -> int:
        return len(self._gatherer.buckets)

    def begin(self) -> None:
        """Once for each sync."""
        self._read = self._source.read()
        if self._assembles:  # anew: sharing the same memory again and again would pile up records of it
            size = max((segments[-1].end for segments in self.segments), default=0)
            device = self._layout.device or "cpu"
            self._flat.clear()  # first, so that there are never four
            self._flat = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def bucket(self, k: int, wait: Wait) -> Assembly | None:
        """Gather bucket ``k``; ``None`` on a rank that has no use for it."""
        gathering = self._gatherer.launch(k, self._read)
        wait(gathering.is_done, f"bucket {k} of {self.num_buckets} was not gathered")
        if gathering.error is not None:
            raise gathering.error
        if k + 1 == self.num_buckets:
            self._read = None  # it may hold tensors that were made for this sync alone
        if not self._assembles:
            return None
        assembly = Assembly(self._flat[k % 2][: self.segments[k][-1].end], self.segments[k])
        self._fill(k, assembly)
        if self._layout.device is not None:
            torch.cuda.synchronize(self._layout.device)
        return assembly

    def _lay_out(self, k: int) -> list[Segment]:
        segments: list[Segment] = []
        position = 0
        for entry in self._entries(k):
            spec, dtype = self._layout.weights[entry].spec, self._dtype(entry)
            num_bytes = math.prod(spec.shape) * dtype.itemsize
            for i, name in enumerate((spec.name, *spec.aliases)):
                if i and self._packed:
                    position += num_bytes
                segments.append(Segment(name, torch.Size(spec.shape), dtype, position, position + num_bytes))
            position += num_bytes if self._packed else aligned(num_bytes)
        return segments

    def _entries(self, k: int) -> list[int]:
        """The weights of a bucket, in their order in it: where there are no gaps, wide elements first, so that each
        weight begins at a multiple of its elements' size."""
        parts = self._gatherer.buckets[k].parts
        entries = list(dict.fromkeys(piece.entry for part in parts for piece in part))
        return sorted(entries, key=lambda entry: -self._dtype(entry).itemsize) if self._packed else entries

    def _dtype(self, entry: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._layout.dtypes[entry])
        return dtype

    def _fill(self, k: int, assembly: Assembly) -> None:
        """Put the parts of each weight together."""
        views: dict[str, list[torch.Tensor]] = {}
        by_name = {segment.name: segment for segment in assembly.segments}
        data = self._gatherer.staging.bytes
        for piece in self._gatherer.buckets[k].pieces(self._gatherer.start(k)):
            spec, dtype = self._layout.weights[piece.entry].spec, self._dtype(piece.entry)
            if spec.name not in views:
                names = (spec.name, *spec.aliases) if self._packed else (spec.name,)
                views[spec.name] = [assembly.tensor(by_name[name]) for name in names]
            part = data[piece.offset : piece.offset + piece.box.numel * dtype.itemsize].view(dtype)
            for view in views[spec.name]:
                narrowed(view, piece.box).copy_(part.view(piece.box.size))

    def close(self) -> None:
        self._flat.clear()
        self._read = None
        self._gatherer.close()
