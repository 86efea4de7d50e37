"""Progress on a terminal or in a notebook, and nothing anywhere else unless asked for."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Protocol

import anyio
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from tqdm.std import tqdm

from sglrollout.pool.pool import Pool

_REFRESH_S = 0.25


def wanted(setting: bool | None) -> bool:
    """``None`` shows progress to a person: on a terminal or in a notebook, and not in CI."""
    if setting is not None:
        return setting
    return not os.environ.get("CI") and (sys.stderr.isatty() or in_notebook())


def in_notebook() -> bool:
    """Whether a kernel runs this code: that a library has imported ``ipykernel`` tells nothing."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


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


class Collecting(Protocol):
    """What a view of a collection reads."""

    @property
    def num_queued(self) -> int: ...
    @property
    def num_active(self) -> int: ...
    @property
    def num_stalled(self) -> int: ...
    @property
    def num_rewarding(self) -> int: ...
    @property
    def num_ready(self) -> int: ...
    @property
    def num_failed(self) -> int: ...
    @property
    def filtered(self) -> dict[str, int]: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def weight_version(self) -> int: ...
    @property
    def staleness_max(self) -> int: ...


def collecting(read: Callable[[], Collecting], num_groups: int | None, show: bool) -> AbstractContextManager[object]:
    """While a batch is waited for: a live table on a terminal, one line in a notebook."""
    if not show:
        return nullcontext()
    return _Line(read, num_groups) if in_notebook() else _Table(read, num_groups)


class _View:
    """Draws a collection four times a second, on the event loop: what it reads belongs to that."""

    def __init__(self, read: Callable[[], Collecting], num_groups: int | None) -> None:
        self._read, self._num_groups = read, num_groups
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self.open()
        self._tick()

    def __exit__(self, *exit: object) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self.close()

    def _tick(self) -> None:
        self.draw(self._read())
        self._timer = asyncio.get_running_loop().call_later(_REFRESH_S, self._tick)

    def open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def draw(self, now: Collecting) -> None:
        raise NotImplementedError


class _Table(_View):
    """On a terminal."""

    def open(self) -> None:
        self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
        self._live.start()

    def close(self) -> None:
        self._live.stop()

    def draw(self, now: Collecting) -> None:
        running = f"{now.num_queued} queued, {now.num_active} active, {now.num_stalled} stalled"
        of = f"/{self._num_groups}" if self._num_groups else ""
        rows = {
            "samples": f"{running}, {now.num_failed} failed",
            "rewarding": str(now.num_rewarding),
            "ready": f"{now.num_ready}{of} groups",
            "filtered": ", ".join(f"{count} {reason}" for reason, count in now.filtered.items()) or "0",
            "tokens/s": f"{now.tokens_per_s:,.0f}",
            "staleness": str(now.staleness_max),
        }
        table = Table.grid(padding=(0, 2))
        table.title, table.title_justify = f"collecting under weight version {now.weight_version}", "left"
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, shown in rows.items():
            table.add_row(f"  {name}", Text(shown))  # as Text: brackets in a reason are no markup
        self._live.update(table, refresh=True)


class _Line(_View):
    """In a notebook."""

    def open(self) -> None:
        self._bar = tqdm(total=self._num_groups, desc="collecting", unit="group", leave=False, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()

    def draw(self, now: Collecting) -> None:
        shown = {
            **{"active": now.num_active, "queued": now.num_queued, "stalled": now.num_stalled},
            **{"filtered": sum(now.filtered.values()), "tokens/s": f"{now.tokens_per_s:,.0f}"},
            "staleness": now.staleness_max,
        }
        self._bar.n = now.num_ready
        self._bar.set_postfix(shown, refresh=True)
