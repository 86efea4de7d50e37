"""One sample's life: it holds a slot, may lose its engine and go on in another, and ends once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple, Protocol

import anyio

from sglrollout.config import Sampling
from sglrollout.engine.protocol import Request
from sglrollout.errors import (
    EngineConnectionError,
    EngineDiedError,
    LifecycleError,
    RequestTimeoutError,
    StaleWeightsError,
)
from sglrollout.pool.dispatcher import Lease
from sglrollout.pool.pool import Member
from sglrollout.types import Completion, Prompt
from sglrollout.wire.messages import Finish


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked prompt. ``room`` is how many tokens the context has left for a completion."""

    prompt: Prompt
    ids: tuple[int, ...]
    room: int


class Outlives(IntEnum):
    """What a sample lives on after, in another engine or later. Each includes those before it."""

    DEATHS = 1
    """Of engines, by death or by being given up in a failed sync, and of connections to them; so many of them."""
    SYNCS = 2
    """That abort what runs."""
    SLEEP = 3
    """And staleness: it waits until an engine takes work again."""


class _Interruption(Enum):
    """``CUT``: a sync or a sleep wanted it. ``LOSS``: its engine is gone, or nobody knows why it ended."""

    CUT = "cut"
    LOSS = "loss"


class Failover(NamedTuple):
    """See :class:`sglrollout.RolloutConfig`. ``resume``: from the tokens it has, where that is possible."""

    enabled: bool
    resume: bool
    most: int


class Observer(Protocol):
    """Is told what becomes of samples, before anybody else is. It must not fail."""

    def held(self, sample: Sample) -> None:
        """It got a slot."""

    def left(self, sample: Sample, error: Exception | None) -> None:
        """It lost its engine, and goes on in another one, or later."""

    def ended(self, sample: Sample) -> None:
        """It has ended; perhaps it never had a slot."""


class Sample:
    """A request and the slot it holds. Whatever ends it, frees the slot.

    Args:
        wire: its sampling options as an engine takes them, for the whole.
        prior: what was sampled of it before, with which it goes on.
        deadline: on ``time.monotonic``'s clock. Waiting for engines that sleep moves it.
        on_lost: called when it is to go on elsewhere.
        observer: told what becomes of it.
    """

    __slots__ = (
        "_failover",
        "_lease",
        "_left",
        "_observer",
        "_timer",
        "asked_s",
        "avoids",
        "chunk_tokens",
        "deadline",
        "handed_out",
        "handover",
        "held_s",
        "index",
        "key",
        "num_before",
        "num_lost",
        "num_resumed",
        "on_end",
        "on_lost",
        "outlives",
        "prepared",
        "request",
        "sampling",
        "search",
        "wire",
    )

    def __init__(
        self,
        prepared: Prepared,
        sampling: Sampling,
        wire: dict[str, Any],
        *,
        index: int,
        key: Hashable | None,
        chunk_tokens: int,
        deadline: float | None,
        outlives: Outlives,
        failover: Failover,
        on_lost: Callable[[Sample, Exception | None], None],
        prior: Completion | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.prepared, self.sampling, self.wire = prepared, sampling, wire
        self.index, self.key, self.deadline, self.outlives = index, key, deadline, outlives
        self.request = Request(prepared.ids, wire, chunk_tokens)
        if prior is not None:
            self.request.take_up(prior)
        self.request.on_end, self.request.on_interrupt = self._ended, self._interrupted
        self.on_end: Callable[[Sample], None] | None = None
        self.on_lost = on_lost
        self.search: anyio.CancelScope | None = None
        """Of the task that looks for another engine."""
        self.handover: anyio.CancelScope | None = None
        """Of the wait for an engine's channel to take the request."""
        self.handed_out = False
        """Whether somebody has tokens of it, so that it cannot begin anew."""
        self.num_lost = self.num_resumed = 0
        """Engines that were lost under it, and how often it went on from its tokens."""
        self.avoids: Member | None = None
        """Where it was lost though the engine lives."""
        self.asked_s = self.request.created_s
        """When it was asked for, or lost its last engine."""
        self.held_s: float | None = None
        """When it got its slot, unless it waits for one."""
        self.num_before = len(self.request.token_ids)
        """Tokens that it had by then."""
        self._observer, self._failover, self._left = observer, failover, False
        self._lease: Lease[Member] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def engine(self) -> str:
        """That it was given to last."""
        return self.request.engine

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return min(self.prepared.room, self.sampling.max_new_tokens) - len(self.request.token_ids)

    # ------------------------------------------------------------ on an engine

    def aim(self, adapter: str | None = None) -> None:
        """Make the request ask for what is still to come. An engine takes its tokens for a part of the prompt.

        Args:
            adapter: what it is sampled with, unless the caller named one.
        """
        num_tokens, room = len(self.request.token_ids), self.room
        least = max(0, min(room, self.sampling.min_new_tokens - num_tokens))
        given: dict[str, Any] = {"min_new_tokens": least} if "min_new_tokens" in self.wire else {}
        self.request.prompt_ids = self.prepared.ids + tuple(self.request.token_ids)
        given |= {"lora": adapter} if adapter is not None and self.sampling.lora is None else {}
        self.request.sampling = {**self.wire, **given, "max_new_tokens": max(1, room)}

    def hold(self, lease: Lease[Member]) -> None:
        """It has a slot; its deadline runs."""
        self._lease = lease
        self.request.engine = lease.target.name
        self.held_s, self.num_before = time.monotonic(), len(self.request.token_ids)
        if self._observer is not None:
            self._observer.held(self)
        if self.deadline is not None and self._timer is None:
            left = max(0.0, self.deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left, self._expire)

    def let_go(self) -> None:
        """Free the slot, and stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
        lease, self._lease, self._timer = self._lease, None, None
        handover, self.handover = self.handover, None
        if handover is not None:
            handover.cancel()
        if lease is not None:
            lease.release()

    # ------------------------------------------------------------ ends

    def cancel(self, message: str = "cancelled by the caller", error: Exception | None = None) -> None:
        """Abort it in its engine and free its slot, now. Does nothing once it has ended."""
        if self.request.ended:
            return
        self._left = True
        if self._lease is not None:
            self._lease.target.engine.abort(self.request)
        self.request.end(Finish("abort" if error is None else "error", message=message), error)

    async def until_ended(self) -> None:
        """Wait for its end, and not for each of its tokens."""
        if self.request.ended:
            return
        ended = asyncio.get_running_loop().create_future()
        on_end = self.on_end

        def note(sample: Sample) -> None:
            if not ended.done():
                ended.set_result(None)
            if on_end is not None:
                on_end(sample)

        self.on_end = note
        await ended

    def _expire(self) -> None:
        waited_s = time.monotonic() - self.request.created_s
        message = f"not finished by its deadline, {waited_s:.3g} s after it was asked for"
        self.cancel(message, RequestTimeoutError(message))

    def _ended(self, request: Request) -> None:
        self.let_go()
        if self._observer is not None:
            self._observer.ended(self)
        if self.search is not None:
            self.search.cancel()
        if self.on_end is not None:
            self.on_end(self)

    # ------------------------------------------------------------ losses

    def _interrupted(self, finish: Finish, error: Exception | None) -> bool:
        """Whether an end that its engine or the pool brings is none, for it goes on elsewhere or later."""
        interruption = None if self._left else self._interruption(finish, error)
        if interruption is None:
            return False
        resumes = resumable(self.sampling) and (self._failover.resume or interruption is _Interruption.CUT)
        if self.handed_out and not resumes:
            return False
        if self._observer is not None:
            self._observer.left(self, error)
        self.asked_s, self.held_s = time.monotonic(), None
        if not resumes:
            self.request.forget()
        self.num_resumed += bool(self.request.token_ids)
        if isinstance(error, EngineConnectionError) and self._lease is not None:
            self.avoids = self._lease.target
        self.let_go()
        self.on_lost(self, error)
        return True

    def _interruption(self, finish: Finish, error: Exception | None) -> _Interruption | None:
        """What befell it, if it outlives that."""
        if self.outlives is Outlives.SLEEP and isinstance(error, (LifecycleError, StaleWeightsError)):
            return _Interruption.CUT
        cut = error is None and finish.reason == "abort"
        if cut and self.outlives >= Outlives.SYNCS and self._lease is not None and not self._lease.target.ready:
            return _Interruption.CUT  # nobody here asked for that abort, and the engine is held: a sync did
        if not isinstance(error, (EngineDiedError, EngineConnectionError, StaleWeightsError)) and not (
            cut and self.outlives is Outlives.SLEEP
        ):
            return None
        self.num_lost += 1
        may_go_on = self._failover.enabled and self.num_lost <= self._failover.most
        return _Interruption.LOSS if may_go_on else None


def resumable(sampling: Sampling) -> bool:
    """Whether a cut completion can be resumed from its tokens and be distributed as if it had not been cut.

    An engine takes those tokens for a part of the prompt. Grammars would start over, penalties would not count them,
    and a stop string that straddles the cut would not be seen.
    """
    grammar = sampling.json_schema or sampling.regex or sampling.ebnf
    penalized = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0
    return not (grammar or penalized or sampling.stop)
