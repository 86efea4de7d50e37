"""Whether a server lives: it is asked for its load, and is dead once it did not answer three times."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import anyio

from sglrollout.engine.http import RefusedError, UnreachableError

_BUSY_S, _IDLE_S = 0.5, 2.0
_REFUSED_S = 0.3
_MOST_FAILURES = 3
_LOOKS_PER_CHECK = 8


class Health:
    """Probes one server.

    Args:
        probe: asks it within so many seconds.
        dead_after_s: that three probes take together, none of them answered.
    """

    def __init__(self, probe: Callable[[float], Awaitable[None]], dead_after_s: float) -> None:
        self._probe, self._each_s = probe, dead_after_s / _MOST_FAILURES
        self._asked = anyio.Event()
        self._waiting: list[anyio.Event] = []
        self._num_looks = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time for what is looked at more seldom."""
        return self._num_looks % _LOOKS_PER_CHECK == 0

    async def verdict(self) -> None:
        """Wait for an answer to a question that is asked after now. Where there is none, it is dead, and who waits is
        cancelled, if it is looked after at all."""
        answered = anyio.Event()
        self._waiting.append(answered)
        self._asked.set()
        with anyio.move_on_after(2 * _MOST_FAILURES * self._each_s):
            await answered.wait()

    def hurry(self) -> None:
        """Look now: it may have been a while, as nothing ran."""
        self._asked.set()

    async def look(self, busy: bool) -> str:
        """One look, after a while, or as soon as somebody waits for a verdict.

        Returns:
            why it is dead, if so.
        """
        with anyio.move_on_after(_BUSY_S if busy else _IDLE_S):
            await self._asked.wait()
        self._asked = anyio.Event()
        waiting, self._waiting = self._waiting, []
        self._num_looks += 1
        for number in range(1, _MOST_FAILURES + 1):
            begun = time.monotonic()
            try:
                await self._probe(self._each_s)
                break
            except RefusedError as error:
                return f"it does not say how it is any more: {error}"
            except UnreachableError as error:
                if number == _MOST_FAILURES:
                    return f"it does not answer: {error}"
                left_s = self._each_s - (time.monotonic() - begun)  # none, where this process had no turn meanwhile
                await anyio.sleep(_REFUSED_S if error.refused else max(0.0, left_s))
        for answered in waiting:
            answered.set()
        return ""
