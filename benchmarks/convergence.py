"""GRPO with generation by sglrollout, and by transformers' own ``generate``: are the reward curves the same?

The same random model of two layers, data, loss, optimizer and number of samples; only who samples differs. Curves of a
few seeds each are compared by Welch's t-test, on the mean reward over all steps and over the last fifth. It runs on a
CPU, about half a minute for each curve on 2 cores.

Usage:
    python benchmarks/convergence.py                                  # 5 seeds each
    python benchmarks/convergence.py --seeds 8 --plot docs/images/convergence.png    # with a picture (needs matplotlib)
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import ttest_ind

import sglrollout as sr
from sglrollout import testing

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from grpo_minimal import rewarded, sums, train

N, NUM_PROMPTS, NUM_TOKENS, LEARNING_RATE = 8, 8, 16, 2e-3
Sample = Callable[[Sequence[sr.Task]], Awaitable[list[sr.Group]]]
console = Console()


async def curve(
    model: Any, sample: Sample, after_step: Callable[[], Awaitable[Any]], steps: int, seed: int
) -> list[float]:
    """The mean reward of each step."""
    rng, optimizer, found = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), []
    for _ in range(steps):
        tasks = sums(NUM_PROMPTS, rng)
        groups = [rewarded(group, task) for group, task in zip(await sample(tasks), tasks, strict=True)]
        batch = sr.RolloutBatch.from_groups(groups)
        train(model, optimizer, batch)
        await after_step()
        found.append(float(batch.rewards.mean()))
    return found


async def by_sglrollout(path: str, steps: int, seed: int) -> list[float]:
    from transformers import AutoModelForCausalLM

    sampling = sr.Sampling(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    async with sr.AsyncRolloutEngine(path, device="cpu", dtype="float32", seed=seed, progress=False) as rollout:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

        async def sample(tasks: Sequence[sr.Task]) -> list[sr.Group]:
            return await rollout.generate([task.prompt for task in tasks], n=N, sampling=sampling)

        async with sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer:
            return await curve(model, sample, syncer.sync, steps, seed)


async def by_transformers(path: str, steps: int, seed: int) -> list[float]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model.generation_config.eos_token_id = None

    async def sample(tasks: Sequence[sr.Task]) -> list[sr.Group]:
        return [group_of(model, tokenizer, task, index) for index, task in enumerate(tasks)]

    async def nothing() -> None:
        pass

    return await curve(model, sample, nothing, steps, seed)


def group_of(model: Any, tokenizer: Any, task: sr.Task, index: int) -> sr.Group:
    """What transformers samples for a prompt, as a group of ours."""
    prompt = tokenizer(task.prompt, return_tensors="pt")
    out = model.generate(
        **prompt,
        do_sample=True,
        top_k=0,
        num_return_sequences=N,
        max_new_tokens=NUM_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    num_prompt = prompt["input_ids"].shape[1]
    tokens = out.sequences[:, num_prompt:]
    logprobs = torch.stack(out.logits, 1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    prompt_ids = tuple(prompt["input_ids"][0].tolist())
    completions = tuple(
        sr.Completion(
            prompt_ids,
            tuple(tokens[i].tolist()),
            tuple(logprobs[i].tolist()),
            "length",
            index=i,
            _detokenize=lambda completion: tokenizer.decode(completion.token_ids, skip_special_tokens=True),
        )
        for i in range(N)
    )
    return sr.Group(task.prompt, prompt_ids, completions, index)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="their number")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--plot", type=Path, metavar="PNG")
    given = parser.parse_args()
    curves: dict[str, list[list[float]]] = {"sglrollout": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        path = str(testing.tiny_model(folder))
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            for name, sampler in (("sglrollout", by_sglrollout), ("transformers", by_transformers)):
                curves[name].append(await sampler(path, given.steps, seed))
                console.print(f"seed {seed}, {name}: {curves[name][-1][0]:.3f} to {curves[name][-1][-1]:.3f}")
    table = Table("", *curves, "p")
    last = max(1, given.steps // 5)
    for what, of in (("all steps", slice(None)), ("the last fifth", slice(-last, None))):
        means = [[statistics.fmean(one[of]) for one in of_seed] for of_seed in curves.values()]
        cells = [f"{statistics.fmean(m):.3f} ± {statistics.stdev(m):.3f}" for m in means]
        table.add_row(what, *cells, f"{ttest_ind(*means, equal_var=False).pvalue:.2f}")
    console.print(table)
    if given.plot:
        draw(curves, given.plot)


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    for name, of_seed in curves.items():
        mean = [statistics.fmean(values) for values in zip(*of_seed, strict=True)]
        steps = range(1, len(mean) + 1)
        (line,) = plt.plot(steps, mean, label=f"{name}, {len(of_seed)} seeds")
        least, most = ([function(values) for values in zip(*of_seed, strict=True)] for function in (min, max))
        plt.fill_between(steps, least, most, alpha=0.2, color=line.get_color())
    plt.xlabel("step")
    plt.ylabel("mean reward")
    plt.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, dpi=100, bbox_inches="tight")


if __name__ == "__main__":
    asyncio.run(main())
