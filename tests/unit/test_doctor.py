"""The doctor: of machines that are not here what it says, and of this one that it says it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from sglrollout import cli
from sglrollout.doctor import driver, gathering, host, report
from sglrollout.doctor.abilities import abilities
from sglrollout.doctor.examination import examine
from sglrollout.doctor.facts import Cuda, Devices, Facts, Gpu, Machine, Scratch, Software, User
from sglrollout.doctor.finding import Finding
from sglrollout.engine import control_groups
from sglrollout.engine.placement import Device
from sglrollout.version import __version__

GB = 10**9
PACKAGES = {
    **{"sglang": "0.5.21", "torch": "2.13.0", "transformers": "5.12.1", "sglang-kernel": "0.4.7"},
    **{"sgl-kernel": None, "torch_memory_saver": "0.0.10", "openai": "2.6.1", "prometheus_client": None},
}
SOFTWARE = Software(sglrollout="0.1.0", packages=PACKAGES, torch_cuda="13.0")


def gpu(index: int = 0, **changes: Any) -> Gpu:
    given = {"name": "NVIDIA H200", "total_bytes": 150 * GB, "free_bytes": 149 * GB, **changes}
    return Gpu(index=index, uuid=f"GPU-{index}", **given)


def devices(*gpus: Gpu, **changes: Any) -> Devices:
    """Of a machine with a good driver, on which all of its GPUs are visible."""
    visible = tuple(Device(place, one.uuid, one.name, one.total_bytes) for place, one in enumerate(gpus))
    cuda = Cuda(version=(13, 0), num_devices=len(gpus))
    return Devices(**{"driver": "580.65.06", "gpus": gpus, "visible": visible, "cuda": cuda, **changes})


TWO = devices(gpu(0), gpu(1))
NONE = Devices()


def facts(
    on: Devices = TWO,
    *,
    software: Mapping[str, Any] | None = None,
    packages: Mapping[str, str | None] | None = None,
    machine: Mapping[str, Any] | None = None,
    **environment: str,
) -> Facts:
    """Those of a good machine, changed."""
    installed = dataclasses.replace(SOFTWARE, packages={**PACKAGES, **(packages or {})}, **(software or {}))
    return Facts(software=installed, devices=on, machine=Machine(**(machine or {})), environment=environment)


def finding(given: Facts, name: str) -> Finding:
    (found,) = [one for one in examine(given).findings if one.name == name]
    return found


def complaints(given: Facts) -> dict[str, str]:
    return {one.name: one.verdict for one in examine(given).findings if one.verdict != "ok"}


# ------------------------------------------------------------ all is well


@pytest.mark.parametrize("on", [TWO, devices(gpu()), NONE])
def test_a_good_machine_has_nothing_to_mend(on: Devices) -> None:
    examination = examine(facts(on, software={"torch_cuda": "13.0" if on.gpus else None}))
    assert [one for one in examination.findings if one.verdict != "ok" or one.fix] == []
    assert examination.can_run
    assert examination.summary == "engines can run here: 0 warnings"


def test_what_is_wrong_or_a_warning_comes_with_a_fix() -> None:
    for name, (given, _, _) in CASES.items():
        for one in examine(given).findings:
            assert (one.verdict == "ok") == (not one.fix), (name, one)
            assert one.found, (name, one)


# ------------------------------------------------------------ machines that are not here

H200 = "NVIDIA H200"
BUSY = gpu(0, free_bytes=60 * GB, users=(User(17, "python", 90 * GB),))
FULL = gpu(0, free_bytes=GB)

CASES: dict[str, tuple[Facts, dict[str, str], str]] = {
    # software
    "macOS": (facts(NONE, software={"platform": "darwin"}), {"platform": "wrong"}, "Linux"),
    "an old Python": (facts(software={"python": (3, 10, 4)}), {"Python": "wrong"}, "Python 3.11"),
    "no SGLang": (facts(packages={"sglang": None}), {"SGLang": "wrong"}, 'pip install "sglrollout[sglang]"'),
    "an old SGLang": (facts(packages={"sglang": "0.5.10"}), {"SGLang": "wrong"}, 'pip install "sglang==0.5.23"'),
    "a new SGLang": (facts(packages={"sglang": "0.6.0"}), {"SGLang": "wrong"}, 'pip install "sglang==0.5.23"'),
    "an SGLang between": (facts(packages={"sglang": "0.5.18"}), {"SGLang": "warning"}, 'pip install "sglang==0.5.23"'),
    "no torch": (facts(packages={"torch": None}), {"torch": "wrong"}, "pip install"),
    "no transformers": (facts(packages={"transformers": None}), {"transformers": "wrong"}, "pip install"),
    "a CPU's torch beside GPUs": (
        facts(packages={"torch": "2.13.0+cpu"}, software={"torch_cuda": None}),
        {"torch": "wrong"},
        'pip install --force-reinstall "torch==2.13.0", or run engines with device="cpu"',
    ),
    "a CUDA torch without CUDA's libraries, on a CPU": (
        facts(NONE, software={"torch_lacks": ("nvidia-nccl-cu13==2.28",), "torch_error": "OSError: libnccl.so.2"}),
        {"torch": "wrong"},
        "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
    ),
    "the same on GPUs": (
        facts(software={"torch_lacks": ("nvidia-nccl-cu13==2.28",), "torch_error": "OSError: libnccl.so.2"}),
        {"torch": "wrong"},
        "pip install nvidia-nccl-cu13==2.28",
    ),
    "another torch": (
        facts(packages={"torch": "2.12.0"}, software={"unmet": (("torch==2.13.0", "2.12.0"),)}),
        {"torch": "warning"},
        'pip install "torch==2.13.0"',
    ),
    "another torch on a CPU": (
        facts(NONE, packages={"torch": "2.12.0+cpu"}, software={"unmet": (("torch==2.13.0", "2.12.0+cpu"),)}),
        {"torch": "warning"},
        "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
    ),
    "other transformers": (
        facts(software={"unmet": (("transformers==5.12.1", "5.13.0"),)}),
        {"transformers": "warning"},
        'pip install "transformers==5.12.1"',
    ),
    "no kernels": (
        facts(packages={"sglang-kernel": None}, software={"unmet": (("sglang-kernel==0.4.7", None),)}),
        {"SGLang's kernels": "wrong"},
        'pip install "sglang-kernel==0.4.7"',
    ),
    "old kernels": (
        facts(packages={"sglang-kernel": "0.4.6"}, software={"unmet": (("sglang-kernel==0.4.7", "0.4.6"),)}),
        {"SGLang's kernels": "wrong"},
        'pip install "sglang-kernel==0.4.7"',
    ),
    "new kernels": (
        facts(packages={"sglang-kernel": "0.4.8"}, software={"unmet": (("sglang-kernel==0.4.7", "0.4.8"),)}),
        {"SGLang's kernels": "warning"},
        'pip install "sglang-kernel==0.4.7"',
    ),
    "requirements left out": (
        facts(software={"unmet": (("flashinfer-python==0.6.18", None), ("xgrammar==0.2.7", "0.2.0"))}),
        {"SGLang's requirements": "warning"},
        'pip install "sglang==0.5.21"',
    ),
    # GPUs
    "a GPU without its driver": (facts(Devices(num_on_bus=1)), {"GPUs": "warning"}, "docker run --gpus all"),
    "a driver that does not answer": (facts(Devices(error="nvidia-smi failed")), {"driver": "wrong"}, "nvidia-smi"),
    "hidden GPUs": (
        facts(devices(gpu(), visible=(), cuda=None), CUDA_VISIBLE_DEVICES=""),
        {"visible GPUs": "warning"},
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "an old driver": (
        facts(devices(gpu(), cuda=Cuda(version=(12, 4), num_devices=1))),
        {"CUDA": "wrong"},
        "update the driver to one for CUDA 13",
    ),
    "no CUDA library": (
        facts(devices(gpu(), cuda=Cuda(error="libcuda.so.1: cannot open shared object file"))),
        {"CUDA": "wrong"},
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    "no fabric manager": (
        facts(devices(gpu(), cuda=Cuda(version=(13, 0), error="cuInit failed with 802: system not yet initialized"))),
        {"CUDA": "wrong"},
        "nvidia-fabricmanager",
    ),
    "two versions of the driver": (
        facts(devices(gpu(), cuda=Cuda(version=(13, 0), error="cuInit failed with 803: driver mismatch"))),
        {"CUDA": "wrong"},
        "reboot",
    ),
    "another error of CUDA's": (
        facts(devices(gpu(), cuda=Cuda(version=(13, 0), error="cuInit failed with 999: unknown error"))),
        {"CUDA": "wrong"},
        "dmesg",
    ),
    "CUDA hangs": (facts(devices(gpu(), cuda=None)), {"CUDA": "warning"}, "dmesg"),
    "a device node is missing": (
        facts(devices(gpu(0), gpu(1), cuda=Cuda(version=(13, 0), num_devices=1))),
        {"CUDA": "warning"},
        "device nodes",
    ),
    "GPUs of two kinds": (
        facts(devices(gpu(0), gpu(1, name="NVIDIA L40S"))),
        {"order of GPUs": "warning"},
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
    ),
    "MIG, its instances not named": (
        facts(devices(gpu(is_mig=True))),
        {"GPU 0": "warning"},
        "export CUDA_VISIBLE_DEVICES=MIG-",
    ),
    "a prohibited GPU": (
        facts(devices(gpu(0), gpu(1, compute_mode="Prohibited"))),
        {"GPU 1": "wrong"},
        "sudo nvidia-smi -i 1 -c DEFAULT",
    ),
    "an exclusive GPU": (
        facts(devices(gpu(compute_mode="Exclusive_Process"))),
        {"GPU 0": "warning"},
        "sudo nvidia-smi -i 0 -c DEFAULT",
    ),
    "a GPU that others use": (facts(devices(BUSY, gpu(1))), {"GPU 0": "warning"}, "lower mem_fraction (to 0.35, say)"),
    "one full GPU of two": (facts(devices(FULL, gpu(1))), {"GPU 0": "warning"}, "choose others by devices="),
    "full GPUs": (facts(devices(FULL)), {"GPU 0": "wrong"}, "end what is not yours"),
    "no C compiler": (facts(machine={"compiler": None}), {"C compiler": "warning"}, "apt-get install gcc"),
    "no headers of Python": (facts(machine={"python_headers": False}), {"C compiler": "warning"}, "python3-dev"),
    # machine
    "few cores": (facts(machine={"num_cores": 2}), {"cores": "warning"}, "num_engines"),
    "a small quota": (facts(machine={"cpu_quota": 1.5}), {"cores": "warning"}, "num_engines"),
    "little memory": (facts(machine={"memory_free_bytes": 4 * GB}), {"host memory": "warning"}, "docker run --memory"),
    "a tight control group": (
        facts(machine={"memory_limit_bytes": 8 * GB, "memory_limit_used_bytes": 7 * GB + 10**8}),
        {"host memory": "wrong"},
        "docker run --memory",
    ),
    "docker's /dev/shm": (
        facts(machine={"shm_total_bytes": 64 << 20, "shm_free_bytes": 64 << 20}),
        {"/dev/shm": "warning"},
        "docker run --shm-size=8g",
    ),
    "a full /dev/shm": (facts(machine={"shm_free_bytes": 0}), {"/dev/shm": "wrong"}, "remove what is left there"),
    "no /dev/shm": (
        facts(machine={"shm_error": "files cannot be made in /dev/shm (No such file or directory)"}),
        {"/dev/shm": "wrong"},
        "mode 1777",
    ),
    "a TMPDIR that cannot be written": (
        facts(machine={"scratch": Scratch(root="/data", error="Read-only file system")}, TMPDIR="/data"),
        {"TMPDIR": "wrong"},
        "export TMPDIR=",
    ),
    "a TMPDIR that is not used": (
        facts(machine={"scratch": Scratch(root="/tmp")}, TMPDIR="/" + "long/" * 20),
        {"TMPDIR": "warning"},
        "export TMPDIR=",
    ),
    "a TMPDIR of everybody's": (
        facts(machine={"scratch": Scratch(is_private=False)}),
        {"TMPDIR": "warning"},
        "+t /tmp",
    ),
    "a noexec TMPDIR": (facts(machine={"scratch": Scratch(may_execute=False)}), {"TMPDIR": "warning"}, "TMPDIR="),
    "a TMPDIR with little room": (
        facts(machine={"scratch": Scratch(free_bytes=1 << 28)}),
        {"TMPDIR": "warning"},
        "TMPDIR=",
    ),
    "no home": (facts(machine={"cache_error": "there is none"}), {"home directory": "warning"}, "export HOME="),
    "few open files": (facts(machine={"open_files": (1024, None)}), {"open files": "warning"}, "ulimit -n 65536"),
    "few open files for good": (
        facts(machine={"open_files": (1024, 2048)}),
        {"open files": "warning"},
        "docker run --ulimit nofile=65536",
    ),
    "InfiniBand, and little locked memory": (
        facts(machine={"has_infiniband": True, "locked_bytes": 1 << 16}),
        {"locked memory": "warning"},
        "ulimit -l unlimited",
    ),
    "a hidden /proc": (
        facts(machine={"proc_error": "PermissionError"}),
        {"memory shared by processes": "warning"},
        "hidepid",
    ),
    # environment
    "expandable segments": (
        facts(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64, expandable_segments:True"),
        {"allocator": "warning"},
        "leave expandable_segments out",
    ),
    "the CPU's engine beside GPUs": (
        facts(SGLANG_USE_CPU_ENGINE="1"),
        {"CPU engines": "wrong"},
        "unset SGLANG_USE_CPU_ENGINE",
    ),
    "blocking launches": (facts(CUDA_LAUNCH_BLOCKING="1"), {"launches": "warning"}, "unset CUDA_LAUNCH_BLOCKING"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_trouble_is_found_alone_and_its_fix_named(case: str) -> None:
    given, expected, fix = CASES[case]
    assert complaints(given) == expected
    (name,) = expected
    assert fix in finding(given, name).fix
    assert examine(given).can_run == ("wrong" not in expected.values())


def test_who_uses_a_device_is_named() -> None:
    assert "60 GB of 150 GB free" in finding(facts(devices(BUSY)), "GPU 0").found
    assert "used by pid 17 python 90 GB" in finding(facts(devices(BUSY)), "GPU 0").found
    unknown = dataclasses.replace(BUSY, users=())
    assert "not seen from here" in finding(facts(devices(unknown)), "GPU 0").found


def test_an_instance_of_mig_is_a_device_like_another() -> None:
    visible = (Device(0, "MIG-1", "MIG instance", 0),)
    one = devices(gpu(is_mig=True), visible=visible, cuda=Cuda(version=(13, 0), num_devices=1))
    given = facts(one, CUDA_VISIBLE_DEVICES="MIG-1")
    assert complaints(given) == {}
    assert finding(given, "GPU").found == "MIG instance, MIG-1"


@pytest.mark.parametrize(
    ("variables", "name", "said"),
    [
        ({"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "launcher", "RANK, TORCHELASTIC_USE_AGENT_STORE"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "allocator", "do not inherit it"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "interfaces", "NCCL_SOCKET_IFNAME=eth0: engines have their own"),
        ({"SGLANG_A": "secret", "SGLANG_B": "x"}, "SGLang's variables", "SGLANG_A, SGLANG_B: engines inherit them"),
        ({"HF_HUB_OFFLINE": "1"}, "model hub", "HF_HUB_OFFLINE=1: models are a path"),
        ({"HF_HUB_OFFLINE": "0", "HF_HOME": "/models"}, "model hub", "online: a model that is not in /models/hub"),
    ],
)
def test_variables_that_need_no_mending_are_explained(variables: dict[str, str], name: str, said: str) -> None:
    given = dataclasses.replace(facts(), environment=variables)
    assert complaints(given) == {}
    assert said in finding(given, name).found


def test_nothing_is_said_of_variables_that_are_not_set() -> None:
    assert [one.name for one in examine(facts()).topics["environment"]] == ["model hub"]


def test_on_a_cpu_what_is_for_gpus_is_not_asked_for() -> None:
    unmet = (("sglang-kernel==0.4.7", None), ("flashinfer-python==0.6.18", None), ("blobfile==3.0.0", "3.3.0"))
    lean = facts(NONE, packages={"sglang-kernel": None}, software={"unmet": unmet}, machine={"compiler": None})
    assert complaints(lean) == {}
    assert complaints(facts(NONE, SGLROLLOUT_CPU="1", CUDA_LAUNCH_BLOCKING="1")) == {}


# ------------------------------------------------------------ what is supported


def supported(given: Facts) -> dict[str, bool]:
    return {ability.name: ability.is_supported for ability in examine(given).abilities}


def test_what_is_supported_follows_from_the_devices() -> None:
    assert all(supported(facts()).values())
    one = supported(facts(devices(gpu())))
    assert [name for name, yes in one.items() if not yes] == ["tensor parallelism"]
    cpu = supported(facts(NONE))
    assert [name for name, yes in cpu.items() if not yes] == [
        "engines on GPUs",
        "sleep and wake",
        "deterministic sampling",
    ]


def test_sleep_needs_the_memory_saver_and_shared_weights_need_proc() -> None:
    assert not supported(facts(packages={"torch_memory_saver": None}))["sleep and wake"]
    hidden = supported(facts(NONE, machine={"proc_error": "PermissionError"}))
    assert not hidden["weights for engines that come back"]


def test_nothing_is_supported_where_engines_cannot_run() -> None:
    (only,) = abilities(facts(packages={"sglang": None}), can_run=False)
    assert not only.is_supported


# ------------------------------------------------------------ how it is shown


def shown(given: Facts, **options: Any) -> str:
    output = StringIO()
    report.show(examine(given), Console(file=output, **options))
    return output.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    given = facts(machine={"shm_free_bytes": 0}, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,x:[/]")
    lines = shown(given, width=40).splitlines()
    assert "  wrong    /dev/shm: 0 MB of 68.7 GB free" in lines
    assert any(line.startswith("           fix: remove what is left there, or docker run") for line in lines)
    assert "x:[/]" in "".join(lines)  # no markup of rich's
    assert lines[-1] == "engines cannot run here: 1 wrong, 1 warning"


def test_a_table_on_a_terminal() -> None:
    given = facts(machine={"shm_free_bytes": 0}, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,x:[/]")
    text = shown(given, force_terminal=True, color_system=None, width=200)
    assert "→ remove what is left there" in text
    assert "x:[/]" in text
    assert "supported here" in text


def test_json_has_it_all_but_the_environment() -> None:
    given = facts(machine={"shm_free_bytes": 0}, SGLANG_TOKEN="secret", HF_TOKEN="secret")
    text = report.as_json(examine(given), given)
    said = json.loads(text)
    assert said["can_run"] is False
    assert {"topic", "name", "verdict", "found", "fix"} == set(said["findings"][0])
    assert said["facts"]["devices"]["gpus"][1]["uuid"] == "GPU-1"
    assert "secret" not in text


# ------------------------------------------------------------ what is read

SMI = """#!/bin/sh
case "$1" in
  *compute-apps*) echo "GPU-aa, 4242, /usr/bin/python3, 90000" ;;
  *driver_version*) echo "0, GPU-aa, NVIDIA H200, 143771, 50000, Default, Disabled, 550.54.14"
     echo "1, GPU-bb, NVIDIA H200, 143771, 143000, Exclusive_Process, [N/A], 550.54.14" ;;
  *) echo "0, GPU-aa, NVIDIA H200, 143771"; echo "1, GPU-bb, NVIDIA H200, 143771" ;;
esac
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi of two GPUs, first on the path."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def test_devices_are_read_as_placement_reads_them(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = driver.read_devices()
    assert found.driver == "550.54.14"
    assert [device.uuid for device in found.visible] == ["GPU-bb"]
    first, second = found.gpus
    assert first.users == (User(4242, "python3", 90000 << 20),)
    assert (first.total_bytes, first.free_bytes, first.is_mig) == (143771 << 20, 50000 << 20, False)
    assert (second.compute_mode, second.users) == ("Exclusive_Process", ())


def test_a_driver_that_fails_says_why(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    assert (
        driver.read_devices().error == "nvidia-smi failed: Failed to initialize NVML: Driver/library version mismatch"
    )


def test_a_driver_that_hangs_is_not_waited_for(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(driver, "_TIMEOUT_S", 0.2)
    assert driver.read_devices().error == "nvidia-smi did not answer within 0.2 s"


def test_the_library_of_cuda_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-I", "-S"]
        return subprocess.CompletedProcess(command, 0, '{"version": 12080, "num_devices": 2}', "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert driver._read_cuda() == Cuda(version=(12, 8), num_devices=2)


def test_versions_are_read_without_an_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gathering._torch_cuda() == "13.0"
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\n")
    assert gathering._torch_cuda() is None


def test_requirements_that_are_not_met_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["pytest>=1", "pytest<1", "not_there==2; python_version > '3'", "absent; extra == 'x'", "rich ???"]
    monkeypatch.setattr("importlib.metadata.requires", lambda package: lines)
    assert gathering._unmet("anything") == (("pytest<1", pytest.__version__), ("not-there==2", None))


def test_an_import_that_fails_says_why() -> None:
    assert gathering._import_error("sys") == ""
    assert "No module named 'not_there'" in gathering._import_error("not_there")


def test_the_scratch_directory_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path("/tmp") / f"doctor-{os.getpid()}"
    short.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(short))
    try:
        found = host._try_scratch()
        assert (found.root, found.error, found.is_private) == (str(short), "", True)
        short.chmod(0o777)
        assert not host._try_scratch().is_private
        assert list(short.iterdir()) == []
    finally:
        short.rmdir()
    assert "No such file or directory" in host._try_scratch().error


GROUPS = {"v1": "4:memory:/a/b\n2:cpu,cpuacct:/a\n", "v2": "0::/a/b\n"}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_tightest_limit_of_the_control_groups_counts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_new = kind == "v2"
    root = tmp_path if is_new else tmp_path / "memory"
    names = ("memory.max", "memory.current") if is_new else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / names[0]).write_text(f"{8 * GB}\n")
    (root / "a" / names[1]).write_text(f"{3 * GB}\n")
    (root / "a" / "memory.stat").write_text(f"anon 1\ninactive_file {GB}\n")
    (root / "a" / "b" / names[0]).write_text("max\n" if is_new else f"{2**63 - 4096}\n")
    cpu = tmp_path / "a" if is_new else tmp_path / "cpu" / "a"
    cpu.mkdir(parents=True, exist_ok=True)
    if is_new:
        (cpu / "cpu.max").write_text("150000 100000\n")
    else:
        (cpu / "cpu.cfs_quota_us").write_text("150000\n")
        (cpu / "cpu.cfs_period_us").write_text("100000\n")
    text_in = control_groups.text_in
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path)
    monkeypatch.setattr(
        control_groups, "text_in", lambda file: GROUPS[kind] if file.name == "cgroup" else text_in(file)
    )
    assert control_groups.memory_limit() == (8 * GB, 2 * GB)
    for available, least in ((20 * GB, 6 * GB), (5 * GB, 5 * GB)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda found=available: SimpleNamespace(available=found))
        assert control_groups.available_bytes() == least
    assert host._cpu_quota() == 1.5


def test_files_can_be_shared_here_and_are_not_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert host._try_sharing() == ""
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------ the command


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "sglrollout", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def imported(run: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}


def test_the_command_examines_this_machine() -> None:
    run = doctor("--json", CUDA_VISIBLE_DEVICES="")
    said = json.loads(run.stdout)
    assert run.returncode == (0 if said["can_run"] else 1)
    assert said["facts"]["software"]["sglrollout"] == __version__
    assert said["facts"]["machine"]["num_cores"] == len(os.sched_getaffinity(0))
    assert not imported(run) & {"torch", "sglang", "transformers", "tokenizers", "numpy"}
    assert [line for line in run.stderr.splitlines() if not line.startswith("import time:")] == []


def test_the_command_says_by_its_exit_code_that_engines_cannot_run(nvidia_smi: Path) -> None:
    run = doctor(SGLROLLOUT_CPU="1")
    assert run.returncode == 1
    assert "fix: unset SGLROLLOUT_CPU" in run.stdout
    assert "NVIDIA 550.54.14" in run.stdout
    assert "used by pid 4242 python3 94.4 GB" in run.stdout


def test_the_command_line_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out.strip()) == (0, __version__)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    assert "doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
