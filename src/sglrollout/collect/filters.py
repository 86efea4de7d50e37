"""Which groups are worth training on, and why others are not: filters for ``rollout.collect(..., filter=...)``.

A filter is a function of a rewarded group that gives a :class:`Verdict`, or ``True`` and ``False``. Failed samples have
no reward, and these filters leave them out of account.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sglrollout.collect.calls import Verdict
from sglrollout.errors import ConfigError
from sglrollout.types import Group

__all__ = ["Verdict", "failed", "mean_reward", "truncated", "zero_std"]

GroupFilter = Callable[[Group], Verdict]


def zero_std(tolerance: float = 1e-6) -> GroupFilter:
    """Drop a group whose rewards are all the same: it has no advantage, and teaches nothing (DAPO, arXiv 2503.14476).

    Args:
        tolerance: how far the rewards may lie apart and still count as the same.
    """
    _check_number("tolerance", tolerance, 0, None, optional=False)

    def filter_zero_std(group: Group) -> Verdict:
        rewards = _rewards(group)
        return Verdict(bool(rewards) and max(rewards) - min(rewards) > tolerance, "zero_std")

    return filter_zero_std


def mean_reward(least: float | None = None, most: float | None = None) -> GroupFilter:
    """Drop a group that is too hard or too easy, by the mean of its rewards; the bounds themselves are kept."""
    for name, bound in (("least", least), ("most", most)):
        _check_number(name, bound, None, None)
    if least is not None and most is not None and least > most:
        raise ConfigError("least", least, f"must be at most most ({most})")

    def filter_mean_reward(group: Group) -> Verdict:
        rewards = _rewards(group)
        mean = sum(rewards) / len(rewards) if rewards else None
        if mean is not None and least is not None and mean < least:
            return Verdict(False, "mean_reward_low")
        if mean is not None and most is not None and mean > most:
            return Verdict(False, "mean_reward_high")
        return Verdict(mean is not None, "no_reward")

    return filter_mean_reward


def truncated(most: float = 0.0) -> GroupFilter:
    """Drop a group of which more than this share of samples ended for lack of room."""
    _check_number("most", most, 0, 1)

    def filter_truncated(group: Group) -> Verdict:
        num_truncated = sum(completion.finish_reason == "length" for completion in group.completions)
        return Verdict(num_truncated <= most * len(group.completions), "truncated")

    return filter_truncated


def failed(most: float = 0.0) -> GroupFilter:
    """Drop a group of which more than this share of samples failed."""
    _check_number("most", most, 0, 1)

    def filter_failed(group: Group) -> Verdict:
        return Verdict(num_failed(group) <= most * len(group.completions), "failed")

    return filter_failed


FACTORIES: tuple[Callable[..., GroupFilter], ...] = (zero_std, mean_reward, truncated, failed)


def num_failed(group: Group) -> int:
    """Samples that an engine or a reward function failed."""
    rewards = group.rewards or (0.0,) * len(group.completions)
    pairs = zip(group.completions, rewards, strict=True)
    return sum(completion.finish_reason == "error" or reward is None for completion, reward in pairs)


def _rewards(group: Group) -> list[float]:
    return [reward for reward in group.rewards or () if reward is not None]


def _check_number(
    name: str, value: float | None, least: float | None, most: float | None, optional: bool = True
) -> None:
    if value is None and optional:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value is None or (least is not None and value < least) or (most is not None and value > most):
        bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
        raise ConfigError(name, value, f"must be a number{bounds}")
