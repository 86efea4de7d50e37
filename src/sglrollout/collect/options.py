"""What one collection asks for, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sglrollout.collect.calls import Filter, GroupReward, Reward, Rewards, UserFunction
from sglrollout.collect.filters import FACTORIES
from sglrollout.collect.task import Task
from sglrollout.config import Sampling
from sglrollout.errors import ConfigError
from sglrollout.generation.sample import resumable
from sglrollout.threads import Workers
from sglrollout.types import Completion

Source = Iterable[Any] | AsyncIterable[Any]
Surplus = Literal["run", "abort", "partial"]
Play = Callable[[Task], Awaitable[tuple[Completion, float | None]]]
"""Samples a task by an episode: the whole of it as one completion, and its reward if the episode knows it."""


class CollectOptions(NamedTuple):
    """See :meth:`sglrollout.AsyncRolloutEngine.collect`."""

    sampling: Sampling
    n: int
    target_groups: int | None
    rewards: Rewards
    filters: tuple[UserFunction, ...]
    workers: Workers
    num_spare: int
    surplus: Surplus
    max_staleness: int | None
    max_failures: float
    drop_last: bool
    timeout_s: float | None
    seed: int | None
    play: Play | None


def collect_options(
    source: Source,
    sampling: Sampling,
    n: int,
    *,
    target_groups: int | None,
    reward: Reward | None,
    group_reward: GroupReward | None,
    filter: Filter | Sequence[Filter] | None,
    over_sample: float,
    surplus: Surplus,
    max_staleness: int | None,
    max_failures: float,
    drop_last: bool,
    timeout_s: float | None,
    reward_timeout_s: float | None,
    reward_workers: int,
    seed: int | None,
    play: Play | None,
) -> CollectOptions:
    """
    Raises:
        ConfigError: an option is wrong, or does not go with another.
    """
    if isinstance(source, (str, bytes, Mapping)) or not isinstance(source, (Iterable, AsyncIterable)):
        raise ConfigError("source", source, "must be an iterable of prompts; put a single one into a list")
    if not sampling.logprobs:
        raise ConfigError("sampling.logprobs", False, "must be True: a batch has the logprob of every token")
    _check_integer("target_groups", target_groups, 1)
    _check_integer("max_staleness", max_staleness, 0)
    _check_integer("seed", seed, 0)
    _check_integer("reward_workers", reward_workers, 1, optional=False)
    _check_number("over_sample", over_sample, 1, 10)
    _check_number("max_failures", max_failures, 0, 1)
    if over_sample > 1 and target_groups is None:
        raise ConfigError("over_sample", over_sample, "needs target_groups: what is there to start more than?")
    if surplus not in ("run", "abort", "partial"):
        raise ConfigError("surplus", surplus, 'must be "run", "abort" or "partial"')
    if surplus == "partial":
        _check_partial(max_staleness, sampling, play)
    if type(drop_last) is not bool:
        raise ConfigError("drop_last", drop_last, "must be True or False")
    workers = Workers(reward_workers)
    return CollectOptions(
        sampling=sampling,
        n=n,
        target_groups=target_groups,
        rewards=Rewards(reward, group_reward, workers, reward_timeout_s),
        filters=tuple(UserFunction(function, "filter", 1, workers, reward_timeout_s) for function in _filters(filter)),
        workers=workers,
        num_spare=math.ceil((over_sample - 1) * target_groups - 1e-9) if target_groups is not None else 0,
        surplus=surplus,
        max_staleness=max_staleness,
        max_failures=max_failures,
        drop_last=drop_last,
        timeout_s=timeout_s,
        seed=seed,
        play=play,
    )


def _filters(given: Filter | Sequence[Filter] | None) -> Sequence[Filter]:
    filters = _listed(given)
    for factory in FACTORIES:
        if any(function is factory for function in filters):
            rule = f"must be a filter, not the function that makes one (did you mean {factory.__name__}()?)"
            raise ConfigError("filter", factory, rule)
    return filters


def _listed(filters: Filter | Sequence[Filter] | None) -> Sequence[Filter]:
    if filters is None or callable(filters):
        return () if filters is None else (filters,)
    if not isinstance(filters, Sequence) or isinstance(filters, str):
        raise ConfigError("filter", filters, "must be a function, or a list of functions")
    return filters


def _check_partial(max_staleness: int | None, sampling: Sampling, play: Play | None) -> None:
    if max_staleness == 0:
        rule = "needs a max_staleness of at least 1: the tokens that it keeps are of an older version when it goes on"
    elif not resumable(sampling):
        rule = "cannot be with a grammar, penalties or stop strings in sampling: an engine would not see the cut part"
    elif play is not None:
        rule = "cannot be with episodes, which are not cut but started over"
    else:
        return
    raise ConfigError("surplus", "partial", rule)


def _check_integer(name: str, value: object, least: int, optional: bool = True) -> None:
    if value is None and optional:
        return
    if type(value) is not int or value < least:
        raise ConfigError(name, value, f"must be an integer of at least {least}{', or None' if optional else ''}")


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(name, value, f"must be a number from {least} to {most}")
