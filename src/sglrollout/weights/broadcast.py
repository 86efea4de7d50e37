"""The road of :class:`sglrollout.Broadcast`: flattened buckets, which SGLang's TP ranks receive and load."""

from __future__ import annotations

import secrets
from typing import Any

import anyio
import torch

from sglrollout.concurrency import unwrapped
from sglrollout.errors import WeightSyncError
from sglrollout.weights.assembly import Assembler, Assembly
from sglrollout.weights.group import Group, address_towards
from sglrollout.weights.leader import Leader
from sglrollout.weights.remote import Broadcast
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.transfer import Clock, Layout
from sglrollout.weights.worker import Worker

_TRIAL = "sglrollout.trial"
"""The name of a tensor that no model has. SGLang ignores those, or refuses them once they have come."""
_CUDA_FAILED = "unhandled cuda error"
_CUMEM_HINT = (
    "on one machine NCCL_CUMEM_ENABLE must be the same, or unset, for trainer and servers; `sglang.launch_server` sets "
    "it to 0 by itself: then start this script with NCCL_CUMEM_ENABLE=0, or the server by `sglrollout serve`"
)


class BroadcastRoad:
    """See :class:`sglrollout.weights.roads.Road`.

    Args:
        option: ``None`` on a rank without remote engines.
        timeout_s: for the group to come together, and for each bucket.
    """

    method = "broadcast"
    second = None

    def __init__(
        self, layout: Layout, source: WeightSource, bucket_bytes: int, option: Broadcast | None, timeout_s: float
    ) -> None:
        self._option, self._timeout_s, self._device = option, timeout_s, layout.device
        self._assembler = Assembler(layout, source, bucket_bytes, assembles=option is not None, packed=True)
        self._ready: list[Assembly | None] = [None, None]
        self._worker = Worker(layout.device)
        """Of its own: a bucket is sent while the syncer's worker gathers the next one."""
        self._group: Group | None = None
        self._is_proven = False

    @property
    def num_buckets(self) -> int:
        return self._assembler.num_buckets

    @property
    def num_written(self) -> int:
        return 0

    # ------------------------------------------------------------ the group

    async def connect(self, leader: Leader) -> None:
        """Make the group, with all of this rank's remote engines.

        Raises:
            WeightSyncError: one did not join.
        """
        if self._option is None:
            return
        await leader.leave_group()
        name = f"sglrollout-{secrets.token_hex(8)}"  # no server may know it: it may be in another trainer's group
        group = self._group = await self._worker.run(lambda: self._new_group(name, leader))
        leader.group = name
        await self._beside(
            leader.join_group(name, group.address, group.port, group.backend), lambda: group.connect(leader.group_size)
        )

    def _new_group(self, name: str, leader: Leader) -> Group:
        assert self._option is not None
        backend = self._option.backend or ("gloo" if self._device is None else "nccl")
        if backend == "nccl" and self._device is None:
            raise WeightSyncError("plan", 'backend="nccl" needs a trainer on a GPU')
        address = self._option.address or address_towards(leader.remote_hosts)
        return Group(name, backend, address, self._option.port, self._timeout_s, self._device)

    async def prove(self, leader: Leader) -> None:
        """Once for each group, with engines stopped and before any weight moves: send a tensor that no model has.

        Raises:
            WeightSyncError: it did not reach all engines.
        """
        if self._option is None or self._is_proven:
            return
        trial = torch.zeros(1, device=self._device or "cpu").view(torch.uint8)
        try:
            await leader.begin_update()
            await self._send(leader, trial, [_TRIAL], ["float32"], [[1]], refusable=True)
        except BaseException as error:
            self._leave()  # an engine that waits in it could not end its update
            await leader.give_up_update()
            if isinstance(error, WeightSyncError) and _CUDA_FAILED in error.reason:
                raise WeightSyncError(error.phase, f"{error.reason} ({_CUMEM_HINT})", engine=error.engine) from error
            raise
        await leader.end_update()
        self._is_proven = True

    # ------------------------------------------------------------ a sync

    def begin(self) -> None:
        self._ready = [None, None]
        self._assembler.begin()

    async def open(self, leader: Leader) -> None:
        if self._option is not None:
            await leader.begin_update()

    def bucket(self, k: int, clock: Clock) -> None:
        self._ready[k % 2] = self._assembler.bucket(k, clock.wait)

    async def load(self, leader: Leader, k: int, made: list[Any]) -> None:
        bucket = self._ready[k % 2]
        if bucket is None:
            return
        names = [segment.name for segment in bucket.segments]
        dtypes = [str(segment.dtype).removeprefix("torch.") for segment in bucket.segments]
        shapes = [list(segment.shape) for segment in bucket.segments]
        await self._send(leader, bucket.flat, names, dtypes, shapes)

    async def _send(
        self,
        leader: Leader,
        flat: torch.Tensor,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        refusable: bool = False,
    ) -> None:
        group = self._group
        assert group is not None

        def send() -> None:
            group.broadcast(flat, Clock(self._timeout_s, self._worker.is_cancelled).wait)

        await self._beside(leader.receive(group.name, names, dtypes, shapes, refusable), send)

    async def _beside(self, engines: Any, own: Any) -> None:
        """Engines' part and this rank's, at once. Whichever fails first ends the other: neither comes to an end without
        the other."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._worker.run, own)
                await engines
        except ExceptionGroup as failed:
            error = unwrapped(failed)
            raise error if isinstance(error, WeightSyncError) else _broken(error) from error

    async def close_for(self, leader: Leader) -> None:
        if self._option is not None:
            await leader.end_update()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        self._leave()
        self._ready = [None, None]
        self._worker.close()
        self._assembler.close()


def _broken(error: Exception) -> WeightSyncError:
    return WeightSyncError("transfer", f"{type(error).__name__}: {error}")
