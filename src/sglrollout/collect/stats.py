"""What a collection counts: live, and for each batch."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sglrollout import notebook
from sglrollout.errors import FailureBudgetError
from sglrollout.types import Group

_log = logging.getLogger("sglrollout.collect")
_WINDOW = 256
_LEAST_LOOKED_AT = 32
_MOST_CAUSES = 20
_RATE_S = 10.0
_WARN_AFTER = 10


@dataclass(frozen=True, slots=True)
class CollectStats:
    """A collection, now.

    Attributes:
        num_queued: samples of admitted groups that wait for a slot.
        num_active: samples that run in an engine, or episodes under way.
        num_stalled: of those, the ones that got no token for 30 s.
        num_rewarding: rewards and filters under way.
        num_ready: groups that wait for their batch.
        num_delivered: groups delivered in batches.
        num_failed: samples that failed.
        filtered: groups that were filtered out, by reason.
        num_surplus: groups that over-sampling started and no batch needed.
        num_resumed: samples that went on from the tokens of an earlier try.
        num_restarted: groups that started over because their tokens had become too stale.
        num_tokens: tokens sampled, in samples that have ended.
        tokens_per_s: the same, of the last ten seconds.
        weight_version: of the engines.
        staleness_max: of the groups that are on their way or wait, were they used now.
    """

    num_queued: int
    num_active: int
    num_stalled: int
    num_rewarding: int
    num_ready: int
    num_delivered: int
    num_failed: int
    filtered: dict[str, int]
    num_surplus: int
    num_resumed: int
    num_restarted: int
    num_tokens: int
    tokens_per_s: float
    weight_version: int
    staleness_max: int


@dataclass(frozen=True, slots=True)
class CollectReport:
    """One batch of a collection, and what has happened since the one before.

    Attributes:
        num_groups, num_samples, num_tokens: in the batch; tokens are those that the model sampled.
        seconds: since the batch before, or the start.
        wait_s: of those, how long the trainer waited for the batch.
        weight_version: of the engines when it was taken.
        staleness_mean, staleness_max: of its samples: that version, less the version of their oldest token.
        mixed_version_ratio: share of its samples whose tokens are of several versions.
        truncated_ratio: share of its samples that ended for lack of room.
        response_len_mean: tokens sampled per sample.
        reward_mean, reward_std: over its rewards; ``None`` where there are none.
        num_failed: samples that failed since the batch before, delivered or not.
        filtered: groups that were filtered out since, by reason.
        num_surplus, num_resumed, num_restarted: since; as in :class:`CollectStats`.
    """

    num_groups: int
    num_samples: int
    num_tokens: int
    seconds: float
    wait_s: float
    weight_version: int
    staleness_mean: float
    staleness_max: int
    mixed_version_ratio: float
    truncated_ratio: float
    response_len_mean: float
    reward_mean: float | None
    reward_std: float | None
    num_failed: int
    filtered: dict[str, int] = field(default_factory=dict)
    num_surplus: int = 0
    num_resumed: int = 0
    num_restarted: int = 0

    def as_dict(self, prefix: str = "rollout/") -> dict[str, float]:
        """Flat numbers, for a logger."""
        numbers = {name: getattr(self, name) for name in self.__slots__ if name != "filtered"}
        numbers |= {f"filtered/{reason}": count for reason, count in self.filtered.items()}
        return {f"{prefix}{name}": float(value) for name, value in numbers.items() if value is not None}

    def _repr_html_(self) -> str:
        """For notebooks: every number, by its name."""
        numbers = {name: notebook.number(value, 4) for name, value in self.as_dict(prefix="").items()}
        return notebook.frame(notebook.facts(numbers))

    def __str__(self) -> str:
        reward = "" if self.reward_mean is None else f"reward {self.reward_mean:.3g} (std {self.reward_std:.3g}), "
        lines = [
            f"version {self.weight_version}: {self.num_groups} groups, {self.num_samples} samples and "
            f"{self.num_tokens:,} tokens in {self.seconds:.3g} s, of which the trainer waited {self.wait_s:.3g} s",
            f"{reward}{self.response_len_mean:.4g} tokens per sample, {self.truncated_ratio:.0%} truncated",
            f"staleness mean {self.staleness_mean:.3g}, max {self.staleness_max}, "
            f"{self.mixed_version_ratio:.0%} of several versions",
        ]
        events = {name: getattr(self, f"num_{name}") for name in ("failed", "surplus", "resumed", "restarted")}
        shown = [f"{count} {name}" for name, count in events.items() if count]
        shown += [f"{count} filtered ({reason})" for reason, count in self.filtered.items()]
        return "\n  ".join([*lines, ", ".join(shown)] if shown else lines)


class Tally:
    """Counts.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self.filtered: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.num_failed = self.num_tokens = 0
        self.num_surplus = self.num_resumed = self.num_restarted = 0
        self.report: CollectReport | None = None
        self._latest: deque[bool] = deque(maxlen=_WINDOW)
        self._rate: deque[tuple[float, int]] = deque()
        self._before = self._totals()
        self._num_filtered_since = 0

    def sample_ended(self, num_tokens: int, failure: Exception | None) -> None:
        """One more sample has ended and is rewarded, or has failed."""
        now = self._clock()
        self.num_tokens += num_tokens
        self._rate.append((now, num_tokens))
        while self._rate[0][0] < now - _RATE_S:
            self._rate.popleft()
        self._latest.append(failure is not None)
        if failure is not None:
            self._note(failure)

    def failed(self, failure: Exception) -> None:
        """A sample that had ended well failed after all, with its group."""
        with suppress(ValueError):
            self._latest.remove(False)
        self._latest.append(True)
        self._note(failure)

    def _note(self, failure: Exception) -> None:
        self.num_failed += 1
        cause = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:120]
        if cause not in self.causes and len(self.causes) >= _MOST_CAUSES:
            cause = "others"
        self.causes[cause] += 1

    def tokens_per_s(self) -> float:
        """Of the last ten seconds."""
        elapsed = min(_RATE_S, max(self._clock() - self._begun, 1e-9))
        since = self._clock() - _RATE_S
        return sum(num_tokens for when, num_tokens in self._rate if when >= since) / elapsed

    def check_budget(self, most: float) -> None:
        """
        Raises:
            FailureBudgetError: of the latest 256 samples, more than this share failed. Until 32 have ended, so many are
                counted as that would allow of 32.
        """
        if sum(self._latest) > most * max(len(self._latest), _LEAST_LOOKED_AT):
            raise self.budget_error()

    def budget_error(self) -> FailureBudgetError:
        return FailureBudgetError(sum(self._latest), len(self._latest), dict(self.causes.most_common()))

    def filtered_out(self, reason: str, batch_size: int) -> None:
        """A group was not kept. A filter that drops everything is easily taken for a hang, so it is said."""
        self.filtered[reason] += 1
        self._num_filtered_since += 1
        if self._num_filtered_since % (_WARN_AFTER * batch_size) == 0:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.filtered.most_common())
            _log.warning("%d groups were filtered out since the last batch (%s)", self._num_filtered_since, reasons)

    def delivered(self, groups: Sequence[Group], version: int, wait_s: float) -> None:
        """A batch was taken: :attr:`report` is about it from now on."""
        before, totals = self._before, self._totals()
        self._before, self._num_filtered_since = totals, 0
        self.report = CollectReport(
            num_groups=len(groups),
            wait_s=wait_s,
            seconds=totals[0] - before[0],
            weight_version=version,
            **_of_samples(groups, version),  # type: ignore[arg-type]
            num_failed=totals[1] - before[1],
            filtered=dict(totals[2] - before[2]),
            num_surplus=totals[3] - before[3],
            num_resumed=totals[4] - before[4],
            num_restarted=totals[5] - before[5],
        )

    def _totals(self) -> tuple[float, int, Counter[str], int, int, int]:
        counts = (self.num_surplus, self.num_resumed, self.num_restarted)
        return self._clock(), self.num_failed, self.filtered.copy(), *counts


def _of_samples(groups: Sequence[Group], version: int) -> dict[str, float | int | None]:
    samples = [completion for group in groups for completion in group.completions]
    staleness = [
        version - min(span.version for span in sample.weight_versions) for sample in samples if sample.weight_versions
    ]
    rewards = [reward for group in groups for reward in group.rewards or () if reward is not None]
    num_tokens = [sum(sample.loss_mask) if sample.loss_mask else len(sample.token_ids) for sample in samples]
    mean = _mean(rewards) if rewards else None
    return {
        "num_samples": len(samples),
        "num_tokens": sum(num_tokens),
        "staleness_mean": _mean(staleness),
        "staleness_max": max(staleness, default=0),
        "mixed_version_ratio": _mean([len({span.version for span in s.weight_versions}) > 1 for s in samples]),
        "truncated_ratio": _mean([sample.finish_reason == "length" for sample in samples]),
        "response_len_mean": _mean(num_tokens),
        "reward_mean": mean,
        "reward_std": _mean([(reward - mean) ** 2 for reward in rewards]) ** 0.5 if mean is not None else None,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
