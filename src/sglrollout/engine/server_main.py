"""SGLang's own HTTP server in a process of its own, as ``python -m sglang.launch_server``, and prepared as a host is.

``python -m sglrollout.engine.server_main FD PARENT_PID SCRATCH_DIR``. The arguments of ``ServerArgs`` come by a file
descriptor: ``ps`` shows a command line, and a key is among them. SGLang's processes start by ``spawn``, which imports
this module first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sglrollout._address import WILDCARDS, is_loopback
from sglrollout.engine import collector, cpu_support, mirror
from sglrollout.engine.environment import within_the_engine
from sglrollout.engine.orphan_watch import OrphanWatch
from sglrollout.engine.processes import end_group
from sglrollout.engine.scheduler_main import change_environment, keep_out_of_logs, run_served_scheduler
from sglrollout.engine.scratch import mark_ready

_CUMEM = "NCCL_CUMEM_ENABLE"
_AS_NCCL_LIKES = "-2"
_END_S = 3.0
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def serve(arguments: Mapping[str, Any], scratch_dir: str) -> None:
    """Be the server, until it is interrupted."""
    if arguments.get("device") == "cpu":
        cpu_support.enable(tp_size=arguments.get("tp_size", 1))
    at_first = start_environment(scratch_dir, arguments["host"], arguments.get("nnodes", 1))
    later = {name: os.environ.get(name) for name in at_first}
    change_environment(at_first)
    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.server_args import ServerArgs

    collector.imported()
    if arguments.get("nnodes", 1) == 1:  # else other machines read weights, too
        mirror.add_to(app, mirror.Mirror(Path(scratch_dir) / "weights"))
    secrets = [arguments[name] for name in _SECRETS if arguments.get(name)]
    keep_out_of_logs(secrets)
    launch_server(
        ServerArgs(**arguments),
        run_scheduler_process_func=partial(run_served_scheduler, scratch_dir=scratch_dir, secrets=secrets, later=later),
        launch_callback=partial(mark_ready, scratch_dir),
    )


def start_environment(scratch_dir: str, host: str, nnodes: int) -> dict[str, str]:
    """The environment in which a server's processes find each other. Once they have, it is the user's again.

    For a trainer on another machine joins them later, to send weights, over the interface that the user names. NCCL
    reads that once in a process: it is confined to this machine only where the trainer must be on it.

    Two processes on one machine must agree on how NCCL shares memory, and SGLang would choose another way than what
    NCCL, and so the trainer, does by itself.
    """
    cumem = {} if _CUMEM in os.environ else {_CUMEM: _AS_NCCL_LIKES}
    if nnodes > 1:  # else SGLang guesses at which of its addresses the other machines reach this one
        known = is_loopback(host) or host in WILDCARDS or "SGLANG_HOST_IP" in os.environ
        return cumem if known else {"SGLANG_HOST_IP": host, **cumem}
    variables = within_the_engine(scratch_dir) | cumem
    if not is_loopback(host):
        del variables["NCCL_SOCKET_IFNAME"]
    return variables


def main() -> None:
    """Entry point of a server's process. It ends with 0 where it was interrupted, and with all that it started."""
    collector.importing()
    fd, parent_pid, scratch_dir = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    OrphanWatch(parent_pid, scratch_dir).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would inherit it ignored
    with open(fd, "rb") as file:
        arguments = json.loads(file.read())
    code = 1
    try:
        serve(arguments, scratch_dir)
    except KeyboardInterrupt:
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    end_group(os.getpgid(0), _END_S)
    os._exit(code)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that SGLang spawns, which imports SGLang next
    collector.importing()
