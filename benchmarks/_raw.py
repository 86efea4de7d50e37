"""The raw way: SGLang's own in-process ``Engine``, called as a user without this library would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from _measure import Delta, Row, Sample, collect, measure
from _shapes import Work, sampling_params


def run_raw(work: Work) -> None:
    """Measure SGLang's ``Engine``.

    One engine serves all rows: SGLang looks at ``incremental_streaming_output`` for streamed requests alone.
    """
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**work.engine_args(), incremental_streaming_output=True)
    try:
        asyncio.run(measure(_rows(engine, work), work))
    finally:
        engine.shutdown()


def _rows(engine: Any, work: Work) -> dict[str, Row]:
    async def tasks(prompts: list[list[int]], num_tokens: int) -> list[Sample]:
        async def one(prompt: list[int]) -> Sample:
            params = sampling_params(num_tokens)
            return _sample(await engine.async_generate(input_ids=prompt, sampling_params=params, return_logprob=True))

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def batch(prompts: list[list[int]], num_tokens: int) -> list[Sample]:
        params = sampling_params(num_tokens)
        outs = await engine.async_generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return [_sample(out) for out in outs]

    def stream(interval: int) -> Row:
        async def deltas(prompt: list[int], num_tokens: int) -> AsyncIterator[Delta]:
            params = sampling_params(num_tokens, interval)
            outs = await engine.async_generate(
                input_ids=prompt, sampling_params=params, return_logprob=True, stream=True
            )
            async for out in outs:
                yield token_ids(out), logprobs(out)

        async def row(prompts: list[list[int]], num_tokens: int) -> list[Sample]:
            return list(await asyncio.gather(*(collect(deltas(prompt, num_tokens)) for prompt in prompts)))

        return row

    rows = {"raw/tasks": tasks, "raw/stream8": stream(8), "raw/stream1": stream(1)}
    return {**rows, "raw/batch": batch} if work.extra_rows else rows


def _sample(out: dict[str, Any]) -> Sample:
    return Sample(token_ids(out), logprobs(out))


def token_ids(out: dict[str, Any]) -> list[int]:
    """Of one of SGLang's answers or, from an engine with incremental streaming, of one chunk."""
    return list(out["output_ids"])


def logprobs(out: dict[str, Any]) -> list[float]:
    """As :func:`token_ids`."""
    return [value for value, _, _ in out["meta_info"]["output_token_logprobs"]]
