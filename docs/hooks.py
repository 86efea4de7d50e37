"""Hooks of the documentation's build: docstrings are written for Sphinx's roles, and read without them here."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(?:[^<]*&lt;)?~?([^<&]+)(?:&gt;)?</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Take the roles out of a page: ``:meth:`x` `` is ``x`` in another face."""
    return _ROLE.sub(r"<code>\1</code>", html)
