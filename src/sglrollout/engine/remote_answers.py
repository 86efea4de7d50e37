"""What SGLang's ``/generate`` takes and answers, as our requests and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sglrollout.engine.finish_reasons import to_finish
from sglrollout.engine.http import UnreachableError, is_gateway_status, quoted
from sglrollout.engine.protocol import Request
from sglrollout.types import VersionSpan
from sglrollout.wire.messages import Finish, Output

SAMPLING_NAMES = {"seed": "sampling_seed"}
NOT_SAMPLING = frozenset({"logprobs", "lora"})
UNSTREAMED_INTERVAL = 50
"""Tokens between two parts of what nobody streams, where parts cost little: what there is when its engine is lost."""
LOADING = "sglrollout-loading"
"""The weight version of a server whose weights are being replaced."""


def body_of(request: Request, rid: str, in_parts: bool) -> dict[str, Any]:
    """The request as SGLang takes it.

    Args:
        in_parts: also where nobody streams it.
    """
    sampling = {
        SAMPLING_NAMES.get(name, name): value for name, value in request.sampling.items() if name not in NOT_SAMPLING
    }
    streams = bool(request.chunk_tokens) or in_parts
    if streams:
        sampling["stream_interval"] = request.chunk_tokens or UNSTREAMED_INTERVAL
    body = {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "sampling_params": sampling,
        "return_logprob": request.logprobs is not None,
        "logprob_start_len": -1,
        "stream": streams,
    }
    lora = request.sampling.get("lora")
    return body if lora is None else {**body, "lora_path": lora}


def version_of(label: object) -> int | None:
    """The weight version behind a server's label: a number is that number, any other is the start-up weights.

    Returns:
        ``None`` for weights that are being replaced, or were when that was broken off.
    """
    if label == LOADING:
        return None
    return int(label) if isinstance(label, str) and label.isascii() and label.isdigit() else 0


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] | None = None
    prompt_tokens: int | None = 0
    cached_tokens: int | None = 0
    completion_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class _Answer(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: Any = None


class _MispairedError(Exception):
    """Tokens and logprobs do not belong together."""


_decode = msgspec.json.Decoder(_Answer).decode


class AnswerReader:
    """Hands what comes of one request to it: tokens, their logprobs and versions, and the end.

    Args:
        request: as it was when the server got it; it may have tokens of other engines.
        incremental: what comes are new tokens alone, and not all so far.
        on_finish: called before the request ends, after which it may be another engine's at once.
    """

    def __init__(self, request: Request, incremental: bool, on_finish: Callable[[], None]) -> None:
        self._request, self._incremental, self._on_finish = request, incremental, on_finish
        self._start = len(request.token_ids)
        self._num_tokens = 0
        self._with_logprobs = request.logprobs is not None
        self._version = 0
        self.finished = False

    def take(self, data: bytes) -> bool:
        """One answer, or one part of a stream.

        Returns:
            whether there was anything new in it.

        Raises:
            UnreachableError: it is not one of SGLang's, or an error that another engine may not have.
        """
        try:
            answer = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreachableError(f"its answer is not SGLang's ({error}): {quoted(data)}") from None
        if answer.error is not None:
            self._take_error(answer.error)
            return True
        if answer.meta_info is None or answer.output_ids is None:
            raise UnreachableError(f"its answer is not SGLang's: {quoted(data)}")
        try:
            return self._take(answer.output_ids, answer.meta_info)
        except _MispairedError as error:
            self._finish(Finish("error", message=str(error)))
            return True

    def _take_error(self, error: Any) -> None:
        fields = error if isinstance(error, dict) else {}
        message, status = quoted(str(fields.get("message", error))), fields.get("code")
        if is_gateway_status(status):
            raise UnreachableError(f"HTTP {status}: {message}")
        self._finish(Finish("error", message=message))

    def _take(self, ids: list[int], meta: _Meta) -> bool:
        reason, new = meta.finish_reason, self._new(ids, meta)
        if reason is not None and is_gateway_status(reason.get("status_code")):
            raise UnreachableError(f"HTTP {reason['status_code']}: {quoted(str(reason.get('message', '')))}")
        logprobs = self._logprobs(new, meta)
        self._version = self._version_now(meta.weight_version)
        if reason is None:
            if new:
                self._deliver(new, logprobs, self._version)
            return bool(new)
        finish = to_finish(reason, meta.prompt_tokens or 0, meta.cached_tokens or 0)
        if finish.reason == "error":  # a request that SGLang refused was run on another prompt, to end it
            self._finish(finish)
            return True
        spans = self._spans(meta.weight_versions or (), self._num_tokens + len(new))
        known = self._num_tokens
        for span in spans or [VersionSpan(self._version, known, known + len(new))]:
            begin, end = max(span.start, known) - known, span.end - known
            if begin < end:
                self._deliver(new[begin:end], logprobs and logprobs[begin:end], span.version)
        if spans:
            self._request.correct(self._start, spans)
        self._finish(finish)
        return True

    def _new(self, ids: list[int], meta: _Meta) -> list[int]:
        if not self._incremental:
            return ids[self._num_tokens :]
        if meta.finish_reason is not None and (meta.completion_tokens or 0) <= self._num_tokens:
            return []  # of an abort: SGLang repeats the last token
        return ids

    def _logprobs(self, new: list[int], meta: _Meta) -> list[float] | None:
        if not self._with_logprobs:
            return None
        given = meta.output_token_logprobs or []
        mine = given[len(given) - len(new) :] if self._incremental else given[self._num_tokens :][: len(new)]
        if [token for _, token, _ in mine] != new:
            raise _MispairedError("SGLang paired a logprob with another token, or with none")
        values = [value for value, _, _ in mine if value is not None]
        if len(values) != len(new):
            raise _MispairedError("SGLang gave a token without its logprob")
        return values

    def _version_now(self, label: str | None) -> int:
        version = version_of(label)
        return self._version if version is None else version

    def _spans(self, spans: Sequence[_Span], num_tokens: int) -> list[VersionSpan]:
        """The final account of versions, which SGLang gives from 0.5.19 on; empty if it is not of all tokens."""
        found, end = list[VersionSpan](), 0
        for span in spans:
            if span.start != end:
                return []
            end = min(span.end, num_tokens)
            if end > span.start:
                found.append(VersionSpan(self._version_now(span.version), span.start, end))
        return found if end == num_tokens else []

    def _deliver(self, ids: list[int], logprobs: list[float] | None, version: int) -> None:
        self._num_tokens += len(ids)
        self._request.deliver(Output(self._request.request_id, ids, logprobs), version)

    def _finish(self, finish: Finish) -> None:
        self.finished = True
        self._on_finish()
        self._request.deliver(Output(self._request.request_id, [], None, finish), self._version)
