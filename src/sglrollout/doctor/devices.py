"""Checks of the GPUs and their driver."""

from __future__ import annotations

from sglrollout.doctor.facts import Facts, Gpu
from sglrollout.doctor.finding import Finding, count, size

_LEAST_FREE_BYTES = 2 << 30
_FREE_ENOUGH = 0.9
_SHOWN = 4


def check(facts: Facts) -> list[Finding]:
    """All of them; without a GPU a single one."""
    devices = facts.devices
    if not devices.driver and not devices.error and not devices.gpus:
        return [no_driver(facts)]
    findings = [driver(facts), visible(facts)]
    if devices.visible:
        findings += [cuda(facts), order(facts), *(device(facts, gpu) for gpu in _visible_gpus(facts))]
        findings += [
            Finding("GPU", "ok", f"{one.name}, {one.uuid}") for one in devices.visible if _is_instance(one.uuid)
        ]
        findings.append(compiler(facts))
    return findings


def no_driver(facts: Facts) -> Finding:
    number = facts.devices.num_on_bus
    if not number:
        return Finding("GPUs", "ok", "none: engines run on the CPU, which is meant for tests")
    fix = "install NVIDIA's driver; in a container, start it with its GPUs: docker run --gpus all"
    return Finding("GPUs", "warning", f"{count(number, 'NVIDIA GPU')} on the bus, and no driver here", fix)


def driver(facts: Facts) -> Finding:
    devices = facts.devices
    if devices.error:
        fix = "run nvidia-smi until it answers: after an update of the driver reboot, or reload its modules"
        return Finding("driver", "wrong", devices.error, fix)
    highest = (
        "" if devices.cuda is None or devices.cuda.version is None else f", up to CUDA {_dotted(devices.cuda.version)}"
    )
    return Finding("driver", "ok", f"NVIDIA {devices.driver}{highest}")


def visible(facts: Facts) -> Finding:
    devices, chosen = facts.devices, facts.environment.get("CUDA_VISIBLE_DEVICES")
    under = "CUDA_VISIBLE_DEVICES is not set" if chosen is None else f"CUDA_VISIBLE_DEVICES={chosen}"
    found = f"{len(devices.visible)} of {count(len(devices.gpus), 'GPU')} ({under})"
    if devices.visible:
        return Finding("visible GPUs", "ok", found)
    if not devices.gpus or chosen is None:
        return Finding("visible GPUs", "ok", f"{found}: engines run on the CPU")
    fix = "unset CUDA_VISIBLE_DEVICES, or name indices or UUIDs that nvidia-smi -L lists"
    return Finding("visible GPUs", "warning", f"{found}: engines would run on the CPU", fix)


def cuda(facts: Facts) -> Finding:
    """Whether a process can use the devices, with this torch."""
    devices, built = facts.devices, _version(facts.software.torch_cuda)
    if devices.cuda is None:
        return Finding("CUDA", "warning", "its driver library did not answer in time", "look at nvidia-smi and dmesg")
    if devices.cuda.error:
        return Finding("CUDA", "wrong", devices.cuda.error, _cure(devices.cuda.error))
    highest = devices.cuda.version
    if built is not None and highest is not None and highest[0] < built[0]:
        found = f"torch is built for CUDA {_dotted(built)}, and the driver runs CUDA {_dotted(highest)} at most"
        fix = f"update the driver to one for CUDA {built[0]}, or install its cuda-compat package"
        return Finding("CUDA", "wrong", found, fix)
    if devices.cuda.num_devices != len(devices.visible):
        found = f"CUDA sees {count(devices.cuda.num_devices, 'device')}, and nvidia-smi {len(devices.visible)}"
        return Finding("CUDA", "warning", found, "give the container all device nodes, or set CUDA_VISIBLE_DEVICES")
    return Finding("CUDA", "ok", f"sees {count(devices.cuda.num_devices, 'device')}")


def order(facts: Facts) -> Finding:
    kinds = {gpu.name for gpu in facts.devices.gpus}
    if len(kinds) < 2 or facts.environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return Finding("order of GPUs", "ok", "the same for CUDA and nvidia-smi")
    found = f"GPUs of {len(kinds)} kinds, which CUDA may number by speed and not as nvidia-smi does"
    return Finding("order of GPUs", "warning", found, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")


def device(facts: Facts, gpu: Gpu) -> Finding:
    """One of the visible ones: its mode, and whether others are in its memory."""
    name = f"GPU {gpu.index}"
    memory = f"{size(gpu.free_bytes)} of {size(gpu.total_bytes)} free" if gpu.total_bytes else "memory unknown"
    found = f"{gpu.name}, {memory}, {gpu.uuid}"
    if gpu.compute_mode == "Prohibited":
        fix = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        return Finding(name, "wrong", f"{found}; its compute mode lets no process use it", fix)
    if gpu.is_mig and "MIG-" not in facts.environment.get("CUDA_VISIBLE_DEVICES", ""):
        fix = "export CUDA_VISIBLE_DEVICES=MIG-..., with the instances that nvidia-smi -L lists"
        return Finding(name, "warning", f"{found}; it is split by MIG, and its instances are not named", fix)
    if gpu.total_bytes and gpu.free_bytes < _LEAST_FREE_BYTES:
        verdict = "wrong" if all(_is_full(other) for other in _visible_gpus(facts)) else "warning"
        return Finding(name, verdict, f"{found}{_users(gpu)}", _make_room(gpu))  # type: ignore[arg-type]
    if gpu.compute_mode not in ("Default", ""):
        fix = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        found += f"; compute mode {gpu.compute_mode}: a trainer cannot share it with an engine"
        return Finding(name, "warning", found, fix)
    if gpu.total_bytes and gpu.free_bytes < _FREE_ENOUGH * gpu.total_bytes:
        return Finding(name, "warning", f"{found}{_users(gpu)}", _make_room(gpu))
    return Finding(name, "ok", found)


def compiler(facts: Facts) -> Finding:
    """Triton compiles a little C for each kind of device, at an engine's first start."""
    machine = facts.machine
    if machine.compiler is None:
        fix = "apt-get install gcc, or set CC to a C compiler"
        return Finding("C compiler", "warning", "none, and Triton needs one unless its cache is filled", fix)
    if not machine.python_headers:
        fix = "apt-get install python3-dev, or another Python that has its headers"
        return Finding("C compiler", "warning", f"{machine.compiler}, without Python.h, which Triton needs", fix)
    return Finding("C compiler", "ok", machine.compiler)


def _visible_gpus(facts: Facts) -> list[Gpu]:
    uuids = {device.uuid for device in facts.devices.visible}
    return [gpu for gpu in facts.devices.gpus if gpu.uuid in uuids]


def _is_instance(uuid: str) -> bool:
    return uuid.startswith("MIG-")


def _is_full(gpu: Gpu) -> bool:
    return bool(gpu.total_bytes) and gpu.free_bytes < _LEAST_FREE_BYTES


def _users(gpu: Gpu) -> str:
    if not gpu.users:
        return "; the rest is in use, by processes that are not seen from here"
    listed = ", ".join(f"pid {user.pid} {user.name} {size(user.used_bytes)}" for user in gpu.users[:_SHOWN])
    more = f" and {len(gpu.users) - _SHOWN} more" if len(gpu.users) > _SHOWN else ""
    return f"; used by {listed}{more}"


def _make_room(gpu: Gpu) -> str:
    share = max(0.05, int(gpu.free_bytes / gpu.total_bytes * 18) / 20)
    return f"end what is not yours to keep, choose others by devices=, or lower mem_fraction (to {share:.2g}, say)"


def _cure(error: str) -> str:
    if "802" in error:
        return "start the fabric manager: sudo systemctl start nvidia-fabricmanager"
    if "803" in error or "804" in error:
        return "reboot, or take cuda-compat out of LD_LIBRARY_PATH: driver and CUDA's library are of two versions"
    if "libcuda" in error:
        return "install the driver's libraries; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return "look at nvidia-smi and dmesg"


def _version(text: str | None) -> tuple[int, int] | None:
    parts = (text or "").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and all(part.isdecimal() for part in parts[:2]) else None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
