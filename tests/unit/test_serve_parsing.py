"""Finding tool calls for the endpoint, when a parser hangs or a host does not answer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest

import sglrollout as sr
from sglrollout.engine import tool_calls
from sglrollout.session import parsing
from sglrollout.session.parsing import MOST_DEPTH, ToolParser, is_shallow, json_of
from sglrollout.testing import ScriptedEngine
from sglrollout.testing.tool_calls import parse_tool_calls as parse_without_sglang

pytestmark = pytest.mark.timeout(30)

A_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


# ------------------------------------------------------------ hosts


@asynccontextmanager
async def parser_over(*engines: ScriptedEngine) -> AsyncIterator[ToolParser]:
    """A parser whose calls are found in these engines' hosts."""
    config = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
    async with sr.AsyncRolloutEngine(config=config, engines=[*engines]) as rollout:
        yield ToolParser((await rollout._until_ready()).sampler.pool, "hermes", "", [])


def silent(command: str) -> str | None:
    return "TimeoutError: " if command == "parse_tool_calls" else None


async def test_a_host_that_does_not_answer_is_passed_over() -> None:
    first, second = ScriptedEngine("engine-0", fail_command=silent), ScriptedEngine("engine-1")
    async with parser_over(first, second) as parser:
        _, (call,) = await parser.parse(A_CALL, "engine-0", 0)
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert "parse_tool_calls" in first.commands


async def test_a_text_that_hosts_hang_on_is_not_given_to_all_of_them() -> None:
    engines = [ScriptedEngine(f"engine-{i}", fail_command=silent) for i in range(5)]
    async with parser_over(*engines) as parser:
        with pytest.raises(sr.EngineRequestError, match="parse_tool_calls failed"):
            await parser.parse(A_CALL, "engine-3", 0)
    assert sum("parse_tool_calls" in engine.commands for engine in engines) == 2
    assert "parse_tool_calls" in engines[3].commands


async def test_a_function_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "PARSE_S", 0.05)
    go_on = threading.Event()

    def hang(text: str) -> Any:
        go_on.wait(20)

    async with parser_over(ScriptedEngine()) as named:
        try:
            with pytest.raises(sr.ConfigError, match=r"tool_parser must answer within 0.05 s"):
                await ToolParser(named._pool, hang, "", []).parse("", "", 0)
        finally:
            go_on.set()


async def test_what_a_function_raises_is_raised() -> None:
    def fail(text: str) -> Any:
        raise TimeoutError("of its own")

    async with parser_over(ScriptedEngine()) as named:
        with pytest.raises(TimeoutError, match="of its own"):
            await ToolParser(named._pool, fail, "", []).parse("", "", 0)


async def test_arguments_of_a_function_that_are_nested_too_deeply_are_none() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    async with parser_over(ScriptedEngine()) as named:
        parser = ToolParser(named._pool, lambda text: ("", [("add", deep), ("add", {"a": 1})]), "", [])
        _, calls = await parser.parse("", "", 0)
    assert [call.arguments for call in calls] == [None, {"a": 1}]


# ------------------------------------------------------------ in a host


@pytest.fixture
def parse_text(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[str], tuple[str, list[Any]]]]:
    """SGLang with one parser, which is the function that a test puts in here."""
    functions: list[Callable[[str], tuple[str, list[Any]]]] = []

    class Parser:
        ToolCallParserEnum = MappingProxyType({"hermes": None})

        def __init__(self, tools: Any, parser: str, tokenizer: Any) -> None:
            pass

        def parse_non_stream(self, text: str) -> tuple[str, list[Any]]:
            return functions[0](text)

    envs = SimpleNamespace(SGLANG_FORWARD_UNKNOWN_TOOLS=SimpleNamespace(default=False))
    for name, contents in (
        ("entrypoints.openai.protocol", {"Tool": dict}),
        ("environ", {"envs": envs}),
        ("function_call.function_call_parser", {"FunctionCallParser": Parser}),
    ):
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(contents)
        parts = module.__name__.split(".")
        for i in range(1, len(parts)):
            package = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return functions


def test_a_parser_that_hangs_keeps_no_other_from_parsing(parse_text: list[Any]) -> None:
    go_on = threading.Event()

    def parse(text: str) -> tuple[str, list[Any]]:
        if text == "hang":
            go_on.wait(20)
        return "", [SimpleNamespace(name="add", parameters="{}")]

    parse_text.append(parse)
    try:
        with ThreadPoolExecutor(8) as threads:  # as many as a host has, and more texts that hang
            hanging = [threads.submit(tool_calls.parse_tool_calls, "hang", [], "hermes", None, 0.5) for _ in range(7)]
            begun = time.monotonic()
            assert tool_calls.parse_tool_calls("fine", [], "hermes", None, 0.5)["calls"] == [["add", "{}"]]
            assert time.monotonic() - begun < 0.4
            for future in hanging:
                with pytest.raises(TimeoutError, match=r"parser hermes did not end within 0.5 s"):
                    future.result()
    finally:
        go_on.set()


def test_a_text_that_a_parser_fails_on_is_all_content(parse_text: list[Any]) -> None:
    def fail(text: str) -> Any:
        raise KeyError(text)

    parse_text.append(fail)
    answer = tool_calls.parse_tool_calls("text", [], "hermes", None, 0.5)
    assert answer == {"content": "text", "calls": []}


@pytest.mark.parametrize("call", ["{" * 100_000, '{"a":' * 100_000, "[" * 100_000])
def test_a_text_that_an_engine_without_sglang_fails_on_is_all_content(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert parse_without_sglang(text, [], "hermes") == {"content": text, "calls": []}


# ------------------------------------------------------------ JSON


@pytest.mark.parametrize(("before", "after"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_json_is_parsed_up_to_a_depth(before: str, after: str) -> None:
    each = len(before.replace('"a":', ""))
    fitting = before * (MOST_DEPTH // each) + "1" * (before[-1] == ":") + after * (MOST_DEPTH // each)
    assert is_shallow(json_of(fitting))
    for depth in (MOST_DEPTH // each + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            json_of(before * depth + "1" + after * depth)


def test_json_that_is_wide_is_parsed() -> None:
    assert len(json_of("[" + "[1]," * 10_000 + "[]]")) == 10_001
