"""Fixtures shared by all tests. Real engines are started once and shared: a start takes 15 to 40 seconds on 2 cores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest

import sglrollout as sr
from sglrollout import testing
from tests.remote import RealServer

_TAIL_CHARS = 4000
JSON = {"constrained_json_disable_any_whitespace": True}  # a random model would write white space for ever


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What servers said, below what failed."""
    report = yield
    if report.failed:
        for log in RealServer.logs:
            report.sections.append((f"the end of {log.name}", log.read_text(errors="replace")[-_TAIL_CHARS:]))
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with a byte-level tokenizer and a chat template, in float32."""
    return testing.tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
async def rollout(tiny_model: Path) -> AsyncIterator[sr.AsyncRolloutEngine]:
    """Two real engines of the tiny model on the CPU."""
    async with sr.AsyncRolloutEngine(
        tiny_model, num_engines=2, device="cpu", dtype="float32", engine_args=JSON
    ) as engine:
        yield engine
