"""Verification: whether engines have, bit for bit, the weights that the trainer has now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio

from sglrollout.boxes import Box, narrowed
from sglrollout.checksum import checksum
from sglrollout.concurrency import in_parallel
from sglrollout.engine.protocol import Request
from sglrollout.errors import WeightMismatchError, WeightSyncError
from sglrollout.pool.pool import Member
from sglrollout.weights.sources import Weight, WeightSource
from sglrollout.wire.messages import WeightReport

_CANARY_PROMPT = 16
_CANARY_TOKENS = 16

Sums = dict[tuple[int, Box], int]
"""Checksums of parts of weights: by weight and box."""


def parts_of(report: WeightReport, boxes: Sequence[Sequence[Box]]) -> list[tuple[int, Box]]:
    """What of each weight this TP rank takes, cut by who holds it: in the order in which engines sum it."""
    return [
        (i, met)
        for i, copies in enumerate(report.copies)
        for copy in copies
        for box in boxes[i]
        if (met := copy.intersect(box)) is not None
    ]


def own_sums(
    weights: Sequence[Weight], dtypes: Sequence[str], source: WeightSource, wanted: set[tuple[int, Box]]
) -> Sums:
    """Checksums of those of the ``wanted`` parts that this rank holds, in the dtypes that engines have."""
    import torch

    by_weight: dict[int, list[Box]] = {}
    for i, box in wanted:
        by_weight.setdefault(i, []).append(box)
    read, sums = source.read(), Sums()
    for i, weight in enumerate(weights):
        local = read(i)
        for box in by_weight.get(i, ()):
            if weight.box.numel and box.intersect(weight.box) == box:
                sums[i, box] = checksum(narrowed(local, box.within(weight.box)).to(getattr(torch, dtypes[i])))
    return sums


def compare(
    weights: Sequence[Weight],
    boxes: Sequence[Sequence[Box]],
    reports: Sequence[WeightReport],
    sums: Sequence[Sums],
    theirs: dict[str, list[list[int]]],
) -> None:
    """Hold the engines' sums against the trainer's.

    Args:
        reports: of the TP ranks that ``theirs`` has sums of, in that order.

    Raises:
        WeightMismatchError: they differ.
    """
    known: dict[tuple[int, Box], set[int]] = {}
    for of_rank in sums:
        for part, value in of_rank.items():
            known.setdefault(part, set()).add(value)
    in_order = iter(reports)
    wrong: dict[str, None] = {}
    for engine, ranks in theirs.items():
        for values in ranks:
            report = next(in_order)
            for part, value in zip(parts_of(report, boxes), values, strict=True):
                if known.get(part) != {value}:
                    name = weights[part[0]].spec.name
                    wrong[f"{name} ({engine}, TP rank {report.tp_rank})"] = None
    if wrong:
        raise WeightMismatchError(list(wrong))


async def canary(
    members: Sequence[Member], timeout_s: float, tolerance: float, adapter: str | None
) -> tuple[list[int], list[float]]:
    """Let every engine answer one prompt greedily, with the adapter if there is one.

    Raises:
        WeightSyncError: their answers differ, or are not numbers.
    """
    if not members:
        return [], []
    answers: list[Any] = [None] * len(members)

    async def ask(i: int) -> None:
        info = members[i].engine.info
        assert info is not None
        prompt = [(7 * k + 3) % info.vocab_size for k in range(_CANARY_PROMPT)]
        sampling = {"temperature": 0.0, "max_new_tokens": _CANARY_TOKENS, "ignore_eos": True}
        request = Request(prompt, sampling | ({"lora": adapter} if adapter is not None else {}))
        request.engine = members[i].name
        await members[i].engine.submit(request)
        try:
            with anyio.fail_after(timeout_s):
                while not request.ended:
                    await request.progress()
        except TimeoutError:
            message = f"the canary was not answered within {timeout_s:g} s"
            raise WeightSyncError("verify", message, engine=members[i].name) from None
        finally:
            if not request.ended:
                members[i].engine.abort(request)
        answers[i] = request

    await in_parallel(partial(ask, i) for i in range(len(members)))
    first: Request = answers[0]
    for request in answers:
        if request.error is not None:
            raise WeightSyncError("verify", f"the canary failed: {request.error}", engine=request.engine)
        if not all(math.isfinite(value) for value in request.logprobs):
            raise WeightSyncError("verify", "the canary's logprobs are not finite", engine=request.engine)
        answer, first_answer = (request.token_ids, request.logprobs or ()), (first.token_ids, first.logprobs or ())
        message = _difference(first_answer, answer, tolerance)
        if message:
            raise WeightSyncError("verify", f"{request.engine} {message} {first.engine}", engine=request.engine)
    return list(first.token_ids), list(first.logprobs or ())


def refuse_unequal(answers: Sequence[tuple[Sequence[int], Sequence[float]]], tolerance: float) -> None:
    """Whether the engines of all ranks answer alike.

    Raises:
        WeightSyncError: they do not, or there is no engine.
    """
    if not answers:
        raise WeightSyncError("verify", "no rank owns a running engine")
    for tokens, logprobs in answers[1:]:
        message = _difference(answers[0], (tokens, logprobs), tolerance)
        if message:
            raise WeightSyncError("verify", f"an engine of one rank {message} an engine of another rank")


def _difference(
    one: tuple[Sequence[int], Sequence[float]], other: tuple[Sequence[int], Sequence[float]], tolerance: float
) -> str:
    """Where two answers first differ by more than ``tolerance``, up to the first token that is another."""
    for k, (token, other_token, logprob, other_logprob) in enumerate(
        zip(one[0], other[0], one[1], other[1], strict=False)
    ):
        if abs(logprob - other_logprob) > tolerance:
            return f"gives token {k} of the canary a logprob {abs(logprob - other_logprob):.4f} away from that of"
        if token != other_token:
            return ""  # a tie, broken another way: from here on they answer another question
    return ""
