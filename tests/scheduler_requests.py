"""Requests as SGLang's scheduler has them, as far as our half reads them."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any


def request(*, rid: int = 5, stream: bool = True, interval: int | None = 1, logprobs: bool = True) -> Any:
    """The attributes of SGLang's ``Req`` that are read, as it begins with them."""
    return SimpleNamespace(
        rid=f"{rid:016x}",
        origin_input_ids=[1, 2, 3],
        cached_tokens=2,
        output_ids=array("q"),
        send_token_offset=0,
        finished_reason=None,
        finished_output=None,
        finished_len=None,
        stream=stream,
        sampling_params=SimpleNamespace(stream_interval=interval),
        return_logprob=logprobs,
        logprob=SimpleNamespace(output_token_logprobs_val=[], output_token_logprobs_idx=[]),
    )


def sample(req: Any, *tokens: int) -> None:
    for token in tokens:
        req.output_ids.append(token)
        req.logprob.output_token_logprobs_val.append(-token / 1000)
        req.logprob.output_token_logprobs_idx.append(token)
