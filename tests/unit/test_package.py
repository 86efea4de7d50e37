from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sglrollout as sr
from sglrollout import errors

SOURCE = Path(sr.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# ------------------------------------------------------------ the public names


def test_all_is_sorted_and_complete() -> None:
    public = {name for name, value in vars(sr).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert set(sr.__all__) == public | {"__version__", "filters"}  # a module to look things up in
    assert sr.__all__ == sorted(sr.__all__)


def test_every_public_class_says_what_it_is() -> None:
    classes = [value for name in sr.__all__ if inspect.isclass(value := getattr(sr, name))]
    assert len(classes) > 15
    assert [value.__name__ for value in classes if not (value.__doc__ or "").strip()] == []


def test_every_public_method_says_what_it_does() -> None:
    for kind in (sr.AsyncRolloutEngine, sr.RolloutEngine, sr.Stream, sr.GroupStream):
        members = [(name, value) for name, value in vars(kind).items() if not name.startswith("_")]
        for name, value in members:
            if inspect.isfunction(value) or isinstance(value, (property, classmethod)):
                assert inspect.getdoc(value), f"{kind.__name__}.{name}"


def test_the_blocking_rollout_has_every_method_of_the_async_one() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(sr.RolloutEngine) == public(sr.AsyncRolloutEngine)


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").is_file()


# ------------------------------------------------------------ errors

ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RolloutError)]

SAMPLES: dict[type[errors.RolloutError], errors.RolloutError] = {
    errors.ConfigError: errors.ConfigError("sampling.top_p", 2, "must be at most 1"),
    errors.EngineError: errors.EngineError("engine-3", "something"),
    errors.EngineConnectionError: errors.EngineConnectionError("remote-0", "HTTP 502"),
    errors.EngineRequestError: errors.EngineRequestError("engine-3", "refused"),
    errors.EngineStartError: errors.EngineStartError("engine-3", "no such model", "last\nlines"),
    errors.WeightSyncError: errors.WeightSyncError("transfer", "it broke", 3, "engine-1"),
    errors.WeightNamesError: errors.WeightNamesError(["a"], ["b"], ["c"], ["d [3]"]),
    errors.WeightMismatchError: errors.WeightMismatchError(["a (engine-0, TP rank 1)"]),
    errors.DeviceMemoryError: errors.DeviceMemoryError("engine-0", {"kv_cache": 1 << 34}, 1 << 30, 1 << 37),
    errors.HostMemoryError: errors.HostMemoryError("engine-0", 1 << 34, 1 << 30),
    errors.FailureBudgetError: errors.FailureBudgetError(3, 8, {"EngineRequestError: refused": 3}),
    errors.EngineDiedError: errors.EngineDiedError("engine-3", "out of memory", "last\nlines"),
}


def described_tree() -> dict[str, tuple[str | None, str]]:
    """Of the docstring's tree: each name, with its parent's and with its line."""
    found: dict[str, tuple[str | None, str]] = {}
    path: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│├└─ ]*)([A-Z]\w+Error)\b", line)
        if match:
            depth = len(match[1])
            while path and path[-1][0] >= depth:
                path.pop()
            found[match[2]] = (path[-1][1] if path else None, line)
            path.append((depth, match[2]))
    return found


def test_the_tree_at_the_top_of_errors_is_the_truth() -> None:
    tree = described_tree()
    assert set(tree) == {kind.__name__ for kind in ERRORS}
    for kind in ERRORS:
        parent, line = tree[kind.__name__]
        expected, *others = kind.__bases__
        assert parent == (None if kind is errors.RolloutError else expected.__name__)
        assert [other.__name__ for other in others] == re.findall(r"also a (\w+)", line)


def test_every_error_is_public() -> None:
    assert {kind.__name__ for kind in ERRORS} <= set(sr.__all__)


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_pickling_with_its_attributes(kind: type[errors.RolloutError]) -> None:
    error = SAMPLES.get(kind) or kind("a message")
    assert type(error) is kind
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert (type(copy), copy.args, str(copy), vars(copy)) == (kind, error.args, str(error), vars(error))


def test_an_error_with_attributes_of_its_own_is_among_the_samples() -> None:
    with_own = {kind for kind in ERRORS if inspect.isfunction(kind.__init__)}
    assert with_own == set(SAMPLES)


def test_an_error_names_what_it_is_about() -> None:
    assert str(SAMPLES[errors.ConfigError]) == "sampling.top_p must be at most 1, got 2"
    assert str(SAMPLES[errors.EngineRequestError]) == "engine-3: refused"
    assert "last\nlines" in str(SAMPLES[errors.EngineDiedError])
    assert len(str(errors.ConfigError("prompt", "x" * 10_000, "is long"))) < 300


# ------------------------------------------------------------ imports


@pytest.mark.parametrize("module", ["sglrollout", "sglrollout.testing"])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    heavy = [
        "torch",
        "transformers",
        "sglang",
        "tokenizers",
        "numpy",
        "zmq",
        "triton",
        "sgl_kernel",
        "datasets",
        "openai",
    ]
    heavy += ["starlette", "uvicorn"]
    code = f"import sys, {module}; sys.stdout.write(' '.join(sorted(set({heavy}) & set(sys.modules))))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout == ""


HELPERS = {
    "boxes",
    "checksum",
    "concurrency",
    "notebook",
    "threads",
    "version",
}  # which import nothing of ours, and which all may import
PARTS = {
    **{"_address": "config", "_engine_args": "config", "_files": "config", "_options": "config"},
    "_serve_command": "cli",
}
FACADE = {"rollout", "blocking", "__init__"}
WORDS = {"the CPU support": "engine"}


def room_of(path: Path) -> str:
    top = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return PARTS.get(top, top)


def imports_of(path: Path) -> Iterator[str]:
    """Rooms that a file imports from, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [
                f"{node.module}.{alias.name}" if node.module == "sglrollout" else str(node.module)
                for alias in node.names
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            first, _, rest = name.partition(".")
            if first == "sglrollout":
                top = rest.split(".")[0]
                yield PARTS.get(top, top if (SOURCE / top).exists() or (SOURCE / f"{top}.py").exists() else "__init__")


def allowed() -> dict[str, set[str]]:
    """What each room's docstring says that it may import."""
    rooms: dict[str, set[str]] = {}
    for path in [*SOURCE.glob("*.py"), *SOURCE.glob("*/__init__.py")]:
        room = path.parent.name if path.name == "__init__.py" and path.parent != SOURCE else path.stem
        if room in PARTS or room in FACADE or room in HELPERS:
            continue
        text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        match = re.search(r"(?:May import|Imports) (.+?)(?: and nothing else of ours)?[.;]", text)
        if match:
            terms = re.split(r", | and ", match[1])
            rooms[room] = {WORDS.get(term, term) for term in terms}
    return rooms


def test_every_room_says_what_it_may_import() -> None:
    rooms = {room_of(path) for path in MODULES} - FACADE - HELPERS - {"errors"}
    assert rooms == set(allowed())


def test_what_rooms_may_import_goes_one_way() -> None:
    order = list(TopologicalSorter(allowed()).static_order())  # raises CycleError
    for lower, higher in [("errors", "types"), ("wire", "engine"), ("engine", "pool"), ("pool", "generation")]:
        assert order.index(lower) < order.index(higher)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    room = room_of(path)
    found = set(imports_of(path)) - {room}
    if room in HELPERS or room == "errors":
        assert found == set()
    elif room == "rollout":
        assert not found & {"blocking", "__init__"}
    elif room not in FACADE:
        assert found <= allowed()[room] | HELPERS


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_printed(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
