"""The real openai client against real SGLang on the CPU."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import httpx
import openai
import pytest

import sglrollout as sr
from sglrollout.engine.installed import sglang_version

pytestmark = pytest.mark.slow

MODEL = "tiny"
NO_GRAMMARS = pytest.mark.skipif(
    sglang_version() == "0.5.17", reason="grammars of SGLang 0.5.17 pin memory, which a CPU cannot"
)
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
A_CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}\n</tool_call>'
ENDLESS: Any = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
async def endpoint(rollout: sr.AsyncRolloutEngine) -> AsyncIterator[sr.OpenAIEndpoint]:
    async with rollout.serve_openai(model_name=MODEL, tool_parser="hermes") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
async def client(endpoint: sr.OpenAIEndpoint) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(endpoint) as client:
        yield client


def client_of(endpoint: sr.OpenAIEndpoint, key: str | None = None) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False)
    key = endpoint.api_key if key is None else key
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=key, http_client=http, max_retries=0, timeout=60)


def user(content: str) -> Any:
    return {"role": "user", "content": content}


def all_ids(completion: sr.Completion) -> tuple[int, ...]:
    return completion.prompt_ids + completion.token_ids


async def is_idle(rollout: sr.AsyncRolloutEngine, within_s: float = 2.0) -> None:
    with anyio.fail_after(within_s):
        while any(
            e.num_inflight or e.load is None or e.load.num_running or e.load.num_inflight for e in rollout.engines
        ):
            await anyio.sleep(0.02)


# ------------------------------------------------------------ chats


async def test_a_chat(rollout: sr.AsyncRolloutEngine, endpoint: sr.OpenAIEndpoint, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[user("What is the capital of France?")], temperature=0, max_tokens=24, logprobs=True
    )
    (choice,) = answer.choices
    whole = endpoint.completion(answer.id)
    assert choice.message.content == whole.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", whole.finish_reason)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(whole.prompt_ids)
    assert answer.usage.completion_tokens == len(whole.token_ids)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert tuple(entry.logprob for entry in choice.logprobs.content) == whole.logprobs
    assert whole.weight_versions == ((rollout.weight_version, 0, len(whole.token_ids)),)
    (group,) = await rollout.generate(
        [[user("What is the capital of France?")]], sampling=sr.Sampling(temperature=0.0, max_new_tokens=24)
    )
    assert all_ids(group.completions[0]) == all_ids(whole)


async def test_a_stream(endpoint: sr.OpenAIEndpoint, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[user("Count.")],
        max_tokens=40,
        stream=True,
        logprobs=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, logprobs, sizes, usage, answer_id = "", list[float](), list[int](), None, ""
    async for event in stream:
        usage, answer_id = event.usage, event.id
        for choice in event.choices:
            text += choice.delta.content or ""
            if choice.logprobs is not None and choice.logprobs.content is not None:
                sizes.append(len(choice.logprobs.content))
                logprobs += [entry.logprob for entry in choice.logprobs.content]
    whole = endpoint.completion(answer_id)
    assert text == whole.text
    assert tuple(logprobs) == whole.logprobs
    assert sum(sizes) == 40
    assert len(sizes) >= 5
    assert usage is not None
    assert usage.completion_tokens == 40


async def test_three_turns_are_append_only(endpoint: sr.OpenAIEndpoint, client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, user("one")]
    answers, logprobs = [], list[list[float]]()
    for text in ("two", "three", "four"):
        answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, logprobs=True)
        answers.append(answer)
        (choice,) = answer.choices
        assert choice.logprobs is not None
        logprobs.append([entry.logprob for entry in choice.logprobs.content or ()])
        messages += [choice.message, user(text)]
    wholes = [endpoint.completion(answer.id) for answer in answers]
    for former, latter in itertools.pairwise(wholes):
        assert all_ids(latter)[: len(all_ids(former))] == all_ids(former)
    last = wholes[-1]
    assert last.loss_mask is not None
    assert last.logprobs is not None
    sampled = [value for value, mask in zip(last.logprobs, last.loss_mask, strict=True) if mask]
    assert sampled == [value for turn in logprobs for value in turn]
    assert len({answer.session_id for answer in answers}) == 1
    assert answers[-1].usage is not None
    assert answers[-1].usage.prompt_tokens_details is not None
    assert answers[-1].usage.prompt_tokens_details.cached_tokens


async def test_several_choices(endpoint: sr.OpenAIEndpoint, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=[user("hi")], n=2, max_tokens=16)
    for choice in answer.choices:
        assert endpoint.take(f"{answer.id}-{choice.index}").text == choice.message.content
    assert answer.choices[0].message.content != answer.choices[1].message.content


@NO_GRAMMARS
async def test_a_tool_is_called_and_its_result_is_answered(
    rollout: sr.AsyncRolloutEngine, endpoint: sr.OpenAIEndpoint, client: openai.AsyncOpenAI
) -> None:
    messages: list[Any] = [user("1 + 2?")]
    first = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=[ADD], tool_choice="auto", max_tokens=200, extra_body={"regex": A_CALL}
    )
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"a", "b"}
    result = {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))}
    messages += [choice.message.model_dump(), result]
    second = await client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD], max_tokens=16)
    former, whole = endpoint.completion(first.id), endpoint.completion(second.id)
    assert all_ids(whole)[: len(all_ids(former))] == all_ids(former)
    assert f"<|im_start|>tool\n{result['content']}<|im_end|>" in rollout.tokenizer.decode(all_ids(whole))


@NO_GRAMMARS
async def test_an_answer_in_a_format(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[user("json")],
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["a"] in (1, 2)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=[user("x")], extra_body={"ebnf": "root ::= ("})
    assert caught.value.code == "invalid_grammar"


# ------------------------------------------------------------ completions


async def test_completions(endpoint: sr.OpenAIEndpoint, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["Once", "Twice"], n=2, max_tokens=8, logprobs=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        whole = endpoint.completion(f"{answer.id}-{choice.index}")
        assert choice.text == whole.text
        assert choice.logprobs is not None
        assert tuple(choice.logprobs.token_logprobs or ()) == whole.logprobs
    ids = [5, 6, 7]
    stream = await client.completions.create(model=MODEL, prompt=ids, max_tokens=20, stream=True)
    events = [event async for event in stream]
    whole = endpoint.completion(events[0].id)
    assert list(whole.prompt_ids) == ids
    assert "".join(event.choices[0].text for event in events) == whole.text


# ------------------------------------------------------------ errors, and leaving


async def test_a_wrong_key_and_a_wrong_field(endpoint: sr.OpenAIEndpoint, client: openai.AsyncOpenAI) -> None:
    async with client_of(endpoint, "sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=[user("x")], temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-5", messages=[user("x")])
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_a_prompt_that_is_too_long(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=[user("word " * 3000)])
    assert caught.value.code == "context_length_exceeded"


async def test_a_chat_may_use_up_the_context(endpoint: sr.OpenAIEndpoint, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=[user("word " * 490)], extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert len(all_ids(endpoint.completion(answer.id))) > 2000


async def test_leaving_a_stream_frees_the_engine(rollout: sr.AsyncRolloutEngine, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=[user("go on")], stream=True, **ENDLESS)
    async with stream:
        async for _ in stream:
            break
    await is_idle(rollout)
    await rollout.flush_cache(timeout_s=0.1)  # which SGLang refuses while anything runs


async def test_cancelling_a_request_frees_the_engine(
    rollout: sr.AsyncRolloutEngine, client: openai.AsyncOpenAI
) -> None:
    asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=[user("go on")], n=3, **ENDLESS))
    with anyio.fail_after(20):
        while sum(e.load.num_running for e in rollout.engines if e.load is not None) < 3:
            await anyio.sleep(0.02)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    await is_idle(rollout)
    await rollout.flush_cache(timeout_s=0.1)


async def test_closing_the_endpoint_ends_requests(rollout: sr.AsyncRolloutEngine) -> None:
    async with rollout.serve_openai(model_name=MODEL) as own, client_of(own) as client:
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=[user("go on")], **ENDLESS))
        with anyio.fail_after(20):
            while not sum(e.num_inflight for e in rollout.engines):
                await anyio.sleep(0.02)
        await anyio.sleep(0.2)
        await own.__aexit__(None, None, None)
        with pytest.raises(openai.InternalServerError) as caught:
            await asking
    assert caught.value.status_code == 503
    await is_idle(rollout)
