"""One completion as it is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from sglrollout.concurrency import Abandonable
from sglrollout.config import Sampling
from sglrollout.engine.protocol import Request
from sglrollout.errors import LifecycleError
from sglrollout.generation.chunks import ChunkReader, Part
from sglrollout.generation.sampler import Sampler
from sglrollout.text import StreamText
from sglrollout.types import Chunk, Completion, FinishReason, Prompt


class Stream(Abandonable):
    """Chunks of one sample, by ``async for``.

    It starts at the first step of the loop. Leaving the loop early, by ``break``, an exception or cancellation, aborts
    the sample in its engine and frees its slot; ``async with`` does so at the end of its block even while a reference
    to the stream lives on. After the last chunk :attr:`completion` holds the whole.

    Raises (from the loop):
        ConfigError: the prompt or sampling is wrong.
        EngineRequestError: the engine failed it.
        EngineDiedError: it lost too many engines, or the last; or one after tokens were given out, where sampling
            options do not let it go on from these (a grammar, penalties, stop strings).
        RequestTimeoutError: its deadline passed.
    """

    def __init__(
        self,
        sampler: Callable[[], Awaitable[Sampler]],
        prompt: Prompt,
        sampling: Sampling,
        chunk_tokens: int,
        timeout_s: float | None,
    ) -> None:
        self._sampler_ready, self._prompt, self._sampling = sampler, prompt, sampling
        self._chunk_tokens, self._timeout_s = chunk_tokens, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sampler: Sampler | None = None
        self._reader: ChunkReader | None = None
        self._text: StreamText | None = None
        self._over = self._taken = False

    @property
    def completion(self) -> Completion:
        """The whole sample, once it has ended.

        Raises:
            LifecycleError: it has not.
        """
        if self._reader is None or not self._reader.sample.request.ended:
            raise LifecycleError("the stream has not ended: its completion is there after the last chunk, or aclose()")
        assert self._sampler is not None
        return self._sampler.completion(self._reader.sample)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        if self._taken:
            raise LifecycleError("another task is waiting for this stream's next chunk: a stream has one consumer")
        self._taken = True
        try:
            reader = self._reader if self._reader is not None else await self._start()
            part = await reader.next()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._taken = False
        return self._chunk(part, reader.sample.request)

    async def _start(self) -> ChunkReader:
        self._loop = asyncio.get_running_loop()
        self._sampler = await self._sampler_ready()
        self._sampler.check(self._sampling)
        prepared = self._sampler.prepare(self._prompt, "prompt")
        sample = await self._sampler.start(
            prepared, self._sampling, chunk_tokens=self._chunk_tokens, timeout_s=self._timeout_s
        )
        if self._sampler.tokenizer is not None:
            tokenizer, skip = self._sampler.tokenizer, self._sampling.skip_special_tokens
            self._text = StreamText(lambda ids: tokenizer.decode(ids, skip), self._sampling.stop)
        self._reader = ChunkReader(sample, self._chunk_tokens)
        return self._reader

    def _chunk(self, part: Part, request: Request) -> Chunk:
        reason: FinishReason | None = None
        if part.last:
            self._over, reason = True, request.finish_reason
        final = (lambda: self.completion.text) if part.last else None
        text = self._text.add(part.token_ids, final) if self._text is not None else None
        return Chunk(part.token_ids, part.logprobs, part.weight_version, reason, text)

    def _abandon(self) -> None:
        self._over = True
        if self._reader is not None:
            self._reader.sample.cancel("the stream was left")

    def __del__(self) -> None:
        # A loop that was left by `break` drops the stream, and in CPython this runs at once; from a garbage
        # collection it may run on any thread.
        if not self._over and self._reader is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reader.sample.cancel, "the stream was left")
