"""Conversations through the endpoint: what goes on from what, token by token, and what is kept of it."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.serve.conversations import Conversations, Exchange, Node
from sglrollout.serve.messages import keys_of, plain_messages, tools_given
from sglrollout.session.conversation import Conversation
from sglrollout.session.trajectory import Trajectory
from sglrollout.session.turn import Turn
from sglrollout.testing import ScriptedEngine
from sglrollout.text import Tokenizer
from tests.serving import MODEL, Said, calling, client_of, error_of, events_of, serving, until

pytestmark = pytest.mark.timeout(60)

Messages = list[dict[str, Any]]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(str(tiny_model))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(answer: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][choice]["message"]
    return message


def all_ids(completion: sr.Completion) -> tuple[int, ...]:
    return completion.prompt_ids + completion.token_ids


def random_logprobs(prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int) -> Any:
    """Text tokens, which differ each time."""
    ids = [3 + 60 + (len(prompt_ids) + 7 * index + i) % 26 for i in range(6)]
    return ids, [-float(i) for i in range(6)]


# ------------------------------------------------------------ what goes on from what


async def test_turns_go_on_token_by_token(tiny_model: Path, tokenizer: Tokenizer) -> None:
    # "ab" is one token of the tokenizer: sampled as two, it would be another prompt if it were tokenized again.
    a, b = (tokenizer.inner(letter, add_special_tokens=False)["input_ids"][0] for letter in "ab")
    assert len(tokenizer.inner("ab", add_special_tokens=False)["input_ids"]) == 1
    async with serving(tiny_model, lambda *given: ([a, b, 2], [-0.5, -0.25, -0.125])) as s:
        messages: Messages = [{"role": "system", "content": "Be brief."}, user("one")]
        answers = []
        for _ in range(4):
            answers.append(await s.chat(messages))
            messages += [said(answers[-1]), user("and then?")]
        wholes = [s.endpoint.completion(answer["id"]) for answer in answers]
        for former, latter, request in zip(wholes, wholes[1:], s.engine.submitted[1:], strict=False):
            assert tuple(request.prompt_ids[: len(all_ids(former))]) == all_ids(former)
            assert all_ids(latter)[: len(all_ids(former))] == all_ids(former)
            assert latter.logprobs is not None
            assert latter.logprobs[: len(former.token_ids)] == former.logprobs
        assert {answer["session_id"] for answer in answers} == {answers[0]["id"]}
        last = wholes[-1]
        sampled = [token for token, mask in zip(last.token_ids, last.loss_mask or (), strict=True) if mask]
        assert sampled == [a, b, 2] * 4
        assert s.endpoint.completions() == {answers[-1]["id"]: last}


async def test_a_chat_is_rendered_by_the_template(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.")) as s:
        parts = [{"type": "text", "text": "Is "}, {"type": "text", "text": "it?"}]
        answer = await s.chat([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
        expected = (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
        )
        completion = s.endpoint.completion(answer["id"])
        assert tokenizer.decode(completion.prompt_ids, skip_special_tokens=False) == expected
        assert said(answer) == {"role": "assistant", "content": "Yes.", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"
        used = {"prompt_tokens": len(completion.prompt_ids), "completion_tokens": len(completion.token_ids)}
        assert used.items() <= answer["usage"].items()


async def test_what_clients_do_to_a_message_does_not_matter(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, " Yes. \n")) as s:
        first = await s.chat([user("one")])
        noise: dict[str, Any] = {
            "audio": None,
            "function_call": None,
            "tool_calls": None,
            "annotations": [],
            "refusal": None,
        }
        parts = [{"type": "text", "text": " Yes. \n"}]
        for content in (" Yes. \n", "Yes.", parts):
            again = [user("one"), {"role": "assistant", "content": content, **noise}, user("two")]
            assert (await s.chat(again))["session_id"] == first["session_id"]


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [user("on"), {"role": "assistant", "content": "Yes."}, user("two")]},
        {"messages": [user("one"), {"role": "assistant", "content": "No."}, user("two")]},
        {"messages": [{**user("one"), "name": "Ann"}, {"role": "assistant", "content": "Yes."}, user("two")]},
        {"messages": [user("two")]},
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
async def test_what_was_not_said_begins_anew(tiny_model: Path, tokenizer: Tokenizer, change: dict[str, Any]) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes."), tool_parser=calling) as s:
        first = await s.chat([user("one")])
        messages = change.get("messages", [user("one"), said(first), user("two")])
        second = await s.chat(messages, **{name: value for name, value in change.items() if name != "messages"})
        assert second["session_id"] == second["id"] != first["id"]
        assert len(s.endpoint.completions()) == 2


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"temperature": -1}, {"messages": []}], ids=str)
async def test_a_response_that_failed_to_be_gone_on_from_is_as_if_it_had_not_been(
    tiny_model: Path, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.")) as s:
        firsts = [await s.chat([user("one")]) for _ in range(2)]
        trunk = [user("one"), said(firsts[0])]
        s.engine.fail_request = lambda request: "no"
        body = {"model": MODEL, "messages": [*trunk, user("two")], **fields}
        assert error_of(await s.client.post("/chat/completions", json=body))
        s.engine.fail_request = None
        for first in [*firsts, *firsts]:
            assert (await s.chat([*trunk, user("two")]))["session_id"] == first["id"]


async def test_branches_leave_each_other_alone(tiny_model: Path) -> None:
    async with serving(tiny_model, random_logprobs) as s:
        first = await s.chat([user("one")])
        trunk = [user("one"), said(first)]
        left, right = await s.chat([*trunk, user("left")]), await s.chat([*trunk, user("right")])
        again = await s.chat([*trunk, user("left"), said(left), user("on")])
        assert {answer["session_id"] for answer in (left, right, again)} == {first["id"]}
        ids = {name: all_ids(s.endpoint.completion(answer["id"])) for name, answer in
               {"first": first, "left": left, "right": right, "again": again}.items()}  # fmt: skip
        assert ids["left"][: len(ids["first"])] == ids["right"][: len(ids["first"])] == ids["first"]
        assert ids["again"][: len(ids["left"])] == ids["left"]
        assert set(s.endpoint.completions()) == {right["id"], again["id"]}


async def test_choices_are_branches(tiny_model: Path) -> None:
    async with serving(tiny_model, random_logprobs) as s:
        answer = await s.chat([user("one")], n=3)
        texts = [said(answer, i)["content"] for i in range(3)]
        assert len(set(texts)) == 3
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        for i in range(3):
            assert s.endpoint.completion(f"{answer['id']}-{i}").text == texts[i]
        with pytest.raises(sr.ConfigError, match=f'must name one choice of this response, as in "{answer["id"]}-0"'):
            s.endpoint.completion(answer["id"])
        onward = await s.chat([user("one"), said(answer, 1), user("two")])
        assert onward["session_id"] == answer["id"]
        former = all_ids(s.endpoint.completion(f"{answer['id']}-1"))
        assert all_ids(s.endpoint.completion(onward["id"]))[: len(former)] == former


async def test_agents_that_hear_the_same_keep_a_conversation_each(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.")) as s:
        firsts = [await s.chat([user("one")]) for _ in range(4)]
        seconds: list[dict[str, Any]] = []

        async def go_on(first: dict[str, Any]) -> None:
            seconds.append(await s.chat([user("one"), said(first), user("two")]))

        async with anyio.create_task_group() as tasks:
            for first in firsts:
                tasks.start_soon(go_on, first)
        assert {second["session_id"] for second in seconds} == {first["id"] for first in firsts}
        assert set(s.endpoint.completions()) == {second["id"] for second in seconds}


async def test_a_turn_that_was_cut_can_be_gone_on_with(tiny_model: Path) -> None:
    async with serving(tiny_model, random_logprobs) as s:
        first = await s.chat([user("one")], max_tokens=3)
        assert first["choices"][0]["finish_reason"] == "length"
        rest = await s.chat([user("one"), said(first)])
        whole = s.endpoint.completion(rest["id"])
        assert whole.loss_mask == (1,) * len(whole.token_ids)
        assert whole.token_ids[:3] == s.endpoint.completion(first["id"]).token_ids
        ended = await s.chat([user("one"), said(first), said(rest)])
        assert ended["session_id"] == first["id"]  # after a turn that had ended, its text is a part of the prompt
        last = s.endpoint.completion(ended["id"])
        assert last.token_ids[:3] == whole.token_ids[:3]
        assert 0 in (last.loss_mask or ())


async def test_a_template_that_cannot_go_on_begins_a_session_of_its_own(
    tiny_model: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.")) as s:
        first = await s.chat([user("one")])
        # A template that puts every system message in front.
        s.rollout.tokenizer.chat_template = (
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
            "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        )
        late = [user("one"), said(first), {"role": "system", "content": "SECRET"}, user("two")]
        for fields in ({}, {"n": 3}):
            second = await s.chat(late, **fields)
            assert second["session_id"] == second["id"]
        assert "cannot go on with messages of roles ['system', 'user']" in caplog.text
        assert "SECRET" not in caplog.text


async def test_a_prompt_without_room_is_refused_as_openai_does(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes."), engine={"context_length": 64}) as s:
        first = await s.chat([user("one")])
        body = {"model": MODEL, "messages": [user("one"), said(first), user("word " * 60)]}
        for stream in (False, True):
            response = await s.client.post("/chat/completions", json={**body, "stream": stream})
            assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert list(s.endpoint.completions()) == [first["id"]]


async def test_a_failed_request_leaves_nothing(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.")) as s:
        first = await s.chat([user("one")])
        s.engine.fail_request = lambda request: "no" if request.request_id == 2 else None
        body = {"model": MODEL, "messages": [user("one"), said(first), user("two")], "n": 2}
        assert (await s.client.post("/chat/completions", json=body)).status_code == 500
        assert list(s.endpoint.completions()) == [first["id"]]
        again = await s.chat([user("one"), said(first), user("two")], n=2)
        assert again["session_id"] == first["id"]


async def test_turns_know_their_weights(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.")) as s:
        first = await s.chat([user("one")])
        s.engine.weight_version = 3
        second = await s.chat([user("one"), said(first), user("two")])
        whole, num_first = s.endpoint.completion(second["id"]), first["usage"]["completion_tokens"]
        assert [span.version for span in whole.weight_versions] == [0, 3]
        had = (await s.client.get(f"/conversations/{second['id']}")).json()["weight_versions"]
        assert had[0] == {"version": 0, "start": len(whole.prompt_ids), "end": len(whole.prompt_ids) + num_first}
        assert [span["version"] for span in had] == [0, 3]


# ------------------------------------------------------------ tools


async def test_calls_come_as_openai_has_them_and_results_go_on(tiny_model: Path, tokenizer: Tokenizer) -> None:
    script = Said(tokenizer, 'Let me see. @add {"a": 1, "b": "ü"}', "Three.")
    async with serving(tiny_model, script, tool_parser=calling) as s:
        messages: Messages = [user("1 + 2?")]
        first = await s.chat(messages, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
        (choice,) = first["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see. "
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "ü"}
        respaced = json.dumps(json.loads(call["function"]["arguments"]), indent=1, ensure_ascii=False)
        call["function"]["arguments"] = respaced
        messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        second = await s.chat(messages, tools=[TOOL])
        assert second["session_id"] == first["id"]
        whole = s.endpoint.completion(second["id"])
        assert "\n<|im_start|>tool\n3<|im_end|>\n" in tokenizer.decode(whole.token_ids, skip_special_tokens=False)
        former = s.endpoint.completion(first["id"]).token_ids
        assert whole.token_ids[: len(former)] == former


async def test_a_call_without_words_has_no_content(tiny_model: Path, tokenizer: Tokenizer) -> None:
    for arguments in ("{}", "nonsense", '{"a": "\\ud83d"}', '{"a": NaN}'):
        async with serving(tiny_model, Said(tokenizer, f"@add {arguments}", "ok"), tool_parser=calling) as s:
            first = await s.chat([user("one")], tools=[TOOL])
            assert said(first)["content"] is None
            (call,) = said(first)["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            second = await s.chat([user("one"), said(first), result], tools=[TOOL])
            assert second["session_id"] == first["id"], arguments
            response = await s.client.get(f"/conversations/{second['id']}")
            assert response.json()["messages"][1]["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.parametrize("depth", [101, 900, 100_000])
async def test_arguments_that_are_nested_too_deeply_stay_the_text_that_they_are(
    tiny_model: Path, tokenizer: Tokenizer, depth: int
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth

    def parse(text: str) -> tuple[str, list[tuple[str, Any]]]:
        return "", [("add", deep)]

    async with serving(tiny_model, Said(tokenizer, "@", "ok"), tool_parser=parse) as s:
        first = await s.chat([user("one")], tools=[TOOL])
        (call,) = said(first)["tool_calls"]
        assert call["function"]["arguments"] == deep
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        second = await s.chat([user("one"), said(first), result], tools=[TOOL])
        assert second["session_id"] == first["id"]
        anew = await s.chat([user("two"), said(first), result], tools=[TOOL])
        assert anew["session_id"] == anew["id"]


async def test_a_tool_parser_that_is_slow_holds_nobody_up(tiny_model: Path, tokenizer: Tokenizer) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def parse(text: str) -> tuple[str, list[tuple[str, Any]]]:
        begun.set()
        assert go_on.wait(20)
        return calling(text)

    async with serving(tiny_model, Said(tokenizer, "@add {}"), tool_parser=parse) as s:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: s.chat([user("one")], tools=[TOOL]))
                await until(begun.is_set)
                assert (await s.chat([user("one")]))["choices"]
                go_on.set()
        finally:
            go_on.set()
        assert len(s.endpoint.completions()) == 2


async def test_tool_choice_none_gives_the_text_as_it_is(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "So: @add {}"), tool_parser=calling) as s:
        first = await s.chat([user("one")], tools=[TOOL], tool_choice="none")
        assert said(first) == {"role": "assistant", "content": "So: @add {}", "refusal": None}
        assert first["choices"][0]["finish_reason"] == "stop"
        second = await s.chat([user("one"), said(first), user("two")], tools=[TOOL])
        assert second["session_id"] == first["id"]
        assert second["choices"][0]["finish_reason"] == "tool_calls"


async def test_calls_of_a_history_reach_the_template_as_mappings(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "ok"), tool_parser=calling) as s:
        s.rollout.tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}\n{% endfor %}"
        )
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 41}'}}
        history = [user("one"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
        answer = await s.chat(history)
        assert "assistant: 41" in tokenizer.decode(s.endpoint.completion(answer["id"]).prompt_ids)


# ------------------------------------------------------------ streams


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_says_what_is_kept(tiny_model: Path, n: int) -> None:
    async with serving(tiny_model, random_logprobs) as s:
        fields = {"n": n, "stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
        body = {"model": MODEL, "messages": [user("one")], **fields}
        response = await s.client.post("/chat/completions", json=body)
        *events, last = events_of(response.text)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 6 * n
        assert {event["usage"] for event in events} == {None}
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        (response_id,) = {event["id"] for event in events}
        assert response.headers["x-session-id"] == response_id == events[0]["session_id"]
        for i in range(n):
            parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == i]
            assert parts[0]["delta"]["role"] == "assistant"
            assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
            completion = s.endpoint.completion(response_id if n == 1 else f"{response_id}-{i}")
            assert "".join(part["delta"].get("content", "") for part in parts) == completion.text
            logprobs = [entry["logprob"] for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert tuple(logprobs) == completion.logprobs
        text = s.endpoint.completion(response_id if n == 1 else f"{response_id}-0").text
        onward = await s.chat([user("one"), {"role": "assistant", "content": text}, user("two")])
        assert onward["session_id"] == response_id


async def test_a_stream_with_tools_comes_once_it_is_parsed(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Well. @add {}", "Three."), tool_parser=calling) as s:
        body = {"model": MODEL, "messages": [user("one")], "tools": [TOOL], "stream": True}
        events = events_of((await s.client.post("/chat/completions", json=body)).text)
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[1]["content"] == "Well. "
        assert deltas[1]["tool_calls"][0]["index"] == 0
        assert deltas[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        events = events_of((await s.client.post("/chat/completions", json=body)).text)
        assert [event["choices"][0]["delta"] for event in events][1] == {"content": "Three."}


# ------------------------------------------------------------ completions


async def test_completions_of_texts_and_token_ids(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.")) as s:
        for prompt in ("Is it?", [5, 6, 7], ["Is it?", "Or not?"], [[5, 6], [7]], ["Is it?", [5]]):
            fields = {"prompt": prompt, "n": 2, "logprobs": 1}
            answer = (await s.client.post("/completions", json={"model": MODEL, **fields})).json()
            prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
            assert [choice["index"] for choice in answer["choices"]] == [*range(2 * len(prompts))]
            for choice in answer["choices"]:
                whole, given = s.endpoint.completion(f"{answer['id']}-{choice['index']}"), prompts[choice["index"] // 2]
                assert list(whole.prompt_ids) == (tokenizer.encode(given) if isinstance(given, str) else given)
                assert choice["text"] == "Yes." == "".join(choice["logprobs"]["tokens"][:-1])
                assert tuple(choice["logprobs"]["token_logprobs"]) == whole.logprobs
                assert choice["logprobs"]["text_offset"][:2] == [0, len(choice["logprobs"]["tokens"][0])]


async def test_a_completion_has_16_tokens_unless_it_is_told(tiny_model: Path) -> None:
    async with serving(tiny_model) as s:
        body = {"model": MODEL, "prompt": "a", "ignore_eos": True}
        answer = (await s.client.post("/completions", json=body)).json()
        assert (answer["usage"]["completion_tokens"], answer["object"]) == (16, "text_completion")


async def test_a_completion_is_streamed(tiny_model: Path) -> None:
    async with serving(tiny_model) as s:
        body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 40, "stream": True, "logprobs": 0}
        events = events_of((await s.client.post("/completions", json=body)).text)
        for i in range(2):
            parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == i]
            whole = s.endpoint.completion(f"{events[0]['id']}-{i}")
            assert "".join(part["text"] for part in parts) == whole.text
            values = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
            assert tuple(values) == whole.logprobs
            assert parts[-1]["finish_reason"] == whole.finish_reason


async def test_token_ids_need_no_tokenizer() -> None:
    config = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
    async with (
        sr.AsyncRolloutEngine(config=config, engines=[ScriptedEngine()]) as rollout,
        rollout.serve_openai() as endpoint,
        client_of(endpoint) as client,
    ):
        body = {"model": "org/name", "prompt": [1, 2], "logprobs": 0}
        for stream in (False, True):
            response = await client.post("/completions", json={**body, "stream": stream})
            assert response.status_code == 200
        assert (await client.post("/completions", json={**body, "prompt": "a"})).status_code == 400
        chat = await client.post("/chat/completions", json={"model": "org/name", "messages": [user("a")]})
        assert error_of(chat)["param"] == "messages"


# ------------------------------------------------------------ what is kept


async def test_a_conversation_can_be_had_by_http(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.", "No."), engine={"weight_version": 4}) as s:
        first = await s.chat([user("one")])
        second = await s.chat([user("one"), said(first), user("two")])
        had = (await s.client.get(f"/conversations/{second['id']}")).json()
        whole = s.endpoint.completion(second["id"])
        assert tuple(had["token_ids"]) == all_ids(whole)
        assert had["num_prompt_tokens"] == len(whole.prompt_ids)
        start = had["num_prompt_tokens"]
        assert tuple(had["loss_mask"][start:]) == whole.loss_mask
        assert tuple(had["logprobs"][start:]) == whole.logprobs
        assert {span["version"] for span in had["weight_versions"]} == {4}
        assert [message["role"] for message in had["messages"]] == ["user", "assistant", "user", "assistant"]
        assert (had["parent_id"], had["session_id"], had["finish_reason"]) == (first["id"], first["id"], "stop")
        response = await s.client.get("/conversations/chatcmpl-nonsense")
        assert (response.status_code, error_of(response)["code"]) == (404, "conversation_not_found")


async def test_the_longest_unused_are_evicted_and_it_says_so(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes."), max_conversations=2) as s:
        first, second = await s.chat([user("1")]), await s.chat([user("2")])
        onward = await s.chat([user("1"), said(first), user("on")])
        third = await s.chat([user("3")])
        assert set(s.endpoint.completions()) == {onward["id"], third["id"]}
        response = await s.client.get(f"/conversations/{second['id']}")
        assert response.status_code == 404
        assert "evicted: no more than 2 are kept" in error_of(response)["message"]
        with pytest.raises(sr.ConfigError, match="was evicted"):
            s.endpoint.take(second["id"])
        again = await s.chat([user("2"), said(second), user("on")])
        assert again["session_id"] == again["id"]


async def test_taking_one_branch_leaves_the_others(tiny_model: Path) -> None:
    async with serving(tiny_model, random_logprobs) as s:
        first = await s.chat([user("one")])
        trunk = [user("one"), said(first)]
        left, right = await s.chat([*trunk, user("left")]), await s.chat([*trunk, user("right")])
        whole = s.endpoint.completion(left["id"])
        assert s.endpoint.take(left["id"]) == whole
        with pytest.raises(sr.ConfigError, match="never given out, or was forgotten"):
            s.endpoint.completion(left["id"])
        assert set(s.endpoint.completions()) == {right["id"]}
        assert s.endpoint.completion(first["id"]).token_ids
        s.endpoint.forget(right["id"])
        assert s.endpoint.completions() == {}
        assert _is_empty(s.endpoint._conversations)
        with pytest.raises(sr.ConfigError):
            s.endpoint.forget(first["id"])


async def test_forgetting_the_beginning_forgets_all_that_followed(tiny_model: Path) -> None:
    async with serving(tiny_model, random_logprobs) as s:
        first = await s.chat([user("one")])
        await s.chat([user("one"), said(first), user("left")], n=2)
        s.endpoint.forget(first["id"])
        assert _is_empty(s.endpoint._conversations)


async def test_what_was_said_remains_after_the_block(tiny_model: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny_model, Said(tokenizer, "Yes.")) as s:
        first = await s.chat([user("one")])
    assert s.endpoint.take(first["id"]).text == "Yes."


async def test_many_agents_at_once(tiny_model: Path) -> None:
    async with serving(tiny_model, random_logprobs, engine={"max_running": 8}) as s:

        async def agent(i: int) -> None:
            messages: Messages = [user(f"I am {i}")]
            former: tuple[int, ...] = ()
            for _ in range(4):
                answer = await s.chat(messages)
                ids = all_ids(s.endpoint.completion(answer["id"]))
                assert ids[: len(former)] == former
                former = ids
                messages += [said(answer), user("and?")]

        async with anyio.create_task_group() as tasks:
            for i in range(24):
                tasks.start_soon(agent, i)
        assert len(s.endpoint.completions()) == 24
        assert s.idle


async def test_a_conversation_takes_memory_for_each_token_once_however_many_turns(tiny_model: Path) -> None:
    async with serving(tiny_model, random_logprobs, engine={"context_length": 100_000}) as s:
        messages: Messages = [user("one")]
        num_elements, num_tokens = [], 0
        for i in range(1, 101):
            answer = await s.chat(messages)
            messages += [said(answer), user("and?")]
            if i in (50, 100):
                num_elements.append(_num_elements(s.endpoint._conversations))
                num_tokens = len(all_ids(s.endpoint.completion(answer["id"])))
        assert num_elements[1] < 2.2 * num_elements[0]
        assert num_elements[1] < 3 * num_tokens


async def test_every_response_of_a_conversation_remains_as_it_was(tiny_model: Path) -> None:
    async with serving(tiny_model, random_logprobs) as s:
        messages: Messages = [user("0")]
        wholes, trunks = {}, []
        for i in range(1, 6):
            s.engine.weight_version = i
            answer = await s.chat(messages)
            wholes[answer["id"]] = s.endpoint.completion(answer["id"])
            trunks.append([*messages, said(answer), user("another way")])
            messages += [said(answer), user(str(i))]
        for i, trunk in enumerate(trunks, 1):
            branch = s.endpoint.completion((await s.chat(trunk))["id"])
            former = list(wholes.values())[i - 1]
            assert all_ids(branch)[: len(all_ids(former))] == all_ids(former)
            assert (branch.logprobs or ())[: len(former.token_ids)] == former.logprobs
            assert [span.version for span in former.weight_versions] == [*range(1, i + 1)]
        assert {response_id: s.endpoint.completion(response_id) for response_id in wholes} == wholes


async def test_the_messages_of_a_conversation_are_those_that_were_sent_both_ways(
    tiny_model: Path, tokenizer: Tokenizer
) -> None:
    script = Said(tokenizer, '@add {"b":1,  "a": 2}', "@add [", "Well. @add {}", " Yes. ")
    async with serving(tiny_model, script, tool_parser=calling) as s:
        parts = [{"type": "text", "text": "1 "}, {"type": "text", "text": "+ 2?"}]
        messages: Messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts, "name": "Ann"},
        ]
        expected = [*messages]
        for choice in ("auto", "auto", "none", "auto"):
            answer = await s.chat(messages, tools=[TOOL], tool_choice=choice)
            message = said(answer)
            expected.append(message)
            had = (await s.client.get(f"/conversations/{answer['id']}")).json()
            assert had["messages"] == expected
            assert answer["session_id"] == had["session_id"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message.get("tool_calls", ())
            ]
            new = results or [user("and?")]
            trimmed = {**message, "content": (message["content"] or "").strip(), "refusal": None, "annotations": []}
            messages, expected = [*messages, trimmed, *new], [*expected, *new]


def _num_elements(kept: Conversations) -> int:
    """Elements of all lists and tuples in what is kept of conversations, each list and tuple once."""
    found, queue = dict[int, Any](), [*kept._nodes.values()]
    inside = (Node, Exchange, Turn, sr.Completion, sr.Session, Conversation, Trajectory, list, tuple, dict)
    while queue:
        value = queue.pop()
        if isinstance(value, inside) and id(value) not in found:
            found[id(value)] = value
            queue += gc.get_referents(value)
    return sum(len(value) for value in found.values() if isinstance(value, (list, tuple)))


def _is_empty(kept: Conversations) -> bool:
    return not (kept._nodes or kept._by_key or kept._by_session)


def test_a_long_conversation_can_be_forgotten() -> None:
    kept = Conversations(5)
    node: Node | None = None
    for i in range(5000):
        node = Node(str(i), "0", None, None, str(i).encode(), node)  # type: ignore[arg-type]
        kept.add(node)
    assert node is not None
    assert [leaf.id for leaf in kept.leaves()] == ["4999"]
    kept.forget(node)
    assert _is_empty(kept)


def test_keys_tell_apart_what_templates_may_tell_apart() -> None:
    base: Messages = [user("one"), {"role": "assistant", "content": "Yes."}]
    tools = tools_given([TOOL])
    keys = {keys_of(plain_messages(base), [], {})[-1], keys_of(plain_messages(base), tools, {})[-1]}
    keys |= {keys_of(plain_messages([*base[:1], *base[:1], base[1]]), [], {})[-1]}
    keys |= {keys_of(plain_messages([user("one "), base[1]]), [], {})[-1]}
    assert len(keys) == 4
    first, _ = keys_of(plain_messages(base), [], {})
    assert first == keys_of(plain_messages(base[:1]), [], {})[0]
