"""The user's functions: rewards and filters, plain or async, of one argument or two."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio

from sglrollout.collect.task import Task
from sglrollout.errors import ConfigError, LifecycleError, RewardError, in_words
from sglrollout.threads import StuckThreadsError, Workers, is_async
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


class _StuckError(LifecycleError):
    """Threads run out: this is no sample's fault, and ends the collection."""


class UserFunction:
    """One of the user's functions, called on a worker's thread unless it is async.

    Args:
        function: takes one or two positional arguments. It is given the second if it needs one, or names it ``task``.
        name: of the option that it came by.
        most: arguments there are.
        workers: the threads.
        timeout_s: for one call.

    Raises:
        ConfigError: it cannot be called so.
    """

    def __init__(self, function: Any, name: str, most: int, workers: Workers, timeout_s: float | None = None) -> None:
        self._num_taken = _num_taken(function, name, most)
        self._function, self._name, self._workers, self._timeout_s = function, name, workers, timeout_s
        self._is_async = is_async(function)

    @property
    def label(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    async def __call__(self, *arguments: Any) -> Any:
        """The function's value.

        Raises:
            RewardError: it took longer than ``timeout_s``, or awaited something that was cancelled.
            LifecycleError: more calls than there is an end of are past their timeout, and run still.
        """
        taken = arguments[: self._num_taken]
        try:
            if not self._is_async:
                value = await self._workers.call(partial(self._function, *taken), self._timeout_s)
                if not inspect.isawaitable(value):
                    return value
            else:
                value = self._function(*taken)
            with anyio.fail_after(self._timeout_s):
                return await value
        except StuckThreadsError as error:
            raise _StuckError(f"{self.label}: {error} (reward_timeout_s)") from error
        except TimeoutError as error:
            if self._timeout_s is None:
                raise
            raise RewardError(f"the {self._name} {self.label} took longer than {self._timeout_s:g} s") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RewardError(f"the {self._name} {self.label} awaited something that was cancelled") from None


def _num_taken(function: Any, name: str, most: int) -> int:
    """How many of ``most`` arguments it is to be given."""
    if not callable(function):
        raise ConfigError(name, function, "must be a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1  # a builtin that does not say
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return most
    places = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    num_needed = sum(parameter.default is parameter.empty for parameter in places)
    named = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    if not places or num_needed > most or named:
        raise ConfigError(name, function, f"must take {'one argument' if most == 1 else f'one to {most} arguments'}")
    return most if len(places) >= most and places[most - 1].name == "task" else max(1, num_needed)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Rewards:
    """The rewards of one collection.

    Args:
        per_sample: or ``None``.
        per_group: or ``None``; not both.
        workers: the threads of plain functions.
        timeout_s: for one call.
    """

    def __init__(
        self,
        per_sample: Reward | None,
        per_group: GroupReward | None,
        workers: Workers,
        timeout_s: float | None,
    ) -> None:
        if per_sample is not None and per_group is not None:
            raise ConfigError("group_reward", per_group, "cannot be given beside reward: one of them rewards")
        self.of_samples = UserFunction(per_sample, "reward", 2, workers, timeout_s) if per_sample is not None else None
        self.of_groups = (
            UserFunction(per_group, "group_reward", 2, workers, timeout_s) if per_group is not None else None
        )

    async def of_sample(self, completion: Completion, task: Task) -> float:
        """
        Raises:
            RewardError: it gave none.
        """
        assert self.of_samples is not None
        return finite(await _guarded(self.of_samples, completion, task), self.of_samples.label)

    async def of_group(self, group: Group, task: Task) -> list[Any]:
        """A value for each sample, still to be looked at by :func:`finite`.

        Raises:
            RewardError: it did not give as many as there are samples.
        """
        assert self.of_groups is not None
        values = await _guarded(self.of_groups, group, task)
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(group.completions):
            wanted = f"{len(group.completions)} rewards for a group"
            raise RewardError(f"{self.of_groups.label} must give {wanted}, and gave {values!r:.200}")
        return list(values)


async def _guarded(function: UserFunction, *arguments: Any) -> Any:
    """What a reward gives. Whatever it raises is about its sample, an exit of the interpreter included."""
    try:
        return await function(*arguments)
    except (RewardError, _StuckError):
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(f"{function.label} raised {in_words(error)}") from error


def finite(value: Any, label: str) -> float:
    """
    Raises:
        RewardError: it is no finite number.
    """
    try:
        number = float(value)
    except Exception:
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{label} must give a finite number, and gave {value!r:.200}")
    return number
