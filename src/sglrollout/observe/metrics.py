"""What :meth:`AsyncRolloutEngine.metrics` returns: frozen, plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from sglrollout.observe.series import Summary
from sglrollout.weights.report import SyncReport


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One engine, now and since the start. What it says of itself is ``None`` while it is not up.

    Attributes:
        name, state: as in :class:`EngineStatus`.
        num_inflight: samples this pool has in it.
        limit: samples it may have at once.
        num_running: requests in its batch, by its own account.
        num_waiting: requests that wait in it.
        kv_usage: share of its KV cache in use, from 0 to 1.
        cache_hit_rate: share of prompt tokens that its scheduler lately found in the prefix cache, from 0 to 1.
        tokens_per_s: sampled, over the last ten seconds.
        num_tokens: sampled, those of samples that still run included.
        num_prompt_tokens, num_cached_tokens: of samples that ended in it: their prompts, and what of these it had.
        finish_reasons: samples that ended in it, by finish reason.
        num_failovers: samples that lost it, by its death or a failed sync, and went on elsewhere.
        num_interrupted: samples that a sync or a sleep cut in it, and that went on.
        num_deaths: how often it ended unasked while it was up.
        num_restarts: how often it came back.
        freed_bytes: what it gave back in the last sleep, by tag; empty before.
        used_bytes, residual_bytes: after that: in use on its device by anybody, and held by its own allocator.
    """

    name: str
    state: str
    num_inflight: int
    limit: int
    num_running: int | None
    num_waiting: int | None
    kv_usage: float | None
    cache_hit_rate: float | None
    tokens_per_s: float
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    finish_reasons: dict[str, int]
    num_failovers: int
    num_interrupted: int
    num_deaths: int
    num_restarts: int
    freed_bytes: dict[str, int] = field(default_factory=dict)
    used_bytes: int | None = None
    residual_bytes: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.num_inflight} of {self.limit} inflight"]
        if self.num_running is not None:
            parts.append(f"{self.num_running} running, {self.num_waiting} waiting, KV {self.kv_usage:.0%}")
        parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        parts += _events(deaths=self.num_deaths, restarts=self.num_restarts, failovers=self.num_failovers)
        if self.used_bytes is not None:
            parts.append(f"{self.used_bytes / 1e9:.2f} GB in use after its sleep")
        return f"{self.name} {self.state}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Metrics:
    """A rollout, now and since its start. What is counted only grows; seconds are of ``time.monotonic``.

    Attributes:
        seconds: since the start.
        weight_version: of the engines.
        num_queued: samples that wait for a slot.
        num_inflight: samples in engines; ``num_running`` of them are in an engine's batch and ``num_waiting`` wait in
            one, by the engines' own account, which is a little older.
        kv_usage_mean, kv_usage_max: over engines that are up: share of the KV cache in use, from 0 to 1.
        tokens_per_s: sampled, over the last ten seconds.
        num_tokens: sampled, those of samples that still run included.
        num_samples: that ended, for whatever reason.
        finish_reasons: the same by finish reason; ``abort`` counts those, too, that were cancelled in the queue, or
            refused before it, as by one that was full.
        truncated_ratio: share of those that ended whole (``stop``, ``length``) that ended for lack of room.
        num_prompt_tokens, num_cached_tokens: of samples that ended: their prompts, and what of these was in a cache.
        prefix_cache_hit_rate: the latter by the former.
        num_failovers, num_interrupted, num_deaths, num_restarts: as in :class:`EngineMetrics`, of all engines.
        queue_s: of samples that got a slot: all that they waited for one.
        prefill_s: from the slot to the first token; waiting in the engine is part of it.
        decode_s: of samples that ended whole: from the first token to the end.
        total_s: of samples that ended whole: from when they were asked for to the end.
        response_len: of samples that ended whole: their tokens.
        staleness: of samples that ended whole: the engines' weight version then, less that of their oldest token.
        num_batches: that collections delivered.
        batch_staleness_mean, batch_staleness_max: of the latest of them; ``None`` before.
        num_syncs, num_failed_syncs: weight syncs.
        sync_s: of weight syncs, by phase: ``plan``, ``wake``, ``pause``, ``gather``, ``load``, ``transfer``, ``flush``,
            ``resume`` and ``total``; see :class:`SyncReport`.
        last_sync: the latest that went well.
        num_sleeps: how often engines gave memory back.
        engines: each engine.
    """

    seconds: float
    weight_version: int
    num_queued: int
    num_inflight: int
    num_running: int
    num_waiting: int
    kv_usage_mean: float
    kv_usage_max: float
    tokens_per_s: float
    num_tokens: int
    num_samples: int
    finish_reasons: dict[str, int]
    truncated_ratio: float
    num_prompt_tokens: int
    num_cached_tokens: int
    prefix_cache_hit_rate: float
    num_failovers: int
    num_interrupted: int
    num_deaths: int
    num_restarts: int
    queue_s: Summary
    prefill_s: Summary
    decode_s: Summary
    total_s: Summary
    response_len: Summary
    staleness: Summary
    num_batches: int
    batch_staleness_mean: float | None
    batch_staleness_max: int | None
    num_syncs: int
    num_failed_syncs: int
    sync_s: dict[str, Summary]
    last_sync: SyncReport | None
    num_sleeps: int
    engines: tuple[EngineMetrics, ...]

    def to_dict(self, prefix: str = "pool/") -> dict[str, float]:
        """Flat numbers, for a logger: ``pool/num_queued``, ``pool/queue_s/p95``, ``pool/engine-0/kv_usage``, ...

        Numbers that are not known are left out.
        """
        numbers = dict(_flat(self))
        for engine in self.engines:
            numbers |= {f"{engine.name}/{name}": value for name, value in _flat(engine)}
        return {f"{prefix}{name}": value for name, value in numbers.items()}

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.finish_reasons.items())
        lines = [
            f"version {self.weight_version}, {self.seconds:.1f} s: {self.num_samples:,} samples ended"
            f"{f' ({reasons})' if reasons else ''}, {self.num_tokens:,} tokens, now {self.tokens_per_s:,.0f} tokens/s",
            f"{self.num_queued} queued, {self.num_inflight} inflight ({self.num_running} running, {self.num_waiting} "
            f"waiting), KV mean {self.kv_usage_mean:.0%}, max {self.kv_usage_max:.0%}, "
            f"prefix hits {self.prefix_cache_hit_rate:.0%}",
        ]
        times = {"queue": self.queue_s, "prefill": self.prefill_s, "decode": self.decode_s, "total": self.total_s}
        shown = [f"{name} {of.mean:.3g} s (p95 {of.p95:.3g})" for name, of in times.items() if of.count]
        if shown:
            lines.append(", ".join(shown))
        if self.staleness.count:
            lines.append(f"staleness mean {self.staleness.mean:.3g}, max {self.staleness.max:g}")
        events = _events(
            failovers=self.num_failovers,
            interrupted=self.num_interrupted,
            deaths=self.num_deaths,
            restarts=self.num_restarts,
            syncs=self.num_syncs,
            failed_syncs=self.num_failed_syncs,
            sleeps=self.num_sleeps,
        )
        if events:
            lines.append(", ".join(events))
        if self.last_sync is not None:
            lines.append(f"last sync: {self.last_sync}")
        return "\n  ".join([*lines, *map(str, self.engines)])


def _events(**counts: int) -> list[str]:
    return [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]


def _flat(metrics: Metrics | EngineMetrics) -> Iterator[tuple[str, float]]:
    for part in fields(metrics):
        value = getattr(metrics, part.name)
        if isinstance(value, (int, float)):
            yield part.name, float(value)
        elif isinstance(value, Summary):
            yield from _of_summary(part.name, value)
        elif isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, Summary):
                    yield from _of_summary(f"{part.name}/{key}", inner)
                else:
                    yield f"{part.name}/{key}", float(inner)


def _of_summary(name: str, summary: Summary) -> Iterator[tuple[str, float]]:
    names = ("count", "mean", "p50", "p95", "max") if summary.count else ("count",)
    for part in names:
        yield f"{name}/{part}", float(getattr(summary, part))
