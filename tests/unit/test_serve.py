"""The endpoint as HTTP: who may ask, what is refused and how, and what becomes of those who leave."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sglrollout as sr
from sglrollout.serve import body
from sglrollout.session.parsing import MOST_DEPTH
from sglrollout.testing import ScriptedEngine
from tests.serving import ASK, ENDLESS, MODEL, Serving, calling, check_answer, client_of, error_of, serving, until

pytestmark = pytest.mark.timeout(60)

CHATS, COMPLETIONS = "/chat/completions", "/completions"


@pytest.fixture(scope="module")
async def served(tiny_model: Path) -> AsyncIterator[Serving]:
    """For requests that leave nothing behind."""
    async with serving(tiny_model) as s:
        yield s


# ------------------------------------------------------------ who may ask


async def test_the_key_is_random_and_the_address_is_of_this_machine_alone(tiny_model: Path, served: Serving) -> None:
    async with serving(tiny_model) as other:
        assert len(other.endpoint.api_key) >= 32
        assert other.endpoint.api_key != served.endpoint.api_key
        assert other.endpoint.url != served.endpoint.url
        assert httpx.URL(other.endpoint.url).host == "127.0.0.1"


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer nonsense", "Basic KEY", "KEY", "Bearer \xff"])
@pytest.mark.parametrize("path", [CHATS, "/models", "/conversations/x", "/nonsense"])
async def test_nothing_is_done_without_the_key(served: Serving, header: str | None, path: str) -> None:
    headers = {} if header is None else {"Authorization": header.replace("KEY", served.endpoint.api_key)}
    async with httpx.AsyncClient(trust_env=False) as client:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        response = await client.post(served.endpoint.url + path, json=ASK, headers=raw)
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert served.endpoint.api_key not in response.text


async def test_a_key_of_ones_own(tiny_model: Path) -> None:
    async with serving(tiny_model, api_key="sk-local") as s, client_of(s.endpoint, "sk-local") as client:
        assert (await client.get("/models")).status_code == 200


async def test_health_needs_no_key(served: Serving) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        response = await client.get(served.endpoint.url.removesuffix("/v1") + "/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_its_model_is_listed(served: Serving) -> None:
    (model,) = (await served.client.get("/models")).json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    assert (await served.client.get(f"/models/{MODEL}")).json() == model
    assert error_of(await served.client.get("/models/gpt-5"))["code"] == "model_not_found"


# ------------------------------------------------------------ what is refused

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"seed": 5}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_all": True}}, "stream_options"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"logit_bias": {"600": 1}}, "logit_bias"),
    ({"regex": "("}, "regex"),
    ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ({"user_id": "me"}, "user_id"),
    ({"temprature": 1}, "temprature"),
    ({"model": 7}, "model"),
    ({"store": True}, "store"),
]
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "function", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]}, "messages.0.audio"),
    ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages.0.name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "return": 1}}]}, "tools.0.function.return"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tool_parser"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"functions": []}, "functions"),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, 600]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", [1]] + ["b"] * 1023}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"logprobs": 2}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"suffix": "z"}, "suffix"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG + WRONG_CHATS, ids=str)
async def test_a_wrong_chat_is_refused_and_the_field_is_named(served: Serving, fields: Any, param: str) -> None:
    for stream in (False, True):
        response = await served.client.post(CHATS, json={**ASK, "stream": stream, **fields})
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"].startswith(param)


@pytest.mark.parametrize(("fields", "param"), WRONG + WRONG_COMPLETIONS, ids=lambda value: str(value)[:40])
async def test_a_wrong_completion_is_refused_and_the_field_is_named(served: Serving, fields: Any, param: str) -> None:
    response = await served.client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", **fields})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


async def test_a_field_that_asks_for_nothing_is_taken(served: Serving) -> None:
    nothing = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "temperature": None}
    also = {"parallel_tool_calls": True, "top_logprobs": 0, "stream_options": {"include_usage": True}, "stop": None}
    response = await served.client.post(CHATS, json={**ASK, "max_tokens": 2, **nothing, **also})
    assert response.status_code == 200, response.text


async def test_a_field_that_is_misspelt_is_told_its_name(served: Serving) -> None:
    error = error_of(await served.client.post(CHATS, json={**ASK, "message": []}))
    assert error["message"].startswith('message is not a field that this endpoint takes (did you mean "messages"?)')


async def test_another_model_is_not_found(served: Serving) -> None:
    response = await served.client.post(CHATS, json={**ASK, "model": "gpt-5"})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"\xff",
        b'{"model": NaN}',
        json.dumps({**ASK, "user": 0}).encode()[:-2] + b"1e999}",
        b'{"user": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 5000,
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(served: Serving, content: bytes) -> None:
    response = await served.client.post(CHATS, content=content)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("place", ["messages", "tools", "metadata", "chat_template_kwargs"])
async def test_a_body_that_is_nested_too_deeply_is_refused(served: Serving, place: str) -> None:
    for depth in (MOST_DEPTH, 500, 900):  # with the body itself one too many; what the stack may hold; barely not
        deep = "[" * depth + "]" * depth
        content = json.dumps({**ASK, place: "DEEP"}).replace('"DEEP"', deep)
        response = await served.client.post(CHATS, content=content)
        assert (response.status_code, error_of(response)["type"]) == (400, "invalid_request_error")
        assert "nested too deeply" in response.text
    deep = "[" * (MOST_DEPTH - 1) + "]" * (MOST_DEPTH - 1)
    content = json.dumps({**ASK, "metadata": "DEEP", "max_tokens": 1}).replace('"DEEP"', deep)
    assert (await served.client.post(CHATS, content=content)).status_code == 200


async def test_a_stack_that_overflows_elsewhere_is_a_failure_of_the_endpoint(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise RecursionError

    monkeypatch.setattr("sglrollout.serve.chats.keys_of", fail)
    response = await served.client.post(CHATS, json=ASK)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")


async def test_a_body_that_is_too_large_is_refused(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MOST_BYTES", 1000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    for content in (b" " * 1001, parts()):
        response = await served.client.post(CHATS, content=content)
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")
    assert (await served.client.post(CHATS, json={**ASK, "max_tokens": 1})).status_code == 200


async def test_a_body_that_does_not_come_is_given_up(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "READ_S", 0.05)

    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await anyio.sleep(0.5)

    assert (await served.client.post(CHATS, content=parts())).status_code == 408


@pytest.mark.parametrize(("method", "path"), [("GET", "/nonsense"), ("GET", CHATS), ("POST", "/models")])
async def test_paths_and_methods_that_are_not_there(served: Serving, method: str, path: str) -> None:
    response = await served.client.request(method, path)
    assert response.status_code == (404 if path == "/nonsense" else 405)
    assert path in error_of(response)["message"]


@pytest.mark.parametrize("host", [b"[", b"a b", b"\xff", b"a/b", b"x:y", b"[::1", b"[x]:80", b"a@b", b"a#b?c"])
async def test_a_host_that_is_none_is_refused(served: Serving, host: bytes) -> None:
    for path in ("/models", "/models/", "/nonsense", "/chat/completions/", "/conversations/x"):
        headers = [(b"host", host), (b"authorization", f"Bearer {served.endpoint.api_key}".encode())]
        async with httpx.AsyncClient(trust_env=False) as client:
            response = await client.get(served.endpoint.url + path, headers=headers)
        assert response.status_code == 400
        assert "Host" in error_of(response)["message"]


@pytest.mark.parametrize("host", [b"", b"localhost", b"127.0.0.1:80", b"[::1]:8000", b"a_b.example.org."])
async def test_a_host_of_any_name_is_served(served: Serving, host: bytes) -> None:
    assert (await served.client.get("/models", headers=[(b"host", host)])).status_code == 200
    response = await served.client.get("/chat/completions/", headers=[(b"host", host)])
    assert (response.status_code, response.is_redirect) == (404, False)


@pytest.mark.parametrize("name", [b"content-type", b"x-session-id", b"accept", b"cookie", b"x-forwarded-for"])
async def test_headers_of_any_bytes_are_taken(served: Serving, name: bytes) -> None:
    headers = [(name, b"\xff\xfe\xc3(")]
    response = await served.client.post(CHATS, json={**ASK, "max_tokens": 1}, headers=headers)
    assert response.status_code == 200
    for path in ("/nonsense", "/models/%ff%fe", "/conversations/%ed%a0%80"):
        response = await served.client.get(path, headers=headers)
        assert response.status_code == 404
        error_of(response)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted({name for fields, _ in WRONG + WRONG_CHATS + WRONG_COMPLETIONS for name in fields}))
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=8) | JSON},
    optional={"tool_calls": JSON, "tool_call_id": JSON, "name": JSON},
)


@given(
    path=st.sampled_from([CHATS, COMPLETIONS]),
    base=st.sampled_from([{}, {"model": MODEL}, {**ASK, "max_tokens": 2}, {"model": MODEL, "prompt": "a"}]),
    fields=st.dictionaries(NAMES, JSON, max_size=3)
    | st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=3)}),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_is_asked_gets_an_answer_in_openais_shape(
    served: Serving, path: str, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    check_answer(await served.client.post(path, content=json.dumps({**base, **fields})))


# ------------------------------------------------------------ what fails


async def test_errors_of_the_pool_have_a_status_each(tiny_model: Path) -> None:
    async with serving(tiny_model, engine={"hang": True}, timeout_s=0.1) as s:
        response = await s.client.post(CHATS, json=ASK)
        assert (response.status_code, error_of(response)["code"]) == (504, "timeout")
        s.engine.fail_request = lambda request: "no"
        s.engine.hang = False
        response = await s.client.post(CHATS, json=ASK)
        assert (response.status_code, error_of(response)["code"]) == (500, "engine_error")
        s.engine.fail_request = lambda request: "Failed to compile the grammar"
        assert (await s.client.post(CHATS, json=ASK)).status_code == 400
        s.engine.die()
        response = await s.client.post(CHATS, json=ASK)
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")


async def test_a_full_queue_is_too_many_requests(tiny_model: Path) -> None:
    async with serving(tiny_model, engine={"hang": True, "max_running": 1}) as s, anyio.create_task_group() as tasks:
        assert s.rollout._pool is not None
        s.rollout._pool.dispatcher._max_queued = 1
        for _ in range(2):
            tasks.start_soon(lambda: s.client.post(CHATS, json=ASK))
        await until(lambda: s.rollout.num_queued == 1)
        response = await s.client.post(CHATS, json=ASK)
        assert (response.status_code, error_of(response)["code"]) == (429, "queue_full")
        s.engine.hang = False


async def test_a_failure_in_mid_stream_is_the_last_event(tiny_model: Path) -> None:
    async with serving(tiny_model, engine={"token_s": 0.001}) as s:
        async with s.client.stream("POST", CHATS, json={**ENDLESS, "stream": True}) as response:
            assert response.status_code == 200
            lines = []
            async for line in response.aiter_lines():
                lines.append(line)
                if len(lines) == 6:
                    s.engine.die()
        last = json.loads(lines[-2].removeprefix("data: "))
        assert last["error"]["code"] == "unavailable"
        assert "[DONE]" not in lines[-1]


async def test_a_failure_that_nobody_foresaw_says_nothing_of_what_was_asked(
    served: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the " + "secret " + "prompt"

    def fail(*given: Any) -> None:
        raise KeyError(secret)

    monkeypatch.setattr("sglrollout.serve.chats.keys_of", fail)
    response = await served.client.post(CHATS, json=ASK)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert secret not in response.text
    assert "KeyError" in caplog.text
    assert secret not in caplog.text


async def test_an_answer_that_cannot_be_encoded_is_a_failure_in_openais_shape_and_is_not_kept(tiny_model: Path) -> None:
    chat = {**ASK, "logprobs": True}
    tools = {**chat, "tools": [{"type": "function", "function": {"name": "add"}}]}
    script = [70, 71, 2], [-1.0, float("nan"), -1.0]
    async with serving(tiny_model, lambda *given: script, tool_parser=calling) as s:
        for path, asked in ((CHATS, chat), (CHATS, tools), (COMPLETIONS, {"prompt": "a", "logprobs": 0})):
            for stream in (False, True):
                response = await s.client.post(path, json={"model": MODEL, "stream": stream, **asked})
                problem = error_of(response) if response.status_code == 500 else _last_error(response.text)
                assert problem["code"] == "internal_error"
        assert s.endpoint.completions() == {}
        answer = await s.chat([{"role": "user", "content": "hi"}])
        response = await s.client.get(f"/conversations/{answer['id']}")
        assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")


def _last_error(stream: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(stream.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    return error


async def test_nothing_is_logged_of_prompts_or_keys(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serving(tiny_model) as s:
            await s.chat([{"role": "user", "content": "the secret prompt"}], max_tokens=2)
            await s.client.post(CHATS, json={**ASK, "messages": "the secret prompt"})
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not [line for line in ours if "secret" in line or s.endpoint.api_key in line or "POST" in line]


# ------------------------------------------------------------ leaving


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
@pytest.mark.parametrize("hang", [False, True])
async def test_a_client_that_leaves_frees_its_slots(tiny_model: Path, fields: dict[str, Any], hang: bool) -> None:
    async with serving(tiny_model, engine={"token_s": 0.002, "hang": hang}) as s:
        num = fields.get("n", 1)
        asking = asyncio.create_task(s.client.post(CHATS, json={**ENDLESS, **fields}))
        await until(lambda: len(s.engine.submitted) == num)
        await asyncio.sleep(0.05)
        assert not s.idle
        asking.cancel()
        await until(lambda: s.idle)
        assert len(s.engine.aborted) == num
        assert s.endpoint.completions() == {}
        s.engine.hang = False
        assert await s.chat([{"role": "user", "content": "hi"}], max_tokens=2)


async def test_a_client_that_leaves_the_queue_is_gone_from_it(tiny_model: Path) -> None:
    async with serving(tiny_model, engine={"hang": True, "max_running": 1}) as s:
        tasks = [asyncio.create_task(s.client.post(CHATS, json=ASK)) for _ in range(2)]
        await until(lambda: s.rollout.num_queued == 1)
        tasks[1].cancel()
        await until(lambda: s.rollout.num_queued == 0)
        s.engine.hang = False
        assert (await tasks[0]).status_code == 200


async def test_leaving_the_block_ends_what_is_being_served(tiny_model: Path) -> None:
    before = asyncio.all_tasks()
    async with serving(tiny_model, engine={"token_s": 0.002}) as s:
        whole = asyncio.create_task(s.client.post(CHATS, json=ENDLESS))
        stream = asyncio.create_task(s.client.post(CHATS, json={**ENDLESS, "stream": True}))
        await until(lambda: len(s.engine.submitted) == 2)
        await asyncio.sleep(0.1)
        with anyio.fail_after(2):
            await s.endpoint.__aexit__(None, None, None)
        assert s.idle
        assert len(s.engine.aborted) == 2
        response = await whole
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
        assert '"code":"unavailable"' in (await stream).text.strip().split("\n\n")[-1]
        with pytest.raises(httpx.ConnectError):
            await s.client.get("/models")
        await s.endpoint.__aexit__(None, None, None)
        with pytest.raises(sr.LifecycleError, match="open before"):
            await s.endpoint.__aenter__()
    assert asyncio.all_tasks() == before


async def test_leaving_the_block_does_not_wait_for_clients_that_hang(tiny_model: Path) -> None:
    async with serving(tiny_model, engine={"token_s": 0.0}) as s:
        url = httpx.URL(s.endpoint.url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {s.endpoint.api_key}\r\n"
        ask = json.dumps({**ENDLESS, "n": 128, "stream": True, "logprobs": True})
        full = f"{head}Content-Length: {len(ask)}\r\n\r\n{ask}"
        writers = []
        for sent in ("", "POST /v1", f"{head}Content-Length: 100\r\n\r\n{{", full):
            _, writer = await asyncio.open_connection(url.host, url.port, limit=64)  # which reads no more than that
            writers.append(writer)
            writer.write(sent.encode())
            await writer.drain()
        await until(lambda: len(s.engine.submitted) > 100)
        await asyncio.sleep(0.5)
        with anyio.fail_after(6):
            await s.endpoint.__aexit__(None, None, None)
        await until(lambda: s.idle)
        for writer in writers:
            writer.close()


async def test_closing_the_rollout_under_it_ends_requests_with_503(tiny_model: Path) -> None:
    async with serving(tiny_model, engine={"token_s": 0.002}) as s:
        asking = asyncio.create_task(s.client.post(CHATS, json=ENDLESS))
        await until(lambda: len(s.engine.submitted) == 1)
        await s.rollout.close()
        assert (await asking).status_code == 503
        assert (await s.client.post(CHATS, json=ASK)).status_code == 503
        assert (await s.client.get("/models")).status_code == 200


# ------------------------------------------------------------ opening


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"port": -1}, "port"),
        ({"port": "80"}, "port"),
        ({"host": ""}, "host"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "a b"}, "api_key"),
        ({"model_name": " "}, "model_name"),
        ({"max_conversations": 0}, "max_conversations"),
        ({"tool_parser": 5}, "tool_parser"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_a_wrong_option_is_refused_at_once(tiny_model: Path, options: dict[str, Any], field: str) -> None:
    rollout = sr.AsyncRolloutEngine(str(tiny_model), progress=False)
    with pytest.raises(sr.ConfigError) as caught:
        rollout.serve_openai(**options)
    assert caught.value.field == field
    assert "a b" not in str(caught.value)


async def test_a_port_that_is_taken_and_a_host_of_another_machine_are_refused(served: Serving) -> None:
    port = httpx.URL(served.endpoint.url).port
    with pytest.raises(sr.ConfigError, match=f"port must be one that is free on 127.0.0.1 .*, got {port}"):
        await served.rollout.serve_openai(port=port or 0).__aenter__()
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(sr.ConfigError, match="host must be an address of this machine"):
            await served.rollout.serve_openai(host=host).__aenter__()


async def test_a_chosen_port_and_ipv6(served: Serving) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with served.rollout.serve_openai(port=port) as endpoint:
        assert endpoint.url == f"http://127.0.0.1:{port}/v1"
        assert endpoint.model == served.rollout.config.model
    try:
        async with served.rollout.serve_openai(host="::1") as endpoint, client_of(endpoint) as client:
            assert (await client.get("/models")).status_code == 200
    except sr.ConfigError:
        pytest.skip("this machine has no IPv6")


async def test_it_needs_a_running_rollout(tiny_model: Path) -> None:
    endpoint = sr.AsyncRolloutEngine(str(tiny_model), progress=False).serve_openai()
    with pytest.raises(sr.LifecycleError, match="not open yet"):
        _ = endpoint.url
    with pytest.raises(sr.LifecycleError, match="not started"):
        await endpoint.__aenter__()


async def test_signals_and_logging_stay_the_users(tiny_model: Path) -> None:
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access")]
    before = [(logger.level, [*logger.handlers], logger.propagate) for logger in loggers]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serving(tiny_model):
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        assert [(logger.level, [*logger.handlers], logger.propagate) for logger in loggers] == before


def test_a_blocking_rollout_serves_as_well(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglrollout.rollout.build_engines", lambda config: [ScriptedEngine(vocab_size=512)])
    with sr.RolloutEngine(str(tiny_model), progress=False) as rollout:
        with rollout.serve_openai(model_name=MODEL) as endpoint:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            answer = httpx.post(endpoint.url + CHATS, json=ASK, headers=headers, trust_env=False).json()
            assert endpoint.completions()[answer["id"]].text == answer["choices"][0]["message"]["content"]
        with pytest.raises(httpx.ConnectError):
            httpx.get(endpoint.url + "/models", trust_env=False)
        assert endpoint.take(answer["id"]).token_ids


def test_importing_sglrollout_imports_no_web_server() -> None:
    code = "import sys, sglrollout.serve.endpoint; sys.exit(bool({'starlette', 'uvicorn'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
