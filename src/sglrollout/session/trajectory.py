"""The tokens of a session, in order: only ever more of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Self

from sglrollout.errors import RolloutError
from sglrollout.types import Completion, VersionSpan


class Trajectory:
    """Every token that the model was given or sampled.

    Attributes:
        token_ids: all of them, ``[N]``.
        loss_mask: 1 where the model sampled the token, ``[N]``.
        logprobs: of those tokens, 0.0 at the others, ``[N]``; ``None`` once a turn came without them.
        spans: the weight versions of sampled tokens, at their places among all.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] | None = []
        self.spans: list[VersionSpan] = []
        self._served: tuple[int, ...] = ()

    @classmethod
    def of(cls, turns: Iterable[Completion]) -> Self:
        """Put together again from turns whose prompts are without what came before them: see :func:`without_past`."""
        whole = cls()
        for turn in turns:
            whole._append(turn.prompt_ids, turn)
        whole._served = tuple(whole.token_ids)
        return whole

    def copy(self) -> Self:
        """Another one that goes on from here."""
        other = copy.copy(self)
        other.token_ids, other.loss_mask, other.spans = [*self.token_ids], [*self.loss_mask], [*self.spans]
        other.logprobs = None if self.logprobs is None else [*self.logprobs]
        return other

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first that the model sampled."""
        return self.spans[0].start if self.spans else len(self.token_ids)

    def prompt(self, new_ids: Sequence[int]) -> tuple[int, ...]:
        """What is sent next: all tokens so far, as they were served, and these.

        Raises:
            RolloutError: they are not those that were served. It would be a bug of this library.
        """
        ids = (*self.token_ids, *new_ids)
        _assert_prefix(self._served, ids)
        return ids

    def take(self, turn: Completion) -> None:
        """Append a turn: what its prompt had that is new, and what the model sampled.

        Raises:
            RolloutError: its prompt does not begin with the tokens so far. It would be a bug of this library.
        """
        _assert_prefix(self.token_ids, turn.prompt_ids)
        self._served = turn.prompt_ids + turn.token_ids
        self._append(turn.prompt_ids[len(self.token_ids) :], turn)

    def _append(self, new_ids: Sequence[int], turn: Completion) -> None:
        start = len(self.token_ids) + len(new_ids)
        self.token_ids += new_ids
        self.token_ids += turn.token_ids
        self.loss_mask += [0] * len(new_ids) + [1] * len(turn.token_ids)
        if self.logprobs is not None and turn.logprobs is not None:
            self.logprobs += [0.0] * len(new_ids)
            self.logprobs += turn.logprobs
        else:
            self.logprobs = None
        self.spans += [VersionSpan(span.version, start + span.start, start + span.end) for span in turn.weight_versions]

    def covering_spans(self) -> tuple[VersionSpan, ...]:
        """Versions of all tokens after the prompt, the first of them being 0.

        A token that the model did not sample takes the version of the token before it.
        """
        offset, found = self.num_prompt_tokens, list[VersionSpan]()
        for i, span in enumerate(self.spans):
            end = self.spans[i + 1].start if i + 1 < len(self.spans) else len(self.token_ids)
            start = span.start - offset
            if found and found[-1].version == span.version:
                start = found.pop().start
            found.append(VersionSpan(span.version, start, end - offset))
        return tuple(found)


def without_past(turn: Completion, num_past_tokens: int) -> Completion:
    """A turn whose prompt is what came after so many tokens: the whole prompt would repeat all turns before it."""
    return dataclasses.replace(turn, prompt_ids=turn.prompt_ids[num_past_tokens:])


def _assert_prefix(former: Sequence[int], whole: tuple[int, ...]) -> None:
    if whole[: len(former)] != tuple(former):
        raise RolloutError(
            "the tokens of this session are not those that were served before, followed by new ones: "
            "it would train on what the model never saw. This is a bug of sglrollout"
        )
