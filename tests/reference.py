"""What transformers says with some weights, to compare an engine's tokens with."""

from __future__ import annotations

from typing import Any


def greedy(model: Any, prompt_ids: tuple[int, ...]) -> list[int]:
    """16 tokens after the prompt, whether one of them is the end of sequence or not."""
    import torch

    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(16):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]
