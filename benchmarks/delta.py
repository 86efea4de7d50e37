"""What changes of a model's weights in a step of training, and what it saves to write that alone for a server.

    python benchmarks/delta.py                                   # SmolLM2-135M on the CPU
    python benchmarks/delta.py --device cuda --model Qwen/Qwen3-1.7B

A trainer with float32 weights and AdamW takes policy-gradient steps on samples of one of SGLang's servers, which has
the weights in bfloat16. After each step it syncs twice, with the same weights: by ``Disk(folder, delta=True)``, and by
``Disk(folder)``. Prints each step on stderr, and a table of medians last. The first two steps are left out: the first
sync writes all, and AdamW's first step is as long for every weight.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import sglrollout as sr
from sglrollout import testing
from sglrollout.engine import cpu_support

PROMPTS = [f"The sum of {a} and {b} is" for a, b in [(12, 7), (3, 48), (25, 25), (61, 9)]]
SAMPLING = sr.Sampling(temperature=1.0, max_new_tokens=24)


def train(model: Any, optimizer: Any, groups: list[sr.Group], generator: Any) -> None:
    """One step on all samples, with random advantages: how much changes does not depend on what is right."""
    import torch

    optimizer.zero_grad()
    for group in groups:
        for completion in group.completions:
            ids = torch.tensor([[*group.prompt_ids, *completion.token_ids]], device=model.device)
            logprobs = model(ids[:, :-1]).logits.float().log_softmax(-1)
            chosen = logprobs.gather(-1, ids[:, 1:, None])[0, len(group.prompt_ids) - 1 :, 0]
            advantage = torch.randn((), generator=generator).item()
            (-advantage * chosen.mean() / len(groups)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


async def run(args: argparse.Namespace, path: str, rate: float, folder: Path) -> dict[str, float]:
    """Medians over the steps at one learning rate."""
    cpu_support.forgive_torchvision()
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    served = copy.deepcopy(model).to(torch.bfloat16)
    rows: list[dict[str, float]] = []
    async with sr.launch_server(path, device=args.device, dtype="bfloat16", mem_fraction=0.3) as server:
        remote = [sr.RemoteEngine(server.url, api_key=server.api_key)]
        async with (
            sr.AsyncRolloutEngine(path, num_engines=0, remote=remote, progress=False) as rollout,
            sr.WeightSyncer(rollout, sr.ModuleSource(served), remote=sr.Disk(folder, delta=True)) as delta,
            sr.WeightSyncer(rollout, sr.ModuleSource(served), remote=sr.Disk(folder)) as disk,
        ):
            await delta.sync(mode="abort")
            for step in range(args.steps + 2):
                groups = await rollout.generate(PROMPTS, n=4, sampling=SAMPLING)
                train(model, optimizer, groups, generator)
                changed = 0
                with torch.no_grad():
                    for mine, theirs in zip(model.parameters(), served.parameters(), strict=True):
                        before = theirs.clone()
                        theirs.copy_(mine)
                        changed += int((before != theirs).sum())
                few, all_ = await delta.sync(mode="abort"), await disk.sync(mode="abort")
                row = {
                    "changed": changed / sum(parameter.numel() for parameter in served.parameters()),
                    "written": few.written_bytes / all_.written_bytes,
                    **{"delta_mb": few.written_bytes / 1e6, "disk_mb": all_.written_bytes / 1e6},
                    **{"delta_s": few.transfer_s, "disk_s": all_.transfer_s},
                    **{"delta_load_s": few.load_s, "disk_load_s": all_.load_s},
                }
                shown = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
                print(f"lr {rate:g}, step {step}: {shown}", file=sys.stderr)
                rows.append(row)
    return {name: median(row[name] for row in rows[2:]) for name in rows[0]}


async def main(args: argparse.Namespace) -> None:
    path = args.model or str(testing.smollm2())
    columns = ("learning rate", "elements changed", "written, of all", "MB", "transfer, s", "of which load, s")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for rate in args.learning_rates:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            row = await run(args, path, rate, Path(folder))
        pairs = [f"{row[f'delta_{name}']:.3g} / {row[f'disk_{name}']:.3g}" for name in ("mb", "s", "load_s")]
        shown = [f"{rate:g}", f"{row['changed']:.2%}", f"{row['written']:.2%}", *pairs]
        print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="A Hub id or a directory; SmolLM2-135M by default.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", help="That trainer and server share; a temporary one by default.")
    asyncio.run(main(parser.parse_args()))
