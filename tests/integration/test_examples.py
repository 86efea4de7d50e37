"""The examples run to their end on the CPU, as their first lines say."""

from __future__ import annotations

import json
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


def check_grpo(output: str, folder: Path) -> None:
    """The reward rises clearly, and the trainer's probabilities are the engine's."""
    rewards = [float(value) for value in re.findall(r"reward (\d\.\d+)", output)]
    mismatches = [float(value) for value in re.findall(r"mismatch (\d\.\d+)", output)]
    assert len(rewards) == 24
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3
    assert max(mismatches) < 1.05


def check_async(output: str, folder: Path) -> None:
    """Two loops, the second ahead of its trainer but within the bound."""
    ages = re.findall(r"staleness (\d\.\d+), at most (\d)", output)
    assert ages[0] == ("0.00", "0")
    assert float(ages[1][0]) > 0
    assert int(ages[1][1]) <= 2
    assert re.search(r"gain: \d\.\d\d times", output)


EXAMPLES: dict[str, tuple[list[str], Callable[[str, Path], None]]] = {
    "grpo_minimal.py": (["--tiny", "--steps", "24"], check_grpo),
    "async_grpo.py": (["--tiny", "--steps", "4", "--max-new-tokens", "16"], check_async),
    "collect.py": (["--tiny", "--steps", "3", "--save", "batch"], check_collect),
    "multi_turn_tools.py": (["--tiny"], check_tools),
    "openai_agent.py": (["--tiny"], check_agent),
}
"""Arguments for a quick run with a tiny model, and what is checked of its output and of the folder it ran in."""


def test_the_minimal_loop_is_under_100_lines_without_blank_ones_and_comments() -> None:
    lines = [line.strip() for line in (FOLDER / "grpo_minimal.py").read_text().splitlines()]
    assert len([line for line in lines if line and not line.startswith("#")]) < 100


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_with_a_tiny_model(name: str, tmp_path: Path) -> None:
    arguments, check = EXAMPLES[name]
    command = [sys.executable, str(FOLDER / name), *arguments]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    check(run.stdout, tmp_path)


def test_a_sharded_run_is_trained_by_two_ranks_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(FOLDER / "grpo_fsdp2.py")]
    options = ["--tiny", "--device", "cpu", "--groups", "4", "--micro-tokens", "256", "--save-every", "2"]
    for steps in (["--steps", "3"], ["--steps", "5", "--resume"]):
        run = subprocess.run(
            [*torchrun, *options, *steps], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert run.returncode == 0, run.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["token_mult_prob_error"] < 1.05 for line in lines)
    assert all(line["num_micro_batches"] > 1 for line in lines)
    delivered = {
        step: json.loads((tmp_path / "run" / f"step-{step:06d}" / "collector-0.json").read_text())["num_delivered"]
        for step in (2, 3, 4, 5)
    }
    assert delivered == {2: 8, 3: 12, 4: 16, 5: 20}  # no group twice, and none left out
