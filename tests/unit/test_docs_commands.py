"""Every command on the documentation's pages can be typed: its files, sessions, extras and options exist."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import dropwhile, pairwise
from pathlib import Path

import pytest

import sglrollout as sr
from sglrollout import _serve_command
from sglrollout.cli import _parser
from sglrollout.engine.installed import server_arg_names
from tests.pages import DOCS, PAGES, ROOT, blocks, spans

OF_THE_READER = {"train.py", "dispatch.json", "doctor.json", "reward.png"}
"""Files that a page tells its reader to write, or that a command writes."""

FOREIGN = {"echo", ".", "for", "do", "done", "wait", "curl", "ssh"}
"""Commands that are taken as they are."""

OURS = ("nox", "pip", "pytest", "python", "python3", "sglrollout", "torchrun")
"""What a command of ours begins with."""

ELSEWHERE = {"--disable-retries"}
"""Options of SGLang's router."""

SCRIPTS_OF_SESSIONS = {"demo": "examples/quickstart.py", "chaos": "tests/chaos.py", "soak": "tests/soak.py"}


def sessions() -> set[str]:
    """Those of noxfile.py, with their parameters."""
    found = set()
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and any("session" in ast.unparse(item) for item in node.decorator_list):
            found.add(node.name)
            versions = re.findall(r"'(\d[\d.]+)'", "".join(ast.unparse(item) for item in node.decorator_list))
            found |= {f"{node.name}({version})" for version in versions}
    return found


def options_of(path: Path) -> set[str]:
    return {"--help", *re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text(encoding="utf-8"))}


def options_of_ours(parser: argparse.ArgumentParser) -> set[str]:
    """Of a command and its sub-commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(options_of_ours, action.choices.values()))
    return found


def scripts() -> list[Path]:
    return [path for folder in ("examples", "benchmarks", "tests") for path in (ROOT / folder).glob("*.py")]


def commands(text: str) -> Iterator[list[str]]:
    """The commands in a piece of shell, as words."""
    for line in text.splitlines():
        for part in re.split(r"&&|\|\||;|\|", line):
            plain = re.sub(r"\$\w+", "0", part.strip().removeprefix("$ ").removeprefix("do ")).removesuffix("&")
            words = shlex.split(plain, comments=True)
            command = list(dropwhile(re.compile(r"[A-Z_]+=").match, words))
            if command:
                yield command


def wrong(words: list[str]) -> list[str]:
    """What a command names and is not there."""
    if words[0] in FOREIGN:
        return []
    program, rest = Path(words[0]).name, words[1:]
    if program == "sglrollout":
        return wrong_of_ours(rest)
    if program == "nox":
        return wrong_session(rest)
    if program == "pip":
        return wrong_package(rest)
    if program == "pytest":
        return wrong_tests(rest)
    if program in ("python", "python3") and rest[:1] == ["-m"]:
        return [] if rest[1] in ("asyncio", "venv", "sglang.launch_server") else wrong(rest[1:])
    if program in ("python", "python3", "torchrun"):
        return wrong_script(rest)
    return [program]


def wrong_of_ours(arguments: list[str]) -> list[str]:
    command = [word for word in arguments if word != ">" and word not in OF_THE_READER]
    try:
        given = _parser().parse_args(command or ["--version"])
        if command[0] == "serve" and command[1:] and "--config" not in command:
            vars(given).pop("api_key_file", None)  # which would make it
            _serve_command.server_of(given)
    except (SystemExit, sr.ConfigError) as end:
        return [] if isinstance(end, SystemExit) and end.code == 0 else ["sglrollout " + " ".join(arguments)]
    return []


def wrong_session(arguments: list[str]) -> list[str]:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, given = arguments[:cut], arguments[cut + 1 :]
    assert own[:1] in ([], ["-s"])
    found = [name for name in own[1:] if name not in sessions()]
    session = own[1] if own else ""
    if session in SCRIPTS_OF_SESSIONS:
        found += wrong_script([SCRIPTS_OF_SESSIONS[session], *given])
    elif session in ("tests", "compat"):
        found += wrong_tests(given)
    elif given:
        found += [word for word in given if word not in ("--fix", "serve")]
    return found


def wrong_package(arguments: list[str]) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    found = [file for option, file in pairwise(arguments) if option == "-r" and missing(file)]
    named = [extra for word in arguments for extra in re.findall(r"^sglrollout\[(\w+)\]", word)]
    return found + [extra for extra in named if extra not in extras]


def wrong_tests(arguments: list[str]) -> list[str]:
    return [word for word in arguments if "/" in word and missing(word)]


def wrong_script(arguments: list[str]) -> list[str]:
    script = next((word for word in arguments if word.endswith(".py")), None)
    if script is None:
        return ["no script in " + " ".join(arguments)]
    if script in OF_THE_READER:
        return []
    if missing(script):
        return [script]
    given = [word for word in arguments[arguments.index(script) + 1 :] if word.startswith("-")]
    return [f"{script} {word}" for word in given if word not in options_of(ROOT / script)]


def missing(file: str) -> bool:
    return not (ROOT / file).exists()


def typed(path: Path) -> list[list[str]]:
    """The commands on a page: lines of ``sh`` blocks, those behind a ``$`` in ``console`` blocks, and in the text."""
    found = [words for language in ("sh", "bash") for block in blocks(path, language) for words in commands(block.text)]
    for block in blocks(path, "console"):
        prompted = [line for line in block.text.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
        found += commands("\n".join(prompted))
    inline = [span for span in spans(path) if span.partition(" ")[0] in OURS]
    return found + [words for span in inline for words in commands(span)]


TYPED = [path for path in PAGES if typed(path)]


@pytest.mark.parametrize("path", TYPED, ids=lambda path: path.name)
def test_commands_on_a_page_name_what_there_is(path: Path) -> None:
    assert [mistake for words in typed(path) for mistake in wrong(words)] == []


@pytest.mark.parametrize("path", [path for path in PAGES if path != DOCS / "migration.md"], ids=lambda path: path.name)
def test_options_in_the_text_of_a_page_exist_in_some_script(path: Path) -> None:
    known = {"--fix", "--json", *ELSEWHERE}.union(*map(options_of, scripts()), options_of_ours(_parser()))
    known |= {f"--{name.replace('_', '-')}" for name in server_arg_names()}
    given = {word for span in spans(path) if span.startswith("--") for word in span.split() if word.startswith("--")}
    assert given <= known


def test_the_check_of_commands_sees_each_kind_of_mistake() -> None:
    text = """
pip install "sglrollout[gpu]" && pip install -r requirements/tpu.txt
python3 -m nox -s demos     # not a session
nox -s chaos -- --minutes 5 --sed 1
nox -s "compat(0.1)"
nox -s tests -- tests/units -x
nox -s lint -- --mend
python examples/grpo.py --tiny || echo no
$ HF_HUB_OFFLINE=1 torchrun --nproc-per-node 2 examples/grpo_fsdp2.py --tiny --stepps 3
torchrun --nproc-per-node 8 train.py
sglrollout doctor --yaml
sglrollout serve org/name --tp_sise 2 &
for port in 1 2; do
  sglrollout serve org/name --nnodes 2 --port 3000$port &
done
sglrollouts doctor
"""
    assert [mistake for words in commands(text) for mistake in wrong(words)] == [
        "gpu",
        "requirements/tpu.txt",
        "demos",
        "tests/chaos.py --sed",
        "compat(0.1)",
        "tests/units",
        "--mend",
        "examples/grpo.py",
        "examples/grpo_fsdp2.py --stepps",
        "sglrollout doctor --yaml",
        "sglrollout serve org/name --tp_sise 2",
        "sglrollout serve org/name --nnodes 2 --port 30000",
        "sglrollouts",
    ]


def test_there_are_commands_to_check() -> None:
    assert {"README.md", "CONTRIBUTING.md", "quickstart.md", "reliability.md"} <= {path.name for path in TYPED}
