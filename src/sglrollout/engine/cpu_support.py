"""Stock SGLang on a machine without a GPU, for tests and notebooks.

SGLang's CPU path imports names from ``sgl_kernel``, whose wheels need CUDA or AMX builds, and torchvision, whose PyPI
wheel is a CUDA build. On a CPU without AMX none of those kernels is ever called, so a stand-in is enough. This must be
in place before sglang is imported, in every process that imports it: the scheduler that SGLang spawns included.
Imports neither torch nor sglang.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from sglrollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

logger = logging.getLogger(__name__)

ENV_FLAG = "SGLROLLOUT_CPU"
_CORES_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
_KERNELS = "sgl_kernel"
_TORCHVISION_META = "torchvision._meta_registrations"


def enable(num_threads: int | None = None, tp_size: int = 1) -> None:
    """Prepare this process, and those it will start, to run SGLang on a CPU. Call before sglang is imported.

    A second call changes nothing but the options it names, so that a spawned child may call it bare.

    Args:
        num_threads: OpenMP threads of each TP rank; by default torch decides for TP 1, and the
            available cores are shared out evenly for more.
        tp_size: number of TP ranks that will share this machine's cores.

    Raises:
        ConfigError: ``num_threads`` or ``tp_size`` is below 1.
    """
    if num_threads is not None and num_threads < 1:
        raise ConfigError("num_threads", num_threads, "must be at least 1")
    if tp_size < 1:
        raise ConfigError("tp_size", tp_size, "must be at least 1")

    os.environ[ENV_FLAG] = "1"
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # The first requests would otherwise compile C++ for a minute.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if tp_size > 1:
        cores_of_rank = _share_cores(tp_size)
        num_threads = num_threads or len(cores_of_rank[0])
        # SGLang refuses more ranks than NUMA nodes unless it is told which cores each rank has.
        if os.environ.get(_CORES_VARIABLE, "").count("|") != tp_size - 1:
            os.environ[_CORES_VARIABLE] = "|".join(",".join(map(str, cores)) for cores in cores_of_rank)
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)

    forgive_torchvision()
    if not _has_finder(_KernelFinder) and not _kernels_importable():
        sys.meta_path.insert(0, _KernelFinder())


def is_enabled() -> bool:
    """Whether this process, or the one that started it, called :func:`enable`."""
    return os.environ.get(ENV_FLAG) == "1"


def forgive_torchvision() -> None:
    """Let a torchvision whose operators do not load (a CUDA build on a CPU) be imported all the same.

    Without it, neither can transformers' model classes be imported, which load torchvision where it is installed.
    """
    if not _has_finder(_TorchvisionFinder):
        sys.meta_path.insert(0, _TorchvisionFinder())


def forgive_pinned_memory() -> None:
    """Let memory that asks to be pinned, which needs a GPU, be ordinary memory. SGLang's LoRA asks always."""
    import torch

    with torch.device("cpu"):
        torch.empty(0)  # torch notes which of its functions heed such a block when it first meets one
    for name in ("arange", "empty", "ones", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return make


def _has_finder(kind: type[MetaPathFinder]) -> bool:
    return any(isinstance(finder, kind) for finder in sys.meta_path)


def _share_cores(tp_size: int) -> list[list[int]]:
    """One list of core ids per rank; ranks share cores where there are fewer cores than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < tp_size:
        return [[cores[rank % len(cores)]] for rank in range(tp_size)]
    per_rank = len(cores) // tp_size
    return [cores[rank * per_rank : (rank + 1) * per_rank] for rank in range(tp_size)]


def _kernels_importable() -> bool:
    if _KERNELS in sys.modules:
        return True
    if find_spec(_KERNELS) is None:
        return False
    try:
        importlib.import_module(_KERNELS)
    except (ImportError, OSError, RuntimeError) as error:  # a CUDA build, and no CUDA
        logger.info("the installed sgl_kernel does not load here, a stand-in takes its place: %s", error)
        for name in [name for name in sys.modules if name.partition(".")[0] == _KERNELS]:
            del sys.modules[name]
        return False
    return True


class _KernelFinder(MetaPathFinder):
    """Finds a stand-in for ``sgl_kernel``. Not for its submodules: SGLang has plain code for where they are missing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _StandInLoader()) if fullname == _KERNELS else None


class _StandInLoader(Loader):
    """Makes a module whose every public attribute is a function that refuses to be called."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def get_attribute(name: str) -> Callable[..., NoReturn]:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            function = _refusal(f"{module.__name__}.{name}")
            setattr(module, name, function)
            return function

        vars(module)["__getattr__"] = get_attribute


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} is a GPU kernel, and this process runs SGLang on a CPU with a stand-in for sgl_kernel; "
            "the model or engine option that needs it does not work on a CPU"
        )

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__module__ = name.rpartition(".")[0]
    return refuse


class _TorchvisionFinder(MetaPathFinder):
    """Finds the one module of torchvision that fails where its operators are missing, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TORCHVISION_META:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ForgivingLoader(spec.loader)
        return spec


class _ForgivingLoader(Loader):
    """Runs a module, and leaves it as far as it got if it describes operators that this torchvision did not load."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            logger.debug("torchvision's operators are not loaded (a CUDA build on a CPU): %s", error)
