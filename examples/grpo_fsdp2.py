"""GRPO with an FSDP2 trainer and engines on the same GPUs, under torchrun: one process per GPU, one leader per machine.

The leader owns its machine's engines and collects; its ranks train on a share of each batch each. Engines start while
the trainer is built, sleep while it trains, and a weight sync wakes them. Micro-batches are cut by tokens, gradients
are clipped, a checkpoint has all that a run needs to go on, and every step is a line of metrics.jsonl.

Usage:
    torchrun --nproc-per-node 2 examples/grpo_fsdp2.py --tiny --device cpu --steps 4 --out run    # 2 cores, no GPU
    torchrun --nproc-per-node 2 examples/grpo_fsdp2.py --model Qwen/Qwen2.5-1.5B-Instruct --steps 100 --out run
    torchrun --nproc-per-node 2 examples/grpo_fsdp2.py ... --out run --resume                     # goes on from there
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from async_grpo import endless_sums
from grpo_minimal import load, logprobs_of, reward
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sglrollout as sr
from sglrollout import testing

T = TypeVar("T")


class Trainer:
    """This rank's shard of the model and of the optimizer."""

    def __init__(self, path: str, device: torch.device, options: argparse.Namespace) -> None:
        self.device, self.options = device, options
        model = load(path, str(device))
        lower = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = lower if device.type == "cuda" else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        self.model = fully_shard(model, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    def step(self, batch: sr.RolloutBatch, advantages: torch.Tensor) -> dict[str, float]:
        """Train on this rank's share of a batch. All ranks together, with as many micro-batches each."""
        rows = micro_batches(batch, self.options.micro_tokens)
        num_micro = int(self._over_ranks(len(rows), dist.ReduceOp.MAX))
        num_tokens = self._over_ranks(float(batch.num_tokens), dist.ReduceOp.SUM)
        error_sum = 0.0
        for i in range(num_micro):
            part = batch.select(rows[i] if i < len(rows) else [0]).to(self.device)
            logprobs = logprobs_of(self.model, part)
            weights = sr.importance_weights(logprobs, part)
            own = advantages[rows[i]] if i < len(rows) else torch.zeros(1)  # one that has nothing left adds nothing
            loss = -(weights * own.to(self.device)[:, None] * logprobs).sum() * dist.get_world_size() / num_tokens
            loss.backward()
            if i < len(rows):
                error_sum += sr.mismatch(logprobs, part).token_mult_prob_error * part.num_tokens
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "grad_norm": float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm),
            "token_mult_prob_error": self._over_ranks(error_sum, dist.ReduceOp.SUM) / num_tokens,
            "num_micro_batches": num_micro,
        }

    def _over_ranks(self, value: float, how: Any) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, how)
        return float(tensor)

    def save(self, folder: Path) -> None:
        checkpoint.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def micro_batches(batch: sr.RolloutBatch, most_tokens: int) -> list[list[int]]:
    """Rows of micro-batches: of like length, so that little is padded, and of at most so many tokens with padding."""
    lengths = batch.unpadded_lengths.tolist()
    found: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > most_tokens:
            found.append([])
        found[-1].append(row)
    return found


class Loop:
    """One rank's part of the run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
        self.local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self.leads = self.local_rank == 0
        self.device = torch.device(options.device, self.local_rank if options.device == "cuda" else None)
        self.machine, _ = dist.new_subgroups(self.local_size, backend="gloo")
        self.num_machines = dist.get_world_size() // self.local_size
        self.thread = ThreadPoolExecutor(1)  # all of the trainer's work, since torch's device is a thread's own
        self.out: Path = options.out

    async def on_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, partial(call, *arguments))

    async def run(self, path: str) -> None:
        rollout = None
        if self.leads:
            on_gpu = {"dtype": "bfloat16", "memory_saver": True, "mem_fraction": 0.5}
            own = on_gpu if self.options.device == "cuda" else {"dtype": "float32"}
            more = {"enable_fp32_lm_head": True, **self.options.engine_args}
            rollout = sr.AsyncRolloutEngine(path, device=self.options.device, engine_args=more, **own)
            await rollout.start(wait=False)  # beside the trainer
        try:
            if self.options.device == "cuda":
                await self.on_thread(torch.cuda.set_device, self.device)
            trainer = await self.on_thread(Trainer, path, self.device, self.options)
            await self.train(trainer, rollout)
        finally:
            if rollout is not None:
                await rollout.close()

    async def train(self, trainer: Trainer, rollout: sr.AsyncRolloutEngine | None) -> None:
        state = await self.restored(trainer)
        async with sr.WeightSyncer(rollout, sr.FSDPSource(trainer.model)) as syncer:
            await syncer.sync(version=state["version"] + 1)
            collector = self.collector(rollout, state)
            for step in range(state["step"] + 1, self.options.steps + 1):
                begun = time.monotonic()
                share, metrics = await self.share(collector)
                sampled = time.monotonic()
                if rollout is not None and self.options.device == "cuda":
                    await rollout.sleep(["kv_cache", "weights"])
                metrics |= await self.on_thread(trainer.step, *share)
                trained = time.monotonic()
                report = await syncer.sync()  # which wakes the engines
                metrics |= {"sample_s": sampled - begun, "train_s": trained - sampled, "sync_s": report.total_s}
                self.log({"step": step, **metrics})
                if step % self.options.save_every == 0 or step == self.options.steps:
                    await self.save(trainer, collector, step, report.version)
            if collector is not None:
                await collector.aclose()

    def collector(self, rollout: sr.AsyncRolloutEngine | None, state: dict[str, Any]) -> Any:
        if rollout is None:
            return None
        sampling = sr.Sampling(max_new_tokens=self.options.max_new_tokens, ignore_eos=self.options.tiny)
        collector = rollout.collect(
            endless_sums(self.options.seed + self.rank),
            n=self.options.samples,
            sampling=sampling,
            target_groups=self.options.groups // self.num_machines,
            reward=reward,
            max_staleness=0,
            progress=False,
        )
        if state["collector"] is not None:
            collector.load_state_dict(state["collector"])
        return collector

    async def share(self, collector: Any) -> tuple[tuple[sr.RolloutBatch, torch.Tensor], dict[str, Any]]:
        """This rank's share of its machine's next batch, with its advantages; and what the whole was like."""
        batch = await collector if collector is not None else None
        parts: list[Any] = [None] * self.local_size
        if batch is not None:
            advantages = batch.advantages()  # of whole groups, which a part has not
            parts = [(part, advantages[part.row_index]) for part in batch.split(self.local_size)]
        mine: list[Any] = [None]
        leader = self.rank - self.local_rank
        scatter = partial(dist.scatter_object_list, mine, parts, src=leader, group=self.machine)
        await self.on_thread(scatter)
        metrics = {}
        if batch is not None:
            metrics = {"reward": float(batch.rewards.mean()), "tokens": batch.num_tokens}
        return mine[0], metrics

    async def restored(self, trainer: Trainer) -> dict[str, Any]:
        """What a former run left, with the weights loaded; or the beginning."""
        folders = sorted(self.out.glob("step-*/state.json")) if self.options.resume else []
        if not folders:
            return {"step": 0, "version": 0, "collector": None}
        folder = folders[-1].parent
        await self.on_thread(trainer.load, folder)
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        own = folder / f"collector-{self.rank}.json"
        state["collector"] = json.loads(own.read_text()) if own.exists() else None
        return state

    async def save(self, trainer: Trainer, collector: Any, step: int, version: int) -> None:
        folder = self.out / f"step-{step:06d}"
        if collector is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"collector-{self.rank}.json").write_text(json.dumps(collector.state_dict()))
        await self.on_thread(trainer.save, folder)
        if self.rank == 0:
            (folder / "state.json").write_text(
                json.dumps({"step": step, "version": version})
            )  # whole once this is there

    def log(self, metrics: dict[str, Any]) -> None:
        if self.rank != 0:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)
        if self.options.wandb:
            import wandb

            if wandb.run is None:
                wandb.init(project=self.options.wandb)
            wandb.log(metrics, step=metrics["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random model of two layers")
    parser.add_argument("--model", help="path or Hub id; default: SmolLM2-135M-Instruct, prepared once from PyPI")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="of a batch, over all machines")
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--micro-tokens", type=int, default=2048, help="of a micro-batch, at most")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("run"), help="for checkpoints and metrics")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--wandb", metavar="PROJECT", help="log there, too")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="more for SGLang")
    options = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        path = str(testing.tiny_model(folder)) if options.tiny else options.model or str(testing.smollm2())
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        asyncio.run(Loop(options).run(path))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
