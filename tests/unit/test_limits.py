from __future__ import annotations

from typing import Literal

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sglrollout.pool.limits import Limit
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.messages import EngineInfo, Load

IDLE = Load(num_inflight=0, num_running=0, num_waiting=0, kv_usage=0.0, cache_hit_rate=0.0, tokens_per_s=0.0)


async def info(max_running: int) -> EngineInfo:
    return await ScriptedEngine(max_running=max_running).start()


async def limit_of(setting: int | Literal["auto"], max_running: int = 100) -> Limit:
    return Limit(setting, await info(max_running))


def load(**fields: float) -> Load:
    return msgspec.structs.replace(IDLE, **fields)


def busy(limit: Limit) -> Load:
    """All of the limit runs, and nothing waits."""
    return load(num_inflight=limit.value, num_running=limit.value, kv_usage=0.5)


async def test_a_fixed_limit_stays_whatever_the_engine_reports() -> None:
    limit = await limit_of(7)
    for report in (IDLE, load(num_waiting=1000, kv_usage=1.0), load(num_inflight=7, num_running=7)):
        limit.update(report)
        assert limit.value == 7


async def test_auto_starts_at_what_the_engine_can_run_at_once() -> None:
    assert (await limit_of("auto", 100)).value == 100


async def test_auto_has_a_start_where_the_engine_does_not_say() -> None:
    assert (await limit_of("auto", 0)).value > 0


STALLED = 9
"""Reports after which waiting counts as a stall: the first tells how many run, then eight show that no more come to."""


async def stall(limit: Limit, **fields: float) -> None:
    for step in range(STALLED):
        limit.update(load(tokens_per_s=step, **fields))


async def test_auto_backs_off_when_the_cache_is_nearly_full() -> None:
    limit = await limit_of("auto")
    limit.update(load(kv_usage=0.97, num_running=40))
    assert limit.value == 85


async def test_auto_backs_off_when_requests_keep_waiting_in_the_engine() -> None:
    limit = await limit_of("auto")
    await stall(limit, num_waiting=20, num_running=40)
    assert limit.value == 85


async def test_a_burst_that_is_being_prefilled_is_no_reason_to_back_off() -> None:
    limit = await limit_of("auto")
    for running in range(0, 100, 5):
        limit.update(load(num_waiting=100 - running, num_running=running))
    assert limit.value == 100


async def test_a_scheduler_that_publishes_nothing_for_a_while_is_no_reason_to_back_off() -> None:
    limit = await limit_of("auto")
    for _ in range(50):
        limit.update(load(num_waiting=20, num_running=40))
    assert limit.value == 100


async def test_auto_never_backs_off_below_what_runs() -> None:
    limit = await limit_of("auto")
    for _ in range(50):
        await stall(limit, num_waiting=20, num_running=60)
    assert limit.value == 60


async def test_auto_keeps_a_floor() -> None:
    limit = await limit_of("auto")
    for _ in range(50):
        await stall(limit, num_waiting=100, num_running=0)
    assert limit.value == 8


async def test_auto_tolerates_a_few_that_wait() -> None:
    limit = await limit_of("auto")
    await stall(limit, num_waiting=8, num_running=100)
    assert limit.value == 100


async def test_auto_grows_back_to_the_engines_own_number_while_it_is_in_use() -> None:
    limit = await limit_of("auto")
    await stall(limit, num_waiting=20, num_running=10)
    values = []
    for _ in range(20):
        limit.update(busy(limit))
        values.append(limit.value)
    assert values == sorted(values)
    assert values[0] == 89
    assert values[-1] == 100


async def test_auto_does_not_grow_while_it_is_not_in_use() -> None:
    limit = await limit_of("auto")
    await stall(limit, num_waiting=20, num_running=10)
    limit.update(load(num_inflight=84, num_running=84))
    assert limit.value == 85


async def test_auto_does_not_grow_while_the_cache_is_nearly_full() -> None:
    limit = await limit_of("auto")
    await stall(limit, num_waiting=20, num_running=10)
    limit.update(load(num_inflight=85, num_running=85, kv_usage=0.9))
    assert limit.value == 85


REPORTS = st.builds(
    Load,
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 300),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 9),
)


@given(st.integers(1, 200), st.lists(REPORTS, max_size=50))
async def test_auto_stays_between_one_and_the_engines_own_number(max_running: int, reports: list[Load]) -> None:
    limit = await limit_of("auto", max_running)
    for report in reports:
        limit.update(report)
        assert 1 <= limit.value <= max_running
