"""Finding tool calls in what the model said: by SGLang's parsers, in an engine's host, or by the user's function."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from sglrollout.errors import ConfigError, EngineDiedError, EngineRequestError, LifecycleError, NoEngineError
from sglrollout.pool.pool import Member, Pool
from sglrollout.session.tools import ToolCall
from sglrollout.threads import CallTimeoutError, tool_workers

UserParser: TypeAlias = Callable[[str], tuple[str, Sequence[tuple[str, Any]]]]
"""``(text) -> (content, calls)``: the text without its calls, and each call's name and arguments.

The text has special tokens in it, and ends before the token that ended it. Arguments are a mapping or its JSON text.
It is called on a thread, and has ``PARSE_S`` seconds.
"""

PARSE_S = 10.0
_MOST_HOSTS = 2
"""So many are waited for: a text that the parser of one hangs on may well be too much for all of them."""

_TOO_DEEP = "it is nested too deeply"
MOST_DEPTH = 100
"""Levels of JSON within which whatever walks it (encoders, templates, validators) does not run out of stack."""

_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("[TOOL_CALLS]", "mistral"),
)
"""What in a chat template gives away the format of its calls, and SGLang's name of the parser; first come."""


class ToolParser:
    """Finds calls of one session's tools.

    Args:
        pool: whose engines' hosts parse.
        given: SGLang's name of a parser, a function of the user's, or ``None`` for what the template suggests.
        template: the chat template; empty where there is none.
        schemas: of the tools.

    Raises:
        ConfigError: the template suggests none.
    """

    def __init__(
        self, pool: Pool, given: str | UserParser | None, template: str, schemas: Sequence[Mapping[str, object]]
    ) -> None:
        self._pool, self._schemas = pool, list(schemas)
        self._parser = given if given is not None else suggested(template)

    async def check(self) -> None:
        """Whether SGLang knows a parser of that name.

        Raises:
            ConfigError: it does not.
        """
        if isinstance(self._parser, str):
            await self._by_sglang("", self._parser, "")

    async def parse(self, text: str, engine: str, first: int) -> tuple[str | None, list[ToolCall]]:
        """The text without its calls, and the calls; ``None`` for the text when there are no calls in it.

        Args:
            text: special tokens included.
            engine: whose host is asked first.
            first: the number of the first call.

        Raises:
            ConfigError: the user's function gave something else, or nothing in time.
            EngineRequestError: hosts did not answer in time.
            NoEngineError: every engine is dead.
            LifecycleError: every engine died asleep.
        """
        if isinstance(self._parser, str):
            content, found = await self._by_sglang(text, self._parser, engine)
        else:
            content, found = await _by_user(text, self._parser)
        calls = [_call(first + i, name, given) for i, (name, given) in enumerate(found)]
        return (content, calls) if calls else (None, [])

    async def _by_sglang(self, text: str, parser: str, engine: str) -> tuple[str, list[tuple[str, Any]]]:
        pool, failures = self._pool, list[EngineRequestError]()
        await pool.until(lambda: pool.serving or not pool.restarting or not pool.has_its_memory)
        for member in _from(engine, pool.members):
            try:
                answer = await member.engine.command(
                    "parse_tool_calls", PARSE_S, text=text, tools=self._schemas, parser=parser
                )
            except EngineDiedError:
                continue
            except EngineRequestError as error:
                failures.append(error)
                if len(failures) == _MOST_HOSTS:
                    break
                continue
            if known := answer.get("known"):
                raise ConfigError("tool_parser", parser, _rule(parser, known))
            if refused := answer.get("refused"):
                raise ConfigError("tool_parser", parser, f"must be a parser for this model and these tools ({refused})")
            return answer["content"], [(name, arguments) for name, arguments in answer["calls"]]
        if failures:
            raise failures[-1]
        if pool.restarting and pool.has_its_memory:  # the last one died just now
            return await self._by_sglang(text, parser, engine)
        if pool.restarting:
            raise LifecycleError("tool calls are parsed in engines' hosts, and all died asleep: call wake() first")
        raise NoEngineError("every engine of the pool is dead, and tool calls are parsed in their hosts")


async def _by_user(text: str, parser: UserParser) -> tuple[str, list[tuple[str, Any]]]:
    """What a function of the user's finds, on a thread: a slow one would hold up all that the event loop does."""
    try:
        return _checked(await tool_workers().call(partial(parser, text), PARSE_S))
    except CallTimeoutError:
        raise ConfigError("tool_parser", parser, f"must answer within {PARSE_S:g} s") from None


def suggested(template: str) -> str:
    """SGLang's name of the parser for the calls that a chat template writes.

    Raises:
        ConfigError: it writes none that is known here.
    """
    for mark, parser in _MARKS:
        if mark in template:
            return parser
    rule = (
        "must be given: the chat template does not show how the model writes its calls. Name one of SGLang's parsers "
        '("hermes" for <tool_call>{"name": ..., "arguments": ...}</tool_call>), or give a function'
    )
    raise ConfigError("tool_parser", None, rule)


def _from(engine: str, members: Sequence[Member]) -> Iterator[Member]:
    """Those that can be asked, this one first."""
    return itertools.chain(
        (member for member in members if member.serving and member.name == engine),
        (member for member in members if member.serving and member.name != engine),
    )


def _checked(answer: Any) -> tuple[str, list[tuple[str, Any]]]:
    match answer:
        case (str(content), [*calls]) if all(_is_call(call) for call in calls):
            return content, calls
    rule = "must give (content, calls), the calls as (name, arguments), arguments a mapping or its JSON text"
    raise ConfigError("tool_parser", answer, rule)


def _is_call(call: Any) -> bool:
    return isinstance(call, tuple) and len(call) == 2 and isinstance(call[0], str) and isinstance(call[1], (str, dict))


def _call(number: int, name: str, given: str | dict[str, Any]) -> ToolCall:
    call_id = f"call{number:05d}"
    if isinstance(given, str):
        return ToolCall(call_id, name, _arguments(given), given)
    if not is_shallow(given):
        return ToolCall(call_id, name, None)
    return ToolCall(call_id, name, given, json.dumps(given, ensure_ascii=False, default=str))


def _arguments(text: str) -> dict[str, Any] | None:
    arguments: Any = text
    for _ in range(2):  # models do give JSON in a JSON text
        if isinstance(arguments, str):
            try:
                arguments = json_of(arguments)
            except ValueError:
                break
    return arguments if isinstance(arguments, dict) else None


def json_of(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not is_shallow(value):
        raise ValueError(_TOO_DEEP)
    return value


def is_shallow(value: Any) -> bool:
    """Whether JSON has at most :data:`MOST_DEPTH` levels."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, (list, dict))]
        if not level:
            return True
    return False


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _rule(parser: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(parser, known, 1)
    hint = f' (did you mean "{near[0]}"?)' if near else f": {', '.join(sorted(known))}"
    return f"must be a tool parser of the installed SGLang{hint}"
