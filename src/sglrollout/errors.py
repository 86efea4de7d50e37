"""Every exception sglrollout raises on purpose.

RolloutError
├── ConfigError                 an option is wrong; names field, value and rule   (also a ValueError)
├── PlacementError              engines do not fit the visible devices
├── UnsupportedVersionError     the installed SGLang is not one we know
├── LifecycleError              called in the wrong state, loop or process
├── EngineError                 something about one engine
│   ├── EngineStartError        it did not come up; carries the tail of its log
│   ├── EngineDiedError         it came up and then ended
│   ├── EngineConnectionError   it lives, and the connection to it broke under one request
│   └── EngineRequestError      it is alive and refused, or failed, one request
├── NoEngineError               no engine of the pool can take work
├── RequestTimeoutError         a request outlived its deadline                   (also a TimeoutError)
├── QueueFullError              more callers wait for a slot than max_queued
├── StaleWeightsError           engines hold weights that are not the trainer's; a sync heals them
├── WeightSyncError             a sync failed; names phase, rank and engine
├── WeightNamesError            trainer and engine do not have the same weights; lists the names
├── WeightMismatchError         an engine's weights differ from the trainer's after a sync
├── DeviceMemoryError           a device has not the free memory that waking takes
├── HostMemoryError             the host has not the free memory that copying weights takes
├── RewardError                 a reward function failed; its sample counts as failed
├── FailureBudgetError          more samples of a collection failed than it allows; with a histogram of causes
└── ChannelError                the channel to a host is broken or speaks another protocol
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any


class RolloutError(Exception):
    """Base of every error this library raises on purpose. Any of them can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args), self.__dict__


class ConfigError(RolloutError, ValueError):
    """A user-set option is wrong.

    Attributes:
        field: dotted name of the option, for example ``engine_args.chunked_prefil_size``.
        value: the value that was given.
        rule: the rule it breaks, in words.
    """

    def __init__(self, field: str, value: Any, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"{field} {rule}, got {_brief(value)}")


class PlacementError(RolloutError):
    """The asked-for engines do not fit the visible devices."""


class UnsupportedVersionError(RolloutError):
    """The installed SGLang is missing or outside the supported versions."""


class LifecycleError(RolloutError):
    """A call came in the wrong state, from another event loop, or from a forked process."""


class EngineError(RolloutError):
    """Something went wrong with one engine.

    Attributes:
        engine: the engine's name, for example ``engine-0``.
    """

    def __init__(self, engine: str, message: str) -> None:
        self.engine = engine
        super().__init__(f"{engine}: {message}")


class EngineStartError(EngineError):
    """An engine did not become ready.

    Attributes:
        log_tail: the last lines its processes wrote.
    """

    def __init__(self, engine: str, message: str, log_tail: str = "") -> None:
        self.log_tail = log_tail
        shown = f"\n--- last lines of its log ---\n{log_tail}" if log_tail else ""
        super().__init__(engine, message + shown)


class EngineDiedError(EngineError):
    """An engine ended while it was in use.

    Attributes:
        log_tail: the last lines its processes wrote.
    """

    def __init__(self, engine: str, message: str, log_tail: str = "") -> None:
        self.log_tail = log_tail
        shown = f"\n--- last lines of its log ---\n{log_tail}" if log_tail else ""
        super().__init__(engine, message + shown)


class EngineConnectionError(EngineError):
    """The connection to a remote engine broke under one request, or what came of it was no answer.

    The engine answers otherwise: the fault may be a gateway's between them.
    """


class EngineRequestError(EngineError):
    """A live engine refused or failed one request.

    Attributes:
        timed_out: it did neither, and did not answer in time.
    """

    def __init__(self, engine: str, message: str, timed_out: bool = False) -> None:
        self.timed_out = timed_out
        super().__init__(engine, message)


class NoEngineError(RolloutError):
    """No engine of the pool can take work."""


class RequestTimeoutError(RolloutError, TimeoutError):
    """A request outlived the deadline its caller gave it; it was aborted in the engine."""


class QueueFullError(RolloutError):
    """More callers wait for a slot than ``max_queued`` allows."""


class StaleWeightsError(RolloutError):
    """Engines hold weights that are not the trainer's, after a failed sync or a sleep that gave them up.

    The next good sync heals them.
    """


class WeightSyncError(RolloutError):
    """A weight sync failed, on every rank alike. Engines that may hold half of it take no work until the next one.

    Attributes:
        phase: where: ``plan``, ``pause``, ``wake``, ``transfer``, ``resume`` (flushes included) or ``verify``.
        reason: what happened.
        rank: the trainer rank on which it failed first; ``None`` outside of torch.distributed.
        engine: the engine concerned, if one is.
    """

    def __init__(self, phase: str, message: str, rank: int | None = None, engine: str | None = None) -> None:
        self.phase, self.reason, self.rank, self.engine = phase, message, rank, engine
        where = f" on rank {rank}" if rank is not None else ""
        super().__init__(f"weight sync failed in {phase}{where}: {message}")


class WeightNamesError(RolloutError):
    """The trainer's weights are not those that the engines need. Nothing was sent.

    Attributes:
        missing: parameters of an engine that nothing would write, by its own (fused) names.
        unexpected: weights that no engine knows.
        duplicates: parameters that two weights would write.
        mismatched: weights whose shape does not fit, with why.
        checkpoint: what names were held against where there are servers alone, which do not tell theirs; else empty.
    """

    def __init__(
        self,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        duplicates: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        checkpoint: str = "",
    ) -> None:
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        self.duplicates, self.mismatched = tuple(duplicates), tuple(mismatched)
        self.checkpoint = checkpoint
        kinds = {"missing": missing, "unexpected": unexpected, "duplicates": duplicates, "mismatched": mismatched}
        lines = [f"\n  {kind} ({len(names)}): {listed(names)}" for kind, names in kinds.items() if names]
        what = f"are not those of {checkpoint}, which the servers have" if checkpoint else "do not fit the engines"
        super().__init__(f"the trainer's weights {what}, nothing was sent{''.join(lines)}")


class WeightMismatchError(RolloutError):
    """Verification found weights in an engine that differ from the trainer's.

    Attributes:
        names: of the weights that differ, with the engine and TP rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(f"{len(self.names)} weights differ between trainer and engine: {listed(self.names)}")


class DeviceMemoryError(RolloutError):
    """A device has less free memory than an engine needs to wake. Nothing was woken.

    Attributes:
        engine: the engine's name.
        needed_bytes: what waking takes, by tag.
        free_bytes: what the device has.
    """

    def __init__(self, engine: str, needed_bytes: dict[str, int], free_bytes: int, total_bytes: int) -> None:
        self.engine, self.needed_bytes, self.free_bytes = engine, needed_bytes, free_bytes
        needed = sum(needed_bytes.values())
        parts = ", ".join(f"{tag} {_gb(size)}" for tag, size in needed_bytes.items())
        super().__init__(
            f"{engine} needs {_gb(needed)} to wake ({parts}), and {_gb(free_bytes)} of {_gb(total_bytes)} are free: "
            "free memory of the trainer first (offload its optimizer, torch.cuda.empty_cache()), or wake fewer tags"
        )


class HostMemoryError(RolloutError):
    """The host has less memory available than a copy of an engine's weights takes. Nothing was copied.

    Attributes:
        engine: whose weights.
        needed_bytes: what the copy takes, of all TP ranks.
        available_bytes: what the host has, or the process's control groups allow, whichever is less.
    """

    def __init__(self, engine: str, needed_bytes: int, available_bytes: int) -> None:
        self.engine, self.needed_bytes, self.available_bytes = engine, needed_bytes, available_bytes
        super().__init__(
            f"a copy of {engine}'s weights takes {_gb(needed_bytes)} of host memory, and {_gb(available_bytes)} are "
            "available"
        )


class RewardError(RolloutError):
    """A reward function raised, took too long, or gave no finite number. Its sample counts as failed."""


class FailureBudgetError(RolloutError):
    """Too many samples of a collection failed: it stops, rather than have the trainer train on what is left.

    Attributes:
        num_failed: of the samples looked at.
        num_samples: those looked at: the latest to end.
        causes: of all failures so far, the most frequent first, with how often each came.
    """

    def __init__(self, num_failed: int, num_samples: int, causes: dict[str, int]) -> None:
        self.num_failed, self.num_samples, self.causes = num_failed, num_samples, causes
        lines = "".join(f"\n  {count} x {cause}" for cause, count in causes.items())
        super().__init__(f"{num_failed} of the latest {num_samples} samples failed; all failures so far:{lines}")


class ChannelError(RolloutError):
    """The channel to an engine host is broken, or the other end speaks another protocol."""


def in_words(error: BaseException) -> str:
    """Its type and what it says, if it can say it: of users' exceptions some cannot."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def fresh(error: Exception) -> Exception:
    """A copy to raise. One instance that many callers raise would gather all their tracebacks."""
    if not isinstance(error, RolloutError):
        return error
    duplicate = copy.copy(error)
    duplicate.__cause__ = error.__cause__
    return duplicate


def _rebuilt(kind: type[RolloutError], args: tuple[Any, ...]) -> RolloutError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def listed(names: Sequence[str], most: int = 20) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
