"""Sessions over real SGLang on the CPU: what is sent is what was sampled, and tools run between turns."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import sglrollout as sr

pytestmark = pytest.mark.slow

GREEDY = sr.Sampling(temperature=0.0, max_new_tokens=20)
CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    """The same model in transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()


async def converse(session: sr.Session, *texts: str) -> None:
    for text in texts:
        session.add(text)
        await session.generate()


async def test_what_is_sent_is_what_was_served_before_and_new_tokens(rollout: sr.AsyncRolloutEngine) -> None:
    async with rollout.session(system="Be brief.", sampling=GREEDY) as session:
        await converse(session, "What is the sky?", "And the sea?", "And the land?")
    served: tuple[int, ...] = ()
    for turn in session.turns:
        assert turn.completion.prompt_ids[: len(served)] == served
        served = turn.completion.prompt_ids + turn.completion.token_ids
    assert session.token_ids == served
    text = rollout.tokenizer.decode(served[: -len(session.turns[-1].completion.token_ids)])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the sky?<|im_end|>\n")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nAnd the land?<|im_end|>\n<|im_start|>assistant\n")


async def test_a_later_turn_is_what_a_fresh_generation_from_its_tokens_is(rollout: sr.AsyncRolloutEngine) -> None:
    async with rollout.session(sampling=GREEDY) as session:
        await converse(session, "What is the sky?", "And the sea?")
    await rollout.flush_cache()
    for turn in session.turns:
        (group,) = await rollout.generate([turn.completion.prompt_ids], sampling=GREEDY)
        assert group.completions[0].token_ids == turn.completion.token_ids


async def test_logprobs_of_sampled_tokens_are_those_of_transformers(
    rollout: sr.AsyncRolloutEngine, reference: Any
) -> None:
    import torch

    async with rollout.session(sampling=sr.Sampling(max_new_tokens=16)) as session:
        await converse(session, "What is the sky?", "And the sea?", "And the land?")
    whole = session.completion
    with torch.no_grad():
        logits = reference(torch.tensor([[*whole.prompt_ids, *whole.token_ids]])).logits[0]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    start = len(whole.prompt_ids) - 1
    expected = [
        float(logprobs[start + i, token]) if mask else 0.0
        for i, (token, mask) in enumerate(zip(whole.token_ids, whole.loss_mask or (), strict=True))
    ]
    assert whole.logprobs == pytest.approx(expected, abs=1e-4)


async def test_later_turns_find_their_prefix_in_the_cache(rollout: sr.AsyncRolloutEngine) -> None:
    async def several(i: int) -> sr.Session:
        async with rollout.session(sampling=GREEDY.replace(ignore_eos=True)) as session:
            await converse(session, f"What is number {i}?", "And the next?", "And the next?")
        return session

    for session in await asyncio.gather(*(several(i) for i in range(4))):
        assert len({turn.completion.engine for turn in session.turns}) == 1
        for former, turn in zip(session.turns, session.turns[1:], strict=False):
            served = len(former.completion.prompt_ids) + len(former.completion.token_ids)
            assert served - 1 <= turn.completion.cached_tokens < len(turn.completion.prompt_ids)


async def test_a_fork_finds_the_prefix_too(rollout: sr.AsyncRolloutEngine) -> None:
    async with rollout.session(sampling=GREEDY) as session:
        await converse(session, "What is the sky?")
        forks = [session.fork() for _ in range(3)]
        for i, fork in enumerate(forks):
            fork.add(f"And number {i}?")
        turns = await asyncio.gather(*(fork.generate() for fork in forks))
    assert {turn.completion.engine for turn in turns} == {session.turns[0].completion.engine}
    assert min(turn.completion.cached_tokens for turn in turns) >= len(session.token_ids) - 1


async def test_a_context_that_is_used_up_is_a_length_and_no_error(rollout: sr.AsyncRolloutEngine) -> None:
    async with rollout.session(sampling=sr.Sampling(max_new_tokens=4000, ignore_eos=True)) as session:
        await converse(session, "Go on and on.", "More.")
    assert session.num_turns == 1
    assert session.finish_reason == session.completion.finish_reason == "length"
    (group,) = await rollout.generate([[5]], sampling=GREEDY)  # the engine is well
    assert group.completions[0].finish_reason in ("stop", "length")


# ------------------------------------------------------------ tools


async def parsed(rollout: sr.AsyncRolloutEngine, text: str, parser: str) -> dict[str, Any]:
    """What the first engine's host makes of a text."""
    member = (await rollout._until_ready()).sampler.pool.members[0]
    return await member.engine.command(
        "parse_tool_calls", 30.0, text=text, tools=[sr.Tool.of(add).schema], parser=parser
    )


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        ("qwen25", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>",
        ),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    ],
)
async def test_an_engines_host_finds_calls(rollout: sr.AsyncRolloutEngine, parser: str, text: str) -> None:
    answer = await parsed(rollout, text, parser)
    assert [(name, json.loads(arguments)) for name, arguments in answer["calls"]] == [("add", {"a": 1, "b": 2})]
    assert answer["content"].strip() == ""


async def test_text_before_calls_is_content_and_several_calls_are_found(rollout: sr.AsyncRolloutEngine) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    for parser in ("hermes", "qwen25"):
        answer = await parsed(rollout, f"Let me see.\n{call}\n{call}", parser)
        assert (answer["content"], len(answer["calls"])) == ("Let me see.", 2)


@pytest.mark.parametrize("parser", ["hermes", "qwen25", "llama3", "mistral", "pythonic"])
@pytest.mark.parametrize(
    "text",
    [
        "It is 3.",
        "<tool_call>",
        '<tool_call>\n{"name": "add"\n</tool_call>',
        "<tool_call>\n[1]\n</tool_call>",
        '[TOOL_CALLS] [{"name"',
        "<|python_tag|>{",
        "",
        "\x00\ufffd<|im_start|>",
    ],
)
async def test_a_text_without_a_call_that_can_be_read_is_content(
    rollout: sr.AsyncRolloutEngine, parser: str, text: str
) -> None:
    assert await parsed(rollout, text, parser) == {"content": text, "calls": []}


async def test_a_call_of_a_tool_that_does_not_exist_is_a_call(rollout: sr.AsyncRolloutEngine) -> None:
    answer = await parsed(rollout, '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>', "hermes")
    assert answer["calls"] == [["subtract", "{}"]]


async def test_a_parser_that_sglang_does_not_have_is_refused(rollout: sr.AsyncRolloutEngine) -> None:
    with pytest.raises(sr.ConfigError, match=r'tool parser of the installed SGLang \(did you mean "qwen25"'):
        async with rollout.session(tools=[add], tool_parser="qwen2.5"):
            pass


async def test_a_tool_runs_between_two_turns(rollout: sr.AsyncRolloutEngine) -> None:
    forced = sr.Sampling(regex=CALL, max_new_tokens=100)
    async with rollout.session(tools=[add], tool_parser="hermes", sampling=GREEDY) as session:
        session.add("What is the sum?")
        turn = await session.generate(forced)
        (call,) = turn.tool_calls
        assert turn.content == ""
        session.add(await session.run_tools(turn))
        await session.generate()
    assert call.arguments is not None
    (result,) = session.tool_results
    assert (result.content, result.error) == (str(call.arguments["a"] + call.arguments["b"]), None)
    between = session.turns[1].completion.prompt_ids[len(turn.completion.prompt_ids) + len(turn.completion.token_ids) :]
    text = rollout.tokenizer.decode(between)
    assert text == f"\n<|im_start|>tool\n{result.content}<|im_end|>\n<|im_start|>assistant\n"


async def test_run_takes_turns_until_none_is_left(rollout: sr.AsyncRolloutEngine) -> None:
    forced = sr.Sampling(regex=CALL, max_new_tokens=100)
    async with rollout.session(tools=[add], tool_parser="hermes", sampling=forced, max_turns=3) as session:
        whole = await session.run("What is the sum?")
    assert (session.num_turns, len(session.tool_results), whole.finish_reason) == (3, 3, "length")
    assert {result.error for result in session.tool_results} == {None}
    assert whole.loss_mask is not None
    sampled = [token for token, mask in zip(whole.token_ids, whole.loss_mask, strict=True) if mask]
    assert sampled == [token for turn in session.turns for token in turn.completion.token_ids]


def test_sglang_is_not_imported_here() -> None:
    """Sessions parse tool calls with SGLang's parsers, and not in this process."""
    code = "import sys, sglrollout.session.session; sys.exit('sglang' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert "sglang.srt.function_call" not in sys.modules


# ------------------------------------------------------------ an engine dies, a sync comes


@pytest.fixture(scope="module")
async def own(tiny_model: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """Two engines of this module's own: one gets other weights, and one is killed."""
    async with sr.AsyncRolloutEngine(tiny_model, num_engines=2, device="cpu", dtype="float32") as engine:
        yield engine


LONG = sr.Sampling(temperature=0.0, max_new_tokens=400, ignore_eos=True)


async def test_a_turn_that_a_sync_aborts_goes_on_with_the_new_weights(
    own: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    from safetensors.torch import load_file

    weights = {name: tensor * 1.1 for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    async with sr.WeightSyncer(own, sr.TensorSource(weights)) as syncer, own.session() as session:
        session.add("Tell me all.")
        chunks = []
        async for chunk in session.stream(LONG, chunk_tokens=8):
            chunks.append(chunk)
            if len(chunks) == 5:
                await syncer.sync("abort")
        whole = session.completion
        assert [span.version for span in whole.weight_versions] == [0, 1]
        assert (len(whole.token_ids), whole.finish_reason) == (400, "length")
        assert [chunk.weight_version for chunk in chunks] == sorted(chunk.weight_version for chunk in chunks)
        switch = whole.weight_versions[1].start
        (group,) = await own.generate([whole.prompt_ids + whole.token_ids[:switch]], sampling=LONG)
        assert group.completions[0].token_ids[: 400 - switch] == whole.token_ids[switch:]


async def test_a_turn_goes_on_when_its_engine_is_killed(own: sr.AsyncRolloutEngine) -> None:
    async with own.session(sampling=GREEDY) as session:
        await converse(session, "What is the sky?")
        dying = next(engine for engine in own.engines if engine.name == session.turns[0].completion.engine)
        session.add("Tell me more.")
        chunks = []
        async for chunk in session.stream(LONG, chunk_tokens=8):
            chunks.append(chunk)
            if len(chunks) == 5:
                assert dying.info is not None
                psutil.Process(dying.info.pid).kill()
        turn = session.turns[1]
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == turn.completion.token_ids
        assert turn.completion.engine != dying.name
        (group,) = await own.generate([turn.completion.prompt_ids], sampling=LONG)
        assert group.completions[0].token_ids == turn.completion.token_ids
        await converse(session, "And?")
        assert session.turns[2].completion.engine == turn.completion.engine
