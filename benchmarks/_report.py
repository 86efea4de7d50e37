"""From the runs of all rows to a table and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from _measure import Measurement

BASELINE = "raw/tasks"
GENERATE, COLLECT = "sglrollout/generate", "sglrollout/collect"
STREAM8, STREAM1 = "sglrollout/stream8", "sglrollout/stream1"


class Target(NamedTuple):
    """``row`` is to be at least ``at_least`` times as fast as the row ``of``."""

    row: str
    of: str
    at_least: float


_TARGETS = (Target(GENERATE, BASELINE, 0.98), Target(STREAM8, GENERATE, 0.95), Target(STREAM1, GENERATE, 0.70))


def summarize(rows: dict[str, list[Measurement]]) -> list[dict[str, Any]]:
    """Medians of each row's runs, and its ratio to the baseline."""
    speeds = {row: statistics.median(run.tokens_per_s for run in runs) for row, runs in rows.items()}
    fields = ("seconds", "caller_cpu_s", "host_cpu_s", "first_token_p50_s", "first_token_p99_s", "tokens_per_chunk")
    return [
        {
            "row": row,
            "tokens_per_s": speeds[row],
            "ratio": speeds[row] / speeds[BASELINE] if BASELINE in speeds else None,
            "spread": (max(run.tokens_per_s for run in runs) - min(run.tokens_per_s for run in runs)) / speeds[row],
            **{field: _median(getattr(run, field) for run in runs) for field in fields},
            "runs": [asdict(run) for run in runs],
        }
        for row, runs in rows.items()
    ]


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def print_table(summary: list[dict[str, Any]]) -> None:
    """One line per row; an empty cell where a row has no such number."""
    columns = {
        "tokens/s": ("tokens_per_s", "{:,.0f}"),
        "of raw": ("ratio", "{:.3f}"),
        "spread": ("spread", "{:.1%}"),
        "TTFT p50 s": ("first_token_p50_s", "{:.3f}"),
        "p99 s": ("first_token_p99_s", "{:.3f}"),
        "tok/chunk": ("tokens_per_chunk", "{:.2f}"),
        "seconds": ("seconds", "{:.2f}"),
        "caller CPU s": ("caller_cpu_s", "{:.2f}"),
        "host CPU s": ("host_cpu_s", "{:.2f}"),
    }
    lines = [["way", *columns, "runs"]]
    for row in summary:
        cells = ["" if row[key] is None else form.format(row[key]) for key, form in columns.values()]
        lines.append([row["row"], *cells, str(len(row["runs"]))])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        name, *numbers = (f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        print("  ".join([f"{name.strip():<{widths[0]}}", *numbers]).rstrip())


def check_targets(summary: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target whose two rows were measured."""
    speeds = {row["row"]: row["tokens_per_s"] for row in summary}
    measured = [target for target in _TARGETS if target.row in speeds and target.of in speeds]
    ratios = [speeds[target.row] / speeds[target.of] for target in measured]
    return [
        {**target._asdict(), "ratio": ratio, "met": ratio >= target.at_least}
        for target, ratio in zip(measured, ratios, strict=True)
    ]
