"""What a person sees of a collection."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest

import sglrollout as sr
from sglrollout.observe import progress
from sglrollout.testing import ScriptedEngine

CONFIG = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False, max_restarts=0)


def terminal(monkeypatch: pytest.MonkeyPatch, width: int = 140) -> None:
    """Have rich take what captures stderr for a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))


async def waited_for(num_groups: int | None, show: bool, **numbers: Any) -> None:
    """A view, for long enough to be drawn more than once."""
    shown = {
        **{"num_queued": 7, "num_active": 12, "num_stalled": 3, "num_rewarding": 2, "num_ready": 5, "num_failed": 1},
        **{"filtered": {"zero_std": 4}, "tokens_per_s": 6543.2, "weight_version": 9, "staleness_max": 2},
        **numbers,
    }
    with progress.collecting(lambda: SimpleNamespace(**shown), num_groups, show):
        await anyio.sleep(0.6)


async def test_a_terminal_shows_what_is_active_queued_stalled_filtered_and_how_stale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(monkeypatch)
    await waited_for(8, True)
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in ("active", "queued", "stalled", "5/8", "4 zero_std", "6,543", "weight version 9"):
        assert part in shown.err


@pytest.mark.parametrize("width", [80, 60])
async def test_a_narrow_terminal_shows_all_of_it(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(monkeypatch, width)
    filtered = {"zero_std": 120, "mean_reward_low": 34, "[too long]": 5, "x" * width: 6}
    await waited_for(128, True, num_queued=1024, num_active=1024, num_stalled=16, filtered=filtered)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert max(map(len, re.split("[\r\n]+", shown))) <= width
    for line in (
        *("collecting under weight version 9", "samples    1024 queued, 1024 active, 16 stalled, 1 failed"),
        *("rewarding  2", "ready      5/128 groups", "tokens/s   6,543", "staleness  2"),
    ):
        assert line in shown
    assert "120 zero_std, 34 mean_reward_low, 5 [too long], 6 x" in " ".join(shown.split())
    assert "…" not in shown


def shell(monkeypatch: pytest.MonkeyPatch, running: object) -> None:
    """Have IPython and ipykernel imported, with ``running`` as the shell that runs this code."""
    ipython = ModuleType("IPython")
    monkeypatch.setattr(ipython, "get_ipython", lambda: running, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))


async def test_a_notebook_shows_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shell(monkeypatch, SimpleNamespace(kernel=object()))
    await waited_for(8, True)
    shown = capsys.readouterr().err
    assert "5/8" in shown
    assert "stalled=3" in shown
    assert "\n" not in shown.strip()


@pytest.mark.parametrize("running", [None, SimpleNamespace()], ids=["a script", "a terminal's IPython"])
async def test_a_library_that_imports_ipykernel_makes_no_notebook(
    running: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(monkeypatch)
    shell(monkeypatch, running)
    await waited_for(8, True)
    assert "collecting under weight version 9" in capsys.readouterr().err


async def test_nothing_is_shown_when_it_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    await waited_for(8, False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("setting", "ci", "wanted"), [(True, "1", True), (False, "", False), (None, "1", False)])
def test_progress_is_off_in_ci_unless_it_is_asked_for(
    setting: bool | None, ci: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    assert progress.wanted(setting) is wanted


async def test_a_collection_shows_its_view_while_a_batch_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(monkeypatch)
    engine = ScriptedEngine(token_s=0.01)
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=[engine]) as rollout:
        await rollout.collect([[1], [2]], sampling=sr.Sampling(max_new_tokens=40, ignore_eos=True), progress=True)
    assert "collecting under weight version 0" in capsys.readouterr().err


async def test_a_view_ends_with_the_wait_also_when_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(monkeypatch)
    engine = ScriptedEngine(die_after=20, token_s=0.01)
    async with sr.AsyncRolloutEngine(config=CONFIG, engines=[engine]) as rollout:
        with pytest.raises(sr.NoEngineError):
            await rollout.collect([[1], [2]], sampling=sr.Sampling(max_new_tokens=400, ignore_eos=True), progress=True)
        capsys.readouterr()
        await anyio.sleep(0.6)
    assert capsys.readouterr().err == ""
