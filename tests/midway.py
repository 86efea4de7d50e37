"""For tests of what becomes of samples that run when something happens."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

import sglrollout as sr

Test = TypeVar("Test", bound=Callable[..., Awaitable[None]])
_ATTEMPTS = 3


class TooLateError(Exception):
    """All samples had ended before what was to meet them."""


async def until_running(rollout: sr.AsyncRolloutEngine, num_samples: int) -> None:
    """Wait until so many samples are in the engines, and have some tokens."""
    with anyio.fail_after(30):
        while sum(engine.num_inflight for engine in rollout.engines) < num_samples:
            await anyio.sleep(0.01)
    await anyio.sleep(0.3)


def refuse_if_too_late(generating: asyncio.Task[Any], *what_happened: object) -> None:
    """Raise TooLateError if the samples of ``generating`` have ended."""
    if generating.done():
        raise TooLateError(*what_happened)


def again_if_too_late(test: Test) -> Test:
    """Begin a test again if it raises TooLateError: on a machine that others use, this process may stand still for
    seconds while engines go on. It fails if that happens each time."""

    @functools.wraps(test)
    async def attempts(*args: Any, **kwargs: Any) -> None:
        for _ in range(_ATTEMPTS - 1):
            try:
                return await test(*args, **kwargs)
            except TooLateError:
                pass
        await test(*args, **kwargs)

    return attempts  # type: ignore[return-value]
