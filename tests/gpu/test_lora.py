"""On a GPU: an engine samples with the adapter of a trainer that shares its device, with captured graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sglrollout as sr
from sglrollout.testing import tiny_model
from tests.gpu.test_weight_sync import CLOSE, ENGINE_ARGS, NUM_GPUS, distance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device, and none is visible"),
    pytest.mark.timeout(400),
]


async def test_an_engine_answers_with_each_version_of_an_adapter_and_without_it(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    path = tiny_model(tmp_path / "tiny", dtype="bfloat16")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda()
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    options: dict[str, Any] = {"mem_fraction": 0.3, "num_engines": 1, "lora_rank": 8, "engine_args": ENGINE_ARGS}
    async with (
        sr.AsyncRolloutEngine(path, device="cuda", dtype="bfloat16", **options) as rollout,
        sr.WeightSyncer(rollout, sr.LoRASource(model)) as syncer,
    ):
        for seed in range(3):
            generator = torch.Generator("cuda").manual_seed(seed)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if ".lora_" in name:
                        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, device="cuda"))
            assert await distance(rollout, model) > 0.3
            assert (await syncer.sync()).method == "lora"
            assert await distance(rollout, model) < CLOSE
