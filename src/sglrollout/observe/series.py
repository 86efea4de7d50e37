"""Numbers that come one by one: how many, how large, and how they are spread. It takes the memory of the latest few."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 1024
"""So many of the latest numbers are kept."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
TOKENS = tuple(2**power for power in range(18))
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of numbers that came one by one.

    Attributes:
        count: how many came in all.
        mean, p50, p95, max: of the latest 1,024 of them; 0 before the first.
    """

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    max: float = 0.0


class Series:
    """Takes numbers.

    Args:
        bounds: upper ends of a histogram's buckets, in order; one without an end is added.
    """

    __slots__ = ("_counts", "_latest", "bounds", "count", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.count, self.total = 0, 0.0
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self._counts = [0] * (len(bounds) + 1)

    def add(self, number: float) -> None:
        self.count += 1
        self.total += number
        self._latest.append(number)
        self._counts[bisect_left(self.bounds, number)] += 1

    def summary(self) -> Summary:
        latest = sorted(list(self._latest))  # noqa: C414 - a copy in one step, as another thread may add
        if not latest:
            return Summary()
        return Summary(self.count, sum(latest) / len(latest), _rank(latest, 0.5), _rank(latest, 0.95), latest[-1])

    def buckets(self) -> list[tuple[float, int]]:
        """Upper ends, the last of them infinite, and how many numbers were at most so large."""
        counts, so_far = list(self._counts), 0
        found: list[tuple[float, int]] = []
        for bound, count in zip([*self.bounds, math.inf], counts, strict=True):
            so_far += count
            found.append((bound, so_far))
        return found


def _rank(ordered: Sequence[float], share: float) -> float:
    """The nearest rank: the least number that so large a share does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
