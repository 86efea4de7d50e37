"""Rewards and filters of one collection, and the count of what fails."""

from __future__ import annotations

from typing import Any

from sglrollout.collect.calls import Rewards, UserFunction, Verdict, finite
from sglrollout.collect.filters import num_failed
from sglrollout.collect.runs import GroupRun, Slot
from sglrollout.collect.stats import Tally
from sglrollout.collect.task import Task
from sglrollout.errors import ConfigError, RewardError
from sglrollout.types import Group


class Judge:
    """Says what samples and groups are worth.

    Args:
        rewards: per sample or per group; or none.
        filters: in turn.
        tally: where failures are counted.
        max_failures: share of failed samples at which it raises.

    Attributes:
        num_busy: rewards and filters under way.
    """

    def __init__(self, rewards: Rewards, filters: tuple[UserFunction, ...], tally: Tally, max_failures: float) -> None:
        self._rewards, self._filters, self._tally, self._max_failures = rewards, filters, tally, max_failures
        self.num_busy = 0

    async def settle(self, slot: Slot, task: Task) -> None:
        """A sample has ended: reward it, and count it.

        Raises:
            FailureBudgetError: too many have failed.
        """
        completion = slot.completion
        assert completion is not None
        slot.failure = completion.error
        if slot.failure is None and slot.reward is None and self._rewards.of_samples is not None:
            slot.being_rewarded = True
            self.num_busy += 1
            try:
                slot.reward = await self._rewards.of_sample(completion, task)
            except RewardError as error:
                slot.failure = error
            finally:
                self.num_busy -= 1
        slot.settled = True
        self._tally.sample_ended(len(completion.token_ids), slot.failure)
        self._tally.check_budget(self._max_failures)

    async def judge(self, run: GroupRun) -> tuple[Group, Verdict]:
        """All samples of a group have ended: reward the group, and filter it.

        Raises:
            FailureBudgetError: too many samples have failed.
        """
        self.num_busy += 1
        try:
            group = self._group(run)
            if self._rewards.of_groups is not None and any(slot.failure is None for slot in run.slots):
                await self._reward_group(run, group)
                group = self._group(run)
            return group, await self._filter(group)
        finally:
            self.num_busy -= 1

    async def _reward_group(self, run: GroupRun, group: Group) -> None:
        try:
            values = await self._rewards.of_group(group, run.task)
        except RewardError as error:
            for slot in run.slots:
                if slot.failure is None:
                    slot.failure = error
                    self._tally.failed(error)
            self._tally.check_budget(self._max_failures)
            return
        for slot, value in zip(run.slots, values, strict=True):
            if slot.failure is None:
                self._take(slot, value)
        self._tally.check_budget(self._max_failures)

    def _take(self, slot: Slot, value: Any) -> None:
        assert self._rewards.of_groups is not None
        try:
            slot.reward = finite(value, self._rewards.of_groups.label)
        except RewardError as error:
            slot.failure = error
            self._tally.failed(error)

    async def _filter(self, group: Group) -> Verdict:
        if num_failed(group) == len(group.completions):
            return Verdict(False, "all_failed")
        for function in self._filters:
            verdict = await function(group)
            if not isinstance(verdict, Verdict):
                verdict = Verdict(_plain_bool(verdict), function.label)
            if not verdict.keep:
                return Verdict(False, str(verdict.reason or function.label))
        return Verdict(True)

    def _group(self, run: GroupRun) -> Group:
        completions = tuple(slot.completion for slot in run.slots if slot.completion is not None)
        assert len(completions) == len(run.slots)
        ids = completions[0].prompt_ids if run.prepared is None else run.prepared.ids
        rewards = tuple(None if slot.failure is not None else slot.reward for slot in run.slots)
        rewarded = self._rewards.of_samples or self._rewards.of_groups or any(reward is not None for reward in rewards)
        return Group(run.task.prompt, ids, completions, run.index, run.task.data, rewards if rewarded else None)


def _plain_bool(verdict: Any) -> bool:
    verdict = verdict.item() if hasattr(verdict, "item") else verdict
    if not isinstance(verdict, bool):
        raise ConfigError("filter", verdict, "must return a Verdict, True or False")
    return verdict
