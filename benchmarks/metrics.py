"""What metrics cost: CPU time of this process. No SGLang, no GPU.

python benchmarks/metrics.py

us per sample     to be told of a slot and of the end: median and worst of the repeats
us per failover   to be told of the loss of an engine and of the next slot, on top
ms per reading    one ``rollout.metrics()``, with 8 engines and 4,096 samples that run
us per second     what is noted once a second, with as many
bytes per sample  that are kept for a timeline
timeline s        to write the timeline of 20,000 samples
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from sglrollout.config import RolloutConfig, Sampling
from sglrollout.errors import EngineDiedError
from sglrollout.generation.sample import Failover, Outlives, Prepared, Sample
from sglrollout.observe.recorder import Recorder
from sglrollout.observe.timeline import write_timeline
from sglrollout.pool.pool import Pool
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.messages import Finish

NUM_EVENTS = RolloutConfig.model_fields["timeline_events"].default
NUM_ENGINES, NUM_LIVE, NUM_TOKENS = 8, 4096, 200
LOSS = EngineDiedError("engine-0", "it was killed")
SAMPLING, FAILOVER = Sampling(), Failover(True, True, 3)


def ended_sample(number: int) -> Sample:
    """One that has got its slot, its tokens and its end."""
    sample = Sample(
        Prepared([1, 2, 3], (1, 2, 3), 1000),
        SAMPLING,
        {},
        index=0,
        key=None,
        chunk_tokens=0,
        deadline=None,
        outlives=Outlives.DEATHS,
        failover=FAILOVER,
        on_lost=lambda sample, error: None,
    )
    sample.held_s = now = time.monotonic()
    request = sample.request
    request.engine, request.token_ids = f"engine-{number % NUM_ENGINES}", [7] * NUM_TOKENS
    request.queue_s, request.first_token_s, request.finished_s = 0.001, now + 0.01, now + 1
    request.finish = Finish("stop", prompt_tokens=3)
    return sample


def cpu_s(call: Callable[[], object]) -> float:
    begun_s = time.process_time()
    call()
    return time.process_time() - begun_s


def tell(recorder: Recorder, samples: list[Sample], losses: bool = False) -> None:
    for sample in samples:
        recorder.held(sample)
        if losses:
            recorder.left(sample, LOSS)
            recorder.held(sample)
        recorder.ended(sample)


async def measure(num_samples: int, repeats: int) -> dict[str, str]:
    pool = Pool([ScriptedEngine(f"engine-{i}") for i in range(NUM_ENGINES)], "auto", 65536)
    recorder = Recorder(NUM_EVENTS)
    samples = [ended_sample(number) for number in range(num_samples)]
    with recorder.watching(pool):
        for number in range(NUM_LIVE):
            recorder.held(ended_sample(number))
        plain = [cpu_s(lambda: tell(recorder, samples)) / num_samples * 1e6 for _ in range(repeats)]
        lost = [cpu_s(lambda: tell(recorder, samples, True)) / num_samples * 1e6 for _ in range(repeats)]
        readings = [cpu_s(recorder.metrics) * 1e3 for _ in range(10 * repeats)]
        ticks = [cpu_s(recorder.tick) * 1e6 for _ in range(10 * repeats)]
        with tempfile.TemporaryDirectory() as folder:
            timeline_s = cpu_s(lambda: write_timeline(recorder, Path(folder) / "timeline.json"))
    return {
        "us per sample": f"{statistics.median(plain):.2f} (worst {max(plain):.2f})",
        "us per failover": f"{statistics.median(lost) - statistics.median(plain):.2f}",
        "ms per reading": f"{statistics.median(readings):.2f}",
        "us per second": f"{statistics.median(ticks):.0f}",
        "bytes per sample": f"{bytes_per_sample():.0f}",
        "timeline s": f"{timeline_s:.2f}",
    }


def bytes_per_sample() -> float:
    """What is left when the samples are gone."""
    recorder = Recorder(NUM_EVENTS)
    tracemalloc.start()
    tell(recorder, [ended_sample(number) for number in range(NUM_EVENTS)])
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / NUM_EVENTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"{shlex.join(['python', *sys.argv])}\nPython {platform.python_version()}, {os.cpu_count()} cores")
    for name, shown in asyncio.run(measure(args.samples, args.repeats)).items():
        print(f"{name:18}{shown}")


if __name__ == "__main__":
    main()
