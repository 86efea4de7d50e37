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
from functools import cached_property
from typing import Any, NamedTuple

import torch

from sglrollout.boxes import narrowed
from sglrollout.engine.scheduler_recorder import Copy, Recording
from sglrollout.errors import ChannelError
from sglrollout.wire.link import STAGING, Failed, Filled, Joined, Loaded, Mapped, Offer, Piece, Region, connect

_SMALL_BYTES = 1 << 20


class _Batch(NamedTuple):
    """One bucket's copies, as (target, source): the small ones, made by one launch; large ones from this device's own
    memory; and large ones from another's, made beside those."""

    small: tuple[list[torch.Tensor], list[torch.Tensor]]
    near: list[tuple[torch.Tensor, torch.Tensor]]
    far: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def targets(self) -> list[torch.Tensor]:
        return self.small[0] + [target for target, _ in self.near + self.far]


class Loader:
    """The engine's end of one link, with what it mapped."""

    def __init__(
        self, path: str, token: str, engine: str, tp_rank: int, recording: Recording, timeout_s: float
    ) -> None:
        self._recording = recording
        self._link = connect(path, timeout_s)
        self._batches: list[_Batch] = []
        self._copies: dict[int, list[Copy]] = {}
        for copy in recording.copies:
            self._copies.setdefault(copy.entry, []).append(copy)
        try:
            self._link.send(Joined(token, engine, tp_rank))
            offer, fds = self._link.receive_with_fds(timeout_s)
            if not isinstance(offer, Offer):
                for fd in fds:
                    os.close(fd)
                raise ChannelError(f"expected an offer, got {type(offer).__name__}")
            try:
                regions = _map(offer.regions, fds)
                self._batches = [self._batch(pieces, regions, offer) for pieces in offer.buckets]
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
        synchronize()
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
        if batch.far:
            stream = self._far_stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for target, source in batch.far:
                    target.copy_(source)
        for target, source in batch.near:
            target.copy_(source)
        if batch.small[0]:
            torch._foreach_copy_(*batch.small)
        synchronize()
        return int(sum(target.nbytes for target in batch.targets))

    @cached_property
    def _far_stream(self) -> Any:
        return torch.cuda.Stream()

    def _batch(self, pieces: list[Piece], regions: list[_Mapped], offer: Offer) -> _Batch:
        batch = _Batch(([], []), [], [])
        for piece in pieces:
            dtypes = offer.staged if piece.region == STAGING else offer.own
            dtype, region = getattr(torch, dtypes[piece.entry]), regions[piece.region]
            end = piece.offset + piece.box.numel * dtype.itemsize
            data = region.bytes[piece.offset : end].view(dtype).view(piece.box.size)
            for copy in self._copies.get(piece.entry, ()):
                met = copy.box.intersect(piece.box)
                if met is None:
                    continue
                target = narrowed(copy.target, met.within(copy.box))
                source = narrowed(data, met.within(piece.box))
                plain = target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
                if plain and target.nbytes <= _SMALL_BYTES:
                    batch.small[0].append(target)
                    batch.small[1].append(source)
                else:
                    (batch.far if region.is_far else batch.near).append((target, source))
        return batch

    def _check_whole(self, buckets: list[list[Piece]]) -> None:
        """Whether the buckets bring all that is to be copied."""
        needed = sum(copy.target.numel() for copy in self._recording.copies)
        planned = sum(target.numel() for batch in self._batches for target in batch.targets)
        if needed != planned:
            raise ChannelError(f"{len(buckets)} buckets bring {planned} elements, and {needed} are needed")

    def close(self) -> None:
        self._batches.clear()
        self._link.close()


class _Mapped(NamedTuple):
    """A region as bytes, and whether it is on another device."""

    bytes: torch.Tensor
    is_far: bool = False


def _map(regions: list[Region], fds: list[int]) -> list[_Mapped]:
    """Map each region. Closes the file descriptors."""
    try:
        shared = iter(fds)
        return [_map_cuda(region) if region.cuda else _map_file(next(shared), region) for region in regions]
    finally:
        for fd in fds:
            os.close(fd)


def _map_file(fd: int, region: Region) -> _Mapped:
    memory = mmap.mmap(fd, region.num_bytes)  # lives as long as the tensor does
    return _Mapped(torch.frombuffer(memory, dtype=torch.uint8))


def _map_cuda(region: Region) -> _Mapped:
    """Map it into the address space of this process's own device, whichever device of the machine it is on.

    The driver reads another device's memory over NVLink or PCIe. That device need not be visible here, and no context
    is made on it.
    """
    assert region.cuda is not None
    device = torch.cuda.current_device()
    storage = torch.UntypedStorage._new_shared_cuda(device, *region.cuda)
    tensor = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device))
    is_far = region.device != str(torch.cuda.get_device_properties(device).uuid)
    return _Mapped(tensor.set_(storage, 0, (region.num_bytes,), (1,)), is_far)


def synchronize() -> None:
    """Wait for all that this process has given its device to do."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
