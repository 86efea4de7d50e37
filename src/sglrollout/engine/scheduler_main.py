"""What SGLang's scheduler processes run first.  Imports nothing of SGLang or torch: spawn imports it first.

SGLang starts its schedulers with the ``spawn`` method, so nothing that the host patched in memory reaches them; the
entry function itself must come from here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

from sglrollout.engine import collector, cpu_support, scheduler_agent, scheduler_outputs
from sglrollout.engine.scratch import note_file

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
    if cpu_support.is_enabled() and args[0].enable_lora:
        cpu_support.forgive_pinned_memory()
    from sglang.srt.managers.scheduler import run_scheduler_process

    collector.imported()
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """Be SGLang's detokenizer, without its SIGQUIT. Only the public output path has one."""
    _exit_instead_of_sigquit()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    collector.imported()
    run_detokenizer_process(*args, **kwargs)


def run_served_scheduler(
    *args: Any, scratch_dir: str, secrets: Sequence[str], later: Mapping[str, str | None], **kwargs: Any
) -> None:
    """Be the scheduler of SGLang's own HTTP server, which nobody's agent is in.

    Args:
        scratch_dir: the server's.
        secrets: what is not to be logged.
        later: variables of the environment, as they are to be once the engine is up; ``None`` is not at all.
    """
    keep_tokens_out_of_logs()
    keep_out_of_logs(secrets)
    note_shared_memory(args[1], scratch_dir)
    if cpu_support.is_enabled() and args[0].enable_lora:
        cpu_support.forgive_pinned_memory()
    from sglang.srt.managers.scheduler import run_scheduler_process

    collector.imported()
    args = tuple(_Ready(value, later) if isinstance(value, Connection) else value for value in args)
    run_scheduler_process(*args, **kwargs)


class _Ready:
    """SGLang's pipe for the word that a scheduler is up, upon which the environment is changed."""

    def __init__(self, pipe: Connection, later: Mapping[str, str | None]) -> None:
        self._pipe, self._later = pipe, later

    def send(self, word: Any) -> None:
        change_environment(self._later)
        self._pipe.send(word)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


def change_environment(variables: Mapping[str, str | None]) -> None:
    """Set them, or for ``None`` take them out."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def note_shared_memory(port_args: Any, scratch_dir: str) -> None:
    """Remember what SGLang leaves in /dev/shm, to remove it when its processes could not."""
    with contextlib.suppress(Exception):
        from sglang.srt.managers.load_snapshot import shm_path_for

        note_file(scratch_dir, shm_path_for(port_args.instance_id))


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


def keep_out_of_logs(secrets: Sequence[str]) -> None:
    """Let a log line that holds one of these texts be written without it: SGLang logs all arguments, keys included."""
    make = logging.getLogRecordFactory()

    def without_secrets(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit, of which its handler will tell
            return record
        if any(secret in text for secret in secrets):
            for secret in secrets:
                text = text.replace(secret, "***")
            record.msg, record.args = text, None
        return record

    logging.setLogRecordFactory(without_secrets)


def ignore_sigquit(signum: int, frame: Any) -> None:
    """SGLang's launch-phase SIGQUIT handler, replaced: its own kills the whole process tree."""
