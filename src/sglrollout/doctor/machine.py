"""Checks of the host: cores, memory, files, and what processes may do with each other."""

from __future__ import annotations

import os

from sglrollout.doctor.facts import Facts
from sglrollout.doctor.finding import Finding, count, size

_LEAST_MEMORY_BYTES = 1 << 30
_MEMORY_ENOUGH_BYTES = 8 << 30
_SHM_ENOUGH_BYTES = 1 << 30
_LEAST_SHM_BYTES = 4 << 20
_SCRATCH_ENOUGH_BYTES = 1 << 30
_FILES_ENOUGH = 4096
_LOCKED_ENOUGH_BYTES = 1 << 30
_CORES_PER_ENGINE = 2


def check(facts: Facts) -> list[Finding]:
    """All of them."""
    checks = (cores, memory, shared_memory, scratch, cache, open_files, locked_memory, sharing)
    return [one(facts) for one in checks]


def cores(facts: Facts) -> Finding:
    machine, num_engines = facts.machine, max(1, len(facts.devices.visible))
    number, quota = str(machine.num_cores), machine.cpu_quota
    if quota is not None:
        number += f", of which the control group grants the time of {quota:.3g}"
    if min(machine.num_cores, quota or machine.num_cores) >= _CORES_PER_ENGINE * num_engines:
        return Finding("cores", "ok", number)
    found = (
        f"{number}, for {count(num_engines, 'engine')}; each keeps {_CORES_PER_ENGINE} busy, its scheduler and its host"
    )
    return Finding("cores", "warning", found, "give this process more cores, or set num_engines")


def memory(facts: Facts) -> Finding:
    machine = facts.machine
    free, found = (
        machine.memory_free_bytes,
        f"{size(machine.memory_free_bytes)} of {size(machine.memory_total_bytes)} free",
    )
    if machine.memory_limit_bytes is not None:
        within = max(0, machine.memory_limit_bytes - machine.memory_limit_used_bytes)
        free = min(free, within)
        found += f"; {size(within)} of the control group's limit of {size(machine.memory_limit_bytes)}"
    fix = "end other processes, or raise the limit (docker run --memory): weights pass through host memory as they load"
    if free < _LEAST_MEMORY_BYTES:
        return Finding("host memory", "wrong", found, fix)
    return (
        Finding("host memory", "ok", found)
        if free >= _MEMORY_ENOUGH_BYTES
        else Finding("host memory", "warning", found, fix)
    )


def shared_memory(facts: Facts) -> Finding:
    machine = facts.machine
    found = f"{size(machine.shm_free_bytes)} of {size(machine.shm_total_bytes)} free"
    fix = "docker run --shm-size=8g, or: sudo mount -o remount,size=8G /dev/shm"
    if machine.shm_error:
        return Finding("/dev/shm", "wrong", machine.shm_error, f"{fix}; it must be writable (mode 1777)")
    if machine.shm_free_bytes < _LEAST_SHM_BYTES:
        return Finding("/dev/shm", "wrong", found, f"remove what is left there, or {fix}")
    if machine.shm_free_bytes < _SHM_ENOUGH_BYTES:
        return Finding("/dev/shm", "warning", f"{found}; with tp_size above 1 NCCL fills more", fix)
    return Finding("/dev/shm", "ok", found)


def scratch(facts: Facts) -> Finding:
    scratch, asked = facts.machine.scratch, facts.environment.get("TMPDIR")
    found = f"{scratch.root}, {size(scratch.free_bytes)} free"
    fix = "export TMPDIR=/path/of/your/own, short, on a local disk"
    if scratch.error:
        return Finding("TMPDIR", "wrong", f"{scratch.root}: {scratch.error}", fix)
    if asked and os.path.abspath(asked) != scratch.root:
        found += f" instead of {asked}, which cannot be written or is too long for the paths of sockets"
        return Finding("TMPDIR", "warning", found, fix)
    if not scratch.is_private:
        fix = f"chmod +t {scratch.root}, or {fix}"
        return Finding("TMPDIR", "warning", f"{found}; others may rename and remove what engines make in it", fix)
    if not scratch.may_execute:
        return Finding("TMPDIR", "warning", f"{found}; mounted noexec, and kernels are compiled into it", fix)
    if scratch.free_bytes < _SCRATCH_ENOUGH_BYTES:
        return Finding("TMPDIR", "warning", f"{found}; engines' logs and compiled kernels go there", fix)
    return Finding("TMPDIR", "ok", found)


def cache(facts: Facts) -> Finding:
    error = facts.machine.cache_error
    if not error:
        return Finding("home directory", "ok", "writable")
    fix = "export HOME=/a/directory/of/your/own: compiled kernels and models of the Hub are kept below it"
    return Finding("home directory", "warning", error, fix)


def open_files(facts: Facts) -> Finding:
    soft, hard = facts.machine.open_files
    if soft is None or soft >= _FILES_ENOUGH:
        return Finding("open files", "ok", _limit(soft))
    found = f"{_limit(soft)}, with a hard limit of {_limit(hard)}; each client of serve_openai takes one"
    fix = "ulimit -n 65536"
    if hard is not None and hard < _FILES_ENOUGH:
        fix = "raise the hard limit: nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    return Finding("open files", "warning", found, fix)


def locked_memory(facts: Facts) -> Finding:
    limit = facts.machine.locked_bytes
    found = "no limit" if limit is None else size(limit)
    if not facts.machine.has_infiniband or limit is None or limit >= _LOCKED_ENOUGH_BYTES:
        return Finding("locked memory", "ok", f"{found}; engines need none, a trainer's NCCL does over InfiniBand")
    fix = "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1"
    return Finding(
        "locked memory", "warning", f"{found}, and there is InfiniBand: a trainer's NCCL registers more", fix
    )


def sharing(facts: Facts) -> Finding:
    """Weights for an engine that comes back are in files without a name, which processes open of each other."""
    machine = facts.machine
    scope = "" if machine.ptrace_scope is None else f"; ptrace scope {machine.ptrace_scope}, which does not concern it"
    if not machine.proc_error:
        return Finding("memory shared by processes", "ok", f"anonymous files can be opened by way of /proc{scope}")
    fix = "mount /proc, without hidepid for this user; until then an engine that comes back waits for the next sync"
    return Finding("memory shared by processes", "warning", machine.proc_error, fix)


def _limit(number: int | None) -> str:
    return "no limit" if number is None else str(number)
