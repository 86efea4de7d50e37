"""The trainer's logprobs against the engine's, by plain Python's arithmetic."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.collect.batch import Padding, RolloutBatch
from sglrollout.collect.mismatch import MismatchReport, Mode, VersionMismatch, importance_weights, mismatch
from sglrollout.errors import ConfigError
from sglrollout.types import Completion, Group, VersionSpan

quick = settings(deadline=None, max_examples=60)
PROMPT = (1, 2)
MODES: tuple[Mode, ...] = ("truncated", "masked")
LOGPROB = st.floats(-8, 0, width=32)
Cells = list[tuple[int, int, float, int]]

# ------------------------------------------------------------ batches


@st.composite
def cases(draw: st.DrawFn) -> tuple[RolloutBatch, Any, Cells]:
    """A batch with at least one token to train on, the trainer's logprobs (NaN where no one is to look), and for each
    token that counts its row, position, difference and version."""
    lengths = [draw(st.integers(1, 5)), *draw(st.lists(st.integers(0, 5), max_size=3))]
    completions = []
    for i, length in enumerate(lengths):
        cut = draw(st.integers(0, length))
        completions.append(
            Completion(
                prompt_ids=PROMPT,
                token_ids=tuple(range(length)),
                logprobs=tuple(draw(LOGPROB) for _ in range(length)),
                finish_reason=draw(st.sampled_from(["stop", "error"])) if i else "stop",
                weight_versions=(VersionSpan(1, 0, cut), VersionSpan(4, cut, length)),
                index=i,
                loss_mask=(1, *(draw(st.integers(0, 1)) for _ in range(length - 1))) if length else None,
            )
        )
    padding = Padding(side="left" if draw(st.booleans()) else "right", multiple_of=draw(st.integers(1, 3)))
    batch = RolloutBatch.from_groups([Group("p", PROMPT, tuple(completions))], padding=padding)
    train = torch.full(batch.logprobs.shape, math.nan)
    cells = []
    for row, position in batch.loss_mask.nonzero().tolist():
        train[row, position] = draw(LOGPROB)
        diff = float(train[row, position]) - float(batch.logprobs[row, position])
        cells.append((row, position, diff, int(batch.weight_version[row, position])))
    return batch, train, cells


def batch_of(*logprobs: tuple[float, ...], version: int = 0) -> RolloutBatch:
    completions = tuple(
        Completion(PROMPT, tuple(range(len(row))), row, "stop", weight_versions=(VersionSpan(version, 0, len(row)),))
        for row in logprobs
    )
    return RolloutBatch.from_groups([Group("p", PROMPT, completions)])


def shifted(batch: RolloutBatch, by: float) -> Any:
    return batch.logprobs + by


def expected(diffs: list[float]) -> dict[str, float]:
    n = len(diffs)
    return {
        "token_mult_prob_error": sum(math.exp(abs(d)) for d in diffs) / n,
        "kl_k1": sum(-d for d in diffs) / n,
        "kl_k3": sum(math.exp(d) - 1 - d for d in diffs) / n,
        "max_abs_diff": max(abs(d) for d in diffs),
        "mean_abs_diff": sum(abs(d) for d in diffs) / n,
        "num_tokens": n,
    }


def figures(report: VersionMismatch) -> dict[str, float]:
    return {name: getattr(report, name) for name in expected([0.0])}


# ------------------------------------------------------------ the report


@quick
@given(cases())
def test_the_figures_are_those_of_the_formulas(case: tuple[RolloutBatch, Any, Cells]) -> None:
    batch, train, cells = case
    report = mismatch(train, batch)
    assert figures(report) == pytest.approx(expected([diff for *_, diff, _ in cells]), rel=1e-9, abs=1e-12)
    assert report.kl_k3 >= 0
    worst = {(row, position): abs(diff) for row, position, diff, _ in cells}
    assert worst[report.worst] == report.max_abs_diff


@quick
@given(cases())
def test_versions_weigh_up_to_the_whole(case: tuple[RolloutBatch, Any, Cells]) -> None:
    batch, train, cells = case
    report = mismatch(train, batch)
    parts = report.per_version
    assert list(parts) == sorted({version for *_, version in cells})
    for version, part in parts.items():
        diffs = [diff for *_, diff, its in cells if its == version]
        assert figures(part) == pytest.approx(expected(diffs), rel=1e-9, abs=1e-12)
    assert sum(part.num_tokens for part in parts.values()) == report.num_tokens
    assert max(part.max_abs_diff for part in parts.values()) == report.max_abs_diff
    for name in ("token_mult_prob_error", "kl_k1", "kl_k3", "mean_abs_diff"):
        weighed = sum(getattr(part, name) * part.num_tokens for part in parts.values()) / report.num_tokens
        assert getattr(report, name) == pytest.approx(weighed, rel=1e-9, abs=1e-12)


@quick
@given(cases())
def test_equal_logprobs_are_perfect(case: tuple[RolloutBatch, Any, Cells]) -> None:
    batch, _, cells = case
    report = mismatch(batch.logprobs, batch)
    assert figures(report) == {**expected([0.0]), "num_tokens": len(cells)}
    assert report.healthy
    assert torch.equal(importance_weights(batch.logprobs, batch), batch.loss_mask)


@quick
@given(cases(), st.floats(-1e-7, 1e-7))
def test_k3_is_never_negative_by_rounding(case: tuple[RolloutBatch, Any, Cells], by: float) -> None:
    batch = case[0]
    assert mismatch(batch.logprobs.double() + by, batch).kl_k3 >= 0


def test_k1_is_positive_where_the_engine_is_surer_than_the_trainer() -> None:
    batch = batch_of((-1.0, -2.0))
    report = mismatch(shifted(batch, -0.5), batch)
    assert report.kl_k1 == pytest.approx(0.5)
    assert report.kl_k3 == pytest.approx(math.exp(-0.5) - 0.5)


def test_means_estimate_the_divergence_of_the_trainer_from_the_engine() -> None:
    rollout, train = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    counts = [50, 30, 20]  # samples exactly as likely as the engine has them
    tokens = [token for token, count in enumerate(counts) for _ in range(count)]
    batch = batch_of(tuple(float(rollout[token].log()) for token in tokens))
    logprobs = torch.zeros_like(batch.logprobs)
    logprobs[0, len(PROMPT) :] = train.log()[tokens]
    exact = float((rollout * (rollout / train).log()).sum())
    report = mismatch(logprobs, batch)
    assert report.kl_k1 == pytest.approx(exact, abs=1e-6)
    assert report.kl_k3 == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(("by", "healthy"), [(0.0, True), (0.04, True), (0.045, False), (0.06, False), (-0.06, False)])
def test_health_is_what_nemo_rl_calls_healthy(by: float, healthy: bool) -> None:
    batch = batch_of((-1.0, -2.0, -3.0))
    assert mismatch(shifted(batch, by), batch).healthy is healthy


@pytest.mark.parametrize(("older", "newer", "healthy"), [(1.0, 0.0, True), (0.0, 1.0, False)])
def test_health_is_of_the_newest_version_alone(older: float, newer: float, healthy: bool) -> None:
    batch = batch_of((-1.0, -2.0, -3.0))
    batch = dataclasses.replace(batch, weight_version=torch.tensor([[-1, -1, 3, 3, 5]]))
    report = mismatch(batch.logprobs + torch.tensor([[0, 0, older, older, newer]]), batch)
    assert (report.version, report.healthy) == (5, healthy)
    assert report.as_dict()["mismatch/healthy"] == healthy
    assert report.per_version[3].healthy is not healthy


def test_a_report_is_flat_for_loggers() -> None:
    batch = batch_of((-1.0, -2.0))
    report = mismatch(shifted(batch, 0.5), batch)
    assert report.as_dict() == {
        **{f"mismatch/{name}": value for name, value in figures(report).items()},
        "mismatch/healthy": 0.0,
    }
    assert report.as_dict("train/")["train/num_tokens"] == 2.0
    assert {type(value) for value in report.as_dict().values()} == {float}


def test_a_report_says_in_words_what_it_found() -> None:
    batch = batch_of((-1.0, -2.0))
    assert str(mismatch(batch.logprobs, batch)).splitlines() == [
        "healthy: mult prob error 1.0000, KL k1 0.00e+00, k3 0.00e+00, |diff| mean 0.00e+00, max 0.00e+00, 2 tokens",
        "  worst at row 0, position 2",
    ]
    versions = torch.tensor([[-1, -1, 3, 5]])
    text = str(mismatch(shifted(batch, 1.0), dataclasses.replace(batch, weight_version=versions)))
    assert text.startswith("not healthy under version 5; of all: mult prob error")
    assert [line.split(":")[0] for line in text.splitlines()[2:]] == ["  version 3", "  version 5"]


def test_tokens_of_unknown_version_are_a_version_of_their_own() -> None:
    unknown = Completion(PROMPT, (3,), (-1.0,), "stop")
    batch = RolloutBatch.from_groups([Group("p", PROMPT, (unknown,))])
    assert list(mismatch(batch.logprobs, batch).per_version) == [-1]


def test_half_precision_with_gradients_is_compared_in_double() -> None:
    batch = batch_of((-1.0, -2.0), (-4.0,))
    train = shifted(batch, 0.25).bfloat16().requires_grad_()
    report = mismatch(train, batch)
    assert isinstance(report, MismatchReport)
    assert report.mean_abs_diff == 0.25
    weights = importance_weights(train, batch)
    assert (weights.dtype, weights.requires_grad) == (torch.float32, False)


def test_a_trainers_defaults_of_dtype_and_device_change_nothing() -> None:
    batch = batch_of((-1.0, -2.0))
    train = shifted(batch, 0.5)
    plain = mismatch(train, batch)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert mismatch(train, batch) == plain
            weights = [importance_weights(train, batch, mode=mode) for mode in MODES]
    finally:
        torch.set_default_dtype(before)
    assert [(tensor.dtype, tensor.device.type) for tensor in weights] == [(torch.float32, "cpu")] * 2


# ------------------------------------------------------------ what is refused

BOTH = pytest.mark.parametrize("function", [mismatch, importance_weights])


@BOTH
def test_another_shape_is_refused_and_a_shifted_one_is_recognized(function: Any) -> None:
    batch = batch_of((-1.0, -2.0))
    for wrong in (batch.logprobs[0], torch.zeros(2, 4), torch.zeros(1, 5)):
        with pytest.raises(ConfigError, match=r"train_logprobs must be \[1, 4\] like the batch's, got"):
            function(wrong, batch)
    with pytest.raises(ConfigError, match=r"put a column of zeros first\), got \(1, 3\)"):
        function(batch.logprobs[:, 1:], batch)


@BOTH
def test_integers_are_refused(function: Any) -> None:
    batch = batch_of((-1.0,))
    with pytest.raises(ConfigError, match="train_logprobs must be floats"):
        function(batch.output_ids, batch)


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logprobs_that_are_not_finite_are_refused_with_their_place(function: Any, value: float) -> None:
    batch = batch_of((-1.0, -2.0), (-1.0, value))
    good = torch.zeros(2, 4)
    with pytest.raises(ConfigError, match=f"batch must have finite .* has not at row 1, position 3, got {value}"):
        function(good, batch)
    bad = good.clone()
    bad[0, 2:] = value
    with pytest.raises(ConfigError, match=f"train_logprobs .* at row 0, position 2 and 1 other places, got {value}"):
        function(bad, batch_of((-1.0, -2.0), (-1.0, -1.0)))


def test_a_batch_with_nothing_to_compare_is_refused_and_weighs_nothing() -> None:
    failed = Completion(PROMPT, (3,), (-1.0,), "error")
    batch = RolloutBatch.from_groups([Group("p", PROMPT, (failed,))])
    with pytest.raises(ConfigError, match="batch must have tokens that the model sampled"):
        mismatch(batch.logprobs, batch)
    assert importance_weights(batch.logprobs, batch).tolist() == [[0, 0, 0]]  # a rank of many goes on with its step


# ------------------------------------------------------------ importance weights

LEVELS = st.sampled_from(["token", "sequence", "geometric"])


def ratios(cells: Cells, level: str) -> dict[tuple[int, int], float]:
    found = {}
    for row, position, diff, _ in cells:
        diffs = [d for r, _, d, _ in cells if r == row]
        log_ratio = {"token": diff, "sequence": sum(diffs), "geometric": sum(diffs) / len(diffs)}[level]
        found[row, position] = math.exp(min(20.0, max(-20.0, log_ratio)))
    return found


@quick
@given(cases(), LEVELS, st.floats(0.125, 8, width=16))
def test_truncated_weights_are_ratios_up_to_the_cap(
    case: tuple[RolloutBatch, Any, Cells], level: Any, cap: float
) -> None:
    batch, train, cells = case
    weights = importance_weights(train, batch, level=level, cap=cap)
    wanted = torch.zeros(batch.logprobs.shape)
    for place, ratio in ratios(cells, level).items():
        wanted[place] = min(ratio, cap)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, wanted, rtol=1e-5)
    assert weights.max() <= cap
    assert (weights[batch.loss_mask == 0] == 0).all()


@quick
@given(cases(), LEVELS, st.floats(0, 1, width=16), st.floats(1.125, 8, width=16))
def test_masked_weights_are_ratios_within_the_bounds_or_zero(
    case: tuple[RolloutBatch, Any, Cells], level: Any, low: float, high: float
) -> None:
    batch, train, cells = case
    weights = importance_weights(train, batch, mode="masked", level=level, low=low, high=high)
    assert ((weights == 0) | ((weights >= low) & (weights <= high))).all()
    assert (weights[batch.loss_mask == 0] == 0).all()
    for place, ratio in ratios(cells, level).items():
        if low * 1.001 < ratio < high * 0.999:
            assert float(weights[place]) == pytest.approx(ratio, rel=1e-5)
        elif not low * 0.999 <= ratio <= high * 1.001:
            assert weights[place] == 0


@quick
@given(cases(), st.sampled_from(["sequence", "geometric"]))
def test_a_row_has_one_weight_above_the_level_of_tokens(case: tuple[RolloutBatch, Any, Cells], level: Any) -> None:
    batch, train, _ = case
    weights = importance_weights(train, batch, level=level, cap=1e9)
    for row in range(len(batch)):
        assert len(weights[row][batch.loss_mask[row] > 0].unique()) <= 1


def test_a_ratio_that_would_overflow_is_clamped() -> None:
    batch = batch_of((-1000.0, -1.0), (-1.0, -1000.0))
    train = torch.tensor([[0.0, 0, -1, -1], [0, 0, -1000, -1000]])
    weights = importance_weights(train, batch, cap=1e9)
    assert weights[:, 2:].flatten().tolist() == pytest.approx([math.exp(20), 1, math.exp(-20), 1], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": "clipped"}, "mode must be one of truncated, masked, got 'clipped'"),
        ({"level": "row"}, "level must be one of token, sequence, geometric, got 'row'"),
        ({"cap": 0}, "cap must be greater than 0, got 0"),
        ({"cap": math.inf}, "cap must be a finite number, got inf"),
        ({"cap": "2"}, "cap must be a finite number, got '2'"),
        ({"low": -0.1}, "low must be at least 0, got -0.1"),
        ({"low": True}, "low must be a finite number, got True"),
        ({"high": math.nan}, "high must be a finite number, got nan"),
        ({"low": 2, "high": 2}, r"high must be greater than low \(2\), got 2"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], problem: str) -> None:
    batch = batch_of((-1.0,))
    with pytest.raises(ConfigError, match=problem):
        importance_weights(batch.logprobs, batch, **options)
