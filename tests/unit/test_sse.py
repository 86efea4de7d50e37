"""Server-sent events, however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrollout.engine.sse import EventReader, EventTooLongError

MOST = 1 << 16
DATA = st.binary(max_size=40).map(lambda data: data.replace(b"\r", b"").replace(b"\n", b""))


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader(MOST)
    return [event for piece in pieces for event in reader.feed(piece)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(bounds)]


@given(st.lists(DATA, max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 1000)), st.data())
def test_events_come_out_whole_however_they_are_cut(
    events: list[bytes], end: bytes, places: list[int], data: st.DataObject
) -> None:
    stream = b""
    for event in events:
        noise = data.draw(st.sampled_from([b"", b": a comment" + end, b"event: x" + end, b"id: 7" + end, end]))
        stream += noise + b"data: " + event + end + end
    stream += b":"  # else a lone \r at the end may be half of a line's end
    assert read(cut(stream, places)) == events


@given(st.binary(max_size=300), st.lists(st.integers(0, 1000)))
def test_no_bytes_break_it_and_cuts_change_nothing(data: bytes, places: list[int]) -> None:
    assert read(cut(data, places)) == read([data])


def test_lines_of_one_event_are_one_and_what_is_unfinished_waits() -> None:
    reader = EventReader(MOST)
    assert reader.feed(b"data:a\ndata: b\n") == []
    assert reader.feed(b"\ndata: c") == [b"a\nb"]
    assert reader.feed(b"\r") == []
    assert reader.feed(b"\n\r\n") == [b"c"]


@pytest.mark.parametrize("piece", [b"x" * 1000, b"data: " + b"x" * 1000 + b"\n", b"data: x\n" * 200])
def test_an_event_that_never_ends_is_refused(piece: bytes) -> None:
    reader = EventReader(MOST)

    def feed_on() -> None:
        for _ in range(200):
            reader.feed(piece)

    with pytest.raises(EventTooLongError):
        feed_on()
