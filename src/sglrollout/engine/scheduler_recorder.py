"""Inside SGLang's scheduler: finds out where the model's ``load_weights`` would put each weight, without loading any.

``load_weights`` is called with tensors that have a shape and no memory (torch's meta device), under a dispatch mode
that notes every copy instead of making it. What is noted is the whole plan of a sync: which box of which weight goes
to which part of which parameter of this TP rank. It also tells, before a byte moves, which names the model does not
know, which parameters would stay unwritten, and which shapes do not fit.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglrollout.boxes import Box, box_of_view
from sglrollout.wire.messages import WeightSpec

_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_FILLS = {"fill_", "zero_"}


class Copy(NamedTuple):
    """``box`` of weight ``entry`` goes to ``target``, a view of a parameter, of the box's shape."""

    entry: int
    box: Box
    target: torch.Tensor


class Fill(NamedTuple):
    """``target``, a view of a parameter, is set to ``value``: the padding of a vocabulary, for instance."""

    target: torch.Tensor
    value: float


class Recording(NamedTuple):
    """What ``load_weights`` would do, and what is wrong with it.

    ``unsuited`` says why the copies are not all there is to a load of this model; empty when they are.
    """

    copies: list[Copy]
    fills: list[Fill]
    unexpected: list[str]
    missing: list[str]
    duplicates: list[str]
    mismatched: list[str]
    unsuited: str


def record(model: Any, weights: list[WeightSpec], allow_missing: list[str]) -> Recording:
    """Dry-run ``model.load_weights``. The model is left as it was."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.data for name, parameter in parameters.items()}
    noted = _noted(model, weights, parameters)
    mismatched: list[str] = []
    if noted.error is not None:
        mismatched = _blame(model, weights, parameters)
        if not mismatched:
            noted.unsuited = noted.unsuited or f"its load_weights fails without data: {noted.error}"
    unsuited = noted.unsuited or _unsuited(model)
    if len({_storage(data) for data in before.values()}) < len(before):
        unsuited = unsuited or "parameters of it share memory"
    for name, data in before.items():
        if parameters[name].data.data_ptr() != data.data_ptr():
            parameters[name].data = data
            unsuited = unsuited or f"its load_weights replaces the memory of {name}"
    landed = {copy.entry for copy in noted.copies}
    unexpected = [weight.name for i, weight in enumerate(weights) if i not in landed and not weight.optional]
    missing: list[str] = []
    duplicates: list[str] = []
    if not noted.error and not unsuited:
        missing, duplicates, unsuited = _coverage(parameters, noted, weights)
    missing = [name for name in missing if not any(fnmatch(name, pattern) for pattern in allow_missing)]
    unknown = [] if noted.error else unexpected
    return Recording(noted.copies, noted.fills, unknown, missing, duplicates, mismatched, unsuited)


class _Noting(TorchDispatchMode):  # type: ignore[misc]
    """Notes copies from the weights and fills of parameters, and makes neither."""

    def __init__(self, sources: dict[int, int], shapes: list[tuple[int, ...]], own: set[int]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.unsuited = ""
        self.error: Exception | None = None
        self._sources, self._shapes, self._own = sources, shapes, own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            self._note_copy(args[0], args[1])
            return args[0]
        if name in _FILLS and _storage(args[0]) in self._own:
            if args[0].numel():
                self.fills.append(Fill(args[0], 0.0 if name == "zero_" else float(args[1])))
            return args[0]
        if func._schema.is_mutable and any(
            isinstance(arg, torch.Tensor) and _storage(arg) in self._own for arg in args
        ):
            self.unsuited = self.unsuited or f"its load_weights computes on parameters ({func._schema.name})"
            return args[0]
        return func(*args, **(kwargs or {}))

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        entry = self._sources.get(_storage(source))
        if entry is None or _storage(target) not in self._own:
            self.unsuited = self.unsuited or "its load_weights computes new tensors from the weights"
            return
        if not target.numel():
            return
        box = box_of_view(self._shapes[entry], source.storage_offset(), source.shape, source.stride())
        if box is None or source.shape != target.shape:
            self.unsuited = self.unsuited or "its load_weights reshapes the weights"
            return
        self.copies.append(Copy(entry, box, target))


def _noted(model: Any, weights: list[WeightSpec], parameters: dict[str, Any]) -> _Noting:
    sources: dict[int, int] = {}
    named: list[tuple[str, torch.Tensor]] = []
    for i, weight in enumerate(weights):
        probe = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype), device="meta")
        sources[_storage(probe)] = i
        named += [(name, probe) for name in (weight.name, *weight.aliases)]
    own = {_storage(parameter.data) for parameter in parameters.values()}
    noting = _Noting(sources, [tuple(weight.shape) for weight in weights], own)
    with _quietly(noting), noting:
        model.load_weights(iter(named))
    return noting


@contextmanager
def _quietly(noting: _Noting) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        noting.error = type(error)(f"{error} ({where.name}, line {where.lineno} of {where.filename})".strip())


def _blame(model: Any, weights: list[WeightSpec], parameters: dict[str, Any]) -> list[str]:
    """The weights that fail by themselves, with why."""
    found = []
    for weight in weights:
        noting = _noted(model, [weight], parameters)
        if noting.error is not None and "meta tensor" not in str(noting.error):
            found.append(f"{weight.name} {list(weight.shape)} ({noting.error})")
    return found


def _unsuited(model: Any) -> str:
    """Why copying into the parameters would not be all that this model needs."""
    if hasattr(model, "post_load_weights"):
        return "it derives other tensors from its weights after loading (post_load_weights)"
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN_METHODS:
            return f"{name} rewrites its weights after loading ({type(method).__name__})"
        if getattr(module, "use_intel_amx_backend", False):
            return f"{name} repacks its weights for AMX"
    return ""


def _coverage(
    parameters: dict[str, Any], noted: _Noting, weights: list[WeightSpec]
) -> tuple[list[str], list[str], str]:
    """Parameters that are not wholly written, those written twice, and why that cannot be told."""
    by_storage = {_storage(parameter.data): name for name, parameter in parameters.items()}
    written: dict[str, list[tuple[Box, int]]] = {name: [] for name in parameters}
    targets = [(copy.target, copy.entry) for copy in noted.copies] + [(fill.target, -1) for fill in noted.fills]
    for target, entry in targets:
        name = by_storage[_storage(target)]
        data = parameters[name].data
        offset = target.storage_offset() - data.storage_offset()
        box = box_of_view(data.shape, offset, target.shape, target.stride()) if data.is_contiguous() else None
        if box is None:
            return [], [], f"its load_weights writes {name} in another layout"
        if entry < 0 or all((box, entry) != seen for seen in written[name]):  # an alias lands where its weight did
            written[name].append((box, entry))
    missing, duplicates = [], []
    for name, boxes in written.items():
        num_written = sum(box.numel for box, _ in boxes)
        twice = _overlap(boxes)
        if twice is not None:
            one, other = (weights[entry].name if entry >= 0 else "a constant" for entry in twice)
            duplicates.append(f"{name} (from {one} and {other})")
        elif num_written < parameters[name].numel():
            missing.append(name)
    return missing, duplicates, ""


def _overlap(boxes: list[tuple[Box, int]]) -> tuple[int, int] | None:
    for i, (box, entry) in enumerate(boxes):
        for other, other_entry in boxes[:i]:
            if box.intersect(other) is not None:
                return other_entry, entry
    return None


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
