"""Compares ways to get rollouts from SGLang, in one run: its in-process engine, this library, and its HTTP server.

    python benchmarks/dispatch.py --json dispatch.json
    python benchmarks/dispatch.py --device cpu --shape tiny --num-prompts 16 --new-tokens 32

Every way does the same work with the same engine arguments in a fresh process of its own, one after the other; the rows
of a way share one engine, and their repeats alternate. Prints a table last. ``--way WAY`` runs one way in this process
and prints a JSON line per run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil
from _http import run_http, serve
from _measure import Delta, Measurement, Row, Sample, collect, measure
from _raw import run_raw
from _report import COLLECT, GENERATE, STREAM1, STREAM8, check_targets, print_table, summarize
from _shapes import SHAPES, Work, write_model

from sglrollout.engine import cpu_support

if cpu_support.is_enabled():
    # The schedulers that SGLang spawns import this module before SGLang.
    cpu_support.enable()

WAYS = ("raw", "sglrollout", "http")
_POLL_S = 0.5
_END_TIMEOUT_S = 10.0
_LOG_LINES = 40
_NOTE = "note: "
_PROBE = (
    "import torch, json; cuda = torch.cuda.is_available(); "
    "print(json.dumps([torch.__version__, torch.cuda.get_device_name(0) if cuda else None]))"
)


class Machine(NamedTuple):
    """What the run is measured on. ``gpu`` is None without one."""

    sglang: str
    torch: str
    gpu: str | None


# ---------------------------------------------------------------- one way, in a process of its own


def run_sglrollout(work: Work) -> None:
    """Measure this library."""
    asyncio.run(_measure_sglrollout(work))


async def _measure_sglrollout(work: Work) -> None:
    import sglrollout as sr

    def sampling(num_tokens: int) -> sr.Sampling:
        return sr.Sampling(temperature=1.0, max_new_tokens=num_tokens, ignore_eos=True)

    async with sr.AsyncRolloutEngine(**work.rollout_options()) as rollout:

        async def generate(prompts: list[list[int]], num_tokens: int) -> list[Sample]:
            groups = await rollout.generate(prompts, sampling=sampling(num_tokens))
            completions = [group.completions[0] for group in groups]
            return [Sample(completion.token_ids, completion.logprobs or ()) for completion in completions]

        async def collected(prompts: list[list[int]], num_tokens: int) -> list[Sample]:
            batch = await rollout.collect(prompts, sampling=sampling(num_tokens), reward=_reward)
            completions = [group.completions[0] for group in batch.groups]
            return [Sample(completion.token_ids, completion.logprobs or ()) for completion in completions]

        def stream(chunk_tokens: int) -> Row:
            async def deltas(prompt: list[int], num_tokens: int) -> AsyncIterator[Delta]:
                async for chunk in rollout.stream(prompt, sampling(num_tokens), chunk_tokens=chunk_tokens):
                    yield chunk.token_ids, chunk.logprobs or ()

            async def row(prompts: list[list[int]], num_tokens: int) -> list[Sample]:
                return list(await asyncio.gather(*(collect(deltas(prompt, num_tokens)) for prompt in prompts)))

            return row

        info = rollout.engines[0].info
        assert info is not None
        if not info.fast_outputs:
            print(f"{_NOTE}fast outputs are off: {'; '.join(info.warnings)}", flush=True)
        await measure({GENERATE: generate, COLLECT: collected, STREAM8: stream(8), STREAM1: stream(1)}, work, info.pid)


def _reward(completion: Any) -> float:
    return float(len(set(completion.token_ids)))


def run_way(args: argparse.Namespace) -> None:
    """Run ``args.way`` here."""
    if args.parent_pid:
        threading.Thread(target=_die_with, args=(args.parent_pid,), daemon=True).start()
    work = _work(args)
    if work.profile_dir is not None:
        Path(work.profile_dir).mkdir(parents=True, exist_ok=True)
    if work.device == "cpu":
        cpu_support.enable()
    match args.way:
        case "raw":
            run_raw(work)
        case "sglrollout":
            run_sglrollout(work)
        case "http":
            run_http(work, Path(__file__).resolve())


def _die_with(parent_pid: int) -> None:
    """End this session if the parent was killed, and so could not end it."""
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _work(args: argparse.Namespace) -> Work:
    on_gpu = args.device == "cuda"
    return Work(
        device=args.device,
        shape=args.shape,
        model_dir=args.model_dir,
        num_prompts=args.num_prompts or (1024 if on_gpu else 64),
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens or (256 if on_gpu else 64),
        repeats=args.repeats,
        row_budget_s=args.row_budget_s,
        max_inflight=args.max_inflight,
        extra_rows=args.extra_rows,
        profile_dir=args.profile if args.way == "sglrollout" else None,
    )


# ---------------------------------------------------------------- the parent


class WayProcess:
    """One way as a child that leads a session of its own. Leaving the ``with`` block ends all it started."""

    def __init__(self, command: list[str], directory: Path, way: str) -> None:
        self._out = (directory / f"{way}.jsonl").open("w+", encoding="utf-8")
        self._log = (directory / f"{way}.log").open("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._log, start_new_session=True
        )
        self._results = open(self._out.name, encoding="utf-8")  # noqa: SIM115
        self._known: set[psutil.Process] = set()
        self._partial = ""

    def __enter__(self) -> WayProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """Whatever ended the way, wait for those that end by themselves, then kill what is left."""
        self._note_descendants()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_END_TIMEOUT_S)
        mine = {process for process in psutil.process_iter() if _session(process) == self._process.pid}
        _kill(mine)
        _, left = psutil.wait_procs(self._known | mine, _END_TIMEOUT_S)
        _kill(left)
        psutil.wait_procs(left, _END_TIMEOUT_S)
        for file in (self._out, self._log, self._results):
            file.close()

    @property
    def exit_code(self) -> int | None:
        self._note_descendants()
        return self._process.poll()

    def new_lines(self) -> list[str]:
        """What it printed since the last call; SGLang prints there as well."""
        *lines, self._partial = (self._partial + self._results.read()).split("\n")
        return lines

    def log_tail(self) -> str:
        self._log.flush()
        return "\n".join(Path(self._log.name).read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])

    def _note_descendants(self) -> None:
        # The library's engine hosts lead sessions of their own, and are orphans once their caller is gone.
        with contextlib.suppress(psutil.NoSuchProcess):
            self._known.update(psutil.Process(self._process.pid).children(recursive=True))


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def compare(args: argparse.Namespace, directory: Path, rows: dict[str, list[Measurement]]) -> bool:
    """Run all ways in turn, and add what they measure to ``rows``.

    A way that fails keeps the rows it had, and the end of its log goes to stderr.

    Returns:
        whether every way came to its end.
    """
    complete = True
    for way in args.ways:
        begun_s = time.monotonic()
        print(f"[{way}] starting its engine", file=sys.stderr, flush=True)
        with WayProcess(_command(way, args), directory, way) as process:
            failure = _follow(process, begun_s + args.way_timeout_s, rows)
            if failure is not None:
                complete = False
                print(f"[{way}] {failure}; its log ends with\n{process.log_tail()}", file=sys.stderr, flush=True)
        print(f"[{way}] took {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    return complete


def _command(way: str, args: argparse.Namespace) -> list[str]:
    # Of options given twice the later one counts.
    mine = ["--way", way, "--device", args.device, "--model-dir", args.model_dir, "--parent-pid", str(os.getpid())]
    return [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], *mine]


def _follow(process: WayProcess, deadline_s: float, rows: dict[str, list[Measurement]]) -> str | None:
    """Collect its measurements until it ends; what went wrong, in words."""
    while True:
        code = process.exit_code
        for line in process.new_lines():
            if line.startswith('{"row"'):
                measurement = Measurement(**json.loads(line))
                rows.setdefault(measurement.row, []).append(measurement)
                line = f"{_NOTE}{measurement.row}: {measurement.tokens_per_s:,.0f} tokens/s"
            if line.startswith(_NOTE):
                print(f"  {line.removeprefix(_NOTE)}", file=sys.stderr, flush=True)
        if code is not None:
            return None if code == 0 else f"ended with exit code {code}"
        if time.monotonic() > deadline_s:
            return "ran past its deadline and is ended"
        time.sleep(_POLL_S)


# ---------------------------------------------------------------- what it says


def probe() -> Machine:
    """What is installed and visible, asked in another process: a CUDA context here would take memory from the ways."""
    from importlib.metadata import version

    output = subprocess.run([sys.executable, "-c", _PROBE], check=True, capture_output=True, text=True, timeout=120)
    torch, gpu = json.loads(output.stdout.splitlines()[-1])
    return Machine(version("sglang"), torch, gpu)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=_ways, default=list(WAYS), help=f"comma-separated, of {', '.join(WAYS)}")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--shape", choices=list(SHAPES), help="default: qwen2.5-1.5b on a GPU, tiny on a CPU")
    parser.add_argument("--num-prompts", type=int, help="default: 1024 on a GPU, 64 on a CPU")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, help="default: 256 on a GPU, 64 on a CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--row-budget-s", type=float, default=30.0, help="a row is not repeated once it took so long")
    parser.add_argument("--extra-rows", action="store_true", help="also raw/batch (one call) and http/sse8")
    parser.add_argument("--max-inflight", type=_inflight, default="auto", help="of sglrollout: a number, or auto")
    parser.add_argument("--json", type=Path, help="write all of it to this file")
    parser.add_argument("--profile", nargs="?", const=".", metavar="DIR", help="profile sglrollout's caller into DIR")
    parser.add_argument("--way-timeout-s", type=float, default=400.0, help="a way that takes longer is ended")
    parser.add_argument("--way", choices=WAYS, help="run this one here")
    parser.add_argument("--model-dir", help=argparse.SUPPRESS)
    parser.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser


def _ways(text: str) -> list[str]:
    ways = text.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {', '.join(WAYS)}")
    return ways


def _inflight(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> int:
    args = _parser().parse_args()
    if args.serve is not None:
        serve(args.serve)
        return 0
    signal.signal(signal.SIGTERM, _exit_on_signal)
    machine = None if args.parent_pid else probe()
    if args.device == "auto":
        args.device = "cuda" if machine is not None and machine.gpu else "cpu"
    args.shape = args.shape or ("qwen2.5-1.5b" if args.device == "cuda" else "tiny")
    if args.way is not None and args.model_dir is not None:
        run_way(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="dispatch-") as directory:
        args.model_dir = directory
        write_model(Path(directory), args.shape)
        if args.way is not None:
            run_way(args)
            return 0
        assert machine is not None
        return _run_all(args, machine, Path(directory))


def _exit_on_signal(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def _run_all(args: argparse.Namespace, machine: Machine, directory: Path) -> int:
    rows: dict[str, list[Measurement]] = {}
    try:
        complete = compare(args, directory, rows)
    finally:
        # Also when it was interrupted: what was measured until then took minutes.
        _report(args, machine, rows)
    return 0 if complete else 1


def _report(args: argparse.Namespace, machine: Machine, rows: dict[str, list[Measurement]]) -> None:
    summary, command = summarize(rows), shlex.join(["python", *sys.argv])
    targets = check_targets(summary)
    work = {name: value for name, value in asdict(_work(args)).items() if name not in ("model_dir", "profile_dir")}
    device = machine.gpu if args.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    print(f"\nSGLang {machine.sglang}, torch {machine.torch}, {device}\n{command}\n{work}\n")
    print_table(summary)
    print()
    for target in targets:
        verdict = "met" if target["met"] else "missed"
        print(f"{target['row']} >= {target['at_least']:.2f} of {target['of']}: {target['ratio']:.3f}, {verdict}")
    if args.json is not None:
        report = {"machine": machine._asdict(), "command": command, "work": work, "rows": summary, "targets": targets}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
