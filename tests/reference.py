"""What transformers says with some weights, to compare an engine's tokens with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sglrollout as sr
from sglrollout.engine.cpu_support import forgive_torchvision

GREEDY = sr.Sampling(temperature=0.0, max_new_tokens=16, ignore_eos=True)
PROMPTS = ["The sky is", "2 + 2 ="]


def untrained(path: Path) -> Any:
    """The model in float32."""
    forgive_torchvision()
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def trained(path: Path, step: int) -> Any:
    """The model after some steps of training, in float32."""
    model = untrained(path)
    import torch

    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def greedy(model: Any, prompt_ids: tuple[int, ...]) -> list[int]:
    """16 tokens after the prompt, whether one of them is the end of sequence or not."""
    import torch

    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(16):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


async def answers_like(rollout: sr.AsyncRolloutEngine, model: Any) -> bool:
    """Whether every engine says what transformers says with this model."""
    groups = await rollout.generate(PROMPTS * 2, sampling=GREEDY)
    assert len({group.completions[0].engine for group in groups}) == len(rollout.engines)
    return all(list(group.completions[0].token_ids) == greedy(model, group.prompt_ids) for group in groups)
