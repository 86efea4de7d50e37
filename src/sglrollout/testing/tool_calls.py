"""Finding tool calls without SGLang, for engines that have none."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def parse_tool_calls(text: str, tools: list[dict[str, Any]], parser: str) -> dict[str, Any]:
    """The answer of an engine's host to ``parse_tool_calls``, for ``hermes``, which is the only parser here.

    A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. A text with a malformed one has no calls.
    """
    if parser != "hermes":
        return {"known": ["hermes"]}
    try:
        calls = [json.loads(call) for call in _CALL.findall(text)]
        found = [[str(call["name"]), json.dumps(call.get("arguments", {}))] for call in calls]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = []
    return {"content": text.partition("<tool_call>")[0].strip() if found else text, "calls": found}
