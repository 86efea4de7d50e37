"""The portable path: SGLang's own ``flattened_bucket`` messages, which every version and model loader understands.

Whole tensors are laid end to end in one buffer, and its handle is sent once for each bucket. SGLang's own loaders take
it from there.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as torch_multiprocessing
from torch.multiprocessing import reductions

from sglrollout.boxes import narrowed
from sglrollout.weights.plan import aligned, plan_buckets
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.transfer import Consumer, Gatherer, Layout

_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


class PortableTransfer:
    """Makes one payload after the other, for each TP rank that this trainer rank serves.

    Arguments are those of :class:`sglrollout.weights.transfer.Transfer`.
    """

    def __init__(self, layout: Layout, source: WeightSource, consumers: Sequence[Consumer], bucket_bytes: int) -> None:
        self._layout, self._source, self._consumers = layout, source, list(consumers)
        buckets = plan_buckets(layout.planned({}, whole=True), bucket_bytes, split=False)
        self._gatherer = Gatherer(layout, buckets, num_slots=1, shared=False)
        self._sizes = [self._flat_bytes(k) for k in range(len(buckets))]
        self._flat: list[torch.Tensor] = []
        self._read: Any = None

    @property
    def num_buckets(self) -> int:
        return len(self._gatherer.buckets)

    def begin(self) -> None:
        """Once for each sync."""
        self._read = self._source.read()
        if self._consumers:  # anew: sharing the same memory again and again would pile up records of it
            size, device = max(self._sizes, default=0), self._layout.device or "cpu"
            self._flat = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def bucket(self, k: int, wait: Any) -> dict[Consumer, bytes]:
        """Gather bucket ``k``. The payloads stay valid until the second next call.

        Args:
            wait: ``wait(is_done, what)``, with a deadline.
        """
        gathering = self._gatherer.launch(k, self._read)
        wait(gathering.is_done, f"bucket {k} of {self.num_buckets} was not gathered")
        if gathering.error is not None:
            raise gathering.error
        if not self._consumers:
            return {}
        flat = self._flat[k % 2]
        named = self._assemble(k, flat)
        if self._layout.device is not None:
            torch.cuda.synchronize(self._layout.device)
        return {consumer: _payload(flat[: self._sizes[k]], named) for consumer in self._consumers}

    def _entries(self, k: int) -> list[int]:
        return list(dict.fromkeys(piece.entry for part in self._gatherer.buckets[k].parts for piece in part))

    def _flat_bytes(self, k: int) -> int:
        return sum(aligned(self._nbytes(entry)) for entry in self._entries(k))

    def _nbytes(self, entry: int) -> int:
        itemsize: int = getattr(torch, self._layout.dtypes[entry]).itemsize
        return math.prod(self._layout.weights[entry].spec.shape) * itemsize

    def _assemble(self, k: int, flat: torch.Tensor) -> list[SimpleNamespace]:
        """Put the parts of each weight together in ``flat``; describe what is where, as SGLang has it described."""
        views: dict[int, torch.Tensor] = {}
        described: list[SimpleNamespace] = []
        position = 0
        for entry in self._entries(k):
            spec, dtype = self._layout.weights[entry].spec, getattr(torch, self._layout.dtypes[entry])
            end = position + self._nbytes(entry)
            views[entry] = flat[position:end].view(dtype).view(spec.shape)
            for name in (spec.name, *spec.aliases):
                described.append(
                    SimpleNamespace(
                        name=name,
                        shape=torch.Size(spec.shape),
                        dtype=dtype,
                        start_idx=position,
                        end_idx=end,
                        numel=end - position,
                    )
                )
            position += aligned(self._nbytes(entry))
        data = self._gatherer.staging.bytes
        for piece in self._gatherer.buckets[k].pieces(self._gatherer.start(k)):
            view = views[piece.entry]
            part = data[piece.offset : piece.offset + piece.box.numel * view.element_size()].view(view.dtype)
            narrowed(view, piece.box).copy_(part.view(piece.box.size))
        return described

    def close(self) -> None:
        self._flat.clear()
        self._gatherer.close()


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


def by_engine(made: list[dict[Consumer, bytes]]) -> dict[str, list[bytes]]:
    """Payloads of all ranks, by engine, in TP rank order."""
    payloads = {consumer: payload for of_rank in made for consumer, payload in of_rank.items()}
    ordered = sorted(payloads, key=lambda consumer: (consumer.engine, consumer.tp_rank))
    found: dict[str, list[bytes]] = {}
    for consumer in ordered:
        found.setdefault(consumer.engine, []).append(payloads[consumer])
    return found
