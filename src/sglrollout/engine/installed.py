"""What the installed SGLang is, read without importing it (an import costs seconds and initializes a lot)."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import warnings
from pathlib import Path
from typing import Literal

from sglrollout.errors import UnsupportedVersionError

SUPPORTED_VERSIONS = ("0.5.17", "0.5.19", "0.5.21", "0.5.23")
"""SGLang versions this library was run with. Others between the first and the last are tried, with a warning."""


def sglang_version() -> str:
    """The installed SGLang's version.

    Raises:
        UnsupportedVersionError: none is installed, or one outside the supported range.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedVersionError(
            'SGLang is not installed; install it with pip install "sglrollout[sglang]" '
            "(CPU: see the README, requirements/cpu.txt)"
        ) from None
    _check(found)
    return found


@functools.cache
def _check(found: str) -> None:
    kind = support(found)
    if kind == "none":
        first, last = SUPPORTED_VERSIONS[0], SUPPORTED_VERSIONS[-1]
        raise UnsupportedVersionError(f"SGLang {found} is installed; this library supports {first} to {last}")
    if kind == "untested":
        warnings.warn(f"SGLang {found} was not run with this library (these were: {SUPPORTED_VERSIONS})", stacklevel=3)


def support(version: str) -> Literal["tested", "untested", "none"]:
    """What this library promises of a version of SGLang."""
    if version in SUPPORTED_VERSIONS:
        return "tested"
    first, last = SUPPORTED_VERSIONS[0], SUPPORTED_VERSIONS[-1]
    return "untested" if _numbers(first) <= _numbers(version) <= _numbers(last) else "none"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


@functools.cache
def server_arg_names() -> frozenset[str]:
    """Names that the installed SGLang's ``ServerArgs`` takes; empty where its source cannot be read.

    Up to 0.5.19 they are fields of one dataclass; later, of namespaces in ``arg_groups/fields``.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return frozenset()
    srt = Path(spec.origin).parent / "srt"
    names = set(_class_fields(srt / "server_args.py", "ServerArgs"))
    for namespace in sorted((srt / "arg_groups" / "fields").glob("*.py")):
        names |= _class_fields(namespace, None)
    return frozenset(name for name in names if not name.startswith("_"))


def _class_fields(source: Path, class_name: str | None) -> set[str]:
    """Annotated names in the body of that class, or of every class."""
    if not source.is_file():
        return set()
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    return {
        statement.target.id
        for node in classes
        if class_name in (None, node.name)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
