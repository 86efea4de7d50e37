"""On GPUs: placement by UUID, tensor parallelism, logprobs against transformers, and memory given back.

    python -m pytest tests/gpu -m gpu        # needs SGLang for CUDA and at least one GPU; two for all of it

Models are random (nothing is downloaded): what is checked does not depend on what they say.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.engine.placement import visible_devices

NUM_GPUS = len(visible_devices())
ENGINE_ARGS = {
    **{"attention_backend": "triton", "sampling_backend": "pytorch", "disable_prefill_cuda_graph": True},
    **{"skip_tokenizer_init": True, "cuda_graph_max_bs_decode": 64},
}
GREEDY = sr.Sampling(temperature=0.0, max_new_tokens=32, ignore_eos=True)
LONG = sr.Sampling(max_new_tokens=1500, ignore_eos=True)
PROMPTS = [[7, 8, 9, 10 + i] for i in range(16)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device, and none is visible"),
    pytest.mark.timeout(400),
]
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, and {NUM_GPUS} are visible")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of two layers, in sizes that every kernel takes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("models") / "random-qwen2"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, **heads, max_position_embeddings=2048, initializer_range=0.1)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def rollout_of(model: Path, **options: Any) -> sr.AsyncRolloutEngine:
    arguments: dict[str, Any] = {"dtype": "bfloat16", "mem_fraction": 0.2, "engine_args": ENGINE_ARGS, **options}
    return sr.AsyncRolloutEngine(model, device="cuda", **arguments)


def used_mib() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


def taken_mib(before: list[int]) -> int:
    """The most that any GPU has in use above ``before``."""
    return max(used - then for used, then in zip(used_mib(), before, strict=True))


def gpu_processes() -> dict[int, str]:
    """UUID of the GPU that each process has memory on, by pid."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(pid): uuid.strip() for pid, uuid in (line.split(",") for line in lines if line.strip())}


def teacher_forced(model: Path, completion: sr.Completion) -> list[float]:
    """Log probability of each token under the same weights in transformers, in bfloat16 as the engine has them."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]], device="cuda")
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(ids).logits[0].float(), dim=-1)
    first = len(completion.prompt_ids) - 1
    return [float(logprobs[first + i, token]) for i, token in enumerate(completion.token_ids)]


async def test_one_engine_generates_streams_cancels_and_gives_its_memory_back(model: Path) -> None:
    before = used_mib()
    async with rollout_of(model, num_engines=1) as rollout:
        assert taken_mib(before) > 1000
        groups = await rollout.generate(PROMPTS, n=4, sampling=GREEDY.replace(temperature=1.0))
        (whole,) = (await rollout.generate([PROMPTS[0]], sampling=GREEDY))[0].completions
        for chunk_tokens in (1, 8):
            chunks = [chunk async for chunk in rollout.stream(PROMPTS[0], GREEDY, chunk_tokens=chunk_tokens)]
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids

        async for _ in rollout.stream(PROMPTS[0], LONG, chunk_tokens=1):
            break
        with anyio.fail_after(1.0):
            while (load := rollout.engines[0].load) is None or load.num_running or load.num_inflight:
                await anyio.sleep(0.02)
    with anyio.fail_after(5.0):
        while taken_mib(before) > 100:
            await anyio.sleep(0.1)

    # Last, since it takes memory in this very process.
    completion = groups[0].completions[0]
    assert completion.logprobs == pytest.approx(teacher_forced(model, completion), abs=0.15)


@needs_two
async def test_two_engines_run_on_the_devices_they_were_given_by_uuid(model: Path) -> None:
    uuids = [device.uuid for device in visible_devices()[:2]]
    async with rollout_of(model, devices=[[uuids[1]], [uuids[0]]]) as rollout:
        groups = await rollout.generate(PROMPTS, n=4, sampling=GREEDY)
        assert {completion.engine for group in groups for completion in group.completions} == {"engine-0", "engine-1"}
        where = gpu_processes()
        for engine, uuid in zip(rollout.engines, reversed(uuids), strict=True):
            assert engine.info is not None
            seen = {where[pid] for pid in engine.info.child_pids if pid in where}
            assert seen <= {uuid}  # empty where the driver hides pids, as in a container


@needs_two
async def test_one_engine_with_two_ranks_says_what_one_with_one_rank_says(model: Path) -> None:
    async with rollout_of(model, num_engines=1, tp_size=2) as rollout:
        assert rollout.engines[0].info is not None
        assert len(rollout.engines[0].info.child_pids) == 2
        (group,) = await rollout.generate([PROMPTS[0]], sampling=GREEDY.replace(temperature=1.0))
        completion = group.completions[0]
        assert completion.logprobs == pytest.approx(teacher_forced(model, completion), abs=0.15)
        chunks = [chunk async for chunk in rollout.stream(PROMPTS[0], GREEDY, chunk_tokens=1)]
        assert len(chunks) == 32


async def test_more_engines_than_devices_are_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises(sr.PlacementError, match="visible"):
        await rollout_of(model, num_engines=NUM_GPUS + 1).start()
    with pytest.raises(sr.PlacementError):
        await rollout_of(model, devices=[[NUM_GPUS + 3]]).start()


async def test_a_scheduler_that_dies_on_a_gpu_is_a_typed_error(model: Path) -> None:
    import os

    async with rollout_of(model, num_engines=1) as rollout:
        info = rollout.engines[0].info
        assert info is not None
        stream = rollout.stream(PROMPTS[0], LONG, chunk_tokens=1)
        await anext(stream)
        os.kill(info.child_pids[0], 9)
        with pytest.raises(sr.EngineDiedError, match="scheduler 0"):
            assert [chunk async for chunk in stream]
