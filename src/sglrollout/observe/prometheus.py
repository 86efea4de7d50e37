"""Metrics for Prometheus, by a collector that reads the recorder when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sglrollout.errors import ConfigError
from sglrollout.observe.metrics import EngineMetrics, Metrics
from sglrollout.observe.recorder import Recorder
from sglrollout.observe.series import Series
from sglrollout.pool.pool import EngineState

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

_PREFIX = "sglrollout_"
_GAUGES: dict[str, tuple[str, Callable[[EngineMetrics], float | None]]] = {
    "inflight_samples": ("Samples this pool has in the engine.", lambda engine: engine.num_inflight),
    "limit_samples": ("Samples the engine may have at once.", lambda engine: engine.limit),
    "running_requests": ("Requests in the engine's batch.", lambda engine: engine.num_running),
    "waiting_requests": ("Requests that wait in the engine.", lambda engine: engine.num_waiting),
    "kv_usage_ratio": ("Share of the KV cache in use.", lambda engine: engine.kv_usage),
    "cache_hit_ratio": (
        "Share of prompt tokens that the engine lately found in its prefix cache.",
        lambda engine: engine.cache_hit_rate,
    ),
    "used_memory_bytes": (
        "In use on the engine's device, by anybody, after its last sleep.",
        lambda engine: engine.used_bytes,
    ),
    "residual_memory_bytes": (
        "Held by the engine's own allocator after its last sleep.",
        lambda engine: engine.residual_bytes,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineMetrics], float]]] = {
    "generation_tokens": ("Tokens sampled.", lambda engine: engine.num_tokens),
    "prompt_tokens": ("Prompt tokens of samples that ended.", lambda engine: engine.num_prompt_tokens),
    "cached_tokens": ("Those of them found in the prefix cache.", lambda engine: engine.num_cached_tokens),
    "failovers": ("Samples that lost the engine and went on elsewhere.", lambda engine: engine.num_failovers),
    "interruptions": ("Samples that a sync or a sleep cut, and that went on.", lambda engine: engine.num_interrupted),
    "deaths": ("How often the engine ended unasked.", lambda engine: engine.num_deaths),
    "restarts": ("How often the engine came back.", lambda engine: engine.num_restarts),
}


def export(recorder: Recorder, registry: CollectorRegistry | None) -> Callable[[], None]:
    """Register a collector; what is returned takes it out again.

    Raises:
        ImportError: prometheus_client is not installed.
        ConfigError: another rollout is in this registry.
    """
    try:
        import prometheus_client
    except ImportError as error:
        message = 'export_metrics() needs prometheus_client: pip install "sglrollout[metrics]"'
        raise ImportError(message, name="prometheus_client") from error
    chosen = prometheus_client.REGISTRY if registry is None else registry
    exporter = Exporter(recorder)
    try:
        chosen.register(exporter)
    except ValueError:
        rule = "must not have a rollout in it already: close that one, or give each a CollectorRegistry of its own"
        raise ConfigError("registry", chosen, rule) from None

    def withdraw() -> None:
        with suppress(KeyError):  # the user did it
            chosen.unregister(exporter)

    return withdraw


class Exporter:
    """A custom collector of prometheus_client. It may be asked on any thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def describe(self) -> Iterable[Metric]:
        """The names, for the registry."""
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """Everything, now."""
        metrics = self._recorder.metrics()
        yield from _of_engines(metrics)
        yield from _of_pool(metrics)
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        recorder = self._recorder
        series: dict[str, tuple[str, Series]] = {
            "sample_queue_seconds": ("Waited for a slot.", recorder.queue_s),
            "sample_prefill_seconds": ("From the slot to the first token.", recorder.prefill_s),
            "sample_decode_seconds": ("From the first token to the end.", recorder.decode_s),
            "sample_total_seconds": ("From when a sample was asked for to its end.", recorder.total_s),
            "sample_response_tokens": ("Tokens of a sample that ended whole.", recorder.response_len),
            "sample_staleness_versions": (
                "The engines' weight version at a sample's end, less that of its oldest token.",
                recorder.staleness,
            ),
        }
        for name, (help_text, one) in series.items():
            family = HistogramMetricFamily(_PREFIX + name, help_text)
            family.add_metric([], *_histogram(one))
            yield family
        syncs = HistogramMetricFamily(f"{_PREFIX}sync_seconds", "Weight syncs, by phase.", labels=["phase"])
        for phase, one in recorder.sync_s.items():
            syncs.add_metric([phase], *_histogram(one))
        yield syncs


def _histogram(series: Series) -> tuple[list[Any], float]:
    bounds: list[Any] = [("+Inf" if bound == float("inf") else f"{float(bound)}", n) for bound, n in series.buckets()]
    return bounds, series.total


def _of_engines(metrics: Metrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, (help_text, read) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"{_PREFIX}engine_{name}", help_text, labels=["engine"])
        for engine in metrics.engines:
            value = read(engine)
            if value is not None:
                gauge.add_metric([engine.name], value)
        yield gauge
    for name, (help_text, count) in _COUNTERS.items():
        counter = CounterMetricFamily(f"{_PREFIX}engine_{name}", help_text, labels=["engine"])
        for engine in metrics.engines:
            counter.add_metric([engine.name], count(engine))
        yield counter
    state = GaugeMetricFamily(f"{_PREFIX}engine_state", "1 for the state it is in.", labels=["engine", "state"])
    for engine in metrics.engines:
        for one in EngineState:
            state.add_metric([engine.name, one.value], engine.state == one.value)
    yield state


def _of_pool(metrics: Metrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    samples = CounterMetricFamily(f"{_PREFIX}samples", "Samples that ended.", labels=["finish_reason"])
    for reason in ("stop", "length", "abort", "error"):
        samples.add_metric([reason], metrics.finish_reasons.get(reason, 0))
    yield samples
    syncs = CounterMetricFamily(f"{_PREFIX}syncs", "Weight syncs.", labels=["outcome"])
    syncs.add_metric(["ok"], metrics.num_syncs)
    syncs.add_metric(["failed"], metrics.num_failed_syncs)
    yield syncs
    yield CounterMetricFamily(f"{_PREFIX}sleeps", "How often engines gave memory back.", value=metrics.num_sleeps)
    yield CounterMetricFamily(f"{_PREFIX}batches", "Batches that were collected.", value=metrics.num_batches)
    yield GaugeMetricFamily(f"{_PREFIX}queued_samples", "Samples that wait for a slot.", value=metrics.num_queued)
    version = "The weight version that engines sample with."
    yield GaugeMetricFamily(f"{_PREFIX}weight_version", version, value=metrics.weight_version)
    for name, value in (("mean", metrics.batch_staleness_mean), ("max", metrics.batch_staleness_max)):
        if value is not None:
            help_text = f"Staleness of the latest batch's samples, {name}."
            yield GaugeMetricFamily(f"{_PREFIX}batch_staleness_{name}_versions", help_text, value=value)
