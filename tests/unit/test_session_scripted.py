"""Sessions over engines that say what a script says: tokens, tools, failover, forks, environments, and their ends."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.testing import ScriptedEngine
from sglrollout.text import Tokenizer
from sglrollout.wire.messages import Finish

pytestmark = pytest.mark.timeout(30)

END = 2  # <|im_end|>
LONG = sr.Sampling(max_new_tokens=400, ignore_eos=True)
PENALIZED = LONG.replace(frequency_penalty=0.5)  # cannot be gone on with in the middle


class Said:
    """A script that says one text after another, each ended by ``<|im_end|>``, and the last one for ever."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        self._tokenizer, self._texts, self.num_said = tokenizer, texts, 0

    def __call__(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int
    ) -> tuple[Sequence[int], Sequence[float]]:
        text = self._texts[min(self.num_said, len(self._texts) - 1)]
        self.num_said += 1
        ids = [*self._tokenizer.inner(text, add_special_tokens=False)["input_ids"], END]
        return ids, [-0.5 - i / 8 for i in range(len(ids))]


def continuing(prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int) -> Any:
    """Each token is the length of what is before it: the same on every engine, and when it goes on in the middle."""
    start, count = len(prompt_ids), sampling["max_new_tokens"]
    return [3 + i % 250 for i in range(start, start + count)], [-float(i) for i in range(start, start + count)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(str(tiny_model))


@pytest.fixture
def config(tiny_model: Path) -> sr.RolloutConfig:
    return sr.RolloutConfig(model=str(tiny_model), progress=False, max_restarts=0)


@pytest.fixture
def start(config: sr.RolloutConfig) -> Callable[..., sr.AsyncRolloutEngine]:
    """``start(engine, ...)``: a rollout with a tokenizer, over these engines."""

    def start(*engines: ScriptedEngine, **options: Any) -> sr.AsyncRolloutEngine:
        return sr.AsyncRolloutEngine(config=config.replace(**options), engines=engines)

    return start


def engine(script: Any, name: str = "engine-0", **options: Any) -> ScriptedEngine:
    return ScriptedEngine(name, script, vocab_size=512, **options)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def is_idle(rollout: sr.AsyncRolloutEngine, *engines: ScriptedEngine) -> bool:
    slots = sum(status.num_inflight for status in rollout.engines)
    return not (slots or rollout.num_queued or any(engine.num_running or engine.num_waiting for engine in engines))


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await asyncio.sleep(0)


class Unspeakable:
    """What no template can render."""

    def __str__(self) -> str:
        raise ValueError("no words for it")


UNSPEAKABLE = Unspeakable()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


# ------------------------------------------------------------ tokens


async def test_a_session_is_what_was_rendered_and_what_was_sampled(start: Any, tokenizer: Tokenizer) -> None:
    script = engine(Said(tokenizer, "It is 3.", "Six."))
    async with start(script) as rollout, rollout.session(system="Be brief.") as s:
        s.add("What is 1 + 2?")
        first = await s.generate()
        s.add([{"role": "user", "content": "And twice that?"}])
        second = await s.generate()
        assert (first.index, first.text, first.content, first.finish_reason) == (0, "It is 3.", "It is 3.", "stop")
        assert (second.index, second.text, s.num_turns) == (1, "Six.", 2)
        expected = (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n"
            "<|im_start|>assistant\nIt is 3.<|im_end|>\n<|im_start|>user\nAnd twice that?<|im_end|>\n"
            "<|im_start|>assistant\nSix.<|im_end|>"
        )
        assert tokenizer.decode(s.token_ids, skip_special_tokens=False) == expected
        assert s.token_ids == (*second.completion.prompt_ids, *second.completion.token_ids)
        assert [message["role"] for message in s.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert [turn.text for turn in s.turns] == ["It is 3.", "Six."]
        assert s.finish_reason == "stop"


async def test_what_is_sent_is_what_was_served_before_and_new_tokens(start: Any) -> None:
    scripted = engine(continuing)
    async with start(scripted) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=5)) as s:
        for i in range(5):
            s.add(f"turn {i}")
            await s.generate()
    served = [(*r.prompt_ids, *r.token_ids) for r in scripted.submitted]
    for former, request in zip(served, scripted.submitted[1:], strict=False):
        assert tuple(request.prompt_ids[: len(former)]) == former
    assert served[-1] == s.token_ids


async def test_the_mask_and_the_logprobs_are_those_of_sampled_tokens(start: Any, tokenizer: Tokenizer) -> None:
    async with start(engine(Said(tokenizer, "It is 3.", "Six."))) as rollout, rollout.session() as s:
        for text in ("What is 1 + 2?", "And twice that?"):
            s.add(text)
            await s.generate()
        sampled = [token for token, mask in zip(s.token_ids, s.loss_mask, strict=True) if mask]
        assert sampled == [token for turn in s.turns for token in turn.completion.token_ids]
        assert s.logprobs is not None
        assert len(s.logprobs) == len(s.token_ids)
        logprobs = [value for value, mask in zip(s.logprobs, s.loss_mask, strict=True) if mask]
        assert logprobs == [value for turn in s.turns for value in turn.completion.logprobs or ()]
        assert {value for value, mask in zip(s.logprobs, s.loss_mask, strict=True) if not mask} == {0.0}


async def test_the_whole_is_one_completion(start: Any, tokenizer: Tokenizer) -> None:
    scripted = engine(Said(tokenizer, "It is 3.", "Six.", "Twelve."), weight_version=3)
    async with start(scripted) as rollout, rollout.session(system="Be brief.") as s:
        for i, text in enumerate(("What is 1 + 2?", "And twice that?", "And twice that?")):
            if i == 2:
                scripted.weight_version = 7
            s.add(text)
            await s.generate()
        s.add("This waits for the next turn.")
        whole, (first, _, third) = s.completion, s.turns
    assert whole.prompt_ids == first.completion.prompt_ids
    assert whole.prompt_ids + whole.token_ids == s.token_ids
    assert whole.loss_mask == s.loss_mask[len(whole.prompt_ids) :]
    assert whole.loss_mask[0] == whole.loss_mask[-1] == 1
    assert whole.finish_reason == "stop"
    switch = len(third.completion.prompt_ids) - len(whole.prompt_ids)
    assert whole.weight_versions == ((3, 0, switch), (7, switch, len(whole.token_ids)))
    begins = [len(turn.completion.prompt_ids) for turn in s.turns]
    ends = [b + len(turn.completion.token_ids) for b, turn in zip(begins, s.turns, strict=True)]
    assert s.weight_versions == ((3, begins[0], ends[0]), (3, begins[1], ends[1]), (7, begins[2], ends[2]))
    assert "Six.\nuser\nAnd twice that?" in whole.text
    assert whole.engine == "engine-0"
    assert whole.timings is not None
    assert whole.timings.first_token_s is not None
    assert 0 < whole.timings.first_token_s <= whole.timings.total_s
    group = sr.Group("p", whole.prompt_ids, (whole,))
    assert group.oldest_version == 3


async def test_without_logprobs_there_are_none(start: Any, tokenizer: Tokenizer) -> None:
    async with start(engine(Said(tokenizer, "one"))) as rollout, rollout.session() as s:
        s.add("a")
        await s.generate()
        s.add("b")
        await s.generate(sr.Sampling(logprobs=False))
        assert s.logprobs is None
        assert s.completion.logprobs is None
        assert len(s.completion.token_ids) > 0


async def test_token_ids_may_begin_the_models_turn(start: Any, tokenizer: Tokenizer) -> None:
    prefill = tokenizer.inner("Well,", add_special_tokens=False)["input_ids"]
    async with start(engine(Said(tokenizer, " it is 3."))) as rollout, rollout.session() as s:
        s.add("What is 1 + 2?")
        s.add_tokens(prefill)
        turn = await s.generate()
        assert tokenizer.decode(turn.completion.prompt_ids).endswith("assistant\nWell,")
        assert s.loss_mask[: len(turn.completion.prompt_ids)] == (0,) * len(turn.completion.prompt_ids)


async def test_token_ids_are_all_that_a_session_needs() -> None:
    scripted = ScriptedEngine(script=continuing)
    config = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
    short = sr.Sampling(max_new_tokens=4)
    async with (
        sr.AsyncRolloutEngine(config=config, engines=[scripted]) as rollout,
        rollout.session(sampling=short) as s,
    ):
        s.add_tokens([5, 6, 7])
        turn = await s.generate()
        assert (turn.completion.token_ids, turn.content) == ((6, 7, 8, 9), "")
        s.add_tokens([1, 2])
        await s.generate()
        assert s.token_ids == (5, 6, 7, 6, 7, 8, 9, 1, 2, 12, 13, 14, 15)
        assert s.loss_mask == (0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1)
        assert s.completion.loss_mask == (1, 1, 1, 1, 0, 0, 1, 1, 1, 1)
        assert s.completion.weight_versions == ((0, 0, 10),)
        assert s.messages == ()
        s.add("a text")
        with pytest.raises(sr.ConfigError, match="need a tokenizer with a chat template"):
            await s.generate()


async def test_a_turn_that_was_cut_can_be_gone_on_with(start: Any) -> None:
    async with start(engine(continuing)) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=5)) as s:
        s.add("count")
        first = await s.generate()
        second = await s.generate()
        assert first.finish_reason == "length"
        assert second.completion.prompt_ids == first.completion.prompt_ids + first.completion.token_ids
        s.add("and on")
        await s.generate()
        assert s.num_turns == 3


async def test_a_turn_needs_something_to_answer(start: Any, tokenizer: Tokenizer) -> None:
    async with start(engine(Said(tokenizer, "one"))) as rollout, rollout.session() as s:
        for _ in range(2):
            with pytest.raises(sr.LifecycleError, match="nothing was added"):
                await s.generate()
            s.add("a")
            await s.generate()


async def test_messages_cannot_follow_token_ids_that_nobody_answered(start: Any, tokenizer: Tokenizer) -> None:
    async with start(engine(Said(tokenizer, "one"))) as rollout, rollout.session() as s:
        s.add_tokens([5])
        with pytest.raises(sr.ConfigError, match="cannot follow token ids"):
            s.add("a")


# ------------------------------------------------------------ tools


async def test_run_takes_turns_with_the_tools(start: Any, tokenizer: Tokenizer) -> None:
    scripted = engine(Said(tokenizer, "Let me see. " + called("add", a=1, b=2), "It is 3."))
    async with start(scripted) as rollout, rollout.session(tools=[add], tool_parser="hermes") as s:
        whole = await s.run("What is 1 + 2?")
        first, second = s.turns
        assert (first.content, [(c.id, c.name, c.arguments) for c in first.tool_calls]) == (
            "Let me see.",
            [("call00000", "add", {"a": 1, "b": 2})],
        )
        assert first.text.startswith("Let me see. <tool_call>")
        assert (second.content, second.tool_calls) == ("It is 3.", ())
        assert [result.content for result in s.tool_results] == ["3"]
        assert "\n<|im_start|>tool\n3<|im_end|>\n" in tokenizer.decode(s.token_ids, skip_special_tokens=False)
        assert [message["role"] for message in s.messages] == ["user", "assistant", "tool", "assistant"]
        assert s.messages[1]["tool_calls"] == [first.tool_calls[0].as_sent]
        assert (whole.finish_reason, s.finish_reason) == ("stop", "stop")
        assert whole.loss_mask is not None
        assert sum(whole.loss_mask) == sum(len(turn.completion.token_ids) for turn in s.turns)


async def test_calls_of_one_turn_run_at_once_and_are_numbered_through(start: Any, tokenizer: Tokenizer) -> None:
    both = asyncio.Barrier(2)

    async def meet(i: int) -> str:
        await both.wait()
        return f"met {i}"

    calls = called("meet", i=1) + "\n" + called("meet", i=2)
    scripted = engine(Said(tokenizer, calls, calls, "Done."))
    async with start(scripted) as rollout, rollout.session(tools=[meet], tool_parser="hermes") as s:
        await s.run("Go.")
        assert [result.content for result in s.tool_results] == ["met 1", "met 2"] * 2
        assert [result.call.id for result in s.tool_results] == [f"call{i:05d}" for i in range(4)]


async def test_what_goes_wrong_in_a_tool_is_told_to_the_model(start: Any, tokenizer: Tokenizer) -> None:
    async def hang() -> None:
        await anyio.sleep(60)

    texts = [called("add", a="x", b=2), called("subtract"), called("hang"), "Sorry."]
    scripted = engine(Said(tokenizer, *texts))
    options: dict[str, Any] = {"tools": [add, hang], "tool_parser": "hermes", "tool_timeout_s": 0.05}
    async with start(scripted) as rollout, rollout.session(**options) as s:
        await s.run("Go.")
        assert s.finish_reason == "stop"
        assert [str(message["content"])[:30] for message in s.messages if message["role"] == "tool"] == [
            "error: wrong arguments: a: Inp",
            "error: there is no tool 'subtr",
            "error: it did not finish withi",
        ]


@pytest.mark.parametrize("text", ['<tool_call>{"name": "add"', "<tool_call>[1]</tool_call>", "<tool_call></tool_call>"])
async def test_a_malformed_call_is_text(start: Any, tokenizer: Tokenizer, text: str) -> None:
    scripted = engine(Said(tokenizer, text))
    async with start(scripted) as rollout, rollout.session(tools=[add], tool_parser="hermes") as s:
        await s.run("Go.")
        assert (s.turns[0].content, s.turns[0].tool_calls, s.num_turns) == (text, (), 1)


async def test_the_parser_may_be_a_function(start: Any, tokenizer: Tokenizer) -> None:
    def parse(text: str) -> tuple[str, list[tuple[str, Any]]]:
        found = re.search(r"ADD (\d+) (\d+)", text)
        return ("", [("add", {"a": found[1], "b": found[2]})]) if found else (text, [])

    async with start(engine(Said(tokenizer, "ADD 1 2", "3"))) as rollout:
        async with rollout.session(tools=[add], tool_parser=parse) as s:
            await s.run("Go.")
            assert [result.content for result in s.tool_results] == ["3"]
        async with rollout.session(tools=[add], tool_parser=lambda text: text) as s:
            with pytest.raises(sr.ConfigError, match="tool_parser must give"):
                await s.run("Go.")
            assert s.num_turns == 0


async def test_a_loop_of_ones_own_runs_the_tools_itself(start: Any, tokenizer: Tokenizer) -> None:
    scripted = engine(Said(tokenizer, called("add", a=1, b=2), "It is 3."))
    async with start(scripted) as rollout, rollout.session(tools=[add], tool_parser="hermes") as s:
        s.add("What is 1 + 2?")
        while (turn := await s.generate()).tool_calls:
            s.add(await s.run_tools(turn))
        assert turn.text == "It is 3."


async def test_max_turns_end_a_session_with_length(start: Any, tokenizer: Tokenizer) -> None:
    scripted = engine(Said(tokenizer, called("add", a=1, b=2)))
    async with start(scripted) as rollout, rollout.session(tools=[add], tool_parser="hermes", max_turns=2) as s:
        whole = await s.run("Go.")
        assert (s.num_turns, len(s.tool_results), whole.finish_reason) == (2, 2, "length")
        assert whole.loss_mask is not None
        assert whole.loss_mask[-1] == 1  # the last results were not shown to the model
        turn = await s.generate()
        assert (turn.completion.token_ids, turn.finish_reason) == ((), "length")
        assert len(scripted.submitted) == 2


async def test_a_parser_that_is_not_there_is_refused_before_anything_starts(start: Any, tokenizer: Tokenizer) -> None:
    scripted = engine(Said(tokenizer, "x"))
    async with start(scripted) as rollout:
        for options, match in [
            ({"tool_parser": "herms"}, 'did you mean "hermes"'),
            ({}, "tool_parser must be given: the chat template does not show"),
        ]:
            with pytest.raises(sr.ConfigError, match=match):
                async with rollout.session(tools=[add], **options):
                    pass
        assert scripted.submitted == []


async def test_the_template_gives_away_the_parser(start: Any, tokenizer: Tokenizer) -> None:
    async with start(engine(Said(tokenizer, called("add", a=1, b=2), "3"))) as rollout:
        rollout.tokenizer.chat_template = "{# <tool_call> #}" + rollout.tokenizer.chat_template
        async with rollout.session(tools=[add]) as s:
            await s.run("Go.")
            assert len(s.tool_results) == 1


async def test_tools_without_a_tokenizer_are_refused() -> None:
    config = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
    async with sr.AsyncRolloutEngine(config=config, engines=[ScriptedEngine()]) as rollout:
        with pytest.raises(sr.ConfigError, match="tools need a tokenizer"):
            async with rollout.session(tools=[add], tool_parser="hermes"):
                pass


# ------------------------------------------------------------ no room


async def test_a_prompt_without_room_ends_the_session_and_reaches_no_engine(start: Any) -> None:
    scripted = engine(continuing, context_length=20)
    async with start(scripted) as rollout, rollout.session() as s:
        whole = await s.run("a prompt that is much longer than the context of twenty tokens")
        assert (whole.token_ids, whole.finish_reason, s.num_turns) == ((), "length", 0)
        assert len(whole.prompt_ids) > 20
        assert scripted.submitted == []


async def test_a_context_that_is_used_up_ends_with_the_last_sampled_token(start: Any) -> None:
    scripted = engine(continuing, context_length=80)
    async with start(scripted) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=20)) as s:
        turns = []
        for _ in range(4):
            s.add("go on, please")
            turns.append(await s.generate())
        assert [bool(turn.completion.token_ids) for turn in turns] == [True, True, False, False]
        assert (turns[-1].finish_reason, s.finish_reason) == ("length", "length")
        assert s.num_turns == len(scripted.submitted) == 2
        assert len(s.token_ids) <= 80
        assert s.loss_mask[-1] == 1
        assert s.completion.finish_reason == "length"


async def test_a_turn_is_cut_where_the_context_ends(start: Any) -> None:
    async with start(engine(continuing, context_length=60)) as rollout, rollout.session(sampling=LONG) as s:
        s.add("go")
        turn = await s.generate()
        assert turn.finish_reason == "length"
        assert len(s.token_ids) == 60


# ------------------------------------------------------------ engines


async def test_all_turns_go_to_one_engine(start: Any) -> None:
    engines = [engine(continuing, f"engine-{i}") for i in range(4)]
    async with start(*engines) as rollout:

        async def several(i: int) -> set[str]:
            async with rollout.session(sampling=sr.Sampling(max_new_tokens=3)) as s:
                for _ in range(4):
                    s.add(f"turn of session {i}")
                    await s.generate()
                return {turn.completion.engine for turn in s.turns}

        used = await asyncio.gather(*(several(i) for i in range(8)))
    assert all(len(names) == 1 for names in used)
    assert len(set.union(*used)) == 4


async def test_a_turn_goes_on_from_its_tokens_when_its_engine_dies(start: Any) -> None:
    first, second = engine(continuing, "engine-0", die_after=100), engine(continuing, "engine-1", weight_version=4)
    async with start(first, second) as rollout, rollout.session(sampling=LONG) as s:
        s.add("count")
        turn = await s.generate()
        begin = len(turn.completion.prompt_ids)
        assert turn.completion.token_ids == tuple(continuing(turn.completion.prompt_ids, LONG.wire(), 0)[0])
        assert s.logprobs is not None
        assert s.logprobs[begin:] == tuple(-float(i) for i in range(begin, begin + 400))
        resumed = second.submitted[0]
        had = len(resumed.prompt_ids) - begin
        assert had == 96  # whole chunks of 32
        assert turn.completion.weight_versions == ((0, 0, had), (4, had, 400))
        assert turn.completion.engine == "engine-1"
        s.add("on")
        await s.generate()
        assert [turn.completion.engine for turn in s.turns] == ["engine-1", "engine-1"]


async def test_a_turn_that_cannot_be_resumed_begins_anew_when_its_engine_dies(start: Any) -> None:
    first, second = engine(continuing, "engine-0", die_after=100), engine(continuing, "engine-1")
    async with start(first, second) as rollout, rollout.session(sampling=PENALIZED) as s:
        s.add("count")
        turn = await s.generate()
        assert tuple(second.submitted[0].prompt_ids) == turn.completion.prompt_ids
        assert len(turn.completion.token_ids) == 400
        assert turn.completion.weight_versions == ((0, 0, 400),)


async def test_a_turn_whose_engines_all_die_fails_and_the_session_is_as_before(start: Any) -> None:
    engines = [engine(continuing, f"engine-{i}", die_after=40) for i in range(4)]
    async with start(*engines, max_failovers=2) as rollout, rollout.session(sampling=LONG) as s:
        s.add("count")
        with pytest.raises(sr.EngineDiedError):
            await s.generate()
        assert sum(not e.alive for e in engines) == 3
        assert (s.finish_reason, s.token_ids, s.num_turns) == ("error", (), 0)
        assert isinstance(s.completion.error, sr.EngineDiedError)
        assert len(s.completion.prompt_ids) > 0
        engines[-1].die_after = None
        turn = await s.generate()
        assert (len(turn.completion.token_ids), s.finish_reason) == (400, "length")


async def test_a_pool_without_engines_is_an_error(start: Any) -> None:
    async with start(engine(continuing, die_after=40)) as rollout, rollout.session(sampling=LONG) as s:
        s.add("count")
        with pytest.raises(sr.EngineDiedError):
            await s.generate()
        with pytest.raises(sr.NoEngineError):
            await s.generate()
        assert s.finish_reason == "error"


@pytest.mark.parametrize("when", ["before it is asked", "when it is asked"])
async def test_tool_calls_are_parsed_once_the_only_engine_is_back(start: Any, tokenizer: Tokenizer, when: str) -> None:
    only = engine(Said(tokenizer, called("add", a=1, b=2), "3"))
    async with (
        start(only, max_restarts=1, restart_delay_s=0.01) as rollout,
        rollout.session(tools=[add], tool_parser="hermes") as s,
    ):

        def dies(name: str) -> str | None:
            if name == "parse_tool_calls" and only.num_starts == 1 and only.submitted:
                only.die()
                raise sr.EngineDiedError("engine-0", "it was told to die")
            return None

        s.add("add")
        if when == "when it is asked":
            only.fail_command = dies
        else:
            turn = asyncio.ensure_future(s.generate())
            await until(lambda: bool(only.submitted) and only.submitted[0].ended)
            only.die()
        turn = turn if when == "before it is asked" else asyncio.ensure_future(s.generate())
        assert [call.name for call in (await turn).tool_calls] == ["add"]
        assert rollout.engines[0].num_restarts == 1


async def test_tool_calls_are_parsed_by_another_engine_when_the_first_has_died(
    start: Any, tokenizer: Tokenizer
) -> None:
    said = Said(tokenizer, called("add", a=1, b=2), "3")
    first, second = engine(said, "engine-0"), engine(said, "engine-1")
    async with start(first, second) as rollout, rollout.session(tools=[add], tool_parser="hermes") as s:
        first.fail_command = lambda name: first.die() if s.num_turns == 0 and first.submitted else None
        await s.run("Go.")
        assert [result.content for result in s.tool_results] == ["3"]


def syncer_of(rollout: sr.AsyncRolloutEngine) -> sr.WeightSyncer:
    import torch

    return sr.WeightSyncer(rollout, sr.TensorSource({"w": torch.zeros(2)}))


@pytest.mark.parametrize(("sampling", "resumed"), [(LONG, True), (PENALIZED, False)])
async def test_a_turn_that_a_sync_aborts_goes_on_after_it(start: Any, sampling: sr.Sampling, resumed: bool) -> None:
    scripted = engine(continuing, token_s=0.001)
    async with start(scripted) as rollout, syncer_of(rollout) as syncer, rollout.session(sampling=sampling) as s:
        s.add("count")
        turn = asyncio.ensure_future(s.generate())
        await until(lambda: scripted.num_tokens > 50)
        scripted.hang = True  # the sync comes before the end, however busy this machine is
        report = await syncer.sync("abort")
        scripted.hang = False
        completion = (await turn).completion
    assert completion.finish_reason == "length"
    assert completion.token_ids == tuple(continuing(completion.prompt_ids, LONG.wire(), 0)[0])
    versions = [span.version for span in completion.weight_versions]
    assert versions == ([0, report.version] if resumed else [report.version])


async def test_a_turn_goes_on_elsewhere_when_the_weights_of_its_engine_are_spoiled(start: Any) -> None:
    first, second = engine(continuing, "engine-0", token_s=0.001), engine(continuing, "engine-1")
    async with start(first, second) as rollout, rollout.session(sampling=LONG) as s:
        s.add("count")
        turn = asyncio.ensure_future(s.generate())
        await until(lambda: first.num_tokens > 50)
        pool = await rollout._ready_pool()
        pool.spoil(pool.members[:1], "a sync failed")
        completion = (await turn).completion
        assert completion.engine == "engine-1"
        assert completion.token_ids == tuple(continuing(completion.prompt_ids, LONG.wire(), 0)[0])


async def test_a_turn_that_sleep_ends_may_be_asked_for_again_after_wake(start: Any) -> None:
    scripted = engine(continuing, token_s=0.001, memory_saver=True)
    async with start(scripted) as rollout, rollout.session(sampling=LONG) as s:
        s.add("count")
        turn = asyncio.ensure_future(s.generate())
        await until(lambda: scripted.num_tokens > 50)
        scripted.hang = True
        await rollout.sleep(["kv_cache"], drain_s=0)
        scripted.hang = False
        with pytest.raises(sr.LifecycleError, match="sleep"):
            await turn
        with pytest.raises(sr.LifecycleError, match="asleep"):
            await s.generate()
        assert (s.num_turns, s.finish_reason) == (0, None)
        await rollout.wake()
        assert len((await s.generate()).completion.token_ids) == 400


async def test_the_time_in_which_a_patient_session_waits_for_engines_does_not_count(start: Any) -> None:
    scripted = engine(continuing, memory_saver=True)
    async with start(scripted) as rollout, rollout.session(sampling=LONG, timeout_s=0.2) as s:
        s.wait_out_sleep()
        await rollout.sleep(["kv_cache"])
        s.add("count")
        turn = asyncio.ensure_future(s.generate())
        await anyio.sleep(0.3)
        await rollout.wake()
        assert (await turn).finish_reason == "length"
        scripted.hang = True
        s.add("go on")
        with pytest.raises(sr.RequestTimeoutError):
            await s.generate()


async def test_what_a_chat_template_refuses_can_be_taken_back(start: Any) -> None:
    async with start(engine(continuing)) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=4)) as s:
        await s.run("count")
        before = s.token_ids
        s.add({"role": "user", "content": UNSPEAKABLE})
        s.add("go on")
        with pytest.raises(sr.ConfigError, match="discard"):
            await s.generate()
        s.discard()
        assert [message["role"] for message in s.messages] == ["user", "assistant"]
        s.add_tokens([5, 6])
        s.discard()
        s.add("go on")
        await s.generate()
        assert (s.num_turns, s.token_ids[: len(before)]) == (2, before)


async def test_a_message_that_run_was_given_is_taken_back_if_the_model_never_answered_it(start: Any) -> None:
    scripted = engine(continuing)
    async with start(scripted) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=4), timeout_s=0.3) as s:
        s.add("first")
        scripted.hang = True
        for _ in range(2):
            with pytest.raises(sr.RequestTimeoutError):
                await s.run("second")
        with anyio.move_on_after(0.01):
            await s.run("second")
        with pytest.raises(sr.ConfigError):
            await s.run({"role": "user", "content": UNSPEAKABLE})
        scripted.hang = False
        await s.run("second")
        assert [message["content"] for message in s.messages][:2] == ["first", "second"]
        assert len(s.messages) == 3


async def test_a_message_that_run_was_given_stays_once_the_model_has_answered_it(
    start: Any, tokenizer: Tokenizer
) -> None:
    calls = engine(Said(tokenizer, called("add", a=1, b=2)), die_after=120)
    async with start(calls) as rollout, rollout.session(tools=[add], tool_parser="hermes") as s:
        with pytest.raises((sr.EngineDiedError, sr.NoEngineError)):
            await s.run("add")
        assert s.num_turns >= 1
        assert s.messages[0]["content"] == "add"


@pytest.mark.parametrize("stop", ["\n", "is"])
async def test_a_stop_string_is_left_out_of_the_whole_only_where_it_ended_the_last_turn(
    start: Any, tokenizer: Tokenizer, stop: str
) -> None:
    texts = [f"one{stop}", f"two{stop}{stop}{stop}"]
    scripted = engine(Said(tokenizer, *texts))
    async with start(scripted) as rollout, rollout.session() as s:
        for text in texts:
            s.add(f"say {text}")
            turn = await s.generate()
            ended = dataclasses.replace(turn.completion, stop_match=stop)
            s._state.turns[-1] = dataclasses.replace(turn, completion=ended)
        last = s.turns[-1].completion
        assert last.text == "two"
        assert s.completion.text.endswith(f"say {texts[1]}\nassistant\n{last.text}")
        assert f"one{stop}" in s.completion.text


async def test_tokens_that_are_not_those_that_were_served_are_never_sent(start: Any) -> None:
    scripted = engine(continuing)
    async with start(scripted) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=4)) as s:
        s.add("count")
        await s.generate()
        s._state.trajectory.token_ids[3] += 1
        s.add("on")
        with pytest.raises(sr.RolloutError, match="This is a bug of sglrollout"):
            await s.generate()
        assert len(scripted.submitted) == 1


@pytest.mark.parametrize("seed", range(12))
async def test_tokens_only_grow_whatever_is_done(start: Any, seed: int) -> None:
    rng = random.Random(seed)
    engines = [engine(continuing, f"engine-{i}") for i in range(3)]
    for scripted in engines:
        scripted.fail_request = lambda request: "no" if rng.random() < 0.2 else None
    async with start(*engines) as rollout, rollout.session(system="s", max_turns=15) as first:
        sessions, before = [first], {id(first): ()}
        for _ in range(60):
            s = rng.choice(sessions)
            sampling = sr.Sampling(max_new_tokens=rng.randint(1, 60), ignore_eos=True)
            match rng.randrange(7):
                case 0:
                    with suppress(sr.ConfigError):  # after token ids that nobody answered
                        s.add("x" * rng.randint(1, 9))
                case 1:
                    s.add_tokens([rng.randrange(3, 200) for _ in range(rng.randint(1, 5))])
                case 2:
                    with suppress(sr.EngineRequestError):
                        async for _ in s.stream(sampling, chunk_tokens=rng.randint(1, 9)):
                            if rng.random() < 0.1:
                                break
                case 3 if len(sessions) < 6:
                    sessions.append(s.fork())
                    before[id(sessions[-1])] = s.token_ids
                case 4:
                    scripted = rng.choice(engines)
                    scripted.weight_version += 1
                case _:
                    with suppress(sr.EngineRequestError):
                        await s.generate(sampling)
            check(s, before[id(s)])
            before[id(s)] = s.token_ids


def check(s: sr.Session, before: tuple[int, ...]) -> None:
    """What holds of every session at all times."""
    ids, mask = s.token_ids, s.loss_mask
    assert ids[: len(before)] == before
    assert s.logprobs is not None
    assert len(ids) == len(mask) == len(s.logprobs)
    for turn in s.turns:
        start, end = len(turn.completion.prompt_ids), len(turn.completion.prompt_ids) + len(turn.completion.token_ids)
        assert turn.completion.prompt_ids + turn.completion.token_ids == ids[:end]
        assert mask[start:end] == (1,) * (end - start)
        assert s.logprobs[start:end] == turn.completion.logprobs == tuple(-float(i) for i in range(start, end))
    assert sum(mask) == sum(len(turn.completion.token_ids) for turn in s.turns)
    if s.turns:
        whole = s.completion
        assert whole.prompt_ids + whole.token_ids == ids
        starts = [span.start for span in whole.weight_versions]
        ends = [span.end for span in whole.weight_versions]
        assert (starts[0], ends[-1], starts[1:]) == (0, len(whole.token_ids), ends[:-1])


async def test_a_turn_that_was_aborted_before_its_first_token_says_so_until_the_next(start: Any) -> None:
    scripted = engine(continuing)
    async with start(scripted) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=4)) as s:
        await s.run("count")
        scripted.hang = True
        s.add("go on")
        turn = asyncio.ensure_future(s.generate())
        await until(lambda: len(scripted.submitted) == 2)
        scripted.submitted[1].end(Finish("abort", message="SGLang gave it up"))
        assert (await turn).finish_reason == s.finish_reason == s.completion.finish_reason == "abort"
        assert s.num_turns == 1
        scripted.abort(scripted.submitted[1])
        scripted.hang = False
        assert (await s.generate()).finish_reason == s.finish_reason == "length"


async def test_tools_are_not_run_and_an_environment_is_not_told_of_a_turn_that_was_aborted(start: Any) -> None:
    def aborted(request: Any) -> str | None:
        request.end(Finish("abort", message="SGLang gave it up"))
        return "SGLang gave it up"

    steps: list[str] = []

    class Count:
        def reset(self) -> str:
            return "count"

        def step(self, text: str) -> tuple[str, float, bool]:
            steps.append(text)
            return "go on", 1.0, len(steps) == 5

    async with start(engine(continuing, fail_request=aborted)) as rollout, rollout.session() as s:
        assert await s.play(Count()) == 0.0
        assert (steps, s.finish_reason) == ([], "abort")


async def test_an_abort_of_no_sync_is_handed_over(start: Any) -> None:
    scripted = engine(continuing, token_s=0.001)
    async with start(scripted) as rollout, rollout.session(sampling=LONG) as s:
        s.add("count")
        turn = asyncio.ensure_future(s.generate())
        await until(lambda: scripted.num_tokens > 50)
        request = scripted.submitted[0]
        scripted.abort(request)
        request.end(Finish("abort", message="SGLang gave it up"))
        assert (await turn).finish_reason == "abort"
        assert s.finish_reason == "abort"


async def test_a_failed_request_leaves_the_session_as_it_was(start: Any) -> None:
    scripted = engine(continuing)
    async with start(scripted) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=4)) as s:
        s.add("count")
        await s.generate()
        before = s.token_ids
        scripted.fail_request = lambda request: "no"
        s.add("on")
        with pytest.raises(sr.EngineRequestError):
            await s.generate()
        assert (s.token_ids, s.num_turns, s.finish_reason, s.completion.finish_reason) == (before, 1, "error", "error")
        scripted.fail_request = None
        await s.generate()
        assert (s.num_turns, s.finish_reason, s.completion.error) == (2, "length", None)


async def test_a_turn_has_a_deadline(start: Any) -> None:
    scripted = engine(continuing, hang=True)
    async with start(scripted) as rollout, rollout.session(timeout_s=0.05) as s:
        s.add("count")
        with pytest.raises(sr.RequestTimeoutError):
            await s.generate()
        assert is_idle(rollout, scripted)
        assert s.finish_reason == "error"
        scripted.hang = False
        await s.generate()
        assert s.num_turns == 1


async def test_the_deadline_counts_over_all_tries_of_a_turn(start: Any) -> None:
    first, second = engine(continuing, "engine-0", token_s=0.01), engine(continuing, "engine-1", hang=True)
    async with start(first, second) as rollout, rollout.session(sampling=LONG, timeout_s=1.0) as s:
        s.add("count")
        begun = time.monotonic()
        turn = asyncio.ensure_future(s.generate())
        await anyio.sleep(0.7)
        first.die()
        with pytest.raises(sr.RequestTimeoutError):
            await turn
        assert len(second.submitted) == 1
        assert 0.9 < time.monotonic() - begun < 1.5


# ------------------------------------------------------------ streams


async def test_a_stream_gives_chunks_and_then_the_turn(start: Any, tokenizer: Tokenizer) -> None:
    scripted = engine(Said(tokenizer, "Let me see. " + called("add", a=1, b=2), "It is 3."))
    async with start(scripted) as rollout, rollout.session(tools=[add], tool_parser="hermes") as s:
        s.add("What is 1 + 2?")
        stream = s.stream(chunk_tokens=4)
        with pytest.raises(sr.LifecycleError, match="has not ended"):
            _ = stream.turn
        chunks = [chunk async for chunk in stream]
        turn = stream.turn
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == turn.completion.token_ids
        assert tuple(value for chunk in chunks for value in chunk.logprobs or ()) == turn.completion.logprobs
        assert "".join(chunk.text for chunk in chunks) == turn.text
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert max(len(chunk.token_ids) for chunk in chunks) == 4
        assert s.turns == (turn,)
        assert len(turn.tool_calls) == 1
        s.add(await s.run_tools(turn))
        assert (await s.generate()).text == "It is 3."


async def leave_by_break(s: sr.Session) -> None:
    async for _ in s.stream(LONG, chunk_tokens=1):
        break


async def leave_by_with(s: sr.Session) -> None:
    async with s.stream(LONG, chunk_tokens=1) as stream:
        await anext(stream)


async def leave_by_close(s: sr.Session) -> None:
    stream = s.stream(LONG, chunk_tokens=1)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leave_by_cancellation(s: sr.Session) -> None:
    with anyio.move_on_after(0.05):
        async for _ in s.stream(LONG.replace(max_new_tokens=30000), chunk_tokens=1):
            pass


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_with, leave_by_close, leave_by_cancellation])
async def test_a_stream_that_is_left_leaves_the_session_as_it_was(start: Any, leave: Any) -> None:
    scripted = engine(continuing, token_s=0.0005)
    async with start(scripted) as rollout, rollout.session() as s:
        s.add("count")
        await leave(s)
        assert (s.num_turns, s.token_ids, s.finish_reason) == (0, (), None)
        await s.generate(sr.Sampling(max_new_tokens=3))
        assert s.num_turns == 1
        await until(lambda: is_idle(rollout, scripted))


@pytest.mark.parametrize("waits_for", ["tokens", "a slot"])
async def test_a_stream_that_another_task_closes_ends_its_loop_and_leaves_the_session_as_it_was(
    start: Any, waits_for: str
) -> None:
    scripted = engine(continuing, token_s=0.0005, max_running=1)
    async with start(scripted, max_inflight=1) as rollout, rollout.session() as s:
        s.add("count")
        stream = s.stream(LONG.replace(max_new_tokens=30000), chunk_tokens=1)
        async with anyio.create_task_group() as tasks:
            other = rollout.stream([1, 2], LONG.replace(max_new_tokens=30000))
            if waits_for == "a slot":
                await anext(other)
            chunks: list[sr.Chunk] = []

            async def read() -> None:
                chunks.extend([chunk async for chunk in stream])

            tasks.start_soon(read)
            await until(lambda: rollout.num_queued == 1 if waits_for == "a slot" else len(scripted.submitted) == 1)
            await stream.aclose()
            await other.aclose()
        assert (s.num_turns, s.token_ids, s.finish_reason) == (0, (), None)
        await s.generate(sr.Sampling(max_new_tokens=3))
        assert s.num_turns == 1
        await until(lambda: is_idle(rollout, scripted))


async def test_a_stream_goes_on_when_its_engine_dies(start: Any) -> None:
    first, second = engine(continuing, "engine-0", die_after=100), engine(continuing, "engine-1", weight_version=4)
    async with start(first, second) as rollout, rollout.session() as s:
        s.add("count")
        stream = s.stream(LONG, chunk_tokens=7)
        chunks = [chunk async for chunk in stream]
        whole = stream.turn.completion
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
        assert whole.token_ids == tuple(continuing(whole.prompt_ids, LONG.wire(), 0)[0])
        assert sorted({chunk.weight_version for chunk in chunks}) == [0, 4]
        assert "".join(chunk.text for chunk in chunks) == stream.turn.text


async def test_a_stream_that_cannot_be_resumed_fails_when_its_engine_dies(start: Any) -> None:
    first, second = engine(continuing, "engine-0", die_after=100), engine(continuing, "engine-1")
    async with start(first, second) as rollout, rollout.session() as s:
        s.add("count")
        with pytest.raises(sr.EngineDiedError):
            async for _ in s.stream(PENALIZED, chunk_tokens=7):
                pass
        assert s.finish_reason == "error"
        assert len((await s.generate(LONG)).completion.token_ids) == 400


async def test_a_stream_of_a_used_up_session_is_one_empty_chunk(start: Any) -> None:
    async with start(engine(continuing, context_length=8)) as rollout, rollout.session() as s:
        s.add("a long prompt")
        chunks = [chunk async for chunk in s.stream()]
        assert [(chunk.token_ids, chunk.text, chunk.finish_reason) for chunk in chunks] == [((), "", "length")]


# ------------------------------------------------------------ forks


async def test_a_fork_goes_on_by_itself(start: Any, tokenizer: Tokenizer) -> None:
    scripted = engine(continuing)
    async with start(scripted) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=6)) as s:
        s.add("root")
        await s.generate()
        s.add("a question that waits")
        forks = [s.fork() for _ in range(3)]
        forks[0].add("more")
        turns = await asyncio.gather(s.generate(), *(fork.generate() for fork in forks))
        assert [fork.num_turns for fork in (s, *forks)] == [2] * 4
        root = s.turns[0]
        for fork in forks:
            assert fork.turns[0] is root
            assert fork.token_ids[: len(root.completion.prompt_ids)] == root.completion.prompt_ids
        assert turns[1].completion.prompt_ids != turns[2].completion.prompt_ids == turns[0].completion.prompt_ids
        assert len(forks[0].messages) == len(s.messages) + 1
        leaf = forks[1].fork()
        leaf.add("deeper")
        await leaf.generate()
        assert (leaf.num_turns, forks[1].num_turns) == (3, 2)


async def test_forks_prefer_the_engine_of_their_prefix(start: Any) -> None:
    engines = [engine(continuing, f"engine-{i}", token_s=0.001) for i in range(3)]
    async with start(*engines) as rollout, rollout.session(sampling=sr.Sampling(max_new_tokens=20)) as s:
        s.add("root")
        root = await s.generate()
        forks = [s.fork() for _ in range(6)]
        for fork in forks:
            fork.add("leaf")
        leaves = await asyncio.gather(*(fork.generate() for fork in forks))
        assert {leaf.completion.engine for leaf in leaves} == {root.completion.engine}


async def test_a_fork_ends_with_its_parents_block_or_with_its_own(start: Any) -> None:
    scripted = engine(continuing)
    async with start(scripted) as rollout:
        async with rollout.session(sampling=sr.Sampling(max_new_tokens=3)) as s:
            s.add("root")
            async with s.fork() as inner:
                await inner.generate()
            with pytest.raises(sr.LifecycleError, match="block was left"):
                inner.add("x")
            outer = s.fork()
            leaf = outer.fork()
            await s.generate()
        for ended in (s, outer, leaf):
            with pytest.raises(sr.LifecycleError, match="block was left"):
                await ended.generate()
            with pytest.raises(sr.LifecycleError, match="block was left"):
                ended.fork()
        assert inner.num_turns == s.num_turns == 1


# ------------------------------------------------------------ one thing at a time, and the end


async def test_a_session_does_one_thing_at_a_time(start: Any) -> None:
    scripted = engine(continuing, token_s=0.001)
    async with start(scripted) as rollout, rollout.session(sampling=LONG) as s:
        s.add("count")
        turn = asyncio.ensure_future(s.generate())
        await until(lambda: scripted.num_tokens > 0)
        misuses: list[Callable[[], object]] = [lambda: s.add("x"), lambda: s.add_tokens([5]), s.fork]
        for misuse in misuses:
            with pytest.raises(sr.LifecycleError, match="one thing at a time"):
                misuse()
        for call in (s.generate(), anext(s.stream()), s.run("x"), s.play(Guess())):
            with pytest.raises(sr.LifecycleError, match="one thing at a time"):
                await call
        assert len((await turn).completion.token_ids) == 400
        assert (s.num_turns, len(scripted.submitted)) == (1, 1)


async def test_leaving_the_block_cancels_what_runs_and_frees_its_slot(start: Any, tokenizer: Tokenizer) -> None:
    scripted = engine(continuing, token_s=0.001)
    async with start(scripted) as rollout:
        async with rollout.session(sampling=LONG) as s:
            s.add("count")
            fork, other = s.fork(), s.fork()
            stream = other.stream(chunk_tokens=1)
            await anext(stream)
            turns = [asyncio.ensure_future(s.generate()), asyncio.ensure_future(fork.generate())]
            await until(lambda: len(scripted.submitted) == 3)
        for turn in turns:
            with pytest.raises(sr.LifecycleError, match="block was left"):
                await turn
        with pytest.raises(sr.LifecycleError, match="block was left"):
            await anext(stream)
        await until(lambda: is_idle(rollout, scripted))
        assert len(scripted.aborted) == 3
        assert (s.num_turns, s.finish_reason) == (0, None)


async def test_leaving_the_block_cancels_tools(start: Any, tokenizer: Tokenizer) -> None:
    began, ended = anyio.Event(), anyio.Event()

    async def hang() -> None:
        began.set()
        try:
            await anyio.sleep(60)
        finally:
            ended.set()

    async with start(engine(Said(tokenizer, called("hang")))) as rollout:
        async with rollout.session(tools=[hang], tool_parser="hermes") as s:
            run = asyncio.ensure_future(s.run("Go."))
            await began.wait()
        with pytest.raises(sr.LifecycleError, match="block was left"):
            await run
        assert ended.is_set()
        assert s.num_turns == 1  # and it can still be read
        assert s.completion.finish_reason == "stop"


async def test_cancelling_a_turn_frees_its_slot_and_leaves_the_session_as_it_was(start: Any) -> None:
    scripted = engine(continuing, token_s=0.001)
    async with start(scripted, max_inflight=1) as rollout, rollout.session(sampling=LONG) as s:
        s.add("count")
        fork = s.fork()
        turn, queued = asyncio.ensure_future(s.generate()), asyncio.ensure_future(fork.generate())
        await until(lambda: scripted.num_tokens > 40)
        for task in (queued, turn):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: is_idle(rollout, scripted))
        assert (s.num_turns, s.token_ids) == (0, ())
        await s.generate(sr.Sampling(max_new_tokens=2))


async def test_a_session_lives_without_a_block_and_ends_with_its_rollout(start: Any) -> None:
    async with start(engine(continuing)) as rollout:
        s = rollout.session(sampling=sr.Sampling(max_new_tokens=2))
        s.add("count")
        await s.generate()
    s.add("on")
    with pytest.raises(sr.LifecycleError, match="rollout is closed"):
        await s.generate()
    assert s.num_turns == 1


# ------------------------------------------------------------ environments


class Guess:
    """Says what was said, and ends after three steps."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.threads: set[int] = set()

    def reset(self, task: str = "nothing") -> str:
        self.threads.add(threading.get_ident())
        return f"Guess {task}."

    def step(self, text: str) -> tuple[str | None, float, bool]:
        self.threads.add(threading.get_ident())
        self.said.append(text)
        done = len(self.said) == 3
        return (None if done else f"Not {text}", float(len(self.said)), done)


class AsyncGuess(Guess):
    async def reset(self, task: str = "nothing") -> Any:  # type: ignore[override]
        return [{"role": "system", "content": "Play."}, {"role": "user", "content": f"Guess {task}."}]

    async def step(self, text: str) -> Any:  # type: ignore[override]
        return Guess.step(self, text)


class GymnasiumGuess(Guess):
    def reset(self, task: str = "nothing") -> Any:
        return super().reset(task), {"info": 1}

    def step(self, text: str) -> Any:
        observation, reward, done = super().step(text)
        return observation, reward, False, done, {}


@pytest.mark.parametrize("kind", [Guess, AsyncGuess, GymnasiumGuess])
async def test_a_session_plays_in_an_environment(start: Any, tokenizer: Tokenizer, kind: type[Guess]) -> None:
    environment = kind()
    async with start(engine(Said(tokenizer, "one", "two", "three"))) as rollout, rollout.session() as s:
        assert await s.play(environment, "my number") == 6.0
        assert environment.said == ["one", "two", "three"]
        users = [message["content"] for message in s.messages if message["role"] == "user"]
        assert users == ["Guess my number.", "Not one", "Not two"]
        assert (s.num_turns, s.finish_reason) == (3, "stop")
        assert len(environment.threads) == 1


async def test_an_environment_need_not_take_a_task(start: Any, tokenizer: Tokenizer) -> None:
    async with start(engine(Said(tokenizer, "one"))) as rollout, rollout.session() as s:
        await s.play(Guess())
        assert s.messages[0]["content"] == "Guess nothing."


async def test_a_play_ends_when_there_is_no_turn_left(start: Any, tokenizer: Tokenizer) -> None:
    environment = Guess()
    async with start(engine(Said(tokenizer, "one"))) as rollout, rollout.session(max_turns=2) as s:
        assert await s.play(environment) == 3.0
        assert (len(environment.said), s.finish_reason) == (2, "length")


async def test_tools_are_run_between_the_steps_of_an_environment(start: Any, tokenizer: Tokenizer) -> None:
    environment = Guess()
    said = Said(tokenizer, called("add", a=1, b=2), "one", "two", called("add", a=3, b=4), "three")
    async with start(engine(said)) as rollout, rollout.session(tools=[add], tool_parser="hermes") as s:
        assert await s.play(environment) == 6.0
        assert environment.said == ["one", "two", "three"]
        assert [result.content for result in s.tool_results] == ["3", "7"]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (("x", 1.0), "must return (observation, reward, done)"),
        (("x", "1", False), "must return a finite number as the reward"),
        (("x", float("nan"), True), "must return a finite number as the reward"),
        ((None, 1.0, False), "must be a text, a chat message"),
        ((7, 1.0, False), "must be a text, a chat message"),
    ],
)
async def test_an_environment_that_returns_something_else_is_named(
    start: Any, tokenizer: Tokenizer, step: Any, words: str
) -> None:
    class Odd(Guess):
        def step(self, text: str) -> Any:
            return step

    async with start(engine(Said(tokenizer, "one"))) as rollout, rollout.session() as s:
        with pytest.raises(sr.ConfigError, match=re.escape(words)) as caught:
            await s.play(Odd())
        assert caught.value.field == "environment"
        with pytest.raises(sr.ConfigError, match="must have reset and step"):
            await s.play(object())


async def test_what_an_environment_raises_is_raised(start: Any, tokenizer: Tokenizer) -> None:
    class Broken(Guess):
        def step(self, text: str) -> Any:
            raise ZeroDivisionError

    async with start(engine(Said(tokenizer, "one"))) as rollout, rollout.session() as s:
        with pytest.raises(ZeroDivisionError):
            await s.play(Broken())
        assert s.num_turns == 1


# ------------------------------------------------------------ wrong options


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"system": 7}, "system"),
        ({"system": "\ud800"}, "system"),
        ({"tools": add}, "tools"),
        ({"tools": [add, add]}, "tools"),
        ({"tool_parser": 7}, "tool_parser"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turns": True}, "max_turns"),
        ({"tool_timeout_s": 0}, "tool_timeout_s"),
        ({"tool_timeout_s": float("nan")}, "tool_timeout_s"),
        ({"sampling": {}}, "sampling"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_given(start: Any, options: Any, field: str) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        start(ScriptedEngine()).session(**options)
    assert caught.value.field == field


BAD_CALLS: list[tuple[Any, str]] = [
    (lambda s: s.add(7), "message"),
    (lambda s: s.add([{"content": "x"}]), "message"),
    (lambda s: s.add("\ud800"), "message"),
    (lambda s: s.add_tokens("x"), "token_ids"),
    (lambda s: s.stream({}), "sampling"),
    (lambda s: s.stream(chunk_tokens=0), "chunk_tokens"),
]


@pytest.mark.parametrize(("call", "field"), BAD_CALLS)
def test_a_wrong_call_is_refused_where_it_is_made(start: Any, call: Any, field: str) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        call(start(ScriptedEngine()).session())
    assert caught.value.field == field


async def test_token_ids_outside_of_the_vocabulary_are_refused(start: Any) -> None:
    scripted = engine(continuing)
    async with start(scripted) as rollout, rollout.session() as s:
        s.add_tokens([512])
        with pytest.raises(sr.ConfigError, match="token ids from 0 to 511"):
            await s.generate()
        assert scripted.submitted == []


async def test_sampling_that_no_engine_could_serve_is_refused(start: Any) -> None:
    async with start(engine(continuing)) as rollout:
        with pytest.raises(sr.ConfigError, match=r"sampling\.seed"):
            async with rollout.session(sampling=sr.Sampling(seed=1)):
                pass
