"""The plan of a sync: every element travels once, in its place, and ranks agree on what they gather together."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.boxes import Box, narrowed
from sglrollout.weights.plan import Bucket, Planned, plan_buckets
from sglrollout.wire.link import STAGING

ALIGNMENT_BYTES = 256
GROUPS: list[tuple[int, ...]] = [(), (0, 1), (0, 1, 2, 3), (2, 0, 1)]
BUCKET_BYTES = st.sampled_from([1024, 1500, 4096, 1 << 20])
quick = settings(deadline=None, max_examples=80)


@st.composite
def a_weight(draw: st.DrawFn) -> Planned:
    """Whole, or cut over a group of ranks along any dimension, evenly or not; a rank may hold nothing of it."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 40]), max_size=3)))
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    ranks = draw(st.sampled_from(GROUPS)) if shape else ()
    if not ranks:
        address = draw(st.sampled_from([None, None, ((1, 512),), ((2, 0),)]))
        return Planned(shape, itemsize, (), (Box.whole(shape),), address, sent=draw(st.booleans()))
    d = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[d]), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
    boxes = [
        Box((*(0,) * d, begin, *(0,) * (len(shape) - d - 1)), (*shape[:d], end - begin, *shape[d + 1 :]))
        for begin, end in pairwise([0, *cuts, shape[d]])
    ]
    addresses = draw(st.sampled_from([None, None, tuple((1 + i, 256) for i in range(len(ranks)))]))
    return Planned(shape, itemsize, ranks, tuple(boxes), addresses)


WEIGHTS = st.lists(a_weight(), max_size=8)


def gathered(buckets: list[Bucket]) -> list[Bucket]:
    return [bucket for bucket in buckets if bucket.ranks]


@quick
@given(WEIGHTS, BUCKET_BYTES, st.booleans())
def test_every_element_that_is_sent_is_in_exactly_one_piece(
    weights: list[Planned], bucket_bytes: int, split: bool
) -> None:
    counts = [torch.zeros(weight.shape, dtype=torch.int64) for weight in weights]
    for bucket in plan_buckets(weights, bucket_bytes, split):
        for piece in bucket.pieces(0):
            narrowed(counts[piece.entry], piece.box).add_(1)
    for weight, count in zip(weights, counts, strict=True):
        assert bool((count == int(weight.sent)).all())


@quick
@given(WEIGHTS, BUCKET_BYTES, st.booleans())
def test_pieces_are_aligned_and_never_overlap_and_stay_in_their_ranks_share(
    weights: list[Planned], bucket_bytes: int, split: bool
) -> None:
    start = 3 * ALIGNMENT_BYTES
    for bucket in plan_buckets(weights, bucket_bytes, split):
        if bucket.direct:
            assert not bucket.parts
            continue
        assert len(bucket.parts) == max(1, len(bucket.ranks))
        assert bucket.share % ALIGNMENT_BYTES == 0
        pieces = iter(bucket.pieces(start))
        position = start
        for i, part in enumerate(bucket.parts):
            position = max(position, start + i * bucket.share)
            for own in part:
                piece = next(pieces)
                assert (piece.entry, piece.box, piece.region) == (own.entry, own.box, STAGING)
                assert piece.offset % ALIGNMENT_BYTES == 0
                assert piece.offset >= position
                position = piece.offset + piece.box.numel * weights[piece.entry].itemsize
            assert position <= start + (i + 1) * bucket.share
        assert next(pieces, None) is None
        assert bucket.num_bytes == bucket.share * len(bucket.parts)


@quick
@given(WEIGHTS, BUCKET_BYTES)
def test_no_bucket_is_larger_than_asked_for_unless_it_is_one_row_which_cannot_be_cut(
    weights: list[Planned], bucket_bytes: int
) -> None:
    for bucket in plan_buckets(weights, bucket_bytes):
        if bucket.num_bytes > bucket_bytes:
            pieces = bucket.pieces(0)
            assert len({piece.entry for piece in pieces}) == 1
            assert all(len(part) <= 1 for part in bucket.parts)
            assert all(not piece.box.size or piece.box.size[0] == 1 for piece in pieces)


@quick
@given(WEIGHTS, BUCKET_BYTES)
def test_without_cuts_a_weight_is_in_one_bucket_and_one_that_is_too_large_travels_alone(
    weights: list[Planned], bucket_bytes: int
) -> None:
    seen: dict[int, int] = {}
    for k, bucket in enumerate(plan_buckets(weights, bucket_bytes, split=False)):
        entries = {piece.entry for piece in bucket.pieces(0)}
        assert all(seen.setdefault(entry, k) == k for entry in entries)
        if not bucket.direct and bucket.num_bytes > bucket_bytes:
            assert len(entries) == 1
        for i, part in enumerate(bucket.parts):
            assert all(piece.box == weights[piece.entry].boxes[i] for piece in part)


@quick
@given(WEIGHTS, BUCKET_BYTES, st.booleans(), st.data())
def test_ranks_gather_the_same_buckets_in_the_same_order_whatever_else_they_send(
    weights: list[Planned], bucket_bytes: int, split: bool, data: st.DataObject
) -> None:
    def as_another_rank(weight: Planned) -> Planned:
        if weight.ranks:
            return weight
        addresses = data.draw(st.sampled_from([None, ((1, 0),), ((4, 256),)]))
        return Planned(weight.shape, weight.itemsize, (), weight.boxes, addresses, sent=data.draw(st.booleans()))

    here = plan_buckets(weights, bucket_bytes, split)
    there = plan_buckets([as_another_rank(weight) for weight in weights], bucket_bytes, split)
    assert gathered(here) == gathered(there)
    staged = [bucket for bucket in here if not bucket.direct]
    assert staged[: len(gathered(here))] == gathered(here)


def test_small_weights_share_a_bucket_and_a_full_one_is_followed_by_another() -> None:
    small = Planned((10, 4), 4, (), (Box.whole((10, 4)),))  # 160 bytes, 256 with its padding
    buckets = plan_buckets([small] * 9, 1024)
    assert [[piece.entry for piece in bucket.pieces(0)] for bucket in buckets] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [piece.offset for piece in buckets[0].pieces(0)] == [0, 256, 512, 768]


def test_a_shards_place_counts_from_its_ranks_share() -> None:
    boxes = tuple(Box.whole((6, 16)).split(2))
    (bucket,) = plan_buckets([Planned((6, 16), 4, (0, 1), boxes), Planned((6, 16), 4, (0, 1), boxes)], 4096)
    assert bucket.share == 512
    assert [[piece.offset for piece in part] for part in bucket.parts] == [[0, 256], [0, 256]]
    assert [piece.offset for piece in bucket.pieces(1024)] == [1024, 1280, 1536, 1792]


def test_weights_of_other_groups_of_ranks_are_in_other_buckets() -> None:
    pair, four = Box.whole((4, 4)).split(2), Box.whole((4, 4)).split(4)
    weights = [Planned((4, 4), 4, (0, 1), tuple(pair)), Planned((4, 4), 4, (0, 1, 2, 3), tuple(four))]
    assert [bucket.ranks for bucket in plan_buckets(weights, 1 << 20)] == [(0, 1), (0, 1, 2, 3)]


def test_what_engines_read_where_it_is_comes_first_and_takes_no_room() -> None:
    whole = Box.whole((4, 4))
    staged, direct = Planned((4, 4), 4, (), (whole,)), Planned((4, 4), 4, (), (whole,), ((1, 640),))
    first, second = plan_buckets([staged, direct], 1 << 20)
    assert [(piece.entry, piece.region, piece.offset) for piece in first.pieces(4096)] == [(1, 1, 640)]
    assert first.num_bytes == 0
    assert [piece.entry for piece in second.pieces(0)] == [0]


def test_engines_read_each_ranks_shard_where_it_is_and_nothing_of_an_empty_one() -> None:
    parts = (Box((0, 0), (3, 4)), Box((3, 0), (1, 4)), Box((4, 0), (0, 4)))
    weight = Planned((4, 4), 4, (0, 1, 2), parts, ((1, 0), (2, 512), (3, 0)))
    (bucket,) = plan_buckets([weight], 1024)
    assert [(piece.box, piece.region, piece.offset) for piece in bucket.pieces(768)] == [
        (parts[0], 1, 0),
        (parts[1], 2, 512),
    ]
    assert bucket.num_bytes == 0


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_a_large_weight_is_cut_into_as_few_parts_as_fit(rows: int) -> None:
    (box,) = boxes = (Box.whole((rows, 64)),)  # a row has 256 bytes
    buckets = plan_buckets([Planned((rows, 64), 4, (), boxes)], 1024)
    assert len(buckets) == math.ceil(rows / 4)
    assert sum(piece.box.numel for bucket in buckets for piece in bucket.pieces(0)) == box.numel


def test_nothing_needs_no_bucket() -> None:
    assert plan_buckets([], 1024) == []
