"""Real SGLang on the CPU: collections give a trainer what its engines sampled, through syncs, cuts and deaths."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

import sglrollout as sr
from sglrollout.engine.cpu_support import forgive_torchvision

pytestmark = pytest.mark.slow

PROMPTS = ["The sky is", "Once upon a time, in a land", "2 + 2 =", "héllo wörld"]
SHORT = sr.Sampling(max_new_tokens=24, ignore_eos=True)
GREEDY = sr.Sampling(temperature=0.0, max_new_tokens=240, ignore_eos=True)
CLOSE = 1e-3


@pytest.fixture(scope="module")
async def trained_rollout(tiny_model: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """Two engines of this module's own: their weights change, and the last test kills one. Eight samples at a time."""
    options: dict[str, Any] = {
        "num_engines": 2,
        "device": "cpu",
        "dtype": "float32",
        "max_inflight": 4,
        "max_restarts": 0,
    }
    async with sr.AsyncRolloutEngine(tiny_model, **options) as engine:
        yield engine


def load(path: Path) -> Any:
    """The trainer's model, in float32."""
    forgive_torchvision()
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def train(model: Any, seed: int) -> None:
    """A step that changes every parameter, and every logprob."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def logprobs_of(model: Any, batch: sr.RolloutBatch) -> Any:
    """``[B, T]``, as a trainer computes them: one forward pass over the batch's own tensors."""
    import torch

    with torch.no_grad():
        logits = model(
            input_ids=batch.output_ids,
            attention_mask=batch.attention_mask.long(),
            position_ids=batch.position_ids,
        ).logits.double()
    following = logits[:, :-1].log_softmax(-1).gather(-1, batch.output_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(following, (1, 0))


def versions_in(batch: sr.RolloutBatch) -> set[int]:
    """Of the tokens that are trained on."""
    return set(batch.weight_version[batch.loss_mask > 0].tolist())


def indices(batches: Sequence[sr.RolloutBatch]) -> list[int]:
    return [group.index for batch in batches for group in batch.groups]


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.sleep(0.01)


def tokens_so_far(collector: sr.Collector) -> list[int]:
    """Of each sample that runs, by the account of a checkpoint."""
    if collector.stats is None:
        return []
    samples = [sample for record in collector.state_dict()["groups"] for sample in record["samples"]]
    return [len(sample["prior"]["token_ids"]) for sample in samples if sample["prior"] is not None]


async def until_tokens_came(collector: sr.Collector, num_samples: int) -> None:
    """Until so many samples run and have some tokens each. They come in by the dozen."""
    await until(lambda: sum(num_tokens > 1 for num_tokens in tokens_so_far(collector)) >= num_samples)


async def assert_idle(rollout: sr.AsyncRolloutEngine) -> None:
    """No slot is taken, and within a second the engines run nothing, by their own account."""
    assert all(engine.num_inflight == 0 for engine in rollout.engines)
    with anyio.fail_after(1.0):
        while any(engine.load is not None and engine.load.num_running for engine in rollout.engines):
            await anyio.sleep(0.02)


async def uncut(rollout: sr.AsyncRolloutEngine, prompts: Sequence[sr.Prompt]) -> list[sr.Completion]:
    """What each prompt's greedy completion is when nothing comes between."""
    return [group.completions[0] for group in await rollout.generate(prompts, sampling=GREEDY)]


# ------------------------------------------------------------ batches


@pytest.mark.parametrize("side", ["right", "left"])
async def test_a_batch_has_its_groups_tokens_and_the_logprobs_that_transformers_computes_for_them(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path, side: Literal["right", "left"]
) -> None:
    padding = sr.Padding(side=side, multiple_of=8)
    batch = await rollout.collect(PROMPTS, n=2, sampling=SHORT, padding=padding)
    assert [group.prompt for group in batch.groups] == PROMPTS
    assert batch.output_ids.shape[1] % 8 == 0
    assert batch.padding.id == rollout.tokenizer.pad_token_id

    completions = [completion for group in batch.groups for completion in group.completions]
    for row, completion in enumerate(completions):
        text = batch.attention_mask[row]
        assert batch.output_ids[row][text].tolist() == [*completion.prompt_ids, *completion.token_ids]
        assert set(batch.output_ids[row][~text].tolist()) <= {batch.padding.id}
        sampled = batch.loss_mask[row] > 0
        assert batch.output_ids[row][sampled].tolist() == list(completion.token_ids)
        assert batch.logprobs[row][sampled].tolist() == pytest.approx(completion.logprobs)
    assert versions_in(batch) == {0}

    report = sr.mismatch(logprobs_of(load(tiny_model), batch), batch)
    assert report.healthy
    assert report.max_abs_diff < 1e-4
    assert report.num_tokens == batch.num_tokens == 8 * 24


async def test_episodes_of_several_turns_are_rows_whose_mask_and_logprobs_a_trainer_can_use(
    rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    async def episode(session: sr.Session, task: sr.Task) -> float:
        session.add(str(task.prompt))
        await session.generate()
        session.add("and then?")
        await session.generate()
        return float(session.num_turns)

    batch = await rollout.collect(PROMPTS, n=2, sampling=sr.Sampling(max_new_tokens=12), episode=episode)
    assert batch.rewards.tolist() == [2.0] * 8
    for row, completion in enumerate(completion for group in batch.groups for completion in group.completions):
        assert completion.loss_mask is not None
        assert int(batch.loss_mask[row].sum()) == sum(completion.loss_mask) < len(completion.token_ids)
    off = (logprobs_of(load(tiny_model), batch) - batch.logprobs).abs()[batch.loss_mask > 0]
    assert float(off.max()) < CLOSE


async def test_groups_are_rewarded_by_their_text_and_those_that_teach_nothing_are_left_out(
    rollout: sr.AsyncRolloutEngine,
) -> None:
    def share_of_letters(completion: sr.Completion, task: sr.Task) -> float:
        wanted = task.data["letters"]
        return sum(character in wanted for character in completion.text) / max(len(completion.text), 1)

    hopeless = {1, 4, 7}
    rows = [
        {"prompt": f"Write letters, please: {i}", "letters": "" if i in hopeless else "abcdefghijklm"} for i in range(9)
    ]
    collector = rollout.collect(
        rows, n=4, sampling=SHORT, reward=share_of_letters, filter=sr.filters.zero_std(), max_staleness=0
    )
    batch = await collector
    assert indices([batch]) == sorted(set(range(9)) - hopeless)
    assert batch.report is not None
    assert batch.report.filtered == {"zero_std": 3}
    for group in batch.groups:
        assert group.rewards == tuple(
            share_of_letters(completion, sr.Task(group.prompt, group.data)) for completion in group.completions
        )
        assert len(set(group.rewards)) > 1
    advantages = batch.advantages(normalize=False).reshape(6, 4)
    assert advantages.sum(dim=1).tolist() == pytest.approx([0.0] * 6, abs=1e-5)
    assert (advantages.abs().sum(dim=1) > 0).all()


async def test_leaving_the_loop_frees_the_engines(rollout: sr.AsyncRolloutEngine) -> None:
    endless = (f"Count to {i}" for i in itertools.count())
    sampling = sr.Sampling(max_new_tokens=1500, ignore_eos=True)
    collector = rollout.collect(endless, n=2, sampling=sampling, target_groups=2, max_staleness=1, over_sample=2.0)
    waiting = asyncio.ensure_future(collector)
    await until_tokens_came(collector, num_samples=12)
    waiting.cancel()
    await collector.aclose()
    await assert_idle(rollout)


async def test_a_collection_goes_on_from_a_checkpoint_and_its_cut_samples_from_their_tokens(
    rollout: sr.AsyncRolloutEngine,
) -> None:
    info = rollout.engines[0].info
    assert info is not None
    prompts: list[list[int]] = [[*range(20, 30), i] for i in range(4)]  # and two that have room for few tokens
    prompts[:0] = [[50 + i] * (info.context_length - 48) for i in range(2)]

    collector = rollout.collect(prompts, sampling=GREEDY, target_groups=2)
    batches = [await collector]
    assert indices(batches) == [0, 1]
    await until_tokens_came(collector, num_samples=4)
    state = json.loads(json.dumps(collector.state_dict()))
    await collector.aclose()
    await assert_idle(rollout)
    kept = [sample["prior"]["token_ids"] for record in state["groups"] for sample in record["samples"]]
    assert all(1 < len(tokens) < 240 for tokens in kept)

    collector = rollout.collect(prompts, sampling=GREEDY, target_groups=2)
    collector.load_state_dict(state)
    batches += [batch async for batch in collector]
    assert sorted(indices(batches)) == list(range(6))
    assert collector.stats is not None
    assert collector.stats.num_resumed == 4
    resumed = sorted((group for batch in batches[1:] for group in batch.groups), key=lambda group: group.index)
    for group, tokens, whole in zip(resumed, kept, await uncut(rollout, prompts[2:]), strict=True):
        (completion,) = group.completions
        assert list(completion.token_ids[: len(tokens)]) == tokens
        assert completion.token_ids == whole.token_ids
        assert completion.logprobs == pytest.approx(whole.logprobs, abs=CLOSE)


# ------------------------------------------------------------ weight syncs


async def test_batches_of_an_asynchronous_loop_are_within_the_bound_and_agree_with_the_trainer_version_by_version(
    trained_rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    rollout, model = trained_rollout, load(tiny_model)
    prompts = ([*range(40, 48), i % 500] for i in itertools.count())
    sampling = sr.Sampling(max_new_tokens=60, ignore_eos=True)
    num_current = num_older = num_mixed = 0
    async with (
        sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer,
        rollout.collect(prompts, n=2, sampling=sampling, target_groups=4, max_staleness=1) as batches,
    ):
        first = (await syncer.sync()).version
        for step in range(5):
            batch = await batches
            version = rollout.weight_version
            assert version == first + step
            assert batch.max_staleness(version) <= 1
            assert versions_in(batch) <= {version - 1, version}
            assert batch.report is not None
            assert batch.report.weight_version == version
            num_mixed += batch.report.mixed_version_ratio > 0

            figures = sr.mismatch(logprobs_of(model, batch), batch).per_version
            if version in figures:
                assert figures[version].healthy
                assert figures[version].token_mult_prob_error == pytest.approx(1.0, abs=CLOSE)
                assert figures[version].max_abs_diff < CLOSE
                num_current += figures[version].num_tokens
            if version - 1 in figures:
                assert not figures[version - 1].healthy
                num_older += figures[version - 1].num_tokens

            train(model, step)
            await syncer.sync()
    assert num_current > 0
    assert num_older > 0
    assert num_mixed > 0
    await assert_idle(rollout)


async def test_samples_that_a_sync_aborts_go_on_under_the_new_weights_and_none_is_lost(
    trained_rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    rollout, model = trained_rollout, load(tiny_model)
    prompts = [[*range(60, 70), i] for i in range(8)]
    sampling = sr.Sampling(max_new_tokens=240, ignore_eos=True)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer:
        before = (await syncer.sync()).version
        collector = rollout.collect(prompts, sampling=sampling)
        waiting = asyncio.ensure_future(collector)
        await until_tokens_came(collector, num_samples=8)
        train(model, 7)
        after = (await syncer.sync(mode="abort")).version
        batch = await waiting

    assert indices([batch]) == list(range(8))
    assert batch.generation_lengths.tolist() == [240] * 8
    assert batch.valid.all()
    assert collector.stats is not None
    assert (collector.stats.num_resumed, collector.stats.num_failed) == (8, 0)
    for group in batch.groups:
        old, new = group.completions[0].weight_versions
        assert (old.version, old.start, old.end) == (before, 0, new.start)
        assert (new.version, new.end) == (after, 240)
    by_old, by_new = logprobs_of(load(tiny_model), batch), logprobs_of(model, batch)
    assert sr.mismatch(by_old, batch).per_version[before].max_abs_diff < CLOSE
    assert sr.mismatch(by_new, batch).per_version[after].max_abs_diff < CLOSE
    assert not sr.mismatch(by_new, batch).per_version[before].healthy


async def test_a_surplus_sample_goes_on_from_its_tokens_and_says_what_it_would_have_said_uncut(
    trained_rollout: sr.AsyncRolloutEngine, tiny_model: Path
) -> None:
    """Weights are synced after each batch, and are always the same, so that greedy completions are."""
    rollout = trained_rollout
    info = rollout.engines[0].info
    assert info is not None
    short = [[80 + i] * (info.context_length - 64) for i in range(6)]  # which leaves room for few tokens
    long = [[*range(80, 90), i] for i in range(2)]

    def of_use(group: sr.Group) -> bool:
        return group.index not in (4, 5)  # so that there is a place for the long ones, before they are too stale

    async with sr.WeightSyncer(rollout, sr.ModuleSource(load(tiny_model))) as syncer:
        first = (await syncer.sync()).version
        whole = await uncut(rollout, long)
        collector = rollout.collect(
            [*short, *long],
            sampling=GREEDY,
            target_groups=2,
            over_sample=2.0,
            surplus="partial",
            max_staleness=2,
            filter=of_use,
        )
        batches = []
        async for batch in collector:
            assert batch.max_staleness(rollout.weight_version) <= 2
            batches.append(batch)
            await syncer.sync()

    assert sorted(indices(batches)) == [0, 1, 2, 3, 6, 7]
    stats = collector.stats
    assert stats is not None
    assert stats.num_surplus >= 1
    assert stats.num_resumed >= 1
    assert stats.num_restarted == 0
    groups = {group.index: group for batch in batches for group in batch.groups}
    for index, expected in zip((6, 7), whole, strict=True):
        (completion,) = groups[index].completions
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)
        versions = [span.version for span in completion.weight_versions]
        assert versions[0] == first
        assert len(versions) > 1


# ------------------------------------------------------------ deaths


async def test_when_an_engine_is_killed_every_prompt_still_comes_with_all_of_its_tokens(
    trained_rollout: sr.AsyncRolloutEngine,
) -> None:
    rollout = trained_rollout
    info = rollout.engines[0].info
    assert info is not None
    prompts = [[*range(100, 110), i] for i in range(12)]
    collector = rollout.collect(prompts, sampling=GREEDY, target_groups=4)
    waiting = asyncio.ensure_future(collector)
    await until_tokens_came(collector, num_samples=8)
    for pid in info.child_pids:
        os.kill(pid, signal.SIGKILL)
    batches = [await waiting, *[batch async for batch in collector]]

    assert [engine.state for engine in rollout.engines] == ["dead", "ready"]
    assert sorted(indices(batches)) == list(range(12))
    assert all(batch.valid.all() for batch in batches)
    assert collector.stats is not None
    assert collector.stats.num_resumed == 4
    assert collector.stats.num_failed == 0
    groups = sorted((group for batch in batches for group in batch.groups), key=lambda group: group.index)
    for group, whole in zip(groups, await uncut(rollout, prompts), strict=True):
        assert group.completions[0].token_ids == whole.token_ids
        assert group.completions[0].logprobs == pytest.approx(whole.logprobs, abs=CLOSE)
