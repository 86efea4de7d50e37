"""The command ``sglrollout``, and its sub-commands.

May import doctor, engine, config and errors.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from sglrollout._serve_command import add_serve
from sglrollout.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code.

    Args:
        arguments: by default those of the process.
    """
    given = _parser().parse_args(arguments)
    code: int = given.run(given)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglrollout", description="In-process SGLang rollouts for RL.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "print versions, devices, what is supported here, and what is wrong, with the fix"
    epilog = "The exit code is 0 where engines can run, and 1 where something stops them."
    doctor = commands.add_parser("doctor", help=about, description=f"{about.capitalize()}.", epilog=epilog)
    doctor.add_argument("--json", action="store_true", help="print JSON, for a program")
    doctor.set_defaults(run=_doctor)
    add_serve(commands)
    return parser


def _doctor(given: argparse.Namespace) -> int:
    from rich.console import Console

    from sglrollout.doctor import report
    from sglrollout.doctor.examination import examine
    from sglrollout.doctor.gathering import gather

    logging.getLogger("sglrollout").addHandler(logging.NullHandler())  # what it would warn of is among the findings
    facts = gather()
    examination = examine(facts)
    if given.json:
        sys.stdout.write(report.as_json(examination, facts) + "\n")
    else:
        report.show(examination, Console())
    return 0 if examination.can_run else 1
