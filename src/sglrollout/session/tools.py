"""Tools: functions that a model may call, described to it, checked, and run with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import anyio
import pydantic
import pydantic_core

from sglrollout.concurrency import in_parallel
from sglrollout.errors import ConfigError, in_words
from sglrollout.text import is_unicode
from sglrollout.threads import CallTimeoutError, StuckThreadsError, is_async, tool_workers
from sglrollout.types import Message

_log = logging.getLogger("sglrollout.session")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: as the model calls it: letters, digits, ``_`` and ``-``, at most 64.
        description: what it does, for the model.
        parameters: JSON schema of its arguments, an object.
        call: takes them by name. A plain function runs on a thread, an ``async`` one is awaited. A text it returns goes
            to the model as it is, anything else as JSON.

    Raises:
        ConfigError: the name or the schema is none.
    """

    name: str
    description: str
    parameters: Mapping[str, object] = field(repr=False)
    call: Callable[..., Any] = field(repr=False)
    _check: Callable[[dict[str, Any]], dict[str, Any]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError("tools.name", self.name, "must be 1 to 64 letters, digits, _ and -")
        if not isinstance(self.description, str):
            raise ConfigError(f"tools.{self.name}.description", self.description, "must be a text")
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type") != "object":
            rule = 'must be a JSON schema of an object: {"type": "object", "properties": {...}}'
            raise ConfigError(f"tools.{self.name}.parameters", self.parameters, rule)
        try:
            json.dumps(self.parameters, allow_nan=False)
        except (TypeError, ValueError) as error:
            rule = f"must be made of JSON values alone ({error})"
            raise ConfigError(f"tools.{self.name}.parameters", self.parameters, rule) from None
        if not callable(self.call):
            raise ConfigError(f"tools.{self.name}.call", self.call, "must be a function")

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        """A tool from a function: its name, the first paragraph of its docstring, its parameters' annotations.

        Arguments are checked against the annotations, and become what they say, before the function is called.

        Raises:
            ConfigError: a parameter without an annotation, or one that a JSON object cannot give by name.
        """
        name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", None)
        if not callable(function) or name is None:
            raise ConfigError("tools", function, "must be functions with a name, or sglrollout.Tool")
        model, names = _arguments_model(function, f"tools.{name}")
        schema = model.model_json_schema()
        for part in (schema, *schema["properties"].values()):
            part.pop("title", None)

        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            checked = model.model_validate(arguments)
            return {name: getattr(checked, key) for key, name in names.items() if key in checked.model_fields_set}

        described = re.split(r"\n\s*\n", inspect.getdoc(function) or "")[0]
        return cls(name, " ".join(described.split()), schema, function, check)

    @property
    def schema(self) -> dict[str, object]:
        """As chat templates and parsers take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them.

        Raises:
            ValueError: they are not what was declared.
        """
        try:
            return self._check(arguments) if self._check is not None else arguments
        except pydantic.ValidationError as error:
            wrong = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ValueError(f"wrong arguments: {'; '.join(wrong)}") from error


def _arguments_model(function: Callable[..., Any], field: str) -> tuple[type[pydantic.BaseModel], dict[str, str]]:
    """A model with a field per parameter, and which is whose: parameters may have names that a field may not."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(field, function, f"must have annotations that can be read ({error})") from error
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for i, (name, parameter) in enumerate(parameters.items()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{field}.{name}", str(parameter), "must be a parameter that can be given by name")
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"{field}.{name}", str(parameter), "must have a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        names[f"p{i}"] = name
        fields[f"p{i}"] = (parameter.annotation, pydantic.Field(default, alias=name))
    try:
        model = pydantic.create_model("Arguments", __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (pydantic.PydanticUserError, pydantic_core.SchemaError) as error:
        raise ConfigError(field, function, f"must have parameters of types that JSON can give ({error})") from error
    return model, names


def tools_of(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name; plain functions become tools.

    Raises:
        ConfigError: something that is none, or two of one name.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ConfigError("tools", tools, "must be a list of functions or sglrollout.Tool")
    found: dict[str, Tool] = {}
    for item in tools:
        tool = item if isinstance(item, Tool) else Tool.of(item)
        if tool.name in found:
            raise ConfigError("tools", tool.name, "must have a name each")
        found[tool.name] = tool
    return found


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made.

    Attributes:
        id: of this call, in its session: 9 letters and digits, as some templates ask for.
        name: of the tool, which may not exist.
        arguments: by name; ``None`` when what the model gave is not a JSON object.
        raw: the arguments as the model gave them.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str = field(default="", repr=False)

    @property
    def as_sent(self) -> dict[str, object]:
        """As a chat message's ``tool_calls`` hold it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments or {}}}


@dataclass(frozen=True)
class ToolResult:
    """What came of a call.

    Attributes:
        call: the call.
        content: what the model is told.
        error: why it failed, if it did: what the tool raised, ``ValueError`` for arguments that do not fit,
            ``LookupError`` for a tool that does not exist, ``TimeoutError``, ``RuntimeError`` where hundreds of
            blocking tools run on past their timeout.
        seconds: that it ran.
    """

    call: ToolCall
    content: str
    error: Exception | None = None
    seconds: float = 0.0

    @property
    def message(self) -> Message:
        """For the model: ``{"role": "tool", ...}``."""
        return {"role": "tool", "tool_call_id": self.call.id, "name": self.call.name, "content": self.content}


async def run_tools(calls: Sequence[ToolCall], tools: Mapping[str, Tool], timeout_s: float) -> list[ToolResult]:
    """Run all calls at once; results in the order of the calls. Whatever fails in them is a result.

    Args:
        timeout_s: for each call, from when it runs. A blocking one is then left to itself on its thread.
    """
    results: dict[int, ToolResult] = {}

    async def run(i: int, call: ToolCall) -> None:
        results[i] = await _run(call, tools, timeout_s)

    await in_parallel(partial(run, i, call) for i, call in enumerate(calls))
    return [results[i] for i in range(len(calls))]


async def _run(call: ToolCall, tools: Mapping[str, Tool], timeout_s: float) -> ToolResult:
    tool = tools.get(call.name)
    if tool is None:
        return _failed(call, LookupError(f"there is no tool {call.name!r}; there is {', '.join(tools) or 'none'}"))
    if call.arguments is None:
        return _failed(call, ValueError(f"the arguments are not a JSON object: {call.raw}"))
    try:
        function = partial(tool.call, **tool.checked(call.arguments))
    except ValueError as error:
        return _failed(call, error)
    except Exception as error:  # of a validator of the tool's own
        return _failed(call, error, words=in_words(error))
    return await _timed(call, function, is_async(tool.call), timeout_s)


async def _timed(call: ToolCall, function: Callable[[], Any], asynchronous: bool, timeout_s: float) -> ToolResult:
    begun = time.monotonic()

    def on_thread() -> Any:
        nonlocal begun
        begun = time.monotonic()
        return function()

    try:
        value = function() if asynchronous else await tool_workers().call(on_thread, timeout_s)
        if inspect.isawaitable(value):
            with anyio.move_on_after(timeout_s) as scope:
                value = await value
            if scope.cancelled_caught:
                raise CallTimeoutError(f"it did not finish within {timeout_s:g} s")
        return ToolResult(call, _as_text(value), None, time.monotonic() - begun)
    except CallTimeoutError as error:
        return _failed(call, TimeoutError(str(error)), time.monotonic() - begun)
    except StuckThreadsError as error:
        return _failed(call, error, time.monotonic() - begun)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        failure: Exception = RuntimeError("it awaited something that was cancelled")  # nobody cancelled this call
        return _failed(call, failure, time.monotonic() - begun)
    except (Exception, SystemExit) as error:  # code that a model wrote may well call exit()
        _log.debug("the tool %s failed with %s", call.name, type(error).__name__)
        failure = error if isinstance(error, Exception) else RuntimeError(f"it called exit({error.code!r})")
        return _failed(call, failure, time.monotonic() - begun, in_words(failure))


def _failed(call: ToolCall, error: Exception, seconds: float = 0.0, words: str | None = None) -> ToolResult:
    return ToolResult(call, _unicode(f"error: {words or error}"), error, seconds)


def _as_text(value: Any) -> str:
    return _unicode(value) if isinstance(value, str) else pydantic_core.to_json(value).decode()


def _unicode(text: str) -> str:
    """Without lone surrogates, which files and processes bring, and no tokenizer takes."""
    return text if is_unicode(text) else text.encode(errors="replace").decode()
