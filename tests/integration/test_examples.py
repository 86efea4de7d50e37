"""The examples run to their end on the CPU, as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sglrollout as sr

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples"


def check_collect(output: str, folder: Path) -> None:
    """A line per step, each under newer weights, and a batch that was saved."""
    assert re.findall(r"^(\d+) +(\d+) ", output, re.MULTILINE) == [("1", "0"), ("2", "1"), ("3", "2")]
    batch = sr.RolloutBatch.load(folder / "batch")
    assert batch.batch_size == 16
    assert batch.max_staleness(2) <= 1


def check_agent(output: str, folder: Path) -> None:
    """A tool was called, and every conversation is in the table, under the only weights there were."""
    assert re.search(r",000\s+people\s+live\s+in\s+(Oslo|Paris|Rome)\.", output)
    assert len(re.findall(r"│ +-\d+\.\d\d +│ 0 +│$", output, re.MULTILINE)) == 3


def check_tools(output: str, folder: Path) -> None:
    """The calculator ran between two turns, and its tokens are masked."""
    assert re.search(r"loss mask: 0 x \d+, 1 x \d+, 0 x \d+, 1 x \d+", output)
    assert "The result is" in output


EXAMPLES: dict[str, tuple[list[str], Callable[[str, Path], None]]] = {
    "collect.py": (["--tiny", "--steps", "3", "--save", "batch"], check_collect),
    "multi_turn_tools.py": (["--tiny"], check_tools),
    "openai_agent.py": (["--tiny"], check_agent),
}
"""Arguments for a quick run with a tiny model, and what is checked of its output and of the folder it ran in."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    arguments, check = EXAMPLES[name]
    command = [sys.executable, str(FOLDER / name), *arguments]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    check(run.stdout, tmp_path)
