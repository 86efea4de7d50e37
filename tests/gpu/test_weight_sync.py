"""On GPUs: weights into engines that share the trainer's device, or reach it over NVLink; sleep and wake.

Models are random (nothing is downloaded).
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest

import sglrollout as sr
from sglrollout.engine.placement import visible_devices
from sglrollout.testing import tiny_model

NUM_GPUS = len(visible_devices())
ENGINE_ARGS = {
    **{"attention_backend": "triton", "sampling_backend": "pytorch", "disable_prefill_cuda_graph": True},
    **{"skip_tokenizer_init": True, "cuda_graph_max_bs_decode": 8},
}
GREEDY = sr.Sampling(temperature=0.0, max_new_tokens=16, ignore_eos=True)
PROMPTS = [[7, 8, 9, 10 + i] for i in range(4)]
CLOSE = 0.1
"""In the mean: two ways of computing in bfloat16 are 0.03 to 0.05 apart."""
RANKS = Path(__file__).parents[1] / "integration" / "sync_ranks.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device, and none is visible"),
    pytest.mark.timeout(400),
]
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, and {NUM_GPUS} are visible")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
async def rollout(path: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    options: dict[str, Any] = {"mem_fraction": 0.3, "memory_saver": True, "num_engines": 1, "engine_args": ENGINE_ARGS}
    async with sr.AsyncRolloutEngine(path, device="cuda", dtype="bfloat16", **options) as engine:
        yield engine


def trained(path: Path, step: int, dtype: str = "bfloat16") -> Any:
    """The model after some steps of training."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).cuda()
    generator = torch.Generator("cuda").manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, device="cuda"))
    return model


async def distance(rollout: sr.AsyncRolloutEngine, model: Any) -> float:
    """How far the engine's logprobs are from those of transformers, in the mean. Of single tokens they differ by up to
    0.3 in bfloat16, and by several with other weights."""
    import torch

    groups = await rollout.generate(PROMPTS, sampling=GREEDY)
    distances = []
    for completion in [group.completions[0] for group in groups]:
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]], device="cuda")
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
        first = len(completion.prompt_ids) - 1
        for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs or (), strict=True)):
            distances.append(abs(float(scores[first + i, token]) - logprob))
    return sum(distances) / len(distances)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_an_engine_reads_the_parameters_where_they_are(
    rollout: sr.AsyncRolloutEngine, path: Path, dtype: str
) -> None:
    model = trained(path, 1 if dtype == "bfloat16" else 2, dtype)
    assert await distance(rollout, model) > 1.0
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer:
        report = await syncer.sync()
        assert (report.method, report.num_buckets) == ("fast", 1)
        await syncer.verify()
        assert await distance(rollout, model) < CLOSE


async def test_tensors_that_cannot_be_mapped_are_staged(rollout: sr.AsyncRolloutEngine, path: Path) -> None:
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        model = trained(path, 3)
        async with sr.WeightSyncer(rollout, sr.ModuleSource(model), bucket_bytes=1 << 16) as syncer:
            await syncer.sync()
            await syncer.verify()
            assert await distance(rollout, model) < CLOSE
        on_cpu = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
        async with sr.WeightSyncer(rollout, sr.TensorSource(on_cpu), bucket_bytes=1 << 16) as syncer:
            assert (await syncer.sync()).num_buckets >= 4
            await syncer.verify()
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


async def test_a_trainer_has_all_of_its_memory_again_once_the_syncer_is_closed(
    rollout: sr.AsyncRolloutEngine, path: Path
) -> None:
    def allocated() -> int:
        gc.collect()
        torch.cuda.ipc_collect()
        return int(torch.cuda.memory_allocated())

    async def sync(method: Literal["fast", "portable"]) -> None:
        model = trained(path, 7)
        async with sr.WeightSyncer(rollout, sr.ModuleSource(model), method=method) as syncer:
            await syncer.sync()
            await syncer.sync()
        assert await distance(rollout, model) < CLOSE

    import torch

    before = allocated()
    await sync("fast")
    await sync("portable")
    assert allocated() == before


async def test_the_portable_path_gives_the_same_engine(rollout: sr.AsyncRolloutEngine, path: Path) -> None:
    model = trained(path, 4)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model), method="portable", bucket_bytes=1 << 16) as syncer:
        assert (await syncer.sync()).method == "portable"
        await syncer.verify()
        assert await distance(rollout, model) < CLOSE


async def test_a_sleeping_engine_gives_memory_back_and_serves_again_after_a_sync(
    rollout: sr.AsyncRolloutEngine, path: Path
) -> None:
    model = trained(path, 5)
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer:
        await syncer.sync()
        assert await distance(rollout, model) < CLOSE
        used = []
        for _ in range(3):
            report = await rollout.sleep()
            assert sum(report.freed_bytes["engine-0"].values()) > 20e9
            assert "GB" in str(report)
            used.append(report.used_bytes["engine-0"])
            with pytest.raises(sr.LifecycleError, match="asleep"):
                await rollout.generate(PROMPTS, sampling=GREEDY)
            report_of_sync = await syncer.sync()
            assert report_of_sync.wake_s > 0
            await syncer.verify()
            assert await distance(rollout, model) < CLOSE
        assert used[-1] - used[0] < 64 << 20

        await rollout.sleep(["weights"])
        await rollout.wake()
        with pytest.raises(sr.StaleWeightsError, match="given up in a sleep"):
            await rollout.generate(PROMPTS, sampling=GREEDY)
        await syncer.sync()
        assert await distance(rollout, model) < CLOSE


async def test_waking_without_room_is_refused_and_says_what_is_missing(
    rollout: sr.AsyncRolloutEngine, path: Path
) -> None:
    import torch

    async with sr.WeightSyncer(rollout, sr.ModuleSource(trained(path, 6))) as syncer:
        await syncer.sync()
        await rollout.sleep()
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free - (10 << 30), dtype=torch.uint8, device="cuda")
        with pytest.raises(sr.DeviceMemoryError, match="kv_cache"):
            await rollout.wake()
        with pytest.raises(sr.DeviceMemoryError, match="kv_cache"):
            await syncer.sync()
        del hog
        torch.cuda.empty_cache()
        await syncer.sync()
        await syncer.verify()


@needs_two
@pytest.mark.parametrize("engines", [{"num_engines": 2}, {"num_engines": 1, "tp_size": 2}], ids=["two", "tp 2"])
def test_shards_on_two_gpus_reach_every_engine(tmp_path: Path, engines: dict[str, int]) -> None:
    more = {"mem_fraction": 0.2, "engine_args": {k: v for k, v in ENGINE_ARGS.items() if k != "skip_tokenizer_init"}}
    options = {"device": "cuda", "dtype": "bfloat16", "vocab_size": 515, "more": more, **engines}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(RANKS)]
    scenarios = "cuts,after_a_forward,offloaded"
    subprocess.run([*command, scenarios, str(tmp_path / "out"), json.dumps(options)], check=True, timeout=300)
    for rank in range(2):
        found = json.loads((tmp_path / f"out.{rank}").read_text())
        assert found["cuts"]["fsdp"]["verified"] == [24, 24]
        assert found["cuts"]["fsdp"]["report"]["num_buckets"] == 1
        assert found["cuts"]["fsdp, portable"]["verified"] == [24, 24]
        assert found["offloaded"]["verified"] == 24
