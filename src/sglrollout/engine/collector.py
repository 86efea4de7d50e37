"""Python's garbage collector in processes that are ours, while they import SGLang.  Imports nothing of ours.

What an import of SGLang makes stays. The collector would walk all that there is so far again and again, which is a
quarter of the time that the import takes, and more on a busy machine.
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
