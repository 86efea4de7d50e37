"""Where weights come from: which of a module's tensors are sent, under which names, and how they are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

import sglrollout as sr
from sglrollout.boxes import Box, cover, narrowed
from sglrollout.weights.sources import Weight, WeightSource
from sglrollout.wire.messages import WeightSpec


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(3).bfloat16())
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("cos", torch.ones(5), persistent=False)
        self.register_buffer("unset", None)


class Model(nn.Module):  # type: ignore[misc]
    """Two layers between an embedding and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


NAMES = [
    "embed.weight",
    "layers.0.weight",
    "layers.0.bias",
    "layers.0.scale",
    "layers.1.weight",
    "layers.1.bias",
    "layers.1.scale",
    "head.weight",
]


def names(weights: Sequence[Weight]) -> list[str]:
    return [weight.spec.name for weight in weights]


def read_all(source: WeightSource, weights: Sequence[Weight]) -> dict[str, Any]:
    read = source.read()
    return {weight.spec.name: read(i) for i, weight in enumerate(weights)}


# ------------------------------------------------------------ ModuleSource


def test_parameters_and_persistent_buffers_are_sent_under_their_own_names() -> None:
    weights = sr.ModuleSource(Model()).weights()
    assert names(weights) == NAMES
    assert {w.spec.name for w in weights if w.spec.optional} == {"layers.0.scale", "layers.1.scale"}
    by_name = {weight.spec.name: weight for weight in weights}
    assert by_name["layers.0.weight"].spec == WeightSpec("layers.0.weight", [3, 4], "float32")
    assert by_name["layers.0.bias"].spec.dtype == "bfloat16"
    assert all(weight.box == Box.whole(tuple(weight.spec.shape)) and not weight.ranks for weight in weights)


def test_what_is_read_are_the_parameters_themselves_as_they_are_then() -> None:
    model = Model()
    source = sr.ModuleSource(model)
    weights = source.weights()
    assert source.persistent
    for _ in range(2):
        with torch.no_grad():
            model.embed.weight.add_(1)
        found = read_all(source, weights)
        state = model.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
        assert found["embed.weight"].data_ptr() == model.embed.weight.data_ptr()
        assert not any(tensor.requires_grad for tensor in found.values())


def test_a_parameter_that_was_exchanged_is_read_as_the_new_one() -> None:
    model = Model()
    source = sr.ModuleSource(model)
    weights = source.weights()
    model.embed.weight = nn.Parameter(torch.zeros(6, 4))
    assert not source.changed()
    assert not read_all(source, weights)["embed.weight"].any()


def test_tied_parameters_are_sent_once_with_both_names() -> None:
    weights = sr.ModuleSource(Model(tied=True)).weights()
    assert names(weights) == NAMES[:-1]
    assert weights[0].spec.aliases == ["head.weight"]


def test_parameters_that_are_two_objects_on_one_memory_are_tied_too() -> None:
    model = Model()
    model.head.weight.data = model.embed.weight.data
    weights = sr.ModuleSource(model).weights()
    assert names(weights) == NAMES[:-1]
    assert weights[0].spec.aliases == ["head.weight"]


def test_parts_of_one_memory_are_weights_of_their_own() -> None:
    model, memory = nn.Module(), torch.randn(4, 4)
    model.first, model.all = nn.Parameter(memory[:2]), nn.Parameter(memory)
    assert names(sr.ModuleSource(model).weights()) == ["first", "all"]


def test_parameters_without_elements_are_not_taken_for_one() -> None:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.empty(0, 2)), nn.Parameter(torch.empty(0, 2))
    assert [(w.spec.name, w.spec.aliases) for w in sr.ModuleSource(model).weights()] == [("a", []), ("b", [])]


def test_a_module_that_is_used_twice_is_sent_once_with_both_names() -> None:
    model = nn.Module()
    model.a = model.b = nn.Linear(2, 2, bias=False)
    assert [(w.spec.name, w.spec.aliases) for w in sr.ModuleSource(model).weights()] == [("a.weight", ["b.weight"])]


def test_the_names_that_wrappers_add_are_taken_out() -> None:
    inner = nn.Module()
    inner._checkpoint_wrapped_module = nn.Linear(2, 2, bias=False)
    outer = nn.Module()
    outer._orig_mod = nn.Module()
    outer._orig_mod.layers = nn.ModuleList([inner])
    outer._orig_mod._fsdp_wrapped_module = nn.Module()
    outer._orig_mod._fsdp_wrapped_module.norm = nn.Parameter(torch.ones(2))
    assert sorted(names(sr.ModuleSource(outer).weights())) == ["layers.0.weight", "norm"]


def test_rename_gives_the_checkpoints_names_and_leaves_out_what_it_gives_none_for() -> None:
    seen: list[str] = []

    def rename(name: str) -> str | None:
        seen.append(name)
        return None if name.startswith("head") or name.endswith("scale") else f"model.{name}"

    source = sr.ModuleSource(Model(), rename=rename)
    weights = source.weights()
    assert set(seen) >= set(NAMES)
    kept = [name for name in NAMES if not name.startswith("head") and not name.endswith("scale")]
    assert names(weights) == [f"model.{name}" for name in kept]
    assert source.persistent


def test_a_tie_whose_first_name_is_left_out_is_sent_under_the_other() -> None:
    source = sr.ModuleSource(Model(tied=True), rename=lambda name: None if name == "embed.weight" else name)
    weights = source.weights()
    assert names(weights)[-1] == "head.weight"
    assert all(weight.spec.aliases == [] for weight in weights)


def test_names_that_rename_makes_one_are_no_alias() -> None:
    source = sr.ModuleSource(Model(tied=True), rename=lambda n: "shared" if n in ("embed.weight", "head.weight") else n)
    first = source.weights()[0].spec
    assert (first.name, first.aliases) == ("shared", [])


def test_transform_puts_other_tensors_in_the_place_of_each() -> None:
    def transform(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        if name == "embed.weight":
            for i, part in enumerate(tensor.chunk(2)):
                yield f"embed.{i}", part * 2
        elif "layers" not in name:
            yield name, tensor.bfloat16()

    model = Model()
    source = sr.ModuleSource(model, transform=transform)
    weights = source.weights()
    assert not source.persistent
    assert [(w.spec.name, w.spec.shape, w.spec.dtype) for w in weights] == [
        ("embed.0", [3, 4], "float32"),
        ("embed.1", [3, 4], "float32"),
        ("head.weight", [6, 4], "bfloat16"),
    ]
    for _ in range(2):
        with torch.no_grad():
            model.embed.weight.add_(1)
        found = read_all(source, weights)
        assert torch.equal(found["embed.1"], model.embed.weight.detach()[3:] * 2)
        assert torch.equal(found["head.weight"], model.head.weight.detach().bfloat16())


def test_transform_is_given_the_checkpoints_names() -> None:
    seen: list[str] = []

    def transform(name: str, tensor: Any) -> list[tuple[str, Any]]:
        seen.append(name)
        return [(name, tensor)]

    model = nn.Linear(2, 2)
    weights = sr.ModuleSource(model, rename=lambda name: f"model.{name}", transform=transform).weights()
    assert seen == names(weights) == ["model.weight", "model.bias"]


def test_other_names_shapes_and_dtypes_are_a_change_and_other_values_are_not() -> None:
    model = Model()
    source = sr.ModuleSource(model)
    assert source.changed()
    source.weights()
    assert not source.changed()
    with torch.no_grad():
        model.embed.weight.zero_()
    assert not source.changed()

    model.embed.weight = nn.Parameter(torch.zeros(7, 4))
    assert source.changed()
    source.weights()
    assert not source.changed()

    model.head.bfloat16()
    assert source.changed()
    source.weights()

    model.layers.append(Layer())
    assert source.changed()
    source.weights()

    model.layers[0].scale = torch.ones(2)
    assert source.changed()
    assert names(source.weights()).count("layers.2.weight") == 1
    assert not source.changed()


def test_tying_and_untying_is_a_change() -> None:
    model = Model()
    source = sr.ModuleSource(model)
    source.weights()
    untied, model.head.weight = model.head.weight, model.embed.weight
    assert source.changed()
    source.weights()
    assert not source.changed()
    model.head.weight = untied
    assert source.changed()


def test_a_change_is_seen_with_a_transform_too() -> None:
    model = nn.Linear(2, 2)
    source = sr.ModuleSource(model, transform=lambda name, tensor: [(name, tensor)])
    source.weights()
    assert not source.changed()
    model.bias = None
    assert source.changed()


# ------------------------------------------------------------ FSDPSource


@contextmanager
def rank_of_many(rank: int, size: int) -> Iterator[None]:
    """As that rank of a process group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


meshes_made = itertools.count()


def mesh_of(*shape: int) -> Any:
    """Under names of its own: torch takes meshes that look alike for one, and would remember another rank's place."""
    number = next(meshes_made)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"{number}-{d}" for d in range(len(shape))))


def sharded(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> tuple[Any, Any]:
    """A module with one parameter cut like that, numbered throughout; and the whole."""
    whole = torch.arange(Box.whole(shape).numel, dtype=torch.float32).reshape(shape)
    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = narrowed(whole, Box(tuple(offset), tuple(size))).clone() if 0 not in size else torch.empty(size)
    module = nn.Module()
    module.weight = nn.Parameter(
        DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    )
    return module, whole


def test_a_module_source_refuses_sharded_parameters_and_says_what_to_use() -> None:
    with rank_of_many(0, 2):
        module, _ = sharded((4, 2), mesh_of(2), [Shard(0)])
        with pytest.raises(sr.ConfigError, match="module has DTensor parameters: use FSDPSource, got 'weight'"):
            sr.ModuleSource(module)


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [
        ((4,), [Shard(0)], (8, 3)),
        ((4,), [Shard(0)], (5, 3)),
        ((4,), [Shard(0)], (2, 3)),
        ((4,), [Shard(1)], (3, 7)),
        ((2, 2), [Replicate(), Shard(0)], (5, 3)),
        ((2, 2), [Shard(0), Replicate()], (5, 3)),
        ((2, 2), [Shard(0), Shard(1)], (5, 6)),
        ((2, 2), [Shard(0), Shard(0)], (8, 3)),
        ((1, 4), [Shard(1), Shard(0)], (4, 4)),
    ],
    ids=["even", "uneven", "empty shards", "columns", "HSDP", "FSDP x DP", "FSDP x columns", "twice", "a mesh of one"],
)
def test_the_shards_of_the_ranks_that_gather_a_weight_make_it_up(
    mesh_shape: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]
) -> None:
    found: list[Weight] = []
    for rank in range(4):
        with rank_of_many(rank, 4):
            module, whole = sharded(shape, mesh_of(*mesh_shape), placements)
            source = sr.FSDPSource(module)
            (weight,) = source.weights()
            assert weight.spec == WeightSpec("weight", list(shape), "float32")
            assert rank in weight.ranks
            local = source.read()(0)
            assert tuple(local.shape) == weight.box.size
            if weight.box.numel:
                assert torch.equal(local, narrowed(whole, weight.box))
            found.append(weight)
    for weight in found:
        assert cover(shape, [found[other].box for other in weight.ranks])
        assert all(found[other].ranks == weight.ranks for other in weight.ranks)


def test_what_is_whole_on_every_rank_is_gathered_by_none() -> None:
    with rank_of_many(1, 4):
        mesh = mesh_of(4)
        module, whole = sharded((4, 2), mesh, [Replicate()])
        module.plain = nn.Parameter(torch.ones(3))
        source = sr.FSDPSource(module)
        weights = source.weights()
        assert [(w.spec.name, w.ranks, w.box) for w in weights] == [
            ("weight", (), Box.whole((4, 2))),
            ("plain", (), Box.whole((3,))),
        ]
        assert torch.equal(source.read()(0), whole)
        assert type(source.read()(0)) is torch.Tensor


def test_sums_that_are_still_to_be_added_up_are_refused() -> None:
    with rank_of_many(0, 2):
        module, _ = sharded((4, 2), mesh_of(2), [Shard(0)])
        local = module.weight.to_local().detach()
        module.weight = nn.Parameter(DTensor.from_local(local, module.weight.device_mesh, [Partial()], run_check=False))
        with pytest.raises(sr.ConfigError, match="Partial placement"):
            sr.FSDPSource(module).weights()


# ------------------------------------------------------------ TensorSource

TENSORS = {"a": torch.ones(2, 3), "b": torch.zeros(4).bfloat16(), "c": torch.tensor(5.0)}


@pytest.mark.parametrize(
    "tensors",
    [TENSORS, list(TENSORS.items()), tuple(TENSORS.items()), lambda: TENSORS.items(), lambda: iter(TENSORS.items())],
    ids=["mapping", "list", "tuple", "function", "function of a generator"],
)
def test_tensors_may_come_as_a_mapping_a_sequence_or_a_function(tensors: Any) -> None:
    source = sr.TensorSource(tensors)
    weights = source.weights()
    assert [(w.spec.name, w.spec.shape, w.spec.dtype) for w in weights] == [
        ("a", [2, 3], "float32"),
        ("b", [4], "bfloat16"),
        ("c", [], "float32"),
    ]
    assert not source.persistent
    assert not source.changed()
    for _ in range(2):
        found = read_all(source, weights)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_generator_is_refused_since_every_sync_reads_anew() -> None:
    with pytest.raises(sr.ConfigError, match=r"tensors must be a mapping.*every sync reads it anew, got 'generator'"):
        sr.TensorSource(item for item in TENSORS.items())  # type: ignore[arg-type]
    with pytest.raises(sr.ConfigError, match="got 'dict_itemiterator'"):
        sr.TensorSource(iter(TENSORS.items()))  # type: ignore[arg-type]


def test_a_function_makes_its_tensors_one_after_the_other_as_they_are_asked_for() -> None:
    made: list[str] = []

    def tensors() -> Iterator[tuple[str, Any]]:
        for name, tensor in TENSORS.items():
            made.append(name)
            yield name, tensor

    source = sr.TensorSource(tensors)
    source.weights()
    made.clear()
    read = source.read()
    assert made == []
    assert read(0) is not None
    assert made == ["a"]
    first, again = read(1), read(1)
    assert first is again
    assert made == ["a", "b"]
    read(2)
    assert made == ["a", "b", "c"]


def test_weights_that_nobody_asks_for_are_passed_over() -> None:
    source = sr.TensorSource(TENSORS)
    source.weights()
    assert torch.equal(source.read()(2), TENSORS["c"])


def test_fewer_tensors_than_were_planned_for_are_an_error() -> None:
    shrinking = dict(TENSORS)
    source = sr.TensorSource(shrinking)
    source.weights()
    del shrinking["c"]
    read = source.read()
    read(1)
    with pytest.raises(sr.ConfigError, match="tensors must come in the planned order: 'c' was to come, got 'nothing'"):
        read(2)


def test_tensors_with_gradients_are_read_without() -> None:
    source = sr.TensorSource({"a": nn.Parameter(torch.ones(2))})
    source.weights()
    assert not source.read()(0).requires_grad


def test_sharded_tensors_are_given_whole() -> None:
    with rank_of_many(0, 1):
        module, whole = sharded((4, 2), mesh_of(1), [Shard(0)])
        source = sr.TensorSource({"a": module.weight})
        assert source.weights()[0].box == Box.whole((4, 2))
        tensor = source.read()(0)
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, whole)


def test_tensors_in_another_order_or_more_of_them_than_planned_are_an_error() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(2)}
    source = sr.TensorSource(lambda: tensors.items())
    source.weights()
    tensors = {"b": torch.zeros(2), "a": torch.ones(2)}
    with pytest.raises(sr.ConfigError, match="'a' was to come, got 'b'"):
        source.read()(0)
    tensors = {"a": torch.ones(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    read = source.read()
    read(0)
    with pytest.raises(sr.ConfigError, match="must not have more names than were planned for, got 'c'"):
        read(1)


def test_a_transposed_view_of_a_square_weight_is_not_taken_for_a_tie() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.randn(3, 3))
    module.b = torch.nn.Parameter(module.a.data.t())
    assert [(w.spec.name, w.spec.aliases) for w in sr.ModuleSource(module).weights()] == [("a", []), ("b", [])]


def test_a_buffer_that_comes_or_goes_is_a_change() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("mean", torch.zeros(2))
    source = sr.ModuleSource(module)
    source.weights()
    assert not source.changed()
    module.register_buffer("scale", torch.zeros(2))
    assert source.changed()
    source.weights()
    module.mean = None
    assert source.changed()


def test_rename_is_asked_about_tensors_alone() -> None:
    names = {"weight": "w"}
    source = sr.ModuleSource(torch.nn.Linear(2, 2, bias=False), rename=names.__getitem__)
    assert [weight.spec.name for weight in source.weights()] == ["w"]
