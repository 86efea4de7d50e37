"""What the pool needs of an engine, whatever runs behind it, and the request it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sglrollout.errors import EngineRequestError
from sglrollout.types import Completion, FinishReason, VersionSpan
from sglrollout.wire.messages import EngineInfo, Finish, Load, Output


class Request:
    """One sample on its way: what was asked, and what has come so far.

    It ends exactly once, by :meth:`end`; whoever waits in :meth:`progress` is then woken a last time. It may be handed
    to another engine when one is lost: ``on_interrupt`` is asked before it ends, and ``True`` says that it goes on.
    ``prompt_ids`` and ``sampling`` are for the engine that has it, ``token_ids`` are of all that had it.
    """

    __slots__ = (
        "_version_starts",
        "_waiter",
        "chunk_tokens",
        "created_s",
        "engine",
        "error",
        "finish",
        "finished_s",
        "first_token_s",
        "last_token_s",
        "logprobs",
        "on_end",
        "on_interrupt",
        "prompt_ids",
        "queue_s",
        "request_id",
        "sampling",
        "token_ids",
    )

    def __init__(self, prompt_ids: Sequence[int], sampling: dict[str, Any], chunk_tokens: int = 0) -> None:
        self.prompt_ids, self.sampling, self.chunk_tokens = prompt_ids, sampling, chunk_tokens
        self.request_id = -1
        self.engine = ""
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = [] if sampling.get("logprobs", True) else None
        self._version_starts: list[tuple[int, int]] = []
        self.finish: Finish | None = None
        self.error: Exception | None = None
        self.on_end: Callable[[Request], None] | None = None
        self.on_interrupt: Callable[[Finish, Exception | None], bool] | None = None
        self.created_s = self.last_token_s = time.monotonic()
        self.queue_s = 0.0
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None

    @property
    def finish_reason(self) -> FinishReason:
        """Only once it has ended."""
        assert self.finish is not None
        return self.finish.reason  # type: ignore[return-value]

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Which weight version each token so far was sampled under."""
        return tuple(self.span(k) for k in range(len(self._version_starts)))

    def span(self, k: int) -> VersionSpan:
        """The ``k``-th of :attr:`spans`."""
        starts = self._version_starts
        version, start = starts[k]
        return VersionSpan(version, start, starts[k + 1][1] if k + 1 < len(starts) else len(self.token_ids))

    def span_at(self, position: int) -> VersionSpan:
        """That of :attr:`spans` in which the token at ``position`` is."""
        k = len(self._version_starts) - 1
        while self._version_starts[k][1] > position:
            k -= 1
        return self.span(k)

    @property
    def first_version(self) -> int:
        """The version of the oldest token; 0 before the first."""
        return self._version_starts[0][0] if self._version_starts else 0

    @property
    def last_version(self) -> int:
        """The version of the latest token; 0 before the first."""
        return self._version_starts[-1][0] if self._version_starts else 0

    def deliver(self, output: Output, version: int) -> None:
        """Take new tokens, sampled under ``version``, and the end if it came."""
        if self.finish is not None:
            return
        if output.token_ids:
            if self.logprobs is not None and len(output.logprobs or ()) != len(output.token_ids):
                self.end(Finish("error", message="tokens came without their logprobs"))
                return
            if not self._version_starts or self._version_starts[-1][0] != version:
                self._version_starts.append((version, len(self.token_ids)))
            self.token_ids += output.token_ids
            self.last_token_s = time.monotonic()
            if self.first_token_s is None:
                self.first_token_s = self.last_token_s
            if self.logprobs is not None:
                self.logprobs += output.logprobs or ()
        if output.finish is not None:
            self.end(output.finish)
        elif self._waiter is not None:
            self._wake()

    def correct(self, start: int, spans: Sequence[VersionSpan]) -> None:
        """Tokens from ``start`` on were sampled under other versions than was thought; ``spans`` count from there."""
        known = [(version, begin) for version, begin in self._version_starts if begin < start]
        for version, begin, _ in spans:
            if not known or known[-1][0] != version:
                known.append((version, start + begin))
        self._version_starts = known

    def end(self, finish: Finish, error: Exception | None = None) -> None:
        """End it, unless it goes on elsewhere; later calls change nothing. An end by error always has one."""
        if self.finish is not None:
            return
        if error is None and finish.reason == "error":
            error = EngineRequestError(self.engine, finish.message)
        if self.on_interrupt is not None and self.on_interrupt(finish, error):
            return
        self.finish, self.error = finish, error
        self.finished_s = time.monotonic()
        self._wake()
        if self.on_end is not None:
            self.on_end(self)

    async def progress(self) -> None:
        """Wait for tokens or the end. One waiter at a time: the loop that streams it."""
        if self.finish is None:
            # A bare future: an event would cost several times as much, once for every token streamed.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take_up(self, completion: Completion) -> None:
        """Begin with what was sampled of it before."""
        self.token_ids = [*completion.token_ids]
        self.logprobs = None if completion.logprobs is None or self.logprobs is None else [*completion.logprobs]
        self._version_starts = [(span.version, span.start) for span in completion.weight_versions]

    def forget(self) -> None:
        """Begin anew."""
        self.token_ids, self._version_starts = [], []
        self.logprobs = None if self.logprobs is None else []

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Engine(Protocol):
    """One engine as the pool sees it.

    ``on_load`` and ``on_death`` are set by the pool before :meth:`start`. After ``on_death`` was called (once in a
    life, with the reason) every request the engine held has ended with an ``error`` finish and it takes no more. Once
    :meth:`run` has returned, or :meth:`start` has failed, nothing of that life is left, and it may start again.
    """

    name: str
    url: str
    """Of the server that it is; empty for an engine that this process started."""
    devices: Sequence[str]
    """UUIDs of its GPUs, in TP rank order; empty on a CPU, and of a server."""
    info: EngineInfo | None
    load: Load | None
    on_load: Callable[[Load], None] | None
    on_death: Callable[[Exception], None] | None

    num_outputs: int
    """How often tokens have come of it, in this life."""
    num_unanswered: int
    """Commands that were not answered in time, since the last sign that it works: progress, or an answer."""

    @property
    def num_pending(self) -> int:
        """Commands that its schedulers are to answer yet, within deadlines of their own; they may take no step."""

    @property
    def progress(self) -> int:
        """Another one with every sign that it works: tokens, or a new account that its scheduler gives of its load."""

    @property
    def alive(self) -> bool:
        """Started, and not ended."""

    @property
    def stage(self) -> str:
        """What it is doing, in a few words, for a progress display."""

    async def start(self) -> EngineInfo:
        """Come up, or raise ``EngineStartError``. Cancelling it leaves nothing behind.

        After a death it is called again, and begins another life: with the weights, and the version, of the first one.
        """

    async def run(self) -> None:
        """Serve until closed, or dead with all that it started gone; the pool runs it in its task group."""

    async def kill(self, reason: str) -> None:
        """End this life of it by force, as a crash would, from any state; return once all that it started is gone."""

    async def submit(self, request: Request) -> None:
        """Hand over a request. Its tokens and its end arrive through ``request``."""

    def abort(self, request: Request) -> None:
        """Ask the engine to drop a request. Never blocks; the request's own end is the caller's to set."""

    def drop(self, error: Exception) -> None:
        """Abort every request it holds; each ends with ``error``. Never blocks."""

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Run a control method in the host, or raise ``EngineRequestError``.

        Args:
            timeout_s: how long the method itself may take; the answer is waited for a little longer.
        """

    async def close(self) -> None:
        """End it and all it started; safe to call twice, from any state."""
