"""The blocking facade over a real engine, beside a running event loop, on SGLang's public output path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import sglrollout as sr

pytestmark = pytest.mark.slow

GREEDY = sr.Sampling(temperature=0.0, max_new_tokens=24)
LONG = sr.Sampling(max_new_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def blocking(tiny_model: Path) -> Iterator[sr.RolloutEngine]:
    with sr.RolloutEngine(tiny_model, device="cpu", dtype="float32", fast_outputs=False) as rollout:
        yield rollout


def tokens(groups: list[sr.Group]) -> list[tuple[int, ...]]:
    return [completion.token_ids for group in groups for completion in group.completions]


async def test_the_public_path_gives_what_the_fast_one_gives(
    rollout: sr.AsyncRolloutEngine, blocking: sr.RolloutEngine
) -> None:
    prompts = ["The sky is", "2 + 2 =", "héllo"]
    info = blocking.engines[0].info
    assert info is not None
    assert not info.fast_outputs
    fast, public = await rollout.generate(prompts, sampling=GREEDY), blocking.generate(prompts, sampling=GREEDY)
    assert tokens(public) == tokens(fast)
    for one, other in zip(public, fast, strict=True):
        assert one.completions[0].logprobs == pytest.approx(other.completions[0].logprobs, abs=1e-4)
        assert one.completions[0].text == other.completions[0].text


@pytest.mark.parametrize("chunk_tokens", [1, 8])
def test_a_stream_gives_what_generate_gives(blocking: sr.RolloutEngine, chunk_tokens: int) -> None:
    (group,) = blocking.generate(["stream me"], sampling=GREEDY)
    chunks = list(blocking.stream("stream me", GREEDY, chunk_tokens=chunk_tokens))
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == group.completions[0].token_ids
    assert "".join(chunk.text for chunk in chunks) == group.completions[0].text
    assert max(len(chunk.token_ids) for chunk in chunks) <= chunk_tokens


def test_leaving_a_loop_aborts_and_a_deadline_raises(blocking: sr.RolloutEngine) -> None:
    for _ in blocking.stream("leave", LONG, chunk_tokens=1):
        break
    with pytest.raises(sr.RequestTimeoutError):
        blocking.generate(["late"], sampling=LONG, timeout_s=0.1)
    assert blocking.engines[0].num_inflight == 0
    blocking.flush_cache()  # refused while anything runs in the engine


def test_as_completed_gives_every_group_once(blocking: sr.RolloutEngine) -> None:
    groups = blocking.as_completed((f"p {i}" for i in range(6)), n=2, sampling=GREEDY)
    assert sorted(group.index for group in groups) == list(range(6))


def test_a_blocking_syncer_brings_weights_and_versions(blocking: sr.RolloutEngine, tiny_model: Path) -> None:
    from safetensors.torch import load_file

    weights = {name: tensor * 1.1 for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    before = tokens(blocking.generate(["The sky is"], sampling=GREEDY))
    with sr.BlockingWeightSyncer(blocking, sr.TensorSource(weights)) as syncer:
        assert syncer.sync().version == 1 == blocking.weight_version
        assert syncer.verify().num_weights == len(weights)
        (group,) = blocking.generate(["The sky is"], sampling=GREEDY)
        assert tokens([group]) != before
        assert group.completions[0].weight_versions == ((1, 0, len(group.completions[0].token_ids)),)
