"""Stream one answer token by token, then sample groups for several prompts.  Runs on a laptop's CPU.

Usage:
    python examples/quickstart.py                                  # SmolLM2-135M-Instruct, on the CPU
    python examples/quickstart.py --model Qwen/Qwen2.5-1.5B-Instruct --device cuda --num-engines 2
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter

from rich.console import Console
from rich.table import Table

import sglrollout as sr
from sglrollout import testing

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colors.",
    "What is two plus two?",
    "Write one sentence about the sea.",
]
console = Console()


def chat(question: str) -> list[sr.Message]:
    return [{"role": "user", "content": question}]


async def stream_one(rollout: sr.AsyncRolloutEngine) -> None:
    """Print an answer while it is being sampled."""
    console.print(f"[bold]{QUESTIONS[0]}[/bold]")
    sampling = sr.Sampling(temperature=0.0, max_new_tokens=48)
    async for chunk in rollout.stream(chat(QUESTIONS[0]), sampling, chunk_tokens=1):
        console.print(chunk.text, end="", markup=False, highlight=False)
    console.print("\n")


async def sample_groups(rollout: sr.AsyncRolloutEngine, n: int) -> None:
    """Sample n answers to every question, and sum them up in a table."""
    begun = time.monotonic()
    sampling = sr.Sampling(temperature=0.8, top_p=0.95, max_new_tokens=32)
    groups = await rollout.generate([chat(question) for question in QUESTIONS], n=n, sampling=sampling)
    elapsed = time.monotonic() - begun

    table = Table("prompt", "tokens", "finish reasons", "mean logprob", "first sample", title=f"{n} samples each")
    for question, group in zip(QUESTIONS, groups, strict=True):
        logprobs = [logprob for completion in group.completions for logprob in completion.logprobs or ()]
        reasons = Counter(completion.finish_reason for completion in group.completions)
        table.add_row(
            question,
            " ".join(str(len(completion.token_ids)) for completion in group.completions),
            ", ".join(f"{count} {reason}" for reason, count in reasons.items()),
            f"{statistics.fmean(logprobs):.2f}",
            group.completions[0].text.strip().split("\n")[0][:48],
        )
    console.print(table)
    num_tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
    console.print(f"{num_tokens} tokens in {elapsed:.1f} s: {num_tokens / elapsed:,.0f} tokens/s")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id; default: SmolLM2-135M-Instruct, prepared once from PyPI")
    parser.add_argument("--device", default="cpu", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--num-engines", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4, help="samples per prompt")
    arguments = parser.parse_args()

    model = arguments.model or str(testing.smollm2())
    options = sr.RolloutConfig(model=model, device=arguments.device, num_engines=arguments.num_engines)
    console.print(f"Starting {arguments.num_engines} engine(s) of {model} ...")
    async with sr.AsyncRolloutEngine(config=options.replace(progress=True)) as rollout:
        await stream_one(rollout)
        await sample_groups(rollout, arguments.samples)


if __name__ == "__main__":
    asyncio.run(main())
