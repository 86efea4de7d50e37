"""A short run of the faults of ``nox -s chaos``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_engines_that_are_broken_under_load_lose_no_call_and_no_token() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "0.75", "--every-s", "4", "--seed", "11", "--snapshot"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=580)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
