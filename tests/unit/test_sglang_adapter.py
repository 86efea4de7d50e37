"""What building an engine in the user's own process leaves behind there, and in which order it is told things."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglrollout.engine.sglang_adapter import SGLangEngine, _process_state_kept
from sglrollout.wire.messages import Generate


@pytest.mark.parametrize("fails", [False, True])
def test_the_environment_is_as_before_whether_the_build_fails_or_not(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("NCCL_ALGO", "ring")
    before = dict(os.environ)

    def build() -> None:
        with _process_state_kept(str(tmp_path)):
            assert "RANK" not in os.environ
            os.environ.update(NCCL_ALGO="allreduce:tree", SGLANG_RUN_ID="1")
            if fails:
                raise RuntimeError("no such model")

    if fails:
        with pytest.raises(RuntimeError, match="no such model"):
            build()
    else:
        build()
    assert dict(os.environ) == before


class Scheduler:
    """What the adapter asks of SGLang to pause and resume, in the order in which it came."""

    def __init__(self) -> None:
        self.is_pause_cond, self.is_pause = asyncio.Condition(), False
        self.called: list[str] = []


async def test_a_resume_waits_for_a_pause_that_nobody_waits_for_any_more() -> None:
    engine, scheduler, ended = SGLangEngine.__new__(SGLangEngine), Scheduler(), asyncio.Event()

    async def call(method: str, within_s: float, arguments: Any = None) -> list[Any]:
        scheduler.called.append(method)
        return [{}]

    request = asyncio.ensure_future(ended.wait())
    engine._manager, engine._state_lock, engine._tasks = scheduler, asyncio.Lock(), {1: request}  # type: ignore[dict-item]
    engine.call_schedulers = call  # type: ignore[method-assign]
    engine.abort = lambda request_id: None  # type: ignore[method-assign]
    pausing = asyncio.ensure_future(engine.pause("abort", 5))
    await asyncio.sleep(0)
    resuming = asyncio.ensure_future(engine.resume(3, True, 5))
    await asyncio.sleep(0.01)
    assert scheduler.called == []
    ended.set()
    await asyncio.gather(pausing, resuming)
    assert scheduler.called == ["pause", "resume"]
    assert (scheduler.is_pause, engine.weight_version) == (False, 3)


async def test_a_request_that_is_aborted_before_its_first_step_ends_and_leaves_nothing_behind() -> None:
    """As when a host reads a request and its abort at once."""
    engine, sent = SGLangEngine.__new__(SGLangEngine), list[Any]()
    engine._tasks, engine._emit, engine.weight_version = {}, sent.append, 0
    engine._manager = SimpleNamespace(rid_to_state={})
    engine.submit(Generate(7, [1, 2], {}, 0))
    engine.abort(7)
    await asyncio.sleep(0.01)
    assert engine.num_inflight == 0
    (output,) = sent[0].outputs
    assert (output.request_id, output.finish.reason) == (7, "abort")
