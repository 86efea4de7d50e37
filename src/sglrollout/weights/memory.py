"""Memory that a trainer rank shares with engines: a staging buffer of a few slots, or its parameters as they are."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sglrollout.wire.link import Region


class Staging:
    """A buffer of bytes that an engine can map.

    Args:
        num_bytes: of the whole.
        device: ``None`` is the CPU: then it is a file in memory without a name, which ends with the last process that
            maps it.
        shared: whether an engine will map it; otherwise it is plain memory.
    """

    def __init__(self, num_bytes: int, device: torch.device | None, shared: bool) -> None:
        self.fd: int | None = None
        if device is not None:
            with _memory_of_its_own():
                self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        elif shared:
            self.fd = os.memfd_create("sglrollout-staging", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, num_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(self.fd, num_bytes), dtype=torch.uint8)
        else:
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8)

    def region(self) -> Region:
        """How an engine finds it."""
        return Region(self.bytes.numel()) if self.fd is not None else export(self.bytes)

    def close(self) -> None:
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)
        self.bytes = torch.empty(0, dtype=torch.uint8)


def export(tensor: torch.Tensor) -> Region:
    """A CUDA tensor's whole storage, for another process to map.

    Raises:
        RuntimeError: the driver cannot share this memory (expandable segments, a memory saver's).
    """
    storage = tensor.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, _ = storage._share_cuda_()
    device = str(torch.cuda.get_device_properties(tensor.device).uuid)
    # No event to wait for: trainer ranks synchronize their devices before engines read.
    return Region(storage.nbytes(), device, (handle, size, offset, counter, counter_offset, event, False))


@dataclass
class Exports:
    """A rank's weights that engines of its machine may read where they are.

    Attributes:
        regions: the memory they are in.
        addresses: by weight: a number of ``regions``, and an offset in it.
        pointers: by weight, where that is in this process.
    """

    regions: list[Region] = field(default_factory=list)
    addresses: dict[int, tuple[int, int]] = field(default_factory=dict)
    pointers: dict[int, int] = field(default_factory=dict)

    def has_moved(self, read: Callable[[int], Any]) -> bool:
        """Whether one of them is not where it was."""
        return any(read(i).data_ptr() != pointer for i, pointer in self.pointers.items())


def export_weights(read: Callable[[int], Any], num_weights: int, device: torch.device) -> Exports:
    """What of this rank's weights can be mapped: what is on its device and contiguous, of whatever dtype."""
    exports, known = Exports(), dict[int, int]()
    for i in range(num_weights):
        tensor = read(i)
        if tensor.device != device or not tensor.is_contiguous() or not tensor.numel():
            continue
        base = tensor.untyped_storage().data_ptr()
        if base not in known:
            try:
                exports.regions.append(export(tensor))
            except RuntimeError:  # from expandable segments, or the like: it is staged
                continue
            known[base] = len(exports.regions) - 1
        exports.addresses[i] = (known[base], tensor.data_ptr() - base)
        exports.pointers[i] = tensor.data_ptr()
    return exports


@contextmanager
def _memory_of_its_own() -> Iterator[None]:
    """Allocate from a pool that is given back to the device, and not in expandable segments: CUDA IPC cannot share
    those."""
    expandable = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            yield
    finally:
        if expandable:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def copy_bytes_per_s(device: torch.device | None) -> float:
    """How fast this device copies its own memory: the floor of any load. Bytes written per second."""
    num_bytes, repeats = (64 << 20, 5) if device is not None else (32 << 20, 3)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device or "cpu")
    target = torch.empty_like(source)
    seconds = [_timed_copy(target, source, device) for _ in range(repeats)]
    return num_bytes / min(seconds)


def _timed_copy(target: torch.Tensor, source: torch.Tensor, device: torch.device | None) -> float:
    if device is None:
        begun = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begun
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
