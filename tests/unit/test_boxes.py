"""Boxes against what torch's own indexing says of the same elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.boxes import Box, box_of_view, contiguous_strides, cover, narrowed

Shape = tuple[int, ...]
SHAPES: st.SearchStrategy[Shape] = st.lists(st.integers(1, 5), max_size=4).map(tuple)
quick = settings(deadline=None, max_examples=80)


def box_in(draw: Callable[..., Any], shape: Shape) -> Box:
    start, size = [], []
    for extent in shape:
        size.append(draw(st.integers(1, extent)))
        start.append(draw(st.integers(0, extent - size[-1])))
    return Box(tuple(start), tuple(size))


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[Shape, list[Box]]:
    shape = draw(SHAPES)
    return shape, [box_in(draw, shape) for _ in range(count)]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """A shape, and boxes that make it up: it is cut again and again, at any place of any dimension."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.size[d]))
        for begin, end in ((0, at), (at, box.size[d])):
            start = (*box.start[:d], box.start[d] + begin, *box.start[d + 1 :])
            boxes.append(Box(start, (*box.size[:d], end - begin, *box.size[d + 1 :])))
    return shape, draw(st.permutations(boxes))


def numbered(shape: Shape) -> Any:
    """A contiguous tensor whose elements are their places in memory."""
    return torch.arange(Box.whole(shape).numel).reshape(shape)


def marked(shape: Shape, box: Box) -> Any:
    """True where the box is."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))] = True
    return mask


# ------------------------------------------------------------ single boxes


@quick
@given(shape_and_boxes(1))
def test_narrowed_is_a_view_of_what_slicing_gives(drawn: tuple[Shape, list[Box]]) -> None:
    shape, (box,) = drawn
    tensor = numbered(shape)
    slices = tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))
    shown = narrowed(tensor, box)
    assert torch.equal(shown, tensor[slices])
    assert shown.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert box.numel == shown.numel()


def test_narrowing_to_the_whole_gives_the_tensor_itself() -> None:
    for shape in [(), (3,), (2, 0, 4), (2, 3)]:
        tensor = torch.zeros(shape)
        assert narrowed(tensor, Box.whole(shape)) is tensor
        assert Box.whole(shape).numel == tensor.numel()


@quick
@given(shape_and_boxes(2))
def test_an_intersection_is_what_both_boxes_cover(drawn: tuple[Shape, list[Box]]) -> None:
    shape, (one, other) = drawn
    both = marked(shape, one) & marked(shape, other)
    met = one.intersect(other)
    assert met == other.intersect(one)
    if met is None:
        assert not both.any()
    else:
        assert torch.equal(marked(shape, met), both)
    assert one.intersect(one) == one


def test_an_empty_box_meets_nothing_and_scalars_meet_each_other() -> None:
    assert Box((1, 0), (0, 3)).intersect(Box.whole((2, 3))) is None
    assert Box.whole(()).intersect(Box.whole(())) == Box((), ())


def test_boxes_of_different_tensors_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Box.whole((2, 3)).intersect(Box.whole((2,)))
    with pytest.raises(ValueError, match="longer"):
        Box.whole((2,)).within(Box.whole((2, 3)))


@quick
@given(shape_and_boxes(2))
def test_within_counts_the_same_elements_from_the_outer_box(drawn: tuple[Shape, list[Box]]) -> None:
    shape, (outer, other) = drawn
    inner = outer.intersect(other)
    if inner is not None:
        tensor = numbered(shape)
        assert torch.equal(narrowed(narrowed(tensor, outer), inner.within(outer)), narrowed(tensor, inner))


@quick
@given(shape_and_boxes(1).filter(lambda drawn: drawn[0] != ()), st.integers(1, 8))
def test_the_parts_of_a_split_box_laid_end_to_end_are_the_box(drawn: tuple[Shape, list[Box]], parts: int) -> None:
    shape, (box,) = drawn
    tensor = numbered(shape)
    split = box.split(parts)
    assert len(split) == parts
    assert torch.equal(torch.cat([narrowed(tensor, part) for part in split]), narrowed(tensor, box))
    assert max(part.size[0] for part in split) == -(-box.size[0] // parts)


def test_a_split_has_its_empty_parts_last() -> None:
    assert [part.size[0] for part in Box.whole((5, 2)).split(4)] == [2, 2, 1, 0]
    assert [part.size[0] for part in Box.whole((0, 2)).split(3)] == [0, 0, 0]
    assert Box.whole(()).split(1) == [Box.whole(())]


def test_a_box_travels_as_two_lists() -> None:
    box = Box((1, 2), (3, 4))
    assert msgspec.to_builtins(box) == [(1, 2), (3, 4)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(box), type=Box) == box
    assert {box: 1}[Box((1, 2), (3, 4))] == 1


# ------------------------------------------------------------ views


@quick
@given(st.lists(st.integers(0, 5), max_size=4).map(tuple).filter(lambda shape: 0 not in shape))
def test_contiguous_strides_are_those_of_torch(shape: Shape) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@quick
@given(shape_and_boxes(1))
def test_the_box_of_a_narrowed_view_is_the_box_it_was_narrowed_to(drawn: tuple[Shape, list[Box]]) -> None:
    shape, (box,) = drawn
    view = narrowed(numbered(shape), box)
    assert box_of_view(shape, view.storage_offset(), view.shape, view.stride()) == box


@st.composite
def strided_views(draw: st.DrawFn) -> tuple[Shape, Any]:
    """Any view of as many dimensions that stays in the tensor's memory: transposed, stepped, expanded, shifted."""
    shape = draw(SHAPES)
    tensor = numbered(shape)
    size = tuple(draw(st.integers(1, 5)) for _ in shape)
    strides = tuple(draw(st.sampled_from([0, 1, 2, *tensor.stride()])) for _ in shape)
    last = sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))
    if last >= tensor.numel():
        size, last = (1,) * len(shape), 0
    return shape, tensor.as_strided(size, strides, draw(st.integers(0, tensor.numel() - 1 - last)))


@quick
@given(strided_views())
def test_a_view_has_a_box_if_and_only_if_slicing_could_have_made_it(drawn: tuple[Shape, Any]) -> None:
    shape, view = drawn
    first = torch.unravel_index(view.flatten()[0], shape) if shape else ()
    box = Box(tuple(int(i) for i in first), tuple(view.shape))
    fits = all(a + n <= extent for a, n, extent in zip(box.start, box.size, shape, strict=True))
    sliceable = fits and torch.equal(narrowed(numbered(shape), box), view)
    found = box_of_view(shape, view.storage_offset(), view.shape, view.stride())
    assert found == (box if sliceable else None)


def test_a_view_of_another_number_of_dimensions_has_no_box() -> None:
    assert box_of_view((2, 3), 0, (6,), (1,)) is None
    assert box_of_view((6,), 0, (2, 3), (3, 1)) is None


def test_a_scalars_view_is_the_scalar_or_something_else() -> None:
    assert box_of_view((), 0, (), ()) == Box((), ())
    assert box_of_view((), 1, (), ()) is None


# ------------------------------------------------------------ cover


@quick
@given(partitions())
def test_the_parts_of_a_tensor_cover_it_in_any_order(drawn: tuple[Shape, list[Box]]) -> None:
    shape, boxes = drawn
    assert cover(shape, boxes)


@quick
@given(partitions(), st.data())
def test_cover_says_whether_every_element_is_there_exactly_once(
    drawn: tuple[Shape, list[Box]], data: st.DataObject
) -> None:
    shape, boxes = drawn
    i = data.draw(st.integers(0, len(boxes) - 1))
    change = data.draw(st.sampled_from(["leave out", "twice", "exchange"]))
    if change == "leave out":
        del boxes[i]
    elif change == "twice":
        boxes.append(boxes[i])
    else:
        boxes[i] = box_in(data.draw, shape)
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts += marked(shape, box)
    assert cover(shape, boxes) == bool((counts == 1).all())


def test_boxes_that_stick_out_do_not_cover() -> None:
    assert not cover((4,), [Box((0,), (2,)), Box((3,), (2,))])
    assert not cover((2, 2), [Box((1, 0), (2, 2))])
    assert not cover((2, 2), [Box((0, 0), (1, 4))])


def test_a_scalar_is_covered_by_one_box_and_an_empty_tensor_by_none() -> None:
    assert cover((), [Box.whole(())])
    assert not cover((), [])
    assert not cover((), [Box.whole(())] * 2)
    assert cover((0, 3), [])
    assert cover((0, 3), [Box.whole((0, 3))])


@pytest.mark.timeout(20)
def test_the_shards_of_many_ranks_are_checked_without_comparing_each_with_each() -> None:
    boxes = Box.whole((20_000, 1)).split(20_000)  # two hundred million pairs: several minutes
    assert cover((20_000, 1), boxes)
    assert not cover((20_000, 1), [*boxes[:-1], boxes[0]])


def test_a_grid_of_shards_is_checked_as_fast_and_a_hole_in_it_is_seen() -> None:
    cells = [Box((i * 2, j * 3), (2, 3)) for i in range(200) for j in range(200)]
    assert cover((400, 600), cells)
    assert not cover((400, 600), cells[1:])
    assert not cover((400, 600), [*cells[1:], cells[1]])
