"""One turn of a session as it is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Self

import anyio

from sglrollout.concurrency import Abandonable
from sglrollout.errors import LifecycleError
from sglrollout.session.block import Block
from sglrollout.session.turn import Turn, TurnRun
from sglrollout.text import StreamText
from sglrollout.types import Chunk


class _Use:
    """What a stream has of its session. It never refers to the stream, so that a dropped one is noticed at once."""

    run: TurnRun | None
    step: anyio.CancelScope | None
    """Of the task that waits for the next chunk."""

    def __init__(self, block: Block) -> None:
        self.block, self.loop = block, asyncio.get_running_loop()
        self.run = self.step = None
        block.take(self, self.leave)

    def leave(self, error: Exception | None = None) -> None:
        """Abort the turn, and let the session be used again: at once, or when the task that waits has heard of it."""
        if self.run is not None:
            self.run.cancel("the stream was left", error)
        if self.step is not None:
            self.step.cancel()
        else:
            self.block.give(self)

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """What runs in here is cancelled when it is left, and then there is no next chunk."""
        scope = self.step = anyio.CancelScope()
        try:
            with scope:
                yield
        finally:
            self.step = None
            if scope.cancel_called:
                self.block.give(self)
        if scope.cancel_called:
            raise StopAsyncIteration

    def drop(self) -> None:
        """The same, from any thread."""
        self.block.give(self)
        if self.run is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.run.cancel, "the stream was left")


class SessionStream(Abandonable):
    """Chunks of a turn, by ``async for``. After the last one the turn is in the session, and in :attr:`turn`.

    It begins at the first step of the loop. A loop that is left early, by ``break``, an exception or cancellation,
    aborts the turn and leaves the session as it was; ``async with`` does so at the end of its block even while a
    reference to the stream lives on.

    Raises (from the loop): what :meth:`Session.generate` raises. Where the sampling options do not let a turn go on
    after its engine died (a grammar, penalties, stop strings), also ``EngineDiedError`` once a chunk was given out.
    """

    def __init__(
        self,
        block: Block,
        begin: Callable[[], Awaitable[TurnRun]],
        finish: Callable[[TurnRun], Awaitable[Turn]],
        failed: Callable[[Exception], None],
        chunk_tokens: int,
    ) -> None:
        self._block, self._begin, self._finish, self._failed = block, begin, finish, failed
        self._chunk_tokens = chunk_tokens
        self._use: _Use | None = None
        self._text: StreamText | None = None
        self._turn: Turn | None = None
        self._over = self._waiting = False

    @property
    def turn(self) -> Turn:
        """The whole turn, once it has ended.

        Raises:
            LifecycleError: it has not.
        """
        if self._turn is None:
            raise LifecycleError("the stream has not ended: its turn is there after the last chunk")
        return self._turn

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        if self._waiting:
            raise LifecycleError("another task is waiting for this stream's next chunk: a stream has one consumer")
        self._waiting = True
        try:
            return await self._next()
        except BaseException as error:
            if isinstance(error, Exception):
                self._failed(error)
            self._abandon()
            raise
        finally:
            self._waiting = False

    async def _next(self) -> Chunk:
        self._block.check(idle=False)
        if self._use is None:
            self._use = _Use(self._block)
        with self._block.cancelled_at_end(), self._use.one_step():
            if self._use.run is None:
                self._use.run = await self._begin()
                self._text = _stream_text(self._use.run)
            part = await self._use.run.next()
            if self._over:  # it was left in the instant in which tokens came
                raise StopAsyncIteration
            if part.last:
                self._turn = await self._finish(self._use.run)
                self._over = True
                self._block.give(self._use)
        turn = self._turn
        text = self._text.add(part.token_ids, (lambda: turn.text) if turn is not None else None) if self._text else None
        reason = turn.finish_reason if turn is not None else None
        return Chunk(part.token_ids, part.logprobs, part.weight_version, reason, text)

    def _abandon(self) -> None:
        if not self._over and self._use is not None:
            self._use.leave()
        self._over = True

    def __del__(self) -> None:
        # A loop left by `break` drops this object, possibly on another thread; see Stream.
        if not self._over and self._use is not None:
            self._use.drop()


def _stream_text(run: TurnRun) -> StreamText | None:
    tokenizer, sampling = run.sampler.tokenizer, run.sampling
    if tokenizer is None:
        return None
    return StreamText(lambda ids: tokenizer.decode(ids, sampling.skip_special_tokens), sampling.stop)
