"""What the scheduler's half sends of a request: every token once, with its own logprob, and the end once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrollout.engine.finish_reasons import to_finish
from sglrollout.engine.scheduler_outputs import _output
from sglrollout.wire.messages import Output
from tests.scheduler_requests import request, sample

NAN = "the model produced NaN, or a token outside its vocabulary"


class FinishedReason:
    """As SGLang's: knows how to say itself as a dict."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def to_json(self) -> dict[str, Any]:
        return self.said


def sent(req: Any, steps: list[list[int]], finished_len: int | None = None) -> list[Output]:
    """What goes out over these steps, the request finishing with the last; each step is looked at twice at its end."""
    outputs = []
    for i, tokens in enumerate(steps):
        sample(req, *tokens)
        if i == len(steps) - 1:
            req.finished_reason, req.finished_len = FinishedReason(type="length"), finished_len
        outputs += [output for output in (_output(req),) if output is not None]
    assert _output(req) is None
    return outputs


STEPS = st.lists(st.lists(st.integers(0, 500), max_size=4), min_size=1, max_size=150)


@given(STEPS, st.booleans(), st.integers(1, 20), st.integers(0, 100))
def test_every_token_is_sent_once_with_its_own_logprob(
    steps: list[list[int]], stream: bool, interval: int, rid: int
) -> None:
    outputs = sent(request(rid=rid, stream=stream, interval=interval), steps)
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == [token for step in steps for token in step]
    assert [logprob for output in outputs for logprob in output.logprobs or ()] == [-token / 1000 for token in tokens]
    assert [output.finish is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {rid}


@given(st.integers(1, 60), st.integers(1, 20))
def test_a_stream_sends_its_first_token_at_once_and_then_by_its_interval(num_tokens: int, interval: int) -> None:
    outputs = sent(request(interval=interval), [[token] for token in range(num_tokens)])
    sizes = [len(output.token_ids) for output in outputs]
    assert sizes[0] == 1
    assert all(size == interval for size in sizes[1:-1])
    assert all(size <= interval for size in sizes)


def test_requests_that_start_together_are_not_all_sent_in_one_step() -> None:
    requests = [request(rid=rid, stream=False, interval=None) for rid in range(200)]
    for step in range(150):
        for req in requests:
            sample(req, step)
        num_sent = sum(_output(req) is not None for req in requests)
        assert num_sent <= 4


def test_tokens_after_a_stop_are_not_sent() -> None:
    (output,) = sent(request(stream=False), [[7, 8, 9, 10]], finished_len=2)
    assert output.token_ids == [7, 8]
    assert output.logprobs == [-0.007, -0.008]


def test_an_abort_before_the_first_token_has_no_tokens_and_an_end() -> None:
    req = request()
    assert _output(req) is None
    req.finished_reason = FinishedReason(type="abort", message="gone")
    output = _output(req)
    assert output is not None
    assert output.token_ids == output.logprobs == []
    assert output.finish is not None
    assert (output.finish.reason, output.finish.message) == ("abort", "gone")


def test_a_logprob_of_another_token_ends_the_request_with_an_error() -> None:
    req = request()
    sample(req, 7)
    req.logprob.output_token_logprobs_idx[0] = 8
    output = _output(req)
    assert output is not None
    assert output.token_ids == []
    assert output.finish is not None
    assert output.finish.reason == "error"


def test_a_refused_request_has_an_error_and_none_of_the_tokens_it_was_ended_with() -> None:
    req = request()
    req.return_logprob = (
        False  # as SGLang's set_finish_with_abort leaves it, after it sampled a token of another prompt
    )
    req.output_ids.append(99)
    req.finished_reason = FinishedReason(type="abort", message="Invalid grammar", status_code=400)
    output = _output(req)
    assert output is not None
    assert (output.token_ids, output.logprobs) == ([], None)
    assert output.finish is not None
    assert (output.finish.reason, output.finish.message) == ("error", "Invalid grammar")


def test_logprobs_that_were_not_asked_for_are_not_sent() -> None:
    req = request(logprobs=False)
    req.output_ids.append(7)
    output = _output(req)
    assert output is not None
    assert (output.token_ids, output.logprobs) == ([7], None)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"type": "stop", "matched": "###"}, ("stop", "###", "")),
        ({"type": "stop", "matched": 151645}, ("stop", 151645, "")),
        ({"type": "length", "length": 9}, ("length", None, "")),
        ({"type": "abort", "message": "cancelled"}, ("abort", None, "cancelled")),
        ({"type": "abort", "message": "too long", "status_code": 400}, ("error", None, "too long")),
        ({"type": "stop", "matched": "NaN happened"}, ("error", None, NAN)),
        ({"type": "surprise"}, ("error", None, "unknown finish reason {'type': 'surprise'}")),
    ],
)
def test_a_finish_reason_is_one_of_four(reason: dict[str, Any], expected: tuple[Any, ...]) -> None:
    finish = to_finish(reason)
    assert (finish.reason, finish.stop_match, finish.message) == expected
