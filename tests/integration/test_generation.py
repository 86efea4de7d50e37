"""Real SGLang on the CPU: what it generates is right, and whatever leaves early frees the engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.engine.installed import sglang_version

pytestmark = pytest.mark.slow

GREEDY = sr.Sampling(temperature=0.0, max_new_tokens=24)
LONG = sr.Sampling(max_new_tokens=1900, ignore_eos=True)
PROMPTS = ["The sky is", "Once upon a time, in a land", "2 + 2 =", "héllo wörld"]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    """The same model in transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()


def reference_logprobs(model: Any, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> list[float]:
    """log softmax of each token, from one teacher-forced forward pass."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return [float(logprobs[len(prompt_ids) - 1 + i, token]) for i, token in enumerate(token_ids)]


async def wait_idle(rollout: sr.AsyncRolloutEngine, within_s: float) -> None:
    """Until no engine runs or holds anything, by the engines' own account."""
    with anyio.fail_after(within_s):
        while any(
            e.num_inflight or e.load is None or e.load.num_running or e.load.num_inflight for e in rollout.engines
        ):
            await anyio.sleep(0.02)


async def wait_busy(rollout: sr.AsyncRolloutEngine) -> None:
    with anyio.fail_after(20):
        while not any(e.load is not None and e.load.num_running for e in rollout.engines):
            await anyio.sleep(0.02)


# ------------------------------------------------------------ right tokens


async def test_greedy_tokens_equal_those_of_transformers(rollout: sr.AsyncRolloutEngine, reference: Any) -> None:
    import torch

    groups = await rollout.generate(PROMPTS, sampling=GREEDY)
    for group in groups:
        with torch.no_grad():
            expected = reference.generate(torch.tensor([group.prompt_ids]), max_new_tokens=24, do_sample=False)
        assert list(group.completions[0].token_ids) == expected[0, len(group.prompt_ids) :].tolist()


async def test_logprobs_equal_those_of_transformers(rollout: sr.AsyncRolloutEngine, reference: Any) -> None:
    groups = await rollout.generate(PROMPTS, n=2, sampling=sr.Sampling(max_new_tokens=24, ignore_eos=True))
    for completion in [completion for group in groups for completion in group.completions]:
        expected = reference_logprobs(reference, completion.prompt_ids, completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


async def test_tokens_come_as_often_as_their_probabilities_say(rollout: sr.AsyncRolloutEngine, reference: Any) -> None:
    """The likely ones and the rare ones, from which a policy learns: by the model's own distribution at each place."""
    import torch

    edges = torch.tensor([1e-4, 1e-3, 1e-2, 1e-1], dtype=torch.float64)
    seen, expected, variance = (torch.zeros(len(edges) + 1, dtype=torch.float64) for _ in range(3))
    groups = await rollout.generate(PROMPTS, n=64, sampling=sr.Sampling(max_new_tokens=16, ignore_eos=True))
    for group in groups:
        tokens = torch.tensor([completion.token_ids for completion in group.completions])
        ids = torch.cat([torch.tensor(group.prompt_ids).repeat(len(tokens), 1), tokens], dim=1)
        with torch.no_grad():
            p = reference(ids).logits[:, len(group.prompt_ids) - 1 : -1].double().softmax(-1)
        kinds = torch.bucketize(p, edges)
        for kind in range(len(seen)):
            share = (p * (kinds == kind)).sum(-1)
            expected[kind] += share.sum()
            variance[kind] += (share * (1 - share)).sum()
            seen[kind] += (kinds.gather(-1, tokens[..., None]) == kind).sum()
    assert float(expected[1:].min()) > 100
    assert float(((seen - expected).abs() / variance.sqrt()).max()) < 5


async def test_logprobs_are_after_temperature(rollout: sr.AsyncRolloutEngine, reference: Any) -> None:
    (group,) = await rollout.generate(["hot"], sampling=sr.Sampling(temperature=2.0, max_new_tokens=8, ignore_eos=True))
    (completion,) = group.completions
    untempered = reference_logprobs(reference, completion.prompt_ids, completion.token_ids)
    assert completion.logprobs is not None
    assert completion.logprobs != pytest.approx(untempered, abs=1e-2)
    assert len(completion.logprobs) == len(completion.token_ids) == 8


@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 1024])
async def test_a_stream_gives_what_generate_gives(rollout: sr.AsyncRolloutEngine, chunk_tokens: int) -> None:
    for prompt in PROMPTS:
        (group,) = await rollout.generate([prompt], sampling=GREEDY)
        (whole,) = group.completions
        stream = rollout.stream(prompt, GREEDY, chunk_tokens=chunk_tokens)
        chunks = [chunk async for chunk in stream]
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
        assert "".join(chunk.text for chunk in chunks) == whole.text == stream.completion.text
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs or ()]
        assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert all(1 <= len(chunk.token_ids) <= chunk_tokens for chunk in chunks)
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]


async def test_every_token_can_be_a_chunk_of_its_own(rollout: sr.AsyncRolloutEngine) -> None:
    chunks = [chunk async for chunk in rollout.stream("one by one", GREEDY, chunk_tokens=1)]
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 24


async def test_chat_messages_are_rendered_by_the_models_template(rollout: sr.AsyncRolloutEngine) -> None:
    messages: list[sr.Message] = [{"role": "user", "content": "What is the capital of France?"}]
    (group,) = await rollout.generate([messages], sampling=GREEDY)
    rendered = rollout.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rollout.tokenizer.decode(group.prompt_ids) == rendered


async def test_token_ids_go_in_as_they_are(rollout: sr.AsyncRolloutEngine) -> None:
    ids = [7, 8, 9, 300, 301]
    (group,) = await rollout.generate([ids], sampling=GREEDY)
    assert group.prompt_ids == tuple(ids) == group.completions[0].prompt_ids


async def test_a_stop_string_ends_a_completion_and_is_left_out_of_its_text(rollout: sr.AsyncRolloutEngine) -> None:
    (group,) = await rollout.generate(["stop here"], sampling=GREEDY)
    text = group.completions[0].text
    stop = next(
        text[i : i + 2] for i in range(6, len(text)) if text[i : i + 2].isascii() and text.count(text[i : i + 2]) == 1
    )
    sampling = GREEDY.replace(stop=stop)
    (stopped,) = (await rollout.generate(["stop here"], sampling=sampling))[0].completions
    assert (stopped.finish_reason, stopped.stop_match) == ("stop", stop)
    assert stopped.text == text[: text.index(stop)]
    chunks = [chunk async for chunk in rollout.stream("stop here", sampling, chunk_tokens=1)]
    assert "".join(chunk.text for chunk in chunks) == stopped.text


async def test_a_stop_token_id_ends_a_completion(rollout: sr.AsyncRolloutEngine) -> None:
    (whole,) = (await rollout.generate(["token stop"], sampling=GREEDY))[0].completions
    stop = next(token for i, token in enumerate(whole.token_ids) if i >= 3 and token not in whole.token_ids[:i])
    cut = whole.token_ids.index(stop) + 1
    (stopped,) = (await rollout.generate(["token stop"], sampling=GREEDY.replace(stop_token_ids=[stop])))[0].completions
    assert (stopped.finish_reason, stopped.stop_match) == ("stop", stop)
    assert stopped.token_ids == whole.token_ids[:cut]
    assert stopped.text == rollout.tokenizer.decode(list(whole.token_ids[: cut - 1]))


@pytest.mark.skipif(sglang_version() == "0.5.17", reason="grammars of SGLang 0.5.17 pin memory, which a CPU cannot")
async def test_a_regex_and_a_json_schema_hold(rollout: sr.AsyncRolloutEngine) -> None:
    import json

    sampling = sr.Sampling(max_new_tokens=60, regex="[0-9]{3}-[a-f]{2}")
    (group,) = await rollout.generate(["id:"], n=2, sampling=sampling)
    import re

    assert all(re.fullmatch("[0-9]{3}-[a-f]{2}", completion.text) for completion in group.completions)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    (group,) = await rollout.generate(["json:"], sampling=sr.Sampling(max_new_tokens=60, json_schema=schema))
    assert json.loads(group.completions[0].text)["a"] in (1, 2)


async def test_top_k_one_is_greedy(rollout: sr.AsyncRolloutEngine) -> None:
    (greedy,) = await rollout.generate(["k"], sampling=GREEDY)
    (top,) = await rollout.generate(["k"], sampling=GREEDY.replace(temperature=1.0, top_k=1))
    assert top.completions[0].token_ids == greedy.completions[0].token_ids


async def test_logprobs_can_be_left_out(rollout: sr.AsyncRolloutEngine) -> None:
    (group,) = await rollout.generate(["quiet"], sampling=GREEDY.replace(logprobs=False))
    assert group.completions[0].logprobs is None
    chunks = [chunk async for chunk in rollout.stream("quiet", GREEDY.replace(logprobs=False))]
    assert all(chunk.logprobs is None for chunk in chunks)


# ------------------------------------------------------------ groups and engines


async def test_groups_come_in_prompt_order_and_their_samples_differ(rollout: sr.AsyncRolloutEngine) -> None:
    prompts = [f"prompt number {i}" for i in range(12)]
    groups = await rollout.generate(prompts, n=3, sampling=sr.Sampling(max_new_tokens=12, ignore_eos=True))
    assert [group.prompt for group in groups] == prompts
    assert [group.index for group in groups] == list(range(12))
    assert all([completion.index for completion in group.completions] == [0, 1, 2] for group in groups)
    assert all(len({completion.token_ids for completion in group.completions}) == 3 for group in groups)


async def test_both_engines_work_and_a_group_stays_on_one(rollout: sr.AsyncRolloutEngine) -> None:
    groups = await rollout.generate([f"spread {i}" for i in range(8)], n=4, sampling=GREEDY)
    used = [{completion.engine for completion in group.completions} for group in groups]
    assert all(len(engines) == 1 for engines in used)
    assert set().union(*used) == {"engine-0", "engine-1"}


async def test_as_completed_gives_every_group_once(rollout: sr.AsyncRolloutEngine) -> None:
    prompts = (f"lazy {i}" for i in range(20))
    sampling = sr.Sampling(max_new_tokens=8)
    indices = [group.index async for group in rollout.as_completed(prompts, n=2, sampling=sampling)]
    assert sorted(indices) == list(range(20))


async def test_a_prompt_that_was_served_before_is_found_in_the_prefix_cache(rollout: sr.AsyncRolloutEngine) -> None:
    await rollout.flush_cache()
    prompt = "a prompt that is long enough to be worth keeping in the prefix cache of the engine"
    await rollout.generate([prompt], sampling=GREEDY)
    engines = {e.name for e in rollout.engines}
    again = [await rollout.generate([prompt], sampling=GREEDY) for _ in range(2 * len(engines))]
    assert max(groups[0].completions[0].cached_tokens for groups in again) > 10
    await rollout.flush_cache()


async def test_every_token_knows_its_weight_version(rollout: sr.AsyncRolloutEngine) -> None:
    (group,) = await rollout.generate(["version"], sampling=GREEDY)
    assert group.completions[0].weight_versions == (sr.VersionSpan(0, 0, 24),)
    assert rollout.weight_version == 0


async def test_what_an_engine_says_of_itself(rollout: sr.AsyncRolloutEngine) -> None:
    for engine in rollout.engines:
        assert engine.state == "ready"
        assert engine.info is not None
        assert engine.info.fast_outputs
        assert not engine.info.warnings
        assert engine.limit == engine.info.max_running_requests > 0


# ------------------------------------------------------------ leaving early


async def test_breaking_out_of_a_stream_aborts_it_in_the_engine(rollout: sr.AsyncRolloutEngine) -> None:
    async for _ in rollout.stream("never ending", LONG, chunk_tokens=1):
        await wait_busy(rollout)
        break
    await wait_idle(rollout, within_s=1.0)
    await rollout.flush_cache(timeout_s=0.1)  # which SGLang refuses while anything runs


async def test_cancelling_a_task_frees_the_engine_within_a_second(rollout: sr.AsyncRolloutEngine) -> None:
    task = asyncio.create_task(rollout.generate([f"cancel me {i}" for i in range(6)], n=2, sampling=LONG))
    await wait_busy(rollout)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(engine.num_inflight == 0 for engine in rollout.engines)
    await wait_idle(rollout, within_s=1.0)


async def test_a_deadline_aborts_and_raises(rollout: sr.AsyncRolloutEngine) -> None:
    start = time.monotonic()
    with pytest.raises(sr.RequestTimeoutError):
        await rollout.generate(["too slow"], sampling=LONG, timeout_s=0.5)
    assert time.monotonic() - start < 1.5
    await wait_idle(rollout, within_s=1.0)
    await rollout.flush_cache(timeout_s=0.1)


async def test_a_deadline_can_be_data(rollout: sr.AsyncRolloutEngine) -> None:
    (group,) = await rollout.generate(["too slow"], sampling=LONG, timeout_s=0.2, on_error="return")
    (completion,) = group.completions
    assert completion.finish_reason == "error"
    assert isinstance(completion.error, sr.RequestTimeoutError)
    assert len(completion.token_ids) == len(completion.logprobs or ())
    await wait_idle(rollout, within_s=1.0)


async def test_leaving_as_completed_aborts_the_rest(rollout: sr.AsyncRolloutEngine) -> None:
    async for _ in rollout.as_completed([f"leave {i}" for i in range(10)], sampling=sr.Sampling(max_new_tokens=30)):
        break
    await wait_idle(rollout, within_s=1.0)
    await rollout.flush_cache(timeout_s=0.1)


# ------------------------------------------------------------ limits of the model


async def test_a_prompt_with_no_room_left_has_finish_reason_length(rollout: sr.AsyncRolloutEngine) -> None:
    info = rollout.engines[0].info
    assert info is not None
    for num_tokens in (info.max_prompt_tokens, info.max_prompt_tokens + 1, info.context_length):
        (group,) = await rollout.generate([[5] * num_tokens], sampling=GREEDY)
        assert (group.completions[0].finish_reason, group.completions[0].token_ids) == ("length", ())
    assert [chunk.finish_reason async for chunk in rollout.stream([5] * info.context_length, GREEDY)] == ["length"]


async def test_a_completion_gets_no_more_room_than_the_context_has(rollout: sr.AsyncRolloutEngine) -> None:
    info = rollout.engines[0].info
    assert info is not None
    (group,) = await rollout.generate([[5] * (info.max_prompt_tokens - 4)], sampling=LONG)
    (completion,) = group.completions
    assert completion.finish_reason == "length"
    assert 1 <= len(completion.token_ids) <= info.context_length - info.max_prompt_tokens + 4


@pytest.mark.skipif(sglang_version() == "0.5.17", reason="grammars of SGLang 0.5.17 pin memory, which a CPU cannot")
async def test_a_request_that_sglang_refuses_is_a_typed_error_and_has_no_tokens(rollout: sr.AsyncRolloutEngine) -> None:
    sampling = sr.Sampling(ebnf="this is no grammar")
    with pytest.raises(sr.EngineRequestError, match=r"engine-\d: "):
        await rollout.generate(["x"], sampling=sampling)
    groups = await rollout.generate(["x", "y"], sampling=sampling, on_error="return")
    for completion in [group.completions[0] for group in groups]:
        assert (completion.finish_reason, completion.token_ids, completion.logprobs) == ("error", (), ())
        assert isinstance(completion.error, sr.EngineRequestError)
    with pytest.raises(sr.EngineRequestError):
        assert [chunk async for chunk in rollout.stream("x", sampling)]


async def test_tokens_are_right_when_requests_wait_are_prefilled_in_parts_and_are_retracted(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    prompts = [[3 + i, *range(20, 120)] for i in range(6)]
    sampling = sr.Sampling(temperature=0.0, max_new_tokens=80, ignore_eos=True)
    scarce = {"max_total_tokens": 600, "chunked_prefill_size": 64, "max_running_requests": 4}
    expected = await rollout.generate(prompts, sampling=sampling)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_inflight": 6}
    async with sr.AsyncRolloutEngine(tiny_model, engine_args=scarce, **options) as small:
        groups = await small.generate(prompts, sampling=sampling)
        for group, other in zip(groups, expected, strict=True):
            assert group.completions[0].token_ids == other.completions[0].token_ids
            assert group.completions[0].logprobs == pytest.approx(other.completions[0].logprobs, abs=1e-3)


BAD_CALLS = [
    (lambda r: r.generate([""]), "prompts[0]", "at least one token"),
    (lambda r: r.generate([[]]), "prompts[0]", "non-empty list of token ids"),
    (lambda r: r.generate([[1, 2], [3, -1]]), "prompts[1]", "token ids from 0 to"),
    (lambda r: r.generate([[1, 10**9]]), "prompts[0]", "token ids from 0 to"),
    (lambda r: r.generate([[1, 2.5]]), "prompts[0]", "must be a text"),
    (lambda r: r.generate([[True, 2]]), "prompts[0]", "must be a text"),
    (lambda r: r.generate([1, 2, 3]), "prompts[0]", "must be a text"),
    (lambda r: r.generate([None]), "prompts[0]", "must be a text"),
    (lambda r: r.generate([{"role": "user", "content": "a dict, not a list"}]), "prompts[0]", "must be a text"),
    (lambda r: r.generate([[{"content": "no role"}]]), "prompts[0]", 'each with a "role"'),
    (lambda r: r.generate(iter(["x"])), "prompts", "as_completed takes any iterable"),
    (lambda r: r.generate(["x"], n=0), "n", "at least 1"),
    (lambda r: r.generate(["x"], n=1.5), "n", "must be an integer"),
    (lambda r: r.generate(["x"], sampling={"temperature": 1}), "sampling", "must be a sglrollout.Sampling"),
    (lambda r: r.generate(["x"], timeout_s=-1), "timeout_s", "greater than 0"),
    (lambda r: r.generate(["x"], timeout_s=float("nan")), "timeout_s", "greater than 0"),
    (lambda r: r.generate(["x"], on_error="ignore"), "on_error", 'must be "raise" or "return"'),
    (lambda r: r.generate(["x"], sampling=sr.Sampling(seed=1)), "sampling.seed", "deterministic=True"),
    (lambda r: r.generate(["x"], sampling=sr.Sampling(lora="adapter")), "sampling.lora", "needs engines with LoRA"),
    (lambda r: r.generate(["x"], sampling=sr.Sampling(stop_token_ids=[10**6])), "sampling.stop_token_ids", "below"),
    (lambda r: r.generate(["x"], sampling=sr.Sampling(logit_bias={10**6: 1.0})), "sampling.logit_bias", "below"),
]


@pytest.mark.parametrize(("call", "field", "rule"), BAD_CALLS)
async def test_a_bad_call_names_field_and_rule_and_starts_nothing(
    rollout: sr.AsyncRolloutEngine, call: Any, field: str, rule: str
) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        await call(rollout)
    assert caught.value.field == field
    assert rule in str(caught.value)
    assert all(engine.num_inflight == 0 for engine in rollout.engines)
