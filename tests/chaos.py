"""Faults on real engines under load, by a seeded schedule: ``nox -s chaos -- --minutes 5 --seed 1``.

While clients call the pool in every way there is, engines are killed, stopped, cut off and talked nonsense to, and
weights are synced. With ``--servers 1`` some are SGLang's servers. It ends with 1 if a call was lost, a whole answer is
not that of a quiet pool, an engine did not come back, or anything is left over.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
from safetensors.torch import load_file

import sglrollout as sr
from tests.load import Load, Resources, open_torchs_pipe, run_alone, settled
from tests.remote import RealServer, Relay, real_servers

HEAL_S = 240.0
DEAD_AFTER_S = 6.0
SYNC_S = 20.0
"""A sync's deadline, until which a gloo group that was given up may go on."""
SETTLED_S = SYNC_S + 10.0


class Chaos:
    """A schedule of faults.

    Args:
        weights: those that the engines started with, so that a sync changes nothing but their version.
        servers: of the remote engines, in their order, each behind its relay.
    """

    def __init__(
        self,
        rollout: sr.AsyncRolloutEngine,
        weights: dict[str, Any],
        seed: int,
        servers: list[RealServer],
        relays: list[Relay],
    ) -> None:
        self._rollout, self._rng = rollout, random.Random(seed)
        self._servers, self._relays = servers, relays
        self._syncer = sr.WeightSyncer(rollout, sr.TensorSource(weights), timeout_s=SYNC_S)
        self._begun_s = time.monotonic()
        self.num_faults = 0
        self.wrong: list[str] = []

    async def run(self, seconds: float, every_s: float) -> None:
        """One fault after another."""
        faults: list[Callable[[], Awaitable[object]]] = [
            *(
                self.kill_a_scheduler,
                self.kill_a_host,
                self.stop_a_scheduler_for_ever,
                self.stop_a_scheduler_for_a_while,
            ),
            *(self.stop_a_host_for_a_while, self.talk_nonsense, self.cut_a_channel),
            *(self.sync, self.sync, self.sync, self.sync_wrong_weights),
        ]
        if self._servers:
            faults += [self.kill_a_server, self.kill_a_server_in_a_sync]
            faults += [self.stop_a_server_for_a_while, self.stop_a_server_until_it_counts_as_dead, self.cut_a_server]
        self._rng.shuffle(faults)
        deadline = time.monotonic() + seconds
        async with self._syncer:
            while time.monotonic() < deadline:
                for fault in faults:
                    await anyio.sleep(self._rng.expovariate(1 / every_s))
                    if time.monotonic() > deadline:
                        break
                    self.num_faults += 1
                    await fault()
            await self.heal()

    async def heal(self) -> None:
        """All engines come back, and get the weights of now. A sync may lose more of them than it may."""
        with anyio.fail_after(HEAL_S):
            synced = False
            while not synced:
                await anyio.sleep(0.2)
                if all(engine.state in ("ready", "stale") for engine in self._rollout.engines):
                    synced = await self.sync("retract")
            while any(engine.state != "ready" for engine in self._rollout.engines):
                await anyio.sleep(0.2)

    def _say(self, what: str) -> None:
        states = ", ".join(f"{engine.name} {engine.state}" for engine in self._rollout.engines)
        print(f"{time.monotonic() - self._begun_s:7.1f} s  {what}  ({states})", flush=True)  # noqa: T201

    # ------------------------------------------------------------ faults

    def _one(self) -> sr.EngineStatus | None:
        """An engine of this machine that is up."""
        local = [engine for engine in self._rollout.engines if engine.name.startswith("engine-")]
        up = [engine for engine in local if engine.state in ("ready", "held", "stale") and engine.info]
        return self._rng.choice(up) if up else None

    def _signal(self, what: str, number: signal.Signals, scheduler: bool) -> int:
        engine = self._one()
        if engine is None or engine.info is None:
            return 0
        pid = engine.info.child_pids[0] if scheduler else engine.info.pid
        self._say(f"{what} {engine.name}")
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    async def kill_a_scheduler(self) -> None:
        self._signal("kill the scheduler of", signal.SIGKILL, True)

    async def kill_a_host(self) -> None:
        self._signal("kill the host of", signal.SIGKILL, False)

    async def stop_a_scheduler_for_ever(self) -> None:
        self._signal("stop for ever the scheduler of", signal.SIGSTOP, True)

    async def stop_a_scheduler_for_a_while(self) -> None:
        await self._go_on_later(self._signal("stop for a while the scheduler of", signal.SIGSTOP, True))

    async def stop_a_host_for_a_while(self) -> None:
        await self._go_on_later(self._signal("stop for a while the host of", signal.SIGSTOP, False))

    async def _go_on_later(self, pid: int) -> None:
        await anyio.sleep(self._rng.uniform(0.2, 2))
        with suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGCONT)

    async def talk_nonsense(self) -> None:
        """A message on the channel that the host cannot read."""
        if (channel := self._channel("talk nonsense to")) is not None:
            channel._writer.write(struct.pack("<I", 64) + self._rng.randbytes(64))

    async def cut_a_channel(self) -> None:
        if (channel := self._channel("cut the channel to")) is not None:
            await channel.close()

    def _channel(self, what: str) -> Any:
        engine = self._one()
        if engine is None:
            return None
        self._say(f"{what} {engine.name}")
        assert self._rollout._pool is not None
        (member,) = (member for member in self._rollout._pool.members if member.name == engine.name)
        return member.engine._channel  # type: ignore[attr-defined]

    async def kill_a_server(self) -> None:
        """Another one is started in its place, at its address and with the weights that it had at first."""
        i = self._rng.randrange(len(self._servers))
        self._say(f"kill the server of remote-{i}")
        self._servers[i].kill()
        self._servers[i] = self._servers[i].again()

    async def kill_a_server_in_a_sync(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.sync)
            await anyio.sleep(self._rng.uniform(0, 0.3))
            await self.kill_a_server()

    async def stop_a_server_for_a_while(self) -> None:
        await self._stop_a_server(self._rng.uniform(0.2, 2))

    async def stop_a_server_until_it_counts_as_dead(self) -> None:
        await self._stop_a_server(DEAD_AFTER_S + self._rng.uniform(1, 4))

    async def _stop_a_server(self, seconds: float) -> None:
        i = self._rng.randrange(len(self._servers))
        self._say(f"stop for {seconds:.1f} s the server of remote-{i}")
        self._servers[i].signal(signal.SIGSTOP)
        await anyio.sleep(seconds)
        self._servers[i].signal(signal.SIGCONT)

    async def cut_a_server(self) -> None:
        """All connections to it are reset."""
        i = self._rng.randrange(len(self._servers))
        self._say(f"cut the connections to remote-{i}")
        self._relays[i].cut()

    async def sync(self, mode: Any = None) -> bool:
        """Whether it succeeded."""
        mode = mode or self._rng.choice(("retract", "in_place", "abort"))
        try:
            report = await self._syncer.sync(mode)
        except sr.RolloutError as error:
            self._say(f"a sync ({mode}) failed: {type(error).__name__}: {str(error)[:80]}")
            return False
        without = f" without {', '.join(report.lost_engines)}" if report.lost_engines else ""
        self._say(f"synced ({mode}) in {report.total_s:.2f} s{without}")
        return True

    async def sync_wrong_weights(self) -> None:
        """Names that no engine has: refused, and engines serve on."""
        import torch

        async with sr.WeightSyncer(self._rollout, sr.TensorSource({"no.such.weight": torch.zeros(2)})) as syncer:
            with suppress(sr.RolloutError):
                await syncer.sync()
                self.wrong.append("weights that no engine has were taken")
        self._say("wrong weights were refused")


async def chaos(model: Path, options: argparse.Namespace) -> list[str]:
    """The whole of it; what was wrong, in words."""
    open_torchs_pipe()
    before = Resources()
    with real_servers(model, model / "server", *[[]] * options.servers) as servers:
        async with AsyncExitStack() as stack:
            relays = [await stack.enter_async_context(Relay(server.port)) for server in servers]
            wrong = await broken(model, options, servers, relays)
    return wrong + [f"after the pool has ended, {more}" for more in await settled(before, 400, SETTLED_S)]


async def broken(model: Path, options: argparse.Namespace, servers: list[RealServer], relays: list[Relay]) -> list[str]:
    """A pool, clients and faults; what was wrong of these."""
    seed, snapshot = options.seed, options.snapshot
    weights = load_file(model / "model.safetensors")
    async with sr.AsyncRolloutEngine(
        model,
        num_engines=options.engines,
        remote=[sr.RemoteEngine(f"http://127.0.0.1:{relay.port}", dead_after_s=DEAD_AFTER_S) for relay in relays],
        device="cpu",
        dtype="float32",
        max_failovers=100,
        max_restarts=1000,
        restart_delay_s=0.2,
        stall_timeout_s=5.0,
        keep_weights_snapshot=snapshot,
        log_level="warning",
        progress=False,
    ) as rollout:
        load, faults = Load(rollout, seed), Chaos(rollout, weights, seed, servers, relays)
        await load.learn()
        during = Resources()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run, options.clients)
            await faults.run(60 * options.minutes, options.every_s)
            load.stop()
        await load.check()
        if load.num_begun != load.num_ended:
            load.wrong.append(f"{load.num_begun} calls were begun, and {load.num_ended} ended")
        if rollout.num_queued or any(engine.num_inflight for engine in rollout.engines):
            load.wrong.append("slots are taken, and nobody has them")
        load.wrong += [f"while the pool runs, {more}" for more in await settled(during, 200, SETTLED_S)]
        load.wrong += faults.wrong
        if snapshot and (failed := [end for end in load.ends if "Error" in end]):
            load.wrong.append(f"a snapshot of the weights was kept, and there were {failed}")
        for end, count in sorted(load.ends.items()):
            print(f"{count:8}  {end}")  # noqa: T201
        print(f"{faults.num_faults} faults, {load.num_ended} calls, {load.num_tokens} tokens compared")  # noqa: T201
    return load.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=6.0, help="seconds between faults, on average")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--servers", type=int, default=0, help="of SGLang, in the same pool")
    parser.add_argument("--snapshot", action="store_true", help="keep a snapshot of the weights: then no call fails")
    options = parser.parse_args()

    return run_alone(lambda model: chaos(model, options))


if __name__ == "__main__":
    sys.exit(main())
