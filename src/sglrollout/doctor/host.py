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
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import ConfigError

_SHM = Path("/dev/shm")
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
_PROBE_TIMEOUT_S = 10
_LONGEST_SOCKET_NAME = "a" * 20


def read_machine() -> Machine:
    """What there is; as little as can be known anywhere but on Linux."""
    if sys.platform != "linux":
        return Machine()
    import resource

    memory = psutil.virtual_memory()
    limit, used = _memory_limit()
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
        ptrace_scope=_number_in(Path("/proc/sys/kernel/yama/ptrace_scope")),
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


def _memory_limit() -> tuple[int | None, int]:
    """The tightest limit of this process's control groups, of version 1 or 2, and how much of it is used."""
    limits = []
    for directory, is_new in _groups("memory"):
        limit = _number_in(directory / ("memory.max" if is_new else "memory.limit_in_bytes"))
        if limit is not None and limit < _UNLIMITED:
            used = _number_in(directory / ("memory.current" if is_new else "memory.usage_in_bytes")) or 0
            used -= _droppable(directory)
            limits.append((limit - used, limit, used))
    if not limits:
        return None, 0
    _, limit, used = min(limits)
    return limit, max(0, used)


def _cpu_quota() -> float | None:
    """The least number of cores whose time the control groups grant."""
    quotas = []
    for directory, is_new in _groups("cpu"):
        if is_new:
            quota, _, period = _text_in(directory / "cpu.max").partition(" ")
        else:
            quota, period = _text_in(directory / "cpu.cfs_quota_us"), _text_in(directory / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(controller: str) -> list[tuple[Path, bool]]:
    """Directories of this process's groups, and of those above, and whether they are of version 2."""
    found = []
    for line in _text_in(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        is_new = number == "0" and not controllers
        if is_new or controller in controllers.split(","):
            root = _GROUPS if is_new else _GROUPS / controller
            below = root / path.strip("/")
            found += [(directory, is_new) for directory in (below, *below.parents) if directory.is_relative_to(root)]
    return found


def _droppable(directory: Path) -> int:
    """Bytes of files that the kernel keeps as long as nobody needs the memory."""
    counts = dict(line.split(" ", 1) for line in _text_in(directory / "memory.stat").splitlines() if " " in line)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))


def _number_in(file: Path) -> int | None:
    text = _text_in(file)
    return int(text) if text.isdecimal() else None


def _text_in(file: Path) -> str:
    """Empty where there is no such file."""
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _limit(value: int) -> int | None:
    return None if value < 0 or value >= _UNLIMITED else value


def _compiler() -> str | None:
    given = os.environ.get("CC")
    names = (given.split()[0],) if given and given.strip() else ("gcc", "clang", "cc")
    return next((found for name in names if (found := shutil.which(name))), None)
