"""The bound on staleness, as a property of the bookkeeping under any order of events."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import sglrollout as sr
from sglrollout.collect.ledger import Ledger
from sglrollout.collect.pacing import Pacer
from sglrollout.collect.runs import GroupRun, Stage
from sglrollout.types import FinishReason


class Collection(RuleBasedStateMachine):
    """Groups start and end in any order; the trainer takes batches and syncs whenever it likes."""

    @initialize(
        batch_size=st.integers(1, 4),
        max_staleness=st.integers(0, 3),
        num_spare=st.integers(0, 2),
        calm=st.booleans(),
        takes_back=st.booleans(),
    )
    def begin(self, batch_size: int, max_staleness: int, num_spare: int, calm: bool, takes_back: bool) -> None:
        self.batch_size, self.bound, self.num_spare = batch_size, max_staleness, num_spare
        self.takes_back, self.calm = takes_back, calm
        """One batch between two syncs at least, which is what pacing counts on."""
        self.ledger = Ledger(Pacer(batch_size, max_staleness, num_spare, ahead=8))
        self.num_made, self.taken, self.delivered = 0, False, set[int]()

    @property
    def running(self) -> list[GroupRun]:
        return [run for run in self.ledger.runs.values() if run.stage is Stage.RUNNING]

    def admit_all(self) -> None:
        """As the feeder does: as many as there is room for."""
        while True:
            if not self.ledger.pending:
                self.ledger.push(GroupRun(self.num_made, sr.Task([1]), None, 1, None))
                self.num_made += 1
            if self.ledger.admit() is None:
                return

    @rule()
    def feed(self) -> None:
        self.admit_all()

    @rule(data=st.data())
    def one_ends(self, data: Any) -> None:
        if self.running:
            self.finish(data.draw(st.sampled_from(sorted(self.running, key=lambda run: run.index))))

    @rule(data=st.data())
    def one_is_filtered_out(self, data: Any) -> None:
        if self.running:
            self.ledger.forget(data.draw(st.sampled_from(sorted(self.running, key=lambda run: run.index))))

    def finish(self, run: GroupRun) -> None:
        span = sr.VersionSpan(run.birth, 0, 1)
        run.slots[0].completion = sr.Completion((1,), (2,), (0.0,), "stop", weight_versions=(span,))
        self.ledger.ended(run)
        self.ledger.finish(run, sr.Group([1], (1,), (run.slots[0].completion,)))

    @rule()
    def ask(self) -> None:
        """The trainer asks for a batch, and gets one if it may be taken now."""
        self.taken = False
        self.ledger.ask()
        self.admit_all()
        self.take()

    def take(self) -> bool:
        if len(self.ledger.finished) < self.batch_size:
            return False
        chosen = self.ledger.choose(self.batch_size)
        if not chosen:
            return False
        for run in chosen:
            assert self.ledger.pacer.version - run.birth <= self.bound
            assert run.index not in self.delivered
            self.delivered.add(run.index)
        self.ledger.deliver(chosen)
        if self.takes_back:
            self.ledger.set_aside_surplus(self.num_spare, keep=True)
        self.taken = True
        return True

    @precondition(lambda self: self.taken or not self.calm)
    @rule()
    def sync(self) -> None:
        self.ledger.advance(self.ledger.pacer.version + 1)
        self.taken = False

    @rule()
    def a_batch_always_comes_when_all_that_runs_ends(self) -> None:
        self.taken = False
        self.ledger.ask()
        for _ in range(3 * (self.bound + 2) * (self.batch_size + self.num_spare)):
            self.admit_all()
            if self.take():
                return
            for run in self.running:
                self.finish(run)
        raise AssertionError("the trainer would wait for ever")

    @invariant()
    def nothing_on_its_way_is_too_old_already(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.staleness_max <= self.bound

    @invariant()
    def pacing_alone_keeps_the_bound(self) -> None:
        if hasattr(self, "ledger") and self.calm and not self.num_spare:
            assert self.ledger.num_expired == 0

    @invariant()
    def it_does_not_run_further_ahead_than_the_bound_allows(self) -> None:
        if hasattr(self, "ledger"):
            assert len(self.ledger.runs) <= (self.bound + 1) * self.batch_size + self.num_spare

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.num_running == len(self.running)


TestAnyOrderOfEvents = Collection.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@given(seen=st.lists(st.integers(0, 5), max_size=30), bound=st.integers(0, 3), size=st.integers(1, 4))
def test_with_room_for_a_group_of_now_there_is_room_when_one_less_is_on_its_way(
    seen: list[int], bound: int, size: int
) -> None:
    pacer = Pacer(size, bound, 0, ahead=8, version=5)
    births = Counter(birth for birth in seen if birth + bound >= 5)
    if births and pacer.admits(5, births, 0):
        fewer = births - Counter([next(iter(births))])
        assert pacer.admits(5, fewer, 0)


def test_without_a_bound_only_what_engines_need_runs_ahead() -> None:
    ledger = Ledger(Pacer(4, None, 0, ahead=6))
    for index in range(30):
        ledger.push(GroupRun(index, sr.Task([1]), None, 1, None))
    while ledger.admit() is not None:
        pass
    assert len(ledger.runs) == 10


@pytest.mark.parametrize(("reason", "ended"), [("stop", True), ("length", True), ("abort", False)])
def test_a_sample_that_has_just_ended_is_kept_whole_and_one_that_was_cut_goes_on(
    reason: FinishReason, ended: bool
) -> None:
    held = sr.Completion((1,), (5, 6), (-1.0, -1.0), reason, weight_versions=(sr.VersionSpan(3, 0, 2),))
    run = GroupRun(0, sr.Task([1]), None, 1, None)
    run.slots[0].so_far = run.slots[0].cancel = lambda: held
    restored = GroupRun.from_record(run.to_record(), lambda task: None)
    run.take_back(keep=True)
    for slot in (run.slots[0], restored.slots[0]):
        assert (slot.completion is not None) is ended
        assert (slot.prior is not None) is not ended
