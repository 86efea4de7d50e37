"""Python's garbage collector in our processes: seldom while SGLang is imported, then as usual."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ["sglrollout.engine.host", "sglrollout.engine.server_main"]


def in_a_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_it_runs_seldom_during_imports_and_as_usual_once_they_are_over() -> None:
    code = (
        "import gc; from sglrollout.engine import collector\n"
        "usual = gc.get_threshold()\n"
        "collector.importing(); print(gc.isenabled(), gc.get_threshold()[0] >= 100 * usual[0], gc.get_freeze_count())\n"
        "collector.imported(); print(gc.isenabled(), gc.get_threshold() == usual, gc.get_freeze_count() > 1000)\n"
    )
    assert in_a_process(code).splitlines() == ["True True 0", "True True True"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("name", "is_seldom"), [("__mp_main__", True), ("imported", False)])
def test_it_runs_seldom_in_what_our_processes_spawn_and_is_left_alone_by_an_import(
    module: str, name: str, is_seldom: bool
) -> None:
    code = (
        f"import gc, runpy; usual = gc.get_threshold(); runpy.run_module({module!r}, run_name={name!r})\n"
        "print(gc.get_threshold() != usual)\n"
    )
    assert in_a_process(code) == str(is_seldom)
