"""The road of a LoRA adapter: a folder as PEFT saves one, which engines read."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from safetensors import SafetensorError
from safetensors.torch import save_file

from sglrollout.errors import WeightSyncError
from sglrollout.pool.adapter import Adapter
from sglrollout.weights.assembly import Assembler
from sglrollout.weights.leader import Leader
from sglrollout.weights.lora_source import LoRASource
from sglrollout.weights.transfer import Clock, Layout


class LoRARoad:
    """See :class:`sglrollout.weights.roads.Road`. The adapter goes into a folder, and engines read it.

    Args:
        folder: where; ``None`` on a rank without a rollout.
        written: what this syncer has written, the latest last; it outlives this road.
    """

    method = "lora"
    second = None

    def __init__(
        self, layout: Layout, source: LoRASource, bucket_bytes: int, folder: Path | None, written: list[Path]
    ) -> None:
        self._source, self._folder, self._written = source, folder, written
        self._assembler = Assembler(layout, source, bucket_bytes, assembles=folder is not None, packed=False)
        self._tensors: dict[str, Any] = {}
        self._num_written = 0

    @property
    def num_buckets(self) -> int:
        return self._assembler.num_buckets

    @property
    def num_written(self) -> int:
        return self._num_written

    async def connect(self, leader: Leader) -> None:
        """Nothing."""

    async def prove(self, leader: Leader) -> None:
        leader.refuse_to_change_adapter()

    def begin(self) -> None:
        self._tensors.clear()
        self._assembler.begin()

    async def open(self, leader: Leader) -> None:
        """Engines read once all is there. Here, what failed syncs have left is removed."""
        current = leader.pool.adapter
        for folder in [folder for folder in self._written if current is None or folder != current.folder]:
            await anyio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))
            self._written.remove(folder)

    def bucket(self, k: int, clock: Clock) -> None:
        bucket = self._assembler.bucket(k, clock.wait)
        if bucket is not None:
            self._tensors |= {s.name: bucket.tensor(s).to("cpu", copy=True) for s in bucket.segments}
            if k + 1 == self.num_buckets:
                self._write()

    def _write(self) -> None:
        assert self._folder is not None
        unfinished = self._folder / f".unfinished-{secrets.token_hex(4)}"
        try:
            unfinished.mkdir()
            save_file(self._tensors, unfinished / "adapter_model.safetensors", metadata={"format": "pt"})
            (unfinished / "adapter_config.json").write_text(json.dumps(self._source.config, indent=2))
            whole = unfinished.with_name(unfinished.name.replace(".unfinished", "adapter"))
            os.rename(unfinished, whole)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise WeightSyncError("transfer", f"the adapter could not be written to {self._folder}: {error}") from error
        self._written.append(whole)
        self._num_written = sum(tensor.nbytes for tensor in self._tensors.values())
        self._tensors.clear()

    async def load(self, leader: Leader, k: int, made: list[Any]) -> None:
        if self._folder is not None and k + 1 == self.num_buckets:
            await leader.load_adapter(Adapter(self._source.adapter, self._written[-1], self._source.config))

    async def close_for(self, leader: Leader) -> None:
        """Nothing."""

    def close(self) -> None:
        self._tensors.clear()
        self._assembler.close()
