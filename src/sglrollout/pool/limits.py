"""How many samples one engine may have in flight."""

from __future__ import annotations

from typing import Literal

from sglrollout.wire.messages import EngineInfo, Load

_FLOOR = 8
_FALLBACK = 256
_BACK_OFF = 0.85
_STEP = 0.05
_WAITING_SHARE = 0.10
_FULL_KV = 0.95
_ROOMY_KV = 0.80


class Limit:
    """A fixed limit, or one that follows the engine's load reports.

    Adaptive: additive increase, multiplicative decrease. It starts at what the engine can run at once. When requests
    wait in the engine (beyond a tenth of those that run) or its KV cache is nearly full, more in flight only means
    retractions, so it backs off; when nothing waits, the cache has room and the limit is in use, it grows.
    """

    def __init__(self, setting: int | Literal["auto"], info: EngineInfo) -> None:
        ceiling = info.max_running_requests or _FALLBACK
        self._adaptive = setting == "auto"
        self._ceiling = ceiling
        self.value: int = ceiling if setting == "auto" else int(setting)

    def update(self, load: Load) -> None:
        """Follow one load report."""
        if not self._adaptive:
            return
        if load.num_waiting > max(_FLOOR, _WAITING_SHARE * load.num_running) or load.kv_usage > _FULL_KV:
            self.value = max(_FLOOR, int(max(load.num_running, self.value * _BACK_OFF)))
            self.value = min(self.value, self._ceiling)
        elif load.num_waiting == 0 and load.kv_usage < _ROOMY_KV and load.num_inflight >= self.value:
            self.value = min(self._ceiling, self.value + max(1, int(self.value * _STEP)))
