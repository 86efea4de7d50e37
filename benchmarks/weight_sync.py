"""Compares ways to bring a trainer's weights into SGLang engines, in one run: SGLang's own, and this library's.

    python benchmarks/weight_sync.py --shape qwen2.5-7b                    # one GPU, trainer and engine on it
    python benchmarks/weight_sync.py --shape qwen2.5-7b --gpus 2           # FSDP2 on two, an engine on each
    python benchmarks/weight_sync.py --shape qwen2.5-7b --gpus 2 --tp 2    # FSDP2 on two, one engine on both
    python benchmarks/weight_sync.py --device cpu --shape tiny             # does it run at all

Weights are random and everything is in bfloat16. Every way runs in processes of its own, one after the other. Times are
medians of ``--repeats`` syncs after three others, with the device idle before and after. Prints each row as it comes,
on stderr, and a table last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _shapes import SHAPES, Work, write_model

from sglrollout.engine import cpu_support

if cpu_support.is_enabled():
    cpu_support.enable()  # the schedulers that SGLang spawns import this module before SGLang

_WARMUPS = 3
_RESULT = "result: "
_PHASES = ("pause_s", "gather_s", "load_s", "transfer_s", "flush_s", "resume_s")


def work_of(args: argparse.Namespace, model_dir: str) -> Work:
    return Work(args.device, args.shape, model_dir, 8, 16, 16, 1, 1.0, "auto", False, None)


def engine_args(args: argparse.Namespace, model_dir: str) -> dict[str, Any]:
    """With room on the device for a trainer and a second copy of its weights; without graphs, which take a minute."""
    given = work_of(args, model_dir).engine_args()
    return given | ({"mem_fraction_static": 0.5, "disable_cuda_graph": True} if args.device == "cuda" else {})


def rollout_options(args: argparse.Namespace, model_dir: str) -> dict[str, Any]:
    given = work_of(args, model_dir).rollout_options()
    if args.device == "cuda":
        given |= {"mem_fraction": 0.5, "engine_args": {**given["engine_args"], "disable_cuda_graph": True}}
    return given


def say(row: str, seconds: list[float], **facts: Any) -> None:
    """One line for the process that prints the table."""
    print(_RESULT + json.dumps({"row": row, "ms": statistics.median(seconds) * 1e3, **facts}), flush=True)


# ---------------------------------------------------------------- the trainer's side


def make_model(args: argparse.Namespace, model_dir: str) -> Any:
    """The shape's transformers model with random weights."""
    cpu_support.forgive_torchvision()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.trainer_dtype))
    return fill(model.to_empty(device=args.device), args)


def fill(model: Any, args: argparse.Namespace) -> Any:
    import torch

    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.normal_(std=0.02)
    return model


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        import torch

        torch.cuda.synchronize()


def used_bytes(args: argparse.Namespace) -> int:
    """Of the device, by anybody."""
    if args.device == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def timed(args: argparse.Namespace, call: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(_WARMUPS + args.repeats):
        synchronize(args)
        begun = time.perf_counter()
        call()
        synchronize(args)
        seconds.append(time.perf_counter() - begun)
    return seconds[_WARMUPS:]


# ---------------------------------------------------------------- SGLang's own ways


def run_raw(args: argparse.Namespace, model_dir: str) -> None:
    """SGLang's in-process Engine, called as a user without this library would. The trainer is the same process."""
    if args.device == "cpu":
        cpu_support.enable()
    import torch
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**engine_args(args, model_dir))
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        named = [(name, parameter.detach()) for name, parameter in make_model(args, model_dir).named_parameters()]
        floor(args, named)

        def each() -> None:
            for i, pair in enumerate(named):
                with session(engine):
                    update(engine, [pair], i == len(named) - 1)

        def at_once() -> None:
            with session(engine):
                update(engine, named, True)

        say("SGLang, a call for each tensor", timed(args, each))
        say("SGLang, one call", timed(args, at_once))
        for megabytes in (512, 2048):
            say(
                f"SGLang, flattened buckets of {megabytes} MB",
                timed(args, lambda m=megabytes: flattened(engine, named, m << 20)),
            )  # type: ignore[misc]
    finally:
        engine.shutdown()


def floor(args: argparse.Namespace, named: list[tuple[str, Any]]) -> None:
    """One copy of all weights within the device."""
    import torch

    num_bytes = sum(tensor.nbytes for _, tensor in named)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    say("one copy within the device", timed(args, lambda: target.copy_(source)), num_bytes=num_bytes)


@contextmanager
def session(engine: Any) -> Iterator[None]:
    """A weight update, where this version has such a session."""
    if hasattr(engine, "begin_weight_update"):
        engine.begin_weight_update()
    yield
    if hasattr(engine, "end_weight_update"):
        engine.end_weight_update()


def update(engine: Any, named: Any, flush: bool, load_format: str | None = None) -> None:
    success, message = engine.update_weights_from_tensor(named, load_format=load_format, flush_cache=flush)
    if not success:
        raise RuntimeError(message)


def flattened(engine: Any, named: list[tuple[str, Any]], bucket_bytes: int) -> None:
    """As the frameworks do it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    buckets: list[list[tuple[str, Any]]] = [[]]
    size = 0
    for name, tensor in named:
        if buckets[-1] and size + tensor.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    with session(engine):
        for i, pairs in enumerate(buckets):
            bucket = FlattenedTensorBucket(named_tensors=pairs)
            payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            update(engine, [MultiprocessingSerializer.serialize(payload)], i == len(buckets) - 1, "flattened_bucket")


# ---------------------------------------------------------------- this library's


async def run_sglrollout(args: argparse.Namespace, model_dir: str) -> None:
    """Trainer and engine share one GPU."""
    import sglrollout as sr

    options = rollout_options(args, model_dir) | {"memory_saver": args.memory_saver}
    async with sr.AsyncRolloutEngine(**options) as rollout:
        model = make_model(args, model_dir)
        named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        sources: dict[str, tuple[Any, dict[str, Any]]] = {
            "fast, parameters mapped": (sr.ModuleSource(model), {}),
            **{
                f"fast, staged in 2 x {megabytes} MB": (sr.TensorSource(named), {"bucket_bytes": megabytes << 20})
                for megabytes in (128, 256, 512)
            },
            "portable, buckets of 512 MB": (sr.ModuleSource(model), {"method": "portable", "bucket_bytes": 512 << 20}),
        }
        for name, (source, given) in sources.items():
            await measure_sync(args, f"sglrollout, {name}", rollout, source, **given)
        if args.memory_saver:
            async with sr.WeightSyncer(rollout, sr.ModuleSource(model)) as syncer:
                await measure_sleep(args, rollout, syncer)


async def measure_sync(
    args: argparse.Namespace, row: str, rollout: Any, source: Any, mode: Any = "retract", **given: Any
) -> None:
    import torch.distributed as dist

    import sglrollout as sr

    before = used_bytes(args)
    async with sr.WeightSyncer(rollout, source, **given) as syncer:
        first = await syncer.sync(mode)
        extra = used_bytes(args) - before
        reports, seconds = [], []
        for _ in range(_WARMUPS + args.repeats):
            synchronize(args)
            begun = time.perf_counter()
            reports.append(await syncer.sync(mode))
            seconds.append(time.perf_counter() - begun)
        if args.verify:
            await syncer.verify()
    reports, seconds = reports[_WARMUPS:], seconds[_WARMUPS:]
    phases = {phase: statistics.median(getattr(report, phase) for report in reports) * 1e3 for phase in _PHASES}
    if not dist.is_initialized() or dist.get_rank() == 0:
        last = reports[-1]
        facts = {"buckets": last.num_buckets, "num_bytes": last.num_bytes, "first_ms": first.total_s * 1e3}
        say(row, seconds, extra_bytes=extra, phases=phases, **facts, copy_gb_per_s=last.copy_bytes_per_s / 1e9)


async def measure_sleep(args: argparse.Namespace, rollout: Any, syncer: Any) -> None:
    """All memory given back and taken again, and the sync that wakes engines in stages."""
    from sglrollout.pool.sleep import TAGS

    asleep, awake, staged = [], [], []
    by_tag: dict[str, list[float]] = {tag: [] for tag in TAGS}
    for _ in range(args.repeats):
        asleep.append((await rollout.sleep()).seconds)
        begun = time.perf_counter()
        await rollout.wake()
        awake.append(time.perf_counter() - begun)
        await syncer.sync()
        await rollout.sleep()
        for tag in TAGS:
            begun = time.perf_counter()
            await rollout.wake([tag])
            by_tag[tag].append(time.perf_counter() - begun)
        await syncer.sync()
        if args.verify:
            await syncer.verify()
        report = await rollout.sleep()
        asleep.append(report.seconds)
        staged.append((await syncer.sync()).total_s)
    freed = sum(size for tags in report.freed_bytes.values() for size in tags.values())
    used = max(report.used_bytes.values())
    say("sleep", asleep, freed_bytes=freed, used_bytes=used)
    say("wake", awake)
    for tag, seconds in by_tag.items():
        freed_gb = max(tags[tag] for tags in report.freed_bytes.values()) / 1e9
        say(f"wake {tag} alone, {freed_gb:.1f} GB", seconds)
    say("sync that wakes the engine", staged)


async def run_fsdp(args: argparse.Namespace, model_dir: str) -> None:
    """One rank of several, each with its GPU; rank 0 owns the engines."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    import sglrollout as sr

    cpu_support.forgive_torchvision()
    rank = int(os.environ["RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rollout = None
    if rank == 0:
        engines = {"num_engines": args.gpus // args.tp, "tp_size": args.tp}
        rollout = await sr.AsyncRolloutEngine(**(rollout_options(args, model_dir) | engines)).start()
    dist.barrier()
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.trainer_dtype))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    fill(model.to_empty(device=args.device), args)
    parameters = [parameter.detach() for _, parameter in model.named_parameters()]
    try:
        seconds = timed(args, lambda: [parameter.full_tensor() for parameter in parameters] and None)
        if rank == 0:
            say("full_tensor() of each parameter, gather alone", seconds)
        gather = one_gather(args, parameters)
        if rank == 0:
            say("one all-gather of all bytes, floor of the gather", gather)
        await measure_sync(args, "sglrollout, fast, shards mapped", rollout, sr.FSDPSource(model))
        for megabytes in (128, 256, 512):
            given = {"bucket_bytes": megabytes << 20}
            await measure_sync(
                args, f"sglrollout, fast, gathered in 2 x {megabytes} MB", rollout, gathered(model), **given
            )
        given = {"method": "portable", "bucket_bytes": 512 << 20}
        await measure_sync(args, "sglrollout, portable, buckets of 512 MB", rollout, sr.FSDPSource(model), **given)
    finally:
        if rollout is not None:
            await rollout.close()
    dist.destroy_process_group()


def gathered(model: Any) -> Any:
    """As for parameters that engines cannot read themselves: of another dtype, offloaded, or of another machine."""
    import sglrollout as sr

    source = sr.FSDPSource(model)
    source.persistent = False
    return source


def one_gather(args: argparse.Namespace, parameters: list[Any]) -> list[float]:
    import torch
    import torch.distributed as dist

    own = sum(parameter.to_local().nbytes for parameter in parameters) // 256 * 256
    out = torch.empty(own * dist.get_world_size(), dtype=torch.uint8, device=args.device)
    share = out[dist.get_rank() * own : (dist.get_rank() + 1) * own].clone()
    return timed(args, lambda: dist.all_gather_into_tensor(out, share))


# ---------------------------------------------------------------- all of them


def run_ways(args: argparse.Namespace) -> list[dict[str, Any]]:
    ways = ["raw", "sglrollout"] if args.gpus == 1 else ["fsdp"]
    rows: list[dict[str, Any]] = []
    for way in args.ways or ways:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        if way == "fsdp":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
            command = [sys.executable, *launcher, *command[1:]]
        rows += rows_of(way, command)
    return rows


def rows_of(way: str, command: list[str]) -> list[dict[str, Any]]:
    """What a process says, as it says it."""
    rows: list[dict[str, Any]] = []
    tail: deque[str] = deque(maxlen=30)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line)
            if line.startswith(_RESULT):
                rows.append(json.loads(line[len(_RESULT) :]))
                print(f"{rows[-1]['row']}: {rows[-1]['ms']:.1f} ms", file=sys.stderr, flush=True)
    if process.returncode:
        print(f"{way} ended with exit code {process.returncode}\n{''.join(tail)}")
    return rows


def show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the table; write the file, if one is wanted."""
    print_table(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'way':<52} {'ms':>8} {'first':>8} {'extra MB':>9}  " + " ".join(f"{p[:-2]:>9}" for p in _PHASES))
    for row in rows:
        phases = " ".join(f"{row['phases'][phase]:9.2f}" for phase in _PHASES) if "phases" in row else ""
        first = f"{row['first_ms']:8.0f}" if "first_ms" in row else " " * 8
        extra = f"{row['extra_bytes'] / 2**20:9.0f}" if "extra_bytes" in row else " " * 9
        print(f"{row['row']:<52} {row['ms']:8.1f} {first} {extra}  {phases}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--gpus", type=int, default=1, help="trainer ranks, each with a GPU; more than one is FSDP2")
    parser.add_argument("--tp", type=int, default=1, help="TP ranks of each engine, with --gpus above 1")
    parser.add_argument(
        "--trainer-dtype", default="bfloat16", help="of the trainer's parameters; engines have bfloat16"
    )
    parser.add_argument("--memory-saver", action="store_true", help="also sleep and wake")
    parser.add_argument("--verify", action="store_true", help="also check that engines have the trainer's weights")
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--ways", nargs="*", choices=["raw", "sglrollout", "fsdp"], help="only these")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is None:
        show(args, run_ways(args))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), args.shape)
        if args.way == "raw":
            run_raw(args, directory)
        else:
            asyncio.run((run_sglrollout if args.way == "sglrollout" else run_fsdp)(args, directory))


if __name__ == "__main__":
    main()
