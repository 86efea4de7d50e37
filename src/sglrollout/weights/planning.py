"""Planning a sync with all ranks and engines: which weights there are, who sends what to whom, and over which link."""

from __future__ import annotations

import hashlib
import logging
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import anyio
import msgspec

from sglrollout.boxes import Box
from sglrollout.errors import ConfigError, WeightNamesError, WeightSyncError
from sglrollout.weights.checkpoint import names_in, refuse_others
from sglrollout.weights.control import Ranks, machine
from sglrollout.weights.leader import EngineFacts, Leader
from sglrollout.weights.lora_source import LoRASource
from sglrollout.weights.phases import Phases, together
from sglrollout.weights.remote import Disk, LastKept, Remote, make_road
from sglrollout.weights.sources import Weight, WeightSource
from sglrollout.weights.worker import Worker
from sglrollout.wire.link import Listener
from sglrollout.wire.messages import WeightReport, WeightSpec

if TYPE_CHECKING:
    from sglrollout.config import RolloutConfig
    from sglrollout.weights.lora_road import LoRARoad
    from sglrollout.weights.memory import Exports
    from sglrollout.weights.roads import RemoteRoad, Road
    from sglrollout.weights.transfer import Layout, Transfer

Method: TypeAlias = Literal["auto", "fast", "portable"]
_log = logging.getLogger("sglrollout.weights")


class Options(NamedTuple):
    """Of :class:`sglrollout.WeightSyncer`."""

    method: Method
    bucket_bytes: int
    num_slots: int
    timeout_s: float
    allow_missing: list[str]
    remote: Remote


@dataclass(frozen=True)
class Facts:
    """What a rank tells the others before a plan is made."""

    machine: str
    device: str
    path: str
    token: str
    digest: str
    boxes: list[Box]
    engines: list[EngineFacts]

    @property
    def has_remote_engines(self) -> bool:
        return any(engine.remote for engine in self.engines)


@dataclass
class Plan:
    """What holds from sync to sync, until engines or weights change.

    Attributes:
        method: ``fast`` or ``portable``, and how weights reach remote engines, joined by a plus sign; or ``lora``.
        engines: those that it was made for.
        reports: what the TP ranks of this rank's engines on its machine said, in the order of :meth:`Leader.facts`.
        all_reports: the same of every rank's engines.
        serves: whether engines read this rank's memory.
        exports: what this rank has exported.
        num_engines, num_remote: of all ranks; the latter are among the former.
        fast: brings weights to engines that read the trainer's memory; ``None`` where there is none.
        roads: bring them to the others. Every rank has the same.
        remote: that of the roads which leads to engines on other machines.
    """

    method: str
    why_portable: str
    layout: Layout
    engines: list[EngineFacts]
    reports: list[WeightReport]
    all_reports: list[WeightReport]
    serves: bool
    exports: Exports
    fast: Transfer | None
    roads: list[Road]
    remote: RemoteRoad | None
    num_engines: int
    num_remote: int
    copy_bytes_per_s: float

    @property
    def is_lora(self) -> bool:
        """Whether an adapter is all that it brings."""
        return self.method == "lora"

    @property
    def num_buckets(self) -> int:
        return sum(way.num_buckets for way in self._ways)

    @property
    def _ways(self) -> list[Transfer | Road]:
        return [*([self.fast] if self.fast is not None else []), *self.roads]

    def close(self) -> None:
        """Give back what it holds, on the worker's thread."""
        for way in self._ways:
            way.close()

    @cached_property
    def num_bytes(self) -> int:
        """Of all weights, once, in the engines' dtypes."""
        import torch

        weights = zip(self.layout.weights, self.layout.dtypes, strict=True)
        return sum(Box.whole(w.spec.shape).numel * getattr(torch, dtype).itemsize for w, dtype in weights)


class Planner:
    """Makes plans. Every rank has one.

    Args:
        config: of this rank's rollout, if it has one.
    """

    def __init__(
        self,
        ranks: Ranks,
        phases: Phases,
        worker: Worker,
        source: WeightSource,
        listener: Listener,
        options: Options,
        config: RolloutConfig | None,
    ) -> None:
        self._ranks, self._phases, self._worker = ranks, phases, worker
        self._source, self._listener, self._options = source, listener, options
        self._config, self._differences = config, ""
        self._lora = source if isinstance(source, LoRASource) else None
        self._written: list[Path] = []
        """Folders of weights on a shared disk, of this plan and those before."""
        self._last_kept = LastKept()

    async def make(self, leader: Leader | None, engines: list[EngineFacts]) -> Plan:
        """Find out where every weight goes and how, and attach the engines.

        Raises:
            WeightNamesError, WeightSyncError: on every rank alike; nothing was sent.
        """
        if leader is None and self._ranks.size == 1:
            raise ConfigError("rollout", None, "must be given: there is no other rank that could own engines")
        device = self._worker.device
        weights: list[Weight] = []
        token = secrets.token_hex(16)

        async def gather_facts() -> Facts:
            weights.extend(await self._worker.run(self._source.weights))
            _refuse_duplicates(weights)
            return Facts(
                machine=machine(),
                device=_uuid(device),
                path=self._listener.path,
                token=token,
                digest=_digest(weights),
                boxes=[weight.box for weight in weights],
                engines=engines,
            )

        facts: list[Facts] = await self._phases.run("plan", gather_facts)
        odd = next((rank for rank, fact in enumerate(facts) if fact.digest != facts[0].digest), None)
        if odd is not None:
            raise WeightSyncError("plan", "it has other weights, by name, shape or dtype, than rank 0", odd)
        consumers = _consumers(facts) if self._lora is None else [[] for _ in facts]
        if leader is not None:
            leader.keys = {engine.name: _key(facts, self._ranks.rank, engine.name) for engine in engines}
        if not any(engine.devices or engine.remote for fact in facts for engine in fact.engines):
            device = None  # engines are on the CPU, wherever the trainer is

        async def describe() -> list[WeightReport]:
            if leader is None:
                return []
            if self._lora is not None:
                leader.refuse_without_lora(self._lora.adapter, self._lora.config["r"])
                return []
            leader.pool.attached = None  # engines forget what another syncer planned
            specs = [weight.spec for weight in weights]
            if leader.remote and all(engine.remote for fact in facts for engine in fact.engines):
                await self._worker.run(lambda: self._refuse_others(specs))
            return await leader.describe(specs, self._options.allow_missing)

        reports = await self._phases.run("plan", describe)
        method, why = self._choose(facts, reports)
        layout = _layout(weights, facts, reports, self._ranks.rank, device)

        async def share() -> Exports:
            await self._worker.run(layout.check)
            return await self._worker.run(lambda: self._export(layout, method))

        exports = await self._phases.run("plan", share)

        async def look_for_direct() -> list[bool]:
            return _reachable(weights, facts, exports, self._ranks.rank, _unreachable(device))

        reachable = await self._phases.run("plan", look_for_direct)
        direct = [i for i, by_rank in enumerate(zip(*reachable, strict=True)) if all(by_rank)]

        made: list[Plan] = []

        async def prepare() -> float:
            mine = consumers[self._ranks.rank]
            near = {rank: e for rank, e in enumerate(exports) if facts[rank].machine == facts[self._ranks.rank].machine}
            adapters = leader.pool.adapters if leader is not None and self._lora is not None else None
            plan = await self._worker.run(
                lambda: self._build(layout, method, why, mine, engines, facts, near, direct, adapters)
            )
            plan.reports = reports[self._ranks.rank]
            plan.all_reports = [report for of_rank in reports for report in of_rank]
            made.append(plan)
            return plan.copy_bytes_per_s

        async def attach() -> None:
            transfer = made[0].fast
            if transfer is None:
                return

            async def accept() -> None:
                await self._worker.run(lambda: transfer.accept(self._listener, token, self._options.timeout_s))

            async def send() -> None:
                if leader is not None:
                    await leader.attach(_links(facts, self._ranks.rank, consumers))

            await together([accept, send])

        async def connect() -> None:
            road = made[0].remote
            if road is not None and leader is not None:
                await road.connect(leader)

        try:
            speeds = await self._phases.run("plan", prepare)
            await self._phases.run("plan", attach)
            if made[0].remote is not None:
                await self._phases.run("plan", connect)
        except BaseException:  # no rank may keep a plan that another has not
            with anyio.CancelScope(shield=True):
                for plan in made:
                    await self._worker.run(plan.close)
            raise
        made[0].copy_bytes_per_s = max(speeds)
        return made[0]

    def _refuse_others(self, weights: list[WeightSpec]) -> None:
        """Without an engine that knows: hold names against the checkpoint, if that is on this machine.

        Raises:
            WeightNamesError: they have nothing in common.
        """
        assert self._config is not None  # this rank has engines
        known = names_in(self._config.model, self._config.revision)
        if not known:
            return
        differences = refuse_others(weights, known, self._config.model)
        if differences not in ("", self._differences):
            _log.warning("%s. Servers ignore names that they do not know", differences)
        self._differences = differences

    def _choose(self, facts: list[Facts], reports: list[list[WeightReport]]) -> tuple[str, str]:
        """The method for engines on this machine, and why it is portable if nobody asked for that. It is empty where
        there are only remote ones, which do not tell their parameters.

        Raises:
            WeightNamesError: the names do not fit.
            WeightSyncError: ``fast`` was asked for, and the model does not allow it.
        """
        every = [report for of_rank in reports for report in of_rank]
        if not every:
            lora = self._lora is not None and any(fact.engines for fact in facts)
            if lora or any(fact.has_remote_engines for fact in facts):
                return "", ""
            raise WeightSyncError("plan", "no rank owns a running engine")
        wrong: dict[str, Any] = {
            kind: list(dict.fromkeys(name for report in every for name in getattr(report, kind)))
            for kind in ("missing", "unexpected", "duplicates", "mismatched")
        }
        if any(wrong.values()):
            raise WeightNamesError(**wrong)
        if any(report.dtypes != every[0].dtypes for report in every):
            raise WeightSyncError("plan", "engines have their parameters in different dtypes: all must be alike")
        unsuited = next((report.unsuited for report in every if report.unsuited), "")
        if unsuited and self._options.method == "fast":
            raise WeightSyncError("plan", f'method="fast" does not suit this model: {unsuited}')
        if unsuited or self._options.method == "portable":
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
        facts: list[Facts],
        exports: dict[int, Exports],
        direct: list[int],
        adapters: Path | None,
    ) -> Plan:
        """Runs on the worker's thread."""
        from sglrollout.weights.memory import copy_bytes_per_s
        from sglrollout.weights.portable import PortableTransfer
        from sglrollout.weights.transfer import Consumer, Transfer

        options, mine = self._options, [Consumer(*consumer) for consumer in consumers]
        # Before anything is held that would have to be given back. Nobody asks it of an adapter.
        speed = 0.0 if self._lora is not None else copy_bytes_per_s(layout.device)
        fast: Transfer | None = None
        roads: list[Road] = []
        remote: RemoteRoad | None = None
        methods = [method] if method else []
        if method == "fast":
            fast = Transfer(layout, self._source, mine, options.bucket_bytes, options.num_slots, exports, direct)
        elif method == "portable":
            roads.append(PortableTransfer(layout, self._source, mine, options.bucket_bytes))
        if self._lora is not None:
            remote = self._lora_road(layout, self._lora, facts, adapters)
            roads.append(remote)
            methods.append(remote.method)
        elif any(fact.has_remote_engines for fact in facts):
            serves = facts[self._ranks.rank].has_remote_engines
            given = (options.bucket_bytes, options.timeout_s, self._written, self._last_kept)
            remote = make_road(options.remote, serves, layout, self._source, *given)
            roads.append(remote)
            methods.append(remote.method)
        everywhere = [engine for fact in facts for engine in fact.engines]
        return Plan(
            method="+".join(methods),
            why_portable=why,
            layout=layout,
            engines=engines,
            reports=[],
            all_reports=[],
            serves=bool(mine),
            exports=exports[self._ranks.rank],
            fast=fast,
            roads=roads,
            remote=remote,
            num_engines=len(everywhere),
            num_remote=sum(engine.remote for engine in everywhere),
            copy_bytes_per_s=speed,
        )

    def _lora_road(self, layout: Layout, source: LoRASource, facts: list[Facts], folder: Path | None) -> LoRARoad:
        from sglrollout.weights.lora_road import LoRARoad

        option = self._options.remote
        if facts[self._ranks.rank].has_remote_engines:
            if not isinstance(option, Disk):
                rule = "must be a Disk with LoRASource and remote engines: SGLang's servers load adapters from there"
                raise ConfigError("remote", option, rule)
            folder = Path(option.folder)
        return LoRARoad(layout, source, self._options.bucket_bytes, folder, self._written)


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


def _consumers(facts: list[Facts]) -> list[list[tuple[str, int]]]:
    """By rank, the (engine, TP rank) pairs that it serves: those on its GPU, or all of its engines on a CPU.

    Raises:
        WeightSyncError: no rank shares an engine's GPU.
    """
    served: list[list[tuple[str, int]]] = [[] for _ in facts]
    for owner, fact in enumerate(facts):
        for engine in fact.engines:
            for tp_rank in range(0 if engine.remote else engine.tp_size):
                served[_partner(facts, owner, engine, tp_rank)].append((_key(facts, owner, engine.name), tp_rank))
    return served


def _key(facts: list[Facts], owner: int, name: str) -> str:
    """An engine's name, told from those of other ranks' rollouts where there are some."""
    several = sum(1 for fact in facts if fact.engines) > 1
    return f"{name} of rank {owner}" if several else name


def _partner(facts: list[Facts], owner: int, engine: EngineFacts, tp_rank: int) -> int:
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
    weights: list[Weight], facts: list[Facts], exports: list[Exports], rank: int, unreachable: set[str]
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


def _links(facts: list[Facts], rank: int, consumers: list[list[tuple[str, int]]]) -> dict[str, list[tuple[str, str]]]:
    """For this rank's engines, by key: which socket each of its TP ranks joins, and with which token."""
    rank_of = {consumer: partner for partner, served in enumerate(consumers) for consumer in served}
    links: dict[str, list[tuple[str, str]]] = {}
    for engine in facts[rank].engines:
        if engine.remote:
            continue
        key = _key(facts, rank, engine.name)
        partners = [facts[rank_of[key, tp_rank]] for tp_rank in range(engine.tp_size)]
        links[key] = [(partner.path, partner.token) for partner in partners]
    return links


def _layout(
    weights: list[Weight], facts: list[Facts], reports: list[list[WeightReport]], rank: int, device: Any
) -> Layout:
    from sglrollout.weights.transfer import Layout

    first = next((report for of_rank in reports for report in of_rank), None)
    dtypes = first.dtypes if first is not None else [weight.spec.dtype for weight in weights]
    boxes = [
        tuple(facts[other].boxes[i] for other in weight.ranks) if weight.ranks else (weight.box,)
        for i, weight in enumerate(weights)
    ]
    return Layout(weights, dtypes, boxes, rank, device)


def current_device() -> Any:
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
