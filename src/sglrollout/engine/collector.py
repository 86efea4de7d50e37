"""Python's garbage collector in processes that are ours, while they import SGLang.  Imports nothing of ours.

An import of SGLang makes two million objects, all of which stay. The collector would walk those there are so far again
and again, which takes longer than all the rest of the import.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_SELDOM = (100_000, 50, 100)
"""Not off: SGLang starts processes whose entry is its own, and which nobody tells that the imports are over."""


def importing() -> None:
    """Let it run seldom, from the beginning of a process."""
    gc.set_threshold(*_SELDOM)


def imported() -> None:
    """Let it run as usual, and never walk again what there is now."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
