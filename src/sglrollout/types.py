"""What generation returns: frozen, plain data.  Imports errors and nothing else of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from sglrollout import notebook
from sglrollout.errors import in_words

Message: TypeAlias = dict[str, object]
"""One chat message, ``{"role": ..., "content": ...}`` as chat templates take it."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""A text, a list of token ids, or a list of chat messages (rendered by the model's chat template)."""

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

Detokenizer: TypeAlias = Callable[["Completion"], str]

_SHOWN_SPANS = 8
_SHOWN_SAMPLES = 16
_TOKENS_OF_A_ROW = 64


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

    @property
    def mean_logprob(self) -> float | None:
        """Over the tokens that the model sampled; ``None`` where there are none, or no logprobs."""
        sampled = [logprob for logprob, mask in zip(self.logprobs or (), self._mask(), strict=False) if mask]
        return sum(sampled) / len(sampled) if sampled else None

    def _mask(self) -> Sequence[int]:
        return (1,) * len(self.token_ids) if self.loss_mask is None else self.loss_mask

    def _repr_html_(self) -> str:
        """For notebooks: what it is, and its text, in which a token is the redder the less likely it was."""
        facts = {
            "finish": self._finish(),
            "tokens": f"{len(self.prompt_ids):,} + {len(self.token_ids):,}",
            "mean logprob": notebook.number(self.mean_logprob),
            "weight versions": self._versions(),
            "engine": self.engine,
            "seconds": None if self.timings is None else notebook.number(self.timings.total_s),
        }
        prompt = notebook.block(f'<span style="opacity:0.6">{self._prompt_html()}</span>')
        return notebook.frame(notebook.facts(facts), prompt, notebook.block(self._text_html(notebook.MOST_TOKENS)))

    def _finish(self) -> str:
        match = "" if self.stop_match is None else f" ({self.stop_match!r})"
        return f"{self.finish_reason}{match}" + ("" if self.error is None else f": {in_words(self.error)}")

    def _versions(self) -> str:
        return ", ".join(f"{version} ({start}:{end})" for version, start, end in self.weight_versions[:_SHOWN_SPANS])

    def _prompt_html(self) -> str:
        shown = self.prompt_ids[: notebook.MOST_TOKENS]
        more = _more(len(self.prompt_ids) - len(shown), "tokens")
        return notebook.text(_listed(shown) if self._detokenize is None else self._decode(shown)) + more

    def _text_html(self, most: int) -> str:
        """The first ``most`` tokens: in colours, else as plain text, else, without a tokenizer, as their ids."""
        more = _more(len(self.token_ids) - most, "tokens")
        if self._detokenize is None:
            known = self.__dict__.get("text")
            listed = notebook.text(_listed(self.token_ids[:most])) + more
            return listed if known is None else notebook.text(known, 8 * most)
        if self.logprobs is None:
            return notebook.text(self.text, 8 * most)
        parts = list(self._pieces(most))
        shown, whole = "".join(part for part, _ in parts), self.text.rstrip("\ufffd")
        if not (shown.startswith(whole) or whole.startswith(shown)):  # a tokenizer whose texts do not add up
            return notebook.text(self.text, 8 * most)
        return notebook.pieces(parts) + more

    def _pieces(self, most: int) -> Iterator[tuple[str, float | None]]:
        """Texts of the first tokens, with their logprobs. What has no text of its own goes with the next that has."""
        start, shown, least = 0, "", None
        mask, logprobs = self._mask(), self.logprobs or ()
        for end, _ in enumerate(self.token_ids[:most], 1):
            if mask[end - 1]:
                least = logprobs[end - 1] if least is None else min(least, logprobs[end - 1])
            text = self._decode(self.token_ids[start:end])
            if len(text) > len(shown) and not text.endswith("\ufffd"):
                yield text[len(shown) :], least
                # The last token stays, as what comes after it may read otherwise without it: a space, for one.
                start, shown, least = end - 1, self._decode(self.token_ids[end - 1 : end]), None

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        assert self._detokenize is not None
        part = replace(self, token_ids=token_ids, logprobs=None, loss_mask=None, weight_versions=(), stop_match=None)
        return self._detokenize(part)


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

    def _repr_html_(self) -> str:
        """For notebooks: the prompt, and a row for each of the first samples."""
        titles = ("sample", "reward", "tokens", "finish", "mean logprob", "weight versions", "text")
        shown = self.completions[:_SHOWN_SAMPLES]
        more = _more(len(self.completions) - len(shown), "samples")
        return notebook.frame(
            notebook.block(self._prompt_html()), notebook.table(titles, map(self._row, range(len(shown)))), more
        )

    def _row(self, index: int) -> tuple[str, ...]:
        completion = self.completions[index]
        return (
            str(completion.index),
            notebook.number(None if self.rewards is None else self.rewards[index]),
            f"{len(completion.token_ids):,}",
            notebook.text(completion._finish(), 200),
            notebook.number(completion.mean_logprob),
            notebook.text(completion._versions()),
            notebook.block(completion._text_html(_TOKENS_OF_A_ROW)),
        )

    def _prompt_html(self) -> str:
        if isinstance(self.prompt, str):
            return notebook.text(self.prompt)
        if self.prompt and isinstance(self.prompt[0], Mapping):
            lines = [f"{m.get('role')}: {m.get('content')}" for m in self.prompt if isinstance(m, Mapping)]
            return notebook.text("\n".join(lines))
        if self.completions:
            return self.completions[0]._prompt_html()
        return notebook.text(_listed(self.prompt_ids[: notebook.MOST_TOKENS]))


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


def _more(number: int, noun: str) -> str:
    return f"<i> … {number:,} more {noun}</i>" if number > 0 else ""


def _listed(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))
