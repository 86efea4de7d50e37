"""A rollout's past as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from sglrollout.observe.recorder import Point, Recorder, Spell, Stay
from sglrollout.pool.pool import EngineState
from sglrollout.weights.report import SyncReport

Event: TypeAlias = dict[str, Any]
_POOL = 1  # 0 is taken for the kernel's idle process
_SAMPLES, _STATE, _WORK, _PHASES = range(4)
_ENDS = {EngineState.RESTARTING.value: "died", EngineState.DEAD.value: "dead for good"}
_IN_ORDER = ("plan", "pause", "wake", "transfer", "flush", "resume")


def write_timeline(recorder: Recorder, path: Path) -> None:
    """Write the trace, as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    events = trace(recorder)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write(("" if number == 0 else ",\n") + json.dumps(event))
        file.write("\n]}\n")


def trace(recorder: Recorder) -> list[Event]:
    """The events, in the order of their times: microseconds since the rollout's start."""
    pids = {name: number for number, name in enumerate(recorder.engines, start=_POOL + 1)}
    events: list[Event] = []
    for number, stay in enumerate(recorder.stays):
        events += _of_stay(stay, pids.get(stay.engine, _POOL) if stay.held_s is not None else _POOL, number)
    for spell in recorder.spells:
        events += _of_spell(spell, pids)
    for end_s, report in list(recorder.syncs):
        events += _of_sync(end_s, report)
    for point in recorder.points:
        events += _of_point(point)
    for event in events:
        event["ts"] = round((event["ts"] - recorder.begun_s) * 1e6, 3)
        if "dur" in event:
            event["dur"] = round(event["dur"] * 1e6, 3)
    return [*_names(pids), *sorted(events, key=lambda event: event["ts"])]  # stable: of one time, as they were made


def _names(pids: dict[str, int]) -> Iterator[Event]:
    for name, pid in {"rollout": _POOL, **pids}.items():
        row = _row(pid, _SAMPLES)
        yield {"ph": "M", "name": "process_name", **row, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", **row, "args": {"sort_index": pid}}
    for pid, row_number, name in [
        (_POOL, _WORK, "syncs and sleeps"),
        (_POOL, _PHASES, "phases of syncs"),
        *((pid, _STATE, "state") for pid in pids.values()),
    ]:
        yield {"ph": "M", "name": "thread_name", **_row(pid, row_number), "args": {"name": name}}


def _row(pid: int, number: int) -> dict[str, int]:
    """No thread of one process has the number of another's."""
    return {"pid": pid, "tid": 10 * pid + number}


def _of_stay(stay: Stay, pid: int, number: int) -> Iterator[Event]:
    """Nested slices: the sample, and its phases one after another."""
    common = {"cat": "sample", "id": f"{number:#x}", **_row(pid, _SAMPLES)}

    def pair(name: str, begin_s: float, end_s: float, **args: Any) -> tuple[Event, Event]:
        begin = {"ph": "b", "name": name, "ts": begin_s, **common, **({"args": args} if args else {})}
        return begin, {"ph": "e", "name": name, "ts": end_s, **common}

    end_s = max(stay.end_s, stay.asked_s)
    begin, end = pair("sample", stay.asked_s, end_s, outcome=stay.outcome, num_tokens=stay.num_tokens)
    yield begin
    held_s = end_s if stay.held_s is None else stay.held_s
    yield from pair("queue", stay.asked_s, held_s)
    if stay.held_s is not None:
        first_s = stay.first_token_s
        if first_s is None:
            yield from pair("prefill", held_s, end_s)
        elif first_s < held_s:  # it came with tokens, and nobody notes when the next one is there
            yield from pair("prefill and decode", held_s, end_s)
        else:
            yield from pair("prefill", held_s, first_s)
            yield from pair("decode", first_s, end_s)
    yield end


def _of_spell(spell: Spell, pids: dict[str, int]) -> Iterator[Event]:
    common = _row(pids.get(spell.engine, _POOL), _STATE if spell.engine else _WORK)
    seconds = spell.end_s - spell.begin_s
    yield {"ph": "X", "name": spell.what, "cat": "state", "ts": spell.begin_s, "dur": seconds, **common}
    if spell.what in _ENDS:
        yield {"ph": "i", "name": _ENDS[spell.what], "cat": "state", "ts": spell.begin_s, "s": "p", **common}


def _of_sync(end_s: float, report: SyncReport) -> Iterator[Event]:
    """Its phases end to end, as only their lengths are known."""
    common = {"ph": "X", "cat": "sync", **_row(_POOL, _PHASES)}
    at_s = end_s - report.total_s
    for phase in _IN_ORDER:
        seconds = min(getattr(report, f"{phase}_s"), max(0.0, end_s - at_s))
        if seconds > 0:
            yield {"name": phase, "ts": at_s, "dur": seconds, "args": {"version": report.version}, **common}
        at_s += seconds


def _of_point(point: Point) -> Iterator[Event]:
    samples = {"queued": point.num_queued, "inflight": point.num_inflight}
    for name, args in (("samples", samples), ("KV use", {"mean": point.kv_usage_mean, "max": point.kv_usage_max})):
        yield {"ph": "C", "name": name, **_row(_POOL, _SAMPLES), "ts": point.when_s, "args": args}
