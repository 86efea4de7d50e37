"""Weights from a trainer to a server that is not on its GPU: by broadcast, and by files; and the floor of both.

    python benchmarks/remote_weights.py --shape qwen2.5-7b             # two GPUs: trainer on 0, SGLang's server on 1
    python benchmarks/remote_weights.py --device cpu --shape tiny      # does it run at all, over gloo

The floor is a broadcast of as many bytes from one process to another, in buckets of the same size and nothing besides.
Weights are random and in bfloat16. Times are medians of ``--repeats`` syncs after three others. Prints each row as it
comes, on stderr, and a table last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from _shapes import SHAPES, write_model
from weight_sync import cpu_support, make_model, measure_sync, rollout_options, rows_of, say, show, timed

BUCKET_MB = (128, 512, 1024)
_MODE = "abort"
"""Nothing runs here; and servers of SGLang 0.5.17 to 0.5.20 do not retract."""


def run_floor(args: argparse.Namespace, model_dir: str) -> None:
    """One rank of two, each on its device: as many bytes from rank 0 to rank 1."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    cpu_support.forgive_torchvision()
    rank = int(os.environ["RANK"])
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=torch.bfloat16)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for megabytes in args.bucket_mb:
        size = min(megabytes << 20, num_bytes)
        bucket = torch.empty(size, dtype=torch.uint8, device=args.device)

        def broadcast(bucket: torch.Tensor = bucket, size: int = size) -> None:
            for start in range(0, num_bytes, size):
                dist.broadcast(bucket[: min(size, num_bytes - start)], src=0)

        seconds = timed(args, broadcast)
        if rank == 0:
            say(f"floor: broadcasts of {megabytes} MB alone", seconds, num_bytes=num_bytes)
    dist.destroy_process_group()


async def run_sync(args: argparse.Namespace, model_dir: str) -> None:
    """The trainer in this process, the server in one of its own."""
    import sglrollout as sr

    options = rollout_options(args, model_dir)
    served = {name: value for name, value in options.items() if name not in ("num_engines", "max_inflight", "progress")}
    devices = {"devices": [[1]]} if args.device == "cuda" else {}
    async with sr.launch_server(**served, **devices) as server:
        remote = [sr.RemoteEngine(server.url, api_key=server.api_key)]
        config = {"engine_args": {"skip_tokenizer_init": True}, "progress": False}
        async with sr.AsyncRolloutEngine(model_dir, num_engines=0, remote=remote, **config) as rollout:
            source = sr.ModuleSource(make_model(args, model_dir))
            for megabytes in args.bucket_mb if "broadcast" in args.roads else ():
                row = f"sglrollout, broadcast, buckets of {megabytes} MB"
                await measure_sync(args, row, rollout, source, _MODE, bucket_bytes=megabytes << 20)
            if "files" not in args.roads:
                return
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                row = f"sglrollout, files in {args.folder}"
                given = {"bucket_bytes": 1 << 30, "remote": sr.Disk(folder)}
                await measure_sync(args, row, rollout, source, _MODE, **given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=list(BUCKET_MB), metavar="MB")
    parser.add_argument("--roads", nargs="+", choices=["broadcast", "files"], default=["broadcast", "files"])
    parser.add_argument("--folder", default="/dev/shm", help="for files; the default is memory, not a disk")
    parser.add_argument("--trainer-dtype", default="bfloat16")
    parser.add_argument("--verify", action="store_true", help="also let the server answer after each row")
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is None:
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        rows = [
            *rows_of("floor", [sys.executable, *ranks, __file__, *sys.argv[1:], "--way", "floor"]),
            *rows_of("sync", [sys.executable, __file__, *sys.argv[1:], "--way", "sync"]),
        ]
        show(args, rows)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), args.shape)
        if args.way == "floor":
            run_floor(args, directory)
        else:
            asyncio.run(run_sync(args, directory))


if __name__ == "__main__":
    main()
