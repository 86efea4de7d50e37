"""Inside SGLang's scheduler: takes weights from a trainer rank's memory into this TP rank's parameters.

The trainer's memory (a staging buffer of a few slots, or its parameters themselves) is mapped once. Which copies a
bucket needs follows from what the recorder noted and is worked out once too; a sync is then a hand-shake and a few
launches for each bucket.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from typing import Any, NamedTuple

import torch

from sglrollout.boxes import narrowed
from sglrollout.engine.scheduler_recorder import Recording
from sglrollout.errors import ChannelError
from sglrollout.wire.link import Failed, Filled, Joined, Loaded, Mapped, Offer, Piece, Region, connect


class _Batch(NamedTuple):
    """One bucket's copies: those that one launch makes together, and the others."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    others: list[tuple[torch.Tensor, torch.Tensor]]


class Loader:
    """The engine's end of one link, with what it mapped."""

    def __init__(
        self, path: str, token: str, engine: str, tp_rank: int, recording: Recording, timeout_s: float
    ) -> None:
        self._recording = recording
        self._link = connect(path, timeout_s)
        self._batches: list[_Batch] = []
        try:
            self._link.send(Joined(token, engine, tp_rank))
            offer, fds = self._link.receive_with_fds(timeout_s)
            if not isinstance(offer, Offer):
                raise ChannelError(f"expected an offer, got {type(offer).__name__}")
            try:
                regions = _map(offer.regions, fds)
                self._batches = [self._batch(pieces, regions, offer.dtypes) for pieces in offer.buckets]
                self._check_whole(offer.buckets)
            except Exception as error:
                self._link.send(Mapped(f"{type(error).__name__}: {error}"))
                raise
            self._link.send(Mapped())
        except BaseException:
            self._link.close()
            raise

    def load(self, timeout_s: float) -> dict[str, float]:
        """Take one sync's buckets as the trainer announces them.

        Raises:
            TimeoutError, ChannelError: the trainer stopped; the parameters are half old and half new.
        """
        _synchronize()
        busy_s, num_bytes = 0.0, 0
        try:
            for fill in self._recording.fills:
                fill.target.fill_(fill.value)
            for _ in self._batches:
                message = self._link.receive(timeout_s)
                if isinstance(message, Failed):
                    raise ChannelError(f"the trainer gave up: {message.error}")
                if not isinstance(message, Filled):
                    raise ChannelError(f"expected a bucket, got {type(message).__name__}")
                begun = time.perf_counter()
                num_bytes += self._take(self._batches[message.bucket])
                seconds = time.perf_counter() - begun
                busy_s += seconds
                self._link.send(Loaded(message.bucket, seconds))
        except Exception as error:
            with contextlib.suppress(ChannelError):
                self._link.send(Failed(f"{type(error).__name__}: {error}"))
            raise
        return {"seconds": busy_s, "num_bytes": num_bytes}

    def _take(self, batch: _Batch) -> int:
        if batch.targets:
            torch._foreach_copy_(batch.targets, batch.sources)
        for target, source in batch.others:
            target.copy_(source)
        _synchronize()
        return int(sum(target.nbytes for target in [*batch.targets, *(target for target, _ in batch.others)]))

    def _batch(self, pieces: list[Piece], regions: list[torch.Tensor], dtypes: list[str]) -> _Batch:
        batch = _Batch([], [], [])
        by_entry: dict[int, list[Any]] = {}
        for copy in self._recording.copies:
            by_entry.setdefault(copy.entry, []).append(copy)
        for piece in pieces:
            dtype = getattr(torch, dtypes[piece.entry])
            end = piece.offset + piece.box.numel * dtype.itemsize
            data = regions[piece.region][piece.offset : end].view(dtype).view(piece.box.size)
            for copy in by_entry.get(piece.entry, ()):
                met = copy.box.intersect(piece.box)
                if met is not None:
                    target = narrowed(copy.target, met.within(copy.box))
                    source = narrowed(data, met.within(piece.box))
                    if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype:
                        batch.targets.append(target)
                        batch.sources.append(source)
                    else:
                        batch.others.append((target, source))
        return batch

    def _check_whole(self, buckets: list[list[Piece]]) -> None:
        """Whether the buckets bring all that is to be copied."""
        needed = sum(copy.target.numel() for copy in self._recording.copies)
        planned = sum(t.numel() for b in self._batches for t in [*b.targets, *(target for target, _ in b.others)])
        if needed != planned:
            raise ChannelError(f"{len(buckets)} buckets bring {planned} elements, and {needed} are needed")

    def close(self) -> None:
        self._batches.clear()
        self._link.close()


def _map(regions: list[Region], fds: list[int]) -> list[torch.Tensor]:
    """Each region as bytes. Closes the file descriptors."""
    try:
        shared = iter(fds)
        return [_map_cuda(region) if region.cuda else _map_file(next(shared), region) for region in regions]
    finally:
        for fd in fds:
            os.close(fd)


def _map_file(fd: int, region: Region) -> torch.Tensor:
    memory = mmap.mmap(fd, region.num_bytes)  # lives as long as the tensor does
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map_cuda(region: Region) -> torch.Tensor:
    """Map it into the address space of this process's own device, whichever device of the machine it is on.

    The driver reads another device's memory over NVLink or PCIe. That device need not be visible here, and no context
    is made on it.
    """
    assert region.cuda is not None
    handle, storage_bytes, offset, counter, counter_offset, event, _ = region.cuda
    device = torch.cuda.current_device()
    storage = torch.UntypedStorage._new_shared_cuda(  # no event to wait for: trainers synchronize before each sync
        device, handle, storage_bytes, offset, counter, counter_offset, event, False
    )
    tensor = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device))
    return tensor.set_(storage, 0, (region.num_bytes,), (1,))


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
