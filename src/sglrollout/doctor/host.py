"""Reads what this process may use of its host, by trying it where that is the only sure way."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil

from sglrollout.doctor.facts import Machine, Scratch
from sglrollout.engine.control_groups import UNLIMITED, groups_of, memory_limit, number_in, text_in
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import ConfigError

_SHM = Path("/dev/shm")
_PROBE_TIMEOUT_S = 10
_LONGEST_SOCKET_NAME = "a" * 20


def read_machine() -> Machine:
    """What there is; as little as can be known anywhere but on Linux."""
    if sys.platform != "linux":
        return Machine()
    import resource

    memory = psutil.virtual_memory()
    limit, used = memory_limit()
    shm_error = _write_error(_SHM)
    shm = None if shm_error else shutil.disk_usage(_SHM)
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        memory_total_bytes=memory.total,
        memory_free_bytes=memory.available,
        memory_limit_bytes=limit,
        memory_limit_used_bytes=used,
        shm_total_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        shm_error=shm_error,
        scratch=_try_scratch(),
        cache_error=_home_error(),
        open_files=tuple(map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))),  # type: ignore[arg-type]
        locked_bytes=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        ptrace_scope=number_in(Path("/proc/sys/kernel/yama/ptrace_scope")),
        proc_error=_try_sharing(),
        compiler=_compiler(),
        python_headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
    )


def _try_scratch() -> Scratch:
    """Make an engine's directory, and a socket in it, and remove both."""
    root = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    try:
        directory = new_scratch()
    except ConfigError as error:
        return Scratch(root=str(root), error=error.rule)
    root, problem = directory.parent.absolute(), ""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(directory / _LONGEST_SOCKET_NAME))
    except OSError as error:
        problem = f"sockets cannot be made in it ({error})"
    finally:
        remove_scratch(directory)
    mode = root.stat().st_mode
    return Scratch(
        root=str(root),
        error=problem,
        free_bytes=shutil.disk_usage(root).free,
        is_private=bool(mode & stat.S_ISVTX) or not mode & (stat.S_IWGRP | stat.S_IWOTH),
        may_execute=not os.statvfs(root).f_flag & os.ST_NOEXEC,
    )


def _write_error(directory: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"0")
    except OSError as error:
        return f"files cannot be made in {directory} ({error.strerror})"
    return ""


def _home_error() -> str:
    try:
        return _write_error(Path.home())
    except RuntimeError:  # a user without an entry, as in some containers
        return "there is none"


def _try_sharing() -> str:
    """Whether a child can open an anonymous file of this process, as engines and trainers do of each other."""
    fd = os.memfd_create("sglrollout-doctor", os.MFD_CLOEXEC)
    code = f"open('/proc/{os.getpid()}/fd/{fd}', 'r+b', buffering=0).write(b'0')"
    command = [sys.executable, "-I", "-S", "-c", code]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
        if run.returncode == 0 and os.fstat(fd).st_size == 1:
            return ""
        said = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        said = f"no answer within {_PROBE_TIMEOUT_S} s"
    finally:
        os.close(fd)
    return f"a process cannot open an anonymous file of another one ({said})"


def _cpu_quota() -> float | None:
    """The least number of cores whose time the control groups grant."""
    quotas = []
    for directory, is_new in groups_of("cpu"):
        if is_new:
            quota, _, period = text_in(directory / "cpu.max").partition(" ")
        else:
            quota, period = text_in(directory / "cpu.cfs_quota_us"), text_in(directory / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _limit(value: int) -> int | None:
    return None if value < 0 or value >= UNLIMITED else value


def _compiler() -> str | None:
    given = os.environ.get("CC")
    names = (given.split()[0],) if given and given.strip() else ("gcc", "clang", "cc")
    return next((found for name in names if (found := shutil.which(name))), None)
