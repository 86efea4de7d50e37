"""What was found, whether that is good, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "warning", "wrong"]
"""``wrong`` stops engines. With a ``warning`` they run, but something is slower, scarcer or missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One of them.

    Attributes:
        name: what was looked at.
        verdict: on what was found.
        found: in words.
        fix: a command, or a sentence; empty where nothing needs to be done.
    """

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that the library can do, and whether it can do it here. ``why`` says with what, or why not."""

    name: str
    is_supported: bool
    why: str


def size(num_bytes: int) -> str:
    """In words: ``64 MB``, ``1.5 GB``."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def count(number: int, noun: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
