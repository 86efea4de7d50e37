"""Weights as what has changed since those before them, bit for bit: how that is written, and how it is applied.

A folder of changes has, for each file of whole weights (safetensors) of which anything changed, a file of the same name
with three kinds of tensors. Of a weight that changed in some elements, ``NAME:gaps`` has the distance of each of them
from the one before, and ``NAME:bits`` what they are now; of one that changed in many, ``NAME:whole`` has all elements.
Elements are integers of their size: no arithmetic touches them.

A trainer imports this, and the HTTP servers that this library starts. Imports torch only when called.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

MANIFEST = "sglrollout.json"
_GAPS, _BITS, _WHOLE = ":gaps", ":bits", ":whole"
_MOST_GAP = 65535
_GAP_BYTES = 2
_CHUNK_ELEMENTS = 1 << 22
"""Compared at once: the places of so many that differ take some hundred megabytes."""


class DeltaError(Exception):
    """A folder cannot be used as it is: it is damaged, or of other weights."""


class Manifest(msgspec.Struct, frozen=True):
    """What a folder has.

    Attributes:
        id: of these weights.
        base: of those that they are changes of; empty where they are whole.
        sums: of every weight as it should be, by file: see :func:`checksum`.
        changed: the files that the folder has.
    """

    id: str
    base: str
    sums: dict[str, dict[str, int]]
    changed: list[str]

    def write(self, folder: Path) -> Path:
        path = folder / MANIFEST
        path.write_bytes(msgspec.json.encode(self))
        return path

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """
        Raises:
            DeltaError: there is none, or it is damaged.
        """
        path = folder / MANIFEST
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise DeltaError(f"{path} cannot be read: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DeltaError(f"{path} is damaged: {error}") from error
        names = [*manifest.sums, *manifest.changed, manifest.id]
        outside = next((name for name in names if name in ("", "..") or Path(name).name != name), None)
        if outside is not None:
            raise DeltaError(f"{path} names {outside!r}, which is not a file of that folder")
        return manifest


def checksum(elements: Any) -> int:
    """Of the bytes of a contiguous numpy array (XXH3, 64 bits)."""
    return xxhash.xxh3_64_intdigest(memoryview(elements).cast("B")) if elements.size else 0


def bits(tensor: Any) -> Any:
    """The elements of a contiguous torch tensor, as integers of their size in one dimension."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.reshape(-1).view(integers[tensor.element_size()])


def update(name: str, old: Any, new: Any) -> dict[str, Any]:
    """What to write so that ``old`` becomes ``new``; ``old`` is that afterwards.

    Args:
        name: of the weight.
        old: its bits, on the CPU.
        new: its bits, on any device, where some hundred megabytes more are needed, of however large a weight.

    Returns:
        CPU tensors by name, no larger than the weight; none where nothing changed.
    """
    import torch

    gaps: list[Any] = []
    changed: list[Any] = []
    last = num_bytes = 0
    for start in range(0, new.numel(), _CHUNK_ELEMENTS):
        part = new[start : start + _CHUNK_ELEMENTS]
        differs = old[start : start + _CHUNK_ELEMENTS].to(part.device) != part
        num_bytes += int(differs.count_nonzero()) * (_GAP_BYTES + new.element_size())
        if num_bytes >= new.nbytes:  # before anything is made of that many
            old.copy_(new)
            return {name + _WHOLE: old}
        places = _spread(differs.nonzero().squeeze(1) + start, last)
        if places.numel():
            gaps.append(places.diff(prepend=places.new_tensor([last])).to(torch.int16).cpu())  # it wraps, and back
            changed.append(new[places].cpu())
            old[places.cpu()] = changed[-1]
            last = int(places[-1])
    if not gaps:
        return {}
    return {name + _GAPS: torch.cat(gaps).view(torch.uint16), name + _BITS: torch.cat(changed)}


def _spread(places: Any, last: int) -> Any:
    """These places, and between them and ``last`` others, so that no two neighbours are too far apart."""
    import torch

    if not places.numel():
        return places
    previous = torch.cat([places.new_tensor([last]), places[:-1]])
    counts = ((places - previous - 1).clamp(min=0) // _MOST_GAP) + 1  # those between, and the place itself
    ends = counts.cumsum(0)
    within = torch.arange(int(ends[-1]), device=places.device) - (ends - counts).repeat_interleave(counts)
    between = previous.repeat_interleave(counts) + (within + 1) * _MOST_GAP
    return torch.minimum(between, places.repeat_interleave(counts))


class File:
    """A safetensors file on this machine, to be changed in place.

    Raises:
        DeltaError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np

        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r+")
            size = int.from_bytes(self._data[:8].tobytes(), "little")
            self._header: dict[str, Any] = json.loads(self._data[8 : 8 + size].tobytes())
        except (OSError, ValueError) as error:
            raise DeltaError(f"{path} cannot be read: {error}") from error
        self._start = 8 + size

    @property
    def names(self) -> list[str]:
        """Of its weights."""
        return [name for name in self._header if name != "__metadata__"]

    def bits(self, name: str) -> Any:
        """The elements of a weight: a numpy view of integers of their size.

        Raises:
            DeltaError: there is no such weight.
        """
        import numpy as np

        entry = self._header.get(name)
        if entry is None:
            raise DeltaError(f"{name} is not in the weights that are to be changed")
        begin, end = (self._start + offset for offset in entry["data_offsets"])
        size = (end - begin) // max(1, math.prod(entry["shape"]))
        integers = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
        return self._data[begin:end].view(integers[size or 1])

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Change weights as :func:`update` wrote it.

        Args:
            changes: numpy arrays by name.

        Raises:
            DeltaError: they do not fit.
        """
        import numpy as np

        for key, given in changes.items():
            name, _, kind = key.rpartition(":")
            if f":{kind}" == _GAPS:
                continue
            elements = self.bits(name)
            if given.dtype != elements.dtype:
                raise DeltaError(f"{name} has elements of {elements.itemsize} bytes, and {key} of {given.itemsize}")
            places: Any = slice(None)
            fits = given.shape == elements.shape
            if f":{kind}" != _WHOLE:
                places = np.cumsum(changes.get(name + _GAPS, ()), dtype=np.int64)
                fits = places.shape == given.shape and (not places.size or int(places[-1]) < elements.size)
            if not fits:
                raise DeltaError(f"{key} does not fit {name}, which has {elements.size} elements")
            elements[places] = given

    def check(self, sums: Mapping[str, int]) -> None:
        """
        Raises:
            DeltaError: a weight is not as it should be.
        """
        for name, expected in sums.items():
            if checksum(self.bits(name)) != expected:
                raise DeltaError(f"{name} is not bit for bit what the trainer has")
