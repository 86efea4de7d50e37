"""Each test runs its script in a process of its own: what is enabled cannot be disabled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglrollout.engine import cpu_support
from sglrollout.errors import ConfigError


def run(script: str, **env: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGL", "OMP_"))}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120, env=inherited | env
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_enabling_imports_neither_torch_nor_sglang() -> None:
    run("""
import sys
from sglrollout.engine import cpu_support
assert not cpu_support.is_enabled()
cpu_support.enable()
assert cpu_support.is_enabled()
assert not {"torch", "sglang", "torchvision"} & set(sys.modules)
""")


def test_children_know_that_it_is_enabled() -> None:
    run("""
import subprocess, sys
from sglrollout.engine import cpu_support
cpu_support.enable()
child = "from sglrollout.engine import cpu_support; assert cpu_support.is_enabled()"
subprocess.run([sys.executable, "-c", child], check=True)
""")


def test_a_second_call_changes_nothing_else() -> None:
    run("""
import os, sys
from sglrollout.engine import cpu_support
cpu_support.enable(num_threads=3, tp_size=2)
before = dict(os.environ), list(sys.meta_path)
cpu_support.enable()
assert before == (dict(os.environ), list(sys.meta_path))
assert os.environ["OMP_NUM_THREADS"] == "3"
""")


@pytest.mark.skipif(cpu_support._kernels_importable(), reason="the real sgl_kernel works here")
def test_the_stand_in_offers_every_kernel_and_runs_none() -> None:
    output = run("""
from sglrollout.engine import cpu_support
cpu_support.enable()
import importlib.util
import sgl_kernel
from sgl_kernel import silu_and_mul
assert importlib.util.find_spec("sgl_kernel") is not None
assert sgl_kernel.silu_and_mul is silu_and_mul
assert not hasattr(sgl_kernel, "__version__")
try:
    import sgl_kernel.scalar_type
except ImportError:
    print("no submodules")
try:
    silu_and_mul(1)
except NotImplementedError as error:
    print(error)
""")
    assert output.startswith("no submodules\nsgl_kernel.silu_and_mul is a GPU kernel")


def test_torchvision_and_the_models_of_transformers_import() -> None:
    run("""
from sglrollout.engine import cpu_support
cpu_support.forgive_torchvision()
import torchvision.transforms.v2
from transformers import Qwen3ForCausalLM
""")


@pytest.mark.parametrize(
    ("num_cores", "tp_size", "bound", "num_threads"),
    [(2, 2, "0|1", "1"), (8, 2, "0,1,2,3|4,5,6,7", "4"), (1, 2, "0|0", "1"), (5, 2, "0,1|2,3", "2")],
)
def test_ranks_share_the_cores(num_cores: int, tp_size: int, bound: str, num_threads: str) -> None:
    output = run(f"""
import os
os.sched_getaffinity = lambda pid: set(range({num_cores}))
from sglrollout.engine import cpu_support
cpu_support.enable(tp_size={tp_size})
print(os.environ["SGLANG_CPU_OMP_THREADS_BIND"], os.environ["OMP_NUM_THREADS"])
""")
    assert output == f"{bound} {num_threads}"


def test_the_users_own_binding_of_cores_stays() -> None:
    output = run(
        "import os; from sglrollout.engine.cpu_support import enable; enable(tp_size=2); "
        'print(os.environ["SGLANG_CPU_OMP_THREADS_BIND"])',
        SGLANG_CPU_OMP_THREADS_BIND="0-3|4-7",
    )
    assert output == "0-3|4-7"


@pytest.mark.parametrize(("field", "value"), [("num_threads", 0), ("tp_size", 0)])
def test_wrong_options_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be at least 1, got 0"):
        cpu_support.enable(**{field: value})
