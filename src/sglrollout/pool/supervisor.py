"""The lives of one member: when its engine dies it is started again, and serves once it has the current weights."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import anyio

from sglrollout.errors import RolloutError
from sglrollout.pool.catch_up import CatchUp

if TYPE_CHECKING:
    from sglrollout.pool.pool import Member, Pool

_WINDOW_S = 3600.0
_LONGEST_DELAY_S = 60.0
_log = logging.getLogger("sglrollout.pool")


class Restarts(NamedTuple):
    """Whether engines that die come back.

    Attributes:
        most: restarts of one engine within an hour; 0 is never.
        delay_s: before the first of them; it doubles with each, up to a minute.
        timeout_s: for an engine to come up, and again for it to get the weights of another.
        keep_snapshot: keep the weights of each sync in host memory, for an engine that finds no other one to ask.
    """

    most: int = 0
    delay_s: float = 1.0
    timeout_s: float = 600.0
    keep_snapshot: bool = False


class Supervisor:
    """Runs a member's engine, life after life, until it is closed or dead for good.

    Args:
        pool, member: the member is one of the pool.
        restarts: whether it comes back, and when.
        catch_up: brings an engine that came back the current weights.
    """

    def __init__(self, pool: Pool, member: Member, restarts: Restarts, catch_up: CatchUp) -> None:
        self._pool, self._member, self._restarts, self._catch_up = pool, member, restarts, catch_up
        self._begun_s: list[float] = []
        self._all = anyio.CancelScope()
        self._attempt: anyio.CancelScope | None = None
        """A restart that is under way, from the start of the engine until it is admitted."""
        self._ending = False
        """The engine died, and what it started may be there yet."""

    async def run(self) -> None:
        """From the time at which the engine is up for the first time."""
        try:
            with self._all:
                await self._member.engine.run()
                self._ending = False
                self._pool.changed()
                while self._member in self._pool.restarting:
                    await self._restart()
        finally:
            self._attempt, self._ending = None, False  # what is left is for whoever closes the engine
            self._pool.changed()

    def stop(self) -> None:
        """End :meth:`run`. The engine is the caller's to close."""
        self._all.cancel()

    async def call_off(self) -> None:
        """End a restart that is under way, and return once nothing is left of it, or of a life that has ended. It does
        not count, and begins again once engines have their memory."""
        if self._attempt is not None:
            self._attempt.cancel()
        await self._pool.until(lambda: self._attempt is None and not self._ending)

    def on_death(self, error: Exception) -> None:
        """The engine ended unasked."""
        if self._attempt is not None and self._attempt.cancel_called:
            return
        self._ending = True
        self._lost(error)

    def _lost(self, error: Exception) -> None:
        """Nothing runs of it now, or soon: it comes back, or is dead for good."""
        _log.error("%s", error)
        num_recent, most, name = self._num_recent(), self._restarts.most, self._member.name
        if num_recent < most:
            _log.warning(
                "%s is restarted in %g s (%d of %d within an hour)", name, self._delay_s(), num_recent + 1, most
            )
            self._member.leave()
            self._pool.changed()
            return
        if most:
            _log.error("%s stays dead: it was restarted %d times within an hour (max_restarts)", name, num_recent)
        self._pool.bury(self._member, error)

    # ------------------------------------------------------------ a restart

    def _num_recent(self) -> int:
        since_s = time.monotonic() - _WINDOW_S
        self._begun_s = [begun_s for begun_s in self._begun_s if begun_s > since_s]
        return len(self._begun_s)

    def _delay_s(self) -> float:
        return min(_LONGEST_DELAY_S, self._restarts.delay_s * 2.0 ** min(self._num_recent(), 30))

    async def _restart(self) -> None:
        """One try, and the engine's life if it succeeds."""
        await anyio.sleep(self._delay_s())
        await self._pool.until(lambda: self._pool.has_its_memory)
        self._begun_s.append(time.monotonic())
        self._member.num_restarts += 1
        with anyio.CancelScope() as attempt:
            self._attempt = attempt
            await self._live()
        if attempt.cancelled_caught:
            with anyio.CancelScope(shield=True):
                await self._member.engine.kill("its restart was called off")
            self._begun_s.pop()
            self._member.num_restarts -= 1
        self._attempt, self._ending = None, False
        self._pool.changed()

    async def _live(self) -> None:
        begun_s = time.monotonic()
        try:
            await self._member.engine.start()
        except Exception as error:
            if not isinstance(error, RolloutError):
                _log.exception("%s: its start failed", self._member.name)
            self._lost(error)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._come_back, begun_s)
            await self._member.engine.run()
            tasks.cancel_scope.cancel()

    async def _come_back(self, begun_s: float) -> None:
        stale = await self._catch_up.bring(self._member)
        await self._pool.until(lambda: self._pool.admits)
        if not self._member.engine.alive:  # which is about to be told
            return
        self._attempt = None
        self._pool.admit(self._member, stale)
        seconds, name = time.monotonic() - begun_s, self._member.name
        if stale:
            _log.warning("%s was restarted in %.1f s and takes no work until a weight sync: %s", name, seconds, stale)
        else:
            _log.info("%s was restarted in %.1f s", name, seconds)
