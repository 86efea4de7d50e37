"""One turn of the model: what it is, and how it is sampled though engines die and syncs cut it short."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from sglrollout.config import Sampling
from sglrollout.errors import EngineDiedError, LifecycleError, StaleWeightsError, fresh
from sglrollout.generation.sampler import Prepared, Sample, Sampler, resumable
from sglrollout.session.tools import ToolCall
from sglrollout.types import Completion, FinishReason, Timings, VersionSpan

MOST_DEATHS = 3


@dataclass(frozen=True)
class Turn:
    """What the model said in one turn.

    Attributes:
        index: of the turn in its session.
        completion: the turn by itself: its prompt is everything before it, and its tokens are the model's alone.
        content: the text without its tool calls; empty where there is no tokenizer.
        tool_calls: that the model made.
    """

    index: int
    completion: Completion = field(repr=False)
    content: str
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def text(self) -> str:
        """All that the model said, tool calls included, without the token that ended it."""
        return self.completion.text

    @property
    def finish_reason(self) -> FinishReason:
        """``stop``; ``length`` when its budget, the context or ``max_turns`` is used up; ``abort``."""
        return self.completion.finish_reason


class TurnRun:
    """One turn while it is sampled: on one engine, and on others after that if it dies.

    A turn whose engine died, or that a weight sync aborted, goes on from the tokens that it had; where its sampling
    options do not allow that (:func:`~sglrollout.generation.sampler.resumable`), it begins anew.

    Args:
        key: of the engine that holds the turn's prefix.
        chunk_tokens: tokens that arrive at a time; so many may be lost when an engine dies.
        timeout_s: for the whole, without the time in which it waits for engines that are asleep or stale.
        patient: wait while engines are asleep or stale, and go on after that, rather than raise.
    """

    def __init__(
        self,
        sampler: Sampler,
        prepared: Prepared,
        sampling: Sampling,
        *,
        key: Hashable,
        chunk_tokens: int,
        timeout_s: float | None,
        patient: bool = False,
    ) -> None:
        self.sampler, self.prepared, self.sampling = sampler, prepared, sampling
        self._key, self._chunk_tokens, self._patient = key, chunk_tokens, patient
        self._begun_s = time.monotonic()
        self._deadline = None if timeout_s is None else self._begun_s + timeout_s
        self._first_token_s: float | None = None
        self._queue_s = 0.0
        self._sample: Sample | None = None
        self._prior: Completion | None = None
        self._num_deaths = 0
        self._cut = self._left = False
        self.num_taken = 0
        self.completion: Completion | None = None
        """All of it, once it has ended."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        if self.completion is not None:
            return len(self.completion.token_ids)
        return self._num_prior + (len(self._sample.request.token_ids) if self._sample is not None else 0)

    async def advance(self) -> None:
        """Wait for more tokens, or the end.

        Raises:
            EngineDiedError: too many engines died under it, or one after its tokens were taken and it cannot resume.
            EngineRequestError, RequestTimeoutError, NoEngineError, QueueFullError, LifecycleError, StaleWeightsError:
                as for any sample.
        """
        if self.completion is not None:
            return
        sample = self._sample or await self._start()
        await sample.request.progress()
        if sample.request.ended:
            self._settle(sample)

    def cancel(self, message: str, error: Exception | None = None) -> None:
        """Abort what runs, and free its slot."""
        self._left = True
        if self._sample is not None:
            self._sample.cancel(message, error)

    async def _start(self) -> Sample:
        while True:
            if self._patient:
                await self._wait_until_open()
            try:
                return await self._try_to_start()
            except (LifecycleError, StaleWeightsError):
                if not self._patient or self.sampler.pool.dispatcher.closed:
                    raise

    async def _wait_until_open(self) -> None:
        begun_s = time.monotonic()
        await self.sampler.pool.until_open()
        if self._deadline is not None:
            self._deadline += time.monotonic() - begun_s

    async def _try_to_start(self) -> Sample:
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        self._sample = await self.sampler.start(
            self.prepared,
            self.sampling,
            key=self._key,
            chunk_tokens=self._chunk_tokens,
            timeout_s=left,
            on_end=self._note_end,
            prior=self._prior,
        )
        if self._left:
            self._sample.cancel("the turn was left")
        return self._sample

    def _note_end(self, sample: Sample) -> None:
        """Whether it was cut by a sync: an abort that nobody here asked for, of an engine that is held."""
        request = sample.request
        aborted = request.finish_reason == "abort" and request.error is None and not self._left
        member = next((member for member in self.sampler.pool.members if member.name == sample.engine), None)
        self._cut = aborted and member is not None and not member.ready

    def _settle(self, sample: Sample) -> None:
        """Take an ended sample: as the end of the turn, or as the part of it with which the next one goes on."""
        request, error, cut = sample.request, sample.request.error, self._cut
        part = self.sampler.completion(sample, self.prepared, self.sampling)
        self._queue_s += request.queue_s
        if self._first_token_s is None and request.first_token_s is not None:
            self._first_token_s = request.first_token_s - self._begun_s
        self._sample, self._cut = None, False
        if self._may_go_on and self._was_interrupted(error, cut):
            self._prior = part if part.token_ids and resumable(self.sampling) else None
        elif error is not None:
            raise fresh(error)
        else:
            timings = Timings(self._queue_s, self._first_token_s, time.monotonic() - self._begun_s)
            engine = part.engine or (self._prior.engine if self._prior is not None else "")
            self.completion = dataclasses.replace(part, timings=timings, engine=engine)

    def _was_interrupted(self, error: Exception | None, cut: bool) -> bool:
        """Whether what ended a sample was not its own fault, and has not happened too often."""
        if self._left:
            return False
        if self._patient and isinstance(error, (LifecycleError, StaleWeightsError)):
            return True
        if isinstance(error, (EngineDiedError, StaleWeightsError)):
            self._num_deaths += 1
            return self._num_deaths <= MOST_DEATHS
        return error is None and cut

    @property
    def _may_go_on(self) -> bool:
        """Anew only where nobody has tokens of it that would not come again."""
        return resumable(self.sampling) or self.num_taken == 0

    @property
    def _num_prior(self) -> int:
        return len(self._prior.token_ids) if self._prior is not None else 0

    def take(self, most: int) -> tuple[tuple[int, ...], tuple[float, ...] | None, int]:
        """The next tokens that nobody has taken, at most so many, of one weight version: ids, logprobs, version."""
        start = self.num_taken
        whole = self.completion
        if whole is None and self._prior is not None and start < self._num_prior:
            whole = self._prior
        if whole is not None:
            return self._take(start, most, whole.token_ids, whole.logprobs, whole.weight_versions)
        if self._sample is None:
            return (), None, 0
        request = self._sample.request
        return self._take(start - self._num_prior, most, request.token_ids, request.logprobs, request.spans)

    def _take(
        self,
        start: int,
        most: int,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        spans: Sequence[VersionSpan],
    ) -> tuple[tuple[int, ...], tuple[float, ...] | None, int]:
        span = next((span for span in spans if start < span.end), VersionSpan(spans[-1].version if spans else 0, 0, 0))
        end = max(start, min(start + most, span.end))
        self.num_taken += end - start
        return tuple(ids[start:end]), None if logprobs is None else tuple(logprobs[start:end]), span.version
