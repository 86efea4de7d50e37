"""The fields of a request: ours, those of sampling, and those that may be given and mean nothing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator

from sglrollout.config import Options, Sampling
from sglrollout.errors import ConfigError
from sglrollout.serve.problems import ProblemError

MOST_CHOICES = 128
MOST_PROMPTS = 1024
COMPLETION_TOKENS = 16
"""What OpenAI samples in a completion that gives no ``max_tokens``; a chat may use up the context."""

IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
"""Taken with any value: they are for OpenAI's own bookkeeping."""

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
}
"""Taken with the value that asks for nothing."""

SAMPLING = {
    **{"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed"},
    **{"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"},
    **{"stop": "stop", "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos", "logit_bias": "logit_bias"},
    **{"presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty"},
    **{"repetition_penalty": "repetition_penalty", "regex": "regex", "ebnf": "ebnf"},
}
"""Options of sampling, by the names that a request has for them."""


class Fields(Options, frozen=True):
    """What chats and completions have in common."""

    model: str = Field(description="the endpoint's model, by name")
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def unknown_rule(cls, name: str) -> str:
        return super().unknown_rule(name).replace("an option", "a field that this endpoint takes")

    @field_validator("stream_options")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value.keys() - {"include_usage", "include_obfuscation"} or value.get("include_obfuscation"):
            raise ValueError('must hold "include_usage" alone')
        return value

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with what it used."""
        return self.stream_options.get("include_usage") is True


class ChatFields(Fields, frozen=True):
    """Of ``/v1/chat/completions``."""

    messages: Sequence[dict[str, Any]] = Field(min_length=1, description="the conversation so far")
    logprobs: bool = False
    response_format: dict[str, Any] | None = None
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CompletionFields(Fields, frozen=True):
    """Of ``/v1/completions``."""

    prompt: Any = Field(description="a text, token ids, or several of them")
    logprobs: int | None = Field(default=None, ge=0, le=1)

    @property
    def prompts(self) -> Sequence[Any]:
        """Each a text, or token ids.

        Raises:
            ConfigError: too many.
        """
        several = isinstance(self.prompt, tuple) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        prompts: Sequence[Any] = self.prompt if several else (self.prompt,)
        if len(prompts) > MOST_PROMPTS or len(prompts) * self.n > MOST_PROMPTS:
            raise ConfigError("prompt", len(prompts), f"must be at most {MOST_PROMPTS} prompts, times n")
        if not all(isinstance(prompt, (str, tuple)) for prompt in prompts):
            raise ConfigError("prompt", self.prompt, "must be a text, a list of token ids, or a list of those")
        return prompts


F = TypeVar("F", bound=Fields)


def fields_of(kind: type[F], body: Mapping[str, Any], model: str) -> tuple[F, dict[str, Any]]:
    """A request's fields, and its options of sampling by our names.

    Raises:
        ConfigError: a field that is not known or wrong.
        ProblemError: the model is another one.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, accepted in WITHOUT_EFFECT.items():
        if name in given and not any(_same(given[name], value) for value in accepted):
            rule = f"must be {accepted[0]!r} or left out: this endpoint has nothing else"
            raise ConfigError(name, given[name], rule)
        given.pop(name, None)
    sampling = _sampling_options(given)
    fields = kind(**{name: value for name, value in given.items() if name not in SAMPLING})
    if fields.model != model:
        raise ProblemError(
            404, f"there is no model {fields.model!r:.200}, only {model!r}", param="model", code="model_not_found"
        )
    return fields, sampling


def _same(given: Any, value: Any) -> bool:
    return type(given) is type(value) and bool(given == value)


def _sampling_options(given: Mapping[str, Any]) -> dict[str, Any]:
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise ConfigError("max_tokens", given["max_tokens"], "cannot be given beside max_completion_tokens")
    options = {ours: given[theirs] for theirs, ours in SAMPLING.items() if theirs in given}
    if "logit_bias" in options:
        options["logit_bias"] = _biases(options["logit_bias"])
    return options


def _biases(given: Any) -> Any:
    """JSON's keys are texts, and these are token ids."""
    if not isinstance(given, dict):
        return given
    if not all(name.isascii() and name.isdecimal() and len(name) < 19 for name in given):
        raise ConfigError("logit_bias", given, "must have token ids as keys")
    return {int(name): value for name, value in given.items()}


def grammar_of(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """The option of sampling that makes the model answer in this format.

    Raises:
        ConfigError: there is no such format.
    """
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json_schema": schema}
    rule = 'must be of type "text", "json_object", or "json_schema" with a "json_schema": {"schema": {...}}'
    raise ConfigError("response_format", response_format, rule)


def sampling_of(options: Mapping[str, Any], most_tokens: int) -> Sampling:
    """The sampling that a request asks for; ``most_tokens`` where it does not say how many.

    Raises:
        ConfigError: an option is wrong.
    """
    return Sampling(**{"max_new_tokens": most_tokens, **options})
