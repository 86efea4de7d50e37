"""Tools: how they are described, checked and run; and how calls are found."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import anyio
import pydantic
import pytest

import sglrollout as sr
from sglrollout.session import tools as tools_module
from sglrollout.session.parsing import ToolParser, suggested
from sglrollout.session.tools import Tool, ToolCall, ToolResult, run_tools, tools_of
from sglrollout.threads import StuckThreadsError, Worker, Workers, tool_workers

pytestmark = pytest.mark.timeout(30)

OBJECT = {"type": "object", "properties": {}}


def call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(f"call{number:05d}", name, arguments)


async def result(function: Any, timeout_s: float = 5.0, **arguments: Any) -> ToolResult:
    tool = function if isinstance(function, Tool) else Tool.of(function)
    (found,) = await run_tools([call(tool.name, **arguments)], {tool.name: tool}, timeout_s)
    return found


def add(a: int, b: int = 2) -> int:
    """Add two
    numbers.

    The second paragraph is for people.
    """
    return a + b


# ------------------------------------------------------------ what a function says of itself


def test_a_tool_is_described_by_its_name_docstring_and_annotations() -> None:
    tool = Tool.of(add)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


def test_annotations_may_describe_and_bound_a_parameter() -> None:
    def search(
        query: Annotated[str, pydantic.Field(description="What to look for.", max_length=5)],
        order: Literal["new", "old"] = "new",
        schema: list[int] | None = None,
        _limit: int = 3,
    ) -> str:
        return query

    properties: Any = Tool.of(search).parameters["properties"]
    assert properties["query"] == {"type": "string", "description": "What to look for.", "maxLength": 5}
    assert properties["order"]["enum"] == ["new", "old"]
    assert set(properties) == {"query", "order", "schema", "_limit"}


async def test_parameters_of_any_name_reach_the_function() -> None:
    def names(json: str, copy: int, _private: int = 1, model_config: int = 2) -> list[Any]:
        return [json, copy, _private, model_config]

    assert (await result(names, json="x", copy=2, _private=5)).content == '["x",2,5,2]'


def test_methods_partials_and_callable_objects_are_tools() -> None:
    class Calculator:
        def add(self, a: int) -> int:
            return a

    assert Tool.of(Calculator().add).name == "add"
    partial = Tool.of(functools.partial(add, b=5))
    assert partial.name == "add"


def no_annotation(a, b: int):  # type: ignore[no-untyped-def]
    return a


def many(*values: int) -> None: ...


def by_place(a: int, /) -> None: ...


def unknown(a: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def strange(a: threading.Lock) -> None: ...


@pytest.mark.parametrize(
    ("function", "field", "rule"),
    [
        (no_annotation, "tools.no_annotation.a", "must have a type annotation"),
        (many, "tools.many.values", "must be a parameter that can be given by name"),
        (by_place, "tools.by_place.a", "must be a parameter that can be given by name"),
        (unknown, "tools.unknown", "must have annotations that can be read"),
        (strange, "tools.strange", "must have parameters of types that JSON can give"),
        (lambda: 1, "tools.name", "must be 1 to 64 letters"),
        (7, "tools", "must be functions with a name"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function: Any, field: str, rule: str) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        Tool.of(function)
    assert caught.value.field == field
    assert rule in caught.value.rule


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("a b", "", OBJECT, add), "tools.name"),
        (("a", None, OBJECT, add), "tools.a.description"),
        (("a", "", {"type": "string"}, add), "tools.a.parameters"),
        (("a", "", {"type": "object", "properties": {1, 2}}, add), "tools.a.parameters"),
        (("a", "", OBJECT, "add"), "tools.a.call"),
    ],
)
def test_a_tool_that_is_none_is_refused(arguments: Any, field: str) -> None:
    with pytest.raises(sr.ConfigError) as caught:
        Tool(*arguments)
    assert caught.value.field == field


def test_tools_have_a_name_each() -> None:
    assert list(tools_of([add, Tool("other", "", OBJECT, add)])) == ["add", "other"]
    with pytest.raises(sr.ConfigError, match="must have a name each"):
        tools_of([add, Tool("add", "", OBJECT, add)])
    with pytest.raises(sr.ConfigError, match="must be a list of functions"):
        tools_of(add)  # type: ignore[arg-type]


# ------------------------------------------------------------ what the model is told


@dataclass
class Point:
    x: int


async def test_a_text_is_given_as_it_is_and_anything_else_as_json() -> None:
    async def give(kind: str) -> Any:
        return {"text": 'say "é"', "none": None, "data": {"a": [1, 2.5]}, "point": Point(1)}[kind]

    contents = [(await result(give, kind=kind)).content for kind in ("text", "none", "data", "point")]
    assert contents == ['say "é"', "null", '{"a":[1,2.5]}', '{"x":1}']


async def test_a_text_with_lone_surrogates_is_made_unicode() -> None:
    def read() -> str:
        return "a\udcffb"

    assert (await result(read)).content == "a?b"


async def test_arguments_become_what_was_declared() -> None:
    def twice(a: float, b: Point) -> Any:
        return [a * 2, type(b).__name__, b.x]

    assert (await result(twice, a="1.5", b={"x": "3"})).content == '[3.0,"Point",3]'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a": "one"}, "error: wrong arguments: a: Input should be a valid integer"),
        ({}, "error: wrong arguments: a: Field required"),
        ({"a": 1, "c": 2}, "error: wrong arguments: c: Extra inputs are not permitted"),
    ],
)
async def test_wrong_arguments_are_told_to_the_model(arguments: Any, words: str) -> None:
    found = await result(add, **arguments)
    assert found.content.startswith(words)
    assert isinstance(found.error, ValueError)


async def test_what_cannot_be_called_is_told_to_the_model() -> None:
    unknown = call("subtract")
    no_object = ToolCall("call00001", "add", None, "[1, 2]")
    found = await run_tools([unknown, no_object], tools_of([add]), 5)
    assert [r.content for r in found] == [
        "error: there is no tool 'subtract'; there is add",
        "error: the arguments are not a JSON object: [1, 2]",
    ]
    assert [type(r.error) for r in found] == [LookupError, ValueError]


async def test_an_exception_is_told_to_the_model_and_kept() -> None:
    def divide() -> float:
        return 1 / 0

    async def look() -> Any:
        raise KeyError("x")

    def leave() -> None:
        sys.exit(3)

    def odd() -> Any:
        return object()

    def stop() -> None:
        next(iter(()))

    found = [await result(function) for function in (divide, look, leave, odd, stop)]
    assert [r.content for r in found[:3]] == [
        "error: ZeroDivisionError: division by zero",
        "error: KeyError: 'x'",
        "error: RuntimeError: it called exit(3)",
    ]
    assert found[3].content.startswith("error: PydanticSerializationError: Unable to serialize unknown type")
    assert isinstance(found[0].error, ZeroDivisionError)
    assert found[4].error is not None
    assert isinstance(found[4].error.__cause__, StopIteration)


async def test_a_tool_that_awaits_something_cancelled_fails_alone() -> None:
    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    found = await run_tools([call("wait"), call("add", a=1)], tools_of([wait, add]), 5)
    assert [r.content for r in found] == ["error: it awaited something that was cancelled", "3"]


def test_a_result_is_a_message() -> None:
    assert ToolResult(call("add", 7, a=1), "3").message == {
        "role": "tool",
        "tool_call_id": "call00007",
        "name": "add",
        "content": "3",
    }


# ------------------------------------------------------------ at once, and in time


async def test_all_calls_run_at_once_and_results_keep_their_order() -> None:
    arrived = threading.Barrier(3)

    def wait(i: int) -> int:
        arrived.wait(5)
        time.sleep(0.05 * (3 - i))
        return i

    found = await run_tools([call("wait", i, i=i) for i in range(3)], tools_of([wait]), 5)
    assert [r.content for r in found] == ["0", "1", "2"]
    assert found[0].seconds > found[2].seconds > 0


async def test_a_tool_that_takes_too_long_is_left_behind() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(20)

    async def sleep() -> None:
        await anyio.sleep(20)

    begun = time.monotonic()
    found = await run_tools([call("hang"), call("sleep"), call("add", a=1)], tools_of([hang, sleep, add]), 0.05)
    release.set()
    assert time.monotonic() - begun < 5
    assert [r.content for r in found] == ["error: it did not finish within 0.05 s"] * 2 + ["3"]
    assert [type(r.error) for r in found] == [TimeoutError, TimeoutError, type(None)]


async def test_cancellation_is_not_swallowed() -> None:
    begun = anyio.Event()

    async def sleep() -> None:
        begun.set()
        await anyio.sleep(20)

    with anyio.move_on_after(5) as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_tools, [call("sleep")], tools_of([sleep]), 10)
            await begun.wait()
            tasks.cancel_scope.cancel()
    assert not scope.cancelled_caught
    task = asyncio.ensure_future(run_tools([call("sleep")], tools_of([sleep]), 10))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_time_that_a_tool_waits_for_a_thread_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(1)
    monkeypatch.setattr(tools_module, "tool_workers", lambda: workers)

    def sleep() -> None:
        time.sleep(0.1)

    found = await run_tools([call("sleep", i) for i in range(4)], tools_of([sleep]), 0.3)
    assert [r.error for r in found] == [None] * 4
    assert tool_workers() is tool_workers()


async def test_tools_that_hang_take_no_more_than_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, release = Workers(1), threading.Event()
    monkeypatch.setattr(tools_module, "tool_workers", lambda: workers)

    def hang() -> None:
        release.wait(20)

    before = threading.active_count()
    found = await run_tools([call("hang", i) for i in range(9)], tools_of([hang]), 0.01)
    assert threading.active_count() - before == 4
    assert [type(r.error) for r in found[4:]] == [StuckThreadsError] * 5
    assert "run on past their timeout" in found[-1].content
    release.set()
    while threading.active_count() > before:
        await anyio.sleep(0.01)
    assert (await run_tools([call("hang")], tools_of([hang]), 5))[0].error is None
    while threading.active_count() > before:
        await anyio.sleep(0.01)


async def test_a_call_for_which_no_thread_could_be_started_is_not_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(6):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await workers.call(int, 1.0)
    assert workers.num_stuck == 0
    assert await workers.call(int, 1.0) == 0


async def test_threads_end_though_a_call_hangs() -> None:
    workers, release, before = Workers(8), threading.Event(), threading.active_count()
    hanging = asyncio.ensure_future(workers.call(lambda: release.wait(20), 0.2))
    await asyncio.gather(*(workers.call(lambda: time.sleep(0.05), 5.0) for _ in range(5)))
    with pytest.raises(TimeoutError):
        await hanging
    with anyio.fail_after(2):
        while threading.active_count() > before + 1:
            await anyio.sleep(0.01)
    release.set()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_exception_that_cannot_say_what_it_is_becomes_a_result_like_any_other(asynchronous: bool) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("nothing to say")

    def fail() -> None:
        raise MuteError

    async def fail_later() -> None:
        raise MuteError

    found = await result(fail_later if asynchronous else fail)
    assert found.content == "error: MuteError"
    assert isinstance(found.error, MuteError)


def test_a_tool_that_hangs_does_not_keep_a_script_from_exiting() -> None:
    code = """
import time, anyio
from sglrollout.session.tools import ToolCall, run_tools, tools_of
def hang() -> None:
    time.sleep(60)
print(anyio.run(run_tools, [ToolCall("call00000", "hang", {})], tools_of([hang]), 0.05)[0].content)
"""
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ended.stdout, ended.returncode) == ("error: it did not finish within 0.05 s\n", 0), ended.stderr
    assert time.monotonic() - begun < 20


async def test_a_worker_makes_all_its_calls_on_one_thread() -> None:
    worker = Worker()
    connection: sqlite3.Connection = await worker.call(lambda: sqlite3.connect(":memory:"))
    assert await worker.call(lambda: connection.execute("select 1").fetchone()) == (1,)  # another thread may not
    await worker.call(connection.close)
    worker.end()


# ------------------------------------------------------------ which parser


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("...<tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes"),
        ("...<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("...<tool_call>{{ name }}\n<arg_key>", "glm45"),
        ("...<|python_tag|>{{ call }}", "llama3"),
        ("...[TOOL_CALLS]{{ calls | tojson }}", "mistral"),
    ],
)
def test_the_chat_template_gives_away_the_parser(template: str, parser: str) -> None:
    assert suggested(template) == parser


def test_a_template_that_gives_nothing_away_asks_for_a_parser() -> None:
    with pytest.raises(sr.ConfigError, match="tool_parser must be given"):
        suggested("{{ messages }}")


async def test_a_parser_that_does_not_suit_the_model_is_refused_with_its_reason() -> None:
    class Pool:
        """Of one engine, whose host refuses."""

        serving, name = True, "engine-0"

        def __init__(self) -> None:
            self.members, self.engine = [self], self

        async def until(self, condition: Any) -> None:
            assert condition()

        async def command(self, name: str, timeout_s: float, **arguments: Any) -> dict[str, str]:
            return {"refused": "ValueError: response_template is required"}

    pool: Any = Pool()
    with pytest.raises(sr.ConfigError, match=r"for this model .*response_template is required") as caught:
        await ToolParser(pool, "response_template", "", []).check()
    assert caught.value.field == "tool_parser"
