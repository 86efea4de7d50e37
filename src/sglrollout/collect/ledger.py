"""Which groups there are, where each is, and which may start, be taken, or must go back.  Decides; does nothing."""

from __future__ import annotations

import heapq
from collections import Counter

from sglrollout.collect.pacing import Pacer
from sglrollout.collect.runs import GroupRun, Stage
from sglrollout.types import Group


class Ledger:
    """All groups of a collection that are not delivered yet.

    Args:
        pacer: the bound on staleness.

    Attributes:
        pending: groups that wait to be admitted, the oldest first.
        runs: admitted groups, by index: those that run, have ended, or are finished.
        finished: groups that wait for their batch, by index.
        aside: groups that were taken back as surplus: they wait for the next version, or until a batch is asked for.
        num_running: groups with samples that have not ended.
        num_expired: groups whose tokens had become too stale, and were dropped.
    """

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.pending: list[tuple[int, GroupRun]] = []
        self.runs: dict[int, GroupRun] = {}
        self.finished: dict[int, GroupRun] = {}
        self.aside: list[GroupRun] = []
        self.num_running = self.num_expired = 0
        self._births: Counter[int] = Counter()

    @property
    def staleness_max(self) -> int:
        """Of all that is on its way, were it used now."""
        return max((self.pacer.version - birth for birth in self._births), default=0)

    def everything(self) -> list[GroupRun]:
        """Every group, the oldest first."""
        found = dict(self.pending) | self.runs | {run.index: run for run in self.aside}
        return [run for _, run in sorted(found.items())]

    # ------------------------------------------------------------ in

    def push(self, run: GroupRun) -> None:
        """A new group, one of a saved state, or one that was taken back."""
        run.stage = Stage.PENDING
        heapq.heappush(self.pending, (run.index, run))

    def admit(self) -> GroupRun | None:
        """The oldest pending group, if there is room for it."""
        if not self.pending:
            return None
        run, version = self.pending[0][1], self.pacer.version
        birth = run.oldest_version(version)
        if self.pacer.overdue(birth):
            run.reset()
            self.num_expired += 1
            birth = version
        if not self.pacer.admits(birth, self._births, self.num_running):
            return None
        heapq.heappop(self.pending)
        run.stage, run.birth = Stage.RUNNING, birth
        self.runs[run.index] = run
        self.num_running += 1
        self._births[birth] += 1
        return run

    def ended(self, run: GroupRun) -> None:
        """Its samples have ended."""
        run.stage = Stage.ENDED
        self.num_running -= 1

    def finish(self, run: GroupRun, group: Group) -> None:
        """Its samples have ended, and it is to be in a batch: unless it has become too stale."""
        oldest = run.oldest_version(run.birth)
        if self.pacer.overdue(oldest):
            self._expire(run)
            return
        run.group, run.stage = group, Stage.FINISHED
        self.finished[run.index] = run
        self._count(run, -1)
        run.birth = oldest
        self._count(run, 1)

    # ------------------------------------------------------------ out

    def choose(self, at_most: int | None) -> list[GroupRun]:
        """The finished groups of a batch taken now, what is due first; none if older ones must be waited for."""
        num_groups = len(self.finished) if at_most is None else at_most
        chosen = heapq.nsmallest(num_groups, self.finished.values(), key=_line)
        births = Counter(run.birth for run in chosen)
        return [] if chosen and self.pacer.waits(births, self._births - births) else chosen

    def deliver(self, chosen: list[GroupRun]) -> None:
        """They are in a batch that the trainer has now."""
        for run in chosen:
            self.forget(run)
        self.pacer.away = True

    def set_aside_surplus(self, at_most: int, keep: bool) -> int:
        """Take back groups that over-sampling started, that have not ended, and for which no batch has a place in time.

        Without a bound on staleness, that is the youngest of those that run. They wait until :meth:`ask` or
        :meth:`advance`.

        Returns:
            how many.
        """
        before = len(self.aside)
        for _ in range(at_most):
            born_by = self.pacer.surplus_born_by(self._births)
            may_go = [
                run
                for run in self.runs.values()
                if run.stage is Stage.RUNNING and born_by is not None and run.birth <= born_by
            ]
            if not may_go:
                break
            run = max(may_go, key=_line)
            self._end(run, keep)
            self.aside.append(run)
        return len(self.aside) - before

    def ask(self) -> None:
        """The trainer asks for a batch: it will be used under the version of now."""
        self.pacer.away = False
        self._return_aside()

    def _return_aside(self) -> None:
        while self.aside:
            self.push(self.aside.pop())

    def forget(self, run: GroupRun) -> None:
        """It is delivered, filtered out, or about to be taken back."""
        del self.runs[run.index]
        self.finished.pop(run.index, None)
        self._count(run, -1)
        self.num_running -= run.stage is Stage.RUNNING
        run.stage = Stage.GONE

    def take_back(self, run: GroupRun, keep: bool) -> None:
        """End what runs of it. It waits to be admitted again, with the tokens it has if they are to be kept."""
        self._end(run, keep)
        self.push(run)

    def _end(self, run: GroupRun, keep: bool) -> None:
        self.forget(run)
        run.take_back(keep)

    def advance(self, version: int) -> None:
        """A sync brought new weights: what is too stale now starts over."""
        self.pacer.advance(version)
        for run in [run for run in self.runs.values() if self.pacer.overdue(run.birth)]:
            self._expire(run)
        self._return_aside()

    def _expire(self, run: GroupRun) -> None:
        self.take_back(run, keep=False)
        self.num_expired += 1

    def _count(self, run: GroupRun, change: int) -> None:
        self._births[run.birth] += change
        if not self._births[run.birth]:
            del self._births[run.birth]


def _line(run: GroupRun) -> tuple[int, int]:
    """The order in which groups go into batches: what is due first, then as they were asked for."""
    return run.birth, run.index
