"""The shapes of answers, as OpenAI's clients read them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from sglrollout.serve.conversations import Node
from sglrollout.serve.messages import sent_call
from sglrollout.session.turn import Turn
from sglrollout.text import Tokenizer

_LEAST_LOGPROB = -9999.0  # what OpenAI gives in place of minus infinity, which JSON does not have


def encoded(value: object) -> bytes:
    """As JSON. Lone surrogates, which a model may write into arguments, are escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


class Encoded(NamedTuple):
    """What is sent about a conversation, as JSON."""

    body: bytes
    session_id: str

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """
        Raises:
            ValueError: it cannot be JSON.
        """
        return cls(encoded(value), value["session_id"])


def usage_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """Tokens of a request: each prompt counts once, however many choices it has."""
    prompts = {turn.completion.prompt_ids: turn.completion.cached_tokens for turn in reversed(turns)}
    prompt, sampled = sum(map(len, prompts)), sum(len(turn.completion.token_ids) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(prompts.values())},
    }


# ------------------------------------------------------------ chats


def chat_message(turn: Turn, calls: bool) -> dict[str, Any]:
    """What the model said; its calls as such only if those are wanted."""
    if not calls or not turn.tool_calls:
        return {"role": "assistant", "content": turn.text, "refusal": None}
    called = [sent_call(call) for call in turn.tool_calls]
    return {"role": "assistant", "content": turn.content or None, "refusal": None, "tool_calls": called}


def chat_finish(turn: Turn, calls: bool) -> str:
    """Why it ended."""
    return "tool_calls" if calls and turn.tool_calls else str(turn.finish_reason)


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[float] | None
) -> dict[str, Any] | None:
    """Of the sampled tokens. A token that is a part of a character has no text, and no bytes."""
    if logprobs is None:
        return None
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        text = token_text(tokenizer, token_id)
        octets = None if "\ufffd" in text else [*text.encode()]
        entry = {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": octets, "top_logprobs": []}
        content.append(entry)
    return {"content": content, "refusal": None}


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """One token by itself; its number where there is no tokenizer."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)


# ------------------------------------------------------------ completions


def completion_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[float] | None, offset: int
) -> dict[str, Any] | None:
    """Of the sampled tokens, the first of which begins at ``offset`` in the text."""
    if logprobs is None:
        return None
    texts = [token_text(tokenizer, token_id) for token_id in token_ids]
    offsets = [*itertools.accumulate(map(len, texts), initial=offset)][:-1]
    values = [max(logprob, _LEAST_LOGPROB) for logprob in logprobs]
    return {"tokens": texts, "token_logprobs": values, "text_offset": offsets, "top_logprobs": None}


# ------------------------------------------------------------ what was said


def conversation(node: Node) -> dict[str, Any]:
    """A conversation up to one response, token by token."""
    session = node.session()
    logprobs = session.logprobs
    return {
        "id": node.id,
        "object": "conversation",
        "session_id": node.session_id,
        "parent_id": None if node.parent is None else node.parent.id,
        "token_ids": session.token_ids,
        "loss_mask": session.loss_mask,
        "logprobs": None if logprobs is None else [max(logprob, _LEAST_LOGPROB) for logprob in logprobs],
        "weight_versions": [span._asdict() for span in session.weight_versions],
        "num_prompt_tokens": len(session.completion.prompt_ids),
        "num_turns": session.num_turns,
        "finish_reason": session.finish_reason,
        "messages": node.messages,
    }
