"""The examples run to their end on the CPU, as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sglrollout as sr

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = {
    "collect.py": ["--tiny", "--steps", "3", "--save", "batch"],
}
"""Examples that have a tiny model, with arguments for a quick run."""


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_runs_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / name), *COMMANDS[name]]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    if name == "collect.py":
        lines = [line.split() for line in run.stdout.splitlines()]
        steps = [line[:2] for line in lines if line and line[0].isdigit()]
        assert steps == [["1", "0"], ["2", "1"], ["3", "2"]]
        batch = sr.RolloutBatch.load(tmp_path / "batch")
        assert batch.batch_size == 16
        assert batch.max_staleness(2) <= 1
