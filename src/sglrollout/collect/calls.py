"""The user's functions: rewards and filters, plain or async, of one argument or two."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from sglrollout.collect.task import Task
from sglrollout.errors import ConfigError, RewardError, RolloutError
from sglrollout.types import Completion, Group


class Verdict(NamedTuple):
    """What a filter says of a group. ``reason`` is under what a group that is not kept is counted."""

    keep: bool
    reason: str = ""


Reward = Callable[..., Any]
"""``(completion)`` or ``(completion, task)`` to a number. Plain functions run in worker threads."""

GroupReward = Callable[..., Any]
"""``(group)`` or ``(group, task)`` to a number per sample; failed samples' are not looked at."""

Filter = Callable[[Group], Any]
"""``(group)`` to a :class:`Verdict`, or to ``True`` for a group that is kept."""


class UserFunction:
    """One of the user's functions, called off the event loop unless it is async.

    Args:
        function: takes ``least`` to ``most`` positional arguments; gets as many as it takes.
        name: of the option that it came by.
        limiter: of the worker threads.
        timeout_s: for one call.

    Raises:
        ConfigError: it cannot be called so.
    """

    def __init__(
        self, function: Any, name: str, most: int, limiter: anyio.CapacityLimiter, timeout_s: float | None = None
    ) -> None:
        self._function, self._name, self._limiter, self._timeout_s = function, name, limiter, timeout_s
        self._num_taken = _num_taken(function, name, most)
        self._is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    @property
    def label(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    async def __call__(self, *arguments: Any) -> Any:
        """The function's value.

        Raises:
            RewardError: it took longer than ``timeout_s``; a thread's work is left to end by itself.
        """
        taken = arguments[: self._num_taken]
        with anyio.move_on_after(self._timeout_s):
            if self._is_async:
                return await self._function(*taken)
            value = await anyio.to_thread.run_sync(
                self._function, *taken, limiter=self._limiter, abandon_on_cancel=True
            )
            return await value if inspect.isawaitable(value) else value
        raise RewardError(f"the {self._name} {self.label} took longer than {self._timeout_s:g} s")


def _num_taken(function: Any, name: str, most: int) -> int:
    """How many of ``most`` arguments it takes."""
    if not callable(function):
        raise ConfigError(name, function, "must be a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return 1  # a builtin that does not say
    for count in range(most, 0, -1):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    raise ConfigError(name, function, f"must take {'one argument' if most == 1 else f'one to {most} arguments'}")


class Rewards:
    """The rewards of one collection.

    Args:
        per_sample: or ``None``.
        per_group: or ``None``; not both.
        limiter: of the worker threads.
        timeout_s: for one call.
    """

    def __init__(
        self,
        per_sample: Reward | None,
        per_group: GroupReward | None,
        limiter: anyio.CapacityLimiter,
        timeout_s: float | None,
    ) -> None:
        if per_sample is not None and per_group is not None:
            raise ConfigError("group_reward", per_group, "cannot be given beside reward: one of them rewards")
        self.of_samples = UserFunction(per_sample, "reward", 2, limiter, timeout_s) if per_sample is not None else None
        self.of_groups = (
            UserFunction(per_group, "group_reward", 2, limiter, timeout_s) if per_group is not None else None
        )

    async def of_sample(self, completion: Completion, task: Task) -> float:
        """
        Raises:
            RewardError: it gave none.
        """
        assert self.of_samples is not None
        return _finite(await _guarded(self.of_samples, completion, task), self.of_samples.label)

    async def of_group(self, group: Group, task: Task) -> list[float]:
        """
        Raises:
            RewardError: it did not give as many as there are samples.
        """
        assert self.of_groups is not None
        label = self.of_groups.label
        values = await _guarded(self.of_groups, group, task)
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(group.completions):
            raise RewardError(
                f"{label} must give {len(group.completions)} rewards for a group, and gave {values!r:.200}"
            )
        return [_finite(value, label) for value in values]


async def _guarded(function: UserFunction, *arguments: Any) -> Any:
    try:
        return await function(*arguments)
    except Exception as error:
        if isinstance(error, RolloutError):
            raise
        raise RewardError(f"{function.label} raised {type(error).__name__}: {error}") from error


def _finite(value: Any, label: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{label} must give a finite number, and gave {value!r:.200}")
    return number
