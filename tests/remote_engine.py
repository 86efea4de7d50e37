"""A scripted engine that says it is remote, and takes weights as SGLang's TP ranks do: over gloo, or from files."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import anyio.to_thread
import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from sglrollout.engine.mirror import Mirror
from sglrollout.errors import EngineRequestError
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.delta import DeltaError
from sglrollout.wire.messages import EngineInfo, RemoteCommandName

REMOTE = get_args(RemoteCommandName)


class RemoteEngine(ScriptedEngine):
    """``received`` is what its TP rank 0 has. ``fail`` is asked before each remote command, with its arguments: what it
    returns is the error. ``mirror`` is the copy of its weights that it keeps, if it keeps one."""

    def __init__(
        self,
        name: str,
        *,
        tp_size: int = 1,
        fail: Callable[[str, dict[str, Any]], str | None] = lambda name, arguments: None,
        mirror: Mirror | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.url = "http://127.0.0.1:30000"
        self.tp_size, self.fail, self.mirror = tp_size, fail, mirror
        self.received: dict[str, torch.Tensor] = {}
        self.groups: dict[str, list[Any]] = {}
        self.num_groups = 0
        self.is_updating = False
        self.is_waiting = False
        """For a broadcast."""

    def _describe(self) -> EngineInfo:
        return msgspec.structs.replace(super()._describe(), remote=True, tp_size=self.tp_size)

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        if name not in REMOTE:
            return await super().command(name, timeout_s, **arguments)
        self.commands.append(name)
        reason = self.fail(name, arguments)
        if reason is not None:
            raise EngineRequestError(self.name, f"{name} failed: {reason}")
        answer: dict[str, Any] | None = await getattr(self, f"_remote_{name}")(**arguments)
        return answer or {}

    async def before_receiving(self, names: list[str]) -> None:
        """Nothing, unless a test has something."""

    async def after_receiving(self, names: list[str]) -> None:
        """Nothing, unless a test has something."""

    async def _remote_init_group(self, rank_offset: int, group_name: str, **arguments: Any) -> None:
        assert arguments["backend"] == "gloo"
        self.groups[group_name] = [None] * self.tp_size

        async def join(tp_rank: int) -> None:
            self.groups[group_name][tp_rank] = await anyio.to_thread.run_sync(
                lambda: joined(group_name, rank_offset + tp_rank, **arguments), abandon_on_cancel=True
            )

        async with anyio.create_task_group() as tasks:
            for tp_rank in range(self.tp_size):
                tasks.start_soon(join, tp_rank)
        self.num_groups += 1

    async def _remote_destroy_group(self, group_name: str) -> None:
        if self.groups.pop(group_name, None) is None:
            raise EngineRequestError(self.name, "destroy_group failed: the group to be destroyed does not exist")

    async def _remote_begin_update(self) -> None:
        if self.is_updating:
            raise EngineRequestError(self.name, "begin_update failed: an update is under way")
        self.is_updating = True

    async def _remote_end_update(self) -> None:
        self.is_updating = False

    async def _remote_receive_weights(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, load_format: str
    ) -> None:
        assert load_format == "flattened_bucket"
        assert self.is_updating
        await self.before_receiving(names)
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        flats = [torch.empty(sum(sizes), dtype=torch.uint8) for _ in range(self.tp_size)]

        async def receive(tp_rank: int) -> None:
            group = self.groups[group_name][tp_rank]
            await anyio.to_thread.run_sync(lambda: self._wait_for(group, flats[tp_rank]), abandon_on_cancel=True)

        async with anyio.create_task_group() as tasks:
            for tp_rank in range(self.tp_size):
                tasks.start_soon(receive, tp_rank)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        position = 0
        for name, shape, kind, size in zip(names, shapes, kinds, sizes, strict=True):
            self.received[name] = flats[0][position : position + size].view(kind).view(shape)  # as SGLang does
            position += size
        self._loaded = True
        await self.after_receiving(names)

    def _wait_for(self, group: Any, flat: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.is_waiting = True
        try:
            group.broadcast([flat], options).wait()
        except RuntimeError as error:
            raise EngineRequestError(self.name, f"receive_weights failed: {error}") from error
        finally:
            self.is_waiting = False

    async def _remote_mirrors(self) -> dict[str, Any]:
        return {"ids": None if self.mirror is None else [self.mirror.id]}

    async def _remote_update_mirror(self, folder: str, new_id: str) -> dict[str, Any]:
        assert self.mirror is not None
        try:
            self.mirror.update(Path(folder), new_id)
        except DeltaError as error:
            return {"refusal": str(error)}
        return {"refusal": None}

    async def _remote_load_mirror(self, new_id: str) -> None:
        assert self.mirror is not None
        assert self.mirror.id == new_id
        self.received.clear()
        await self._remote_load_from_disk(str(self.mirror.folder))

    async def _remote_load_from_disk(self, path: str) -> None:
        for file in sorted(Path(path).glob("*.safetensors")):
            self.received |= load_file(file)
        self._loaded = True


def joined(name: str, rank: int, master_address: str, master_port: int, world_size: int, backend: str) -> Any:
    """A rank of a group, by the names under which SGLang's ``init_custom_process_group`` finds the others."""
    within = timedelta(seconds=25)
    store = dist.TCPStore(master_address, master_port, is_master=False, timeout=within)
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    return dist.ProcessGroupGloo(prefixed, rank, world_size, within)
