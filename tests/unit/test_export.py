"""Weights from one engine's process to another's, through an anonymous file."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrollout.engine import scheduler_export
from sglrollout.engine.scheduler_export import Adoption, Export, Header, WeightsDifferError, size_of, weights_of

ALL = 1 << 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool]


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) != before and time.monotonic() < deadline:
        time.sleep(0.01)  # it is closed on a thread
    assert len(os.listdir("/proc/self/fd")) == before


class Model(torch.nn.Module):  # type: ignore[misc]
    """All kinds of tensors that a model may have."""

    def __init__(self, seed: int, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(50, width)
        self.head = torch.nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(2)])
        self.turned = torch.nn.Parameter(torch.randn(width, 10).t())  # not contiguous
        self.strided = torch.nn.Parameter(torch.randn(8, 6, 4)[::2, :, ::2])
        self.scale = torch.nn.Parameter(torch.tensor(0.5 + seed))
        self.register_buffer("table", torch.randint(0, 1000, (7,)))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.register_buffer("nothing", torch.empty(0))
        self.derived = (torch.randn(4, 5) + seed).t()
        self.counter = torch.tensor(seed)  # whole numbers as an attribute may be addresses


def exported(model: torch.nn.Module, num_bytes: int = ALL) -> Export:
    export = Export(model)
    while not export.go_on(num_bytes):
        pass
    return export


def adopt(model: torch.nn.Module, export: Export, num_bytes: int = ALL) -> None:
    adoption = Adoption(model, f"/proc/self/fd/{export.fd}")
    try:
        while not adoption.go_on(num_bytes):
            pass
    finally:
        adoption.close()


def header(export: Export) -> Header:
    size = os.fstat(export.fd).st_size
    length = int.from_bytes(os.pread(export.fd, 8, size - 8), "little")
    return msgspec.msgpack.decode(os.pread(export.fd, length, size - 8 - length), type=Header)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = weights_of(one), weights_of(other)
    return list(mine) == list(theirs) and all(torch.equal(mine[name][0], theirs[name][0]) for name in mine)


@pytest.mark.parametrize("num_bytes", [1, 1000, ALL])
@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 25])
def test_every_tensor_arrives_bit_for_bit_where_it_was(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, piece_bytes: int
) -> None:
    monkeypatch.setattr(scheduler_export, "_PIECE_BYTES", piece_bytes)
    one, other = Model(1), Model(2)
    places = [(tensor.data_ptr(), tensor.stride()) for tensor, _ in weights_of(other).values()]
    assert not same(one, other)
    export = exported(one, num_bytes)
    adopt(other, export, num_bytes)
    export.close()
    assert same(one, other)
    assert [(tensor.data_ptr(), tensor.stride()) for tensor, _ in weights_of(other).values()] == places
    assert other.head.weight is other.embed.weight
    assert int(other.counter) == 2


def test_the_size_of_weights_is_known_before() -> None:
    export = exported(Model(1))
    assert size_of(Model(1)) == sum(
        math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize for entry in header(export).entries
    )
    export.close()


def test_a_tied_tensor_travels_once_and_empty_ones_not_at_all() -> None:
    model = Model(1)
    export = exported(model)
    names = [entry.name for entry in header(export).entries]
    num_bytes = sum(tensor.nbytes for tensor, _ in weights_of(model).values())
    assert num_bytes < os.fstat(export.fd).st_size < num_bytes + 2000
    export.close()
    assert names == [
        *("turned", "strided", "scale", "embed.weight"),
        *("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"),
        *("table", "scratch", "derived"),
    ]


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=4), st.data())
def test_any_dtype_shape_and_order_of_dimensions(dtype: torch.dtype, shape: list[int], data: Any) -> None:
    order = data.draw(st.permutations(range(len(shape))))

    def model() -> torch.nn.Module:
        module = torch.nn.Module()
        bits = torch.randint(0, 2 if dtype is torch.bool else 127, [*shape, dtype.itemsize], dtype=torch.uint8)
        module.register_buffer("weight", bits.view(dtype).squeeze(-1).permute(order))
        return module

    one, other = model(), model()
    export = exported(one)
    adopt(other, export)
    export.close()
    ours, theirs = (module.get_buffer("weight").contiguous().reshape(-1).view(torch.uint8) for module in (one, other))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda model: model.register_buffer("more", torch.ones(2)),
            "more is not among the weights of the other engine",
        ),
        (lambda model: model.__delattr__("table"), "table of the other engine is not among the weights"),
        (lambda model: model.__delattr__("scale"), "scale of the other engine is not among the weights"),
        (lambda model: model.layers[0].double(), r"layers.0.weight is float64 \[24, 24\], and bfloat16 \[24, 24\]"),
        (lambda model: model.register_buffer("table", torch.zeros(8).long()), r"table is int64 \[8\], and int64 \[7\]"),
        (lambda model: setattr(model, "derived", torch.ones(3)), r"derived is float32 \[3\]"),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_is_written(change: Any, says: str) -> None:
    export, other = exported(Model(1)), Model(2)
    change(other)
    before = {name: tensor.clone() for name, (tensor, _) in weights_of(other).items()}
    with pytest.raises(WeightsDifferError, match=says):
        adopt(other, export)
    export.close()
    assert all(torch.equal(before[name], tensor) for name, (tensor, _) in weights_of(other).items())


def test_what_the_other_has_derived_and_this_one_not_yet_is_passed_over() -> None:
    one, other = Model(1), Model(2)
    one.layers[0].cached = torch.ones(5)
    export = exported(one)
    adopt(other, export)
    export.close()
    del one.layers[0].cached
    assert same(one, other)


def test_a_bit_that_changed_on_the_way_is_seen() -> None:
    export = exported(Model(1))
    entry = next(entry for entry in header(export).entries if entry.name == "layers.1.weight")
    (byte,) = os.pread(export.fd, 1, entry.offset + 17)
    os.pwrite(export.fd, bytes([byte ^ 1]), entry.offset + 17)
    with pytest.raises(WeightsDifferError, match=r"the bytes of layers\.1\.weight are not those that were written"):
        adopt(Model(2), export)
    export.close()


def test_a_file_that_is_cut_or_none_of_ours_is_refused_and_ends_nothing() -> None:
    for size in (0, 5, 3000):
        export = exported(Model(1))
        os.ftruncate(export.fd, size)
        with pytest.raises(WeightsDifferError, match="header"):
            adopt(Model(2), export)
        export.close()
    export = exported(Model(1))
    adoption = Adoption(Model(2), f"/proc/self/fd/{export.fd}")
    assert not adoption.go_on(1)
    os.ftruncate(export.fd, 0)  # as one does who gives the memory back
    with pytest.raises(WeightsDifferError, match="ended early"):
        adoption.go_on(ALL)
    adoption.close()
    adoption.close()
    export.close()
    with pytest.raises(FileNotFoundError):
        Adoption(Model(2), "/proc/self/fd/100000")


def test_a_file_of_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    export = exported(Model(1))
    monkeypatch.setattr(scheduler_export, "_FORMAT", "sglrollout weights 2")
    with pytest.raises(WeightsDifferError, match="format 'sglrollout weights 1'"):
        adopt(Model(2), export)
    export.close()


def test_an_export_that_is_given_up_leaves_nothing() -> None:
    export = Export(Model(1))
    assert not export.go_on(1)
    export.close()
    export.close()


def test_letting_go_of_a_file_does_not_wait_until_its_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    export, closing = exported(Model(1)), threading.Event()

    def slowly(fd: int, close: Callable[[int], None] = os.close) -> None:
        assert closing.wait(5)
        close(fd)

    monkeypatch.setattr(os, "close", slowly)
    before = len(os.listdir("/proc/self/fd"))
    begun = time.monotonic()
    export.close()
    assert time.monotonic() - begun < 2
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before
    closing.set()
