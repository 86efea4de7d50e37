"""Which engine runs on which devices, found out without touching CUDA in the user's process."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from sglrollout.config import RolloutConfig
from sglrollout.errors import PlacementError

_log = logging.getLogger(__name__)

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 30
_DRIVER_FILE = Path("/dev/nvidiactl")
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Device:
    """One visible GPU.

    Attributes:
        index: its number among the visible devices, as in torch's ``cuda:<index>``.
        uuid: the driver's id for it, good in ``CUDA_VISIBLE_DEVICES`` whatever the order of devices.
        name: the product's name.
        total_bytes: its memory; 0 where the driver does not say.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one engine runs: ``tp_size`` devices in rank order, none on a CPU."""

    device: Literal["cuda", "cpu"]
    devices: tuple[Device, ...] = ()


def visible_devices() -> list[Device]:
    """The GPUs this process may use, in CUDA's order; none where there is no NVIDIA driver.

    Raises:
        PlacementError: the driver does not answer.
    """
    present = [_parse_row(row) for row in _query_driver().splitlines() if row.strip()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if len({device.name for device in present}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        _log.warning(
            "GPUs of several kinds are present and CUDA may number them by speed; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name devices by UUID, to be sure which is which"
        )
    return present if chosen is None or not present else _narrow(present, chosen)


def plan(config: RolloutConfig, visible: Sequence[Device] | None = None) -> tuple[Placement, ...]:
    """A placement for each engine; no device serves two.

    Args:
        config: says how many engines of which size, and perhaps where.
        visible: the devices to choose from; by default those of :func:`visible_devices`.

    Raises:
        PlacementError: the engines do not fit.
        ConfigError: there is no GPU, and the config asks for what a CPU cannot do.
    """
    if config.device == "cpu":
        return _on_cpu(config)
    found = visible_devices() if visible is None else visible
    if config.devices is not None:
        return _as_told(config.devices, found)
    if not found and config.device == "auto":
        return _on_cpu(config.replace(device="cpu"))
    return _in_order(config, found)


def cpu_cores(config: RolloutConfig) -> tuple[tuple[int, ...], ...]:
    """The cores of each engine on a CPU: an even split of those this process may use, shared if they are too few."""
    cores, num_engines = _usable_cores(), config.num_engines or 1
    if num_engines >= len(cores):
        return tuple((cores[number % len(cores)],) for number in range(num_engines))
    bounds = [number * len(cores) // num_engines for number in range(num_engines + 1)]
    return tuple(tuple(cores[start:end]) for start, end in pairwise(bounds))


def _query_driver() -> str:
    try:
        result = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except FileNotFoundError:
        if _DRIVER_FILE.exists():
            raise PlacementError(
                f"there is a GPU driver ({_DRIVER_FILE}) but no nvidia-smi to ask for its GPUs: "
                'put nvidia-smi on the PATH, or set device="cpu"'
            ) from None
        return ""
    except subprocess.TimeoutExpired:
        raise PlacementError(
            f"nvidia-smi did not answer within {_QUERY_TIMEOUT_S} s, so the GPUs are unknown: "
            'check the driver, or set device="cpu"'
        ) from None
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip()
        raise PlacementError(
            f'nvidia-smi failed, so the GPUs are unknown ({said}): check the driver, or set device="cpu"'
        )
    return result.stdout


def _parse_row(row: str) -> Device:
    cells = [cell.strip() for cell in row.split(",")]
    if len(cells) != 4 or not cells[0].isdecimal():
        raise PlacementError(f"nvidia-smi answered with a line that is not index, uuid, name, memory: {row!r}")
    index, uuid, name, mebibytes = cells
    return Device(int(index), uuid, name, int(mebibytes) * _MIB if mebibytes.isdecimal() else 0)


def _narrow(present: Sequence[Device], chosen: str) -> list[Device]:
    """Apply ``CUDA_VISIBLE_DEVICES`` as CUDA does: the first invalid entry ends the list, a repeated one empties it."""
    kept: list[Device] = []
    for entry in (part.strip() for part in chosen.split(",")):
        device = _find(present, entry)
        if device is None:
            break
        if any(device.uuid == other.uuid for other in kept):
            return []
        kept.append(Device(len(kept), device.uuid, device.name, device.total_bytes))
    return kept


def _find(present: Sequence[Device], entry: str) -> Device | None:
    if entry.startswith("MIG-"):
        return Device(0, entry, "MIG instance", 0)
    if entry.isdecimal():
        return _only(present, lambda device: device.index == int(entry))
    return _only(present, lambda device: device.uuid.startswith(entry)) if entry.startswith("GPU-") else None


def _only(devices: Sequence[Device], wanted: Callable[[Device], bool]) -> Device | None:
    matches = [device for device in devices if wanted(device)]
    return matches[0] if len(matches) == 1 else None


def _on_cpu(config: RolloutConfig) -> tuple[Placement, ...]:
    return (Placement("cpu"),) * (config.num_engines or 1)


def _in_order(config: RolloutConfig, found: Sequence[Device]) -> tuple[Placement, ...]:
    size = config.tp_size
    num_engines = config.num_engines or (1 if config.isolation == "thread" else max(1, len(found) // size))
    if num_engines * size > len(found):
        engines = "1 engine needs" if num_engines == 1 else f"{num_engines} engines need"
        raise PlacementError(
            f"{engines} {_count(num_engines * size)} with tp_size={size}, one per rank and none shared, "
            f"but {_listing(found)}: lower num_engines or tp_size, or make more devices visible"
        )
    return tuple(Placement("cuda", tuple(found[start : start + size])) for start in range(0, num_engines * size, size))


def _as_told(devices: Sequence[Sequence[int | str]], found: Sequence[Device]) -> tuple[Placement, ...]:
    placements, owner = [], dict[str, int]()
    for engine, entries in enumerate(devices):
        chosen = tuple(_resolve(entry, found) for entry in entries)
        for entry, device in zip(entries, chosen, strict=True):
            if device.uuid in owner:
                raise PlacementError(
                    f"devices asks for {entry!r} (device {device.index}, {device.uuid}) for engine {engine}, "
                    f"but engine {owner[device.uuid]} has it already: give every engine devices of its own"
                )
            owner[device.uuid] = engine
        placements.append(Placement("cuda", chosen))
    return tuple(placements)


def _resolve(entry: int | str, found: Sequence[Device]) -> Device:
    matches = [device for device in found if _is_named(device, entry)]
    if len(matches) == 1:
        return matches[0]
    problem = f"which {len(matches)} visible devices match" if matches else "which is not visible"
    advice = "give more of the UUID" if matches else "ask for a visible device, or change CUDA_VISIBLE_DEVICES"
    raise PlacementError(f"devices asks for {entry!r}, {problem}; {_listing(found)}: {advice}")


def _is_named(device: Device, entry: int | str) -> bool:
    return device.uuid.startswith(entry) if isinstance(entry, str) else device.index == entry


def _listing(found: Sequence[Device]) -> str:
    limit = os.environ.get("CUDA_VISIBLE_DEVICES")
    under = "" if limit is None else f" under CUDA_VISIBLE_DEVICES={limit!r}"
    if not found:
        return f"no device is visible{under}"
    listed = "; ".join(f"{device.index}: {device.name} {device.uuid}" for device in found)
    return f"{_count(len(found))} {'is' if len(found) == 1 else 'are'} visible{under} ({listed})"


def _count(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
