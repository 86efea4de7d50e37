"""Reads what is here. Nothing is imported for it but what says versions, no engine starts, and CUDA is left alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sglrollout.doctor.driver import read_devices
from sglrollout.doctor.facts import Facts, Software
from sglrollout.doctor.host import read_machine
from sglrollout.version import __version__

_PACKAGES = (
    *("sglang", "torch", "transformers", "sglang-kernel", "sgl-kernel", "torch_memory_saver"),
    *("openai", "prometheus_client"),
)
_LIBRARIES = ("nvidia-", "cuda-", "triton")
_IMPORT_TIMEOUT_S = 30
_TORCH_CUDA = re.compile(r"""^cuda\b[^=]*=\s*['"]([\d.]+)['"]""", re.MULTILINE)


def gather() -> Facts:
    """The facts of this machine. It takes about a second, unless a driver or a disk hangs: each wait has its limit."""
    with ThreadPoolExecutor() as threads:
        parts = threads.submit(_read_software), threads.submit(read_devices), threads.submit(read_machine)
        software, devices, machine = parts
        return Facts(
            software=software.result(),
            devices=devices.result(),
            machine=machine.result(),
            environment=dict(os.environ),
        )


def _read_software() -> Software:
    lacks = _missing_libraries()
    return Software(
        platform=sys.platform,
        machine=platform.machine(),
        python=sys.version_info[:3],
        sglrollout=__version__,
        packages={name: _version(name) for name in _PACKAGES},
        unmet=_unmet("sglang"),
        torch_cuda=_torch_cuda(),
        torch_lacks=lacks,
        torch_error=_import_error("torch") if lacks else "",
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet(package: str) -> tuple[tuple[str, str | None], ...]:
    """What the installed package requires and is not so, each with the version that is there."""
    unmet = []
    for requirement in _requirements(package):
        found = _version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            unmet.append((f"{canonicalize_name(requirement.name)}{requirement.specifier}", found))
    return tuple(unmet)


def _requirements(package: str) -> list[Requirement]:
    """Those of this platform, without the extras'."""
    try:
        lines = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # an old package's own way to write it
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found


def _missing_libraries() -> tuple[str, ...]:
    return tuple(text for text, found in _unmet("torch") if found is None and text.startswith(_LIBRARIES))


def _torch_cuda() -> str | None:
    """Read from torch's file of its version: an import takes seconds, and a broken one fails."""
    spec = importlib.util.find_spec("torch")
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    match = _TORCH_CUDA.search(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else None
    return match[1] if match else None


def _import_error(module: str) -> str:
    """Its last line, of an import in another process; empty if it succeeds."""
    command = [sys.executable, "-c", f"import {module}"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False, env=hidden
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {_IMPORT_TIMEOUT_S} s"
    return "" if run.returncode == 0 else (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
