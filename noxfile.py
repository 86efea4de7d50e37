"""Development commands: ``nox -s tests``, ``demo``, ``chaos``, ``soak``, ``compat``, ``lint``, ``types``, ``docs``.

All but the last three run real SGLang on the CPU, in one shared environment of 3 GB (``.nox/cpu``). It is
installed once, in 3 to 4 minutes, and brought up to date only when its requirements change.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nox
import nox.command
import nox.project

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
REQUIREMENTS = ROOT / "requirements"
ENVIRONMENTS = ROOT / ".nox"
LAST_FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST_TRIED_AGAIN = 3
CLOSURE_PYTHON = (3, 11)  # the version whose wheels requirements/cpu.txt was seen working with
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Run the tests, or those that arguments after ``--`` select; without a GPU, those that need one are skipped."""
    _pytest(session, _cpu_environment(session))


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """Run examples/quickstart.py with a real model on the CPU."""
    python = _cpu_environment(session)
    session.run(python, "examples/quickstart.py", *session.posargs, env=_environment())


@nox.session(python=False)
def chaos(session: nox.Session) -> None:
    """Break real engines under load for some minutes; ``nox -s chaos -- --minutes 10 --seed 7``."""
    session.run(_cpu_environment(session), "-m", "tests.chaos", *session.posargs, env=_environment())


@nox.session(python=False)
def soak(session: nox.Session) -> None:
    """Half an hour of load on real engines, in which nothing may grow; ``nox -s soak -- --minutes 60``."""
    session.run(_cpu_environment(session), "-m", "tests.soak", *session.posargs, env=_environment())


@nox.session(python=False)
@nox.parametrize("sglang", [nox.param(version, id=version) for version in ("0.5.17", "0.5.23")])
def compat(session: nox.Session, sglang: str) -> None:
    """Run the tests against the oldest and the newest supported SGLang, laid over the shared environment."""
    python = _cpu_environment(session)
    overlay = ENVIRONMENTS / f"sglang-{sglang}"
    if not _is_current(overlay, sglang):
        shutil.rmtree(overlay, ignore_errors=True)
        _pip(session, python, "install", "--no-deps", "--target", str(overlay), f"sglang=={sglang}")
        _mark_current(overlay, sglang)
    _pytest(session, python, PYTHONPATH=str(overlay))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting; ``nox -s lint -- --fix`` repairs what it can."""
    session.install("-r", "requirements/lint.txt")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly, in src and tests."""
    session.install("-r", "requirements/types.txt")
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; ``nox -s docs -- serve`` shows it while you edit."""
    session.install("-r", "requirements/docs.txt")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env={"NO_MKDOCS_2_WARNING": "1"})


def _pytest(session: nox.Session, python: str, **env: str) -> None:
    """Run the tests, and the few that failed once more, in a new process.

    Real engines share a machine here with what else is on it, and any process may stand still for seconds. A test that
    passes the second time is named as unsteady; one that fails twice has failed.
    """
    LAST_FAILED.unlink(missing_ok=True)
    environment = _environment(**env)
    try:
        session.run(python, "-m", "pytest", *session.posargs, env=environment)
    except nox.command.CommandFailed:
        failed = list(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
        if not 0 < len(failed) <= MOST_TRIED_AGAIN:
            raise
        session.log(f"Once more: {len(failed)} that failed.")
        session.run(python, "-m", "pytest", *failed, env=environment)
        session.warn(f"UNSTEADY, passed the second time only: {', '.join(failed)}")


def _environment(**extra: str) -> dict[str, str]:
    """Nothing is fetched from a model hub, and no other installation's modules slip in."""
    return {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1", **extra}


def _cpu_environment(session: nox.Session) -> str:
    """The Python of the shared environment, installed first if it is missing or its requirements changed."""
    home = ENVIRONMENTS / "cpu"
    python = str(home / "bin" / "python")
    base = _base_python(session)
    torch_index = os.environ.get("SGLROLLOUT_TORCH_INDEX", "")
    requirements = [REQUIREMENTS / "cpu.txt", REQUIREMENTS / "test.txt"]
    project = nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    stamp = _digest(*requirements, extra=json.dumps([str(ROOT), base, torch_index, project]))
    if _is_current(home, stamp):
        return python

    session.log("Installing SGLang for the CPU, 3 GB: about 4 minutes, only this time.")
    session.run(base, "-m", "venv", str(home))
    _install_torch(session, python, torch_index)
    for file in requirements:
        _pip(session, python, "install", "--no-deps", "-r", str(file))
    _pip(session, python, "install", "--no-deps", "-e", str(ROOT))
    try:
        session.run(python, "-c", "import torch", log=False)
    except nox.command.CommandFailed:
        session.error("torch does not import; name an index with its CPU build in SGLROLLOUT_TORCH_INDEX")
    _mark_current(home, stamp)
    return python


def _base_python(session: nox.Session) -> str:
    if sys.version_info[:2] == CLOSURE_PYTHON:
        return os.path.realpath(sys.executable)
    name = "python{}.{}".format(*CLOSURE_PYTHON)
    found = shutil.which(name)
    if found is None:
        session.error(f"requirements/cpu.txt is pinned for {name}, and there is none on PATH")
    return found


def _install_torch(session: nox.Session, python: str, index: str) -> None:
    """Install a CPU build of torch: a CUDA build does not import without the libraries that --no-deps leaves out."""
    pins = (REQUIREMENTS / "cpu.txt").read_text().splitlines()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    if not index and _is_cuda_build(session, python, torch):
        session.log(f"This machine's package index serves a CUDA build of {torch}; taking PyTorch's CPU index instead.")
        index = PYTORCH_CPU_INDEX
    _pip(session, python, "install", "--no-deps", *(["--index-url", index] if index else []), torch)


def _is_cuda_build(session: nox.Session, python: str, torch: str) -> bool:
    """Ask pip which build it would install; this downloads the build's metadata only."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        _pip(session, python, "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report), torch)
        (build,) = json.loads(report.read_text())["install"]
    return any(needed.startswith(("nvidia-", "cuda-")) for needed in build["metadata"].get("requires_dist", []))


def _pip(session: nox.Session, python: str, *arguments: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    session.run(python, "-m", "pip", "--disable-pip-version-check", *arguments, *quiet)


def _digest(*files: Path, extra: str = "") -> str:
    content = b"\0".join([file.read_bytes() for file in files] + [extra.encode()])
    return hashlib.sha256(content).hexdigest()


def _is_current(folder: Path, stamp: str) -> bool:
    marker = folder / "sglrollout.stamp"
    return marker.is_file() and marker.read_text() == stamp


def _mark_current(folder: Path, stamp: str) -> None:
    (folder / "sglrollout.stamp").write_text(stamp)
