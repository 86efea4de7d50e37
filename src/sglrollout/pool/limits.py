"""How many samples one engine may have in flight."""

from __future__ import annotations

from typing import Literal

from sglrollout.wire.messages import EngineInfo, Load

_FLOOR = 8
_FALLBACK = 256
_BACK_OFF = 0.85
_STEP = 0.05
_WAITING_SHARE = 0.10
_PATIENCE = 8
_FULL_KV = 0.95
_ROOMY_KV = 0.80


class Limit:
    """A fixed limit, or one that follows the engine's load reports.

    Adaptive: additive increase, multiplicative decrease. It starts at what the engine can run at once. When its KV
    cache is nearly full, or requests keep waiting in it while no more of them come to run (a burst that is being
    prefilled is no such case), more in flight only means retractions, so it backs off. When nothing waits, the cache
    has room and the limit is in use, it grows.
    """

    def __init__(self, setting: int | Literal["auto"], info: EngineInfo) -> None:
        self._adaptive = setting == "auto"
        self._ceiling = info.max_running_requests or _FALLBACK
        self._num_stalled = 0
        self._last: Load | None = None
        self.value: int = self._ceiling if setting == "auto" else int(setting)

    def update(self, load: Load) -> None:
        """Follow one load report; they come every quarter of a second while anything is in flight."""
        if not self._adaptive:
            return
        last, self._last = self._last, load
        if last is not None and _published(load) == _published(last):
            return  # the scheduler has not published anew: one long step says nothing about the load
        waiting = load.num_waiting > max(_FLOOR, _WAITING_SHARE * load.num_running)
        stalled = waiting and last is not None and load.num_running <= last.num_running
        self._num_stalled = self._num_stalled + 1 if stalled else 0
        if load.kv_usage > _FULL_KV or self._num_stalled >= _PATIENCE:
            self._num_stalled = 0
            backed_off = max(_FLOOR, load.num_running, int(self.value * _BACK_OFF))
            self.value = min(self.value, backed_off, self._ceiling)
        elif load.num_waiting == 0 and load.kv_usage < _ROOMY_KV and load.num_inflight >= self.value:
            self.value = min(self._ceiling, self.value + max(1, int(self.value * _STEP)))


def _published(load: Load) -> tuple[float, ...]:
    """The part of a report that is the scheduler's, and changes with its every step."""
    return load.num_running, load.num_waiting, load.kv_usage, load.tokens_per_s
