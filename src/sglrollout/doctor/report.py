"""An examination for a person, on a terminal or in a log, and for a program."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglrollout.doctor.examination import Examination
from sglrollout.doctor.facts import Facts
from sglrollout.doctor.finding import Ability, Finding, Verdict

_STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def as_table(examination: Examination) -> RenderableType:
    """For a terminal."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for overflow in ("ignore", "fold", "fold"):
        table.add_column(overflow=overflow)
    for topic, findings in examination.topics.items():
        table.add_section()
        table.add_row("", Text(topic, style="bold"))
        for finding in findings:
            table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), finding.name, _found(finding))
    table.add_section()
    table.add_row("", Text("supported here", style="bold"))
    for ability in examination.abilities:
        verdict = Text("yes", style="green") if ability.is_supported else Text("no", style="dim")
        table.add_row(verdict, ability.name, Text(ability.why))
    style = "bold green" if examination.can_run else "bold red"
    return Group(table, Text(examination.summary, style=style))


def as_lines(examination: Examination) -> Iterator[str]:
    """For anything else: a line for each, and one for its fix."""
    for topic, findings in examination.topics.items():
        yield f"{topic}:"
        for finding in findings:
            yield _line(finding)
            if finding.fix:
                yield f"           fix: {finding.fix}"
    yield "supported here:"
    yield from map(_ability_line, examination.abilities)
    yield examination.summary


def as_json(examination: Examination, facts: Facts) -> str:
    """For a program, or to attach to a report of a problem: with the facts, but none of the environment's values."""
    known = {part: dataclasses.asdict(getattr(facts, part)) for part in ("software", "devices", "machine")}
    return json.dumps({**examination.as_dict(), "facts": known}, indent=2)


def show(examination: Examination, console: Console) -> None:
    """As a table on a terminal, else as lines."""
    if console.is_terminal:
        console.print(as_table(examination))
    else:
        for line in as_lines(examination):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _found(finding: Finding) -> Text:
    text = Text(finding.found)
    return text.append(f"\n→ {finding.fix}", style="cyan") if finding.fix else text


def _line(finding: Finding) -> str:
    return f"  {finding.verdict:7}  {finding.name}: {finding.found}"


def _ability_line(ability: Ability) -> str:
    return f"  {'yes' if ability.is_supported else 'no':7}  {ability.name}: {ability.why}"
