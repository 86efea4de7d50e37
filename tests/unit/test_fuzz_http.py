"""Whatever comes to the endpoint: an answer in OpenAI's shape, soon. Nothing fails, hangs, or is told to strangers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglrollout.serve import body as serve_body
from sglrollout.serve import server as serve_server
from tests.serving import ASK, MODEL, Serving, check_answer, error_of, serving, until

pytestmark = pytest.mark.timeout(120)

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
HANG_S = 5.0
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ],
    **{"max_tokens": 2, "n": 2, "temperature": 0.5, "stop": ["a", "b"], "logit_bias": {"5": 1.0}},
    **{"stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "logprobs": True},
    **{"chat_template_kwargs": {"enable_thinking": False}, "metadata": {"a": "b"}, "tools": [TOOL]},
    "tool_choice": "none",
}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": ["a", [5, 6]], "max_tokens": 2, "logprobs": 1, "n": 1}


@pytest.fixture(scope="module")
async def served(tiny_model: Path) -> AsyncIterator[Serving]:
    async with serving(tiny_model) as s:
        yield s


@pytest.fixture(autouse=True)
def nothing_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Of the endpoint, of uvicorn, and of the event loop: none logs an error."""
    caplog.set_level(logging.DEBUG)
    yield
    failed = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not [record.getMessage() for record in failed]


async def ask(served: Serving, path: str, content: bytes, **headers: str) -> httpx.Response:
    url = httpx.URL(served.endpoint.url).copy_with(path=path)
    with anyio.fail_after(HANG_S):
        return await served.client.post(url, content=content, headers=headers)


# ------------------------------------------------------------ bodies

paths = st.sampled_from([CHATS, COMPLETIONS])
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, 1e308, float("inf"), float("nan"), -0.0])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\x00", "\ud800", "<|im_end|>", "a" * 5000, "\U0001f600", "json_schema", "{{ 1/0 }}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def with_something_else(value: Any, data: st.DataObject) -> Any:
    """The value with one part of it, however deep inside, replaced, taken away, or given something more."""
    if isinstance(value, (list, dict)) and value and data.draw(st.integers(0, 4)):
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        changed = dict(value) if isinstance(value, dict) else list(value)
        what = data.draw(st.integers(0, 5))
        if what == 0:
            del changed[key]
        elif what == 1 and isinstance(changed, dict):
            changed[data.draw(st.text(max_size=8))] = data.draw(PLAIN)
        else:
            changed[key] = with_something_else(value[key], data)
        return changed
    return data.draw(PLAIN)


@FUZZ
@given(data=st.data(), stream=st.booleans())
async def test_requests_with_a_part_replaced_or_taken_away(served: Serving, data: st.DataObject, stream: bool) -> None:
    path, valid = data.draw(st.sampled_from([(CHATS, CHAT), (COMPLETIONS, COMPLETION)]))
    changed = with_something_else({**valid, "stream": stream}, data)
    check_answer(await ask(served, path, json.dumps(changed).encode()))


@FUZZ
@given(data=st.data(), path=paths)
async def test_bodies_with_bytes_changed_lost_and_added(served: Serving, data: st.DataObject, path: str) -> None:
    content = bytearray(json.dumps(CHAT if path == CHATS else COMPLETION).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        removed, added = data.draw(st.integers(0, 5)), data.draw(st.binary(max_size=5))
        content[at : at + removed] = added
    check_answer(await ask(served, path, bytes(content)))


@FUZZ
@given(path=paths, content=st.binary(max_size=200))
async def test_bodies_of_random_bytes(served: Serving, path: str, content: bytes) -> None:
    response = await ask(served, path, content)
    assert response.status_code == 400
    error_of(response)


ODD_BODIES = {
    "no such code point": b'{"model": "tiny", "prompt": "\\ud800"}',
    "a code point in another encoding": '{"model": "tiny"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a number that is too long": b'{"seed": ' + b"9" * 10_000 + b"}",
    "a number that is too large": b'{"temperature": 1e999}',
    "a name that comes twice": b'{"model": "tiny", "model": 5}',
    "lists without end": b"[" * 100_000,
    "objects without end": b'{"a":' * 100_000,
    "many texts": b"[" + b'"",' * 100_000 + b'""]',
}


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize("content", ODD_BODIES.values(), ids=ODD_BODIES.keys())
async def test_odd_bodies(served: Serving, path: str, content: bytes) -> None:
    check_answer(await ask(served, path, content))


DEEP_PLACES = ["messages", "metadata", "tools", "response_format", "chat_template_kwargs", "stop", "prompt", "user"]


@pytest.mark.parametrize("depth", [50, 200, 400, 900, 5000])
@pytest.mark.parametrize("place", [*DEEP_PLACES, "content", "parameters", "schema", "arguments", "template option"])
async def test_fields_that_are_nested_deeply(served: Serving, place: str, depth: int) -> None:
    lists, objects = "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth
    for deep in (lists, objects):
        fields: dict[str, Any] = {**ASK, "max_tokens": 1}
        if place == "content":
            fields["messages"] = [{"role": "user", "content": "DEEP"}]
        elif place == "parameters":
            fields |= {"tools": [{"type": "function", "function": {"name": "a", "parameters": "DEEP"}}]}
            fields["tool_choice"] = "none"
        elif place == "schema":
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": "DEEP"}}
        elif place == "arguments":
            function = {"name": "a", "arguments": deep}
            call = {"id": "a", "type": "function", "function": function}
            fields["messages"] = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "b"}]
        elif place == "template option":
            fields["chat_template_kwargs"] = {"documents": "DEEP"}
        else:
            fields[place] = "DEEP"
        content = json.dumps(fields).replace('"DEEP"', deep).encode()
        check_answer(await ask(served, COMPLETIONS if place == "prompt" else CHATS, content))


# ------------------------------------------------------------ raw bytes


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


@asynccontextmanager
async def connected(served: Serving, *parts: bytes, pause_s: float = 0.0) -> AsyncIterator[asyncio.StreamReader]:
    """A connection to the endpoint on which this is being sent; what comes back."""
    url = httpx.URL(served.endpoint.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)

    async def send() -> None:
        for part in parts:
            if writer.is_closing():
                break
            writer.write(part)
            await asyncio.sleep(pause_s)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        try:
            with suppress(ConnectionError):  # the endpoint may have seen enough before all was sent
                yield reader
        finally:
            tasks.cancel_scope.cancel()
            writer.transport.abort()
            with suppress(ConnectionError), anyio.CancelScope(shield=True):
                await writer.wait_closed()


async def exchanged(served: Serving, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back until the endpoint closes the connection."""
    raw = b""
    with anyio.fail_after(HANG_S):
        async with connected(served, *parts, pause_s=pause_s) as reader:
            while part := await reader.read(1 << 16):
                raw += part
    return raw


def parsed(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    assert line.startswith("HTTP/1.1 "), raw[:200]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Answer(int(line.split()[1]), headers, body[: int(headers.get("content-length", len(body)))])


def check_raw(answer: Answer) -> None:
    """As :func:`check`; what is no HTTP at all is answered by uvicorn, in plain text."""
    assert b"Traceback" not in answer.body
    if answer.headers.get("content-type", "").startswith("text/plain"):
        assert (answer.status, answer.body) == (400, b"Invalid HTTP request received.")
        return
    assert answer.status == 200 or 400 <= answer.status < 500
    if answer.body and answer.headers["content-type"] == "application/json":
        body = json.loads(answer.body)
        assert answer.status == 200 or set(body["error"]) == {"message", "type", "param", "code"}


def head_of(method: bytes, target: bytes, *headers: bytes) -> bytes:
    lines = [method + b" " + target + b" HTTP/1.1", b"Host: x", b"Connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def key_of(served: Serving) -> bytes:
    return b"Authorization: Bearer " + served.endpoint.api_key.encode()


@FUZZ
@given(sent=st.binary(max_size=300))
async def test_random_bytes_instead_of_a_request_are_refused(served: Serving, sent: bytes) -> None:
    raw = await exchanged(served, sent + b"\r\n\r\n\r\n\r\n")
    assert parsed(raw).status == 400
    check_raw(parsed(raw))
    assert (await served.client.get("/models")).status_code == 200


@FUZZ
@given(data=st.data())
async def test_requests_with_bytes_changed_lost_and_added(served: Serving, data: st.DataObject) -> None:
    content = json.dumps({**ASK, "max_tokens": 1}).encode()
    length = b"Content-Length: %d" % len(content)
    sent = bytearray(head_of(b"POST", CHATS.encode(), key_of(served), length) + content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(sent)))
        removed, added = data.draw(st.integers(0, 3)), data.draw(st.binary(max_size=3))
        sent[at : at + removed] = added
    async with connected(served, bytes(sent)) as reader:
        with anyio.move_on_after(0.05):  # a request that is not whole may wait for the rest
            if first := await reader.read(1 << 16):
                assert 200 <= parsed(first).status < 500


def header_values() -> st.SearchStrategy[bytes]:
    return st.binary(max_size=20) | st.sampled_from(
        [b"", b"0", b"-1", b"1e3", b"9" * 30, b"\xb2", b"chunked", b"gzip, chunked", b"100-continue", b"websocket"]
    )


NAMES = st.sampled_from(
    [
        *(b"Content-Length", b"Transfer-Encoding", b"Content-Type", b"Content-Encoding", b"Expect", b"Upgrade"),
        *(b"Host", b"X-Session-Id", b"Accept", b"Cookie", b"Origin", b"Range", b"X-Forwarded-For", b"Authorization"),
    ]
)


@FUZZ
@given(
    method=st.sampled_from([b"POST", b"GET", b"HEAD", b"OPTIONS"]),
    path=st.sampled_from([CHATS, COMPLETIONS, "/v1/models", "/v1/conversations/x", "/x"]),
    headers=st.lists(st.tuples(NAMES | st.binary(min_size=1, max_size=10), header_values()), max_size=4),
)
@example(method=b"POST", path=CHATS, headers=[(b"Content-Length", b"\xb2")])
@example(method=b"POST", path=CHATS, headers=[(b"Authorization", b"Bearer \xff")])
async def test_random_headers(served: Serving, method: bytes, path: str, headers: list[tuple[bytes, bytes]]) -> None:
    lines = [name + b": " + value for name, value in headers]
    raw = b""
    async with connected(served, head_of(method, path.encode(), key_of(served), *lines) + b"{}") as reader:
        with anyio.move_on_after(0.05):  # a length may be announced that does not come
            raw = await reader.read()
    if raw and not raw.startswith(b"HTTP/1.1 100"):
        check_raw(parsed(raw))


# ------------------------------------------------------------ without the key

METHODS = [b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PROPFIND", b"X"]
TARGETS = [
    *(b"/", b"*", b"//", b"/v1", b"/v1/", b"/v1/models", b"/v1/models/tiny", b"/v1/conversations/x", b"/docs"),
    *(b"/v1/chat/completions", b"/v1/completions", b"/openapi.json", b"/metrics", b"/health/", b"//health", b"/Health"),
    *(b"/health/../v1/models", b"/v1/models?x=/health", b"/health%2f..%2fv1/models", b"http://x/v1/models", b"x:443"),
    *(b"/v1/models#/health", b"/health;/v1/models", b"/%00", b"/%ff%fe", b"/v1/conversations/%ed%a0%80"),
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.decode())
async def test_no_path_and_no_method_is_open_to_those_without_the_key(served: Serving, target: bytes) -> None:
    for method in METHODS:
        for wrong in (b"X: y", b"Authorization: Bearer " + served.endpoint.api_key[:-1].encode()):
            answer = parsed(await exchanged(served, head_of(method, target, wrong)))
            assert answer.status == 401
            if method != b"HEAD":
                assert json.loads(answer.body)["error"]["code"] == "invalid_api_key"


@FUZZ
@given(
    method=st.sampled_from(METHODS) | st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=1, max_size=8).map(str.encode),
    target=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20).map(
        lambda text: b"/" + text.encode()
    ),
    header=st.tuples(NAMES, header_values()),
)
async def test_random_requests_without_the_key_learn_nothing(
    served: Serving, method: bytes, target: bytes, header: tuple[bytes, bytes]
) -> None:
    raw = await exchanged(served, head_of(method, target, header[0] + b": " + header[1]))
    answer = parsed(raw)
    check_raw(answer)
    assert answer.status in (400, 401)  # 400: it was no HTTP
    assert served.endpoint.api_key.encode() not in raw


# ------------------------------------------------------------ much, and slowly


async def test_a_body_that_announces_too_much_is_refused_before_it_comes(served: Serving) -> None:
    for length in (b"33554433", b"9" * 18, b"9" * 4000):
        head = head_of(b"POST", CHATS.encode(), key_of(served), b"Content-Length: " + length)
        answer = parsed(await exchanged(served, head, b"{"))
        assert answer.status in (413, 400)
        check_raw(answer)


async def test_a_body_that_does_not_end_is_refused_at_the_limit(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_body, "MOST_BYTES", 10_000)
    head = head_of(b"POST", CHATS.encode(), key_of(served), b"Transfer-Encoding: chunked")
    chunk = b"400\r\n" + b" " * 0x400 + b"\r\n"
    answer = parsed(await exchanged(served, head, *[chunk] * 20, pause_s=0.01))
    assert answer.status == 413
    check_raw(answer)


async def test_a_head_that_does_not_end_is_refused(served: Serving) -> None:
    endless = b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * (1 << 20)
    raw = await exchanged(served, endless)
    assert raw == b"" or parsed(raw).status == 400


async def test_a_body_that_trickles_is_given_up_at_the_deadline(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_body, "READ_S", 0.2)
    head = head_of(b"POST", CHATS.encode(), key_of(served), b"Content-Length: 1000")
    begun = time.monotonic()
    answer = parsed(await exchanged(served, head, *[b" "] * 30, pause_s=0.02))
    assert answer.status == 408
    assert time.monotonic() - begun < 2
    check_raw(answer)


@pytest.mark.parametrize(
    "sent",
    [
        [b""],
        [b"GET / HT"],
        [b"GET /health HTTP/1.1\r\n"] + [b"X-A: b\r\n"] * 30,
        [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /he"],
    ],
    ids=["nothing", "half a line", "headers that trickle", "half a head after an answer"],
)
async def test_a_connection_on_which_no_whole_head_comes_is_closed(
    served: Serving, monkeypatch: pytest.MonkeyPatch, sent: list[bytes]
) -> None:
    monkeypatch.setattr(serve_server, "HEAD_S", 0.2)
    with anyio.fail_after(2):
        async with connected(served, *sent, pause_s=0.02) as reader:
            while await reader.read(4096):
                pass


async def test_slow_and_silent_clients_do_not_keep_others_from_being_served(served: Serving) -> None:
    partial = head_of(b"POST", CHATS.encode(), key_of(served), b"Content-Length: 1000") + b"{"
    async with AsyncExitStack() as clients:
        for sent in [b"", b"P", b"POST / HTTP/1.1\r\nX: ", partial] * 25:
            await clients.enter_async_context(connected(served, sent))
        assert (await served.chat([{"role": "user", "content": "hi"}], max_tokens=2))["choices"]


async def test_all_that_leaves_nothing_running(served: Serving) -> None:
    await until(lambda: served.idle)
