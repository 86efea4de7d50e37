"""One call of ``sync``, which begins again after engines died in it: what its attempts have in common."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from sglrollout.errors import ConfigError, WeightSyncError
from sglrollout.weights.leader import Leader, PauseMode
from sglrollout.weights.phases import Phases

_log = logging.getLogger("sglrollout.weights")


class _Losses(NamedTuple):
    """What a rank says after an attempt: which engines have died, and how many are there or come back."""

    names: list[str]
    num_serving: int
    num_restarting: int
    num_retries_left: int


@dataclass
class Call:
    """The same on every rank.

    Attributes:
        version: of its weights; ``None`` until it is known, unless the caller gave it.
        moving: engines may hold a half of them.
        lost: engines that died in it.
        waits: for an engine that is restarted, on a rank where none is up.
    """

    mode: PauseMode
    version: int | None
    begun: float = field(default_factory=time.perf_counter)
    plan_s: float = 0.0
    moving: bool = False
    lost: list[str] = field(default_factory=list)
    waits: bool = True
    _num_retries: int = 0
    _death: WeightSyncError | None = None
    """What ended the last attempt."""

    def fix_version(self, latest: int) -> int:
        """With engines stopped: the version, which stays so once weights have moved.

        Raises:
            ConfigError: the one that was given is not greater than the latest.
        """
        if self.version is None:
            self.version = latest + 1
        elif not self.moving and self.version <= latest:
            raise ConfigError("version", self.version, f"must be greater than {latest}, the last one")
        return self.version

    async def prepare_to_retry(
        self, phases: Phases, leader: Leader | None, max_retries: int, error: WeightSyncError
    ) -> None:
        """Agree on another attempt: if engines died in the one that failed, and others are there or one comes back.

        Raises:
            WeightSyncError: there is to be none; on every rank alike.
        """
        own: list[str] = []

        async def look() -> _Losses:
            num_left = max_retries - self._num_retries
            if leader is None:
                return _Losses([], 0, 0, num_left)
            own.extend(await leader.lost())
            return _Losses(own, len(leader.pool.serving), len(leader.pool.restarting), num_left)

        ranks = await phases.run(error.phase, look)
        lost = [name for rank in ranks for name in rank.names]
        num_serving = sum(rank.num_serving for rank in ranks)
        num_restarting = sum(rank.num_restarting for rank in ranks)
        if not lost and not num_serving and self._death is not None:
            raise self._death from error  # for want of the engine that was waited for
        if not lost or not num_serving + num_restarting or not min(rank.num_retries_left for rank in ranks):
            raise error
        if own:
            _log.warning("%s died in a weight sync, which begins again: %s", ", ".join(own), error)
        self._death, self.waits = error, not num_serving
        self._num_retries += 1
        self.lost += lost
