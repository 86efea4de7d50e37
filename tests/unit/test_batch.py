"""Batches against what plain lists say of the same samples."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from sglrollout.collect.batch import Padding, RolloutBatch
from sglrollout.errors import ConfigError, EngineDiedError, LifecycleError
from sglrollout.types import Completion, FinishReason, Group, Timings, VersionSpan

quick = settings(deadline=None, max_examples=60)
PER_ROW = [
    "prompt_lengths",
    "generation_lengths",
    "unpadded_lengths",
    "truncated",
    "valid",
    "rewards",
    "group_index",
    "row_index",
]
PER_TOKEN = ["output_ids", "logprobs", "loss_mask", "weight_version"]
DTYPES = {
    "output_ids": torch.int64,
    "logprobs": torch.float32,
    "loss_mask": torch.float32,
    "weight_version": torch.int64,
    "prompt_lengths": torch.int64,
    "generation_lengths": torch.int64,
    "unpadded_lengths": torch.int64,
    "truncated": torch.bool,
    "valid": torch.bool,
    "rewards": torch.float32,
    "group_index": torch.int64,
    "row_index": torch.int64,
}

REASONS: st.SearchStrategy[FinishReason] = st.sampled_from(["stop", "stop", "length", "abort", "error"])

# ------------------------------------------------------------ samples


def sample(
    num_tokens: int = 3,
    *,
    prompt: tuple[int, ...] = (1, 2),
    version: int = 0,
    finish_reason: FinishReason = "stop",
    loss_mask: tuple[int, ...] | None = None,
    logprobs: bool = True,
) -> Completion:
    return Completion(
        prompt_ids=prompt,
        token_ids=tuple(range(10, 10 + num_tokens)),
        logprobs=tuple(-0.5 for _ in range(num_tokens)) if logprobs else None,
        finish_reason=finish_reason,
        weight_versions=(VersionSpan(version, 0, num_tokens),) if num_tokens else (),
        loss_mask=loss_mask,
    )


def group(*completions: Completion, index: int = 0, rewards: tuple[float | None, ...] | None = None) -> Group:
    numbered = tuple(dataclasses.replace(completion, index=i) for i, completion in enumerate(completions))
    return Group("a prompt", completions[0].prompt_ids, numbered, index, rewards=rewards)


def of_lengths(*lengths: int) -> RolloutBatch:
    """One group for each sample, whose rows have these lengths."""
    return RolloutBatch.from_groups(
        [group(sample(length - 1, prompt=(7,)), index=i) for i, length in enumerate(lengths)]
    )


def rewarded(*rewards: float | None, index: int = 0) -> Group:
    return group(*(sample() for _ in rewards), index=index, rewards=rewards)


@st.composite
def spans(draw: st.DrawFn, num_tokens: int) -> tuple[VersionSpan, ...]:
    """Spans that cover all tokens."""
    found, start, version = [], 0, draw(st.integers(0, 3))
    while start < num_tokens:
        end = draw(st.integers(start + 1, num_tokens))
        found.append(VersionSpan(version, start, end))
        start, version = end, version + draw(st.integers(1, 2))
    return tuple(found)


@st.composite
def completions(draw: st.DrawFn, prompt: tuple[int, ...], index: int) -> Completion:
    reason = draw(REASONS)
    token_ids = draw(st.lists(st.integers(1, 99), max_size=5).map(tuple))
    mask = draw(st.sampled_from([None, None, [draw(st.integers(0, 1)) for _ in token_ids]]))
    logprobs = [draw(st.floats(-30, 0, width=32)) * (mask is None or mask[i]) for i in range(len(token_ids))]
    unknown = draw(st.booleans()) and (reason == "error" or not token_ids)
    return Completion(
        prompt_ids=prompt,
        token_ids=token_ids,
        logprobs=None if unknown else tuple(logprobs),
        finish_reason=reason,
        weight_versions=draw(spans(len(token_ids))),
        index=index,
        timings=draw(st.sampled_from([None, Timings(0.5, None, 2.0)])),
        loss_mask=None if mask is None else tuple(mask),
    )


@st.composite
def some_groups(draw: st.DrawFn) -> list[Group]:
    found = []
    for index in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(1, 99), min_size=1, max_size=4).map(tuple))
        samples = tuple(draw(completions(prompt, i)) for i in range(draw(st.integers(1, 3))))
        reward = st.none() | st.floats(-8, 8, width=16)
        rewards = draw(st.none() | st.tuples(*(reward for _ in samples)))
        found.append(Group(list(prompt), prompt, samples, 10 + index, data={"answer": index}, rewards=rewards))
    return found


PADDINGS = st.builds(
    Padding, id=st.none() | st.integers(0, 5), side=st.sampled_from(["right", "left"]), multiple_of=st.integers(1, 9)
)
GROUPS = some_groups()


def rows_of(groups: list[Group]) -> list[tuple[Group, Completion, float | None]]:
    return [
        (of, completion, None if of.rewards is None else of.rewards[i])
        for of in groups
        for i, completion in enumerate(of.completions)
    ]


def valid(of: Group, completion: Completion, reward: float | None) -> bool:
    return completion.finish_reason != "error" and (of.rewards is None or reward is not None)


def text_of(batch: RolloutBatch, tensor: Any, row: int) -> list[Any]:
    """A row's values without its padding."""
    length, width = int(batch.unpadded_lengths[row]), batch.output_ids.shape[1]
    start = width - length if batch.padding.side == "left" else 0
    values: list[Any] = tensor[row, start : start + length].tolist()
    return values


def tensors(batch: RolloutBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in PER_TOKEN + PER_ROW}


def same(one: RolloutBatch, other: RolloutBatch) -> bool:
    pairs = zip(tensors(one).values(), tensors(other).values(), strict=True)
    return one.padding == other.padding and all(torch.equal(*pair) for pair in pairs)


# ------------------------------------------------------------ building


@quick
@given(GROUPS, PADDINGS)
def test_every_token_is_where_it_belongs_with_its_logprob_and_version(groups: list[Group], padding: Padding) -> None:
    batch = RolloutBatch.from_groups(groups, padding=padding, pad_id=3)
    rows = rows_of(groups)
    assert len(batch) == batch.batch_size == len(rows)
    for row, (of, completion, reward) in enumerate(rows):
        prompt, tokens = completion.prompt_ids, completion.token_ids
        sampled = completion.loss_mask or (1,) * len(tokens)
        versions = [span.version for span in completion.weight_versions for _ in range(span.start, span.end)]
        ok = valid(of, completion, reward)
        zeros = [0.0] * len(prompt)
        assert text_of(batch, batch.output_ids, row) == [*prompt, *tokens]
        assert text_of(batch, batch.logprobs, row) == zeros + list(completion.logprobs or (0.0,) * len(tokens))
        assert text_of(batch, batch.loss_mask, row) == zeros + [float(bit and ok) for bit in sampled]
        assert text_of(batch, batch.weight_version, row) == [-1] * len(prompt) + [
            version if bit else -1 for version, bit in zip(versions, sampled, strict=True)
        ]
        found = [getattr(batch, name)[row].item() for name in PER_ROW]
        lengths = [len(prompt), len(tokens), len(prompt) + len(tokens)]
        points = reward if ok and reward is not None else 0.0
        assert found == [*lengths, completion.finish_reason == "length", ok, points, of.index, row]


@quick
@given(GROUPS, PADDINGS)
def test_padding_holds_the_pad_id_and_nothing_else(groups: list[Group], padding: Padding) -> None:
    batch = RolloutBatch.from_groups(groups, padding=padding, pad_id=3)
    lengths = batch.unpadded_lengths
    width, longest = batch.output_ids.shape[1], int(lengths.max())
    assert width % padding.multiple_of == 0
    assert longest <= width < longest + padding.multiple_of
    assert batch.padding.id == (3 if padding.id is None else padding.id)
    off = ~batch.attention_mask
    assert torch.equal(batch.attention_mask.sum(dim=1), lengths)
    for name, blank in (("output_ids", batch.padding.id), ("logprobs", 0), ("loss_mask", 0), ("weight_version", -1)):
        assert (getattr(batch, name)[off] == blank).all()
    for row in range(len(batch)):
        assert text_of(batch, batch.position_ids, row) == list(range(int(lengths[row])))
        assert text_of(batch, batch.attention_mask, row) == [True] * int(lengths[row])
    assert (batch.position_ids[off] == 0).all()


@quick
@given(GROUPS, PADDINGS)
def test_shapes_and_dtypes_are_those_that_are_promised(groups: list[Group], padding: Padding) -> None:
    batch = RolloutBatch.from_groups(groups, padding=padding)
    assert {name: tensor.dtype for name, tensor in tensors(batch).items()} == DTYPES
    shape = batch.output_ids.shape
    assert all(tensors(batch)[name].shape == shape for name in PER_TOKEN)
    assert all(tensors(batch)[name].shape == shape[:1] for name in PER_ROW)
    assert batch.groups == tuple(groups)
    assert batch.num_tokens == int(batch.loss_mask.sum())


def test_a_trainers_defaults_of_dtype_and_device_change_nothing(tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            batch = RolloutBatch.from_groups(
                [rewarded(0.25, 2.0), rewarded(1.0, index=1)], padding=Padding(side="left")
            )
            batch.save(tmp_path)
            loaded = RolloutBatch.load(tmp_path)
            advantages, parts = batch.advantages(), batch.split(3)
    finally:
        torch.set_default_dtype(before)
    assert same(loaded, batch)
    for one in (batch, loaded, *parts):
        assert {name: tensor.dtype for name, tensor in tensors(one).items()} == DTYPES
        assert {tensor.device.type for tensor in tensors(one).values()} == {"cpu"}
    assert (advantages.dtype, advantages.device.type) == (torch.float32, "cpu")


def test_a_batch_can_be_padded_to_a_given_length() -> None:
    groups = [group(sample(3), sample(1))]
    batch = RolloutBatch.from_groups(groups, padding=Padding(length=8, side="left", id=0))
    assert batch.output_ids.tolist() == [[0, 0, 0, 1, 2, 10, 11, 12], [0, 0, 0, 0, 0, 1, 2, 10]]
    assert batch.select([1]).output_ids.shape == (1, 8)


def test_a_row_that_is_too_long_is_named() -> None:
    groups = [group(sample(1)), group(sample(1), sample(7), index=4)]
    with pytest.raises(
        ConfigError, match=r"padding\.length must be at least 9, the length of sample 1 of group 4, got 8"
    ):
        RolloutBatch.from_groups(groups, padding=Padding(length=8))


def test_a_length_is_a_multiple_of_what_it_must_be() -> None:
    with pytest.raises(ConfigError, match=r"length must be a multiple of multiple_of \(8\), got 12"):
        Padding(length=12, multiple_of=8)


def test_samples_without_logprobs_are_refused_unless_they_have_no_tokens_or_failed() -> None:
    with pytest.raises(ConfigError, match=r"logprobs must be sampled: Sampling\(logprobs=True\)"):
        RolloutBatch.from_groups([group(sample(), sample(logprobs=False))])
    fine = group(sample(0, logprobs=False, finish_reason="length"), sample(2, logprobs=False, finish_reason="error"))
    unrewarded = group(sample(2, logprobs=False), rewards=(None,))
    batch = RolloutBatch.from_groups([fine, unrewarded])
    assert batch.valid.tolist() == [True, False, False]
    assert batch.num_tokens == 0


def test_a_failed_sample_keeps_its_row_and_is_never_trained_on() -> None:
    completions = [sample(finish_reason="error"), sample(), sample(finish_reason="abort")]
    batch = RolloutBatch.from_groups([group(*completions, rewards=(1.0, None, 2.0))])
    assert batch.valid.tolist() == [False, False, True]
    assert batch.loss_mask.sum(dim=1).tolist() == [0, 0, 3]
    assert batch.rewards.tolist() == [0, 0, 2]
    assert batch.advantages().tolist() == [0, 0, 0]


@pytest.mark.parametrize("groups", [[], [Group("p", (1,), ())]])
def test_a_batch_of_no_samples_is_refused(groups: list[Group]) -> None:
    with pytest.raises(ConfigError, match="groups must hold at least one sample"):
        RolloutBatch.from_groups(groups)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_would_poison_its_group_is_refused(reward: float) -> None:
    with pytest.raises(ConfigError, match="rewards must be finite for sample 1 of group 5"):
        RolloutBatch.from_groups([rewarded(0.0, reward, index=5)])


def test_a_group_has_a_reward_for_each_sample() -> None:
    with pytest.raises(ConfigError, match="rewards must be one for each of the 1 samples of group 0"):
        RolloutBatch.from_groups([group(sample(), rewards=(1.0, 2.0))])


@pytest.mark.timeout(20)
def test_a_large_batch_is_built_row_by_row() -> None:
    one = sample(1900, prompt=tuple(range(100)))
    batch = RolloutBatch.from_groups([Group("p", one.prompt_ids, (one,) * 1024)])
    assert batch.num_tokens == 1900 * 1024


def test_a_batch_shows_its_shape_and_not_its_tensors() -> None:
    assert repr(of_lengths(3, 2)) == "RolloutBatch([2, 3], num_tokens=3, device='cpu')"


# ------------------------------------------------------------ staleness, advantages


def test_staleness_is_that_of_the_oldest_token_that_is_trained_on() -> None:
    mixed = dataclasses.replace(sample(4), weight_versions=(VersionSpan(3, 0, 1), VersionSpan(6, 1, 4)))
    masked = dataclasses.replace(mixed, loss_mask=(0, 1, 1, 1))
    samples = group(mixed, masked, sample(version=7), sample(version=1, finish_reason="error"), sample(0))
    batch = RolloutBatch.from_groups([samples])
    assert batch.staleness(8).tolist() == [5, 2, 1, 0, 0]
    assert batch.max_staleness(8) == 5
    assert batch.staleness(5).tolist() == [2, -1, -2, 0, 0]
    assert batch.select([]).max_staleness(8) == 0


@quick
@given(GROUPS, st.booleans())
def test_advantages_are_the_rewards_less_the_mean_of_the_group_over_its_deviation(
    groups: list[Group], normalize: bool
) -> None:
    batch = RolloutBatch.from_groups(groups)
    expected = []
    for of in groups:
        rows = rows_of([of])
        rewards = [row[2] or 0.0 for row in rows if valid(*row)]
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        scale = deviation + 1e-6 if normalize else 1.0
        expected += [((row[2] or 0.0) - statistics.fmean(rewards)) / scale if valid(*row) else 0.0 for row in rows]
    assert batch.advantages(normalize=normalize).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_two_groups_of_one_index_keep_means_of_their_own() -> None:
    batch = RolloutBatch.from_groups([rewarded(0.0, 2.0), rewarded(10.0, 12.0)])
    assert batch.advantages(normalize=False).tolist() == [-1, 1, -1, 1]


def test_a_group_whose_samples_are_all_alike_or_alone_teaches_nothing() -> None:
    batch = RolloutBatch.from_groups([rewarded(0.1, 0.1, 0.1), rewarded(5.0)])
    assert batch.advantages().tolist() == pytest.approx([0.0] * 4, abs=1e-9)


def test_a_part_with_whole_groups_has_advantages_and_one_with_torn_groups_says_where_to_get_them() -> None:
    batch = RolloutBatch.from_groups([rewarded(0.0, 2.0), rewarded(3.0, 1.0, index=1)])
    whole = batch.select([3, 2])
    assert torch.equal(whole.advantages(), batch.advantages()[whole.row_index])
    for torn in (batch.select([0, 2, 3]), batch.select([0, 0])):
        with pytest.raises(LifecycleError, match=r"batch\.advantages\(\)\[part\.row_index\]"):
            torn.advantages()


def test_eps_is_positive() -> None:
    with pytest.raises(ConfigError, match="eps must be greater than 0, got 0"):
        of_lengths(2).advantages(eps=0)


# ------------------------------------------------------------ parts

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=24)


@quick
@given(LENGTHS, st.integers(1, 6))
def test_a_split_has_every_row_once_and_as_many_on_each_rank(lengths: list[int], dp_size: int) -> None:
    lengths = lengths * dp_size
    parts = of_lengths(*lengths).split(dp_size)
    assert [len(part) for part in parts] == [len(lengths) // dp_size] * dp_size
    rows = [part.row_index.tolist() for part in parts]
    assert sorted(row for part in rows for row in part) == list(range(len(lengths)))
    assert rows == [sorted(part) for part in rows]


@quick
@given(st.integers(1, 6), st.data())
def test_ranks_differ_in_tokens_by_no_more_than_the_longest_row(dp_size: int, data: st.DataObject) -> None:
    num_rows = dp_size * data.draw(st.integers(1, 8))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=num_rows, max_size=num_rows))
    loads = [int(part.unpadded_lengths.sum()) for part in of_lengths(*lengths).split(dp_size)]
    assert max(loads) - min(loads) <= max(lengths)


@quick
@given(GROUPS, PADDINGS, st.data())
def test_a_part_has_the_rows_of_the_whole_and_no_more_padding_than_it_needs(
    groups: list[Group], padding: Padding, data: st.DataObject
) -> None:
    batch = RolloutBatch.from_groups(groups, padding=padding)
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=6))
    part = batch.select(rows)
    longest = int(part.unpadded_lengths.max())
    assert part.output_ids.shape == (len(rows), padding.width(longest))
    assert part.row_index.tolist() == rows
    assert part.groups is batch.groups
    for name in PER_TOKEN:
        assert [text_of(part, getattr(part, name), i) for i in range(len(rows))] == [
            text_of(batch, getattr(batch, name), row) for row in rows
        ]
        assert getattr(part, name).is_contiguous()
    for name in PER_ROW:
        assert torch.equal(getattr(part, name), getattr(batch, name)[rows])


def test_results_of_parts_go_back_into_their_order() -> None:
    batch = of_lengths(5, 2, 9, 4, 4, 7, 3, 8)
    back = torch.zeros(len(batch), dtype=torch.int64)
    for part in batch.split(2):
        for smaller in part.split(2):
            back[smaller.row_index] = smaller.unpadded_lengths
    assert torch.equal(back, batch.unpadded_lengths)


@pytest.mark.parametrize("dp_size", [0, -1, True, 2.0, 3, 8])
def test_a_split_that_does_not_come_out_even_is_refused(dp_size: Any) -> None:
    with pytest.raises(ConfigError, match=rf"dp_size must .*, got {dp_size}"):
        of_lengths(1, 2, 3, 4).split(dp_size)


def test_rows_can_be_selected_by_a_mask_or_a_tensor() -> None:
    batch = RolloutBatch.from_groups([rewarded(1.0, None, 2.0)])
    assert batch.select(batch.valid).row_index.tolist() == [0, 2]
    assert batch.select(torch.tensor([2, 1])).row_index.tolist() == [2, 1]
    assert len(batch.select([])) == 0


@pytest.mark.parametrize("rows", [[3], [-1], [0.5], [True], [[0]], 1])
def test_rows_that_are_none_are_refused(rows: Any) -> None:
    with pytest.raises(ConfigError, match="rows must be rows from 0 to 2, or a mask of 3 booleans"):
        of_lengths(1, 2, 3).select(rows)


def test_a_batch_moves_with_all_of_its_tensors() -> None:
    batch = of_lengths(2, 3)
    moved = batch.to("meta", non_blocking=True)
    assert {tensor.device.type for tensor in tensors(moved).values()} == {"meta"}
    assert batch.output_ids.device.type == "cpu"
    assert moved.groups is batch.groups


# ------------------------------------------------------------ saving


@settings(deadline=None, max_examples=25)
@given(GROUPS, PADDINGS)
def test_a_loaded_batch_is_the_one_that_was_saved(
    tmp_path_factory: pytest.TempPathFactory, groups: list[Group], padding: Padding
) -> None:
    folder = tmp_path_factory.mktemp("batches") / "new" / "batch"
    batch = RolloutBatch.from_groups(groups, padding=padding)
    batch.save(folder)
    loaded = RolloutBatch.load(folder)
    assert same(loaded, batch)
    assert loaded.groups == batch.groups
    assert [path.name for path in folder.parent.iterdir()] == ["batch"]


def test_parts_are_saved_as_well_as_wholes(tmp_path: Path) -> None:
    batch = RolloutBatch.from_groups([rewarded(1.0, 2.0), rewarded(3.0, 4.0, index=1)])
    for rows in ([3, 1], []):
        part = batch.select(rows)
        part.save(tmp_path / str(len(rows)))
        assert same(RolloutBatch.load(tmp_path / str(len(rows))), part)


def test_an_error_comes_back_as_its_message(tmp_path: Path) -> None:
    failed = dataclasses.replace(sample(finish_reason="error"), error=EngineDiedError("engine-1", "gone"))
    RolloutBatch.from_groups([group(failed)]).save(tmp_path / "batch")
    assert (
        str(RolloutBatch.load(tmp_path / "batch").groups[0].completions[0].error) == "EngineDiedError: engine-1: gone"
    )


def test_an_empty_folder_is_filled_and_another_is_left_alone(tmp_path: Path) -> None:
    batch = of_lengths(2)
    batch.save(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    file = tmp_path / "batch.safetensors"
    for taken in (tmp_path, file):
        with pytest.raises(ConfigError, match="folder must be empty or not exist"):
            batch.save(taken)
    assert sorted(path.name for path in tmp_path.iterdir()) == before == ["batch.safetensors", "groups.jsonl"]


def test_a_folder_that_another_fills_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "batch", Path.rename

    def late(self: Path, other: Path) -> Path:
        target.mkdir()
        (target / "theirs").write_text("")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(ConfigError, match="folder must be empty or not exist"):
        of_lengths(2).save(target)
    assert [path.name for path in tmp_path.rglob("*")] == ["batch", "theirs"]


def test_nothing_is_left_of_a_batch_that_cannot_be_saved(tmp_path: Path) -> None:
    bad = dataclasses.replace(group(sample()), data={"tensor": torch.zeros(2)})
    with pytest.raises(ConfigError, match="data must be made of JSON values to be saved"):
        RolloutBatch.from_groups([bad]).save(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def rewritten(folder: Path, metadata: dict[str, str], **changes: Any) -> None:
    """Write the tensors' file anew, with other metadata, and with other tensors or (``None``) without them."""
    file = folder / "batch.safetensors"
    with safe_open(file, framework="pt") as opened:
        about = {**opened.metadata(), **metadata}
        found = {name: opened.get_tensor(name).clone() for name in opened.keys()} | changes  # noqa: SIM118
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, file, about)


@pytest.mark.parametrize(
    ("metadata", "changes", "problem"),
    [
        ({"format_version": "99"}, {}, "its format version is 99, and must be 1"),
        ({"num_groups": "3"}, {}, r"groups\.jsonl has 2 groups, and must have 3"),
        ({"padding": "{"}, {}, "must hold a whole saved batch"),
        ({"padding": "3"}, {}, "must hold a whole saved batch"),
        ({}, {"rewards": None}, "'rewards'"),
        ({}, {"rewards": torch.zeros(3)}, r"rewards is torch\.float32 \[3\]"),
        ({}, {"rewards": torch.zeros(2).double()}, r"rewards is torch\.float64 \[2\]"),
        ({}, {"output_ids": torch.zeros(2)}, "output_ids is"),
        ({}, {"row_index": torch.tensor([0, 2])}, "there are rows of more than the 2 samples"),
    ],
)
def test_a_batch_of_another_format_is_refused(
    tmp_path: Path, metadata: dict[str, str], changes: dict[str, Any], problem: str
) -> None:
    of_lengths(2, 3).save(tmp_path)
    rewritten(tmp_path, metadata, **changes)
    with pytest.raises(ConfigError, match=problem) as caught:
        RolloutBatch.load(tmp_path)
    assert caught.value.field == "folder"


@pytest.mark.parametrize("name", ["batch.safetensors", "groups.jsonl"])
def test_a_damaged_or_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    of_lengths(2, 3).save(tmp_path)
    content = (tmp_path / name).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\xff" * len(content)):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ConfigError, match="folder must hold a whole saved batch"):
            RolloutBatch.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match="folder must hold batch"):
        RolloutBatch.load(tmp_path)


def test_a_group_that_is_no_record_is_refused(tmp_path: Path) -> None:
    of_lengths(2, 3).save(tmp_path)
    lines = (tmp_path / "groups.jsonl").read_text().splitlines()
    wrongs: list[Any] = [{}, [], {**json.loads(lines[0]), "completions": [{}]}]
    for wrong in wrongs:
        (tmp_path / "groups.jsonl").write_text(f"{lines[0]}\n{json.dumps(wrong)}\n")
        with pytest.raises(ConfigError, match="folder must hold a whole saved batch"):
            RolloutBatch.load(tmp_path)
