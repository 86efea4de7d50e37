"""What the recorder learns from a dry run of ``load_weights``: every copy, and what does not fit. Nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sglrollout.boxes import Box, narrowed
from sglrollout.engine.scheduler_recorder import Recording, record
from sglrollout.wire.messages import WeightSpec

HEAD_DIM, HIDDEN = 4, 8
FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}


class Linear(nn.Module):  # type: ignore[misc]
    """A layer of which each TP rank has a slice along ``dim``, loaded as SGLang does: by its parameter's loader."""

    def __init__(self, shape: tuple[int, ...], dim: int | None, tp_rank: int, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)
        self.weight.weight_loader = self.load
        self._dim, self._tp_rank = dim, tp_rank

    def load(self, parameter: Any, loaded: Any) -> None:
        data = parameter.data
        if self._dim is not None:
            size = data.shape[self._dim]
            loaded = loaded.narrow(self._dim, self._tp_rank * size, size)
        assert data.shape == loaded.shape, f"{tuple(data.shape)} is not {tuple(loaded.shape)}"
        data.copy_(loaded)


class Fused(nn.Module):  # type: ignore[misc]
    """Query, key and value in one parameter; with fewer key heads than TP ranks, several of those have the same one."""

    def __init__(self, num_heads: int, num_kv_heads: int, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self._tp_rank = tp_rank
        self._replicas = max(1, tp_size // num_kv_heads)
        self._heads = [num_heads // tp_size, *[max(1, num_kv_heads // tp_size)] * 2]
        self.weight = nn.Parameter(torch.randn(sum(self._heads) * HEAD_DIM, HIDDEN), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, parameter: Any, loaded: Any, shard: int) -> None:
        size = self._heads[shard] * HEAD_DIM
        rank = self._tp_rank if shard == 0 else self._tp_rank // self._replicas
        target = parameter.data.narrow(0, sum(self._heads[:shard]) * HEAD_DIM, size)
        loaded = loaded.narrow(0, rank * size, size)
        assert target.shape == loaded.shape
        target.copy_(loaded)


class Embedding(nn.Module):  # type: ignore[misc]
    """A vocabulary that is padded, and cut over TP ranks: the last ones have rows of zeros."""

    def __init__(self, vocab_size: int, tp_rank: int, tp_size: int, padding: int) -> None:
        super().__init__()
        padded = -(-vocab_size // (padding * tp_size)) * padding * tp_size
        rows = padded // tp_size
        self._start, self._end = min(tp_rank * rows, vocab_size), min((tp_rank + 1) * rows, vocab_size)
        self.weight = nn.Parameter(torch.randn(rows, HIDDEN), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, parameter: Any, loaded: Any) -> None:
        loaded = loaded.narrow(0, self._start, self._end - self._start)
        parameter[: loaded.shape[0]].data.copy_(loaded)
        parameter[loaded.shape[0] :].data.fill_(0)


class Model(nn.Module):  # type: ignore[misc]
    """One layer and its ends, with ``load_weights`` in the style of SGLang's models."""

    def __init__(
        self,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        vocab_size: int = 10,
        padding: int = 1,
        dtype: Any = torch.float32,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocab_size, tp_rank, tp_size, padding)
        self.qkv_proj = Fused(num_heads, num_kv_heads, tp_rank, tp_size)
        self.o_proj = Linear((HIDDEN, num_heads * HEAD_DIM // tp_size), 1, tp_rank, dtype)
        self.norm = Linear((HIDDEN,), None, tp_rank, dtype)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        parameters = dict(self.named_parameters())
        for name, loaded in weights:
            for part, (whole, shard) in FUSED.items():
                if part in name:
                    parameter = parameters[name.replace(part, whole)]
                    parameter.weight_loader(parameter, loaded, shard)
                    break
            else:
                if name == "lm_head.weight":  # tied
                    name = "embed_tokens.weight"
                if name in parameters:
                    parameters[name].weight_loader(parameters[name], loaded)


def checkpoint(num_heads: int = 4, num_kv_heads: int = 2, vocab_size: int = 10) -> dict[str, Any]:
    return {
        "embed_tokens.weight": torch.randn(vocab_size, HIDDEN),
        "q_proj.weight": torch.randn(num_heads * HEAD_DIM, HIDDEN),
        "k_proj.weight": torch.randn(num_kv_heads * HEAD_DIM, HIDDEN),
        "v_proj.weight": torch.randn(num_kv_heads * HEAD_DIM, HIDDEN),
        "o_proj.weight": torch.randn(HIDDEN, num_heads * HEAD_DIM),
        "norm.weight": torch.randn(HIDDEN),
    }


def specs(tensors: dict[str, Any]) -> list[WeightSpec]:
    return [
        WeightSpec(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]


def values(model: Any) -> dict[str, Any]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def replay(recording: Recording, tensors: list[Any]) -> None:
    for fill in recording.fills:
        fill.target.fill_(fill.value)
    for copy in recording.copies:
        copy.target.copy_(narrowed(tensors[copy.entry], copy.box))


def complaints(recording: Recording) -> dict[str, Any]:
    """All that is wrong, by kind."""
    kinds = ("unexpected", "missing", "duplicates", "mismatched", "unsuited")
    return {kind: getattr(recording, kind) for kind in kinds if getattr(recording, kind)}


# ------------------------------------------------------------ what would be copied


def test_the_parts_of_a_fused_parameter_go_side_by_side() -> None:
    model = Model()
    tensors = checkpoint()
    recording = record(model, specs(tensors), [])
    assert complaints(recording) == {}
    fused = model.qkv_proj.weight
    found = {
        list(tensors)[copy.entry]: (copy.box, copy.target.storage_offset() // HIDDEN, copy.target.shape[0])
        for copy in recording.copies
        if copy.target.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    }
    assert found == {
        "q_proj.weight": (Box.whole((16, HIDDEN)), 0, 16),
        "k_proj.weight": (Box.whole((8, HIDDEN)), 16, 8),
        "v_proj.weight": (Box.whole((8, HIDDEN)), 24, 8),
    }


def test_a_tp_rank_takes_its_slices_alone() -> None:
    tensors = checkpoint()
    recording = record(Model(tp_rank=1, tp_size=2), specs(tensors), [])
    assert complaints(recording) == {}
    assert {list(tensors)[copy.entry]: copy.box for copy in recording.copies} == {
        "embed_tokens.weight": Box((5, 0), (5, HIDDEN)),
        "q_proj.weight": Box((8, 0), (8, HIDDEN)),
        "k_proj.weight": Box((4, 0), (4, HIDDEN)),
        "v_proj.weight": Box((4, 0), (4, HIDDEN)),
        "o_proj.weight": Box((0, 8), (HIDDEN, 8)),
        "norm.weight": Box.whole((HIDDEN,)),
    }


def test_a_key_head_that_several_tp_ranks_share_goes_to_each_of_them() -> None:
    tensors = checkpoint()
    boxes = []
    for tp_rank in range(4):
        recording = record(Model(tp_rank=tp_rank, tp_size=4), specs(tensors), [])
        assert complaints(recording) == {}
        boxes += [copy.box.start[0] for copy in recording.copies if list(tensors)[copy.entry] == "k_proj.weight"]
    assert boxes == [0, 0, 4, 4]


def test_the_padding_of_a_vocabulary_is_a_fill_and_counts_as_written() -> None:
    model = Model(vocab_size=10, padding=8)
    recording = record(model, specs(checkpoint()), [])
    assert complaints(recording) == {}
    (fill,) = recording.fills
    assert fill.value == 0.0
    assert fill.target.data_ptr() == model.embed_tokens.weight[10:].data_ptr()
    assert fill.target.shape == (6, HIDDEN)


def test_a_vocabulary_without_padding_fills_nothing() -> None:
    assert record(Model(), specs(checkpoint()), []).fills == []


def test_a_parameter_of_another_dtype_is_copied_to_and_keeps_its_own() -> None:
    tensors = checkpoint()
    recording = record(Model(dtype=torch.bfloat16), specs(tensors), [])
    assert complaints(recording) == {}
    dtypes = {list(tensors)[copy.entry]: copy.target.dtype for copy in recording.copies}
    assert (dtypes["o_proj.weight"], dtypes["q_proj.weight"]) == (torch.bfloat16, torch.float32)


# ------------------------------------------------------------ the recording is the load


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(52, 90), st.sampled_from([1, 4]), st.data())
def test_replaying_the_copies_gives_what_load_weights_gives(
    tp_size: int, num_kv_heads: int, vocab_size: int, padding: int, data: st.DataObject
) -> None:
    tp_rank = data.draw(st.integers(0, tp_size - 1))
    tensors = checkpoint(4, num_kv_heads, vocab_size)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    options = {"tp_rank": tp_rank, "tp_size": tp_size, "num_kv_heads": num_kv_heads, "vocab_size": vocab_size}
    recorded, loaded = (Model(**options, padding=padding, dtype=dtype) for _ in range(2))
    before = values(recorded)
    recording = record(recorded, specs(tensors), [])
    assert complaints(recording) == {}
    assert same(values(recorded), before)
    replay(recording, list(tensors.values()))
    loaded.load_weights(tensors.items())
    assert same(values(recorded), values(loaded))
    assert not same(values(recorded), before)


def test_tied_names_land_in_one_place_and_are_no_duplicates() -> None:
    tensors = checkpoint()
    tied = [
        WeightSpec(s.name, s.shape, s.dtype, ["lm_head.weight"] if "embed" in s.name else []) for s in specs(tensors)
    ]
    recorded, loaded = Model(), Model()
    recording = record(recorded, tied, [])
    assert complaints(recording) == {}
    assert [copy.entry for copy in recording.copies].count(0) == 2
    replay(recording, list(tensors.values()))
    loaded.load_weights(tensors.items())
    assert same(values(recorded), values(loaded))


def test_a_recording_can_be_replayed_with_other_values_later() -> None:
    recorded, loaded = Model(padding=4), Model(padding=4)
    recording = record(recorded, specs(checkpoint()), [])
    for _ in range(3):
        tensors = checkpoint()
        replay(recording, list(tensors.values()))
        loaded.load_weights(tensors.items())
        assert same(values(recorded), values(loaded))


def test_parameters_stay_where_they_were() -> None:
    model = Model()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    record(model, specs(checkpoint()), [])
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert not any(parameter.is_meta for parameter in model.parameters())


# ------------------------------------------------------------ names that do not fit


def test_a_weight_that_nobody_takes_is_unexpected() -> None:
    recording = record(Model(), specs({**checkpoint(), "rotary.inv_freq": torch.randn(4)}), [])
    assert complaints(recording) == {"unexpected": ["rotary.inv_freq"]}


def test_an_optional_weight_may_be_left_alone() -> None:
    weights = [*specs(checkpoint()), WeightSpec("rotary.inv_freq", [4], "float32", optional=True)]
    assert complaints(record(Model(), weights, [])) == {}


def test_parameters_that_nothing_writes_or_only_in_part_are_missing_by_the_engines_names() -> None:
    tensors = checkpoint()
    del tensors["k_proj.weight"], tensors["norm.weight"]
    assert complaints(record(Model(), specs(tensors), [])) == {"missing": ["qkv_proj.weight", "norm.weight"]}


@pytest.mark.parametrize(
    ("allowed", "missing"),
    [(["norm.*"], ["qkv_proj.weight"]), (["*"], []), (["*.bias"], ["qkv_proj.weight", "norm.weight"])],
)
def test_a_pattern_allows_parameters_to_be_missing(allowed: list[str], missing: list[str]) -> None:
    tensors = checkpoint()
    del tensors["k_proj.weight"], tensors["norm.weight"]
    assert record(Model(), specs(tensors), allowed).missing == missing


def test_two_weights_for_one_place_are_duplicates() -> None:
    weights = [*specs(checkpoint()), WeightSpec("lm_head.weight", [10, HIDDEN], "float32")]
    recording = record(Model(), weights, [])
    assert complaints(recording) == {
        "duplicates": ["embed_tokens.weight (from embed_tokens.weight and lm_head.weight)"]
    }


def test_a_weight_of_another_shape_is_named_with_the_reason() -> None:
    tensors = {**checkpoint(), "o_proj.weight": torch.randn(HIDDEN, 12)}
    model = Model()
    before = values(model)
    recording = record(model, specs(tensors), [])
    assert list(complaints(recording)) == ["mismatched"]
    (found,) = recording.mismatched
    assert found.startswith(f"o_proj.weight [{HIDDEN}, 12] (")
    assert "test_recorder.py" in found
    assert same(values(model), before)


def test_every_weight_of_another_shape_is_named() -> None:
    tensors = {**checkpoint(), "o_proj.weight": torch.randn(3, 3), "norm.weight": torch.randn(HIDDEN + 1)}
    recording = record(Model(), specs(tensors), [])
    assert [found.split()[0] for found in recording.mismatched] == ["o_proj.weight", "norm.weight"]
    assert recording.unsuited == ""


# ------------------------------------------------------------ models that copies cannot load


class Odd(nn.Module):  # type: ignore[misc]
    """A model of one parameter, whose loader does what a test says."""

    def __init__(self, load: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, 3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for _, loaded in weights:
            self._load(self.a, loaded)


def replace_and_copy(parameter: Any, loaded: Any) -> None:
    parameter.data = torch.empty(2, 3)
    parameter.data.copy_(loaded)


def copy_and_replace(parameter: Any, loaded: Any) -> None:
    parameter.data.copy_(loaded)
    parameter.data = parameter.data.clone()


def copy_and_compute(parameter: Any, loaded: Any) -> None:
    parameter.data.copy_(loaded)
    parameter.data.mul_(2)


def write(parameter: Any, value: Any) -> None:
    parameter.data[:] = value


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda p, w: p.data.copy_(w * 2), "computes new tensors"),
        (lambda p, w: p.data.copy_(torch.cat([w[1:], w[:1]])), "computes new tensors"),
        (lambda p, w: p.data.copy_(w.to(torch.bfloat16)), "computes new tensors"),
        (copy_and_compute, "computes on parameters"),
        (lambda p, w: p.data.uniform_(), "computes on parameters"),
        (lambda p, w: p.data.copy_(w.flatten()[:6].view(3, 2).t()), "reshapes"),
        (lambda p, w: p.data.copy_(w[:1]), "reshapes"),
        (lambda p, w: p.data.copy_(w.view(2, 3, 1).squeeze(2).expand(2, 3).t().reshape(2, 3)), "computes new tensors"),
        (replace_and_copy, ""),
        (copy_and_replace, "replaces the memory of a"),
        (lambda p, w: p.data.fill_(w[0, 0].item()), "does not run without data"),
        (lambda p, w: p.data.copy_(w) if bool((w > 0).any()) else None, "does not run without data"),
        (lambda p, w: write(p, w.tolist()), "does not run without data"),
    ],
    ids=[
        "multiplies", "concatenates", "casts", "scales what it copied", "draws", "transposes", "broadcasts", "copies",
        "copies to new memory", "moves the parameter", "reads a value", "decides by values", "goes over python",
    ],
)  # fmt: skip
def test_a_loader_that_does_more_than_copy_is_unsuited_and_changes_nothing(
    load: Callable[[Any, Any], Any], reason: str
) -> None:
    model = Odd(load)
    address = model.a.data_ptr()
    recording = record(model, [WeightSpec("a", [2, 3], "float32")], [])
    assert recording.unsuited
    assert reason in recording.unsuited
    assert (recording.missing, recording.duplicates, recording.mismatched) == ([], [], [])
    assert torch.equal(model.a, torch.ones(2, 3))
    assert model.a.data_ptr() == address


def test_a_loader_that_raises_is_told_with_its_reason_and_changes_nothing() -> None:
    def load(parameter: Any, loaded: Any) -> None:
        parameter.data.copy_(loaded)
        raise KeyError("no such expert")

    model = Odd(load)
    recording = record(model, [WeightSpec("a", [2, 3], "float32")], [])
    (found,) = recording.mismatched
    assert found.startswith("a [2, 3] (")
    assert "no such expert" in found
    assert torch.equal(model.a, torch.ones(2, 3))


def test_a_failure_that_no_single_weight_explains_makes_the_model_unsuited() -> None:
    def load(parameter: Any, loaded: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("only together")

    calls: list[int] = []
    recording = record(Odd(load), [WeightSpec("a", [2, 3], "float32"), WeightSpec("b", [2, 3], "float32")], [])
    assert recording.mismatched == []
    assert "only together" in recording.unsuited


def test_reading_a_weights_shape_and_dtype_is_no_computation() -> None:
    def load(parameter: Any, loaded: Any) -> None:
        assert loaded.shape == parameter.shape
        assert loaded.dtype == parameter.dtype
        assert loaded.numel() == 6
        parameter.data[:] = loaded[:]

    assert complaints(record(Odd(load), [WeightSpec("a", [2, 3], "float32")], [])) == {}


def test_parameters_that_share_memory_are_unsuited() -> None:
    model = Odd(lambda p, w: p.data.copy_(w))
    model.b = nn.Parameter(model.a.data, requires_grad=False)
    assert "share memory" in record(model, [WeightSpec("a", [2, 3], "float32")], []).unsuited


def test_one_parameter_under_two_names_is_not_shared_memory() -> None:
    model = Odd(lambda p, w: p.data.copy_(w))
    model.b = model.a
    assert complaints(record(model, [WeightSpec("a", [2, 3], "float32")], [])) == {}


class Fp8LinearMethod:
    """As SGLang's: of its weights, others are made after loading."""


class UnquantizedLinearMethod:
    """As SGLang's: its weights are used as they are."""


def test_what_is_derived_from_weights_after_loading_makes_a_model_unsuited() -> None:
    weights = specs(checkpoint())
    model = Model()
    model.norm.quant_method = UnquantizedLinearMethod()
    assert record(model, weights, []).unsuited == ""
    model.norm.quant_method = Fp8LinearMethod()
    assert record(model, weights, []).unsuited == "norm rewrites its weights after loading (Fp8LinearMethod)"

    amx = Model()
    amx.o_proj.use_intel_amx_backend = True
    assert record(amx, weights, []).unsuited == "o_proj repacks its weights for AMX"

    derived = Model()
    derived.post_load_weights = lambda: None
    assert "post_load_weights" in record(derived, weights, []).unsuited


def test_a_parameter_in_another_layout_is_unsuited() -> None:
    model = Odd(lambda p, w: p.data.copy_(w))
    model.a.data = torch.ones(3, 2).t()
    recording = record(model, [WeightSpec("a", [2, 3], "float32")], [])
    assert recording.unsuited == "its load_weights writes a in another layout"


def test_an_unsuited_model_is_still_told_what_is_not_known() -> None:
    model = Model()
    model.norm.quant_method = Fp8LinearMethod()
    recording = record(model, specs({**checkpoint(), "other.weight": torch.randn(2)}), [])
    assert recording.unexpected == ["other.weight"]
    assert recording.unsuited


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: p.data.copy_(w * 2),
        lambda p, w: p.data.copy_(w.to(torch.float16)),
        lambda p, w: p.data.view(3, 2).copy_(w.t()),
        lambda p, w: p.data.copy_(w.reshape(1, 2, 3).squeeze(0) + 0),
        lambda p, w: setattr(p, "data", w),
        lambda p, w: write(p, w.numpy()),
    ],
    ids=["scales", "casts", "transposes", "squeezes and adds", "replaces", "goes over numpy"],
)
def test_a_weight_that_is_used_in_another_way_than_by_copying_is_not_called_unknown(
    load: Callable[[Any, Any], Any],
) -> None:
    recording = record(Odd(load), [WeightSpec("a", [2, 3], "float32")], [])
    assert recording.unsuited
    assert (recording.unexpected, recording.mismatched) == ([], [])


@pytest.mark.parametrize(
    "load",
    [
        lambda p, w: p.data.mul_(5),
        lambda p, w: torch._foreach_zero_([p.data]),
        lambda p, w: torch.add(p.data[0], 5, out=p.data[0]),
        lambda p, w: setattr(p, "data", p.data.t()),
    ],
    ids=["in place", "a list of tensors", "into an out argument", "transposed in place"],
)
def test_whatever_a_loader_does_to_a_parameter_it_is_as_it_was_afterwards(load: Callable[[Any, Any], Any]) -> None:
    model = Odd(load)
    assert record(model, [WeightSpec("a", [2, 3], "float32")], []).unsuited
    assert torch.equal(model.a, torch.ones(2, 3))


def test_a_replaced_parameter_is_put_back() -> None:
    model = Odd(lambda p, w: None)
    before = model.a

    def load_weights(weights: Any) -> None:
        for _, tensor in weights:
            model.a = torch.nn.Parameter(tensor)

    model.load_weights = load_weights  # type: ignore[method-assign]
    assert "replaces the parameter a" in record(model, [WeightSpec("a", [2, 3], "float32")], []).unsuited
    assert model.a is before


def test_a_fill_before_a_copy_is_no_duplicate_and_one_after_it_makes_the_model_unsuited() -> None:
    def fill_first(parameter: Any, loaded: Any) -> None:
        parameter.data.zero_()
        parameter.data.copy_(loaded)

    def fill_last(parameter: Any, loaded: Any) -> None:
        parameter.data.copy_(loaded)
        parameter.data[0:1].zero_()

    spec = [WeightSpec("a", [2, 3], "float32")]
    assert complaints(record(Odd(fill_first), spec, [])) == {}
    assert "fills what it has loaded" in record(Odd(fill_last), spec, []).unsuited


def test_an_exception_of_any_kind_is_reported() -> None:
    class AwkwardError(Exception):
        def __init__(self, one: int, other: int) -> None:
            super().__init__(f"{one} and {other}")

    def load(parameter: Any, loaded: Any) -> None:
        raise AwkwardError(1, 2)

    (told,) = record(Odd(load), [WeightSpec("a", [2, 3], "float32")], []).mismatched
    assert "AwkwardError: 1 and 2" in told
