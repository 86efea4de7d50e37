"""What an engine's process needs before it starts: room for its files, and a process."""

from __future__ import annotations

import errno
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import sglrollout as sr
from sglrollout.engine import scratch
from sglrollout.engine.client import EngineClient
from sglrollout.engine.launcher import _tail
from sglrollout.testing import ScriptedEngine
from sglrollout.wire.messages import Launch

pytestmark = pytest.mark.timeout(30)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_SOCKET_PATH_ROOM", 1000)
    return tmp_path


def engine(**options: Any) -> EngineClient:
    return EngineClient("engine-0", Launch("engine-0", {}, True, [], ""), **options)


async def test_a_temporary_directory_that_cannot_be_written_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "file" / "below"))
    with pytest.raises(sr.ConfigError, match="TMPDIR must be a directory in which files can be made") as caught:
        await engine().start()
    assert "below" in str(caught.value.value)
    config = sr.RolloutConfig(model="org/name", engine_args={"skip_tokenizer_init": True}, progress=False)
    async with sr.AsyncRolloutEngine(config=config, engines=[ScriptedEngine()]) as rollout:
        with pytest.raises(sr.ConfigError, match="TMPDIR"):
            sr.WeightSyncer(rollout, sr.TensorSource({"w": torch.zeros(2)}))


async def test_a_disk_that_is_full_is_refused_before_anything_starts(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"bytes": 15 << 20}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 1 << 40, free["bytes"]))
    with pytest.raises(sr.ConfigError, match=r"TMPDIR must be on a file system with 16 MB free, and 15 MB are"):
        await engine().start()
    with pytest.raises(sr.ConfigError, match="log_dir must be on a file system with 16 MB free"):
        await engine(log_dir=str(temporary / "logs")).start()
    assert not list(temporary.glob("sglrollout-*"))


async def test_a_log_directory_that_cannot_be_written_is_refused(temporary: Path) -> None:
    (temporary / "file").write_text("")
    with pytest.raises(sr.ConfigError, match="log_dir must be a directory that can be written"):
        await engine(log_dir=str(temporary / "file" / "logs")).start()
    assert not list(temporary.glob("sglrollout-*"))


async def test_a_machine_without_a_process_left_is_an_error_that_leaves_nothing(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(sr.EngineStartError, match=r"its host could not be started: .*temporarily unavailable"):
        await engine().start()
    assert list(temporary.iterdir()) == []


def test_the_end_of_a_log_is_read_and_no_more_whatever_the_file_is() -> None:
    assert len(_tail(Path("/dev/zero"), 30)) <= 64 * 1024


def test_a_long_line_of_a_log_is_cut(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"first\n\nserver_args={'x' * 10_000}\nlast\n")
    cut, last = _tail(tmp_path / "log", 2).splitlines()
    assert cut == f"server_args={'x' * 488}..."
    assert last == "last"
