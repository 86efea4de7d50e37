"""Runs the rows of one way in turn, checks what they return, and prints a JSON line per run."""

from __future__ import annotations

import cProfile
import gc
import json
import pstats
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import psutil
from _shapes import Work


class Sample(NamedTuple):
    """What a row made of one prompt. ``first_token_s`` is on the clock of ``time.perf_counter``."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    first_token_s: float | None = None
    num_chunks: int = 0


Row = Callable[[list[list[int]], int], Awaitable[list[Sample]]]
"""From prompts and the number of new tokens of each to a sample of each."""

Delta = tuple[Sequence[int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one row.

    Attributes:
        caller_cpu_s: CPU time of the process that asked; in the raw way SGLang's frontend is part of it.
        host_cpu_s: CPU time of the process that drives the scheduler, where that is another one.
        first_token_s: from the start of the run to each sample's first token, p50 and p99; streams only.
        tokens_per_chunk: mean; streams only.
    """

    row: str
    num_tokens: int
    seconds: float
    caller_cpu_s: float
    host_cpu_s: float | None
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    tokens_per_chunk: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


async def collect(deltas: AsyncIterator[Delta]) -> Sample:
    """Read a whole stream, each chunk's token ids and logprobs."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    first_token_s, num_chunks = None, 0
    async for ids, values in deltas:
        if first_token_s is None:
            first_token_s = time.perf_counter()
        token_ids.extend(ids)
        logprobs.extend(values)
        num_chunks += 1
    return Sample(token_ids, logprobs, first_token_s, num_chunks)


async def measure(rows: dict[str, Row], work: Work, host_pid: int | None = None) -> None:
    """A warm-up of every row, then the rows in turn, as often as asked; prints a :class:`Measurement` each."""
    for seed, row in enumerate(rows.values()):
        _check(await row(work.prompts(seed), work.warmup_tokens), work.num_prompts, work.warmup_tokens)
    seed, spent_s = len(rows), dict.fromkeys(rows, 0.0)
    for _ in range(work.repeats):
        for name, row in rows.items():
            if spent_s[name] < work.row_budget_s:
                measured = await _measure_once(name, row, work, seed, host_pid)
                print(json.dumps(asdict(measured)), flush=True)
                spent_s[name] += measured.seconds
                seed += 1
    if work.profile_dir is not None:
        for name, row in rows.items():
            await _profile(name, row, work, seed, host_pid)
            seed += 1


async def _measure_once(name: str, row: Row, work: Work, seed: int, host_pid: int | None) -> Measurement:
    prompts = work.prompts(seed)
    gc.collect()
    caller_cpu_s, host_cpu_s = time.process_time(), _cpu_s(host_pid)
    begun_s = time.perf_counter()
    samples = await row(prompts, work.new_tokens)
    seconds = time.perf_counter() - begun_s
    caller_cpu_s, host_end_s = time.process_time() - caller_cpu_s, _cpu_s(host_pid)
    num_tokens = _check(samples, work.num_prompts, work.new_tokens)
    waits = [sample.first_token_s - begun_s for sample in samples if sample.first_token_s is not None]
    num_chunks = sum(sample.num_chunks for sample in samples)
    return Measurement(
        row=name,
        num_tokens=num_tokens,
        seconds=seconds,
        caller_cpu_s=caller_cpu_s,
        host_cpu_s=None if host_cpu_s is None or host_end_s is None else host_end_s - host_cpu_s,
        first_token_p50_s=statistics.median(waits) if waits else None,
        first_token_p99_s=_percentile(waits, 0.99) if waits else None,
        tokens_per_chunk=num_tokens / num_chunks if num_chunks else None,
    )


def _check(samples: list[Sample], num_prompts: int, new_tokens: int) -> int:
    """Every prompt has its sample, of the length asked for, with a logprob for every token."""
    if len(samples) != num_prompts:
        raise AssertionError(f"{num_prompts} prompts gave {len(samples)} samples")
    for sample in samples:
        if not len(sample.token_ids) == len(sample.logprobs) == new_tokens:
            raise AssertionError(
                f"{new_tokens} tokens were asked for: {len(sample.token_ids)} came with {len(sample.logprobs)} logprobs"
            )
    return num_prompts * new_tokens


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _cpu_s(pid: int | None) -> float | None:
    if pid is None:
        return None
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _profile(name: str, row: Row, work: Work, seed: int, host_pid: int | None) -> None:
    """One more run under cProfile, and under py-spy in the host where that is installed; slower, so not measured."""
    prompts, base = work.prompts(seed), f"{work.profile_dir}/profile-{name.replace('/', '-')}"
    spy = _spy(host_pid, f"{base}.host.txt")
    profile = cProfile.Profile()
    profile.enable()
    try:
        await row(prompts, work.new_tokens)
    finally:
        profile.disable()
        if spy is not None:
            spy.send_signal(signal.SIGINT)
            spy.wait(30)
    profile.dump_stats(f"{base}.prof")
    _write_text(profile, f"{base}.txt")


def _write_text(profile: cProfile.Profile, path: str) -> None:
    with open(path, "w", encoding="utf-8") as text:
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(60)


def _spy(pid: int | None, path: str) -> subprocess.Popen[Any] | None:
    found = shutil.which("py-spy")
    if found is None or pid is None:
        return None
    command = [found, "record", "--pid", str(pid), "--format", "raw", "--output", path]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
