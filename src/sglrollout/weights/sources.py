"""Where weights come from: a module, an FSDP2 module, or any tensors under their checkpoint names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeAlias

from sglrollout.boxes import Box
from sglrollout.errors import ConfigError
from sglrollout.wire.messages import WeightSpec

Rename: TypeAlias = Callable[[str], str | None]
"""A parameter's name in the module -> its name in the checkpoint, or ``None`` to leave it out."""

Transform: TypeAlias = Callable[[str, Any], Iterable[tuple[str, Any]]]
"""A checkpoint name and the whole tensor -> what to send in its place, as (name, tensor) pairs."""

NamedTensors: TypeAlias = Iterable[tuple[str, Any]]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Weight:
    """One weight as this rank has it.

    Attributes:
        spec: its name, whole shape and dtype; the same on every rank.
        ranks: the global ranks that together hold it once, in the order of their process group; empty when this rank
            holds all of it.
        box: what this rank holds.
        group: the process group of ``ranks``.
    """

    spec: WeightSpec
    box: Box
    ranks: tuple[int, ...] = ()
    group: Any = field(default=None, compare=False)


@dataclass
class _Slot:
    """Where in a module a tensor is found, and what it was when planned for. FSDP exchanges the tensor itself."""

    module: Any
    attribute: str
    name: str
    optional: bool
    shape: Any
    dtype: Any
    aliases: list[str] = field(default_factory=list)

    @property
    def tensor(self) -> Any:
        return getattr(self.module, self.attribute)

    def has_changed(self) -> bool:
        tensor = self.tensor
        return tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype


class WeightSource(Protocol):
    """What the syncer needs of a trainer's weights. Every rank has one, with the same weights in the same order."""

    persistent: bool
    """Whether a weight stays at its address from sync to sync, so that an engine may map it."""

    def weights(self) -> list[Weight]:
        """All of them, for a plan."""

    def changed(self) -> bool:
        """Whether names, shapes or dtypes are others than :meth:`weights` said. Asked before every sync."""

    def read(self) -> Callable[[int], Any]:
        """For one sync: gives this rank's part of a weight by its index, as a plain tensor on any device.

        Indices come in ascending order, each maybe several times in a row.
        """


class ModuleSource:
    """The parameters and persistent buffers of a plain module, all whole on this rank.

    Tied parameters are found by their memory and sent once; non-persistent buffers are left out. A buffer that an
    engine does not know is no error.

    Args:
        module: for example a transformers model. Parameters on a GPU that an engine shares are mapped by it as they
            are: no copy of them is made.
        rename: from the module's names to those of the checkpoint; ``None`` leaves a parameter out.
        transform: replaces a tensor by others; it is given whole tensors, one at a time.
    """

    def __init__(self, module: Any, *, rename: Rename | None = None, transform: Transform | None = None) -> None:
        self._module, self._rename, self._transform = module, rename, transform
        self._names: list[tuple[str, int]] = []
        self._slots: list[_Slot] = []
        self._ties: list[tuple[_Slot, _Slot]] = []
        self._sent: list[list[str]] = []
        """With a transform: the names that came of each slot."""
        self.persistent = transform is None
        self._refuse_what_this_does_not_take()

    def _refuse_what_this_does_not_take(self) -> None:
        from torch.distributed.tensor import DTensor

        sharded = [name for name, parameter in self._module.named_parameters() if isinstance(parameter, DTensor)]
        if sharded:
            raise ConfigError("module", sharded[0], "has DTensor parameters: use FSDPSource")

    def weights(self) -> list[Weight]:
        self._names = self._all_names()
        self._slots = self._find()
        if self._transform is not None:
            self._sent = []
            return [_whole(name, tensor) for name, tensor in self._transformed()]
        return [self._weight(slot, slot.tensor) for slot in self._slots]

    def changed(self) -> bool:
        self._make_readable()
        if self._names != self._all_names():
            return True
        if any(slot.has_changed() for slot in self._slots):
            return True
        return any(self._identity(one.tensor) != self._identity(other.tensor) for one, other in self._ties)

    def read(self) -> Callable[[int], Any]:
        self._make_readable()
        if self._transform is not None:
            return _in_order(self._transformed(self._sent), [name for names in self._sent for name in names])
        slots = self._slots
        return lambda i: self._local(slots[i].tensor)

    def _all_names(self) -> list[tuple[str, int]]:
        """Every name, with the place of the first one of the same parameter."""
        first: dict[int, int] = {}
        module = self._module
        named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        return [(name, first.setdefault(id(parameter), i)) for i, (name, parameter) in enumerate(named)]

    def _find(self) -> list[_Slot]:
        """Where each tensor is found, those that share memory once."""
        self._make_readable()
        self._ties = []
        found: dict[object, _Slot] = {}
        for path, module in self._module.named_modules(remove_duplicate=False):
            buffers = module._buffers.keys() - module._non_persistent_buffers_set
            for attribute in [*module._parameters, *sorted(buffers)]:
                tensor = getattr(module, attribute)
                if tensor is None:
                    continue
                name = _unwrapped_name(f"{path}.{attribute}" if path else attribute)
                renamed = self._rename(name) if self._rename is not None else name
                if renamed is None:
                    continue
                slot = _Slot(module, attribute, renamed, attribute in buffers, tensor.shape, tensor.dtype)
                known = found.setdefault(self._identity(tensor), slot)
                if known is not slot and renamed not in (known.name, *known.aliases):
                    known.aliases.append(renamed)
                    self._ties.append((known, slot))
        return list(found.values())

    def _make_readable(self) -> None:
        """Nothing: parameters of a plain module always are."""

    def _identity(self, tensor: Any) -> object:
        """The same for tensors that share their memory."""
        local = self._local(tensor)
        if not local.numel():
            return id(tensor)
        return (local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), local.dtype)

    def _local(self, tensor: Any) -> Any:
        return tensor.detach()

    def _weight(self, slot: _Slot, tensor: Any) -> Weight:
        return _whole(slot.name, tensor, slot.aliases, slot.optional)

    def _transformed(self, planned: Sequence[Sequence[str]] | None = None) -> NamedTensors:
        """What the hook makes of each whole tensor.

        Args:
            planned: the names that came of each. With them, a hook that fails does not end this: other ranks are in the
                gathers to come. The error comes in the place of each tensor.
        """
        assert self._transform is not None
        for i, slot in enumerate(self._slots):
            whole = self._full(slot.tensor)
            try:
                pairs = list(self._transform(slot.name, whole))
            except Exception as error:
                if planned is None:
                    raise
                pairs = [(name, error) for name in planned[i]]
            if planned is None:
                self._sent.append([name for name, _ in pairs])
            yield from pairs

    def _full(self, tensor: Any) -> Any:
        return tensor.detach()


class FSDPSource(ModuleSource):
    """The parameters of a module under FSDP2 (``fully_shard``) or tensor parallelism: DTensors with any Shard and
    Replicate placements on meshes of any dimension (FSDP, HSDP, FSDP x TP), and plain tensors beside them.

    Shards are gathered bucket by bucket, packed, straight into the memory that engines read; no parameter is ever
    materialized whole on its own. Parameters offloaded to the CPU are moved as they are packed. Before reading, every
    FSDP module is resharded: after a forward pass without a backward one, the root would still be gathered.

    Args:
        module: on every rank the same.
        rename: from the module's names to those of the checkpoint; ``None`` leaves a parameter out.
        transform: replaces a tensor by others; with it, each tensor is gathered whole by itself, which is slower.
    """

    def __init__(self, module: Any, *, rename: Rename | None = None, transform: Transform | None = None) -> None:
        self._groups: dict[tuple[object, ...], tuple[tuple[int, ...], Any]] = {}
        super().__init__(module, rename=rename, transform=transform)

    def _refuse_what_this_does_not_take(self) -> None:
        """It takes both kinds."""

    def _make_readable(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _local(self, tensor: Any) -> Any:
        from torch.distributed.tensor import DTensor

        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()

    def _full(self, tensor: Any) -> Any:
        return _plain(tensor)

    def _weight(self, slot: _Slot, tensor: Any) -> Weight:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        name = slot.name
        if not isinstance(tensor, DTensor):
            return _whole(name, tensor, slot.aliases, slot.optional)
        if any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError("module", name, "has a Partial placement, which is not a parameter's value yet")
        ranks, group = self._gather_group(tensor)
        if not ranks:
            return _whole(name, tensor, slot.aliases, slot.optional)
        size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local = tuple(tensor.to_local().shape)
        box = Box(tuple(offset), local)
        if tuple(size) != local and 0 not in local:
            raise ConfigError(
                "module", name, f"has a shard of shape {list(local)}, and its placements say {list(size)}"
            )
        return Weight(_spec(name, tensor, slot.aliases, slot.optional), box, ranks, group)

    def _gather_group(self, tensor: Any) -> tuple[tuple[int, ...], Any]:
        """The ranks that hold this tensor once between them, and their process group."""
        import torch.distributed as dist

        mesh = tensor.device_mesh
        sharded = tuple(
            d for d, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(d) > 1
        )
        key = (mesh, sharded)
        if key not in self._groups:
            if not sharded:
                self._groups[key] = ((), None)
            elif len(sharded) == 1:
                group = mesh.get_group(sharded[0])
                self._groups[key] = (tuple(dist.get_process_group_ranks(group)), group)
            else:
                here = mesh.get_coordinate()
                index = tuple(slice(None) if d in sharded else here[d] for d in range(mesh.ndim))
                ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
                everyone = len(ranks) == dist.get_world_size()
                group = dist.group.WORLD if everyone else dist.new_group(ranks, use_local_synchronization=True)
                self._groups[key] = (ranks, group)
        return self._groups[key]


class TensorSource:
    """Any tensors under their checkpoint names: from a Megatron bridge, of merged LoRA weights, of a state dict.

    On several ranks, each gives the same names in the same order; the tensors need be right only on ranks whose GPU an
    engine shares, and on those that own remote engines (on a CPU: those that own engines).

    Args:
        tensors: a mapping, a sequence of (name, tensor) pairs, or a function that returns an iterable of pairs anew
            for each call. A function is called once to plan, and once for each sync, twice if there are engines here
            and remote ones; it is read in order and may make each tensor as it comes.
    """

    persistent = False

    def __init__(self, tensors: Mapping[str, Any] | Sequence[tuple[str, Any]] | Callable[[], NamedTensors]) -> None:
        if not (callable(tensors) or isinstance(tensors, (Mapping, Sequence))):
            rule = "must be a mapping, a sequence of pairs, or a function that returns pairs: every sync reads it anew"
            raise ConfigError("tensors", type(tensors).__name__, rule)
        self._tensors = tensors
        self._names: list[str] = []

    def _pairs(self) -> NamedTensors:
        tensors = self._tensors
        if isinstance(tensors, Mapping):
            return iter(tensors.items())
        return iter(tensors() if callable(tensors) else tensors)

    def weights(self) -> list[Weight]:
        weights = [_whole(name, tensor) for name, tensor in self._pairs()]
        self._names = [weight.spec.name for weight in weights]
        return weights

    def changed(self) -> bool:
        """A function's tensors are known as they come; each is checked against the plan then."""
        return False

    def read(self) -> Callable[[int], Any]:
        return _in_order(self._pairs(), self._names)


def _in_order(pairs: NamedTensors, names: Sequence[str]) -> Callable[[int], Any]:
    """Reads pairs as they are asked for, keeping the last, and holds them against the planned names."""
    items = iter(pairs)
    position = -1
    current: Any = None

    def read(i: int) -> Any:
        nonlocal position, current
        while position < i:
            name, tensor = next(items, ("nothing", None))
            position += 1
            if isinstance(tensor, Exception):
                current = tensor
                continue
            if name != names[position]:
                raise ConfigError("tensors", name, f"must come in the planned order: {names[position]!r} was to come")
            current = _plain(tensor)
            if position == len(names) - 1 and (more := next(items, None)) is not None:
                raise ConfigError("tensors", more[0], "must not have more names than were planned for")
        if isinstance(current, Exception):
            raise current
        return current

    return read


def _plain(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _whole(name: str, tensor: Any, aliases: Sequence[str] = (), optional: bool = False) -> Weight:
    return Weight(_spec(name, tensor, list(aliases), optional), Box.whole(tuple(tensor.shape)))


def _spec(name: str, tensor: Any, aliases: list[str], optional: bool) -> WeightSpec:
    return WeightSpec(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), aliases, optional)


def _unwrapped_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
