"""Inside SGLang's scheduler: sends each step's tokens straight to the host, in the channel's own encoding.

SGLang's output streamer adds to some thirty parallel lists for every output, pickles them with timing objects, and the
tokenizer manager turns them into dicts, texts and events. This replaces that for the requests of an engine host: token
ids, logprobs and the end, encoded once here, forwarded unread by the host, decoded once by the client.

Everything that it reads of a request, and the method that it replaces, is the same in SGLang 0.5.17 to 0.5.23;
:func:`can_replace` checks the method's signature.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import zmq

from sglrollout.engine.finish_reasons import to_finish
from sglrollout.wire.messages import Finish, Output

_METHOD = "_stream_output_generation"
_PARAMETERS = ["self", "reqs", "return_logprob", "skip_req", "is_idle_batch"]
_UNSTREAMED_INTERVAL = 50


class Step(msgspec.Struct, array_like=True):
    """One scheduler step: encoded :class:`Output` objects, and the ids of those requests that ended with it.

    ``weight_version`` is that of its tokens.
    """

    weight_version: int
    ended: list[str]
    outputs: msgspec.Raw


NO_OUTPUTS = msgspec.Raw(msgspec.msgpack.encode([]))


def can_replace() -> bool:
    """Whether this SGLang's output streamer has the method to replace, as this module knows it."""
    try:
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    except ImportError:
        return False
    method = getattr(SchedulerOutputStreamer, _METHOD, None)
    return method is not None and list(inspect.signature(method).parameters) == _PARAMETERS


class _Sender:
    """Stands in for the streamer's method: sends what is new of each request, stamped with the weights' version."""

    def __init__(self, address: str, original: Any) -> None:
        self._original = original
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._sends = True
        self._version, self._last_version, self._num_late_steps = 0, 0, 0
        self._socket.send(self._encode(Step(0, [], NO_OUTPUTS)))

    def stream(self, streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any, is_idle_batch: bool) -> None:
        if is_idle_batch:
            self._original(streamer, reqs, return_logprob, skip_req, is_idle_batch)
            return
        self._sends = streamer.send_to_detokenizer.socket is not None  # not in a TP rank that only keeps the books
        if self._num_late_steps:  # run before the weights changed, and counted only now: nothing of it may wait
            self._num_late_steps -= 1
            self._send(reqs, self._last_version, skip_req, whole=True)
        else:
            self._send(reqs, self._version, skip_req)

    def change_version(self, version: int, live: list[Any], num_late_steps: int) -> None:
        self._send([req for req in live if req.finished_reason is None], self._version, whole=True)
        if version != self._version:
            self._last_version, self._version, self._num_late_steps = self._version, version, num_late_steps

    def _send(self, reqs: list[Any], version: int, skip_req: Any = None, whole: bool = False) -> None:
        outputs, ended = [], []
        for req in reqs:
            if req is skip_req or (output := _output(req, whole)) is None:
                continue
            outputs.append(output)
            if output.finish is not None:
                ended.append(req.rid)
        if outputs and self._sends:
            self._socket.send(self._encode(Step(version, ended, msgspec.Raw(self._encode(outputs)))))


_sender: _Sender | None = None


def send_steps_to(address: str) -> None:
    """Replace the streamer's method in this process. Steps go to the host's ZMQ socket at ``address``.

    An empty step goes at once, from which the host knows that this is in place.
    """
    global _sender
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    sender = _sender = _Sender(address, getattr(SchedulerOutputStreamer, _METHOD))

    def stream(
        self: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None, is_idle_batch: bool = False
    ) -> None:
        sender.stream(self, reqs, return_logprob, skip_req, is_idle_batch)

    setattr(SchedulerOutputStreamer, _METHOD, stream)


def change_version(version: int, live: list[Any], num_late_steps: int) -> None:
    """Stamp tokens with ``version`` from now on. What ``live`` requests have so far is sent under the one before.

    Args:
        num_late_steps: steps that ran before now and whose tokens come after: they too are of the one before.
    """
    if _sender is not None:
        _sender.change_version(version, live, num_late_steps)


def _output(req: Any, whole: bool = False) -> Output | None:
    """What is new of one request, if it is time to send it or ``whole``. Notes in it what was sent, as SGLang does."""
    sent, finish = req.send_token_offset, None
    if req.finished_reason is not None:
        if req.finished_output:
            return None  # with overlapped scheduling a finished request comes by twice
        req.finished_output = True
        finish = to_finish(req.finished_reason.to_json(), len(req.origin_input_ids), req.cached_tokens)
        if req.finished_len is None:
            req.finished_len = len(req.output_ids)
        ids = req.output_ids[: req.finished_len]
        if finish.reason == "error":
            # Nothing worth having: a refused request was run on another prompt, to end it (set_finish_with_abort).
            return Output(_number(req.rid), [], None, finish)
    else:
        ids = req.output_ids
        num_unsent = len(ids) - sent
        if num_unsent < (1 if whole else _interval(req, sent)):
            return None
    req.send_token_offset = len(ids)
    new = ids[sent:].tolist()
    if not req.return_logprob:
        return Output(_number(req.rid), new, None, finish)
    end = len(ids)
    values, indices = req.logprob.output_token_logprobs_val, req.logprob.output_token_logprobs_idx
    if list(indices[sent:end]) != new:
        finish = Finish("error", message="SGLang paired a logprob with another token")
        return Output(_number(req.rid), [], [], finish)
    return Output(_number(req.rid), new, list(values[sent:end]), finish)


def _interval(req: Any, sent: int) -> int:
    """How many new tokens are worth a message. A stream's first token is sent at once.

    What is not streamed goes in parts too, so that an abort finds most of it there. The first part's size differs from
    request to request: those that started together would otherwise all be sent in one step, which would then take
    longer than the GPU does.
    """
    if req.stream:
        return (req.sampling_params.stream_interval or 1) if sent else 1
    return _UNSTREAMED_INTERVAL if sent else 1 + _number(req.rid) % _UNSTREAMED_INTERVAL


def _number(rid: str) -> int:
    return int(rid, 16)
