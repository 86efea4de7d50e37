"""An engine without SGLang: it says what a script says, as fast as it is told to, and breaks on demand.

For tests of a rollout loop, the user's or ours, where no model is needed:

    engines = [ScriptedEngine("engine-0", max_running=8), ScriptedEngine("engine-1", die_after=100)]
    config = RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True})
    async with AsyncRolloutEngine(config=config, engines=engines) as rollout:
        ...

May import engine, wire and errors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import anyio

from sglrollout.engine.protocol import Request
from sglrollout.errors import EngineDiedError, EngineError, EngineRequestError, EngineStartError, LifecycleError
from sglrollout.wire.messages import EngineInfo, Finish, Load, Output

_HASHED_VOCABULARY = 256
_DEFAULT_NEW_TOKENS = 128

Script: TypeAlias = Callable[[Sequence[int], Mapping[str, Any], int], tuple[Sequence[int], Sequence[float]]]
"""``(prompt_ids, sampling, index) -> (token_ids, logprobs)``: what the engine will answer.

``sampling`` holds the options of :class:`sglrollout.Sampling` that differ from their defaults, and always
``max_new_tokens``. ``index`` counts the times this engine was given this prompt before, so that the samples of a group
can differ. The engine itself cuts the answer at ``max_new_tokens`` and after one of ``stop_token_ids``.
"""


def hashed_tokens(
    prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int
) -> tuple[Sequence[int], Sequence[float]]:
    """The default script: an answer that looks random, and is the same in every run on every machine.

    It follows from the prompt and the seed, or from the prompt and ``index`` where no seed is given, or from the prompt
    alone at temperature 0. It has at most ``max_new_tokens`` tokens, and just as many with ``ignore_eos``; their ids
    are below 256.
    """
    draw = 0 if sampling.get("temperature") == 0 else sampling.get("seed", index)
    rng = random.Random(f"{list(prompt_ids)} {draw}")
    most = sampling.get("max_new_tokens", _DEFAULT_NEW_TOKENS)
    least = most if sampling.get("ignore_eos") else max(1, sampling.get("min_new_tokens", 0))
    num_tokens = rng.randint(least, most)
    return [rng.randrange(_HASHED_VOCABULARY) for _ in range(num_tokens)], [-rng.random() for _ in range(num_tokens)]


class _Answer:
    """A request in the engine, all it will be told, and how far that has got."""

    __slots__ = ("finish", "logprobs", "num_made", "num_sent", "ready_s", "request", "token_ids")

    def __init__(self, request: Request, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        most = request.sampling.get("max_new_tokens", _DEFAULT_NEW_TOKENS)
        stops = request.sampling.get("stop_token_ids", ())
        stop_at = next((i for i, token in enumerate(token_ids[:most]) if token in stops), None)
        end = most if stop_at is None else stop_at + 1
        self.request, self.token_ids, self.logprobs = request, list(token_ids[:end]), list(logprobs[:end])
        reason = "length" if stop_at is None and len(self.token_ids) == most else "stop"
        match = None if stop_at is None else token_ids[stop_at]
        self.finish = Finish(reason, stop_match=match, prompt_tokens=len(request.prompt_ids))
        self.num_made = self.num_sent = 0
        self.ready_s = 0.0


class ScriptedEngine:
    """An engine for tests. It obeys :class:`sglrollout.engine.protocol.Engine`; all of it runs on the event loop.

    It works in steps, as a real engine does: a step lets waiting requests in, as far as there is room, then gives every
    running request a token. Requests get their tokens in parts of their ``chunk_tokens``, and all are handed over when
    the engine's weight version changes.

    The options below are also attributes, which a test may change at any time, on the event loop's thread.

    Args:
        name: as errors and results give it.
        script: what to answer; see :data:`Script`.
        max_running: requests in a step; more wait in the engine.
        start_s: seconds that :meth:`start` takes.
        first_token_s: seconds from a request's first step to its first token.
        token_s: seconds between steps. 0 is a step in every turn of the event loop.
        context_length: tokens of a prompt and its completion.
        vocab_size: prompts with ids from here on are refused before they get here.
        deterministic: claim to honour ``Sampling.seed``, which is refused otherwise.
        weight_version: of the tokens from now on.
        kv_usage: the share of the KV cache that load reports give.
        memory_saver: whether it can sleep.
        fail_start: the message of the ``EngineStartError`` that ends :meth:`start`, after ``start_s``.
        fail_request: gives a reason to fail a request, or ``None``.
        fail_command: gives a reason to fail a command, by its name, or ``None``.
        die_after: tokens, over all requests, after which the engine dies.
        hang: make no tokens while this is true.

    Attributes:
        submitted: every request that came, in order.
        aborted: those that were aborted before they ended, in order.
        commands: names of the commands that came, in order.
        peak_running: the most requests that ran at once.
        num_tokens: tokens made so far.
    """

    def __init__(
        self,
        name: str = "engine-0",
        script: Script = hashed_tokens,
        *,
        max_running: int = 256,
        start_s: float = 0.0,
        first_token_s: float = 0.0,
        token_s: float = 0.0,
        context_length: int = 32768,
        vocab_size: int = 32000,
        deterministic: bool = False,
        weight_version: int = 0,
        kv_usage: float = 0.0,
        memory_saver: bool = False,
        fail_start: str | None = None,
        fail_request: Callable[[Request], str | None] | None = None,
        fail_command: Callable[[str], str | None] | None = None,
        die_after: int | None = None,
        hang: bool = False,
    ) -> None:
        self.name, self.script, self.max_running = name, script, max_running
        self.start_s, self.first_token_s, self.token_s = start_s, first_token_s, token_s
        self.context_length, self.vocab_size, self.deterministic = context_length, vocab_size, deterministic
        self.kv_usage, self.fail_start, self.fail_request = kv_usage, fail_start, fail_request
        self.die_after, self.memory_saver, self.fail_command = die_after, memory_saver, fail_command
        self.devices: Sequence[str] = ()
        self.info: EngineInfo | None = None
        self.load: Load | None = None
        self.on_load: Callable[[Load], None] | None = None
        self.on_death: Callable[[Exception], None] | None = None
        self.submitted: list[Request] = []
        self.aborted: list[Request] = []
        self.commands: list[str] = []
        self.peak_running = self.num_tokens = 0
        self._weight_version, self._hang, self._paused = weight_version, hang, False
        self._waiting: dict[Request, _Answer] = {}
        self._running: dict[Request, _Answer] = {}
        self._times_asked: dict[tuple[int, ...], int] = {}
        self._stage = "not started"
        self._death: EngineDiedError | None = None
        self._work = anyio.Event()

    # ------------------------------------------------------------ life

    @property
    def alive(self) -> bool:
        return self._stage == "ready"

    @property
    def stage(self) -> str:
        return self._stage

    async def start(self) -> EngineInfo:
        """Come up after ``start_s``.

        Raises:
            EngineStartError: ``fail_start`` is set, or it was started, ended or closed before.
        """
        if self._stage != "not started":
            raise EngineStartError(self.name, f"it cannot start: it is {self._stage}")
        self._stage = "starting"
        await anyio.sleep(self.start_s)
        if self.fail_start is not None:
            self._stage = "dead"
            raise EngineStartError(self.name, self.fail_start)
        if self._stage != "starting":
            raise EngineStartError(self.name, f"it ended while it was starting: {self._death or self._stage}")
        self._stage = "ready"
        self.info = self._describe()
        return self.info

    def _describe(self) -> EngineInfo:
        return EngineInfo(
            sglang_version="scripted",
            pid=0,
            child_pids=[],
            context_length=self.context_length,
            max_prompt_tokens=self.context_length - 1,
            vocab_size=self.vocab_size,
            max_running_requests=self.max_running,
            max_total_tokens=self.context_length,
            eos_token_ids=[],
            fast_outputs=True,
            deterministic=self.deterministic,
            has_tokenizer=False,
            memory_saver=self.memory_saver,
            keeps_weights=False,
            tp_size=1,
            weight_version=self._weight_version,
            start_s=self.start_s,
            lora=False,
        )

    async def run(self) -> None:
        """Step until closed or dead."""
        while self.alive:
            self._report()
            if self._hang or self._paused or not (self._running or self._waiting):
                self._work = anyio.Event()
                await self._work.wait()
            else:
                await anyio.sleep(self.token_s)
                self._step()

    def die(self, reason: str = "it was told to die") -> None:
        """End as a crash does: fail what it holds, then tell the pool. Does nothing once it has ended."""
        if self._stage in ("dead", "closed"):
            return
        started, self._stage = self.alive, "dead"
        self._death = EngineDiedError(self.name, reason)
        for request in self._empty():
            request.end(Finish("error", message=reason), self._death)
        if started and self.on_death is not None:
            self.on_death(self._death)

    async def close(self) -> None:
        """End; what it holds ends with a ``LifecycleError``."""
        if self._stage != "dead":
            self._stage = "closed"
        message = "the rollout was closed"
        for request in self._empty():
            request.end(Finish("abort", message=message), LifecycleError(message))

    def _empty(self) -> list[Request]:
        held = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._work.set()
        return held

    # ------------------------------------------------------------ work

    async def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            EngineDiedError: the engine is dead.
            EngineError: it is not started, or closed.
        """
        if self._death is not None:
            raise self._death
        if not self.alive:
            raise EngineError(self.name, f"the engine is not running, it is {self._stage}")
        prompt = tuple(request.prompt_ids)
        index = self._times_asked.get(prompt, 0)
        self._times_asked[prompt] = index + 1
        request.request_id = len(self.submitted)
        self.submitted.append(request)
        self._waiting[request] = _Answer(request, *self.script(prompt, request.sampling, index))
        self._work.set()

    def abort(self, request: Request) -> None:
        """Drop a request. Its end is the caller's to set."""
        running, waiting = self._running.pop(request, None), self._waiting.pop(request, None)
        if running or waiting:
            self.aborted.append(request)
            self._work.set()

    def drop(self, error: Exception) -> None:
        """Abort all that it holds; each ends with ``error``."""
        held = [*self._running, *self._waiting]
        for request in held:
            self.abort(request)
            request.end(Finish("error", message=str(error)), error)

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Run a command as a host would. Weights that a sync brings go nowhere, by the portable path.

        Raises:
            EngineRequestError: ``fail_command`` says so, or it cannot run it as things are.
            EngineDiedError: the engine is dead.
        """
        if self._death is not None:
            raise self._death
        self.commands.append(name)
        reason = self.fail_command(name) if self.fail_command is not None else None
        if reason is not None:
            raise EngineRequestError(self.name, f"{name} failed: {reason}")
        if name not in _COMMANDS:
            raise EngineRequestError(self.name, f"{name} failed: a scripted engine has no such command")
        return _COMMANDS[name](self, **arguments)

    def _flush_cache(self) -> dict[str, Any]:
        if not self._paused and (self._running or self._waiting):
            raise EngineRequestError(self.name, "flush_cache failed: requests are running")
        return {}

    def _pause(self, mode: str) -> dict[str, Any]:
        self._paused = True
        for request in [*self._running, *self._waiting] if mode == "abort" else []:
            if answer := self._running.get(request):
                self._send(answer)
            self.abort(request)
            request.end(Finish("abort", message="aborted by a weight sync"))
        return {"attached": False}

    def _resume(self, version: int, flush: bool) -> dict[str, Any]:
        self.weight_version, self._paused = version, False
        self._work.set()
        return {"ranks": [{"flush_s": 0.0, "resume_s": 0.0}]}

    def _describe_weights(self, weights: list[Any], allow_missing: list[str]) -> dict[str, Any]:
        report = {
            **{"tp_rank": 0, "dtypes": [weight[2] for weight in weights], "copies": [[] for _ in weights]},
            **{
                "unexpected": [],
                "missing": [],
                "unwritten": [],
                "duplicates": [],
                "mismatched": [],
            },
            "unsuited": "a scripted engine has no parameters",
        }
        return {"reports": [report]}

    def _memory(self) -> dict[str, Any]:
        return {"ranks": [{"free": 1 << 40, "total": 1 << 40, "reserved": 0}]}

    def _nothing(self, **arguments: Any) -> dict[str, Any]:
        return {}

    @property
    def num_running(self) -> int:
        """Requests that get a token in every step."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine for one of those to end."""
        return len(self._waiting)

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        for answer in list(self._running.values()):
            self._send(answer)
        self._weight_version = version
        if self.info is not None:
            self.info = self._describe()

    @property
    def hang(self) -> bool:
        return self._hang

    @hang.setter
    def hang(self, hang: bool) -> None:
        self._hang = hang
        self._work.set()

    def _step(self) -> None:
        now = time.monotonic()
        self._admit(now)
        for request, answer in list(self._running.items()):
            if request in self._running and answer.ready_s <= now:  # one that ends may end others
                self._advance(answer)

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self.max_running:
            request = next(iter(self._waiting))
            answer = self._waiting.pop(request)
            reason = self.fail_request(request) if self.fail_request is not None else None
            if reason is not None:
                request.end(Finish("error", message=reason), EngineRequestError(self.name, reason))
                continue
            answer.ready_s = now + self.first_token_s
            self._running[request] = answer
        self.peak_running = max(self.peak_running, len(self._running))

    def _advance(self, answer: _Answer) -> None:
        if answer.num_made < len(answer.token_ids):
            answer.num_made += 1
            self.num_tokens += 1
        ended = answer.num_made == len(answer.token_ids)
        if ended:
            del self._running[answer.request]
        if ended or answer.num_made - answer.num_sent >= max(1, answer.request.chunk_tokens):
            self._send(answer, answer.finish if ended else None)
        if self.die_after is not None and self.num_tokens >= self.die_after:
            self.die(f"it was told to die after {self.die_after} tokens")

    def _send(self, answer: _Answer, finish: Finish | None = None) -> None:
        part = slice(answer.num_sent, answer.num_made)
        answer.num_sent = answer.num_made
        logprobs = answer.logprobs[part] if answer.request.sampling.get("logprobs", True) else None
        output = Output(answer.request.request_id, answer.token_ids[part], logprobs, finish)
        answer.request.deliver(output, self._weight_version)

    def _current_load(self) -> Load:
        running, waiting = len(self._running), len(self._waiting)
        return Load(running + waiting, running, waiting, self.kv_usage, 0.0, 0.0)

    def _report(self) -> None:
        load = self._current_load()
        if load != self.load:
            self.load = load
            if self.on_load is not None:
                self.on_load(load)


_COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "flush_cache": ScriptedEngine._flush_cache,
    "pause": ScriptedEngine._pause,
    "resume": ScriptedEngine._resume,
    "describe_weights": ScriptedEngine._describe_weights,
    "detach_weights": ScriptedEngine._nothing,
    "begin_portable": ScriptedEngine._nothing,
    "load_portable": ScriptedEngine._nothing,
    "end_portable": ScriptedEngine._nothing,
    "sleep": ScriptedEngine._nothing,
    "wake": ScriptedEngine._nothing,
    "memory": ScriptedEngine._memory,
}
