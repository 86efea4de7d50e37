"""What real engines say of themselves comes through to a rollout's metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import anyio
import pytest

import sglrollout as sr

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = list(range(40, 104))
SAMPLING = sr.Sampling(max_new_tokens=64, ignore_eos=True)


async def test_real_engines_tell_what_runs_in_them_and_what_they_found_in_their_caches(
    rollout: sr.AsyncRolloutEngine, tmp_path: Path
) -> None:
    before = rollout.metrics()
    await rollout.generate([PROMPT], n=1, sampling=SAMPLING)
    call = asyncio.create_task(rollout.generate([PROMPT], n=8, sampling=SAMPLING.replace(max_new_tokens=512)))
    with anyio.fail_after(60):
        while not (rollout.metrics().num_running > 1 and rollout.metrics().kv_usage_max > 0):
            await asyncio.sleep(0.01)
    assert rollout.metrics().num_inflight > 0
    (group,) = await call
    metrics = rollout.metrics()
    assert metrics.num_tokens - before.num_tokens == 64 + 8 * 512
    assert metrics.finish_reasons["length"] - before.finish_reasons.get("length", 0) == 9
    assert metrics.num_prompt_tokens - before.num_prompt_tokens == 9 * len(PROMPT)
    found = metrics.num_cached_tokens - before.num_cached_tokens
    assert found >= sum(completion.cached_tokens for completion in group.completions) > 0
    assert metrics.tokens_per_s > 0
    assert metrics.decode_s.count - before.decode_s.count == 9
    with anyio.fail_after(10):
        while rollout.metrics().num_running:
            await asyncio.sleep(0.01)
    await rollout.timeline(tmp_path / "timeline.json")
    await rollout.report(tmp_path / "report.html")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "b" and event["name"] == "decode" for event in events) >= 9
