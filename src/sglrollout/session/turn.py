"""One turn of the model: what it is, and how it is sampled."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sglrollout.config import Sampling
from sglrollout.errors import fresh
from sglrollout.generation.chunks import ChunkReader, Part
from sglrollout.generation.sample import Outlives, Prepared
from sglrollout.generation.sampler import Sampler
from sglrollout.session.tools import ToolCall
from sglrollout.types import Completion, FinishReason


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
    """One turn while it is sampled. It goes on when a weight sync aborts it, and in another engine when its own dies.

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
        self._key, self._chunk_tokens, self._timeout_s = key, chunk_tokens, timeout_s
        self._outlives = Outlives.SLEEP if patient else Outlives.SYNCS
        self._reader: ChunkReader | None = None

    async def next(self) -> Part:
        """The next part, once there is one.

        Raises:
            EngineDiedError: too many engines died under it, or one after its tokens were taken and it cannot resume.
            EngineRequestError, RequestTimeoutError, NoEngineError, QueueFullError, LifecycleError, StaleWeightsError:
                as for any sample.
        """
        return await (await self._begun()).next()

    async def to_the_end(self) -> None:
        """Wait for its end.

        Raises:
            as :meth:`next`.
        """
        sample = (await self._begun()).sample
        await sample.until_ended()
        if sample.request.error is not None:
            raise fresh(sample.request.error)

    async def _begun(self) -> ChunkReader:
        if self._reader is None:
            sample = await self.sampler.start(
                self.prepared,
                self.sampling,
                key=self._key,
                chunk_tokens=self._chunk_tokens,
                timeout_s=self._timeout_s,
                outlives=self._outlives,
            )
            self._reader = ChunkReader(sample, self._chunk_tokens)
        return self._reader

    @property
    def completion(self) -> Completion:
        """All of it, once it has ended."""
        assert self._reader is not None
        return self.sampler.completion(self._reader.sample)

    def cancel(self, message: str, error: Exception | None = None) -> None:
        """Abort what runs, and free its slot."""
        if self._reader is not None:
            self._reader.sample.cancel(message, error)
