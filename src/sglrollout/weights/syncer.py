"""WeightSyncer: brings a trainer's weights into the engines, whole or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import anyio
import msgspec

from sglrollout.boxes import Box
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import (
    ConfigError,
    EngineError,
    LifecycleError,
    WeightMismatchError,
    WeightNamesError,
    WeightSyncError,
)
from sglrollout.pool.pool import Pool
from sglrollout.weights.control import Ranks, machine
from sglrollout.weights.leader import EngineFacts, Leader, PauseMode
from sglrollout.weights.report import SyncReport, VerifyReport
from sglrollout.weights.sources import Weight, WeightSource
from sglrollout.weights.worker import Worker
from sglrollout.wire.link import Listener
from sglrollout.wire.messages import WeightReport, WeightSpec

if TYPE_CHECKING:
    from sglrollout.weights.memory import Exports
    from sglrollout.weights.portable import PortableTransfer
    from sglrollout.weights.transfer import Consumer, Layout, Transfer
    from sglrollout.weights.verify import Sums

T = TypeVar("T")
Method: TypeAlias = Literal["auto", "fast", "portable"]

BUCKET_BYTES = 512 << 20
"""Two processes take turns on a GPU, and a turn costs a fraction of a millisecond: smaller buckets were slower."""
_COLD_S = 300.0
"""For an engine's first answer, for which it may have to compile kernels."""
_MODES = ("abort", "retract", "in_place")


class PoolOwner(Protocol):
    """What the syncer needs of a rollout."""

    async def _ready_pool(self) -> Pool: ...


@dataclass(frozen=True)
class _Facts:
    """What a rank tells the others before a plan is made."""

    machine: str
    device: str
    path: str
    token: str
    digest: str
    boxes: list[Box]
    engines: list[EngineFacts]


class _Stopped(NamedTuple):
    """How a rank is when engines have stopped."""

    is_outdated: bool
    version: int
    pause_s: float
    wake_s: float


@dataclass
class _Plan:
    """What holds from sync to sync, until engines or weights change.

    Attributes:
        method: ``fast`` or ``portable``.
        engines: those that it was made for.
        reports: what the TP ranks of this rank's engines said, in the order of :meth:`Leader.facts`.
        all_reports: the same of every rank's engines.
        serves: whether engines read this rank's memory.
        exports: what this rank has exported.
    """

    method: str
    why_portable: str
    layout: Layout
    engines: list[EngineFacts]
    reports: list[WeightReport]
    all_reports: list[WeightReport]
    serves: bool
    exports: Exports
    transfer: Transfer | PortableTransfer
    num_engines: int
    copy_bytes_per_s: float

    @cached_property
    def num_bytes(self) -> int:
        """Of all weights, once, in the engines' dtypes."""
        import torch

        weights = zip(self.layout.weights, self.layout.dtypes, strict=True)
        return sum(Box.whole(w.spec.shape).numel * getattr(torch, dtype).itemsize for w, dtype in weights)


class WeightSyncer:
    """Brings a trainer's weights into a rollout's engines.

    Where torch.distributed is initialized it is a collective: every trainer rank makes one, and calls each method, in
    the same order. Ranks that own engines give their rollout; the others ``None``. Construct it after
    ``init_process_group``.

        syncer = sr.WeightSyncer(rollout, sr.FSDPSource(model))
        report = await syncer.sync()

    The first sync plans: it learns from every engine where each weight goes, and refuses names that do not fit before
    a byte moves. Later ones reuse that until engines or weights change.

    Args:
        rollout: whose engines this rank owns, started; ``None`` on ranks without.
        source: of this rank's weights: :class:`ModuleSource`, :class:`FSDPSource` or :class:`TensorSource`.
        method: ``fast`` maps the trainer's memory into the engines and copies from there; ``portable`` sends SGLang's
            own flattened buckets; ``auto`` is ``fast`` for models that allow it.
        bucket_bytes: gathered and loaded at a time; ``num_slots`` times that is the extra memory on each GPU, or less
            for a smaller model. Weights that engines read where they are take none.
        num_slots: buckets under way at once, at least 2.
        timeout_s: for each phase of a sync. Whatever happens, every rank hears of it within about that time.
        allow_missing: patterns (``fnmatch``) of engine parameters that need not be written.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        rollout: PoolOwner | None,
        source: WeightSource,
        *,
        method: Method = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        num_slots: int = 2,
        timeout_s: float = 60.0,
        allow_missing: Sequence[str] = (),
    ) -> None:
        if method not in ("auto", "fast", "portable"):
            raise ConfigError("method", method, 'must be "auto", "fast" or "portable"')
        if type(bucket_bytes) is not int or bucket_bytes < 1024:
            raise ConfigError("bucket_bytes", bucket_bytes, "must be an integer of at least 1024")
        if type(num_slots) is not int or num_slots < 2:
            raise ConfigError("num_slots", num_slots, "must be an integer of at least 2")
        if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise ConfigError("timeout_s", timeout_s, "must be a number of seconds greater than 0")
        if not hasattr(source, "weights"):
            raise ConfigError("source", source, "must be a ModuleSource, FSDPSource or TensorSource")
        if rollout is not None and not hasattr(rollout, "_ready_pool"):
            rule = "must be an AsyncRolloutEngine, or None (for a RolloutEngine, use BlockingWeightSyncer)"
            raise ConfigError("rollout", type(rollout).__name__, rule)
        if isinstance(allow_missing, str):
            raise ConfigError("allow_missing", allow_missing, "must be a list of patterns")
        self._rollout, self._source, self._method = rollout, source, method
        self._bucket_bytes, self._num_slots = bucket_bytes, num_slots
        self._timeout_s, self._allow_missing = float(timeout_s), list(allow_missing)
        self._ranks = Ranks(self._timeout_s)
        self._worker = Worker()
        self._directory = new_scratch()
        self._listener = Listener(self._directory)
        self._leader: Leader | None = None
        self._plan: _Plan | None = None
        self._closed = False
        weakref.finalize(self, remove_scratch, self._directory)

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give back shared memory, links and the thread. Safe to call twice; not a collective."""
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            if self._leader is not None and self._leader.pool.attached is self:
                self._leader.pool.attached = None
                await self._leader.detach()
            await self._worker.run(self._forget_plan)
        self._worker.close()
        self._listener.close()
        remove_scratch(self._directory)

    # ------------------------------------------------------------ sync

    async def sync(self, mode: PauseMode = "retract", version: int | None = None) -> SyncReport:
        """Bring the trainer's weights of now into every engine.

        Args:
            mode: what becomes of running requests. ``retract``: they keep their tokens, give up their KV cache and go
                on under the new weights. ``abort``: they end, with their tokens so far. ``in_place``: they go on with
                the KV cache of the old weights, and prefix caches are not emptied.
            version: of these weights, greater than all before; by default one more.

        Returns:
            the same on every rank.

        Raises:
            WeightNamesError: trainer and engines do not have the same weights. Nothing was sent; engines serve on.
            WeightSyncError: it failed, on every rank alike. Engines that may hold half of it are stale: they take no
                work until a sync succeeds.
            DeviceMemoryError: engines cannot wake.
            LifecycleError: closed, or another sync or a sleep is under way.
        """
        if mode not in _MODES:
            raise ConfigError("mode", mode, f"must be one of {', '.join(_MODES)}")
        if version is not None and type(version) is not int:
            raise ConfigError("version", version, "must be an integer")
        if self._closed:
            raise LifecycleError("this weight syncer is closed")
        begun = time.perf_counter()
        leader, scope = await self._enter("pause", "a weight sync")
        with scope:
            return await self._sync(leader, mode, version, begun)

    async def _enter(self, phase: str, what: str) -> tuple[Leader | None, ExitStack]:
        """This rank's engines, for itself alone while the scope lasts. If they cannot be had, all ranks hear of it."""
        failure: Exception | None = None
        leader, scope = None, ExitStack()
        try:
            if self._rollout is not None:
                pool = await self._rollout._ready_pool()
                if self._leader is None or self._leader.pool is not pool:
                    self._leader = Leader(pool, self._timeout_s)
                leader = self._leader
                scope.enter_context(pool.exclusive(what))
                asleep = [member.name for member in pool.members if member.asleep]
                if what == "verify" and asleep:
                    raise LifecycleError(f"{asleep[0]} is asleep: sync, which wakes it, and then verify")
                if what == "verify" and not self._is_attached(leader):
                    raise LifecycleError("another weight syncer has sent its weights since: sync again, then verify")
        except Exception as error:
            failure = error

        async def refuse() -> None:
            assert failure is not None
            raise failure

        if failure is not None:
            scope.close()
            await self._phase(phase, refuse)
        return leader, scope

    async def _sync(self, leader: Leader | None, mode: PauseMode, version: int | None, begun: float) -> SyncReport:
        plan_s, moving = 0.0, [False]
        engines = leader.facts() if leader is not None else []
        if self._plan is None:  # on every rank alike
            plan_s = await self._make_plan(leader, engines)
        try:
            stopped = await self._stop(leader, engines, mode)
            latest = max(rank.version for rank in stopped)
            if version is not None and version <= latest:
                raise ConfigError("version", version, f"must be greater than {latest}, the last one")
            version = latest + 1 if version is None else version
            if any(rank.is_outdated for rank in stopped):
                plan_s = await self._make_plan(leader, engines)
            assert self._plan is not None
            moving[0] = True
            seconds = await self._move(leader, self._plan, mode, version)
        except BaseException as error:
            await self._after_failure(leader, error, moving[0])
            raise
        seconds["pause_s"] = max(rank.pause_s for rank in stopped)
        seconds["wake_s"] += max(rank.wake_s for rank in stopped)
        plan = self._plan
        return SyncReport(
            version=version,
            method=plan.method,
            why_portable=plan.why_portable,
            mode=mode,
            num_bytes=plan.num_bytes,
            num_tensors=len(plan.layout.weights),
            num_buckets=plan.transfer.num_buckets,
            num_engines=plan.num_engines,
            plan_s=plan_s,
            total_s=time.perf_counter() - begun,
            copy_bytes_per_s=plan.copy_bytes_per_s,
            **seconds,
        )

    async def _stop(self, leader: Leader | None, engines: list[EngineFacts], mode: PauseMode) -> list[_Stopped]:
        """Pause engines; beside that, look whether the plan holds, and wait for the trainer's device."""
        plan = self._plan
        assert plan is not None

        async def stop() -> _Stopped:
            outdated, times = [plan.engines != engines, not self._is_attached(leader)], [0.0, 0.0]

            async def settle() -> None:
                outdated.append(await self._worker.run(lambda: self._settle(plan)))

            async def pause(told: anyio.Event) -> None:
                assert leader is not None
                times[0], attached = await leader.pause(mode, told)
                outdated.append(plan.method == "fast" and not attached)
                times[1] = await leader.wake_weights()

            await _beside(pause if leader is not None else None, settle)
            return _Stopped(any(outdated), leader.pool.weight_version if leader is not None else 0, *times)

        return await self._phase("pause", stop)

    async def _move(self, leader: Leader | None, plan: _Plan, mode: PauseMode, version: int) -> dict[str, float]:
        """Transfer, flush, resume; seconds of each."""
        transfer = self._move_fast if plan.method == "fast" else self._move_portable
        measured = await transfer(leader, plan)
        seconds = {name: max(part[name] for part in measured) for name in ("gather_s", "load_s", "transfer_s")}

        async def finish() -> tuple[float, float, float]:
            if leader is None:
                return 0.0, 0.0, 0.0
            woken = await leader.wake_rest()
            return woken, *await leader.resume(version, flush=mode != "in_place")

        finished = await self._phase("resume", finish)
        for i, name in enumerate(("wake_s", "flush_s", "resume_s")):
            seconds[name] = max(values[i] for values in finished)
        return seconds

    async def _move_fast(self, leader: Leader | None, plan: _Plan) -> list[dict[str, float]]:
        async def move() -> dict[str, float]:
            begun = time.perf_counter()
            results: list[dict[str, float]] = []

            async def hand_over() -> None:
                results.append(
                    await self._worker.run(lambda: plan.transfer.run(self._timeout_s, self._worker.is_cancelled))  # type: ignore[union-attr]
                )

            await _beside(leader.load if leader is not None else None, hand_over)
            return {**results[0], "transfer_s": time.perf_counter() - begun}

        return await self._phase("transfer", move)

    async def _move_portable(self, leader: Leader | None, plan: _Plan) -> list[dict[str, float]]:
        """Bucket by bucket: gathered and packed here while engines load the one before."""
        transfer: PortableTransfer = plan.transfer  # type: ignore[assignment]
        begun, load_s, gather_s = time.perf_counter(), 0.0, 0.0

        async def begin() -> None:
            await self._worker.run(transfer.begin)
            if leader is not None:
                await leader.begin_portable()

        await self._phase("transfer", begin)
        payloads: dict[str, list[bytes]] | None = None
        for k in range(transfer.num_buckets + 1):

            async def step(k: int = k, payloads: dict[str, list[bytes]] | None = payloads) -> Any:
                made: list[dict[Consumer, bytes]] = []
                times = [0.0, 0.0]

                async def make() -> None:
                    started = time.perf_counter()
                    made.append(await self._worker.run(lambda: transfer.bucket(k, self._wait)))
                    times[0] = time.perf_counter() - started

                async def load() -> None:
                    started = time.perf_counter()
                    assert leader is not None
                    await leader.load_portable(payloads or {})
                    times[1] = time.perf_counter() - started

                calls = [make] if k < transfer.num_buckets else []
                await _together(calls + ([load] if leader is not None and payloads is not None else []))
                return made[0] if made else {}, times

            answers = await self._phase("transfer", step)
            gather_s += max(times[0] for _, times in answers)
            load_s += max(times[1] for _, times in answers)
            payloads = _by_engine([made for made, _ in answers])

        async def end() -> dict[str, float]:
            if leader is not None:
                await leader.end_portable()
            return {"gather_s": gather_s, "load_s": load_s, "transfer_s": time.perf_counter() - begun}

        return await self._phase("transfer", end)

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        from sglrollout.weights.transfer import Clock

        Clock(self._timeout_s, self._worker.is_cancelled).wait(is_done, what)

    async def _after_failure(self, leader: Leader | None, error: BaseException, moving: bool) -> None:
        """Leave every engine in a state that tells the truth.

        If weights were moving, the next sync plans anew: on every rank alike, as all are told of the failure.
        """
        with anyio.CancelScope(shield=True):
            if moving:
                await self._worker.run(self._forget_plan)
            if leader is None:
                return
            if moving:
                leader.spoil(f"a weight sync failed: {type(error).__name__}: {error}")
                return
            try:
                await leader.call_off()
            except Exception as second:
                leader.spoil(f"a weight sync failed, and engines did not go on: {second}")

    async def _phase(self, phase: str, work: Callable[[], Awaitable[T]]) -> list[T]:
        """Do this rank's part of a phase; then all hear how it went on all. Every rank's value, or one error."""
        value, failure = None, None
        try:
            value = await work()
        except Exception as error:
            failure = error
        except BaseException:
            self._ranks.leave(phase)
            raise
        try:
            return await self._worker.run(lambda: self._ranks.agree(phase, value, failure))
        except asyncio.CancelledError:
            self._ranks.leave(phase)
            raise

    # ------------------------------------------------------------ verification

    async def verify(self, *, tolerance: float = 0.05) -> VerifyReport:
        """Compare every engine's parameters with the trainer's of now, bit for bit, by checksums made on both sides.

        Call it after a sync, before the trainer's next step. Takes about a second for some billions of parameters.

        Args:
            tolerance: by how much the logprobs of a fixed, greedy completion may differ from engine to engine.

        Raises:
            WeightMismatchError: weights differ; it names them.
            WeightSyncError: engines answer differently, or not at all.
            LifecycleError: there was no sync yet.
        """
        if self._plan is None:
            raise LifecycleError("there is nothing to verify: sync first")
        begun, plan = time.perf_counter(), self._plan
        leader, scope = await self._enter("verify", "verify")
        with scope:
            return await self._verify(leader, plan, tolerance, begun)

    async def _verify(self, leader: Leader | None, plan: _Plan, tolerance: float, begun: float) -> VerifyReport:
        from sglrollout.weights.verify import canary, own_sums, parts_of

        comparable = not any(report.unsuited for report in plan.all_reports)
        wanted = {part for report in plan.all_reports for part in parts_of(report, plan.layout.boxes)}

        async def add_up() -> Any:
            layout = plan.layout
            mine = await self._worker.run(lambda: own_sums(layout.weights, layout.dtypes, self._source, wanted))
            return {key: value for key, value in mine.items() if layout.weights[key[0]].ranks or plan.serves}

        sums: list[Any] = await self._phase("verify", add_up) if comparable else []

        async def compare() -> tuple[int, list[int], list[float], int]:
            if leader is None:
                return 0, [], [], 0
            if comparable:
                theirs = await leader.checksums(plan.layout.boxes)
                _compare(plan, sums, theirs)
            return (
                leader.pool.weight_version,
                *await canary(leader.members, max(self._timeout_s, _COLD_S), tolerance),
                leader.num_bytes,
            )

        answers = await self._phase("verify", compare)
        version, tokens, logprobs, _ = next(answer for answer in answers if answer[1])
        return VerifyReport(
            version=version,
            num_engines=plan.num_engines,
            num_weights=len(plan.layout.weights) if comparable else 0,
            num_bytes=sum(answer[3] for answer in answers),
            canary_tokens=tuple(tokens),
            canary_logprobs=tuple(logprobs),
            seconds=time.perf_counter() - begun,
        )

    # ------------------------------------------------------------ planning

    def _settle(self, plan: _Plan) -> bool:
        """Wait for the optimizer's last step to be over on the device; whether the plan no longer holds."""
        if self._worker.device is not None:
            import torch

            torch.cuda.synchronize(self._worker.device)
        if self._source.changed():
            return True
        return bool(plan.exports.pointers) and plan.exports.has_moved(self._source.read())

    async def _make_plan(self, leader: Leader | None, engines: list[EngineFacts]) -> float:
        """Find out where every weight goes and how, and attach the engines. Returns the seconds that took."""
        begun = time.perf_counter()
        try:
            await self._plan_anew(leader, engines)
        except BaseException:  # on all ranks: no rank may keep a plan that another has not
            with anyio.CancelScope(shield=True):
                await self._worker.run(self._forget_plan)
            raise
        return time.perf_counter() - begun

    async def _plan_anew(self, leader: Leader | None, engines: list[EngineFacts]) -> None:
        if leader is None and self._ranks.size == 1:
            raise ConfigError("rollout", None, "must be given: there is no other rank that could own engines")
        device = _current_device()
        self._worker.device = device
        weights: list[Weight] = []
        token = secrets.token_hex(16)

        async def gather_facts() -> _Facts:
            await self._worker.run(self._forget_plan)
            weights.extend(await self._worker.run(self._source.weights))
            _refuse_duplicates(weights)
            return _Facts(
                machine=machine(),
                device=_uuid(device),
                path=self._listener.path,
                token=token,
                digest=_digest(weights),
                boxes=[weight.box for weight in weights],
                engines=engines,
            )

        facts: list[_Facts] = await self._phase("plan", gather_facts)
        odd = next((rank for rank, fact in enumerate(facts) if fact.digest != facts[0].digest), None)
        if odd is not None:
            raise WeightSyncError("plan", "it has other weights, by name, shape or dtype, than rank 0", odd)
        consumers = _consumers(facts)
        if leader is not None:
            leader.keys = {engine.name: _key(facts, self._ranks.rank, engine.name) for engine in engines}
        if not any(engine.devices for fact in facts for engine in fact.engines):
            device = None  # engines are on the CPU, wherever the trainer is

        async def describe() -> list[WeightReport]:
            if leader is None:
                return []
            return await leader.describe([weight.spec for weight in weights], self._allow_missing)

        reports = await self._phase("plan", describe)
        method, why = self._choose(reports)
        layout = _layout(weights, facts, reports, self._ranks.rank, device)

        async def share() -> Exports:
            layout.check()
            return await self._worker.run(lambda: self._export(layout, method))

        exports = await self._phase("plan", share)

        async def look_for_direct() -> list[bool]:
            return _reachable(weights, facts, exports, self._ranks.rank, _unreachable(device))

        direct = [
            i for i, every in enumerate(zip(*await self._phase("plan", look_for_direct), strict=True)) if all(every)
        ]

        async def prepare() -> float:
            mine = consumers[self._ranks.rank]
            near = {rank: e for rank, e in enumerate(exports) if facts[rank].machine == facts[self._ranks.rank].machine}
            plan = await self._worker.run(lambda: self._build(layout, method, why, mine, engines, facts, near, direct))
            plan.reports = reports[self._ranks.rank]
            plan.all_reports = [report for of_rank in reports for report in of_rank]
            self._plan = plan
            return plan.copy_bytes_per_s

        speeds = await self._phase("plan", prepare)
        assert self._plan is not None
        self._plan.copy_bytes_per_s = max(speeds)

        async def attach() -> None:
            if method != "fast":
                return
            transfer: Transfer = self._plan.transfer  # type: ignore[union-attr,assignment]

            async def accept() -> None:
                await self._worker.run(lambda: transfer.accept(self._listener, token, self._timeout_s))

            async def send() -> None:
                if leader is not None:
                    await leader.attach(_links(facts, self._ranks.rank, consumers))

            await _together([accept, send])

        await self._phase("plan", attach)
        if leader is not None:
            leader.pool.attached = self

    def _is_attached(self, leader: Leader | None) -> bool:
        """Whether engines hold this syncer's plan; another one may have come between."""
        return leader is None or leader.pool.attached is self

    def _choose(self, reports: list[list[WeightReport]]) -> tuple[str, str]:
        """The method, and why it is portable if nobody asked for that.

        Raises:
            WeightNamesError: the names do not fit.
            WeightSyncError: ``fast`` was asked for, and the model does not allow it.
        """
        every = [report for of_rank in reports for report in of_rank]
        if not every:
            raise WeightSyncError("plan", "no rank owns a running engine")
        wrong = {
            kind: list(dict.fromkeys(name for report in every for name in getattr(report, kind)))
            for kind in ("missing", "unexpected", "duplicates", "mismatched")
        }
        if any(wrong.values()):
            raise WeightNamesError(**wrong)
        unsuited = next((report.unsuited for report in every if report.unsuited), "")
        if unsuited and self._method == "fast":
            raise WeightSyncError("plan", f'method="fast" does not suit this model: {unsuited}')
        if unsuited or self._method == "portable":
            return "portable", unsuited
        return "fast", ""

    def _export(self, layout: Layout, method: str) -> Exports:
        from sglrollout.weights.memory import Exports, export_weights

        if method != "fast" or layout.device is None or not self._source.persistent:
            return Exports()
        return export_weights(self._source.read(), len(layout.weights), layout.device)

    def _build(
        self,
        layout: Layout,
        method: str,
        why: str,
        consumers: list[tuple[str, int]],
        engines: list[EngineFacts],
        facts: list[_Facts],
        exports: dict[int, Exports],
        direct: list[int],
    ) -> _Plan:
        """Runs on the worker's thread."""
        from sglrollout.weights.memory import copy_bytes_per_s
        from sglrollout.weights.portable import PortableTransfer
        from sglrollout.weights.transfer import Consumer, Transfer

        mine = [Consumer(*consumer) for consumer in consumers]
        transfer: Transfer | PortableTransfer
        if method == "fast":
            transfer = Transfer(layout, self._source, mine, self._bucket_bytes, self._num_slots, exports, direct)
        else:
            transfer = PortableTransfer(layout, self._source, mine, self._bucket_bytes)
        num_engines = sum(len(fact.engines) for fact in facts)
        speed = copy_bytes_per_s(layout.device)
        own = exports[self._ranks.rank]
        return _Plan(method, why, layout, engines, [], [], bool(mine), own, transfer, num_engines, speed)

    def _forget_plan(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.transfer.close()


async def _together(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """All at once. Of several failures the most telling is raised: an engine's own rather than that a link broke."""
    failures: list[Exception] = []

    async def guarded(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except Exception as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(guarded, call)
    if failures:
        raise min(failures, key=lambda error: not isinstance(error, (WeightSyncError, EngineError)))


async def _beside(tell: Callable[[anyio.Event], Awaitable[None]] | None, work: Callable[[], Awaitable[None]]) -> None:
    """``work`` on this rank while engines do as they are told, after they were: Python does one thing at a time, and
    engines should not wait for ours."""
    told = anyio.Event()

    async def work_then() -> None:
        if tell is not None:
            await told.wait()
        await work()

    async def tell_first() -> None:
        try:
            if tell is not None:
                await tell(told)
        finally:
            told.set()

    await _together([tell_first, work_then])


def _compare(plan: _Plan, sums: list[Sums], theirs: dict[str, list[list[int]]]) -> None:
    """Hold the engines' sums against the trainer's.

    Raises:
        WeightMismatchError: they differ.
    """
    from sglrollout.weights.verify import parts_of

    known: dict[tuple[int, Box], set[int]] = {}
    for of_rank in sums:
        for part, value in of_rank.items():
            known.setdefault(part, set()).add(value)
    reports = iter(plan.reports)
    wrong: dict[str, None] = {}
    for engine, ranks in theirs.items():
        for values in ranks:
            report = next(reports)
            for part, value in zip(parts_of(report, plan.layout.boxes), values, strict=True):
                if known.get(part) != {value}:
                    name = plan.layout.weights[part[0]].spec.name
                    wrong[f"{name} ({engine}, TP rank {report.tp_rank})"] = None
    if wrong:
        raise WeightMismatchError(list(wrong))


def _refuse_duplicates(weights: list[Weight]) -> None:
    names = [name for weight in weights for name in (weight.spec.name, *weight.spec.aliases)]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise WeightNamesError(duplicates=twice)
    if not weights:
        raise ConfigError("source", "an empty source", "must have at least one weight")


def _digest(weights: list[Weight]) -> str:
    specs: list[WeightSpec] = [weight.spec for weight in weights]
    return hashlib.sha256(msgspec.msgpack.encode(specs)).hexdigest()


def _consumers(facts: list[_Facts]) -> list[list[tuple[str, int]]]:
    """By rank, the (engine, TP rank) pairs that it serves: those on its GPU, or all of its engines on a CPU.

    Raises:
        WeightSyncError: no rank shares an engine's GPU.
    """
    served: list[list[tuple[str, int]]] = [[] for _ in facts]
    for owner, fact in enumerate(facts):
        for engine in fact.engines:
            for tp_rank in range(engine.tp_size):
                served[_partner(facts, owner, engine, tp_rank)].append((_key(facts, owner, engine.name), tp_rank))
    return served


def _key(facts: list[_Facts], owner: int, name: str) -> str:
    """An engine's name, told from those of other ranks' rollouts where there are some."""
    several = sum(1 for fact in facts if fact.engines) > 1
    return f"{name} of rank {owner}" if several else name


def _partner(facts: list[_Facts], owner: int, engine: EngineFacts, tp_rank: int) -> int:
    if not engine.devices:
        return owner
    device = engine.devices[tp_rank]
    for rank, fact in enumerate(facts):
        if fact.machine == facts[owner].machine and fact.device == device:
            return rank
    known = sorted({fact.device for fact in facts if fact.device})
    message = f"no trainer rank shares {device}, the GPU of {engine.name}'s TP rank {tp_rank} (ranks are on {known})"
    raise WeightSyncError("plan", message, engine=engine.name)


def _reachable(
    weights: list[Weight], facts: list[_Facts], exports: list[Exports], rank: int, unreachable: set[str]
) -> list[bool]:
    """By weight, whether engines of this rank's machine can read all of it where it is.

    Args:
        unreachable: UUIDs of devices whose memory this rank's device cannot read.
    """
    here = facts[rank].machine

    def is_near(i: int, other: int) -> bool:
        if not facts[other].boxes[i].numel:
            return facts[other].machine == here
        near = facts[other].machine == here and facts[other].device not in unreachable
        return near and i in exports[other].addresses

    return [all(is_near(i, other) for other in weight.ranks or (rank,)) for i, weight in enumerate(weights)]


def _links(facts: list[_Facts], rank: int, consumers: list[list[tuple[str, int]]]) -> dict[str, list[tuple[str, str]]]:
    """For this rank's engines, by key: which socket each of its TP ranks joins, and with which token."""
    rank_of = {consumer: partner for partner, served in enumerate(consumers) for consumer in served}
    links: dict[str, list[tuple[str, str]]] = {}
    for engine in facts[rank].engines:
        key = _key(facts, rank, engine.name)
        partners = [facts[rank_of[key, tp_rank]] for tp_rank in range(engine.tp_size)]
        links[key] = [(partner.path, partner.token) for partner in partners]
    return links


def _layout(
    weights: list[Weight], facts: list[_Facts], reports: list[list[WeightReport]], rank: int, device: Any
) -> Layout:
    from sglrollout.weights.transfer import Layout

    first = next(report for of_rank in reports for report in of_rank)
    boxes = [
        tuple(facts[other].boxes[i] for other in weight.ranks) if weight.ranks else (weight.box,)
        for i, weight in enumerate(weights)
    ]
    return Layout(weights, first.dtypes, boxes, rank, device)


def _by_engine(made: list[dict[Consumer, bytes]]) -> dict[str, list[bytes]]:
    """Payloads of all ranks, by engine, in TP rank order."""
    payloads = {consumer: payload for of_rank in made for consumer, payload in of_rank.items()}
    ordered = sorted(payloads, key=lambda consumer: (consumer.engine, consumer.tp_rank))
    found: dict[str, list[bytes]] = {}
    for consumer in ordered:
        found.setdefault(consumer.engine, []).append(payloads[consumer])
    return found


def _current_device() -> Any:
    """The calling thread's GPU, which is the trainer's; ``None`` on a machine without one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _unreachable(device: Any) -> set[str]:
    """UUIDs of this machine's devices whose memory ``device`` cannot read, as far as they are visible here."""
    if device is None:
        return set()
    import torch

    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != device.index]
    return {_uuid(other) for other in others if not torch.cuda.can_device_access_peer(device, other)}


def _uuid(device: Any) -> str:
    if device is None:
        return ""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
