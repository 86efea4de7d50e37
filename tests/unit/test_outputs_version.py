"""Weights change while requests run: every token is sent under the version that it was sampled with."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.engine import scheduler_outputs
from sglrollout.engine.scheduler_outputs import Step, _Sender, change_version
from sglrollout.wire.messages import Output
from tests import scheduler_requests
from tests.scheduler_requests import sample

STREAMER = SimpleNamespace(send_to_detokenizer=SimpleNamespace(socket=object()))
QUIET_STREAMER = SimpleNamespace(send_to_detokenizer=SimpleNamespace(socket=None))


class Ended:
    """As SGLang's finish reasons: knows how to say itself as a dict."""

    def to_json(self) -> dict[str, Any]:
        return {"type": "length"}


def request(rid: int = 0, stream: bool = True, interval: int = 100) -> Any:
    """Of those that are sent rarely: its first token at once, and then a hundred at a time."""
    return scheduler_requests.request(rid=rid, stream=stream, interval=interval)


class Sent(NamedTuple):
    version: int
    ended: list[str]
    outputs: list[Output]


class Host:
    """The scheduler's half with a socket to where its host would be."""

    def __init__(self) -> None:
        address = f"inproc://{secrets.token_hex(8)}"
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.bind(address)
        self.replaced: list[Any] = []
        self.sender = _Sender(address, lambda *arguments: self.replaced.append(arguments))
        assert self.sent() == [Sent(0, [], [])]

    def step(self, *requests: Any, skip: Any = None, streamer: Any = STREAMER) -> None:
        """As SGLang does after each step."""
        self.sender.stream(streamer, list(requests), True, skip, False)

    def sent(self) -> list[Sent]:
        """What came since the last look."""
        found = []
        while self._socket.poll(0):
            step = msgspec.msgpack.decode(self._socket.recv(), type=Step)
            outputs = msgspec.msgpack.decode(step.outputs, type=list[Output])
            found.append(Sent(step.weight_version, step.ended, outputs))
        return found

    def tokens(self) -> list[tuple[int, list[int]]]:
        """The same for one request: versions and tokens."""
        return [(sent.version, output.token_ids) for sent in self.sent() for output in sent.outputs]

    def close(self) -> None:
        self._socket.close(0)
        self.sender._socket.close(0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host()
    monkeypatch.setattr(scheduler_outputs, "_sender", host.sender)
    yield host
    host.close()


def test_tokens_that_were_not_sent_yet_go_out_under_the_old_version(host: Host) -> None:
    req = request()
    sample(req, 1)
    host.step(req)
    sample(req, 2, 3)
    host.step(req)
    assert host.tokens() == [(0, [1])]
    change_version(1, [req], 0)
    assert host.tokens() == [(0, [2, 3])]
    sample(req, 4)
    req.finished_reason = Ended()
    host.step(req)
    assert host.tokens() == [(1, [4])]


def test_a_request_that_is_not_streamed_sends_what_it_has_too(host: Host) -> None:
    req = request(rid=49, stream=False)  # its first part has fifty tokens
    sample(req, 1, 2, 3)
    host.step(req)
    assert host.tokens() == []
    change_version(7, [req], 0)
    assert host.tokens() == [(0, [1, 2, 3])]


def test_logprobs_go_with_their_tokens(host: Host) -> None:
    req = request()
    sample(req, 1)
    host.step(req)
    sample(req, 2, 3)
    change_version(1, [req], 0)
    assert [output.logprobs for sent in host.sent() for output in sent.outputs] == [[-0.001], [-0.002, -0.003]]


def test_a_request_without_new_tokens_sends_nothing(host: Host) -> None:
    req = request()
    change_version(1, [req, request(1)], 0)
    assert host.sent() == []
    sample(req, 1)
    host.step(req)
    assert host.tokens() == [(1, [1])]


def test_a_request_that_has_finished_is_left_to_its_own_step(host: Host) -> None:
    """With overlapped scheduling it is still among the running ones, and its end must be sent once."""
    req = request()
    sample(req, 1)
    req.finished_reason = Ended()
    change_version(1, [req], 1)
    assert host.sent() == []
    host.step(req)
    (sent,) = host.sent()
    assert (sent.version, sent.ended) == (0, [req.rid])
    assert sent.outputs[0].finish is not None


def test_steps_that_ran_before_the_change_and_are_counted_after_it_are_of_the_old_version(host: Host) -> None:
    req = request()
    sample(req, 1)
    host.step(req)
    change_version(1, [req], 2)
    host.tokens()
    for token in (2, 3, 4, 5):
        sample(req, token)
        host.step(req)
    req.finished_reason = Ended()
    host.step(req)
    assert host.tokens() == [(0, [2]), (0, [3]), (1, [4, 5])]


def test_a_late_step_sends_all_that_a_request_has_so_that_nothing_of_it_waits(host: Host) -> None:
    rare, streamed = request(49, stream=False), request(1)
    for req in (rare, streamed):
        sample(req, 1)
        host.step(req)
    change_version(1, [rare, streamed], 1)
    host.sent()
    for req in (rare, streamed):
        sample(req, 2)
    host.step(rare, streamed)
    (sent,) = host.sent()
    assert sent.version == 0
    assert [output.token_ids for output in sent.outputs] == [[2], [2]]


def test_a_request_that_ends_in_a_late_step_ends_once_under_the_old_version(host: Host) -> None:
    req = request()
    sample(req, 1)
    host.step(req)
    change_version(1, [req], 1)
    host.sent()
    sample(req, 2)
    req.finished_reason = Ended()
    host.step(req)
    host.step(req)
    assert [(sent.version, sent.ended, len(sent.outputs)) for sent in host.sent()] == [(0, [req.rid], 1)]


def test_the_same_version_again_has_no_late_steps(host: Host) -> None:
    """As when a sync was called off: the engine goes on, with what it had."""
    req = request()
    change_version(3, [], 0)
    change_version(3, [req], 2)
    sample(req, 1)
    host.step(req)
    assert host.tokens() == [(3, [1])]


def test_what_is_left_to_send_when_a_sync_is_called_off_is_of_the_version_that_stays(host: Host) -> None:
    req = request()
    change_version(3, [], 0)
    sample(req, 1)
    change_version(3, [req], 0)
    assert host.tokens() == [(3, [1])]


def test_versions_need_not_follow_each_other(host: Host) -> None:
    req = request(interval=1)
    for version in (10, 11, 500):
        change_version(version, [req], 0)
        sample(req, version)
        host.step(req)
    assert host.tokens() == [(10, [10]), (11, [11]), (500, [500])]


def test_idle_steps_go_to_sglang_and_are_not_late_ones(host: Host) -> None:
    req = request()
    change_version(1, [], 1)
    host.sender.stream(STREAMER, [], True, None, True)
    assert len(host.replaced) == 1
    sample(req, 1)
    host.step(req)
    assert host.tokens() == [(0, [1])]


def test_a_skipped_request_is_skipped_in_a_late_step_too(host: Host) -> None:
    chunked, other = request(1), request(2)
    change_version(1, [], 1)
    sample(chunked, 1)
    sample(other, 1)
    host.step(chunked, other, skip=chunked)
    (sent,) = host.sent()
    assert [output.request_id for output in sent.outputs] == [2]


def test_a_tp_rank_that_only_keeps_the_books_sends_nothing_and_notes_what_was_sent(host: Host) -> None:
    req = request()
    sample(req, 1)
    host.step(req, streamer=QUIET_STREAMER)
    sample(req, 2)
    change_version(1, [req], 0)
    assert host.sent() == []
    assert req.send_token_offset == 2


def test_without_a_sender_a_change_of_version_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_outputs, "_sender", None)
    req = request()
    sample(req, 1)
    change_version(1, [req], 3)
    assert req.send_token_offset == 0


CHANGE = st.tuples(st.just("change"), st.integers(0, 2))
STEPS = st.lists(st.one_of(st.tuples(st.just("step"), st.integers(0, 3)), CHANGE), max_size=40)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.booleans(), st.integers(1, 5), st.integers(0, 99))
def test_every_token_arrives_once_under_the_version_it_was_sampled_with(
    steps: list[tuple[str, int]], stream: bool, interval: int, rid: int
) -> None:
    """The engine runs up to two steps ahead of those that are counted."""
    host = Host()
    req, version, token = request(rid, stream, interval), 0, 0
    expected: list[tuple[int, int]] = []
    pending: list[tuple[int, list[int]]] = []

    def count_one() -> None:
        sampled_under, tokens = pending.pop(0)
        sample(req, *tokens)
        expected.extend((sampled_under, token) for token in tokens)
        host.step(req)

    for kind, number in steps:
        if kind == "step":
            pending.append((version, list(range(token, token + number))))
            token += number
            while len(pending) > 2:
                count_one()
        else:
            while len(pending) > number or any(of != version for of, _ in pending):
                count_one()
            version += 1
            host.sender.change_version(version, [req], len(pending))
    while pending:
        count_one()
    req.finished_reason = Ended()
    host.step(req)
    assert [(of, one) for of, tokens in host.tokens() for one in tokens] == expected
    host.close()
