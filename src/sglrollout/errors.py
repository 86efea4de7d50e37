"""Every exception sglrollout raises on purpose.

RolloutError
├── ConfigError                 an option is wrong; names field, value and rule   (also a ValueError)
├── PlacementError              engines do not fit the visible devices
├── UnsupportedVersionError     the installed SGLang is not one we know
├── LifecycleError              called in the wrong state, loop or process
├── EngineError                 something about one engine
│   ├── EngineStartError        it did not come up; carries the tail of its log
│   ├── EngineDiedError         it came up and then ended
│   └── EngineRequestError      it is alive and refused, or failed, one request
├── NoEngineError               no engine of the pool can take work
├── RequestTimeoutError         a request outlived its deadline                   (also a TimeoutError)
├── QueueFullError              more callers wait for a slot than max_queued
└── ChannelError                the channel to a host is broken or speaks another protocol
"""

from __future__ import annotations

import copy
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


class EngineRequestError(EngineError):
    """A live engine refused or failed one request."""


class NoEngineError(RolloutError):
    """No engine of the pool can take work."""


class RequestTimeoutError(RolloutError, TimeoutError):
    """A request outlived the deadline its caller gave it; it was aborted in the engine."""


class QueueFullError(RolloutError):
    """More callers wait for a slot than ``max_queued`` allows."""


class ChannelError(RolloutError):
    """The channel to an engine host is broken, or the other end speaks another protocol."""


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


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
