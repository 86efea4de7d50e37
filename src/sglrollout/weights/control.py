"""How trainer ranks agree: every rank says how a phase went, and all hear of all.

Over a gloo group of its own, from rank to rank 0 and back, since that names a rank that is gone or stuck, and takes a
third of a millisecond where an all-gather of objects takes three.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import platform
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sglrollout.errors import EngineError, RolloutError, WeightSyncError, fresh

_LAST_WORDS_S = 5.0
_GRACE_S = 20.0  # more than engines have beyond the deadline, so that what they say is heard
_LONGEST = timedelta(days=1)  # each wait has a deadline of its own
_numbers = itertools.count()


@dataclass(frozen=True)
class Outcome:
    """How a phase went on one rank: ``error`` is ``None`` when it went well. ``lost``: nothing was heard of it."""

    rank: int
    phase: str
    value: Any = None
    error: Exception | None = field(default=None)
    lost: bool = False


class Ranks:
    """This rank among the others; alone where torch.distributed is not initialized. Collective, as all methods are.

    Args:
        timeout_s: for each step of a phase, of which it has two at most.
    """

    def __init__(self, timeout_s: float) -> None:
        import torch.distributed as dist

        self._within_s = 2 * timeout_s + _GRACE_S
        self._several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self._several else 0
        self.size = dist.get_world_size() if self._several else 1
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST) if self._several else None
        self._broken: Exception | None = None
        self._key = f"sglrollout/failed-sync/{next(_numbers)}"  # every rank makes its syncers in the same order

    def agree(
        self, phase: str, value: Any = None, error: Exception | None = None, within_s: float | None = None
    ) -> list[Any]:
        """Tell how ``phase`` went here, and hear how it went everywhere.

        Args:
            within_s: how long other ranks may take; by default twice ``timeout_s``, for a phase has two steps at most.

        Returns:
            every rank's value, by rank.

        Raises:
            WeightSyncError, or the error itself where it says enough: on every rank the same, if one had an error, is
                gone, or did not come in time.
        """
        mine = Outcome(self.rank, phase, value, _portable(error))
        if self._several:
            if self._broken is not None:
                raise fresh(self._broken)
            try:
                outcomes = self._exchange(phase, mine, timedelta(seconds=within_s or self._within_s))
            except WeightSyncError as failure:
                self._broken = failure
                raise
        else:
            outcomes = [mine]
        for outcome in outcomes:
            if outcome.error is not None:
                told = self._failure(phase, outcome)
                if outcome.lost:
                    self._broken = told
                raise told
        odd = next((outcome for outcome in outcomes if outcome.phase != phase), None)
        if odd is not None:
            self._broken = WeightSyncError(phase, f"ranks are not in step: rank {odd.rank} is in {odd.phase}", odd.rank)
            raise self._broken
        return [outcome.value for outcome in outcomes]

    def leave(self, phase: str) -> None:
        """This rank was cancelled in ``phase``: it cannot agree with the others on anything any more."""
        if self._several:
            self._broken = WeightSyncError(phase, "it was cancelled here; all ranks need a new syncer", self.rank)

    def _failure(self, phase: str, outcome: Outcome) -> Exception:
        error = outcome.error
        rank = outcome.rank if self._several else None
        if isinstance(error, WeightSyncError):
            return WeightSyncError(error.phase, error.reason, rank if error.rank is None else error.rank, error.engine)
        if isinstance(error, EngineError):
            return WeightSyncError(phase, str(error), rank, error.engine)
        return (
            error
            if isinstance(error, RolloutError)
            else WeightSyncError(phase, f"{type(error).__name__}: {error}", rank)
        )

    def _exchange(self, phase: str, mine: Outcome, timeout: timedelta) -> list[Outcome]:
        if self.rank != 0:
            try:
                self._send(0, _packed(mine), timeout)
                answer: list[Outcome] = self._receive(0, timeout)
            except RuntimeError as error:
                raise WeightSyncError(phase, *self._last_words(error)) from None
            return answer
        outcomes, failure = [mine], None
        for rank in range(1, self.size):
            try:
                outcomes.append(self._receive(rank, timeout))
            except RuntimeError as error:
                gone = "Timed out" not in str(error)
                how = "is gone" if gone else f"did not come within {timeout.total_seconds():g} s"
                failure = failure or WeightSyncError(phase, f"rank {rank} {how}", rank)
                outcomes.append(Outcome(rank, phase, error=failure, lost=True))
        if failure is not None:
            self._leave_last_words(failure)
        # A rank that is gone comes first: what others saw of it, such as a broken gather, says less.
        data = _packed(outcomes if failure is None else sorted(outcomes, key=lambda told: told.error is not failure))
        for rank in range(1, self.size):
            with contextlib.suppress(RuntimeError):
                self._send(rank, data, timeout)
        if failure is not None:
            raise failure
        return outcomes

    def _send(self, rank: int, data: Any, timeout: timedelta) -> None:
        import torch
        import torch.distributed as dist

        dist.isend(torch.tensor([data.numel()]), dst=rank, group=self._group).wait(timeout)
        dist.isend(data, dst=rank, group=self._group).wait(timeout)

    def _receive(self, rank: int, timeout: timedelta) -> Any:
        import torch
        import torch.distributed as dist

        length = torch.zeros(1, dtype=torch.int64)
        dist.irecv(length, src=rank, group=self._group).wait(timeout)
        data = torch.zeros(int(length), dtype=torch.uint8)
        dist.irecv(data, src=rank, group=self._group).wait(timeout)
        return pickle.loads(data.numpy().tobytes())

    def _leave_last_words(self, failure: WeightSyncError) -> None:
        """A timeout closes every connection of a gloo group, so the others are told in another way."""
        with contextlib.suppress(Exception):
            _store().set(self._key, json.dumps([failure.reason, failure.rank]))

    def _last_words(self, error: RuntimeError) -> tuple[str, int | None]:
        """What rank 0 gave as its reason to go, and the rank at fault."""
        deadline = time.monotonic() + _LAST_WORDS_S
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline:
                if _store().check([self._key]):
                    reason, rank = json.loads(_store().get(self._key))
                    return str(reason), rank
                time.sleep(0.05)
        return f"rank 0 is gone, or another rank kept it waiting ({str(error).splitlines()[0][:200]})", 0


def _packed(value: Any) -> Any:
    """As a tensor, which is what gloo sends."""
    import torch

    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _portable(error: Exception | None) -> Exception | None:
    """The error, if it can travel; else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def machine() -> str:
    """The same for processes that can share memory: one boot of one machine."""
    return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.getuid()}"
