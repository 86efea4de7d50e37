from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Hashable
from dataclasses import dataclass

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.errors import LifecycleError, NoEngineError, QueueFullError, RequestTimeoutError
from sglrollout.pool.dispatcher import Dispatcher, Elsewhere, Lease


@dataclass(eq=False)
class Target:
    limit: int = 1
    ready: bool = True


def in_flight(dispatcher: Dispatcher[Target], *targets: Target) -> list[int]:
    return [dispatcher.num_inflight(target) for target in targets]


async def waiting(
    dispatcher: Dispatcher[Target], key: Hashable | None = None, deadline: float | None = None
) -> asyncio.Task[Lease[Target]]:
    """A task that stands in the queue."""
    task = asyncio.ensure_future(dispatcher.acquire(key, deadline))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def settle(*tasks: asyncio.Task[Lease[Target]]) -> None:
    await asyncio.wait(tasks, timeout=5)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ------------------------------------------------------------ who goes where, and when


async def test_waiters_are_served_first_come_first_served() -> None:
    dispatcher = Dispatcher([Target()])
    lease = await dispatcher.acquire()
    served: list[int] = []

    async def caller(number: int) -> None:
        mine = await dispatcher.acquire(key=number % 3)
        served.append(number)
        await asyncio.sleep(0)
        mine.release()

    tasks = [asyncio.ensure_future(caller(number)) for number in range(20)]
    await turns()
    lease.release()
    await asyncio.wait(tasks, timeout=5)
    assert served == list(range(20))


async def test_what_was_lost_at_a_target_goes_elsewhere_where_another_one_has_room() -> None:
    broken, others = Target(limit=4), [Target(limit=2), Target(limit=2)]
    dispatcher = Dispatcher([broken, *others])
    wish = Elsewhere("key", broken)
    leases = [await dispatcher.acquire(wish) for _ in range(5)]
    assert in_flight(dispatcher, broken, *others) == [1, 2, 2]  # the last one found no room elsewhere
    for lease in leases:
        lease.release()
    assert (await dispatcher.acquire("key")).target is broken  # where the last one went
    assert in_flight(dispatcher, broken, *others) == [1, 0, 0]
    waiters = [await dispatcher.acquire() for _ in range(7)]
    task = await waiting(dispatcher, wish)
    waiters.pop().release()
    await settle(task)
    assert task.done()


async def test_a_newcomer_does_not_overtake_a_waiter_that_was_just_served() -> None:
    target = Target()
    dispatcher = Dispatcher([target])
    lease = await dispatcher.acquire()
    waiter = await waiting(dispatcher)
    lease.release()
    newcomer = await waiting(dispatcher)
    assert waiter.done()
    waiter.result().release()
    await settle(newcomer)
    assert newcomer.done()


async def test_a_newcomer_does_not_overtake_waiters_when_there_is_room_for_both() -> None:
    target = Target(limit=1)
    dispatcher = Dispatcher([target])
    await dispatcher.acquire()
    waiter = await waiting(dispatcher)
    target.limit = 2  # and wake() is not called yet
    newcomer = await waiting(dispatcher)
    dispatcher.wake()
    await settle(waiter)
    assert waiter.done()
    newcomer.cancel()
    await settle(newcomer)


async def test_a_sample_goes_to_the_engine_with_the_smallest_share_of_its_limit_in_use() -> None:
    small, large = Target(limit=10), Target(limit=30)
    dispatcher = Dispatcher([small, large])
    for _ in range(20):
        await dispatcher.acquire()
    assert in_flight(dispatcher, small, large) == [5, 15]


async def test_a_key_stays_on_its_engine() -> None:
    targets = [Target(limit=100) for _ in range(4)]
    dispatcher = Dispatcher(targets)
    for _ in range(3):
        await dispatcher.acquire()
    leases = [await dispatcher.acquire(key="prompt") for _ in range(8)]
    assert {id(lease.target) for lease in leases} == {id(targets[3])}


async def test_a_key_spills_over_when_its_engine_is_far_busier_than_the_idlest() -> None:
    targets = [Target(limit=100), Target(limit=100)]
    dispatcher = Dispatcher(targets)
    for _ in range(100):
        await dispatcher.acquire(key="prompt")
    busy = in_flight(dispatcher, *targets)
    assert min(busy) > 30
    assert max(busy) - min(busy) <= 26  # a quarter of the limit, and the one that went over


async def test_a_key_goes_elsewhere_while_its_engine_is_full() -> None:
    first, second = Target(limit=2), Target(limit=2)
    dispatcher = Dispatcher([first, second])
    leases = [await dispatcher.acquire(key="prompt") for _ in range(3)]
    assert [lease.target for lease in leases] == [first, first, second]


async def test_a_key_goes_elsewhere_once_its_engine_is_dead() -> None:
    first, second = Target(limit=9), Target(limit=9)
    dispatcher = Dispatcher([first, second])
    assert (await dispatcher.acquire(key="prompt")).target is first
    first.ready = False
    assert (await dispatcher.acquire(key="prompt")).target is second
    first.ready = True
    assert (await dispatcher.acquire(key="prompt")).target is second


async def test_an_engine_that_is_not_ready_gets_no_work() -> None:
    first, second = Target(limit=4, ready=False), Target(limit=4)
    dispatcher = Dispatcher([first, second])
    leases = [await dispatcher.acquire() for _ in range(4)]
    assert all(lease.target is second for lease in leases)
    task = await waiting(dispatcher)
    first.ready = True
    dispatcher.wake()
    await settle(task)
    assert task.result().target is first


async def test_a_raised_limit_serves_waiters_on_wake() -> None:
    target = Target(limit=1)
    dispatcher = Dispatcher([target])
    await dispatcher.acquire()
    tasks = [await waiting(dispatcher) for _ in range(4)]
    target.limit = 3
    dispatcher.wake()
    await turns()
    assert [task.done() for task in tasks] == [True, True, False, False]
    assert dispatcher.num_queued == 2
    dispatcher.close(LifecycleError("over"))
    await settle(*tasks)
    assert [type(task.exception()) for task in tasks[2:]] == [LifecycleError] * 2


async def test_a_lowered_limit_takes_nothing_away_and_lets_nobody_in() -> None:
    target = Target(limit=3)
    dispatcher = Dispatcher([target])
    leases = [await dispatcher.acquire() for _ in range(3)]
    target.limit = 1
    task = await waiting(dispatcher)
    for lease in leases[:2]:
        lease.release()
        await turns()
        assert not task.done()
    leases[2].release()
    await settle(task)
    assert in_flight(dispatcher, target) == [1]


async def test_waking_for_one_target_serves_waiters_there() -> None:
    first, second = Target(ready=False), Target()
    dispatcher = Dispatcher([first, second])
    await dispatcher.acquire()
    tasks = [await waiting(dispatcher) for _ in range(2)]
    first.ready = True
    dispatcher.wake(first)
    await settle(tasks[0])
    assert tasks[0].result().target is first
    second.limit = 2
    dispatcher.wake(second)
    await settle(tasks[1])
    assert tasks[1].result().target is second


async def test_a_target_that_is_added_serves_waiters_and_comes_last_among_equals() -> None:
    first, added = Target(), Target(limit=2)
    dispatcher = Dispatcher([first])
    lease = await dispatcher.acquire()
    task = await waiting(dispatcher)
    dispatcher.add(added)
    await settle(task)
    assert task.result().target is added
    lease.release()
    task.result().release()
    assert [(await dispatcher.acquire()).target for _ in range(3)] == [first, added, added]


async def test_the_first_target_of_a_running_dispatcher_may_be_added() -> None:
    dispatcher = Dispatcher[Target]([])
    target = Target()
    dispatcher.add(target)
    assert (await dispatcher.acquire()).target is target


async def test_a_second_release_does_nothing() -> None:
    target = Target(limit=2)
    dispatcher = Dispatcher([target])
    first, _ = await dispatcher.acquire(), await dispatcher.acquire()
    first.release()
    first.release()
    assert in_flight(dispatcher, target) == [1]


# ------------------------------------------------------------ refusals


async def test_a_full_queue_refuses_and_has_room_again_once_somebody_leaves() -> None:
    dispatcher = Dispatcher([Target()], max_queued=2)
    lease = await dispatcher.acquire()
    first, second = await waiting(dispatcher), await waiting(dispatcher)
    with pytest.raises(QueueFullError, match=r"2 samples wait .*max_queued"):
        await dispatcher.acquire()
    second.cancel()
    await turns()
    third = await waiting(dispatcher)
    lease.release()
    await settle(first)
    first.result().release()
    await settle(third)
    assert second.cancelled()


async def test_a_deadline_ends_the_wait() -> None:
    target = Target()
    dispatcher = Dispatcher([target])
    lease = await dispatcher.acquire()
    with pytest.raises(RequestTimeoutError) as caught:
        await dispatcher.acquire(deadline=time.monotonic() + 0.02)
    assert isinstance(caught.value, TimeoutError)
    assert dispatcher.num_queued == 0
    lease.release()
    assert in_flight(dispatcher, target) == [0]


async def test_a_deadline_in_the_past_ends_the_wait_at_once_and_others_move_up() -> None:
    dispatcher = Dispatcher([Target()])
    lease = await dispatcher.acquire()
    with pytest.raises(RequestTimeoutError):
        await dispatcher.acquire(deadline=time.monotonic() - 1)
    task = await waiting(dispatcher)
    lease.release()
    await settle(task)
    assert task.done()


async def test_an_outer_timeout_stays_the_callers_own() -> None:
    target = Target()
    dispatcher = Dispatcher([target])
    await dispatcher.acquire()
    with pytest.raises(TimeoutError) as caught, anyio.fail_after(0.01):
        await dispatcher.acquire(deadline=time.monotonic() + 60)
    assert not isinstance(caught.value, RequestTimeoutError)
    assert dispatcher.num_queued == 0


async def test_close_fails_all_waiters_and_all_later_calls_with_the_reason() -> None:
    dispatcher = Dispatcher([Target()])
    lease = await dispatcher.acquire()
    tasks = [await waiting(dispatcher) for _ in range(3)]
    dispatcher.close(NoEngineError("all gone"))
    await settle(*tasks)
    assert [type(task.exception()) for task in tasks] == [NoEngineError] * 3
    with pytest.raises(NoEngineError, match="all gone"):
        await dispatcher.acquire()
    lease.release()
    assert dispatcher.num_queued == 0


async def test_a_waiter_that_is_cancelled_as_the_dispatcher_closes_ends_cancelled() -> None:
    dispatcher = Dispatcher([Target()])
    await dispatcher.acquire()
    task = await waiting(dispatcher)
    dispatcher.close(NoEngineError("all gone"))
    task.cancel()
    await settle(task)
    assert task.cancelled()


async def test_a_pool_without_engines_says_so() -> None:
    with pytest.raises(NoEngineError, match="no engine"):
        await Dispatcher[Target]([]).acquire()


# ------------------------------------------------------------ cancellation


async def test_a_cancelled_waiter_never_keeps_a_slot() -> None:
    target = Target()
    dispatcher = Dispatcher([target])
    lease = await dispatcher.acquire()
    task = await waiting(dispatcher)
    task.cancel()
    await settle(task)
    assert dispatcher.num_queued == 0
    lease.release()
    assert in_flight(dispatcher, target) == [0]


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_grant_and_a_cancel_in_the_same_instant_leave_the_slot_to_the_next(cancel_first: bool) -> None:
    target = Target()
    dispatcher = Dispatcher([target])
    lease = await dispatcher.acquire()
    cancelled, following = await waiting(dispatcher), await waiting(dispatcher)
    if cancel_first:
        cancelled.cancel()
        lease.release()
    else:
        lease.release()
        cancelled.cancel()
    await settle(cancelled, following)
    assert cancelled.cancelled()
    assert in_flight(dispatcher, target) == [1]
    following.result().release()
    assert in_flight(dispatcher, target) == [0]


async def test_a_grant_and_a_cancelled_scope_in_the_same_instant_leak_nothing() -> None:
    target = Target()
    dispatcher = Dispatcher([target])
    lease = await dispatcher.acquire()
    got: list[Lease[Target]] = []
    scope = anyio.CancelScope()

    async def caller() -> None:
        with scope:
            got.append(await dispatcher.acquire())

    task = asyncio.ensure_future(caller())
    await turns()
    lease.release()
    scope.cancel()
    await asyncio.wait([task], timeout=5)
    assert in_flight(dispatcher, target) == [len(got)]  # whoever has a lease can release it


async def test_a_cancelled_waiter_at_the_head_is_passed_over() -> None:
    """Also in the instant in which it is cancelled, while its task has not run yet."""
    target = Target(limit=1)
    dispatcher = Dispatcher([target])
    await dispatcher.acquire()
    head, following = await waiting(dispatcher), await waiting(dispatcher)
    target.limit = 2
    head.cancel()
    dispatcher.wake()
    await settle(head, following)
    assert head.cancelled()
    assert following.result().target is target


async def test_a_deadline_and_a_cancel_in_the_same_instant_end_the_wait_once() -> None:
    target = Target()
    dispatcher = Dispatcher([target])
    lease = await dispatcher.acquire()
    task = await waiting(dispatcher, deadline=time.monotonic())
    await turns(2)  # the deadline has passed, and the task has not run since
    assert not task.done()
    assert dispatcher.num_queued == 0
    task.cancel()
    await settle(task)
    assert task.cancelled()
    lease.release()
    assert in_flight(dispatcher, target) == [0]


STEPS = st.one_of(
    st.tuples(st.just("acquire"), st.integers(0, 3)),
    st.tuples(st.just("acquire_briefly"), st.integers(0, 3)),
    st.tuples(st.just("cancel_task"), st.integers(0, 9)),
    st.tuples(st.just("cancel_scope"), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("limit"), st.integers(0, 8)),
    st.tuples(st.just("ready"), st.integers(0, 2)),
    st.tuples(st.just("turn"), st.integers(0, 2)),
)


class Schedule:
    """Runs steps against a dispatcher. Several may fall into one turn of the event loop."""

    def __init__(self) -> None:
        self.targets = [Target(limit=limit) for limit in (1, 2, 3)]
        self.dispatcher = Dispatcher(self.targets, max_queued=6)
        self.callers: list[tuple[asyncio.Task[None], anyio.CancelScope]] = []
        self.held: list[Lease[Target]] = []

    async def run(self, steps: list[tuple[str, int]]) -> None:
        for name, number in steps:
            await getattr(self, name)(number)
        await turns()
        self.check_that_nobody_waits_beside_a_free_slot()
        for _, scope in self.callers:
            scope.cancel()
        while self.held or any(not task.done() for task, _ in self.callers):
            for lease in self.held:
                lease.release()
            self.held.clear()
            await asyncio.sleep(0)
        assert in_flight(self.dispatcher, *self.targets) == [0, 0, 0]
        assert self.dispatcher.num_queued == 0

    def check_that_nobody_waits_beside_a_free_slot(self) -> None:
        room = [t for t in self.targets if t.ready and self.dispatcher.num_inflight(t) < t.limit]
        assert not room or self.dispatcher.num_queued == 0
        assert sum(in_flight(self.dispatcher, *self.targets)) == len(self.held)

    async def acquire(self, number: int, deadline: float | None = None) -> None:
        scope = anyio.CancelScope()

        async def caller() -> None:
            with scope, contextlib.suppress(QueueFullError, RequestTimeoutError):
                self.held.append(await self.dispatcher.acquire(number or None, deadline))

        self.callers.append((asyncio.ensure_future(caller()), scope))

    async def acquire_briefly(self, number: int) -> None:
        await self.acquire(number, time.monotonic() + 0.0002)

    async def cancel_task(self, number: int) -> None:
        if self.callers:
            self.callers[number % len(self.callers)][0].cancel()

    async def cancel_scope(self, number: int) -> None:
        if self.callers:
            self.callers[number % len(self.callers)][1].cancel()

    async def release(self, number: int) -> None:
        if self.held:
            self.held.pop(number % len(self.held)).release()

    async def limit(self, number: int) -> None:
        self.targets[number % 3].limit = 1 + number // 3
        self.dispatcher.wake()

    async def ready(self, number: int) -> None:
        self.targets[number].ready = not self.targets[number].ready
        self.dispatcher.wake()

    async def turn(self, number: int) -> None:
        await turns(1 + number)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_no_schedule_of_calls_leaks_a_slot_or_forgets_a_waiter(steps: list[tuple[str, int]]) -> None:
    asyncio.run(Schedule().run(steps))


# ------------------------------------------------------------ the same choice as by looking at every engine


class Linear:
    """What the dispatcher is to do, by looking at every target each time."""

    def __init__(self, targets: list[Target]) -> None:
        self.targets, self.num_inflight = targets, [0] * len(targets)
        self.waiting: list[tuple[int, Hashable | None]] = []
        self.sent: dict[Hashable, int] = {}
        self.grants: list[tuple[int, int]] = []

    def acquire(self, caller: int, key: Hashable | None) -> None:
        self.waiting.append((caller, key))
        self.serve()

    def leave(self, caller: int) -> None:
        self.waiting = [waiter for waiter in self.waiting if waiter[0] != caller]

    def release(self, place: int) -> None:
        self.num_inflight[place] -= 1
        self.serve()

    def serve(self) -> None:
        while self.waiting and (place := self.choose(self.waiting[0][1])) is not None:
            caller, key = self.waiting.pop(0)
            self.num_inflight[place] += 1
            self.grants.append((caller, place))
            if key is not None:
                self.sent[key] = place

    def choose(self, key: Hashable | None) -> int | None:
        room = [place for place in range(len(self.targets)) if self.has_room(place)]
        if not room:
            return None
        idlest = min(room, key=lambda place: self.num_inflight[place] / self.targets[place].limit)
        sticky = self.sent.get(key) if key is not None else None
        if sticky is None or not self.has_room(sticky):
            return idlest
        slack = max(8, self.targets[sticky].limit // 4)
        return sticky if self.num_inflight[sticky] - self.num_inflight[idlest] <= slack else idlest

    def has_room(self, place: int) -> bool:
        return self.targets[place].ready and self.num_inflight[place] < self.targets[place].limit


class Comparison:
    """Runs steps against a dispatcher and the linear model of it, and compares who was sent where."""

    def __init__(self, limits: list[int]) -> None:
        self.targets = [Target(limit=limit) for limit in limits]
        self.dispatcher, self.linear = Dispatcher(self.targets), Linear(self.targets)
        self.tasks: list[asyncio.Task[None]] = []
        self.grants: list[tuple[int, int]] = []
        self.held: list[tuple[Lease[Target], int]] = []

    async def run(self, steps: list[tuple[str, int, int]]) -> None:
        for name, which, number in steps:
            getattr(self, name)(which, number)
            await turns(3)
            assert sorted(self.grants) == sorted(self.linear.grants)
            assert in_flight(self.dispatcher, *self.targets) == self.linear.num_inflight
            assert self.dispatcher.num_queued == len(self.linear.waiting)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def acquire(self, key: int, count: int) -> None:
        for _ in range(count):
            caller = len(self.tasks)
            self.tasks.append(asyncio.ensure_future(self.call(caller, key or None)))
            self.linear.acquire(caller, key or None)

    async def call(self, caller: int, key: int | None) -> None:
        lease = await self.dispatcher.acquire(key)
        place = self.targets.index(lease.target)
        self.grants.append((caller, place))
        self.held.append((lease, place))

    def cancel(self, which: int, _: int) -> None:
        if self.tasks:
            caller = which % len(self.tasks)
            self.tasks[caller].cancel()
            self.linear.leave(caller)

    def release(self, which: int, count: int) -> None:
        for _ in range(min(count, len(self.held))):
            lease, place = self.held.pop(which % len(self.held))
            lease.release()
            self.linear.release(place)

    def change(self, which: int, limit: int) -> None:
        """For better or worse, which the dispatcher is told."""
        self.alter(which, limit)
        self.dispatcher.wake(self.targets[which % len(self.targets)])
        self.linear.serve()

    def change_several(self, which: int, limit: int) -> None:
        for i in range(3):
            self.alter(which + i, limit + i)
        self.dispatcher.wake()
        self.linear.serve()

    def alter(self, which: int, limit: int) -> None:
        target = self.targets[which % len(self.targets)]
        if limit % 3:
            target.limit = limit
        else:
            target.ready = not target.ready

    def spoil(self, which: int, limit: int) -> None:
        """For the worse, which the dispatcher is not told."""
        target = self.targets[which % len(self.targets)]
        if limit % 3:
            target.limit = min(target.limit, limit)
        else:
            target.ready = False


CHANGES = ("acquire", "acquire", "acquire", "release", "release", "cancel", "change", "change_several", "spoil")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 12), st.integers(0, 30)), max_size=40),
)
def test_samples_go_where_looking_at_every_engine_would_send_them(
    limits: list[int], steps: list[tuple[str, int, int]]
) -> None:
    asyncio.run(Comparison(limits).run(steps))


class Watched:
    """A target that counts how often it is looked at."""

    num_looks = 0
    limit = 100

    @property
    def ready(self) -> bool:
        Watched.num_looks += 1
        return True


async def test_among_a_thousand_engines_few_are_looked_at_for_a_sample() -> None:
    dispatcher = Dispatcher([Watched() for _ in range(1000)])
    leases = [await dispatcher.acquire(key=number % 50) for number in range(1000)]
    Watched.num_looks = 0
    for number in range(1000):
        leases[number].release()
        await dispatcher.acquire(key=number % 50)
    assert Watched.num_looks <= 5 * 1000


class Share(float):
    """A share of a limit that counts how often it is compared."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        Share.num_comparisons += 1
        return float(self) == other

    def __lt__(self, other: float) -> bool:
        Share.num_comparisons += 1
        return float(self) < other

    __hash__ = float.__hash__


class CountedLimit(int):
    def __rtruediv__(self, num_inflight: int) -> Share:
        return Share(num_inflight / int(self))


async def comparisons_of(num_engines: int, num_samples: int, queued: bool) -> float:
    """For each sample: to free a slot and to give it to the next one, which waits for it already if ``queued``."""
    dispatcher = Dispatcher([Target(limit=CountedLimit(16)) for _ in range(num_engines)])
    num_held = 16 * num_engines if queued else 8 * num_engines
    leases = [await dispatcher.acquire(key=number // 8) for number in range(num_held)]
    tasks = [await waiting(dispatcher, key=number // 8) for number in range(num_samples if queued else 0)]
    Share.num_comparisons = 0
    for number in range(num_samples):
        leases[number].release()
        if not queued:
            await dispatcher.acquire(key=number // 8)
    assert dispatcher.num_queued == 0
    num_comparisons = Share.num_comparisons
    await asyncio.gather(*tasks)
    return num_comparisons / num_samples


@pytest.mark.parametrize("queued", [False, True], ids=["free", "queued"])
async def test_what_a_sample_costs_grows_with_the_logarithm_of_the_engines(queued: bool) -> None:
    costs = {num_engines: await comparisons_of(num_engines, 64, queued) for num_engines in (8, 64, 1024)}
    assert all(0 < cost <= 12 * math.log2(num_engines) for num_engines, cost in costs.items()), costs
    assert costs[1024] / costs[64] <= math.log2(1024) / math.log2(64)
