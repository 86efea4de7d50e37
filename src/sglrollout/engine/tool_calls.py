"""Tool calls in a model's text, by SGLang's parsers.  Runs in the host, where SGLang may be imported."""

from __future__ import annotations

import logging
import threading
from typing import Any

_log = logging.getLogger("sglrollout.engine")
_one_at_a_time = threading.Lock()


def parse_tool_calls(text: str, tools: list[dict[str, Any]], parser: str, tokenizer: Any) -> dict[str, Any]:
    """Find the calls in a text.

    Args:
        text: special tokens included.
        tools: OpenAI's schemas: ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
        parser: SGLang's name of a parser.
        tokenizer: for parsers that need it.

    Returns:
        ``content``, the text without calls, and ``calls``: each call's name, known or not, and its arguments as JSON
        text. A text without a call that the parser understands is all content. Only ``known``, the names of all
        parsers, when there is no such parser; only ``refused`` when it does not suit this model, with why.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.environ import envs
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    if parser not in FunctionCallParser.ToolCallParserEnum:
        return {"known": list(FunctionCallParser.ToolCallParserEnum)}
    try:
        found = FunctionCallParser([Tool(**tool) for tool in tools], parser, tokenizer=tokenizer)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    calls: list[Any] = []
    content = text
    # SGLang drops calls of tools that do not exist unless this is set, and the model would never hear of it. It lives
    # in os.environ: with isolation="thread" in that of the user.
    with _one_at_a_time, envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        try:
            content, calls = found.parse_non_stream(text)
        except Exception as error:  # of what a model may write, no parser has seen all
            _log.debug("SGLang's parser %s failed with %s", parser, type(error).__name__)
    if not calls:
        return {"content": text, "calls": []}
    return {"content": content, "calls": [[call.name or "", call.parameters] for call in calls]}
