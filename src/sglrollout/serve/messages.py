"""Messages and tools as clients send them: in one form, for chat templates and for telling conversations apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sglrollout.errors import ConfigError
from sglrollout.session.parsing import json_of
from sglrollout.session.tools import Tool, ToolCall
from sglrollout.text import is_unicode
from sglrollout.types import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_EXTRAS = {"user": {"name"}, "system": {"name"}, "tool": {"name", "tool_call_id"}, "assistant": {"name", "tool_calls"}}


def plain_messages(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with a text each, and with the arguments of calls as mappings, as chat templates take them.

    What clients leave in a message without meaning anything by it (``refusal``, ``audio``, ``function_call``,
    ``annotations``: null or empty) is left out.

    Raises:
        ConfigError: there is something else in one, that the model would never see.
    """
    return [_plain(message, f"messages.{i}") for i, message in enumerate(given)]


def _plain(given: Mapping[str, Any], field: str) -> Message:
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise ConfigError(f"{field}.role", given.get("role"), f"must be one of {', '.join(_ROLES)}")
    filled = {name: value for name, value in given.items() if value is not None and value != []}
    message: Message = {"role": role, "content": _text(filled.get("content"), role, f"{field}.content")}
    for name in filled.keys() - {"role", "content"}:
        if name not in _EXTRAS[role]:
            raise ConfigError(f"{field}.{name}", filled[name], f"is not a field of {role} messages here")
        message[name] = _calls(filled[name], f"{field}.{name}") if name == "tool_calls" else filled[name]
        if name != "tool_calls" and not isinstance(filled[name], str):
            raise ConfigError(f"{field}.{name}", filled[name], "must be a text")
    return message


def _text(content: Any, role: str, field: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part["text"] for part in content)
    raise ConfigError(field, content, "must be a text, or a list of parts of type text")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _calls(given: Any, field: str) -> list[dict[str, object]]:
    calls: list[dict[str, object]] = []
    for call in given if isinstance(given, list) else [given]:
        match call:
            case {"id": str(number), "function": {"name": str(name), "arguments": str(arguments)}}:
                function = {"name": name, "arguments": _arguments(arguments)}
                calls.append({"id": number, "type": "function", "function": function})
            case _:
                rule = 'must be calls of functions: {"id": ..., "function": {"name": ..., "arguments": "..."}}'
                raise ConfigError(field, call, rule)
    return calls


def _arguments(text: str) -> object:
    try:
        arguments = json_of(text)
    except ValueError:
        return text
    fit = isinstance(arguments, dict) and is_unicode(json.dumps(arguments, ensure_ascii=False))
    return arguments if fit else text


def said(content: str, calls: Sequence[ToolCall]) -> Message:
    """What the model said, in the form in which a client that says it back is understood."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = _calls([sent_call(call) for call in calls], "")
    return message


def sent_call(call: ToolCall) -> dict[str, object]:
    """A call as a client gets it."""
    arguments = call.raw if call.arguments is None else json.dumps(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


# ------------------------------------------------------------ tools


def tools_given(given: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools that the client runs.

    Raises:
        ConfigError: something that is none.
    """
    return [_tool(tool, f"tools.{i}") for i, tool in enumerate(given)]


def _tool(given: Mapping[str, Any], field: str) -> Tool:
    function = given.get("function")
    if given.keys() != {"type", "function"} or given["type"] != "function" or not isinstance(function, dict):
        raise ConfigError(field, given, 'must be {"type": "function", "function": {"name": ..., ...}}')
    if unknown := function.keys() - {"name", "description", "parameters", "strict"}:
        raise ConfigError(f"{field}.function.{min(unknown)}", function[min(unknown)], "is not a field of functions")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(function.get("name"), function.get("description") or "", parameters, _run_elsewhere)  # type: ignore[arg-type]


def _run_elsewhere(**arguments: Any) -> NoReturn:
    raise AssertionError("tools of the endpoint's clients are run by them")


# ------------------------------------------------------------ keys


def keys_of(messages: Sequence[Message], tools: Sequence[Tool], template_options: Mapping[str, Any]) -> list[bytes]:
    """For each message a key of the conversation up to it: equal for equal messages, tools and options.

    White space around what the model said is not looked at: many an agent trims it.
    """
    key = _digest(b"", [[tool.schema for tool in tools], template_options])
    return [key := _digest(key, _told(message)) for message in messages]


def _told(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {**message, "content": str(message["content"]).strip()}


def _digest(before: bytes, value: object) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
