"""Ends engines that hang: requests run in them, and nothing moves; or they answer no command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from sglrollout.wire.messages import EngineInfo

if TYPE_CHECKING:
    from sglrollout.pool.pool import Member, Pool

_LOOKS = 20
_SHORTEST_S, _LONGEST_S = 0.05, 1.0
_MOST_UNANSWERED = 2


class Watchdog:
    """Looks at each engine once in a while, and asks it nothing: a probe would wait behind the work that it watches.

    What counts is how many looks have seen nothing move since something last did, not the time between them: while the
    user's code blocks the event loop nobody looks, and no engine can be blamed. Looks do not count while nothing runs,
    nor while a command is to be answered: it may occupy the scheduler, and has a deadline of its own.

    Args:
        stall_timeout_s: without a sign of progress, while requests run, after which an engine is ended.
        first_timeout_s: the same until its first tokens in a life, before which it may compile kernels.
    """

    def __init__(self, pool: Pool, stall_timeout_s: float, first_timeout_s: float) -> None:
        self._pool, self._stall_s, self._first_s = pool, stall_timeout_s, max(first_timeout_s, stall_timeout_s)
        self._every_s = min(_LONGEST_S, max(_SHORTEST_S, stall_timeout_s / _LOOKS))
        self._seen: dict[str, _Seen] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(self._every_s)
                for member in self._pool.members:
                    if member.serving and (reason := self._fault(member)):
                        del self._seen[member.name]
                        tasks.start_soon(member.engine.kill, reason)

    def _fault(self, member: Member) -> str:
        """Why it must end, if so."""
        engine, seen = member.engine, self._seen.get(member.name)
        if seen is None or seen.life is not engine.info:
            seen = self._seen[member.name] = _Seen(engine.info)
        if engine.num_unanswered >= _MOST_UNANSWERED:
            return f"it hangs: {engine.num_unanswered} commands were not answered in time, and nothing moved"
        if engine.progress != seen.progress or member.paused:
            seen.progress, seen.num_still = engine.progress, 0
            return ""
        num_inflight = self._pool.dispatcher.num_inflight(member)
        if not num_inflight or engine.num_pending:  # which is no sign that it works, either
            return ""
        seen.num_still += 1
        limit_s = self._stall_s if engine.num_outputs else self._first_s
        if seen.num_still * self._every_s < limit_s:
            return ""
        return f"it hangs: nothing moved in it for {limit_s:g} s, while {num_inflight} requests ran (stall_timeout_s)"


class _Seen:
    """What was seen of an engine in one life of it. ``num_still``: looks that count, since something last moved."""

    def __init__(self, life: EngineInfo | None) -> None:
        self.life, self.progress, self.num_still = life, -1, 0
