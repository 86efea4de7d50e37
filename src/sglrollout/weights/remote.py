"""How weights reach remote engines: what a user sets, and the roads that follow from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sglrollout.errors import ConfigError

if TYPE_CHECKING:
    from sglrollout.weights.roads import RemoteRoad
    from sglrollout.weights.sources import WeightSource
    from sglrollout.weights.transfer import Layout


@dataclass(frozen=True)
class Broadcast:
    """By a broadcast to all remote engines at once, in a process group of its own.

    The rank that owns the engines is its rank 0. The group is made when a sync plans, tried before weights move, and
    made anew once an engine comes or goes.

    Args:
        backend: ``nccl`` or ``gloo``; ``None`` is ``nccl`` on a machine with a GPU.
        address: of this machine, as servers reach it; ``None`` is its address on the way to them. The
            rendezvous and gloo listen there, without authentication: keep it in a network that you trust.
        port: of the rendezvous; 0 is a free one.

    Raises:
        ConfigError: an option is wrong.
    """

    backend: Literal["nccl", "gloo"] | None = None
    address: str | None = None
    port: int = 0

    def __post_init__(self) -> None:
        if self.backend not in (None, "nccl", "gloo"):
            raise ConfigError("backend", self.backend, 'must be "nccl", "gloo" or None')
        if self.address is not None and (not isinstance(self.address, str) or not self.address):
            raise ConfigError("address", self.address, "must be a host name, an IP address or None")
        if type(self.port) is not int or not 0 <= self.port < 65536:
            raise ConfigError("port", self.port, "must be an integer from 0 to 65535")


@dataclass(frozen=True)
class Disk:
    """By safetensors files in a folder that trainer and servers see under the same path, for hosts without a fast link.

    Each sync writes a folder in it, under a name of its own once it is whole, and removes those of the syncs before
    once engines have the new one. What is there last stays, for whoever wants the weights.

    Args:
        folder: exists, and is writable here.
        delta: write what has changed since the last sync, bit for bit, where that is less, and let servers apply it to
            copies of the weights that they keep on their machines. All is written where no server has the weights of
            the last sync, and for those that have not. The trainer keeps a copy in its memory, too. For servers that
            ``sglrollout serve`` or :func:`sglrollout.launch_server` starts, each on one machine.

    Raises:
        ConfigError: an option is wrong.
    """

    folder: str | os.PathLike[str]
    delta: bool = False

    def __post_init__(self) -> None:
        path = Path(self.folder)
        if not path.is_absolute():
            raise ConfigError("folder", str(path), "must be an absolute path: servers are told of it")
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError("folder", str(path), "must be a folder that exists and is writable")
        if not isinstance(self.delta, bool):
            raise ConfigError("delta", self.delta, "must be True or False")


@dataclass
class Kept:
    """Weights that were written, in this rank's memory.

    Attributes:
        buckets: :class:`sglrollout.weights.assembly.Assembly` on the CPU.
        sums: of each weight, by file.
        id: of them all.
    """

    buckets: list[Any] = field(default_factory=list)
    sums: dict[str, dict[str, int]] = field(default_factory=dict)
    id: str = ""


@dataclass
class LastKept:
    """What a syncer with ``Disk(..., delta=True)`` has of its last sync: ``None`` during the next one, and after one
    that failed."""

    kept: Kept | None = None


Remote: TypeAlias = Broadcast | Disk


def make_road(
    remote: Remote,
    serves: bool,
    layout: Layout,
    source: WeightSource,
    bucket_bytes: int,
    timeout_s: float,
    written: list[Path],
    last: LastKept,
) -> RemoteRoad:
    """This rank's road, on the worker's thread.

    Args:
        serves: whether this rank has remote engines. Others take part in the gathers.
        written, last: see :class:`sglrollout.weights.delta_road.DeltaRoad`.
    """
    from sglrollout.weights.broadcast import BroadcastRoad
    from sglrollout.weights.delta_road import DeltaRoad
    from sglrollout.weights.disk import DiskRoad

    if isinstance(remote, Disk):
        folder = Path(remote.folder) if serves else None
        if remote.delta:
            return DeltaRoad(layout, source, bucket_bytes, folder, written, last)
        return DiskRoad(layout, source, bucket_bytes, folder, written)
    return BroadcastRoad(layout, source, bucket_bytes, remote if serves else None, timeout_s)
