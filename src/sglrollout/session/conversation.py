"""A session's state: messages, tokens and turns. What a fork copies."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from sglrollout.errors import ConfigError, LifecycleError
from sglrollout.session.template import ChatTemplate, Schemas
from sglrollout.session.tools import ToolResult
from sglrollout.session.trajectory import Trajectory
from sglrollout.session.turn import Turn
from sglrollout.text import check_token_ids, is_unicode
from sglrollout.types import Completion, Detokenizer, FinishReason, Message, Timings


class Conversation:
    """Everything that was said in a session, as messages and as tokens.

    New messages and new token ids wait here until the next turn has been sampled; then they become tokens for good.

    Attributes:
        messages: all of them.
        turns: of the model.
        empty_end: how a turn ended that brought no token: ``length`` when the context or the turns are used up.
        error: that ended the last try of a turn.
    """

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages: list[Message] = [*messages]
        self.trajectory = Trajectory()
        self.turns: list[Turn] = []
        self.tool_results: list[ToolResult] = []
        self.num_calls = 0
        self.empty_end: FinishReason | None = None
        self.error: Exception | None = None
        self._num_settled = 0
        self._new_tokens: list[int] = []
        self._asked: tuple[int, ...] = ()
        self._begun_s = self._ended_s = 0.0

    def copy(self) -> Self:
        """Another one that goes on from here."""
        other = copy.copy(self)
        other.trajectory = self.trajectory.copy()
        for name in ("messages", "turns", "tool_results", "_new_tokens"):
            setattr(other, name, [*getattr(self, name)])
        return other

    def set_past(self, messages: Sequence[Message], turns: Sequence[Turn]) -> None:
        """Have nothing but this said so far.

        Args:
            turns: their prompts are without what came before them: see :func:`without_past`.
        """
        self.messages, self.turns, self._num_settled = [*messages], [*turns], len(messages)
        self.trajectory = Trajectory.of(turn.completion for turn in turns)
        self._new_tokens, self._asked = [], ()

    def add(self, given: object) -> None:
        """New messages, for the next turn.

        Raises:
            ConfigError: they are none, or follow token ids that the model has not answered yet.
        """
        messages = as_messages(given)
        if self._new_tokens and messages:
            rule = "cannot follow token ids that the model has not answered yet: give token ids for them as well"
            raise ConfigError("message", given, rule)
        self.messages += messages

    def add_tokens(self, token_ids: object) -> None:
        """New token ids, for the next turn, after the messages that wait for it."""
        self._new_tokens += check_token_ids(token_ids, "token_ids")

    def discard(self) -> None:
        """Take back all that waits for the next turn."""
        del self.messages[self._num_settled :]
        self._new_tokens = []

    @contextmanager
    def said(self, given: object) -> Iterator[None]:
        """New messages, taken back if what follows fails before the model has taken a turn.

        Raises:
            ConfigError: as by :meth:`add`.
        """
        num_messages, num_turns = len(self.messages), len(self.turns)
        self.add(given)
        try:
            yield
        except BaseException:
            if len(self.turns) == num_turns:
                del self.messages[num_messages:]
            raise

    def new_ids(self, template: ChatTemplate | None, tools: Schemas) -> list[int]:
        """What comes between the tokens so far and the next turn, as token ids.

        Raises:
            ConfigError: messages cannot be rendered.
            LifecycleError: nothing is there to say something to.
        """
        new = self.messages[self._num_settled :]
        said = self.turns[-1] if self.turns else None
        if not new and not self._new_tokens and (said is None or said.finish_reason == "stop"):
            raise LifecycleError("nothing was added for the model to say something to: add() a message first")
        if not new:
            return [*self._new_tokens]
        if template is None:
            rule = "need a tokenizer with a chat template: give token ids in place of them, through add_tokens"
            raise ConfigError("messages", new, rule)
        if said is None:
            return template.opening(new, tools) + self._new_tokens
        so_far, last_ids = self.messages[: self._num_settled], said.completion.token_ids
        return template.between(so_far, new, last_ids, tools) + self._new_tokens

    def begin(self, prompt_ids: tuple[int, ...]) -> None:
        """A turn is asked for, with this prompt."""
        self._asked = prompt_ids
        self._begun_s = self._begun_s or time.monotonic()

    def take(self, turn: Turn, message: Message | None) -> None:
        """A turn has ended; ``message`` is what it is among the messages. One without tokens changes no token."""
        self.error = None
        self.empty_end = None if turn.completion.token_ids else turn.finish_reason
        if self.empty_end is not None:
            return
        self._ended_s = time.monotonic()
        self.trajectory.take(turn.completion)
        self.turns.append(turn)
        self.num_calls += len(turn.tool_calls)
        self._new_tokens = []
        if message is not None:
            self.messages.append(message)
        self._num_settled = len(self.messages)

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it stands: of the last turn, unless something ended the whole."""
        if self.error is not None:
            return "error"
        if self.empty_end is not None:
            return self.empty_end
        return self.turns[-1].finish_reason if self.turns else None

    def completion(self) -> Completion:
        """The whole as one sample.

        Raises:
            LifecycleError: no turn was asked for yet.
        """
        reason, tokens = self.finish_reason, self.trajectory
        if reason is None:
            raise LifecycleError("the session has no completion yet: nothing was generated")
        last = self.turns[-1].completion if self.turns else None
        start = tokens.num_prompt_tokens
        whole = Completion(
            prompt_ids=tuple(tokens.token_ids[:start]) if last is not None else self._asked,
            token_ids=tuple(tokens.token_ids[start:]),
            logprobs=None if tokens.logprobs is None else tuple(tokens.logprobs[start:]),
            finish_reason=reason,
            weight_versions=tokens.covering_spans(),
            loss_mask=tuple(tokens.loss_mask[start:]),
            error=self.error,
        )
        if last is None:
            return whole
        return dataclasses.replace(
            whole,
            stop_match=last.stop_match if reason == "stop" else None,
            cached_tokens=self.turns[0].completion.cached_tokens,
            engine=last.engine,
            timings=self._timings(),
            _detokenize=None if last._detokenize is None else partial(_whole_text, last, last._detokenize),
        )

    def _timings(self) -> Timings:
        """All waits for slots, the first token of the first turn, and the whole, tools and environments included."""
        each = [timings for turn in self.turns if (timings := turn.completion.timings) is not None]
        first = each[0].first_token_s if each else None
        return Timings(sum(timings.queue_s for timings in each), first, self._ended_s - self._begun_s)


def _whole_text(last: Completion, detokenize: Detokenizer, whole: Completion) -> str:
    """The text of all turns. A stop string that ended the last one may be in former ones, too, where it belongs.

    A few tokens of it, which come without a mask, are decoded as they are.
    """
    if whole.loss_mask is None:
        return detokenize(whole)
    before = whole.token_ids[: len(whole.token_ids) - len(last.token_ids)]
    return detokenize(dataclasses.replace(last, token_ids=before, logprobs=None, stop_match=None)) + last.text


def as_messages(given: object, field: str = "message") -> list[Message]:
    """A text (a user turn), a message, or several, as a list of messages.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items: Any = [given] if isinstance(given, Mapping) else given
    if not isinstance(items, Sequence) or not all(isinstance(item, Mapping) for item in items):
        raise ConfigError(field, given, "must be a text, a chat message, or a list of chat messages")
    for item in items:
        if not isinstance(item.get("role"), str):
            raise ConfigError(field, item, 'must have a "role"')
        if isinstance(item.get("content"), str) and not is_unicode(item["content"]):
            raise ConfigError(field, item, "must be valid Unicode, without lone surrogates")
    return [dict(item) for item in items]
