"""Groups and completions as JSON, and back."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.collect.records import (
    completion_from_record,
    completion_to_record,
    group_from_record,
    group_to_record,
    json_value,
    read_folder,
    write_folder,
)
from sglrollout.errors import ConfigError, EngineDiedError, LifecycleError, RequestTimeoutError, RolloutError
from sglrollout.types import Completion, Group, Message, Timings, VersionSpan

quick = settings(deadline=None, max_examples=60)

NUMBERS = st.integers() | st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SECONDS = st.floats(0, 1e4)
SPANS = st.builds(VersionSpan, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    token_ids = draw(st.lists(st.integers(0, 2**31), max_size=4).map(tuple))
    size = len(token_ids)
    return Completion(
        prompt_ids=draw(st.lists(st.integers(0, 2**31), max_size=4).map(tuple)),
        token_ids=token_ids,
        logprobs=draw(st.none() | st.tuples(*[st.floats(allow_nan=False, max_value=0)] * size)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "error"])),
        stop_match=draw(st.none() | st.text() | st.integers(0)),
        weight_versions=draw(st.lists(SPANS, max_size=3).map(tuple)),
        cached_tokens=draw(st.integers(0, 99)),
        engine=draw(st.text()),
        timings=draw(st.none() | st.builds(Timings, SECONDS, st.none() | SECONDS, SECONDS)),
        index=draw(st.integers(0, 9)),
        loss_mask=draw(st.none() | st.tuples(*[st.integers(0, 1)] * size)),
    )


GROUPS = st.builds(
    Group,
    prompt=st.text() | st.lists(st.integers(0, 99)) | st.just([{"role": "user", "content": "hi"}]),
    prompt_ids=st.lists(st.integers(0, 99), max_size=4).map(tuple),
    completions=st.lists(completions(), max_size=3).map(tuple),
    index=st.integers(0),
    data=JSON,
    rewards=st.none() | st.lists(st.none() | st.floats(allow_nan=False), max_size=3).map(tuple),
)


def completion(**changes: Any) -> Completion:
    return dataclasses.replace(Completion((1,), (2, 3), (-0.5, -1.0), "stop"), **changes)


def through_json(record: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(record))
    return read


# ------------------------------------------------------------ records


@quick
@given(GROUPS)
def test_a_group_comes_back_from_json_as_it_was(group: Group) -> None:
    assert group_from_record(through_json(group_to_record(group))) == group


@quick
@given(completions())
def test_a_completion_comes_back_from_json_as_it_was(given_one: Completion) -> None:
    assert completion_from_record(through_json(completion_to_record(given_one))) == given_one


def test_every_field_is_in_the_record() -> None:
    fields = {field.name for field in dataclasses.fields(Completion)} - {"_detokenize"}
    assert set(completion_to_record(completion())) == fields
    group = Group("p", (1,), (completion(),))
    assert set(group_to_record(group)) == {field.name for field in dataclasses.fields(Group)}


def test_logprobs_that_are_no_numbers_survive() -> None:
    odd = completion(logprobs=(math.nan, -math.inf))
    first, second = completion_from_record(through_json(completion_to_record(odd))).logprobs or ()
    assert math.isnan(first)
    assert second == -math.inf


def test_the_text_is_kept_where_there_is_one() -> None:
    with_text = completion(_detokenize=lambda self: f"{len(self.token_ids)} tokens \ud800")
    record = through_json(completion_to_record(with_text))
    restored = completion_from_record(record)
    assert restored.text == with_text.text == "2 tokens \ud800"
    assert completion_to_record(restored) == record
    assert completion_to_record(pickle.loads(pickle.dumps(with_text))) == record


def test_a_completion_without_a_tokenizer_still_has_no_text() -> None:
    record = completion_to_record(completion())
    assert "text" not in record
    with pytest.raises(LifecycleError, match="there is no tokenizer"):
        completion_from_record(record).text  # noqa: B018


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (EngineDiedError("engine-1", "out of memory"), "EngineDiedError: engine-1: out of memory"),
        (RequestTimeoutError("too late"), "RequestTimeoutError: too late"),
        (ZeroDivisionError(), "ZeroDivisionError: "),
        (RolloutError("it broke"), "it broke"),
    ],
)
def test_an_error_comes_back_as_a_message_that_stays_the_same(error: Exception, shown: str) -> None:
    restored = completion(finish_reason="error", error=error)
    for _ in range(3):
        restored = completion_from_record(through_json(completion_to_record(restored)))
        assert type(restored.error) is RolloutError
        assert str(restored.error) == shown


def test_messages_and_tuples_come_back_as_lists() -> None:
    messages: list[Message] = [{"role": "user", "content": "hi"}]
    group = Group(tuple(messages), (1,), (), data=("a", ("b", 1)))
    restored = group_from_record(through_json(group_to_record(group)))
    assert restored.prompt == messages
    assert restored.data == ["a", ["b", 1]]


def test_a_record_does_not_change_with_what_it_was_made_of() -> None:
    data = {"answers": ["a"]}
    record = group_to_record(Group("p", (1,), (), data=data))
    data["answers"].append("b")
    assert record["data"] == {"answers": ["a"]}


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", {1: "one"}, [{"deep": object()}], torch.zeros(2), Path(), 1j])
def test_what_is_not_json_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="data must be made of JSON values to be saved"):
        group_to_record(Group("p", (1,), (), data=value))
    with pytest.raises(ConfigError, match="prompt must be made of JSON values to be saved"):
        group_to_record(Group([{"role": "user", "content": value}], (1,), ()))


def test_the_part_that_is_not_json_is_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        json_value({"rows": [1, {"image": b"png"}]}, "data")
    assert (caught.value.field, caught.value.value) == ("data", b"png")


def test_what_contains_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="data must not contain itself"):
        json_value(ITSELF, "data")


@pytest.mark.parametrize("change", [{"token_ids": [1]}, {"token_ids": 3}, {"weight_versions": [[1]]}, {"error": "x"}])
def test_a_wrong_record_is_refused(change: dict[str, Any]) -> None:
    record = {**completion_to_record(completion()), **change}
    with pytest.raises(ConfigError, match="record must be what completion_to_record gives"):
        completion_from_record(record)
    group = {**group_to_record(Group("p", (1,), ())), "completions": [record]}
    with pytest.raises(ConfigError, match="record must be what group_to_record gives"):
        group_from_record(group)


def test_a_field_that_a_record_lacks_is_named() -> None:
    record = completion_to_record(completion())
    del record["finish_reason"]
    with pytest.raises(ConfigError, match="and has no 'finish_reason'"):
        completion_from_record(record)


# ------------------------------------------------------------ folders


@settings(deadline=None, max_examples=20)
@given(st.lists(GROUPS, max_size=3))
def test_a_folder_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, groups: list[Group]) -> None:
    folder = tmp_path_factory.mktemp("folders") / "one"
    write_folder(folder, groups, {"numbers": torch.arange(3)}, {"note": "\u2028 any"})
    read, tensors, metadata = read_folder(folder)
    assert list(read) == groups
    assert [(name, tensor.tolist()) for name, tensor in tensors.items()] == [("numbers", [0, 1, 2])]
    assert metadata["note"] == "\u2028 any"


def test_a_folder_that_is_no_batch_is_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"folder must hold batch\.safetensors and groups\.jsonl"):
            read_folder(wrong)
