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
from torch.utils._pytree import tree_leaves

from sglrollout.boxes import Box, box_of_view
from sglrollout.wire.messages import WeightSpec

_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_FILLS = {"fill_", "zero_"}
_NO_DATA = ("meta tensor", "Meta tensor", "meta device", "incompatible tensor type")


class Copy(NamedTuple):
    """``box`` of weight ``entry`` goes to ``target``, a view of a parameter, of the box's shape."""

    entry: int
    box: Box
    target: torch.Tensor


class Fill(NamedTuple):
    """``target``, a view of a parameter, is set to ``value``: the padding of a vocabulary, for instance.

    ``num_before`` counts the copies that came before it.
    """

    target: torch.Tensor
    value: float
    num_before: int = 0


class Recording(NamedTuple):
    """What ``load_weights`` would do, and what is wrong with it.

    ``unwritten`` are the parameters that are missing and may be. ``unsuited`` says why the copies are not all there is
    to a load of this model; empty when they are.
    """

    copies: list[Copy]
    fills: list[Fill]
    unexpected: list[str]
    missing: list[str]
    unwritten: list[str]
    duplicates: list[str]
    mismatched: list[str]
    unsuited: str


def record(model: Any, weights: list[WeightSpec], allow_missing: list[str]) -> Recording:
    """Dry-run ``model.load_weights``. The model is left as it was.

    Of one that keeps its weights in another form than it loads them in, only names that it does not know are told.
    """
    rewrites = _unsuited(model)
    parameters = dict(model.named_parameters())
    with _kept(model) as kept:
        noted = _noted(model, weights, parameters)
        mismatched: list[str] = []
        if noted.error and not rewrites:
            mismatched = _blame(model, weights, parameters)
            if not mismatched:
                noted.unsuited = noted.unsuited or f"its load_weights does not run without data: {noted.error}"
    unsuited = rewrites or noted.unsuited or kept.changed
    if len({_storage(parameter.data) for parameter in parameters.values()}) < len(parameters):
        unsuited = unsuited or "parameters of it share memory"
    unexpected, missing, duplicates = [], list[str](), list[str]()
    if not noted.error:
        unexpected = [w.name for i, w in enumerate(weights) if i not in noted.used and not w.optional]
        if not unsuited:
            missing, duplicates, unsuited = _coverage(parameters, noted, weights)
    unwritten = [name for name in missing if any(fnmatch(name, pattern) for pattern in allow_missing)]
    missing = [name for name in missing if name not in unwritten]
    return Recording(noted.copies, noted.fills, unexpected, missing, unwritten, duplicates, mismatched, unsuited)


class _Noting(TorchDispatchMode):  # type: ignore[misc]
    """Notes copies from the weights and fills of parameters, and makes neither.

    Attributes:
        used: the weights that the loader copied from or computed with.
        error: how the loader failed; empty when it did not.
    """

    def __init__(self, sources: dict[int, int], shapes: list[tuple[int, ...]], own: set[int]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.used: set[int] = set()
        self.unsuited = self.error = ""
        self._sources, self._shapes, self._own = sources, shapes, own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            self._note_copy(args[0], args[1])
            return args[0]
        if name in _FILLS and _storage(args[0]) in self._own:
            if args[0].numel():
                self.fills.append(Fill(args[0], 0.0 if name == "zero_" else float(args[1]), len(self.copies)))
            return args[0]
        if func._schema.is_mutable and any(_storage(tensor) in self._own for tensor in tensors):
            raise _NotRecordableError(f"it computes on parameters ({func._schema.name})")
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.used |= {self._sources[_storage(t)] for t in tensors if _storage(t) in self._sources}
        return out

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        entry = self._sources.get(_storage(source))
        if entry is None or _storage(target) not in self._own:
            self.unsuited = self.unsuited or "its load_weights computes new tensors from the weights"
            return
        self.used.add(entry)
        if not target.numel():
            return
        box = box_of_view(self._shapes[entry], source.storage_offset(), source.shape, source.stride())
        if box is None or source.shape != target.shape:
            self.unsuited = self.unsuited or "its load_weights reshapes the weights"
            return
        self.copies.append(Copy(entry, box, target))


class _NotRecordableError(Exception):
    """The loader does what can only be done with data."""


class _Kept:
    """A model's parameters as they were, and what a dry run did to them (empty: nothing)."""

    def __init__(self, model: Any) -> None:
        self._owners = [
            (module, name, parameter, parameter.data)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.changed = ""

    def restore(self) -> None:
        for module, name, parameter, data in self._owners:
            if module._parameters.get(name) is not parameter:
                module._parameters[name] = parameter
                self.changed = self.changed or f"its load_weights replaces the parameter {name}"
            if _place(parameter.data) != _place(data):
                parameter.data = data
                self.changed = self.changed or f"its load_weights replaces the memory of {name}"


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()


@contextmanager
def _kept(model: Any) -> Iterator[_Kept]:
    kept = _Kept(model)
    try:
        yield kept
    finally:
        kept.restore()


def _noted(model: Any, weights: list[WeightSpec], parameters: dict[str, Any]) -> _Noting:
    sources: dict[int, int] = {}
    named: list[tuple[str, torch.Tensor]] = []
    for i, weight in enumerate(weights):
        probe = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype), device="meta")
        sources[_storage(probe)] = i
        named += [(name, probe) for name in (weight.name, *weight.aliases)]
    own = {_storage(tensor) for tensor in [*(p.data for p in parameters.values()), *model.buffers()]}
    noting = _Noting(sources, [tuple(weight.shape) for weight in weights], own)
    try:
        with noting:
            model.load_weights(iter(named))
    except _NotRecordableError as error:
        noting.unsuited, noting.error = str(error), str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        noting.error = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno} of {where.filename})"
    return noting


def _blame(model: Any, weights: list[WeightSpec], parameters: dict[str, Any]) -> list[str]:
    """The weights that fail by themselves, with why; but not for having no data."""
    found = []
    for weight in weights:
        noting = _noted(model, [weight], parameters)
        without_data = noting.unsuited or any(words in noting.error for words in _NO_DATA)
        if noting.error and not without_data:
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
    filled: dict[str, list[Box]] = {name: [] for name in parameters}
    for target, entry in [(c.target, c.entry) for c in noted.copies] + [(f.target, -1) for f in noted.fills]:
        name = by_storage.get(_storage(target))
        if name is None:
            return [], [], "its load_weights writes buffers"
        box = _box_in(parameters[name].data, target)
        if box is None:
            return [], [], f"its load_weights writes {name} in another layout"
        if entry < 0:
            filled[name].append(box)
        elif (box, entry) not in written[name]:  # an alias lands where its weight did
            written[name].append((box, entry))
    if any(fill.num_before and _is_overwritten(fill, noted.copies) for fill in noted.fills):
        return [], [], "its load_weights fills what it has loaded"
    missing, duplicates = [], []
    for name, boxes in written.items():
        twice = _overlap(boxes)
        if twice is not None:
            duplicates.append(f"{name} (from {weights[twice[0]].name} and {weights[twice[1]].name})")
            continue
        alone = [fill for fill in filled[name] if not any(fill.intersect(box) for box, _ in boxes)]
        if sum(box.numel for box in [*alone, *(box for box, _ in boxes)]) < parameters[name].numel():
            missing.append(name)
    return missing, duplicates, ""


def _box_in(data: torch.Tensor, view: torch.Tensor) -> Box | None:
    if not data.is_contiguous():
        return None
    return box_of_view(data.shape, view.storage_offset() - data.storage_offset(), view.shape, view.stride())


def _is_overwritten(fill: Fill, copies: list[Copy]) -> bool:
    """Whether a fill came over what a copy before it wrote."""
    begin = fill.target.data_ptr()
    end = begin + fill.target.nbytes
    return any(
        copy.target.data_ptr() < end and begin < copy.target.data_ptr() + copy.target.nbytes
        for copy in copies[: fill.num_before]
    )


def _overlap(boxes: list[tuple[Box, int]]) -> tuple[int, int] | None:
    for i, (box, entry) in enumerate(boxes):
        for other, other_entry in boxes[:i]:
            if box.intersect(other) is not None:
                return other_entry, entry
    return None


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
