"""The checksum that a trainer and an engine compare: exact, of the bits, and sensitive to every element."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout import checksum as module
from sglrollout.checksum import checksum

FLOATS = st.floats(width=32, allow_nan=False)
quick = settings(deadline=None, max_examples=80)


def reference(values: list[int]) -> int:
    """What the docstring says, in Python's integers."""
    return sum(value * (i % 65521 + 1) for i, value in enumerate(values)) % (1 << 64)


def bits(values: list[float]) -> list[int]:
    return [struct.unpack("<i", struct.pack("<f", value))[0] for value in values]


@quick
@given(st.lists(FLOATS, max_size=50))
def test_it_is_the_sum_of_each_elements_bits_times_its_position(values: list[float]) -> None:
    assert checksum(torch.tensor(values, dtype=torch.float32)) == reference(bits(values))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_integers_of_every_size_are_summed_as_they_are(dtype: Any) -> None:
    values = [0, 1, 2, 100, 127, 5]
    assert checksum(torch.tensor(values, dtype=dtype)) == reference(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool])
def test_the_dtypes_of_weights_have_a_sum_that_any_one_element_changes(dtype: Any) -> None:
    tensor = torch.zeros(6, dtype=dtype)
    sums = {checksum(tensor)}
    for i in range(6):
        changed = tensor.clone()
        changed[i] = 1
        sums.add(checksum(changed))
    assert len(sums) == 7


@quick
@given(st.lists(FLOATS, min_size=1, max_size=30), st.data())
def test_a_change_of_one_element_changes_it(values: list[float], data: st.DataObject) -> None:
    i, value = data.draw(st.integers(0, len(values) - 1)), data.draw(FLOATS)
    changed = [*values[:i], value, *values[i + 1 :]]
    same = bits(changed) == bits(values)
    assert (checksum(torch.tensor(values)) == checksum(torch.tensor(changed))) == same


@quick
@given(st.lists(FLOATS, min_size=2, max_size=30, unique=True), st.data())
def test_exchanging_two_elements_changes_it(values: list[float], data: st.DataObject) -> None:
    i, j = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=2, max_size=2, unique=True))
    exchanged = list(values)
    exchanged[i], exchanged[j] = exchanged[j], exchanged[i]
    assert checksum(torch.tensor(values)) != checksum(torch.tensor(exchanged))


def test_values_that_compare_equal_and_differ_in_their_bits_differ() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_bits_that_are_not_numbers_count_too() -> None:
    nan = torch.tensor([float("nan")])
    other = (nan.view(torch.int32) + 1).view(torch.float32)
    assert torch.isnan(other).all()
    assert checksum(nan) == checksum(nan.clone())
    assert checksum(nan) != checksum(other)


def test_a_view_has_the_sum_of_its_copy() -> None:
    tensor = torch.randn(8, 6)
    for view in (tensor.T, tensor[1:5, ::2], tensor[3], tensor[2, 4]):
        assert checksum(view) == checksum(view.clone())


def test_the_shape_does_not_matter_and_nothing_has_the_sum_zero() -> None:
    tensor = torch.randn(6, 4)
    assert checksum(tensor) == checksum(tensor.reshape(3, 8))
    assert checksum(torch.empty(0)) == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_large_tensors_are_summed_chunk_by_chunk_to_the_same(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(200)
    expected = checksum(tensor)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", {"cpu": chunk})
    assert checksum(tensor) == expected


def test_positions_start_again_after_65521() -> None:
    tensor = torch.zeros(65523, dtype=torch.int32)
    tensor[65521] = 5
    assert checksum(tensor) == 5
    tensor[65522] = 1
    assert checksum(tensor) == 5 + 2


def test_a_parameter_with_a_gradient_is_summed_like_its_values() -> None:
    parameter = torch.nn.Parameter(torch.randn(5))
    assert checksum(parameter) == checksum(parameter.detach())


def test_a_sign_alone_changes_the_sum_of_the_widest_dtypes_too() -> None:
    for dtype in (torch.float64, torch.int64, torch.complex64):
        assert checksum(torch.tensor([1, 1], dtype=dtype)) != checksum(torch.tensor([1, -1], dtype=dtype))
