"""Plots as SVG text, to stand inside a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeAlias

Line: TypeAlias = Sequence[tuple[float, float]]
"""Points, of x and y, in the order of x."""

_WIDTH, _HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
COLORS = ("#3b6fb6", "#d9822b", "#3a9a5b", "#b6403b", "#7b5cb8", "#6b7280")


def lines(of: Mapping[str, Line], end: float, unit: str = "", dots: bool = False) -> str:
    """Lines from 0 up, over the seconds from 0 to ``end``. With ``dots`` each point is marked, where they are few."""
    points = [point for line in of.values() for point in line]
    if not points:
        return _nothing()
    top = max(y for _, y in points) or 1.0
    inner = [_frame(end, top, unit)]
    for color, line in zip(_colors(len(of)), of.values(), strict=True):
        at = [(_LEFT + x / end * (_WIDTH - _LEFT - _RIGHT), _y(y / top)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        inner.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if dots:
            inner += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in at]
    return _svg("".join(inner)) + _legend(list(of))


def bars(of: Mapping[str, float]) -> str:
    """A bar for each name, with its number."""
    if not of:
        return _nothing()
    most = max(of.values()) or 1.0
    height = 26 * len(of) + 8
    inner = []
    for row, (name, number) in enumerate(of.items()):
        y, width = 8 + 26 * row, number / most * (_WIDTH - 240)
        inner.append(f'<text x="100" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        inner.append(f'<rect x="108" y="{y}" width="{width:.1f}" height="18" fill="{COLORS[0]}"/>')
        inner.append(f'<text x="{116 + width:.1f}" y="{y + 13}">{_short(number)}</text>')
    return _svg("".join(inner), height)


def _frame(end: float, top: float, unit: str) -> str:
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _y(share)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(top * share)}{unit}</text>')
    bottom = _HEIGHT - 8
    parts.append(f'<text x="{_LEFT}" y="{bottom}">0 s</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{bottom}" text-anchor="end">{_short(end)} s</text>')
    return "".join(parts)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


def _legend(names: Sequence[str]) -> str:
    items = (
        f'<span><i style="background:{color}"></i>{escape(name)}</span>'
        for color, name in zip(_colors(len(names)), names, strict=True)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _svg(inner: str, height: int = _HEIGHT) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{inner}</svg>'


def _nothing() -> str:
    return '<p class="nothing">nothing yet</p>'


def _short(number: float) -> str:
    if number >= 10_000:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"
