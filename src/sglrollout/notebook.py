"""HTML of results for notebooks: small, without scripts or styles of its own, and safe whatever a model said.

Imports nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

MOST_TOKENS = 512
_MOST_CHARACTERS = 2000
_UNLIKELY = 8.0  # the negative logprob that gets the full colour: a probability of 1 in 3000

# Notebooks would typeset formulas between dollars, and a model's marks for right-to-left text would turn the page.
_FRAME = '<div class="tex2jax_ignore mathjax_ignore" style="unicode-bidi:isolate">{}</div>'
_TEXT = '<div style="white-space:pre-wrap;overflow-wrap:anywhere;text-align:left;font-family:monospace">{}</div>'


def frame(*parts: str) -> str:
    """The whole of an object's HTML."""
    return _FRAME.format("".join(parts))


def text(value: object, most: int = _MOST_CHARACTERS) -> str:
    """Escaped, and cut after ``most`` characters."""
    whole = str(value)
    more = f"<i> … {len(whole) - most:,} more characters</i>" if len(whole) > most else ""
    return _safe(whole[:most]) + more


def block(html: str) -> str:
    """HTML in which white space counts."""
    return _TEXT.format(html)


def facts(rows: Mapping[str, object]) -> str:
    """A table of two columns; rows whose value is ``None`` or empty are left out."""
    shown = [(name, value) for name, value in rows.items() if value is not None and value != ""]
    cells = "".join(f"<tr><th>{text(name)}</th><td>{text(value, 500)}</td></tr>" for name, value in shown)
    return f"<table>{cells}</table>"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already."""
    head = "".join(f"<th>{text(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def pieces(parts: Iterable[tuple[str, float | None]]) -> str:
    """Texts of tokens, each the redder the less likely it was; one without a logprob is grey."""
    return "".join(_piece(part, logprob) for part, logprob in parts)


def bar(value: float, most: float) -> str:
    """A bar as long as the value, where ``most`` has the full length."""
    width = round(200 * min(1.0, value / most)) if most > 0 else 0
    return f'<div style="width:{width}px;height:0.8em;background:#7aa6da"></div>'


def number(value: float | None, digits: int = 3) -> str:
    """In words; a dash for none."""
    return "-" if value is None else f"{value:.{digits}g}"


def _piece(part: str, logprob: float | None) -> str:
    if logprob is None:
        return f'<span style="opacity:0.6">{text(part, 200)}</span>'
    strength = 1.0 if math.isnan(logprob) else min(1.0, max(0.0, -logprob) / _UNLIKELY)
    colour = f"background:rgba(255,64,64,{0.7 * strength:.2f})"
    return f'<span style="{colour}" title="{logprob:.3f}">{text(part, 200)}</span>'


def _safe(value: str) -> str:
    """A lone surrogate, which a page cannot hold, becomes a question mark."""
    return escape(value.encode("utf-8", "replace").decode("utf-8"))
