"""An engine that only keeps time: for simulations of many engines and very many samples.

On a virtual clock, hours of a cluster take seconds:

    async def collect() -> list[Group]:
        engines = [SimulatedEngine(f"engine-{i}", token_s=0.02) for i in range(64)]
        async with AsyncRolloutEngine(config=config, engines=engines) as rollout:
            return await rollout.generate(prompts, n=8)

    groups = run_virtually(collect)

May import engine and wire.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, ClassVar, TypeAlias, Unpack

import anyio

from sglrollout.engine.protocol import Request
from sglrollout.testing._engine import DEFAULT_NEW_TOKENS, EngineOptions, FakeEngine
from sglrollout.wire.messages import Finish, Output

_TOKEN, _LOGPROB = 1, -1.0
_REPORT_EVERY_S = 0.25
_ROUNDING = 1e-6
_NORMAL = NormalDist()

NumTokens: TypeAlias = Callable[[Sequence[int], Mapping[str, Any], int], int]
"""``(prompt_ids, sampling, index) -> num_tokens``: how long a completion will be; for the arguments see ``Script``.

The engine itself cuts it at ``max_new_tokens``, and makes at least one token.
"""


class _Run:
    """A request in the engine, and when its tokens come, on the engine's own clock."""

    __slots__ = ("finish", "num_sent", "num_tokens", "ready_s", "request", "stop", "token_s")

    def __init__(self, request: Request, num_tokens: int) -> None:
        most: int = request.sampling.get("max_new_tokens", DEFAULT_NEW_TOKENS)
        self.request, self.num_tokens = request, min(most, max(1, num_tokens))
        reason = "length" if self.num_tokens == most else "stop"
        self.finish = Finish(reason, prompt_tokens=len(request.prompt_ids))
        self.num_sent = self.stop = 0
        self.ready_s = self.token_s = 0.0

    def num_made(self, now: float) -> int:
        since_s = now - self.ready_s
        if self.token_s == 0:
            return self.num_tokens if since_s >= 0 else 0
        return max(0, min(self.num_tokens, 1 + math.floor(since_s / self.token_s + _ROUNDING)))


class SimulatedEngine(FakeEngine[_Run]):
    """An engine for simulations. It obeys :class:`sglrollout.engine.protocol.Engine`; all of it runs on the event loop.

    It takes no steps: when a request comes to run, its end is known, and nothing happens until then. Its tokens are
    all alike, and so are their logprobs. What was sampled of a request so far, by the time that has passed, is handed
    over when it is aborted, and when the engine's weight version changes. While the engine is paused, or hangs, no time
    passes for what it holds. It reports its load when that changes, but not twice in a quarter of a second, and when it
    has become idle.

    The options below are also attributes, which may change at any time, on the event loop's thread; those of time count
    for requests that come to run later.

    Args:
        name: as errors and results give it.
        num_tokens: how long completions are; see :data:`NumTokens`. By default their lengths are lognormal, with
            ``mean_tokens`` and ``sigma``, and follow from ``seed``, the prompt and ``index`` alone; ``min_new_tokens``
            and ``ignore_eos`` are kept.
        mean_tokens: before they are cut at ``max_new_tokens``.
        sigma: the standard deviation of the logarithm of the length; 0 makes all alike.
        seed: of the lengths.
        times_asked: how often each prompt came, which is where ``index`` is from. Give the same one to several engines,
            and the lengths of a prompt's samples do not depend on which engine each of them comes to.
        token_s: seconds from token to token; or that by the number of requests that run when one comes to run, itself
            included.
        first_token_s: seconds from when a request comes to run to its first token.
        chunks: hand tokens over in parts of a request's ``chunk_tokens``, as a stream shows them; otherwise they come
            at the end.
        **options: ``max_running`` (requests that run at once; more wait in the engine, first come first served),
            ``start_s``, ``context_length``, ``vocab_size``, ``deterministic``, ``weight_version``, ``kv_usage``,
            ``memory_saver``, ``fail_start``, ``fail_restart``, ``fail_request``, ``fail_command`` and ``hang``, as
            those of :class:`ScriptedEngine`.

    Attributes:
        num_submitted: requests that came.
        peak_running: the most requests that ran at once.
        commands: names of the commands that came, in order.
    """

    kind: ClassVar[str] = "simulated"

    def __init__(
        self,
        name: str = "engine-0",
        num_tokens: NumTokens | None = None,
        *,
        mean_tokens: float = 256.0,
        sigma: float = 0.6,
        seed: int = 0,
        times_asked: dict[tuple[int, ...], int] | None = None,
        token_s: float | Callable[[int], float] = 0.02,
        first_token_s: float = 0.0,
        chunks: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(name, **options)
        self.num_tokens = num_tokens or self._lognormal
        self.mean_tokens, self.sigma, self.seed = mean_tokens, sigma, seed
        self.token_s, self.first_token_s, self.chunks = token_s, first_token_s, chunks
        if times_asked is not None:
            self._times_asked = times_asked
        self._stopped_s: float | None = None
        self._lost_s = 0.0
        self._due: list[tuple[float, int, _Run]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s: float | None = None
        self._reported_s = -math.inf
        self._over = anyio.Event()

    def _begin_life(self) -> None:
        super()._begin_life()
        self._over = anyio.Event()

    async def run(self) -> None:
        """Wait until closed or dead; timers do the work."""
        self._changed()
        await self._over.wait()

    # ------------------------------------------------------------ requests

    def _lognormal(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int) -> int:
        if sampling.get("ignore_eos"):
            return int(sampling.get("max_new_tokens", DEFAULT_NEW_TOKENS))
        digest = blake2b(array("q", (self.seed, index, *prompt_ids)).tobytes(), digest_size=8).digest()
        uniform = ((int.from_bytes(digest, "little") >> 12) + 0.5) / 2**52
        length = self.mean_tokens * math.exp(self.sigma * _NORMAL.inv_cdf(uniform) - self.sigma**2 / 2)
        return max(int(sampling.get("min_new_tokens", 0)), round(length))

    def _plan(self, request: Request, prompt: tuple[int, ...], index: int) -> _Run:
        return _Run(request, self.num_tokens(prompt, request.sampling, index))

    def _begin(self, held: _Run, now: float) -> None:
        held.token_s = self.token_s(len(self._running)) if callable(self.token_s) else self.token_s
        held.ready_s = now + self.first_token_s
        self._schedule(held)

    def _schedule(self, run: _Run) -> None:
        """Note when something is to be delivered of it next: its next part, or all of it."""
        chunk = run.request.chunk_tokens if self.chunks else 0
        run.stop = min(run.num_tokens, run.num_sent + chunk) if chunk else run.num_tokens
        heapq.heappush(self._due, (run.ready_s + (run.stop - 1) * run.token_s, next(self._order), run))

    def _advance(self, run: _Run) -> None:
        if run.stop == run.num_tokens:
            del self._running[run.request]
            self._deliver(run, run.num_tokens, run.finish)
        else:
            self._deliver(run, max(run.stop, run.num_sent))
            self._schedule(run)

    @property
    def progress(self) -> int:
        """Its own milliseconds: they go on unless it is halted."""
        return int(1000 * self._clock())

    def _hand_over(self, held: _Run) -> None:
        self._deliver(held, held.num_made(self._clock()))

    def _deliver(self, run: _Run, num_made: int, finish: Finish | None = None) -> None:
        count, run.num_sent = num_made - run.num_sent, num_made
        if count or finish is not None:
            self.num_outputs += 1
            logprobs = None if run.request.logprobs is None else [_LOGPROB] * count
            run.request.deliver(Output(run.request.request_id, [_TOKEN] * count, logprobs, finish), self.weight_version)

    # ------------------------------------------------------------ time

    def _clock(self) -> float:
        """The engine's own clock, in seconds; it stands still while the engine is halted."""
        return (time.monotonic() if self._stopped_s is None else self._stopped_s) - self._lost_s

    def _keep_clock(self) -> None:
        if self._halted and self._stopped_s is None:
            self._stopped_s = time.monotonic()
        elif not self._halted and self._stopped_s is not None:
            self._lost_s += time.monotonic() - self._stopped_s
            self._stopped_s = None

    def _changed(self) -> None:
        self._keep_clock()
        if self.alive and not self._halted:
            self._admit(self._clock())
        self._set_timer()
        now = time.monotonic()
        if self.alive and (now - self._reported_s >= _REPORT_EVERY_S or not (self._running or self._waiting)):
            self._reported_s = now
            self._report()
        if self._stage in ("dead", "closed"):
            self._over.set()

    def _set_timer(self) -> None:
        """One timer for whatever is due first."""
        while self._due and self._running.get(self._due[0][2].request) is not self._due[0][2]:
            heapq.heappop(self._due)  # it has been aborted
        due_s = self._due[0][0] if self._due and not self._halted else None
        if due_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, due_s
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        # A timer may be early by a rounding error; what it was set for is due nevertheless.
        now = self._clock() if self._timer_s is None else max(self._clock(), self._timer_s)
        self._timer = self._timer_s = None
        while self._due and self._due[0][0] <= now:
            run = heapq.heappop(self._due)[2]
            if self._running.get(run.request) is run:  # one that ends may end others
                self._advance(run)
        self._changed()
