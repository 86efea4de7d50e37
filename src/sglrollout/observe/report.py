"""A rollout's past on one page, in one file: plots, and the numbers of now."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path

from sglrollout.observe.metrics import EngineMetrics, Metrics
from sglrollout.observe.plots import bars, lines
from sglrollout.observe.recorder import Point, Recorder
from sglrollout.observe.series import Summary

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 780px; margin: 2em auto; padding: 0 1em; }
h2 { font-size: 16px; margin: 2em 0 .4em; }
svg { width: 100%; height: auto; font-size: 11px; fill: currentColor; }
.grid { stroke: currentColor; opacity: .2; }
.legend span { margin-right: 1.2em; } .legend i { display: inline-block; width: 10px; height: 10px; margin-right: 5px; }
.nothing { opacity: .6; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .2em .5em; }
th:first-child, td:first-child { text-align: left; } tr + tr { border-top: 1px solid rgb(128 128 128 / .3); }
pre { white-space: pre-wrap; }
"""


def write_report(recorder: Recorder, title: str, path: Path) -> None:
    """Write the page.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(page(recorder, title), encoding="utf-8")


def page(recorder: Recorder, title: str) -> str:
    """The page, as HTML that loads nothing."""
    metrics, points, begun_s = recorder.metrics(), recorder.points, recorder.begun_s
    syncs = [(end_s - begun_s, report) for end_s, report in list(recorder.syncs)]
    batches = [(when_s - begun_s, mean, most) for when_s, mean, most in list(recorder.batches)]
    draw = partial(lines, end=max(recorder.now_s - begun_s, 1e-9))
    sections = {
        "Throughput": draw({"tokens/s": _rate(points, begun_s)}),
        "Running and queued": draw(
            {
                "inflight": [(p.when_s - begun_s, p.num_inflight) for p in points],
                "running in engines": [(p.when_s - begun_s, p.num_running) for p in points],
                "waiting in engines": [(p.when_s - begun_s, p.num_waiting) for p in points],
                "queued": [(p.when_s - begun_s, p.num_queued) for p in points],
            }
        ),
        "KV use": draw(
            {
                "mean of engines": [(p.when_s - begun_s, 100 * p.kv_usage_mean) for p in points],
                "fullest engine": [(p.when_s - begun_s, 100 * p.kv_usage_max) for p in points],
            },
            unit=" %",
        ),
        "Staleness of batches": draw(
            {"mean": [(x, mean) for x, mean, _ in batches], "max": [(x, most) for x, _, most in batches]}, dots=True
        ),
        "Weight syncs": draw(
            {
                phase: [(x, getattr(report, f"{phase}_s")) for x, report in syncs]
                for phase in ("total", "pause", "transfer", "flush", "resume")
            },
            unit=" s",
            dots=True,
        ),
        "Finish reasons": bars(metrics.finish_reasons),
        "Times of samples": _times(metrics),
        "Engines": _engines(metrics.engines),
        "All in words": f"<pre>{escape(str(metrics))}</pre>",
    }
    body = "".join(f'<section id="{_id(name)}"><h2>{name}</h2>{inner}</section>' for name, inner in sections.items())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _rate(points: Sequence[Point], begun_s: float) -> list[tuple[float, float]]:
    return [
        (after.when_s - begun_s, (after.num_tokens - before.num_tokens) / (after.when_s - before.when_s))
        for before, after in pairwise(points)
        if after.when_s > before.when_s
    ]


def _id(name: str) -> str:
    return name.lower().replace(" ", "-")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _times(metrics: Metrics) -> str:
    def row(name: str, summary: Summary, unit: str) -> list[str]:
        values = (summary.mean, summary.p50, summary.p95, summary.max)
        return [name, f"{summary.count:,}", *(f"{value:.3g}{unit}" for value in values)]

    return _table(
        ["", "samples", "mean", "p50", "p95", "max"],
        [
            row("queue", metrics.queue_s, " s"),
            row("prefill", metrics.prefill_s, " s"),
            row("decode", metrics.decode_s, " s"),
            row("total", metrics.total_s, " s"),
            row("tokens", metrics.response_len, ""),
            row("staleness", metrics.staleness, ""),
        ],
    )


def _engines(engines: Sequence[EngineMetrics]) -> str:
    return _table(
        ["engine", "state", "samples", "tokens", "failovers", "deaths", "restarts", "GB in use after sleep"],
        [
            [
                engine.name,
                engine.state,
                f"{sum(engine.finish_reasons.values()):,}",
                f"{engine.num_tokens:,}",
                str(engine.num_failovers),
                str(engine.num_deaths),
                str(engine.num_restarts),
                "" if engine.used_bytes is None else f"{engine.used_bytes / 1e9:.2f}",
            ]
            for engine in engines
        ],
    )
