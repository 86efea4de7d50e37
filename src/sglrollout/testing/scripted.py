"""An engine without SGLang: it says what a script says, as fast as it is told to, and breaks on demand.

For tests of a rollout loop, the user's or ours, where no model is needed:

    engines = [ScriptedEngine("engine-0", max_running=8), ScriptedEngine("engine-1", die_after=100)]
    config = RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True})
    async with AsyncRolloutEngine(config=config, engines=engines) as rollout:
        ...

May import engine and wire.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, Unpack

import anyio

from sglrollout.engine.protocol import Request
from sglrollout.testing._engine import DEFAULT_NEW_TOKENS, EngineOptions, FakeEngine
from sglrollout.wire.messages import Finish, Output

_HASHED_VOCABULARY = 256

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
    most = sampling.get("max_new_tokens", DEFAULT_NEW_TOKENS)
    least = most if sampling.get("ignore_eos") else max(1, sampling.get("min_new_tokens", 0))
    num_tokens = rng.randint(least, most)
    return [rng.randrange(_HASHED_VOCABULARY) for _ in range(num_tokens)], [-rng.random() for _ in range(num_tokens)]


class _Answer:
    """A request in the engine, all it will be told, and how far that has got."""

    __slots__ = ("finish", "logprobs", "num_made", "num_sent", "ready_s", "request", "token_ids")

    def __init__(self, request: Request, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        most = request.sampling.get("max_new_tokens", DEFAULT_NEW_TOKENS)
        stops = request.sampling.get("stop_token_ids", ())
        stop_at = next((i for i, token in enumerate(token_ids[:most]) if token in stops), None)
        end = most if stop_at is None else stop_at + 1
        self.request, self.token_ids, self.logprobs = request, list(token_ids[:end]), list(logprobs[:end])
        reason = "length" if stop_at is None and len(self.token_ids) == most else "stop"
        match = None if stop_at is None else token_ids[stop_at]
        self.finish = Finish(reason, stop_match=match, prompt_tokens=len(request.prompt_ids))
        self.num_made = self.num_sent = 0
        self.ready_s = 0.0


class ScriptedEngine(FakeEngine[_Answer]):
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
        fail_restart: gives a reason to fail a start after a death, by its number (1 is the first), or ``None``.
        fail_request: gives a reason to fail a request, or ``None``.
        fail_command: gives a reason to fail a command, by its name, or ``None``.
        die_after: tokens, over all requests, after which the engine dies, once.
        hang: make no tokens while this is true.

    Attributes:
        submitted: every request that came, in order.
        aborted: those that were aborted before they ended, in order.
        commands: names of the commands that came, in order.
        weights: the version whose weights it holds, while ``weight_version`` is what it calls them.
        num_starts: how often it was started.
        peak_running: the most requests that ran at once.
        num_tokens: tokens made so far.
    """

    kind: ClassVar[str] = "scripted"

    def __init__(
        self,
        name: str = "engine-0",
        script: Script = hashed_tokens,
        *,
        first_token_s: float = 0.0,
        token_s: float = 0.0,
        die_after: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(name, **options)
        self.script, self.first_token_s, self.token_s, self.die_after = script, first_token_s, token_s, die_after
        self.submitted: list[Request] = []
        self.aborted: list[Request] = []
        self.num_tokens = 0
        self._work = anyio.Event()

    async def run(self) -> None:
        """Step until closed or dead."""
        while self.alive:
            self._report()
            if self._halted or not (self._running or self._waiting):
                self._work = anyio.Event()
                await self._work.wait()
            else:
                await anyio.sleep(self.token_s)
                self._step()

    async def submit(self, request: Request) -> None:
        await super().submit(request)
        self.submitted.append(request)

    def abort(self, request: Request) -> None:
        if request in self._running or request in self._waiting:
            self.aborted.append(request)
        super().abort(request)

    def _plan(self, request: Request, prompt: tuple[int, ...], index: int) -> _Answer:
        return _Answer(request, *self.script(prompt, request.sampling, index))

    def _begin(self, held: _Answer, now: float) -> None:
        held.ready_s = now + self.first_token_s

    def _hand_over(self, held: _Answer, finish: Finish | None = None) -> None:
        part = slice(held.num_sent, held.num_made)
        held.num_sent = held.num_made
        logprobs = held.logprobs[part] if held.request.sampling.get("logprobs", True) else None
        output = Output(held.request.request_id, held.token_ids[part], logprobs, finish)
        self.num_outputs += 1
        held.request.deliver(output, self._weight_version)

    def _changed(self) -> None:
        self._work.set()

    def _step(self) -> None:
        now = time.monotonic()
        self._admit(now)
        for request, answer in list(self._running.items()):
            if request in self._running and answer.ready_s <= now:  # one that ends may end others
                self._advance(answer)

    def _advance(self, answer: _Answer) -> None:
        if answer.num_made < len(answer.token_ids):
            answer.num_made += 1
            self.num_tokens += 1
        ended = answer.num_made == len(answer.token_ids)
        if ended:
            del self._running[answer.request]
        if ended or answer.num_made - answer.num_sent >= max(1, answer.request.chunk_tokens):
            self._hand_over(answer, answer.finish if ended else None)
        if self.die_after is not None and self.num_tokens >= self.die_after:
            most, self.die_after = self.die_after, None
            self.die(f"it was told to die after {most} tokens")
