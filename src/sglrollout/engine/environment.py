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


def launcher_variables(names: Iterable[str]) -> list[str]:
    """Those names that torchrun and its like set for the ranks they start.

    With them in place SGLang's schedulers try to join the trainer's rendezvous, and time out.
    """
    return [name for name in names if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)]


def host_environment(devices: Sequence[str], scratch_dir: str) -> dict[str, str]:
    """The environment of a host process that sees ``devices`` (UUIDs) alone.

    The trainer's allocator settings go too: memory from expandable segments cannot be shared over CUDA IPC.
    """
    removed = {*launcher_variables(os.environ), *_TRAINER_ALLOCATOR}
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"TMPDIR": scratch_dir, "CUDA_VISIBLE_DEVICES": ",".join(devices), "PYTHONUNBUFFERED": "1"}
    source = str(Path(__file__).resolve().parents[2])
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if source not in path:
        environment["PYTHONPATH"] = os.pathsep.join([*path, source])
    return environment
