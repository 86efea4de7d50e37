"""Two trainer ranks, each with a scripted engine: what becomes of a sync in which engines die."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank saw, by case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).parents[1] / "syncer_rank.py")
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(port)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [json.loads(process.communicate(timeout=100)[0]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def test_a_sync_goes_on_with_the_engine_of_the_other_rank_and_does_not_wait(found: list[dict[str, Any]]) -> None:
    for rank in found:
        first, second = rank["one_dies"]
        assert (first["lost"], first["engines"], first["published"]) == (["engine-0 of rank 1"], 1, 1)
        assert (second["lost"], second["engines"], second["published"]) == ([], 2, 2)
        assert second["state"] == "ready"
    assert [rank["one_dies"][0]["state"] for rank in found] == ["ready", "restarting"]  # its sync was over before


def test_a_sync_waits_for_engines_that_are_restarted_if_no_rank_has_one(found: list[dict[str, Any]]) -> None:
    for rank in found:
        first, second = rank["both_die"]
        assert sorted(first["lost"]) == ["engine-0 of rank 0", "engine-0 of rank 1"]
        assert (first["engines"], first["version"], first["published"], first["state"]) == (2, 1, 1, "ready")
        assert first["seconds"] >= 1.5
        assert second["version"] == 2


def test_ranks_that_may_try_differently_often_fail_alike_and_are_in_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        first, second = rank["one_dies_and_the_other_has_no_retries"]
        assert "engine-0: out of memory" in first["error"]
        assert (first["engine"], first["rank"]) == ("engine-0", 1)
        assert first["seconds"] < 10  # and not when one has waited for the other in vain
        assert second["version"] == second["published"]


def test_a_rank_that_is_cancelled_while_it_waits_for_its_engine_syncs_no_more(found: list[dict[str, Any]]) -> None:
    (after,) = found[1]["one_is_cancelled_while_it_waits"]
    assert "it was cancelled here; all ranks need a new syncer" in after["error"]
    for sync in found[0]["one_is_cancelled_while_it_waits"]:
        assert (sync["rank"], sync["state"]) == (1, "stale")
