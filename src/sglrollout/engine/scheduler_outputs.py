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

from sglrollout.wire.messages import Finish, Output

_METHOD = "_stream_output_generation"
_PARAMETERS = ["self", "reqs", "return_logprob", "skip_req", "is_idle_batch"]
_UNSTREAMED_INTERVAL = 50
_NAN = "NaN happened"  # how SGLang ends a request on NaN logits: as if it had matched this stop string


class Step(msgspec.Struct, array_like=True):
    """One scheduler step: encoded :class:`Output` objects, and the ids of those requests that ended with it."""

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


def send_steps_to(address: str) -> None:
    """Replace the streamer's method in this process. Steps go to the host's ZMQ socket at ``address``.

    An empty step goes at once, from which the host knows that this is in place.
    """
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(address)
    encode = msgspec.msgpack.Encoder().encode
    socket.send(encode(Step([], NO_OUTPUTS)))
    original = getattr(SchedulerOutputStreamer, _METHOD)

    def stream(
        self: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None, is_idle_batch: bool = False
    ) -> None:
        if is_idle_batch:
            original(self, reqs, return_logprob, skip_req, is_idle_batch)
            return
        outputs, ended = [], []
        for req in reqs:
            if req is skip_req or (output := _output(req)) is None:
                continue
            outputs.append(output)
            if output.finish is not None:
                ended.append(req.rid)
        if outputs and self.send_to_detokenizer.socket is not None:  # None: a TP rank that only keeps the books
            socket.send(encode(Step(ended, msgspec.Raw(encode(outputs)))))

    setattr(SchedulerOutputStreamer, _METHOD, stream)


def _output(req: Any) -> Output | None:
    """What is new of one request, if it is time to send it. Notes in the request what was sent, as SGLang does."""
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
        if num_unsent < _interval(req, sent):
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


def to_finish(reason: dict[str, Any], prompt_tokens: int = 0, cached_tokens: int = 0) -> Finish:
    """SGLang's finish reason in our words: an abort that carries an error status is an error."""
    kind, message = reason.get("type", "error"), str(reason.get("message") or "")
    if kind == "abort" and reason.get("status_code"):
        kind = "error"
    if reason.get("matched") == _NAN:
        return Finish("error", message="the model produced NaN, or a token outside its vocabulary")
    if kind not in ("stop", "length", "abort", "error"):
        kind, message = "error", f"unknown finish reason {reason}"
    return Finish(kind, reason.get("matched"), message, prompt_tokens or 0, cached_tokens or 0)
