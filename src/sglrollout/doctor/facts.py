"""What is known of a machine: plain data, so that what follows from it can be tested for machines that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglrollout.engine.placement import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What is installed.

    Attributes:
        platform: as ``sys.platform`` names it.
        machine: the processor's architecture.
        python: the version.
        sglrollout: the version.
        packages: of those that matter, the version; ``None`` for one that is not installed.
        unmet: what the installed SGLang requires and is not so: its requirement, and the version found, if any.
        torch_cuda: the CUDA version that torch is built for; ``None`` for a build without CUDA.
        torch_lacks: packages that torch requires of this platform, such as CUDA's libraries, and that are missing.
        torch_error: why torch does not import. Only tried where something is missing.
    """

    platform: str = "linux"
    machine: str = "x86_64"
    python: tuple[int, int, int] = (3, 11, 0)
    sglrollout: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    unmet: tuple[tuple[str, str | None], ...] = ()
    torch_cuda: str | None = None
    torch_lacks: tuple[str, ...] = ()
    torch_error: str = ""


@dataclass(frozen=True, slots=True)
class User:
    """A process that uses a device, in ``used_bytes`` of its memory; 0 where the driver does not say."""

    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device of the machine, visible or not. ``index`` is nvidia-smi's; memory is 0 where the driver does not say."""

    index: int
    uuid: str
    name: str
    total_bytes: int = 0
    free_bytes: int = 0
    compute_mode: str = "Default"
    is_mig: bool = False
    users: tuple[User, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """What CUDA's driver library says to a process of its own, that ends at once.

    Attributes:
        version: the highest CUDA version that the driver can run.
        error: why it cannot be used.
        num_devices: that it sees, under this ``CUDA_VISIBLE_DEVICES``.
    """

    version: tuple[int, int] | None = None
    error: str = ""
    num_devices: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPUs.

    Attributes:
        driver: the NVIDIA driver's version; empty where there is none.
        gpus: of the machine.
        visible: those that engines may use, as the library finds them.
        error: why the driver does not say.
        num_on_bus: NVIDIA GPUs on the PCI bus, whether or not there is a driver.
        cuda: ``None`` where there is no device to use it with.
    """

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    visible: tuple[Device, ...] = ()
    error: str = ""
    num_on_bus: int = 0
    cuda: Cuda | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """The directory for temporary files, tried by making what an engine makes in it.

    Attributes:
        root: the directory.
        error: what failed.
        free_bytes: of its file system.
        is_private: nobody else may rename or remove what is made in it.
        may_execute: its file system lets compiled code be loaded from it.
    """

    root: str = "/tmp"
    error: str = ""
    free_bytes: int = 1 << 40
    is_private: bool = True
    may_execute: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rest of the machine, as this process may use it.

    Attributes:
        num_cores: that this process may run on.
        cpu_quota: how many cores' time the control groups grant; ``None`` for no limit.
        memory_total_bytes, memory_free_bytes: of the host; free is what can be had without swapping.
        memory_limit_bytes: the least of the control groups' limits; ``None`` for none.
        memory_limit_used_bytes: how much of that limit is taken, less what can be dropped.
        shm_total_bytes, shm_free_bytes: of ``/dev/shm``.
        shm_error: why files cannot be made there.
        scratch: the directory for temporary files.
        cache_error: why files cannot be made below the home directory, where kernels that were compiled are kept.
        open_files: soft and hard limit; ``None`` for no limit.
        locked_bytes: the limit on locked memory; ``None`` for no limit.
        has_infiniband: there is an RDMA device.
        ptrace_scope: Yama's; ``None`` where there is none.
        proc_error: why a process cannot open an anonymous file of another one of the same user.
        compiler: the C compiler that Triton would use.
        python_headers: Python's own, for what Triton compiles, are there.
    """

    num_cores: int = 16
    cpu_quota: float | None = None
    memory_total_bytes: int = 1 << 37
    memory_free_bytes: int = 1 << 37
    memory_limit_bytes: int | None = None
    memory_limit_used_bytes: int = 0
    shm_total_bytes: int = 1 << 36
    shm_free_bytes: int = 1 << 36
    shm_error: str = ""
    scratch: Scratch = field(default_factory=Scratch)
    cache_error: str = ""
    open_files: tuple[int | None, int | None] = (1 << 20, 1 << 20)
    locked_bytes: int | None = None
    has_infiniband: bool = False
    ptrace_scope: int | None = None
    proc_error: str = ""
    compiler: str | None = "/usr/bin/cc"
    python_headers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All of it. ``environment`` is the whole of the process's; only names that matter are ever shown."""

    software: Software = field(default_factory=Software)
    devices: Devices = field(default_factory=Devices)
    machine: Machine = field(default_factory=Machine)
    environment: Mapping[str, str] = field(default_factory=dict)
