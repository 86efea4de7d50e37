"""Real SGLang HTTP servers beside a local engine in one pool: the same tokens, whatever befalls a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import sglrollout as sr
from tests.midway import TooLateError, again_if_too_late
from tests.remote import RealServer, real_servers, until

pytestmark = pytest.mark.slow

KEY = "a-key-of-this-test"
GREEDY = sr.Sampling(temperature=0, max_new_tokens=60, ignore_eos=True)
LONG = GREEDY.replace(max_new_tokens=200)
ENDLESS = GREEDY.replace(max_new_tokens=1900)
PROMPTS = [f"{i} bottles of milk on the wall" for i in range(6)]


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    """One as it is by default, with a key, and one whose streams bring new tokens alone."""
    log = tmp_path_factory.mktemp("servers") / "log"
    with real_servers(tiny_model, log, ["--api-key", KEY], ["--incremental-streaming-output"]) as servers:
        yield servers


@pytest.fixture(scope="module")
async def pool(tiny_model: Path, servers: list[RealServer]) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """A local engine, and both servers, which come up beside it."""
    remote = [
        sr.RemoteEngine(servers[0].url, api_key=KEY, dead_after_s=6.0),
        sr.RemoteEngine(servers[1].url, dead_after_s=6.0),
    ]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_restarts": 20, "restart_delay_s": 0.1}
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=1, remote=remote, **options) as pool:
        yield pool


def engine_of(pool: sr.AsyncRolloutEngine, index: int) -> Any:
    assert pool._pool is not None
    return pool._pool.members[index].engine


async def by_engine(pool: sr.AsyncRolloutEngine, sampling: sr.Sampling = GREEDY) -> dict[str, sr.Completion]:
    """One completion of the first prompt of each engine."""
    groups = await pool.generate([PROMPTS[0]] * 6, sampling=sampling)
    return {group.completions[0].engine: group.completions[0] for group in groups}


async def test_servers_say_what_a_local_engine_says_with_and_without_streaming(pool: sr.AsyncRolloutEngine) -> None:
    found = await by_engine(pool)
    assert set(found) == {"engine-0", "remote-0", "remote-1"}
    local = found["engine-0"]
    for completion in found.values():
        assert completion.token_ids == local.token_ids
        assert completion.logprobs == pytest.approx(local.logprobs, abs=1e-3)
        assert completion.text == local.text
        assert (completion.finish_reason, completion.weight_versions) == ("length", ((0, 0, 60),))
    streams = [pool.stream(PROMPTS[0], GREEDY, chunk_tokens=8) for _ in range(6)]

    async def read(stream: sr.Stream) -> tuple[list[int], str]:
        chunks = [chunk async for chunk in stream]
        assert max(len(chunk.token_ids) for chunk in chunks) <= 8
        return [token for chunk in chunks for token in chunk.token_ids], "".join(chunk.text for chunk in chunks)

    for tokens, text in await asyncio.gather(*map(read, streams)):
        assert (tuple(tokens), text) == (local.token_ids, local.text)
    assert {stream.completion.engine for stream in streams} == set(found)
    assert all(stream.completion.logprobs == pytest.approx(local.logprobs, abs=1e-3) for stream in streams)


async def test_stop_strings_and_tokens_end_a_completion_as_they_do_locally(pool: sr.AsyncRolloutEngine) -> None:
    whole = (await by_engine(pool))["engine-0"]
    token = next(token for token in whole.token_ids if token != whole.token_ids[0])
    text = pool.tokenizer.decode([token])
    for options in ({"stop": [text]}, {"stop_token_ids": [token]}):
        found = await by_engine(pool, sr.Sampling(temperature=0, max_new_tokens=60, **options))
        assert set(found) == {"engine-0", "remote-0", "remote-1"}
        ends = {(c.token_ids, c.finish_reason, c.stop_match, c.text) for c in found.values()}
        assert len(ends) == 1
        assert next(iter(ends))[1] == "stop"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_cancelled_sample_frees_the_servers_slot(
    pool: sr.AsyncRolloutEngine, servers: list[RealServer], streams: bool
) -> None:
    async def ask() -> None:
        if streams:
            async for _ in pool.stream(PROMPTS[0], ENDLESS):
                pass
        else:
            await pool.generate([PROMPTS[0]], sampling=ENDLESS)

    async with anyio.create_task_group() as samples:
        for _ in range(6):
            samples.start_soon(ask)
        with anyio.fail_after(30):
            while not (await servers[0].num_running(KEY) and await servers[1].num_running(KEY)):
                await anyio.sleep(0.02)
        samples.cancel_scope.cancel()
    assert not any(status.num_inflight for status in pool.engines)
    with anyio.fail_after(3):  # SGLang by itself looks for clients that are gone every 4 s
        while await servers[0].num_running(KEY) + await servers[1].num_running(KEY):
            await anyio.sleep(0.05)


async def read(stream: sr.Stream) -> sr.Completion:
    """What it says in its chunks, which must be what its completion says."""
    chunks = [chunk async for chunk in stream]
    completion = stream.completion
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == completion.token_ids
    assert len(completion.logprobs or ()) == len(completion.token_ids)
    return completion


@pytest.mark.parametrize("index", [1, 2])
async def test_tokens_know_the_version_that_a_pause_put_between_them(pool: sr.AsyncRolloutEngine, index: int) -> None:
    whole = (await by_engine(pool, LONG))["engine-0"].token_ids
    engine = engine_of(pool, index)
    before = engine.num_outputs
    tasks = [asyncio.ensure_future(read(pool.stream(PROMPTS[0], LONG, chunk_tokens=4))) for _ in range(6)]
    plain = asyncio.ensure_future(by_engine(pool, LONG))
    await until(lambda: engine.num_outputs > before + 8)
    await engine.command("pause", 10.0, mode="retract")
    await engine.command("resume", 10.0, version=7, flush=True)
    completions = [*await asyncio.gather(*tasks), *(await plain).values()]
    assert all(completion.token_ids == whole for completion in completions)
    mine = [completion for completion in completions if completion.engine == engine.name]
    for completion in mine:
        spans = completion.weight_versions
        assert [span.version for span in spans] in ([0, 7], [7])
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(whole)
    assert any(len(completion.weight_versions) == 2 for completion in mine)
    await engine.command("resume", 10.0, version=0, flush=False)


@pytest.mark.parametrize("index", [1, 2])
@again_if_too_late
async def test_an_abort_by_a_pause_gives_the_tokens_so_far(pool: sr.AsyncRolloutEngine, index: int) -> None:
    whole = (await by_engine(pool, ENDLESS.replace(max_new_tokens=400)))["engine-0"].token_ids
    engine = engine_of(pool, index)
    before = engine.num_outputs
    sampling = ENDLESS.replace(max_new_tokens=400)
    tasks = [asyncio.ensure_future(read(pool.stream(PROMPTS[0], sampling, chunk_tokens=4))) for _ in range(6)]
    await until(lambda: engine.num_outputs > before + 8)
    await engine.command("pause", 10.0, mode="abort")
    await engine.command("resume", 10.0, version=0, flush=True)
    completions = await asyncio.gather(*tasks)
    cut = [completion for completion in completions if completion.finish_reason == "abort"]
    if not cut:
        raise TooLateError(completions)
    assert {completion.engine for completion in cut} == {engine.name}
    for completion in cut:
        assert completion.token_ids == whole[: len(completion.token_ids)]
    assert all(completion.token_ids == whole for completion in completions if completion not in cut)


async def test_a_wrong_key_is_refused_at_the_start(tiny_model: Path, servers: list[RealServer]) -> None:
    await servers[0].ready()
    remote = [sr.RemoteEngine(servers[0].url, api_key="another-key")]
    with pytest.raises(sr.EngineStartError, match="it refuses the api_key that it was given") as caught:
        async with sr.AsyncRolloutEngine(tiny_model, num_engines=0, remote=remote):
            pass
    assert "another-key" not in str(caught.value)


async def under_load(pool: sr.AsyncRolloutEngine, victim: int, blow: Any) -> None:
    """Break one engine under load: every sample ends, with the tokens of a quiet pool."""
    quiet = [group.completions[0].token_ids for group in await pool.generate(PROMPTS, sampling=LONG)]
    task = asyncio.ensure_future(pool.generate(PROMPTS, n=2, sampling=LONG))
    await until(lambda: pool.engines[victim].num_inflight)
    stream = pool.stream(PROMPTS[0], LONG, chunk_tokens=1)
    first = [*(await anext(stream)).token_ids]
    blow()
    with anyio.fail_after(100):
        rest = [token async for chunk in stream for token in chunk.token_ids]
        groups = await task
    assert (*first, *rest) == stream.completion.token_ids == quiet[0]
    for group, expected in zip(groups, quiet, strict=True):
        for completion in group.completions:
            assert completion.token_ids == expected
            assert len(completion.logprobs or ()) == len(expected)
    assert not any(status.num_inflight for status in pool.engines)


async def test_a_server_that_is_stopped_under_load_loses_no_token_and_serves_again_once_it_goes_on(
    pool: sr.AsyncRolloutEngine, servers: list[RealServer]
) -> None:
    await under_load(pool, 2, lambda: servers[1].signal(signal.SIGSTOP))
    await until(lambda: pool.engines[2].state == "restarting")
    servers[1].signal(signal.SIGCONT)
    await until(lambda: pool.engines[2].state == "ready")
    with anyio.fail_after(10):  # what it ran of its former life is dropped
        while await servers[1].num_running(KEY):
            await anyio.sleep(0.05)
    assert "remote-1" in await by_engine(pool)


async def test_a_server_that_is_killed_under_load_loses_no_token_and_is_stale_when_it_comes_back(
    pool: sr.AsyncRolloutEngine, servers: list[RealServer]
) -> None:
    assert pool._pool is not None
    await under_load(pool, 1, servers[0].kill)
    await until(lambda: pool.engines[1].state == "restarting")
    pool._pool.weight_version = pool._pool.last_version = 1  # as a sync does that went on without it
    servers[0] = servers[0].again()
    await until(lambda: pool.engines[1].state == "stale", within_s=120)
    assert "remote-0" not in await by_engine(pool)
    pool._pool.weight_version = pool._pool.last_version = 0
