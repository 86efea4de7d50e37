"""Tool calls in a model's text, by SGLang's parsers.  Runs in the host, where SGLang may be imported."""

from __future__ import annotations

import logging
import threading
from typing import Any

_log = logging.getLogger("sglrollout.engine")


def parse_tool_calls(
    text: str, tools: list[dict[str, Any]], parser: str, tokenizer: Any, timeout_s: float
) -> dict[str, Any]:
    """Find the calls in a text.

    Args:
        text: special tokens included.
        tools: OpenAI's schemas: ``{"type": "function", "function": {"name": ..., "parameters": ...}}``.
        parser: SGLang's name of a parser.
        tokenizer: for parsers that need it.
        timeout_s: for the parser.

    Returns:
        ``content``, the text without calls, and ``calls``: each call's name, known or not, and its arguments as JSON
        text. A text without a call that the parser understands is all content. Only ``known``, the names of all
        parsers, when there is no such parser; only ``refused`` when it does not suit this model, with why.

    Raises:
        TimeoutError: the parser takes longer.
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
    # SGLang drops calls of tools that do not exist unless it is told not to, and the model would never hear of it. Its
    # override() would be in os.environ, which all threads share: with isolation="thread" with the user's.
    envs.SGLANG_FORWARD_UNKNOWN_TOOLS.default = True
    content, calls = _parsed(found, parser, text, timeout_s)
    if not calls:
        return {"content": text, "calls": []}
    return {"content": content, "calls": [[call.name or "", call.parameters] for call in calls]}


def _parsed(found: Any, parser: str, text: str, timeout_s: float) -> tuple[str, list[Any]]:
    """What a parser finds. One that hangs keeps a thread of its own: the host has few, and ends once they are done."""
    answer: list[tuple[str, list[Any]]] = []

    def parse() -> None:
        try:
            answer.append(found.parse_non_stream(text))
        except Exception as error:  # of what a model may write, no parser has seen all
            _log.debug("SGLang's parser %s failed with %s", parser, type(error).__name__)
            answer.append((text, []))

    thread = threading.Thread(target=parse, name=f"parser-{parser}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answer:
        raise TimeoutError(f"SGLang's parser {parser} did not end within {timeout_s:g} s")
    return answer[0]
