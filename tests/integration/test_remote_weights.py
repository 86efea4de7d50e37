"""Real SGLang HTTP servers, alone and beside a local engine, have the trainer's weights after a sync."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import sglrollout as sr
from tests.midway import again_if_too_late, refuse_if_too_late
from tests.reference import answers_like, trained
from tests.remote import RealServer, real_servers, until

pytestmark = pytest.mark.slow

BUCKET_BYTES = 1 << 15
LONG = sr.Sampling(temperature=0.0, max_new_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    log = tmp_path_factory.mktemp("servers") / "log"
    with real_servers(tiny_model, log, ["--api-key", "a-key"], []) as servers:
        yield servers


@pytest.fixture(scope="module")
async def pool(tiny_model: Path, servers: list[RealServer]) -> AsyncIterator[sr.AsyncRolloutEngine]:
    remote = [
        sr.RemoteEngine(servers[0].url, api_key="a-key", dead_after_s=6.0),
        sr.RemoteEngine(servers[1].url, dead_after_s=6.0),
    ]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_restarts": 20, "restart_delay_s": 0.1}
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=1, remote=remote, **options) as pool:
        yield pool


def syncer_of(pool: sr.AsyncRolloutEngine, model: Any, **options: Any) -> sr.WeightSyncer:
    return sr.WeightSyncer(pool, sr.ModuleSource(model), bucket_bytes=BUCKET_BYTES, **options)


async def test_servers_and_a_local_engine_answer_like_the_trainer_after_each_sync_and_not_before(
    pool: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    import torch

    model = trained(tiny_model, 1)
    assert not await answers_like(pool, model)
    async with syncer_of(pool, model) as syncer:
        report = await syncer.sync()
        assert (report.method, report.num_engines) == ("fast+broadcast", 3)
        assert report.num_buckets > 2
        assert await answers_like(pool, model)
        verified = await syncer.verify()
        assert (verified.num_engines, verified.num_remote) == (3, 2)
        assert verified.num_weights == report.num_tensors
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        assert not await answers_like(pool, model)
        again = await syncer.sync()
        assert (again.version, again.plan_s) == (report.version + 1, 0)
        assert await answers_like(pool, model)


@again_if_too_late
async def test_samples_that_run_in_a_server_go_on_under_the_new_weights_and_tell_which_token_had_which(
    pool: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    model = trained(tiny_model, 2)
    async with syncer_of(pool, model) as syncer:
        await syncer.sync()
        version = pool.weight_version
        task = asyncio.ensure_future(pool.generate(["The sky is"] * 6, sampling=LONG))
        await until(lambda: all(status.num_inflight for status in pool.engines))
        await anyio.sleep(0.5)
        refuse_if_too_late(task, await syncer.sync())
        completions = [group.completions[0] for group in await task]
    assert {completion.engine for completion in completions} == {"engine-0", "remote-0", "remote-1"}
    for completion in completions:
        assert [span.version for span in completion.weight_versions] == [version, version + 1]
        assert completion.weight_versions[-1].end == len(completion.token_ids) == 500


async def test_servers_read_weights_from_a_disk(pool: sr.AsyncRolloutEngine, tiny_model: Path, tmp_path: Path) -> None:
    model = trained(tiny_model, 3)
    async with syncer_of(pool, model, remote=sr.Disk(tmp_path)) as syncer:
        report = await syncer.sync()
        assert report.method == "fast+disk"
        assert await answers_like(pool, model)


async def test_a_server_without_a_copy_of_its_weights_is_refused_changes_before_anything_is_changed(
    pool: sr.AsyncRolloutEngine, tiny_model: Path, tmp_path: Path
) -> None:
    old, model = trained(tiny_model, 3), trained(tiny_model, 5)
    async with syncer_of(pool, old) as syncer:
        await syncer.sync()
    async with syncer_of(pool, model, remote=sr.Disk(tmp_path, delta=True)) as syncer:
        with pytest.raises(sr.ConfigError, match="remote-0 keeps no copy of its weights"):
            await syncer.sync()
    assert [status.state for status in pool.engines] == ["ready"] * 3
    assert await answers_like(pool, old)
    assert list(tmp_path.iterdir()) == []


async def test_a_sync_in_which_a_server_is_killed_goes_on_without_it(
    pool: sr.AsyncRolloutEngine, servers: list[RealServer], tiny_model: Path
) -> None:
    model = trained(tiny_model, 4)
    async with syncer_of(pool, model, timeout_s=10.0) as syncer:
        await syncer.sync()
        assert pool._pool is not None
        engine = pool._pool.members[2].engine
        command = engine.command

        async def kill_then(name: str, *arguments: Any, **named: Any) -> Any:
            if name == "receive_weights":
                servers[1].kill()
            return await command(name, *arguments, **named)

        engine.command = kill_then  # type: ignore[method-assign]
        with anyio.fail_after(60):
            report = await syncer.sync()
        engine.command = command  # type: ignore[method-assign]
        assert (report.num_engines, report.lost_engines) == (2, ("remote-1",))
        assert pool.engines[2].state == "restarting"
        assert [status.state for status in pool.engines[:2]] == ["ready", "ready"]
        groups = await pool.generate(["The sky is"] * 4, sampling=LONG.replace(max_new_tokens=16))
        assert {group.completions[0].engine for group in groups} == {"engine-0", "remote-0"}
        servers[1] = servers[1].again()
        await until(lambda: pool.engines[2].state == "stale", 120.0)
        await syncer.sync()
        assert await answers_like(pool, model)
