"""Ends a host, or a server, whose user's process is gone."""

from __future__ import annotations

import os
import threading
import time

from sglrollout.engine.processes import end_group
from sglrollout.engine.scratch import remove_scratch

CHECK_S = 0.25
_END_S = 3.0


class OrphanWatch(threading.Thread):
    """Ends this process's group once its parent is gone. A thread, since a launch blocks the event loop for a while."""

    def __init__(self, parent_pid: int, scratch_dir: str) -> None:
        super().__init__(daemon=True, name="orphan-watch")
        self._parent_pid, self._scratch_dir = parent_pid, scratch_dir
        self.orphaned = threading.Event()

    def run(self) -> None:
        while os.getppid() == self._parent_pid:
            time.sleep(CHECK_S)
        self.orphaned.set()
        end_group(os.getpgid(0), _END_S)
        remove_scratch(self._scratch_dir)
        os._exit(1)
