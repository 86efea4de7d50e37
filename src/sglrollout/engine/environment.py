"""What a host inherits from its user's environment, and what it must not.  Imports nothing of ours."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "PET_", "PMI_", "OMPI_")
_LAUNCHER_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "SLURM_PROCID", "SLURM_LOCALID"),
    }
)
_TRAINER_ALLOCATOR = frozenset({"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})


def not_for_engines(names: Iterable[str]) -> list[str]:
    """Those of the names that are the trainer's own.

    What torchrun and its like set for the ranks they start would make SGLang's schedulers try to join the trainer's
    rendezvous, and time out. Memory from the trainer's expandable segments could not be shared over CUDA IPC.
    """
    return [
        name
        for name in names
        if name in _LAUNCHER_NAMES or name in _TRAINER_ALLOCATOR or name.startswith(_LAUNCHER_PREFIXES)
    ]


def within_the_engine(scratch_dir: str) -> dict[str, str]:
    """What lets an engine's processes meet in its scratch directory, and talk over the loopback interface.

    SGLang would have them meet at a TCP port, which torch opens on every interface and to everybody, and talk over the
    interface of the host's name, or the one that the trainer uses. An engine is within one machine.
    """
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch_dir}/rendezvous",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        # On a CPU with AMX, memory shared by TP ranks is named after these two: they must differ between engines.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": Path(scratch_dir).name,
    }


def host_environment(devices: Sequence[str], scratch_dir: str) -> dict[str, str]:
    """The environment of a host process that sees ``devices`` (UUIDs) alone."""
    removed = set(not_for_engines(os.environ))
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"TMPDIR": scratch_dir, "CUDA_VISIBLE_DEVICES": ",".join(devices), "PYTHONUNBUFFERED": "1"}
    source = str(Path(__file__).resolve().parents[2])
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if source not in path:
        environment["PYTHONPATH"] = os.pathsep.join([*path, source])
    return environment
