"""Axis-aligned boxes of tensor elements: where shards, splits and slices of a parameter lie.  Imports nothing of ours.

A weight on its way is described by boxes alone: what an FSDP rank holds, what fits in a staging buffer, what a TP rank
of an engine takes. Where two of them meet is their intersection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec


class Box(msgspec.Struct, array_like=True, frozen=True):
    """Elements ``start[d] <= index[d] < start[d] + size[d]`` of a tensor; of a scalar with no dimension, all of it."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """What both cover, or ``None``."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = zip(self.start, self.size, other.start, other.size, strict=True)
        size = tuple(min(a + m, b + n) - s for (a, m, b, n), s in zip(ends, start, strict=True))
        return Box(start, size) if all(extent > 0 for extent in size) else None

    def within(self, outer: Box) -> Box:
        """The same elements, counted from the first of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.size)

    def split(self, parts: int) -> list[Box]:
        """``parts`` boxes along the first dimension, as long as the first; the last ones are shorter, or empty."""
        if parts == 1:
            return [self]
        step = -(-self.size[0] // parts)
        edges = [min(i * step, self.size[0]) for i in range(parts + 1)]
        return [
            Box((self.start[0] + begin, *self.start[1:]), (end - begin, *self.size[1:]))
            for begin, end in pairwise(edges)
        ]


def narrowed(tensor: Any, box: Box) -> Any:
    """The view of a torch tensor that shows ``box`` of it."""
    for d, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        if (start, size) != (0, tensor.shape[d]):
            tensor = tensor.narrow(d, start, size)
    return tensor


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def box_of_view(shape: Sequence[int], offset: int, size: Sequence[int], strides: Sequence[int]) -> Box | None:
    """The box that a view of a contiguous tensor of ``shape`` shows, or ``None`` when it shows something else.

    Args:
        offset: of the view's first element.
        size: the view's shape, of as many dimensions as the tensor.
        strides: the view's, in elements.
    """
    if len(size) != len(shape):
        return None
    own = contiguous_strides(shape)
    start = []
    for d, stride in enumerate(own):
        if size[d] > 1 and strides[d] != stride:
            return None
        start.append(offset // stride if stride else 0)
        offset -= start[d] * stride
        if start[d] + size[d] > shape[d]:
            return None
    return Box(tuple(start), tuple(size)) if offset == 0 else None


def cover(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether the boxes are all of a tensor of ``shape``, each element once."""
    boxes = [box for box in boxes if box.numel]
    whole = Box.whole(shape)
    if sum(box.numel for box in boxes) != whole.numel or any(box.intersect(whole) != box for box in boxes):
        return False
    if len({box.start for box in boxes}) < len(boxes):
        return False
    if _is_grid(shape, boxes):  # the usual case, in time that many ranks do not square
        return True
    return not any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[:i])


def _is_grid(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes, which begin at different places, are all cells of a grid: what sharding makes."""
    edges: list[dict[int, int]] = [{} for _ in shape]
    for box in boxes:
        for d, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
            if edges[d].setdefault(start, size) != size:
                return False
    for d, sizes in enumerate(edges):
        end = 0
        for start in sorted(sizes):
            if start != end:
                return False
            end = start + sizes[start]
        if end != shape[d]:
            return False
    return len(boxes) == math.prod(len(sizes) for sizes in edges)
