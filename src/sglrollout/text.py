"""Between text and token ids: the tokenizer, chat templates, and text that becomes final while tokens stream.

May import types, errors and the CPU support.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglrollout.errors import ConfigError
from sglrollout.types import Completion, Prompt

_REPLACEMENT = "\ufffd"
Decode = Callable[[Sequence[int]], str]


class Tokenizer:
    """The model's tokenizer and chat template, as transformers loads them.

    Args:
        path: model directory or Hub id.
        revision: of the Hub repository.
        trust_remote_code: let transformers run code that comes with it.
    """

    def __init__(self, path: str, revision: str | None = None, trust_remote_code: bool = False) -> None:
        from sglrollout.engine import cpu_support

        cpu_support.forgive_torchvision()
        from transformers import AutoTokenizer

        self.inner: Any = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)

    def encode(self, prompt: Prompt, field: str = "prompt") -> list[int]:
        """Token ids of a prompt; a list of ids is returned as it is.

        Raises:
            ConfigError: it is none of a text, token ids and chat messages.
        """
        if isinstance(prompt, str):
            if not is_unicode(prompt):
                raise ConfigError(field, prompt, "must be valid Unicode, without lone surrogates")
            return list(self.inner(prompt)["input_ids"])
        if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
            return self._render(prompt, field)
        return check_token_ids(prompt, field)

    def _render(self, messages: Any, field: str) -> list[int]:
        for message in messages:
            if not isinstance(message.get("role"), str):
                raise ConfigError(field, message, 'must be chat messages, each with a "role"')
        try:
            rendered = self.inner.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:
            raise ConfigError(field, messages, f"must fit the model's chat template ({error})") from error
        return list(rendered)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens, with nothing "cleaned up": what the model said, to the letter."""
        ids = list(token_ids)
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def completion_text(self, completion: Completion, skip_special_tokens: bool = True) -> str:
        """A completion's text, without the stop string or stop token that ended it."""
        ids: Sequence[int] = completion.token_ids
        match = completion.stop_match
        if isinstance(match, int) and ids and ids[-1] == match:
            ids = ids[:-1]
        text = self.decode(ids, skip_special_tokens)
        return text.split(match, 1)[0] if isinstance(match, str) else text


def is_unicode(text: str) -> bool:
    """Whether it can be encoded at all: JSON and file names bring lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_token_ids(prompt: Any, field: str) -> list[int]:
    """``prompt`` as a list of ints, or a ConfigError."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) and prompt:
        ids = list(prompt)
        if all(type(token) is int for token in ids):
            return ids
    raise ConfigError(field, prompt, "must be a text, a non-empty list of token ids, or a list of chat messages")


class StreamText:
    """Text of a token stream, released as soon as it cannot change any more.

    Held back are the bytes of an unfinished character, and whatever could be the start of a stop string. Each
    ``boundary`` is a token count; text is asked for in order.

    Args:
        decode: token ids to text.
        stop: the stop strings.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._window_start = 0
        self._window_done = 0
        self._decoded = ""
        self._released = 0
        self._chunks: list[list[int]] = []
        self._texts: list[str] = []

    def add(self, token_ids: Sequence[int], final: Callable[[], str] | None = None) -> Callable[[], str]:
        """Take a chunk's tokens; the result gives that chunk's text when called, now or later, once or often.

        Args:
            token_ids: the new tokens.
            final: for the last chunk, the whole text as it must read in the end.
        """
        index = len(self._chunks)
        self._chunks.append(list(token_ids))

        def text() -> str:
            for i in range(len(self._texts), index + 1):
                self._texts.append(self._advance(self._chunks[i], final if i == index else None))
            return self._texts[index]

        return text

    def _advance(self, token_ids: list[int], final: Callable[[], str] | None) -> str:
        if final is not None:
            text = final()
            delta, self._released = text[self._released :], len(text)
            return delta
        self._ids += token_ids
        before = self._decode(self._ids[self._window_start : self._window_done])
        after = self._decode(self._ids[self._window_start :])
        if after.endswith(_REPLACEMENT) or len(after) < len(before):
            return ""
        self._decoded += after[len(before) :]
        self._window_start, self._window_done = self._window_done, len(self._ids)
        safe = len(self._decoded) - self._held_back()
        delta, self._released = self._decoded[self._released : safe], max(safe, self._released)
        return delta

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop), len(self._decoded)), longest, -1):
                if self._decoded.endswith(stop[:size]):
                    longest = size
                    break
        return longest
