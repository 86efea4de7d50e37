"""Real SGLang and several trainer ranks on the CPU: sharded weights, ranks that fail, die, or stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("sync_ranks.py")


def torchrun(num_ranks: int, scenarios: str, directory: Path, **options: Any) -> list[dict[str, Any]]:
    """What each rank found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    out = directory / "out"
    command = [*launcher, str(SCRIPT), scenarios, str(out), json.dumps(options)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(num_ranks)]


def alone(num_ranks: int, scenario: str, directory: Path, lost: int) -> list[dict[str, Any]]:
    """The same without a launcher, which would end all ranks when one dies. ``lost`` leaves no word."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    out = directory / "out"
    command = [sys.executable, str(SCRIPT), scenario, str(out), json.dumps({"dtype": "bfloat16"})]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    try:
        for rank, process in enumerate(ranks):
            if rank != lost:
                assert process.wait(200) == 0
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return [json.loads(Path(f"{out}.{rank}").read_text())[scenario] for rank in range(num_ranks) if rank != lost]


def test_two_ranks_sync_sharded_and_whole_weights_and_survive_failures(tmp_path: Path) -> None:
    scenarios = "cuts,after_a_forward,offloaded,two_owners,other_weights,failing_shard,failing_hook,failing_rank,busy"
    found = torchrun(2, scenarios, tmp_path, vocab_size=515)
    for of_rank in found:
        for way in ("fsdp", "fsdp, portable"):
            assert of_rank["cuts"][way]["verified"] == [24, 24]
            assert of_rank["cuts"][way]["report"]["num_buckets"] > 8
        assert of_rank["offloaded"]["verified"] == 24
        assert of_rank["two_owners"] == {"verified": [24, 24], "lost": [1, "engine-0 of rank 1"]}

        odd = of_rank["other_weights"]
        assert (odd["type"], odd["phase"], odd["rank"]) == ("WeightSyncError", "plan", 1)
        assert "other weights" in odd["text"]

        broken = of_rank["failing_shard"]
        assert (broken["type"], broken["phase"], broken["rank"]) == ("WeightSyncError", "transfer", 1)
        assert "a shard is gone" in broken["text"]
        assert broken["seconds"] < 5  # known when the gathers are over, not at the deadline
        assert broken["verified"] == 24

        gathering = of_rank["failing_hook"]
        assert all("rank 1" in text and "the hook broke" in text for text in gathering["text"])
        assert gathering["seconds"] < 10
        assert gathering["verified"] == [24, 24]

        hook = of_rank["failing_rank"]
        assert (hook["type"], hook["phase"], hook["rank"]) == ("WeightSyncError", "transfer", 1)
        assert "the hook broke" in hook["text"]

        assert of_rank["busy"]["type"] == "LifecycleError"
        assert of_rank["busy"]["seconds"] < 2
    owner = found[0]
    for way in ("fsdp", "fsdp, portable"):
        assert owner["cuts"][way]["equal"] == [True, True]
        assert owner["cuts"][way]["changed"] == [True, True]
    assert owner["after_a_forward"] == {"verified": 24, "equal": True}
    assert owner["failing_rank"]["states"] == ["stale"]
    assert owner["failing_rank"]["refused"]["type"] == "StaleWeightsError"
    assert owner["failing_rank"]["healed"] == ["ready"]


def test_two_ranks_sync_an_adapter_or_changes_of_which_each_has_a_part(tmp_path: Path) -> None:
    owner, other = torchrun(2, "lora,changes", tmp_path, more={"lora_rank": 4})
    assert owner["lora"].pop("equal")
    assert owner["lora"] == other["lora"]
    assert owner["lora"]["method"] == "lora"
    assert owner["lora"]["num_buckets"] > 2

    changes = owner["changes"]
    assert changes["num_weights"] >= 24
    assert changes["equal"] == [True] * 3
    assert changes["written"][0] > 400_000
    assert changes["written"][1:] == [6, 12]  # an element; that one again, and another
    assert other["changes"]["written"] == [0] * 3


def test_four_ranks_sync_every_way_to_cut_a_model_into_an_engine_with_two_tp_ranks(tmp_path: Path) -> None:
    found = torchrun(4, "cuts", tmp_path, vocab_size=515, tie=False, tp_size=2)
    for of_rank in found:
        assert {way: result["verified"] for way, result in of_rank["cuts"].items()} == {
            "fsdp": [25, 25],
            "hsdp": [25, 25],
            "fsdp x tp": [25, 25],
            "fsdp, portable": [25, 25],
        }
    assert all(result["equal"] == [True, True] for result in found[0]["cuts"].values())


@pytest.mark.parametrize(
    ("scenario", "within_s", "text"), [("rank_killed_in_a_gather", 20, "is gone"), ("stopped_rank", 40, "did not come")]
)
def test_a_rank_that_is_lost_fails_the_others_in_time_and_hangs_none(
    tmp_path: Path, scenario: str, within_s: float, text: str
) -> None:
    begun = time.monotonic()
    for of_rank in alone(3, scenario, tmp_path, lost=1):
        assert of_rank["verified"] == 24  # before: what ranks have in float32, rounded to the engine's bfloat16
        assert (of_rank["type"], of_rank["rank"]) == ("WeightSyncError", 1)
        assert text in of_rank["text"]
        assert of_rank["seconds"] < within_s
    assert time.monotonic() - begun < 200
