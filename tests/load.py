"""Mixed load on a rollout, for the chaos and soak runs: every answer is compared with that of a quiet pool."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import psutil
import torch.distributed as dist

import sglrollout as sr
from sglrollout import testing
from sglrollout.types import Completion
from tests.leftovers import mapped_shared_memory

PROMPTS = [f"Prompt {i}: {'all work and no play ' * (i % 7)}" for i in range(24)]
SAMPLING = sr.Sampling(temperature=0, max_new_tokens=48)
ENDLESS = sr.Sampling(temperature=0, max_new_tokens=1500, ignore_eos=True)
NUM_TURNS = 3


class Load:
    """Clients that call a rollout in every way there is, until they are told to stop.

    The model is greedy and its weights stay what they are, so that whatever comes whole must be what a quiet pool gave.

    Attributes:
        num_begun, num_ended: calls. They are the same once the clients have stopped, or a call was lost.
        ends: of calls, by what came of them.
        wrong: what was not as it must be, in words.
    """

    def __init__(self, rollout: sr.AsyncRolloutEngine, seed: int) -> None:
        self._rollout, self._seed = rollout, seed
        self._tokens: list[tuple[int, ...]] = []
        self._sessions: dict[int, tuple[int, ...]] = {}
        self._stopping = False
        self.num_begun = self.num_ended = self.num_tokens = 0
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def learn(self) -> None:
        """What a quiet pool answers."""
        groups = await self._rollout.generate(PROMPTS, sampling=SAMPLING)
        self._tokens = [group.completions[0].token_ids for group in groups]
        for i in range(0, len(PROMPTS), 6):
            self._sessions[i] = await self._conversation(i)

    async def check(self) -> None:
        """It answers now what it did then."""
        for i, group in enumerate(await self._rollout.generate(PROMPTS, sampling=SAMPLING)):
            self._compare("at the end", i, group.completions[0])

    async def run(self, num_clients: int) -> None:
        """All clients, until :meth:`stop`."""
        async with anyio.create_task_group() as tasks:
            for number in range(num_clients):
                tasks.start_soon(self._client, number)

    def stop(self) -> None:
        """Let each client end the call it is at."""
        self._stopping = True

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        calls: Sequence[Callable[[random.Random], Awaitable[None]]] = (
            *(self._generate, self._stream, self._session),
            *(self._cancel, self._leave_a_stream, self._run_into_a_deadline),
        )
        while not self._stopping:
            call = rng.choice(calls)
            self.num_begun += 1
            try:
                with anyio.fail_after(240):
                    await call(rng)
                self.ends[f"{call.__name__.strip('_')}: ended"] += 1
            except sr.RolloutError as error:
                self.ends[f"{call.__name__.strip('_')}: {type(error).__name__}"] += 1
                await anyio.sleep(0.1)
            except TimeoutError:
                self.wrong.append(f"{call.__name__} never ended")
            self.num_ended += 1

    # ------------------------------------------------------------ calls

    async def _generate(self, rng: random.Random) -> None:
        chosen = rng.sample(range(len(PROMPTS)), 3)
        groups = await self._rollout.generate([PROMPTS[i] for i in chosen], n=2, sampling=SAMPLING, on_error="return")
        for i, group in zip(chosen, groups, strict=True):
            if len(group.completions) != 2:
                self.wrong.append(f"a group of 2 has {len(group.completions)} samples")
            for completion in group.completions:
                self._compare("generate", i, completion)

    async def _stream(self, rng: random.Random) -> None:
        i = rng.randrange(len(PROMPTS))
        stream = self._rollout.stream(PROMPTS[i], SAMPLING, chunk_tokens=rng.choice((1, 5)))
        tokens = [token async for chunk in stream for token in chunk.token_ids]
        if tuple(tokens) != stream.completion.token_ids:
            self.wrong.append(f"a stream gave {tokens}, and is {stream.completion.token_ids}")
        self._compare("stream", i, stream.completion)

    async def _session(self, rng: random.Random) -> None:
        i = rng.choice([*self._sessions])
        tokens = await self._conversation(i)
        if tokens != self._sessions[i]:
            self.wrong.append(f"session {i}: {tokens} in place of {self._sessions[i]}")

    async def _conversation(self, i: int) -> tuple[int, ...]:
        async with self._rollout.session(sampling=SAMPLING.replace(max_new_tokens=12)) as session:
            for turn in range(NUM_TURNS):
                session.add(f"{PROMPTS[i]} {turn}")
                await session.generate()
            return session.token_ids

    async def _cancel(self, rng: random.Random) -> None:
        with anyio.move_on_after(rng.uniform(0, 0.5)):
            await self._rollout.generate(PROMPTS[:4], n=2, sampling=ENDLESS, on_error="return")

    async def _leave_a_stream(self, rng: random.Random) -> None:
        num_chunks = rng.randrange(1, 6)
        async with self._rollout.stream(PROMPTS[0], ENDLESS, chunk_tokens=2) as stream:
            async for _ in stream:
                num_chunks -= 1
                if not num_chunks:
                    break

    async def _run_into_a_deadline(self, rng: random.Random) -> None:
        try:
            (group,) = await self._rollout.generate([PROMPTS[0]], sampling=ENDLESS, timeout_s=rng.uniform(0.05, 0.5))
        except sr.RequestTimeoutError:
            return
        if group.completions[0].finish_reason != "abort":  # by a sync
            self.wrong.append("a call outlived its deadline")

    def _compare(self, what: str, i: int, completion: Completion) -> None:
        self.num_tokens += len(completion.token_ids)
        self.ends[f"sample: {type(completion.error).__name__ if completion.error else completion.finish_reason}"] += 1
        expected = self._tokens[i]
        if completion.error is not None and not isinstance(completion.error, sr.RolloutError):
            self.wrong.append(f"{what}: {completion.error!r} is no error of ours")
        if completion.finish_reason not in ("stop", "length"):
            expected = expected[: len(completion.token_ids)]
        if completion.token_ids != expected:
            self.wrong.append(f"{what}: prompt {i}: {completion.token_ids} in place of {expected}")
        if completion.logprobs is None or len(completion.logprobs) != len(completion.token_ids):
            self.wrong.append(f"{what}: prompt {i}: tokens without their logprobs")
        if [span.end for span in completion.weight_versions][-1:] != [len(completion.token_ids)][: len(expected)]:
            self.wrong.append(f"{what}: prompt {i}: versions {completion.weight_versions} do not cover its tokens")


_shared_files: set[str] = set()
"""Of all children so far."""


class Resources:
    """What this process and its children hold now."""

    def __init__(self) -> None:
        gc.collect()
        me = psutil.Process()
        self.processes = len([child for child in me.children(recursive=True) if child.status() != "zombie"])
        self.fds = me.num_fds()
        # anyio keeps idle worker threads until their event loop ends.
        self.threads = sum(not thread.name.startswith("AnyIO worker") for thread in threading.enumerate())
        self.tasks = len(asyncio.all_tasks())
        _shared_files.update(*(mapped_shared_memory(child.pid) for child in me.children(recursive=True)))
        temporary = [*Path(tempfile.gettempdir()).glob("sglrollout-*")]
        self.files = len(temporary) + sum(Path(path).exists() for path in _shared_files)
        self.megabytes = me.memory_info().rss / 1e6

    def more_than(self, before: Resources, megabytes: float) -> list[str]:
        """What there is more of than before, in words."""
        names = ("processes", "fds", "threads", "tasks", "files")
        more = [name for name in names if getattr(self, name) > getattr(before, name)]
        found = [f"{name}: {getattr(before, name)} before, {getattr(self, name)} now" for name in more]
        if self.megabytes > before.megabytes + megabytes:
            found.append(f"memory: {before.megabytes:.0f} MB before, {self.megabytes:.0f} MB now")
        return found


def open_torchs_pipe() -> None:
    """The one that a process's first store of torch opens, and no store closes."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


async def settled(before: Resources, megabytes: float, within_s: float = 15.0) -> list[str]:
    """What there is more of than before, once whatever ends by itself has had its time."""
    deadline = anyio.current_time() + within_s
    while (more := Resources().more_than(before, megabytes)) and anyio.current_time() < deadline:
        await anyio.sleep(0.2)
    return more


def run_alone(run: Callable[[Path], Awaitable[list[str]]]) -> int:
    """Run with a tiny model in a temporary directory of its own, and print what was wrong; the exit code."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        tempfile.tempdir = folder  # so that what is left over there is of this run
        wrong = anyio.run(run, testing.tiny_model(Path(folder) / "tiny"))
    for what in wrong[:20]:
        print(f"WRONG: {what}", file=sys.stderr)  # noqa: T201
    print(f"{len(wrong)} things were wrong" if wrong else "nothing was wrong")  # noqa: T201
    return bool(wrong)
