"""What a pool knows of its engines' base weights and adapter, and which syncs of an adapter it therefore refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.pool.adapter import Adapter
from sglrollout.pool.pool import Pool
from sglrollout.pool.sleep import sleep
from sglrollout.testing import ScriptedEngine
from sglrollout.weights.leader import Leader, PauseMode

pytestmark = pytest.mark.timeout(60)

ADAPTER = Adapter("default", Path("/nowhere"), {"r": 4})


class Engine(ScriptedEngine):
    """Notes which adapters it is told to load."""

    def __init__(self, name: str) -> None:
        super().__init__(name, memory_saver=True)
        self.num_adapters = 0

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        if name == "load_adapter":
            self.num_adapters += 1
            return {}
        return await super().command(name, timeout_s, **arguments)


@asynccontextmanager
async def running(count: int = 2) -> AsyncIterator[tuple[Pool, list[Engine]]]:
    engines = [Engine(f"engine-{i}") for i in range(count)]
    pool = Pool(engines, "auto", 100)
    async with anyio.create_task_group() as tasks:
        await pool.start(tasks)
        try:
            yield pool, engines
        finally:
            await pool.close()
            tasks.cancel_scope.cancel()


async def sync(pool: Pool, adapter: Adapter | None = None, mode: PauseMode = "retract", fails: bool = False) -> None:
    """What a weight syncer does to a pool: with an adapter alone, or with whole weights."""
    leader = Leader(pool, 10.0)
    with pool.exclusive("a weight sync"):
        leader.facts()
        await leader.pause(mode, anyio.Event())
        await leader.wake_weights()
        try:
            if adapter is not None:
                leader.refuse_to_change_adapter()
        except sr.WeightSyncError:
            await leader.call_off()
            raise
        leader.begin_to_move(pool.last_version + 1, is_lora=adapter is not None)
        if fails:
            await leader.spoil("a weight sync failed")
            return
        if adapter is not None:
            await leader.load_adapter(adapter)
        else:
            await leader.mend_adapters()
        await leader.wake_rest()
        await leader.resume(pool.last_version, flush=True)
        leader.publish(pool.last_version)


async def test_an_adapter_is_refused_where_the_base_model_was_given_up_in_a_sleep() -> None:
    async with running() as (pool, engines):
        await sync(pool, ADAPTER)
        await sleep(pool, ["weights"], 0.0, 10.0)
        with pytest.raises(sr.WeightSyncError, match="given up in a sleep"):
            await sync(pool, ADAPTER)
        assert [engine.num_adapters for engine in engines] == [1, 1]
        assert all(member.stale for member in pool.members)
        await sync(pool)
        await sync(pool, ADAPTER)
        assert not any(member.stale for member in pool.members)


async def test_a_sleep_that_keeps_the_base_model_is_no_hindrance() -> None:
    async with running() as (pool, engines):
        await sync(pool, ADAPTER)
        await sleep(pool, ["kv_cache"], 0.0, 10.0)
        await sync(pool, ADAPTER)
        assert [engine.num_adapters for engine in engines] == [2, 2]
        assert [member.asleep for member in pool.members] == [{}, {}]


async def test_an_adapter_is_refused_after_whole_weights_that_came_half_way_and_not_after_whole_ones() -> None:
    async with running() as (pool, engines):
        await sync(pool)
        await sync(pool, ADAPTER)
        await sync(pool, fails=True)
        with pytest.raises(sr.WeightSyncError, match="its base model may be wrong"):
            await sync(pool, ADAPTER)
        await sync(pool)
        await sync(pool, ADAPTER)
        assert [engine.num_adapters for engine in engines] == [2, 2]


async def test_an_adapter_that_came_half_way_may_be_tried_again_and_whole_weights_bring_the_one_before() -> None:
    async with running() as (pool, engines):
        await sync(pool, ADAPTER)
        await sync(pool, ADAPTER, fails=True)
        await sync(pool, ADAPTER)
        assert [engine.num_adapters for engine in engines] == [2, 2]
        await sync(pool)
        assert [engine.num_adapters for engine in engines] == [2, 2]  # which had the right one
        await sync(pool, ADAPTER, fails=True)
        await sync(pool)
        assert [engine.num_adapters for engine in engines] == [3, 3]
        assert not any(member.stale for member in pool.members)


async def test_folders_of_adapters_are_gone_with_the_pool() -> None:
    async with running() as (pool, _):
        folder = pool.adapters
        assert folder.is_dir()
        assert pool.adapters == folder
    assert not folder.exists()
