"""Half an hour of load on real engines, in which nothing may grow: ``nox -s soak -- --minutes 30``.

Clients generate, stream, cancel and run into deadlines while weights are synced every few seconds. Memory of this
process and of the engines' processes, file descriptors, threads and tasks are looked at every five seconds; what still
grows after the first fifth of the time, by more than a line through it allows, is a leak. With ``--servers 1`` one of
the engines is SGLang's server, whose own memory is not looked at.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import anyio
import psutil
from safetensors.torch import load_file

import sglrollout as sr
from sglrollout.weights.leader import PauseMode
from tests.load import Load, Resources, open_torchs_pipe, run_alone, settled
from tests.remote import RealServer, real_servers

LOOK_EVERY_S = 5.0
WARM_SHARE = 0.2
MOST_MB = 24.0
"""That the line through an amount of memory may rise in the whole time: what the allocators move up and down."""
MOST_CONNECTIONS = 10.0
"""To servers: there are as many as requests at the busiest moment of late."""
MOST_OF_OTHERS = 2.0


class Watch:
    """Looks at what is held, once in a while."""

    def __init__(self, rollout: sr.AsyncRolloutEngine, server_ports: Collection[int]) -> None:
        self._rollout, self._ports = rollout, server_ports
        self.seconds: list[float] = []
        self.seen: dict[str, list[float]] = {}

    async def run(self) -> None:
        begun = time.monotonic()
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            held = Resources()
            connections = psutil.Process().net_connections("tcp")
            num_connections = sum(bool(one.raddr) and one.raddr.port in self._ports for one in connections)
            now = {"MB here": held.megabytes, "threads": held.threads, "files": held.files}
            now |= {"connections": num_connections, "other fds": held.fds - num_connections}
            for engine in self._rollout.engines:
                assert engine.info is not None
                if engine.info.remote:
                    continue
                pids = {f"MB of {engine.name}'s host": engine.info.pid}
                pids |= {f"MB of {engine.name}'s scheduler {i}": pid for i, pid in enumerate(engine.info.child_pids)}
                now |= {what: psutil.Process(pid).memory_info().rss / 1e6 for what, pid in pids.items()}
            self.seconds.append(time.monotonic() - begun)
            for what, amount in now.items():
                self.seen.setdefault(what, []).append(amount)

    def growth(self) -> dict[str, float]:
        """How much more there is of each after the whole time, by the line through it without the first of it."""
        first = int(len(self.seconds) * WARM_SHARE)
        times = self.seconds[first:]
        found = {}
        for what, amounts in self.seen.items():
            slope = statistics.linear_regression(times, amounts[first:]).slope
            found[what] = slope * (times[-1] - times[0])
        return found


async def _sync(syncer: sr.WeightSyncer, every_s: float) -> None:
    modes: itertools.cycle[PauseMode] = itertools.cycle(("retract", "in_place", "abort"))
    for mode in modes:
        await anyio.sleep(every_s)
        await syncer.sync(mode)


async def soak(model: Path, options: argparse.Namespace) -> list[str]:
    """The whole of it; what was wrong, in words."""
    open_torchs_pipe()
    before = Resources()
    with real_servers(model, model / "server", *[[]] * options.servers) as servers:
        wrong = await loaded(model, options, servers)
    return wrong + [f"after the pool has ended, {more}" for more in await settled(before, 400)]


async def loaded(model: Path, options: argparse.Namespace, servers: list[RealServer]) -> list[str]:
    """A pool and its clients; what was wrong of these."""
    weights = load_file(model / "model.safetensors")
    remote = [sr.RemoteEngine(server.url) for server in servers]
    config: dict[str, Any] = {"device": "cpu", "dtype": "float32", "progress": False, "log_level": "warning"}
    async with (
        sr.AsyncRolloutEngine(model, num_engines=2 - len(remote), remote=remote, **config) as rollout,
        sr.WeightSyncer(rollout, sr.TensorSource(weights)) as syncer,
    ):
        load, watch = Load(rollout, options.seed), Watch(rollout, [server.port for server in servers])
        await load.learn()
        async with anyio.create_task_group() as tasks:
            clients = anyio.Event()

            async def run_clients() -> None:
                await load.run(options.clients)
                clients.set()

            for call in (run_clients, watch.run):
                tasks.start_soon(call)
            tasks.start_soon(_sync, syncer, 3.0)
            await anyio.sleep(60 * options.minutes)
            load.stop()
            await clients.wait()
            tasks.cancel_scope.cancel()
        await load.check()
    for what, more in watch.growth().items():
        last = watch.seen[what][-1]
        print(f"{what:32} {last:9.1f} at the end, {more:+8.2f} by the line")  # noqa: T201
        most = MOST_MB if what.startswith("MB") else MOST_CONNECTIONS if what == "connections" else MOST_OF_OTHERS
        if more > most:
            load.wrong.append(f"{what}: {more:.1f} more after {watch.seconds[-1]:.0f} s")
    failed = [end for end in load.ends if "Error" in end]
    if failed:
        load.wrong.append(f"nothing was broken, and there were {failed}")
    print(f"{load.num_ended} calls, {load.num_tokens} tokens compared")  # noqa: T201
    return load.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--servers", type=int, choices=[0, 1, 2], default=0, help="of SGLang, in place of engines here")
    options = parser.parse_args()
    return run_alone(lambda model: soak(model, options))


if __name__ == "__main__":
    sys.exit(main())
