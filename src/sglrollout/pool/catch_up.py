"""How an engine that was restarted gets the current weights: from one that has them, or from a kept snapshot of them.

They go through anonymous files in memory, one for each TP rank: nothing is left of them once no process holds them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from sglrollout.engine.control_groups import available_bytes
from sglrollout.errors import EngineError, EngineRequestError, HostMemoryError, RolloutError

if TYPE_CHECKING:
    from sglrollout.pool.pool import Member, Pool

_TRIES = 3
_DROP_S = 2.0
_MARGIN_BYTES = 64 << 20
_log = logging.getLogger("sglrollout.pool")


class Snapshot:
    """The weights of one version, by TP rank in a file that this process holds. Close it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._fds: list[int] = []

    def open(self, pid: int, fd: int) -> None:
        """Take a file that another process holds open.

        Raises:
            OSError: it does not any more.
        """
        self._fds.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    @property
    def paths(self) -> list[str]:
        """Where another process of this user's finds the files, by TP rank."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    async def close(self) -> None:
        """Give the memory back, whoever else holds the files: a process that was forked from this one does.

        On a thread, for it takes the kernel a while: 0.2 s per GB.
        """
        fds, self._fds = self._fds, []
        if fds:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_free, fds)


class CatchUp:
    """Brings engines the weights that the pool's engines have.

    Args:
        pool: whose engines.
        timeout_s: for one engine to write its weights, and for one to take them.
    """

    def __init__(self, pool: Pool, timeout_s: float) -> None:
        self._pool, self._timeout_s = pool, timeout_s
        self._kept: Snapshot | None = None
        self._latest = 0
        """The latest version of which a snapshot was made, or tried to be."""
        self._lock, self._keeping = anyio.Lock(), anyio.CancelScope()

    async def bring(self, member: Member) -> str:
        """Give an engine that has come up, and is not admitted yet, the current weights. One that hangs then is ended.

        Returns:
            empty once it has them, and nothing has run since that was last looked at; else why it has not.
        """
        pool, reason = self._pool, ""
        for _ in range(_TRIES):
            await pool.until(lambda: pool.admits)
            version = pool.weight_version
            if not pool.is_settled:
                return "it was restarted after a weight sync that failed"
            if member.engine.info is not None and member.engine.info.weight_version == version:
                return ""  # there was no sync yet, or it is a server that has gone on meanwhile
            if is_remote(member):
                return f"it came back, and has not the weights of version {version}: stale until the next sync"
            if self._needs_base and self._kept_of(version) is None and self._peer(member) is None:
                return "it was restarted with its start-up weights, and no engine has others to give"
            try:
                has_them = await self._adopt(member, version)
            except HostMemoryError as error:
                return f"it was restarted, and could not get the current weights: {error}"
            except (EngineError, OSError) as error:
                reason = f"it was restarted, and could not get the current weights: {error}"
                _log.warning("%s: %s", member.name, reason)
                if isinstance(error, EngineRequestError) and error.timed_out and error.engine == member.name:
                    await member.engine.kill("it hangs: it was told to take the current weights, and did not answer")
                    return reason
                continue
            await pool.until(lambda: pool.admits)
            if has_them and pool.weight_version == version and pool.is_settled:
                return ""
            reason = "it was restarted, and whenever it had got weights there were others already"
        return reason

    async def _adopt(self, member: Member, version: int) -> bool:
        """Give it the weights of that version; whether they could be had."""
        if not self._needs_base:
            await self._finish(member, version)
            return True
        kept = self._kept_of(version)
        if kept is not None:
            await self._hand_over(kept, member)
            return True
        snapshot = await self._export(member)
        if snapshot is None:
            return False
        try:
            await self._hand_over(snapshot, member)
        finally:
            await snapshot.close()
        return snapshot.version == version

    async def _hand_over(self, snapshot: Snapshot, member: Member) -> None:
        await member.engine.command("adopt_weights", self._timeout_s, paths=snapshot.paths)
        await self._finish(member, snapshot.version)

    @property
    def _needs_base(self) -> bool:
        """Whether what an engine starts with is not what the others have, an adapter apart."""
        return self._pool.has_new_base or self._pool.adapter is None

    async def _finish(self, member: Member, version: int) -> None:
        if self._pool.adapter is not None:
            await self._pool.adapter.bring(member.engine, self._timeout_s)
        await member.engine.command("resume", self._timeout_s, version=version, flush=True)

    # ------------------------------------------------------------ export

    def _peer(self, like: Member | None = None) -> Member | None:
        """The idlest engine that has the current weights to give, and as many TP ranks as ``like``."""
        peers = [
            member
            for member in self._pool.members
            if member.ready and not is_remote(member) and (like is None or _are_alike(member, like))
        ]
        return min(peers, key=self._pool.dispatcher.num_inflight, default=None)

    async def _export(self, like: Member | None = None) -> Snapshot | None:
        """The current weights, from an engine that has them; ``None`` if none has, or they began to change meanwhile.

        Raises:
            HostMemoryError: there is no room for them.
            EngineError, OSError: that engine failed.
        """
        pool = self._pool
        async with self._lock:  # an engine holds one at a time
            peer = self._peer(like)
            if peer is None or pool.changing:
                return None
            snapshot, num_changes = Snapshot(pool.weight_version), pool.num_changes
            with anyio.CancelScope() as scope, pool.watched_by(lambda: scope.cancel() if pool.changing else None):
                await self._check_room(peer)
                await self._fill(snapshot, peer)
            if pool.num_changes == num_changes:
                return snapshot
            await snapshot.close()
            return None

    async def _check_room(self, peer: Member) -> None:
        answer = await peer.engine.command("weights_size", self._timeout_s)
        available = available_bytes()
        if answer["num_bytes"] + _MARGIN_BYTES > available:
            raise HostMemoryError(peer.name, answer["num_bytes"], available)

    async def _fill(self, snapshot: Snapshot, peer: Member) -> None:
        try:
            answer = await peer.engine.command("export_weights", self._timeout_s)
            for rank in answer["ranks"]:
                snapshot.open(rank["pid"], rank["fd"])
        except BaseException:
            await snapshot.close()
            raise
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_DROP_S), contextlib.suppress(RolloutError):
                await peer.engine.command("drop_export", _DROP_S)

    # ------------------------------------------------------------ a kept snapshot

    async def keep(self) -> None:
        """Keep a snapshot of each version, from soon after its sync until the next one."""
        pool = self._pool
        self._latest = pool.weight_version
        try:
            with self._keeping:
                while True:
                    await pool.until(lambda: pool.weight_version > self._latest and not pool.busy)
                    await self._drop_kept()
                    self._latest = await self._keep_one() if self._needs_base else pool.weight_version
        finally:
            await self._drop_kept()

    def stop(self) -> None:
        """End :meth:`keep`, and give its memory back."""
        self._keeping.cancel()

    async def _keep_one(self) -> int:
        """Make a snapshot of the version of now; that version."""
        pool, version = self._pool, self._pool.weight_version
        num_failures = 0
        while num_failures < _TRIES:  # one that is interrupted has not failed
            await pool.until(lambda: not pool.changing and (pool.weight_version != version or self._peer() is not None))
            if pool.weight_version != version:
                return version
            try:
                self._kept = await self._export()
            except HostMemoryError as error:
                _log.warning("no snapshot of weight version %d is kept: %s", version, error)
                return version
            except (EngineError, OSError) as error:
                num_failures += 1
                _log.warning("a snapshot of weight version %d could not be made: %s", version, error)
            if self._kept is not None:
                return version
        _log.warning("no snapshot of weight version %d is kept: %d tries failed", version, _TRIES)
        return version

    def _kept_of(self, version: int) -> Snapshot | None:
        return self._kept if self._kept is not None and self._kept.version == version else None

    async def _drop_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.close()


def _free(fds: list[int]) -> None:
    for fd in fds:
        os.ftruncate(fd, 0)
        os.close(fd)


def is_remote(member: Member) -> bool:
    """Whether it is a server of others, whose memory is not to be had."""
    return member.engine.info is not None and member.engine.info.remote


def _are_alike(one: Member, other: Member) -> bool:
    infos = one.engine.info, other.engine.info
    return infos[0] is not None and infos[1] is not None and infos[0].tp_size == infos[1].tp_size
