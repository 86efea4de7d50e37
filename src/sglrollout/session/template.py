"""What a chat template puts around the model's words, found by rendering, so that those are never tokenized again.

The tokens that the model sampled stay as they are. Of what follows them, a template is asked with the model's last
words replaced by a word of our own: what it writes after that word closes the model's turn, holds the new messages,
and opens the next turn. That text is tokenized alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence

from sglrollout.errors import ConfigError
from sglrollout.text import Tokenizer
from sglrollout.types import Message

_log = logging.getLogger("sglrollout.session")

_SAID = "sglrolloutsaidthis"  # a word that no template would cut, escape or trim
_GIVEN = "sglrolloutwasgiven"
_PLAIN: Message = {"role": "assistant", "content": _SAID}

Schemas = Sequence[Mapping[str, object]]


class _UnfitError(Exception):
    """This way of asking the template gives no answer."""


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        end_ids: token ids that end a generation.
        options: more names that the template knows, such as ``enable_thinking``.

    Raises:
        ConfigError: it has no chat template.
    """

    def __init__(
        self, tokenizer: Tokenizer, end_ids: Collection[int] = (), options: Mapping[str, object] | None = None
    ) -> None:
        if not tokenizer.inner.chat_template:
            rule = "must be a tokenizer with a chat template, or give token ids alone, through add_tokens"
            raise ConfigError("tokenizer", type(tokenizer.inner).__name__, rule)
        self._tokenizer, self._end_ids, self._options = tokenizer, frozenset(end_ids), dict(options or {})
        self._unseen: dict[tuple[object, ...], str] = {}

    def source(self, tools: Schemas = ()) -> str:
        """The template itself, as it is used with these tools."""
        return str(self._tokenizer.inner.get_chat_template(tools=list(tools) or None))

    def opening(self, messages: Sequence[Message], tools: Schemas = ()) -> list[int]:
        """Token ids of the first prompt: all messages, and the opening of the model's turn.

        Raises:
            ConfigError: the messages do not fit the template.
        """
        try:
            text = self._render(messages, tools, opens=True)
        except Exception as error:
            raise ConfigError(
                "messages", messages, f"must fit the model's chat template ({error}), or be taken back by discard()"
            ) from error
        hidden = [name for tool in tools if (name := _name(tool)) not in text]
        if hidden:
            _warn_once(
                f"this chat template does not tell the model of its tools ({', '.join(hidden)}): "
                "name and describe them in the system prompt"
            )
        return self._ids(text)

    def between(
        self,
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        last_token_ids: Sequence[int],
        tools: Schemas = (),
    ) -> list[int]:
        """Token ids between what the model just said and what it says next.

        Args:
            messages_so_far: up to and including what the model just said.
            new_messages: what came since.
            last_token_ids: of what the model just said. Where they end with the token that closes a turn, that token
                is not said again.
            tools: their schemas.

        Raises:
            ConfigError: this template cannot be continued token by token.
        """
        *history, said = _one_voice(messages_so_far)
        text = self._text_between(history, said, new_messages, tools)
        ids = self._ids_inside(text)
        if ids and last_token_ids and self._is_closed(ids[0], last_token_ids[-1], history, tools):
            del ids[0]
        return ids

    def _text_between(self, history: Sequence[Message], said: Message, new: Sequence[Message], tools: Schemas) -> str:
        reasons: list[str] = []
        for way in (self._after_words, self._after_calls) if said.get("tool_calls") else (self._after_words,):
            try:
                return way(history, said, new, tools)
            except Exception as error:
                reasons.append(str(error) or type(error).__name__)
        rule = (
            "must be messages with which the model's chat template can go on after what the model said, and with these "
            f"it cannot ({'; '.join(dict.fromkeys(reasons))}): take them back by discard(), and give token ids in "
            "place of them, through add_tokens"
        )
        raise ConfigError("messages", list(new), rule)

    def _after_words(self, history: Sequence[Message], said: Message, new: Sequence[Message], tools: Schemas) -> str:
        """As if the model had said nothing but words: the plainest case, which most templates can go on from."""
        text = _after(self._render([*history, _PLAIN, *new], tools, opens=True))
        self._check_seen([*history, _PLAIN], new, tools)
        return text

    def _after_calls(self, history: Sequence[Message], said: Message, new: Sequence[Message], tools: Schemas) -> str:
        """With the calls that the model made, for templates in which results must follow calls."""
        called = {**said, "content": _SAID}
        before = self._render([*history, called], tools, opens=False)
        whole = self._render([*history, called, *new], tools, opens=True)
        if not whole.startswith(before):
            raise _UnfitError("it writes a tool call in another way once results follow")
        self._check_seen([*history, called], new, tools)
        return self._closing(history, tools) + whole[len(before) :]

    def _closing(self, history: Sequence[Message], tools: Schemas) -> str:
        """What closes a turn of the model when nothing follows it."""
        return _after(self._render([*history, _PLAIN], tools, opens=False))

    def _is_closed(self, first: int, last: int, history: Sequence[Message], tools: Schemas) -> bool:
        """Whether the model's ``last`` token closed its turn, as the template's ``first`` would do.

        A model may use another token for that than its template: Llama ends a turn with tool calls with ``<|eom_id|>``.
        """
        if first == last:
            return True
        if last not in self._end_ids or first not in self._tokenizer.inner.added_tokens_decoder:
            return False
        try:
            closing = self._closing(history, tools)
        except Exception:  # then nothing is known of how a turn closes
            return False
        return self._ids_inside(closing)[:1] == [first]

    def _check_seen(self, before: Sequence[Message], new: Sequence[Message], tools: Schemas) -> None:
        """Refuse a template that leaves messages out, or puts them elsewhere: the model would never see them."""
        key = ("tool_calls" in before[-1], *(message["role"] for message in new))
        if key not in self._unseen:
            probes = [{**message, "content": f"{_GIVEN}{i}x"} for i, message in enumerate(new)]
            try:
                text = self._render([*before, *probes], tools, opens=True).rpartition(_SAID)[2]
            except Exception:  # a template that reads contents: it does not leave them out
                text = "".join(str(probe["content"]) for probe in probes)
            unseen = [str(probe["role"]) for probe in probes if str(probe["content"]) not in text]
            self._unseen[key] = ", ".join(dict.fromkeys(unseen))
        if self._unseen[key]:
            raise _UnfitError(f"it does not put messages of role {self._unseen[key]} after what the model said")

    def _render(self, messages: Sequence[Message], tools: Schemas, opens: bool) -> str:
        text = self._tokenizer.inner.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=opens,
            tokenize=False,
            **self._options,
        )
        return str(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.inner(text, add_special_tokens=False)["input_ids"])

    def _ids_inside(self, text: str) -> list[int]:
        """Token ids of a text that does not stand at the beginning.

        Some tokenizers (SentencePiece's, as in Llama 2) put a space before every text; it is left out here.
        """
        ids, newline = self._ids(text), self._ids("\n")
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
        if decode([*newline, *ids]) == f"\n{text}":
            return ids
        longer = self._ids(f"\n{text}")
        fits = longer[: len(newline)] == newline and decode(longer) == f"\n{text}"
        return longer[len(newline) :] if fits else ids


def _one_voice(messages: Sequence[Message]) -> list[Message]:
    """Without those of the model's turns that it went on with itself: many templates refuse two in a row."""
    followed = [*messages[1:], None]
    return [
        message
        for message, after in zip(messages, followed, strict=True)
        if not (after is not None and message["role"] == after["role"] == "assistant")
    ]


def _after(text: str) -> str:
    """What follows our word, which must be there once."""
    _, found, tail = text.partition(_SAID)
    if not found or _SAID in tail:
        raise _UnfitError("it does not show what the model said")
    return tail


def _name(schema: Mapping[str, object]) -> str:
    function = schema.get("function")
    return str(function.get("name")) if isinstance(function, Mapping) else ""


@functools.lru_cache(maxsize=256)  # bounded: the names of tools may be others each time
def _warn_once(message: str) -> None:
    _log.warning("%s", message)
