"""The documentation's pages, and the code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


class Block(NamedTuple):
    """A fenced block of a page. ``line`` is that of its fence."""

    page: str
    line: int
    language: str
    text: str


def blocks(path: Path, language: str | None = None) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if language in (None, match[1]):
            yield Block(path.name, text.count("\n", 0, match.start()) + 1, match[1], match[2])


def spans(path: Path) -> set[str]:
    """What stands between single backticks, outside of blocks."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)}
