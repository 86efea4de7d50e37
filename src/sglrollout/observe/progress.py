"""Progress on a terminal or in a notebook, and nothing anywhere else unless asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sglrollout.pool.pool import Pool

_REFRESH_S = 0.25


def wanted(setting: bool | None) -> bool:
    """``None`` shows progress to a person: on a terminal or in a notebook, and not in CI."""
    if setting is not None:
        return setting
    return not os.environ.get("CI") and (sys.stderr.isatty() or "ipykernel" in sys.modules)


@asynccontextmanager
async def starting(pool: Pool, show: bool) -> AsyncIterator[None]:
    """A line per engine while they start, with what each logged last."""
    if not show:
        yield
        return
    name, stage = TextColumn("{task.description}"), TextColumn("{task.fields[stage]}")
    columns = (SpinnerColumn(), name, TimeElapsedColumn(), stage)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        rows = {member.name: progress.add_task(member.name, total=None, stage="") for member in pool.members}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_follow, pool, progress, rows)
            yield
            tasks.cancel_scope.cancel()


async def _follow(pool: Pool, progress: Progress, rows: dict[str, TaskID]) -> None:
    while True:
        for member in pool.members:
            progress.update(rows[member.name], stage=member.engine.stage.replace("[", r"\["))
        await anyio.sleep(_REFRESH_S)


class Bar:
    """Counts finished samples and their tokens."""

    def __init__(self, progress: Progress | None, row: TaskID | None) -> None:
        self._progress, self._row, self._num_tokens = progress, row, 0

    def advance(self, num_tokens: int) -> None:
        """One more sample is done, with so many tokens."""
        self._num_tokens += num_tokens
        if self._progress is None or self._row is None:
            return
        elapsed = self._progress.tasks[self._row].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""
        self._progress.update(self._row, advance=1, rate=rate)


@contextmanager
def generating(num_samples: int, show: bool) -> Iterator[Bar]:
    """A bar over the samples of one call."""
    if not show:
        yield Bar(None, None)
        return
    columns: tuple[Any, ...] = (
        TextColumn("generating"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} samples"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bar(progress, progress.add_task("", total=num_samples, rate=""))
