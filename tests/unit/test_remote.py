"""Remote engines over a scripted HTTP server, and what becomes of samples when it, or the way to it, breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import sglrollout as sr
from tests.remote import Exchange, Fault, ScriptedRouter, ScriptedServer, continued, rollout_of, until

PROMPT = [5, 6, 7]
SHORT = sr.Sampling(max_new_tokens=20)
LONG = sr.Sampling(max_new_tokens=200)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


@pytest.fixture
async def other() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


def engine_of(rollout: sr.AsyncRolloutEngine, index: int = 0) -> Any:
    assert rollout._pool is not None
    return rollout._pool.members[index].engine


async def one(rollout: sr.AsyncRolloutEngine, sampling: sr.Sampling = SHORT) -> sr.Completion:
    (group,) = await rollout.generate([PROMPT], sampling=sampling)
    return group.completions[0]


def check(completion: sr.Completion, num_tokens: int = 20) -> None:
    """It is whole, and each logprob is of its token."""
    assert completion.token_ids == continued(PROMPT, num_tokens)
    assert completion.logprobs == tuple(-token / 100 for token in completion.token_ids)
    assert completion.finish_reason == "length"
    assert completion.weight_versions[-1].end == num_tokens


# ------------------------------------------------------------ options

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"url": "10.0.0.2:30000"}, "remote.url must be scheme, host and port"),
    ({"url": "ftp://10.0.0.2"}, "remote.url must be scheme, host and port"),
    ({"url": "http://"}, "remote.url must be scheme, host and port"),
    ({"url": "http://host:port"}, "remote.url must be scheme, host and port"),
    ({"url": "http://host:30000/v1"}, "without a path"),
    ({"url": "http://host?a=b"}, "without a path"),
    ({"url": 30000}, "remote.url must be scheme, host and port"),
    ({"api_key": 5}, "remote.api_key must be a text, got 'int'"),
    ({"api_key": "secret\r\nx: y"}, "remote.api_key must be printable ASCII"),
    ({"admin_api_key": ""}, "remote.admin_api_key must be printable ASCII"),
    ({"name": " "}, "remote.name must be a text that is not empty"),
    ({"dead_after_s": 0}, "remote.dead_after_s must be a number of seconds greater than 0"),
    ({"idle_timeout_s": "1"}, "remote.idle_timeout_s must be a number of seconds greater than 0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        sr.RemoteEngine(**{"url": "http://host:30000", **options})
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(sr.ConfigError, match="give its key as api_key") as caught:
        sr.RemoteEngine("http://me:secret@host:30000")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", [sr.AsyncRolloutEngine, sr.RolloutEngine])
def test_engines_that_cannot_be_a_pool_are_refused(kind: Any, tiny_model: Path) -> None:
    def remote(url: str = "http://host:1", **options: Any) -> sr.RemoteEngine:
        return sr.RemoteEngine(url, **options)

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(sr.ConfigError, match=message):
            kind(tiny_model, **options)

    refused("num_engines must be at least 1 where no remote engines are given", num_engines=0)
    refused("remote.url must not be given twice", remote=[remote(), remote("http://host:1/")])
    refused("remote.name must not be given twice", remote=[remote(name="a"), remote("http://b", name="a")])
    refused('must not begin with "engine-"', remote=[remote(name="engine-0")])
    refused("remote must be a list of sglrollout.RemoteEngine", remote=["http://host:1"])
    refused("remote must be a list of sglrollout.RemoteEngine", remote=remote())


def test_an_engine_is_of_one_rollout(tiny_model: Path) -> None:
    engine = sr.RemoteEngine("http://host:1")
    sr.AsyncRolloutEngine(tiny_model, num_engines=0, remote=[engine])
    with pytest.raises(sr.ConfigError, match="is given to a second one"):
        sr.AsyncRolloutEngine(tiny_model, num_engines=0, remote=[engine])


# ------------------------------------------------------------ generation


@pytest.mark.parametrize("incremental", [False, True])
async def test_tokens_logprobs_and_versions_come_out(tiny_model: Path, incremental: bool) -> None:
    async with ScriptedServer(incremental=incremental) as server, rollout_of(tiny_model, server) as rollout:
        completion = await one(rollout)
        check(completion)
        assert completion.engine == "remote-0"
        assert completion.cached_tokens == 1
        stream = rollout.stream(PROMPT, SHORT, chunk_tokens=4)
        chunks = [chunk async for chunk in stream]
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == completion.token_ids
        assert len(chunks) == 6
        check(stream.completion)
        (plain,) = await rollout.generate([PROMPT], sampling=SHORT.replace(logprobs=False))
        assert plain.completions[0].logprobs is None
        assert plain.completions[0].token_ids == completion.token_ids
        assert not server.running


async def test_ids_are_of_one_width_and_begin_alike_in_no_two_engines(server: ScriptedServer, tiny_model: Path) -> None:
    async with rollout_of(tiny_model, server) as rollout:
        await rollout.generate([PROMPT] * 20, sampling=SHORT)
        prefix = engine_of(rollout)._prefix
    rids = [body["rid"] for path, body in zip(server.told, server.bodies, strict=True) if path == "/generate"]
    assert len(set(rids)) == 20
    assert {len(rid) for rid in rids} == {32}
    assert all(rid.startswith(prefix) for rid in rids)
    assert sr.RemoteEngine(server.url)._prefix != prefix


async def test_options_are_sent_under_sglangs_names(server: ScriptedServer, tiny_model: Path) -> None:
    server.info = {"enable_deterministic_inference": True}
    async with rollout_of(tiny_model, server) as rollout:
        await one(rollout, SHORT.replace(seed=7, top_k=3, logprobs=False))
        (body,) = (body for path, body in zip(server.told, server.bodies, strict=True) if path == "/generate")
    assert body["sampling_params"] == {"max_new_tokens": 20, "sampling_seed": 7, "top_k": 3}
    assert (body["return_logprob"], body["stream"], body["input_ids"]) == (False, False, PROMPT)


async def test_tokens_of_a_sync_in_the_middle_have_their_own_versions(tiny_model: Path) -> None:
    """Also those that were streamed with the label of the moment: the final account is right."""
    async with ScriptedServer(token_s=0.005) as server, rollout_of(tiny_model, server) as rollout:
        engine = engine_of(rollout)
        stream = rollout.stream(PROMPT, LONG, chunk_tokens=16)
        plain = asyncio.ensure_future(one(rollout, LONG))
        await anext(stream)
        await engine.command("pause", 5.0, mode="in_place")
        await anyio.sleep(0.05)
        await engine.command("resume", 5.0, version=1, flush=False)
        _ = [chunk async for chunk in stream]
        for completion in (stream.completion, await plain):
            check(completion, 200)
            assert [span.version for span in completion.weight_versions] == [0, 1]
            assert [span.start for span in completion.weight_versions] == [0, completion.weight_versions[0].end]


async def test_a_sample_that_is_cancelled_is_dropped_by_the_server(tiny_model: Path) -> None:
    async with ScriptedServer(token_s=0.05) as server, rollout_of(tiny_model, server) as rollout:
        for streams in (True, False):
            with anyio.move_on_after(0.3):
                if streams:
                    _ = [chunk async for chunk in rollout.stream(PROMPT, LONG)]
                else:
                    await one(rollout, LONG)
            await until(lambda: not server.running)
            assert not any(status.num_inflight for status in rollout.engines)
        assert len(set(server.aborted)) == 2


async def test_closing_drops_what_runs_and_leaves_the_server_alone(tiny_model: Path) -> None:
    async with ScriptedServer(token_s=0.05) as server:
        async with rollout_of(tiny_model, server) as rollout:
            task = asyncio.ensure_future(rollout.generate([PROMPT] * 5, sampling=LONG))
            await until(lambda: len(server.running) == 5)
        assert not server.running
        assert len(server.aborted) == 5
        with pytest.raises(sr.LifecycleError):
            await task


async def test_a_bad_request_fails_with_the_servers_words(server: ScriptedServer, tiny_model: Path) -> None:
    async def refuse(exchange: Exchange) -> None:
        message = {"error": {"message": "temperature must be nice", "code": 400}}
        if exchange.body["stream"]:
            await exchange.begin_stream()
            await exchange.event(message)
            await exchange.end_stream()
        else:
            await exchange.answer(message, 400)

    server.faults["/generate"] = refuse
    async with rollout_of(tiny_model, server) as rollout:
        with pytest.raises(sr.EngineRequestError, match="temperature must be nice"):
            await one(rollout)
        with pytest.raises(sr.EngineRequestError, match="temperature must be nice"):
            _ = [chunk async for chunk in rollout.stream(PROMPT, SHORT)]
        assert server.told.count("/generate") == 2


async def test_a_logprob_of_another_token_is_an_error(server: ScriptedServer, tiny_model: Path) -> None:
    async def mispair(exchange: Exchange) -> None:
        answer = server.part("x", [4, 5], 2, True, [])
        answer["meta_info"]["output_token_logprobs"][1][1] = 6
        await exchange.answer(answer)

    server.faults["/generate"] = mispair
    async with rollout_of(tiny_model, server) as rollout:
        with pytest.raises(sr.EngineRequestError, match="paired a logprob with another token"):
            await one(rollout)


# ------------------------------------------------------------ faults on the way


async def gateway(exchange: Exchange) -> None:
    await exchange.answer(b"<html>502 Bad Gateway</html>", 502)


async def reset(exchange: Exchange) -> None:
    exchange.cut()


async def reset_in_the_middle(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.piece(b'data: {"output_ids": [')
    exchange.cut()


async def garbage(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event(b"\xff\x00 no JSON")
    await exchange.end_stream()


async def no_events(exchange: Exchange) -> None:
    await exchange.answer(b"<html>all is well</html>")


async def truncated(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event(ScriptedServer().part("x", continued(PROMPT, 2), 2, False, []))
    await exchange.say(b"0\r\n\r\n")


async def slow_loris(exchange: Exchange) -> None:
    """Bytes for ever, and never an event."""
    await exchange.begin_stream()
    await exchange.event(ScriptedServer().part("x", continued(PROMPT, 1), 1, False, []))
    while True:
        await exchange.piece(b" ")
        await asyncio.sleep(0.02)


async def half_open(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event(ScriptedServer().part("x", continued(PROMPT, 1), 1, False, []))
    await asyncio.sleep(3600)


FAULTS = [gateway, reset, reset_in_the_middle, garbage, no_events, truncated, slow_loris, half_open]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_sample_whose_answer_breaks_goes_on_elsewhere(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path, fault: Any
) -> None:
    server.faults["/generate"] = fault
    options = {"remote": {"idle_timeout_s": 0.3}, "max_restarts": 0}
    async with rollout_of(tiny_model, server, other, **options) as rollout:
        stream = rollout.stream(PROMPT, SHORT, chunk_tokens=1)
        with anyio.fail_after(20):
            tokens = [token async for chunk in stream for token in chunk.token_ids]
        assert tuple(tokens) == continued(PROMPT, 20)
        check(stream.completion)
        assert stream.completion.engine == "remote-1"
        assert not any(status.num_inflight for status in rollout.engines)


async def huge(exchange: Exchange) -> None:
    await exchange.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(80):
        await exchange.piece(b" " * (1 << 20))
    await exchange.say(b"0\r\n\r\n")


@pytest.mark.parametrize("fault", [gateway, reset, no_events, huge], ids=lambda fault: fault.__name__)
async def test_a_server_that_breaks_every_request_is_taken_for_dead_though_it_answers_probes(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path, fault: Any
) -> None:
    server.faults["/generate"] = fault
    async with rollout_of(tiny_model, server, other, max_restarts=0, max_inflight=2) as rollout:
        groups = await rollout.generate([PROMPT] * 20, sampling=SHORT)
        for group in groups:
            check(group.completions[0])
        await until(lambda: rollout.engines[0].state == "dead" or server.told.count("/generate") < 3)
        assert rollout.engines[1].state == "ready"


async def test_a_sample_that_finds_nothing_but_broken_gateways_fails_with_what_they_said(
    server: ScriptedServer, tiny_model: Path
) -> None:
    server.faults["/generate"] = gateway
    async with rollout_of(tiny_model, server, max_restarts=0, max_failovers=1) as rollout:
        with pytest.raises(sr.EngineConnectionError, match="502 Bad Gateway"):
            await one(rollout)
        assert rollout.engines[0].state == "ready"
        del server.faults["/generate"]
        check(await one(rollout))


async def test_without_failover_a_connection_that_breaks_is_an_error(server: ScriptedServer, tiny_model: Path) -> None:
    server.faults["/generate"] = reset
    async with rollout_of(tiny_model, server, failover="none") as rollout:
        with pytest.raises(sr.EngineConnectionError, match="remote-0"):
            await one(rollout)


async def test_what_a_server_says_is_quoted_in_part(server: ScriptedServer, tiny_model: Path) -> None:
    async def shout(exchange: Exchange) -> None:
        await exchange.answer(b"x" * 1_000_000, 400)

    server.faults["/generate"] = shout
    async with rollout_of(tiny_model, server) as rollout:
        with pytest.raises(sr.EngineRequestError) as caught:
            await one(rollout)
        assert 400 < len(str(caught.value)) < 700


async def test_a_pause_does_not_count_as_idle(tiny_model: Path) -> None:
    options = {"idle_timeout_s": 1.0}
    async with ScriptedServer(token_s=0.01) as server, rollout_of(tiny_model, server, remote=options) as rollout:
        stream = rollout.stream(PROMPT, LONG, chunk_tokens=1)
        await anext(stream)
        await engine_of(rollout).command("pause", 5.0, mode="in_place")
        await anyio.sleep(2.5)
        await engine_of(rollout).command("resume", 5.0, version=0, flush=False)
        _ = [chunk async for chunk in stream]
        check(stream.completion, 200)
        assert rollout.metrics().engines[0].num_restarts == 0
        assert server.told.count("/generate") == 1


# ------------------------------------------------------------ life


@pytest.mark.parametrize("incremental", [False, True])
async def test_samples_of_a_server_that_dies_go_on_in_another(tiny_model: Path, incremental: bool) -> None:
    options: dict[str, Any] = {"incremental": incremental, "token_s": 0.005}
    async with (
        ScriptedServer(**options) as server,
        ScriptedServer(**options) as other,
        rollout_of(tiny_model, server, other, max_restarts=0) as rollout,
    ):
        task = asyncio.ensure_future(rollout.generate([PROMPT] * 10, sampling=LONG))
        stream = rollout.stream(PROMPT, LONG, chunk_tokens=1)
        tokens = [*(await anext(stream)).token_ids]
        await until(lambda: len(server.running) > 3)
        await anyio.sleep(0.3)
        await server.close()
        for group in await task:
            check(group.completions[0], 200)
        async for chunk in stream:
            tokens += chunk.token_ids
        check(stream.completion, 200)
        assert tuple(tokens) == stream.completion.token_ids
        await until(lambda: rollout.engines[0].state == "dead")
        assert not any(status.num_inflight for status in rollout.engines)
        await server.open()  # for its own end


async def test_a_server_that_comes_back_serves_again(server: ScriptedServer, tiny_model: Path) -> None:
    async with rollout_of(tiny_model, server) as rollout:
        await server.close()
        await until(lambda: rollout.engines[0].state == "restarting")
        task = asyncio.ensure_future(one(rollout))
        await server.open()
        check(await task)
        assert rollout.engines[0].num_restarts == 1


async def test_a_server_that_comes_back_with_other_weights_is_stale_until_a_sync(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rollout_of(tiny_model, server, other) as rollout:
        pool = rollout._pool
        assert pool is not None
        for engine in (engine_of(rollout, 0), engine_of(rollout, 1)):
            await engine.command("pause", 5.0, mode="retract")
            await engine.command("resume", 5.0, version=1, flush=True)
        pool.weight_version = pool.last_version = 1
        await server.close()
        await until(lambda: rollout.engines[0].state == "restarting")
        server.label = "default"
        with caplog.at_level(logging.WARNING):
            await server.open()
            await until(lambda: rollout.engines[0].state == "stale")
        assert "stale until the next sync" in caplog.text
        assert (await one(rollout)).engine == "remote-1"
        await other.close()  # this one goes on with what it had
        await until(lambda: rollout.engines[1].state == "restarting")
        await other.open()
        await until(lambda: rollout.engines[1].state == "ready")


async def test_a_server_that_is_restarted_unseen_is_noticed_by_its_version(
    server: ScriptedServer, tiny_model: Path
) -> None:
    server.label = "3"
    async with rollout_of(tiny_model, server) as rollout:
        assert rollout.weight_version == 3
        server.label = "default"
        engine_of(rollout)._health._num_looks = 7
        await until(lambda: rollout.engines[0].state == "stale")


async def test_a_server_that_answers_nothing_is_taken_for_dead(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path
) -> None:
    async def nothing(exchange: Exchange) -> None:
        await asyncio.sleep(3600)

    async with rollout_of(tiny_model, server, other, remote={"dead_after_s": 0.6}, max_restarts=0) as rollout:
        for path in ("/generate", "/v1/loads", "/abort_request"):
            server.faults[path] = nothing
        groups = await rollout.generate([PROMPT] * 4, sampling=SHORT)
        assert {group.completions[0].engine for group in groups} == {"remote-1"}
        assert rollout.engines[0].state == "dead"


async def test_a_failed_probe_is_not_the_end(server: ScriptedServer, tiny_model: Path) -> None:
    num_failures = 0

    async def fail_twice(exchange: Exchange) -> None:
        nonlocal num_failures
        num_failures += 1
        if num_failures == 2:
            del server.faults["/v1/loads"]
        await gateway(exchange)

    async with rollout_of(tiny_model, server, remote={"dead_after_s": 0.6}) as rollout:
        server.faults["/v1/loads"] = fail_twice
        await until(lambda: num_failures == 2)
        probes = server.num_probes
        await until(lambda: server.num_probes > probes + 1)
        check(await one(rollout))
        assert rollout.engines[0].num_restarts == 0


async def test_a_start_waits_until_the_server_is_there(tiny_model: Path) -> None:
    async with ScriptedServer() as server:
        pass

    async def open_later() -> None:
        await anyio.sleep(0.5)
        await server.open()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_later)
        async with rollout_of(tiny_model, server) as rollout:
            check(await one(rollout))
    await server.close()


async def test_a_server_that_never_comes_is_an_error_that_says_what_was_seen(tiny_model: Path) -> None:
    async with ScriptedServer() as server:
        pass
    with pytest.raises(sr.EngineStartError, match=r"start_timeout_s=0.5 s .*ConnectError"):
        async with rollout_of(tiny_model, server, start_timeout_s=0.5):
            pass


async def test_a_wrong_key_is_refused_at_the_start_and_shown_nowhere(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer(api_key="right-key") as server:
        for key in ("wrong-key", None):
            with pytest.raises(sr.EngineStartError, match="it refuses the api_key") as caught:
                async with rollout_of(tiny_model, server, remote={"api_key": key}):
                    pass
            assert "wrong-key" not in f"{caught.value!r}{caught.value.__cause__!r}{caplog.text}"
        with caplog.at_level(logging.DEBUG):
            async with rollout_of(tiny_model, server, remote={"api_key": "right-key"}) as rollout:
                check(await one(rollout))
                server.api_key = "new-key"
                with pytest.raises((sr.EngineRequestError, sr.NoEngineError, sr.EngineDiedError)) as late:
                    await one(rollout)
                assert "right-key" not in f"{late.value}{engine_of(rollout)!r}{vars(rollout)!r}{caplog.text}"


async def test_the_admin_key_goes_to_what_a_server_is_told_and_nowhere_else(
    server: ScriptedServer, tiny_model: Path
) -> None:
    seen: dict[str, str] = {}
    handle = server._handle

    async def note(exchange: Exchange, reader: asyncio.StreamReader) -> None:
        seen[exchange.path] = exchange.headers.get("authorization", "").removeprefix("Bearer ")
        await handle(exchange, reader)

    server._handle = note  # type: ignore[method-assign]
    async with rollout_of(tiny_model, server, remote={"api_key": "key", "admin_api_key": "admin"}) as rollout:
        await one(rollout)
        await engine_of(rollout).command("flush_cache", 1.0)
        await engine_of(rollout).command("parse_tool_calls", 1.0, text="x", tools=[], parser="hermes")
    admin = {path for path, key in seen.items() if key == "admin"}
    assert admin == {"/continue_generation", "/flush_cache"}
    assert {seen[path] for path in seen.keys() - admin} == {"key"}


UNSUITABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"version": "0.4.9"}, {}, r"it runs SGLang 0.4.9; this library supports 0.5.17 to 0.5.23"),
    ({"dp_size": 2}, {}, "dp_size=2"),
    ({"disaggregation_mode": "prefill"}, {}, "disaggregation_mode='prefill'"),
    ({}, {"is_generation": False}, "which does not generate"),
    ({}, {"architectures": ["LlamaForCausalLM"]}, "a LlamaForCausalLM; the rollout's is a Qwen3ForCausalLM"),
]


@pytest.mark.parametrize(("info", "model", "message"), UNSUITABLE)
async def test_a_server_that_cannot_be_an_engine_is_refused(
    server: ScriptedServer, tiny_model: Path, info: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    server.info, server.model = info, model
    with pytest.raises(sr.EngineStartError, match=message):
        async with rollout_of(tiny_model, server):
            pass


async def test_what_is_no_sglang_server_is_refused_at_once(server: ScriptedServer, tiny_model: Path) -> None:
    server.faults["/server_info"] = no_events
    with pytest.raises(sr.EngineStartError, match="not that of an SGLang server"):
        async with rollout_of(tiny_model, server):
            pass


# ------------------------------------------------------------ mixed pools and versions


async def test_a_request_may_rely_on_what_all_engines_of_a_pool_can(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path
) -> None:
    other.info = {"max_req_input_len": 50, "skip_tokenizer_init": True}
    async with rollout_of(tiny_model, server, other) as rollout:
        assert rollout._ready is not None
        sampler = rollout._ready.sampler
        assert sampler.info.max_prompt_tokens == 50
        assert sampler.room(50) == 0
        with pytest.raises(sr.ConfigError, match="needs a tokenizer in the engine"):
            await one(rollout, SHORT.replace(stop=["x"]))


@pytest.mark.parametrize(
    ("labels", "version", "states"),
    [
        (["default", "default"], 0, ["ready", "ready"]),
        (["7", "7"], 7, ["ready", "ready"]),
        (["my-checkpoint", "default"], 0, ["ready", "ready"]),
        (["7", "default"], 7, ["ready", "stale"]),
        (["sglrollout-loading", "7"], 7, ["stale", "ready"]),
    ],
)
async def test_weights_that_are_not_the_pools_are_stale_from_the_start(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path, labels: list[str], version: int, states: list[str]
) -> None:
    server.label, other.label = labels
    async with rollout_of(tiny_model, server, other) as rollout:
        assert rollout.weight_version == version
        assert [status.state for status in rollout.engines] == states


async def test_local_weights_are_the_pools_and_a_remote_engine_with_others_is_stale(
    server: ScriptedServer, tiny_model: Path
) -> None:
    server.label = "7"
    local = sr.testing.ScriptedEngine("engine-0", vocab_size=512)  # type: ignore[attr-defined]
    args: Any = {"engine_args": {"skip_tokenizer_init": True}, "progress": False}
    remote = [sr.RemoteEngine(server.url)]
    async with sr.AsyncRolloutEngine(tiny_model, engines=[local], remote=remote, **args) as rollout:
        assert rollout.weight_version == 0
        assert [(status.name, status.state) for status in rollout.engines] == [
            ("engine-0", "ready"),
            ("remote-0", "stale"),
        ]


# ------------------------------------------------------------ commands


async def test_a_sync_through_commands_is_told_in_the_order_that_sglang_needs(
    server: ScriptedServer, tiny_model: Path
) -> None:
    async with rollout_of(tiny_model, server) as rollout:
        engine = engine_of(rollout)
        server.told.clear()
        server.bodies.clear()
        group = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
        await engine.command("init_group", 1.0, **group, backend="nccl")
        assert await engine.command("pause", 1.0, mode="retract") == {"attached": False}
        await engine.command("begin_update", 1.0)
        assert server.label == "sglrollout-loading"
        await engine.command("receive_weights", 1.0, names=["a"], dtypes=["float32"], shapes=[[1]], group_name="g")
        await engine.command("end_update", 1.0)
        answer = await engine.command("resume", 1.0, version=3, flush=True)
        assert set(answer["ranks"][0]) == {"flush_s", "resume_s"}
        assert server.queries["/flush_cache"] == ""  # SGLang would wait for the paused requests to end
        await engine.command("flush_cache", 1.0)
        assert server.queries["/flush_cache"] == "timeout=1.0"
        await engine.command("destroy_group", 1.0, group_name="g")
        told = [path for path in server.told if path != "/model_info"]
        assert told == [
            *("/init_weights_update_group", "/pause_generation", "/update_weight_version", "/begin_weight_update"),
            *("/update_weights_from_distributed", "/end_weight_update", "/update_weight_version", "/flush_cache"),
            *("/continue_generation", "/flush_cache", "/destroy_weights_update_group"),
        ]
        bodies = dict(zip(server.told, server.bodies, strict=True))
        assert bodies["/init_weights_update_group"] == {**group, "backend": "nccl"}
        assert bodies["/update_weights_from_distributed"]["flush_cache"] is False
        assert bodies["/update_weights_from_distributed"]["abort_all_requests"] is False
        assert bodies["/update_weight_version"] == {"new_version": "3", "abort_all_requests": False}
        assert (await one(rollout)).weight_versions[0].version == 3


async def test_an_update_that_a_former_trainer_left_open_gives_way_to_a_new_one(
    server: ScriptedServer, tiny_model: Path
) -> None:
    server.is_updating = True
    async with rollout_of(tiny_model, server) as rollout:
        engine = engine_of(rollout)
        await engine.command("begin_update", 1.0)
        assert server.is_updating
        await engine.command("end_update", 1.0)
        assert not server.is_updating


async def test_an_update_that_cannot_begin_says_why(server: ScriptedServer, tiny_model: Path) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer({"success": False, "message": "no such selector"})

    server.faults["/begin_weight_update"] = refuse
    async with rollout_of(tiny_model, server) as rollout:
        with pytest.raises(sr.EngineRequestError, match="no such selector"):
            await engine_of(rollout).command("begin_update", 1.0)


async def test_a_checkpoint_is_loaded_from_a_disk(server: ScriptedServer, tiny_model: Path) -> None:
    async with rollout_of(tiny_model, server) as rollout:
        engine = engine_of(rollout)
        await engine.command("pause", 1.0, mode="abort")
        await engine.command("load_from_disk", 1.0, path="/shared/step-1")
        bodies = dict(zip(server.told, server.bodies, strict=True))
        assert bodies["/update_weights_from_disk"] == {
            **{"model_path": "/shared/step-1", "load_format": "safetensors"},
            **{"flush_cache": False, "abort_all_requests": False, "keep_pause": True},
        }
        assert server.label == "sglrollout-loading"


def saying(**answer: Any) -> Fault:
    async def fault(exchange: Exchange) -> None:
        await exchange.answer(answer)

    return fault


async def test_a_servers_copy_of_its_weights_is_updated_and_loaded(server: ScriptedServer, tiny_model: Path) -> None:
    route = "/sglrollout/weights"
    async with rollout_of(tiny_model, server) as rollout:
        engine = engine_of(rollout)
        server.faults[route] = saying(id="old", folder="/tmp/w")
        assert await engine.command("mirrors", 1.0) == {"ids": ["old"]}
        server.faults[route] = saying(id="new", folder="/tmp/w", refusal=None)
        told = {"folder": "/shared/changes", "new_id": "new"}
        assert await engine.command("update_mirror", 1.0, **told) == {"refusal": None}
        assert server.bodies[server.told.index(route, server.told.index(route) + 1)] == {
            "folder": "/shared/changes",
            "id": "new",
        }
        assert server.label != "sglrollout-loading"  # it has the weights that it had
        await engine.command("load_mirror", 1.0, new_id="new")
        assert server.bodies[server.told.index("/update_weights_from_disk")]["model_path"] == "/tmp/w"
        assert server.label == "sglrollout-loading"


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ({"id": "new", "folder": "/tmp/w", "refusal": "no room"}, "no room"),
        ({"id": "new", "folder": "/tmp/w", "refusal": ""}, "it has new"),
        ({"id": "old", "folder": "/tmp/w"}, "it has old"),
        ({"id": "", "folder": "/tmp/w", "refusal": None}, "it has nothing"),
    ],
)
async def test_a_copy_that_was_not_updated_is_no_success(
    server: ScriptedServer, tiny_model: Path, answer: dict[str, Any], refusal: str
) -> None:
    async with rollout_of(tiny_model, server) as rollout:
        server.faults["/sglrollout/weights"] = saying(**answer)
        told = {"folder": "/shared/changes", "new_id": "new"}
        assert await engine_of(rollout).command("update_mirror", 1.0, **told) == {"refusal": refusal}


async def test_a_copy_that_another_trainer_changed_is_not_loaded_as_ours(
    server: ScriptedServer, tiny_model: Path
) -> None:
    async with rollout_of(tiny_model, server) as rollout:
        server.faults["/sglrollout/weights"] = saying(id="theirs", folder="/tmp/w")
        with pytest.raises(sr.EngineRequestError, match="changed meanwhile, by another trainer"):
            await engine_of(rollout).command("load_mirror", 1.0, new_id="ours")
        assert "/update_weights_from_disk" not in server.told
        for odd in ({}, {"success": True}):
            server.faults["/sglrollout/weights"] = saying(**odd)
            with pytest.raises(sr.EngineRequestError, match="not that of an SGLang server"):
                await engine_of(rollout).command("update_mirror", 1.0, folder="/shared", new_id="ours")


async def test_an_old_sglang_has_no_update_session_and_no_flush_beside_retracted_requests(
    server: ScriptedServer, tiny_model: Path
) -> None:
    server.info = {"version": "0.5.17"}
    async with rollout_of(tiny_model, server) as rollout:
        engine = engine_of(rollout)
        with pytest.raises(sr.EngineRequestError, match=r"SGLang 0.5.17 empties no cache beside retracted requests"):
            await engine.command("pause", 1.0, mode="retract")
        await engine.command("pause", 1.0, mode="abort")
        await engine.command("begin_update", 1.0)
        await engine.command("end_update", 1.0)
        assert not {"/begin_weight_update", "/end_weight_update"} & set(server.told)


async def test_what_a_remote_engine_cannot_do_is_refused_with_what_to_use(
    server: ScriptedServer, tiny_model: Path
) -> None:
    async with rollout_of(tiny_model, server) as rollout:
        engine = engine_of(rollout)
        for name in ("describe_weights", "attach_weights", "load_weights", "export_weights", "adopt_weights"):
            with pytest.raises(sr.EngineRequestError, match=r"this is a remote one: .*receive_weights"):
                await engine.command(name, 1.0)
        with pytest.raises(sr.EngineRequestError, match="--enable-memory-saver"):
            await engine.command("sleep", 1.0, tags=["weights"])
        await engine.command("pause", 1.0, mode="in_place")
        with pytest.raises(sr.EngineRequestError, match="in_place"):
            await engine.command("resume", 1.0, version=1, flush=True)


async def test_a_command_that_fails_says_what_sglang_said(server: ScriptedServer, tiny_model: Path) -> None:
    async def fail(exchange: Exchange) -> None:
        await exchange.answer({"success": False, "message": "no such group"}, 400)

    async def succeed_not(exchange: Exchange) -> None:
        await exchange.answer({"success": False, "message": "no such group"})

    async with rollout_of(tiny_model, server) as rollout:
        for fault in (fail, succeed_not):
            server.faults["/destroy_weights_update_group"] = fault
            with pytest.raises(sr.EngineRequestError, match=r"destroy_group failed: .*no such group"):
                await engine_of(rollout).command("destroy_group", 1.0, group_name="g")


async def test_a_command_without_an_answer_ends_in_time_and_is_counted(
    server: ScriptedServer, tiny_model: Path
) -> None:
    async def nothing(exchange: Exchange) -> None:
        await asyncio.sleep(3600)

    server.faults["/pause_generation"] = nothing
    async with rollout_of(tiny_model, server, control_timeout_s=0.1) as rollout:
        with pytest.raises(sr.EngineRequestError, match="pause") as caught:
            await engine_of(rollout).command("pause", 0.1, mode="abort")
        assert caught.value.timed_out


async def test_a_command_whose_server_dies_says_so(server: ScriptedServer, tiny_model: Path) -> None:
    async def nothing(exchange: Exchange) -> None:
        await asyncio.sleep(3600)

    server.faults["/pause_generation"] = nothing
    async with rollout_of(tiny_model, server) as rollout:
        task = asyncio.ensure_future(engine_of(rollout).command("pause", 60.0, mode="abort"))
        await until(lambda: "/pause_generation" in server.told)
        await server.close()
        with pytest.raises(sr.EngineDiedError):
            await task
    await server.open()


async def test_sleep_and_wake_give_memory_back_and_mark_weights_that_are_lost(
    server: ScriptedServer, tiny_model: Path
) -> None:
    server.info = {"enable_memory_saver": True}
    async with rollout_of(tiny_model, server) as rollout:
        await rollout.sleep()
        assert server.label == "sglrollout-loading"
        assert server.told.count("/release_memory_occupation") == 3
        assert rollout.engines[0].state == "asleep"
        await rollout.wake()
        assert rollout.engines[0].state == "stale"


async def test_tool_calls_are_parsed_by_the_server(server: ScriptedServer, tiny_model: Path) -> None:
    async def parse(exchange: Exchange) -> None:
        assert exchange.body["tool_call_parser"] == "hermes"
        calls = [{"tool_index": 0, "name": "add", "parameters": '{"a": 1}'}]
        await exchange.answer({"normal_text": "so", "calls": calls if "call" in exchange.body["text"] else []})

    server.faults["/parse_function_call"] = parse
    async with rollout_of(tiny_model, server) as rollout:
        arguments: dict[str, Any] = {"tools": [], "parser": "hermes"}
        answer = await engine_of(rollout).command("parse_tool_calls", 1.0, text="so <call>", **arguments)
        assert answer == {"content": "so", "calls": [["add", '{"a": 1}']]}
        answer = await engine_of(rollout).command("parse_tool_calls", 1.0, text="so", **arguments)
        assert answer == {"content": "so", "calls": []}


# ------------------------------------------------------------ a router


async def test_a_router_and_its_workers_are_one_engine(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path
) -> None:
    server.info = other.info = {"tp_size": 2}
    async with ScriptedRouter(server, other) as router, rollout_of(tiny_model, router, remote={"router": True}) as pool:
        (status,) = pool.engines
        assert status.info is not None
        assert (status.info.tp_size, status.info.max_running_requests, status.limit) == (4, 128, 128)
        for group in await pool.generate([PROMPT] * 6, sampling=SHORT):
            check(group.completions[0])
        assert router.told.count("/generate") == 6
        assert server.told.count("/generate") == other.told.count("/generate") == 3
        engine = engine_of(pool)
        joined = {"master_address": "h", "master_port": 1, "world_size": 5, "group_name": "g", "backend": "nccl"}
        await engine.command("init_group", 1.0, rank_offset=1, **joined)
        await engine.command("pause", 1.0, mode="retract")
        await engine.command("resume", 1.0, version=1, flush=True)
        offsets = set()
        for worker in (server, other):
            assert worker.label == "1"
            assert worker.goes_on.is_set()
            assert worker.told.count("/flush_cache") == 1
            bodies = zip(worker.told, worker.bodies, strict=True)
            offsets |= {body["rank_offset"] for path, body in bodies if path == "/init_weights_update_group"}
        assert offsets == {1, 3}
        assert set(router.told) == {"/generate", "/workers"}


async def test_a_router_says_that_it_is_one(server: ScriptedServer, tiny_model: Path) -> None:
    async with ScriptedRouter(server) as router:
        with pytest.raises(sr.EngineStartError, match="for a router, give router=True"):
            async with rollout_of(tiny_model, router):
                pass


async def test_workers_that_are_not_alike_are_refused(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path
) -> None:
    other.info = {"tp_size": 2}
    async with ScriptedRouter(server, other) as router:
        with pytest.raises(sr.EngineStartError, match="its workers differ in their tp_size: 1, 2"):
            async with rollout_of(tiny_model, router, remote={"router": True}):
                pass


async def test_an_option_that_a_router_drops_is_refused(server: ScriptedServer, tiny_model: Path) -> None:
    async with ScriptedRouter(server) as router, rollout_of(tiny_model, router, remote={"router": True}) as pool:
        with pytest.raises(sr.EngineRequestError, match=r"drops sampling.logit_bias"):
            await one(pool, SHORT.replace(logit_bias={5: 1.0}))


async def test_a_worker_that_joins_a_router_is_told_too_and_serves_no_other_weights(
    server: ScriptedServer, other: ScriptedServer, tiny_model: Path
) -> None:
    server.label = "3"
    async with ScriptedRouter(server) as router, rollout_of(tiny_model, router, remote={"router": True}) as pool:
        router.workers.append(other)
        engine_of(pool)._health._num_looks = 7
        await until(lambda: pool.engines[0].state == "stale")
        other.label = "3"
        assert "/server_info" in other.told
