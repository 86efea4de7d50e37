"""The portable path: SGLang's own ``flattened_bucket`` messages, which every version and model loader understands.

Whole tensors are laid end to end in one buffer, and its handle is sent once for each bucket. SGLang's own loaders take
it from there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as torch_multiprocessing
from torch.multiprocessing import reductions

from sglrollout.weights.assembly import Assembler, Segment
from sglrollout.weights.leader import Leader
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.transfer import Clock, Consumer, Layout

_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


class PortableTransfer:
    """Makes one payload after the other, for each TP rank that this trainer rank serves.

    Arguments are those of :class:`sglrollout.weights.transfer.Transfer`.
    """

    second = None

    def __init__(self, layout: Layout, source: WeightSource, consumers: Sequence[Consumer], bucket_bytes: int) -> None:
        self._consumers = list(consumers)
        self._assembler = Assembler(layout, source, bucket_bytes, assembles=bool(consumers), packed=False)

    @property
    def num_buckets(self) -> int:
        return self._assembler.num_buckets

    @property
    def num_written(self) -> int:
        return 0

    def begin(self) -> None:
        """Once for each sync."""
        self._assembler.begin()

    async def open(self, leader: Leader) -> None:
        await leader.begin_portable()

    def bucket(self, k: int, clock: Clock) -> dict[Consumer, bytes]:
        """Gather bucket ``k``. The payloads stay valid until the second next call."""
        assembly = self._assembler.bucket(k, clock.wait)
        if assembly is None:
            return {}
        described = [_described(segment) for segment in assembly.segments]
        return {consumer: _payload(assembly.flat, described) for consumer in self._consumers}

    async def load(self, leader: Leader, k: int, made: list[dict[Consumer, bytes]]) -> None:
        await leader.load_portable(_by_engine(made))

    async def close_for(self, leader: Leader) -> None:
        await leader.end_portable()

    def close(self) -> None:
        self._assembler.close()


def _described(segment: Segment) -> SimpleNamespace:
    """What is where, as SGLang has it described."""
    return SimpleNamespace(
        name=segment.name,
        shape=segment.shape,
        dtype=segment.dtype,
        start_idx=segment.start,
        end_idx=segment.end,
        numel=segment.end - segment.start,
    )


def _payload(flat: torch.Tensor, described: list[SimpleNamespace]) -> bytes:
    """One TP rank's message, with a handle of its own: a shared one would never be given back."""
    buffer = io.BytesIO()
    strategy = torch_multiprocessing.get_sharing_strategy()
    torch_multiprocessing.set_sharing_strategy("file_system")  # a file descriptor would have to be fetched from here
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump({"flattened_tensor": flat, "metadata": described})
    finally:
        torch_multiprocessing.set_sharing_strategy(strategy)
    return buffer.getvalue()


class _Pickler(ForkingPickler):
    """Names a CUDA device by its UUID, as SGLang expects: indices differ from process to process."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or not obj.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)
        uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


def _by_engine(made: list[dict[Consumer, bytes]]) -> dict[str, list[bytes]]:
    """Payloads of all ranks, by engine, in TP rank order."""
    payloads = {consumer: payload for of_rank in made for consumer, payload in of_rank.items()}
    ordered = sorted(payloads, key=lambda consumer: (consumer.engine, consumer.tp_rank))
    found: dict[str, list[bytes]] = {}
    for consumer in ordered:
        found.setdefault(consumer.engine, []).append(payloads[consumer])
    return found
