"""What generation returns: frozen, plain data.  Imports errors and nothing else of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

Message: TypeAlias = dict[str, object]
"""One chat message, ``{"role": ..., "content": ...}`` as chat templates take it."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""A text, a list of token ids, or a list of chat messages (rendered by the model's chat template)."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

Detokenizer: TypeAlias = Callable[["Completion"], str]


class VersionSpan(NamedTuple):
    """Output tokens ``start`` to ``end`` (end excluded) were sampled under ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timings:
    """When one sample was served. Seconds; the clock is ``time.monotonic`` of the caller's process.

    ``queue_s`` is the wait for a slot in the dispatcher. ``first_token_s`` and ``total_s`` count from when the sample
    was asked for, that wait included: to the arrival of the first token, and to the end.
    """

    queue_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True)
class Completion:
    """One sample.

    Attributes:
        prompt_ids: the prompt's token ids, ``[P]``.
        token_ids: the sampled token ids, ``[T]``, the stop token included when one was sampled.
        logprobs: natural-log probability of each sampled token under the sampling distribution
            after temperature and before top-p/top-k/min-p, ``[T]``; ``None`` when not asked for.
        finish_reason: ``stop`` (stop token or string, or end of sequence), ``length`` (budget or context used up),
            ``abort`` (cancelled; the tokens are what there was), ``error`` (see ``error``).
        stop_match: the stop string or token id that ended it, if one did.
        weight_versions: which weight version each token was sampled under, as spans that cover ``[0, T)``.
        cached_tokens: prompt tokens found in the engine's prefix cache.
        engine: name of the engine that served it.
        error: what went wrong, when ``finish_reason`` is ``error`` or ``abort``.
        index: position in its group.
        loss_mask: of a session's several turns: 1 where the model sampled the token, 0 where a template, a tool or a
            user wrote it (its logprob is 0.0), ``[T]``; ``None`` when the model sampled all.
    """

    prompt_ids: tuple[int, ...] = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] | None = field(repr=False)
    finish_reason: FinishReason
    stop_match: str | int | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    engine: str = ""
    timings: Timings | None = None
    error: Exception | None = None
    index: int = 0
    loss_mask: tuple[int, ...] | None = field(default=None, repr=False)
    _detokenize: Detokenizer | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise AssertionError(
                f"{len(self.token_ids)} token ids came with {len(self.logprobs)} logprobs; refusing to pair them"
            )
        if self.loss_mask is not None and len(self.loss_mask) != len(self.token_ids):
            raise AssertionError(f"{len(self.token_ids)} token ids came with a mask of {len(self.loss_mask)}")

    def __getstate__(self) -> dict[str, object]:
        """For pickling: with the text in place of what decodes it."""
        text = {} if self._detokenize is None else {"text": self.text}
        return {**self.__dict__, **text, "_detokenize": None}

    @cached_property
    def text(self) -> str:
        """The sampled text, decoded on first use; the stop string or stop token is left out."""
        if self._detokenize is None:
            from sglrollout.errors import LifecycleError

            raise LifecycleError("there is no tokenizer to decode with: the engine runs with skip_tokenizer_init")
        return self._detokenize(self)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt.

    Attributes:
        prompt: what the caller gave.
        prompt_ids: the prompt's token ids, ``[P]``.
        completions: the ``n`` samples, by sample index.
        index: the prompt's position in the call.
        data: what came with the prompt, for its reward.
        rewards: of the samples, ``[n]``; ``None`` for one that failed. ``None`` altogether where nothing rewards.
    """

    prompt: Prompt
    prompt_ids: tuple[int, ...] = field(repr=False)
    completions: tuple[Completion, ...]
    index: int = 0
    data: object = field(default=None, repr=False)
    rewards: tuple[float | None, ...] | None = None

    @property
    def oldest_version(self) -> int | None:
        """The weight version of its oldest sampled token; ``None`` when it has no token."""
        return min(
            (span.version for completion in self.completions for span in completion.weight_versions), default=None
        )


@dataclass(frozen=True)
class Chunk:
    """A few tokens of a stream, as they came.

    Attributes:
        token_ids: ``[t]``, at most ``chunk_tokens`` of them.
        logprobs: of those tokens, ``[t]``, or ``None`` when not asked for.
        weight_version: the version these tokens were sampled under.
        finish_reason: set on the last chunk alone.
        text: text that became final with this chunk (a character split over tokens, or the start of a
            possible stop string, waits for the next).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    weight_version: int
    finish_reason: FinishReason | None = None
    _text: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        """For pickling: with the text in place of what decodes it."""
        return {**self.__dict__, "text": self.text, "_text": None}

    @cached_property
    def text(self) -> str:
        """The text delta, decoded on first use."""
        return self._text() if self._text is not None else ""
