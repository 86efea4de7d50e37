"""Ending a host's session: every process in it, and in the right order.  Imports nothing of ours."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time

import psutil

_POLL_S = 0.02
_TRACKER_GRACE_S = 2.0
_LOOK_AGAIN_S = 0.5
_log = logging.getLogger("sglrollout.engine")


def end_group(group: int, timeout_s: float) -> None:
    """SIGKILL every process of a process group but this one, and wait until they are gone.

    Python's resource trackers are spared: they end by themselves once the others are dead, after they removed the
    semaphores and shared memory that those left behind. One that does not is killed in the end, unless it waits for
    this very process.
    """
    deadline = time.monotonic() + timeout_s
    while members := group_members(group):  # again and again: one may have been born while others were listed
        others = [process for process in members if not _is_tracker(process)]
        if not others or time.monotonic() > deadline:
            break
        _kill(others)
        _wait_gone(others, min(_LOOK_AGAIN_S, timeout_s))
    if os.getpgid(0) != group:
        _wait_gone(members, _TRACKER_GRACE_S)
        _kill(members)
    if survivors := [process.pid for process in group_members(group) if not _is_tracker(process)]:
        _log.error("processes %s of group %s did not end", survivors, group)


def group_members(group: int) -> list[psutil.Process]:
    """Processes of that group, without this one and without zombies."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.pid != os.getpid() and os.getpgid(process.pid) == group and _is_running(process):
                members.append(process)
    return members


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def _wait_gone(processes: list[psutil.Process], timeout_s: float) -> None:
    """A zombie that its parent does not reap counts as gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(_is_running(process) for process in processes):
        time.sleep(_POLL_S)


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
