"""What SGLang's scheduler processes run first.  Imports nothing of SGLang or torch: spawn imports it first.

SGLang starts its schedulers with the ``spawn`` method, so nothing that the host patched in memory reaches them; the
entry function itself must come from here.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psutil

from sglrollout.engine import cpu_support, scheduler_agent, scheduler_outputs

if cpu_support.is_enabled():
    # At import: unpickling this process's target comes before unpickling its arguments, which imports SGLang.
    cpu_support.enable()

SCHEDULER_FAILED = 70
"""Exit code of a scheduler that failed and would have sent SIGQUIT to its parent."""


def run_scheduler(*args: Any, answers_to: str, steps_to: str | None = None, **kwargs: Any) -> None:
    """Be SGLang's scheduler, without its SIGQUIT, and with what is ours in it.

    Args:
        answers_to: the host's socket for what it asks of the agent.
        steps_to: the host's socket for outputs; ``None`` leaves them to SGLang.
    """
    _exit_instead_of_sigquit()
    keep_tokens_out_of_logs()
    scheduler_agent.install(answers_to)
    if steps_to is not None:
        scheduler_outputs.send_steps_to(steps_to)
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """Be SGLang's detokenizer, without its SIGQUIT. Only the public output path has one."""
    _exit_instead_of_sigquit()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def _exit_instead_of_sigquit() -> None:
    """Let a failing scheduler end with an exit code, where SGLang would send SIGQUIT to its parent and exit with 0.

    The parent may be the user's own process (``isolation="thread"``), and SIGQUIT's default is to kill it.
    """
    send_signal = psutil.Process.send_signal

    def send_or_exit(self: psutil.Process, sig: int) -> None:
        if sig == signal.SIGQUIT:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(SCHEDULER_FAILED)
        send_signal(self, sig)

    psutil.Process.send_signal = send_or_exit  # type: ignore[method-assign]


def keep_tokens_out_of_logs() -> None:
    """Let a request be written as its id: SGLang logs whole ones when its watchdog or a self-check ends a scheduler.

    The end of the log is in the error that the user gets, and goes wherever that goes.
    """
    from sglang.srt.managers.schedule_batch import Req

    def written(self: Any) -> str:
        return f"Req(rid={self.rid})"

    Req.__repr__ = written


def ignore_sigquit(signum: int, frame: Any) -> None:
    """SGLang's launch-phase SIGQUIT handler, replaced: its own kills the whole process tree."""
