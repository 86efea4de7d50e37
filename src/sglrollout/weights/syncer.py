"""WeightSyncer: brings a trainer's weights into the engines, whole or not at all."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import anyio

from sglrollout.config import RolloutConfig
from sglrollout.engine.scratch import new_scratch, remove_scratch
from sglrollout.errors import ConfigError, LifecycleError, WeightSyncError
from sglrollout.pool.pool import SYNC, Pool
from sglrollout.weights.call import Call
from sglrollout.weights.control import Ranks
from sglrollout.weights.leader import EngineFacts, Leader, PauseMode
from sglrollout.weights.lora_source import LoRASource
from sglrollout.weights.phases import Phases, beside
from sglrollout.weights.planning import Method, Options, Plan, Planner, current_device
from sglrollout.weights.remote import Broadcast, Disk, Remote
from sglrollout.weights.report import SyncReport, VerifyReport
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.worker import Worker
from sglrollout.wire.link import Listener

if TYPE_CHECKING:
    from sglrollout.weights.transfer import Transfer
    from sglrollout.weights.verify import Sums

BUCKET_BYTES = 512 << 20
"""Two processes take turns on a GPU, and a turn costs a fraction of a millisecond: smaller buckets were slower."""
_COLD_S = 300.0
"""For an engine's first answer, for which it may have to compile kernels."""
_MODES = ("abort", "retract", "in_place")


class PoolOwner(Protocol):
    """What the syncer needs of a rollout."""

    config: RolloutConfig

    async def _ready_pool(self) -> Pool: ...


class _Stopped(NamedTuple):
    """How a rank is when engines have stopped."""

    is_outdated: bool
    version: int
    pause_s: float
    wake_s: float


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
        timeout_s: for each step of a sync. A rank that is stuck is given up after twice that and 20 s.
        max_retries: how often a sync begins again after engines died in it; the least of any rank counts.
        allow_missing: patterns (``fnmatch``) of engine parameters that need not be written.
        remote: how weights reach remote engines: :class:`Broadcast` or :class:`Disk`, the same on every rank. Remote
            engines do not tell their parameters: where there are no others, names are held against the checkpoint's.

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
        max_retries: int = 2,
        allow_missing: Sequence[str] = (),
        remote: Remote = Broadcast(),  # noqa: B008 - it is immutable
    ) -> None:
        if method not in ("auto", "fast", "portable"):
            raise ConfigError("method", method, 'must be "auto", "fast" or "portable"')
        if type(bucket_bytes) is not int or bucket_bytes < 1024:
            raise ConfigError("bucket_bytes", bucket_bytes, "must be an integer of at least 1024")
        if type(num_slots) is not int or num_slots < 2:
            raise ConfigError("num_slots", num_slots, "must be an integer of at least 2")
        if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise ConfigError("timeout_s", timeout_s, "must be a number of seconds greater than 0")
        if type(max_retries) is not int or max_retries < 0:
            raise ConfigError("max_retries", max_retries, "must be an integer of at least 0")
        if not hasattr(source, "weights"):
            raise ConfigError("source", source, "must be a ModuleSource, FSDPSource, TensorSource or LoRASource")
        if isinstance(source, LoRASource) and method != "auto":
            raise ConfigError("method", method, "must be left out with a LoRASource: adapters have one way to go")
        if isinstance(source, LoRASource) and allow_missing:
            raise ConfigError("allow_missing", allow_missing, "must be left out with a LoRASource")
        if rollout is not None and not hasattr(rollout, "_ready_pool"):
            rule = "must be an AsyncRolloutEngine, or None (for a RolloutEngine, use BlockingWeightSyncer)"
            raise ConfigError("rollout", type(rollout).__name__, rule)
        if isinstance(allow_missing, str):
            raise ConfigError("allow_missing", allow_missing, "must be a list of patterns")
        if not isinstance(remote, (Broadcast, Disk)):
            raise ConfigError("remote", remote, "must be a Broadcast or a Disk")
        self._rollout, self._source, self._timeout_s = rollout, source, float(timeout_s)
        self._max_retries = max_retries
        options = Options(method, bucket_bytes, num_slots, self._timeout_s, list(allow_missing), remote)
        ranks, self._worker = Ranks(self._timeout_s), Worker(current_device())
        self._phases = Phases(ranks, self._worker)
        self._directory = new_scratch()
        self._listener = Listener(self._directory)
        config = rollout.config if rollout is not None else None
        self._planner = Planner(ranks, self._phases, self._worker, source, self._listener, options, config)
        self._leader: Leader | None = None
        self._plan: Plan | None = None
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
            if self._leader is not None:
                await self._leader.leave_group()  # another syncer's engines may be in this one's, too
                if self._leader.pool.attached is self:
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
            what was done and how long it took: the same on every rank, ``plan_s``, ``total_s``, ``num_buckets``,
            ``written_bytes`` apart.

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
        call = Call(mode, version)
        leader, scope = await self._enter("pause", SYNC)
        with scope:
            report = await self._sync(leader, call)
            if leader is not None and leader.pool.on_sync is not None:
                leader.pool.on_sync(report)
            return report

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
                scope.enter_context(pool.exclusive(what, changes=what != "verify"))
                if what == "verify":
                    self._refuse_to_verify(leader)
        except Exception as error:
            failure = error

        async def refuse() -> None:
            assert failure is not None
            raise failure

        if failure is not None:
            scope.close()
            await self._phases.run(phase, refuse)
        return leader, scope

    def _refuse_to_verify(self, leader: Leader) -> None:
        """Raise LifecycleError if this rank's engines are not those of this syncer's last sync, all awake."""
        asleep = [member.name for member in leader.pool.members if member.asleep]
        if asleep:
            raise LifecycleError(f"{asleep[0]} is asleep: sync, which wakes it, and then verify")
        if not self._is_attached(leader):
            raise LifecycleError("another weight syncer has sent its weights since: sync again, then verify")
        if self._plan is not None and self._plan.engines != leader.facts():
            raise LifecycleError("an engine died, or was restarted, since the last sync: sync again, then verify")

    async def _sync(self, leader: Leader | None, call: Call) -> SyncReport:
        try:
            while True:
                try:
                    return await self._attempt(leader, call)
                except WeightSyncError as error:
                    await self._prepare_to_retry(leader, call, error)
        except BaseException as error:
            await self._after_failure(leader, error, call.moving)
            raise

    async def _attempt(self, leader: Leader | None, call: Call) -> SyncReport:
        engines = []
        if leader is not None:
            engines = await self._phases.alone("plan", lambda: leader.muster(call.waits))
        if self._plan is None:  # on every rank alike
            call.plan_s += await self._make_plan(leader, engines)
        stopped = await self._stop(leader, engines, call.mode)
        version = call.fix_version(max(rank.version for rank in stopped))
        if any(rank.is_outdated for rank in stopped):
            call.plan_s += await self._make_plan(leader, engines)
        assert self._plan is not None
        await self._prove(leader, self._plan)
        call.moving = True
        if leader is not None:
            leader.begin_to_move(version, self._plan.is_lora)
        seconds = await self._move(leader, self._plan, call.mode, version)
        seconds["pause_s"] = max(rank.pause_s for rank in stopped)
        seconds["wake_s"] += max(rank.wake_s for rank in stopped)
        plan = self._plan
        return SyncReport(
            version=version,
            method=plan.method,
            why_portable=plan.why_portable,
            mode=call.mode,
            num_bytes=plan.num_bytes,
            num_tensors=len(plan.layout.weights),
            num_buckets=plan.num_buckets,
            num_engines=plan.num_engines,
            plan_s=call.plan_s,
            total_s=time.perf_counter() - call.begun,
            copy_bytes_per_s=plan.copy_bytes_per_s,
            written_bytes=sum(road.num_written for road in plan.roads),
            lost_engines=tuple(call.lost),
            **seconds,
        )

    async def _prepare_to_retry(self, leader: Leader | None, call: Call, error: WeightSyncError) -> None:
        """After an attempt that failed. Raises WeightSyncError if it was the last; else engines stay stopped until the
        next one, with what runs in them."""
        if call.moving:
            with anyio.CancelScope(shield=True):
                await self._worker.run(self._forget_plan)  # which lets go of engines that wait for weights
        await call.prepare_to_retry(self._phases, leader, self._max_retries, error)

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
                outdated.append(plan.fast is not None and not attached)
                times[1] = await leader.wake_weights()
                leader.refuse_garbage(plan.reports)

            await beside(pause if leader is not None else None, settle)
            return _Stopped(any(outdated), leader.pool.last_version if leader is not None else 0, *times)

        return await self._phases.run("pause", stop)

    async def _prove(self, leader: Leader | None, plan: Plan) -> None:
        """Try the road to remote engines, if there is one; one that does not hold is forgotten."""
        road = plan.remote
        if road is None:
            return

        async def prove() -> None:
            if leader is not None:
                await road.prove(leader)

        try:
            await self._phases.run("plan", prove)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._worker.run(self._forget_plan)
            raise

    async def _move(self, leader: Leader | None, plan: Plan, mode: PauseMode, version: int) -> dict[str, float]:
        """Transfer, flush, resume; seconds of each."""
        seconds = {"gather_s": 0.0, "load_s": 0.0, "transfer_s": 0.0}
        for measured in await self._travel(leader, plan):
            for name in seconds:
                seconds[name] += max(part[name] for part in measured)

        async def finish() -> tuple[float, float, float]:
            if leader is None:
                return 0.0, 0.0, 0.0
            if not plan.is_lora:
                await leader.mend_adapters()
            woken = await leader.wake_rest()
            return woken, *await leader.resume(version, flush=mode != "in_place")

        finished = await self._phases.run("resume", finish)
        if leader is not None:
            before = leader.pool.adapter
            leader.publish(version)
            await leader.drop_old_adapter(before)
        for i, name in enumerate(("wake_s", "flush_s", "resume_s")):
            seconds[name] = max(values[i] for values in finished)
        return seconds

    async def _travel(self, leader: Leader | None, plan: Plan) -> list[list[dict[str, float]]]:
        """To engines on this machine, then to those on others; every rank's seconds of each."""
        from sglrollout.weights.roads import travel

        measured = [] if plan.fast is None else [await self._move_fast(leader, plan.fast)]
        for road in plan.roads:
            measured.append(await travel(road, leader, self._phases, self._worker, self._timeout_s))
        return measured

    async def _move_fast(self, leader: Leader | None, transfer: Transfer) -> list[dict[str, float]]:
        async def move() -> dict[str, float]:
            begun = time.perf_counter()
            results: list[dict[str, float]] = []

            async def hand_over() -> None:
                results.append(await self._worker.run(lambda: transfer.run(self._timeout_s, self._worker.is_cancelled)))

            await beside(leader.load if leader is not None else None, hand_over)
            return {**results[0], "transfer_s": time.perf_counter() - begun}

        return await self._phases.run("transfer", move)

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
                await leader.spoil(f"a weight sync failed: {type(error).__name__}: {error}")
            else:
                await leader.call_off()

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

    async def _verify(self, leader: Leader | None, plan: Plan, tolerance: float, begun: float) -> VerifyReport:
        from sglrollout.weights.verify import canary, compare, own_sums, parts_of, refuse_unequal

        comparable = bool(plan.all_reports) and not any(report.unsuited for report in plan.all_reports)

        def own() -> Sums:
            layout = plan.layout
            wanted = {part for report in plan.all_reports for part in parts_of(report, layout.boxes)}
            return own_sums(layout.weights, layout.dtypes, self._source, wanted)

        async def add_up() -> Any:
            layout = plan.layout
            mine = await self._worker.run(own)
            return {key: value for key, value in mine.items() if layout.weights[key[0]].ranks or plan.serves}

        sums: list[Any] = await self._phases.run("verify", add_up) if comparable else []

        async def hold_against() -> tuple[int, list[int], list[float], int]:
            if leader is None:
                return 0, [], [], 0
            if comparable:
                theirs = await leader.checksums(plan.layout.boxes)
                compare(plan.layout.weights, plan.layout.boxes, plan.reports, sums, theirs)
            adapter = leader.pool.adapter.name if leader.pool.adapter is not None else None
            return (
                leader.pool.weight_version,
                *await canary(leader.members, max(self._timeout_s, _COLD_S), tolerance, adapter),
                leader.num_bytes,
            )

        answers = await self._phases.run("verify", hold_against, 2 * max(self._timeout_s, _COLD_S))
        refuse_unequal([(tokens, logprobs) for _, tokens, logprobs, _ in answers if tokens], tolerance)
        version, tokens, logprobs, _ = next(answer for answer in answers if answer[1])
        return VerifyReport(
            version=version,
            num_engines=plan.num_engines,
            num_remote=plan.num_remote,
            num_weights=len(plan.layout.weights) if comparable else 0,
            num_bytes=sum(answer[3] for answer in answers),
            canary_tokens=tuple(tokens),
            canary_logprobs=tuple(logprobs),
            seconds=time.perf_counter() - begun,
        )

    # ------------------------------------------------------------ planning

    def _settle(self, plan: Plan) -> bool:
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
        with anyio.CancelScope(shield=True):
            await self._worker.run(self._forget_plan)
        self._plan = await self._planner.make(leader, engines)
        if leader is not None and not self._plan.is_lora:
            leader.pool.attached = self
        return time.perf_counter() - begun

    def _is_attached(self, leader: Leader | None) -> bool:
        """Whether engines hold this syncer's plan; another one may have come between."""
        is_lora = self._plan is not None and self._plan.is_lora  # it is held by no engine
        return leader is None or is_lora or leader.pool.attached is self

    def _forget_plan(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.close()
