"""All that was found, in one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sglrollout.doctor import devices, machine, software, variables
from sglrollout.doctor.abilities import abilities
from sglrollout.doctor.facts import Facts
from sglrollout.doctor.finding import Ability, Finding


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found.

    Attributes:
        topics: the findings, by what they are about.
        abilities: what is supported here.
    """

    topics: dict[str, list[Finding]]
    abilities: list[Ability]

    @property
    def findings(self) -> list[Finding]:
        return [finding for findings in self.topics.values() for finding in findings]

    @property
    def can_run(self) -> bool:
        """Whether an engine could run here: nothing is wrong."""
        return all(finding.verdict != "wrong" for finding in self.findings)

    @property
    def summary(self) -> str:
        """One sentence."""
        wrong, warnings = (sum(f.verdict == verdict for f in self.findings) for verdict in ("wrong", "warning"))
        noted = f"{warnings} warning{'' if warnings == 1 else 's'}"
        if wrong:
            return f"engines cannot run here: {wrong} wrong, {noted}"
        return f"engines can run here: {noted}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "can_run": self.can_run,
            "findings": [
                {"topic": topic, **dataclasses.asdict(finding)}
                for topic, findings in self.topics.items()
                for finding in findings
            ],
            "abilities": [dataclasses.asdict(ability) for ability in self.abilities],
        }


def examine(facts: Facts) -> Examination:
    """Every check. Anywhere but on Linux only what is installed is looked at."""
    topics = {"software": software.check(facts)}
    if facts.software.platform == "linux":
        topics |= {"GPUs": devices.check(facts), "machine": machine.check(facts), "environment": variables.check(facts)}
    can_run = all(finding.verdict != "wrong" for findings in topics.values() for finding in findings)
    return Examination(topics, abilities(facts, can_run))
