"""Asks nvidia-smi, and CUDA's driver library in a process of its own, what GPUs there are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from sglrollout.doctor.facts import Cuda, Devices, Gpu, User
from sglrollout.engine.placement import visible_devices
from sglrollout.errors import PlacementError

_TIMEOUT_S = 15
_MIB = 1 << 20
_COLUMNS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "compute_mode",
    "mig.mode.current",
    "driver_version",
)
_GPUS = ("nvidia-smi", f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits")
_USERS = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
_BUS = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"

# It makes no context, so it takes no memory of a device, and works beside a process that has one for itself.
_CUDA = """
import ctypes, json, sys

def ask():
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error)}
    version, number, said = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    code = cuda.cuInit(0)
    if code:
        cuda.cuGetErrorString(code, ctypes.byref(said))
        words = (said.value or b"unknown").decode()
        return {"version": version.value, "error": f"cuInit failed with {code}: {words}"}
    cuda.cuDeviceGetCount(ctypes.byref(number))
    return {"version": version.value, "num_devices": number.value}

json.dump(ask(), sys.stdout)
"""


def read_devices() -> Devices:
    """What the driver says of the GPUs; nothing where there is none."""
    number = _number_on_bus()
    try:
        rows = _ask(_GPUS)
        visible = visible_devices()
    except PlacementError as error:
        return Devices(error=str(error), num_on_bus=number)
    except FileNotFoundError:
        return Devices(error=_without_nvidia_smi(), num_on_bus=number)
    except (subprocess.SubprocessError, OSError) as error:
        return Devices(error=_in_words(error), num_on_bus=number)
    cells = [row for row in rows if len(row) == len(_COLUMNS)]
    users = _read_users() if cells else {}
    return Devices(
        driver=cells[0][7] if cells else "",
        gpus=tuple(_gpu(row, users.get(row[1], ())) for row in cells),
        visible=tuple(visible),
        num_on_bus=number,
        cuda=_read_cuda() if visible else None,
    )


def _gpu(row: Sequence[str], users: Sequence[User]) -> Gpu:
    index, uuid, name, total, free, mode, mig, _ = row
    return Gpu(
        index=int(index),
        uuid=uuid,
        name=name,
        total_bytes=_bytes(total),
        free_bytes=_bytes(free),
        compute_mode="" if mode.startswith("[") else mode,
        is_mig=mig == "Enabled",
        users=tuple(users),
    )


def _read_users() -> dict[str, list[User]]:
    """By the device's UUID. In a container a driver may say nothing of them."""
    users = defaultdict(list)
    try:
        rows = _ask(_USERS)
    except (subprocess.SubprocessError, OSError):
        return {}
    for row in rows:
        if len(row) == 4 and row[1].isdecimal():
            users[row[0]].append(User(int(row[1]), row[2].rpartition("/")[2], _bytes(row[3])))
    return users


def _read_cuda() -> Cuda | None:
    command = [sys.executable, "-I", "-S", "-c", _CUDA]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except subprocess.TimeoutExpired:
        return None
    except subprocess.SubprocessError as error:
        return Cuda(error=f"the process that asked it ended: {error}")
    said = json.loads(run.stdout)
    version = said.get("version", 0)
    return Cuda(
        version=(version // 1000, version % 1000 // 10) if version else None,
        error=said.get("error", ""),
        num_devices=said.get("num_devices", 0),
    )


def _ask(command: Sequence[str]) -> list[list[str]]:
    run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return [[cell.strip() for cell in row.split(",")] for row in run.stdout.splitlines() if row.strip()]


def _without_nvidia_smi() -> str:
    """Empty where there is no driver either."""
    try:
        visible_devices()
    except PlacementError as error:
        return str(error)
    return ""


def _in_words(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi did not answer within {_TIMEOUT_S} s"
    if isinstance(error, subprocess.CalledProcessError):
        return f"nvidia-smi failed: {(error.stderr or error.stdout or '').strip() or f'exit code {error.returncode}'}"
    return f"nvidia-smi cannot be run: {error}"


def _number_on_bus() -> int:
    vendors = [
        vendor.parent for vendor in _BUS.glob("*/vendor") if vendor.read_text(encoding="ascii").strip() == _NVIDIA
    ]
    return sum((device / "class").read_text(encoding="ascii").startswith(_DISPLAY) for device in vendors)


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else 0
