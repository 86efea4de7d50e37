"""What building an engine in the user's own process leaves behind there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglrollout.engine.sglang_adapter import _process_state_kept


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
