"""What changed of weights, written and applied: bit for bit, small, and refused where it does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sglrollout.engine.mirror import Mirror
from sglrollout.wire import delta
from sglrollout.wire.delta import MANIFEST, DeltaError, File, Manifest, bits, checksum, update

FILE = "model-00001-of-00001.safetensors"
FAR = 65535
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64, torch.bool]


def random_bits(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    """Any bits at all: of numbers, of infinities and of what is no number."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, most, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


class Trainer:
    """Writes its weights into folders, as a road does."""

    def __init__(self, root: Path, **weights: torch.Tensor) -> None:
        self.root, self.weights = root, weights
        self.kept: dict[str, torch.Tensor] = {}
        self.id, self.num_bytes = "", 0

    def write(self, base: str = "") -> Path:
        new_id = f"{len(list(self.root.iterdir()))}"
        folder = self.root / new_id
        folder.mkdir()
        if base:
            tensors: dict[str, Any] = {}
            for name, weight in self.weights.items():
                tensors |= update(name, bits(self.kept[name]), bits(weight))
        else:
            self.kept = {name: weight.clone() for name, weight in self.weights.items()}
            tensors = self.kept
        save_file(tensors, folder / FILE)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        sums = {name: checksum(bits(weight).numpy()) for name, weight in self.weights.items()}
        Manifest(new_id, base, {FILE: sums}, [FILE]).write(folder)
        self.id = new_id
        return folder

    def changes(self) -> Path:
        return self.write(self.id)


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "mirror")


def trainer_of(tmp_path: Path, **weights: torch.Tensor) -> Trainer:
    root = tmp_path / "shared"
    root.mkdir()
    return Trainer(root, **weights)


def take(mirror: Mirror, folder: Path) -> None:
    mirror.update(folder, folder.name)


def holds(mirror: Mirror, weights: Mapping[str, torch.Tensor]) -> bool:
    there = load_file(mirror.folder / FILE)
    return all(torch.equal(bits(there[name]), bits(weight)) for name, weight in weights.items())


# ------------------------------------------------------------ bit for bit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changed", [[], [0], [199_999], [0, 65_535, 131_070], [1, 65_537], [5, 6, 190_000], "all"])
def test_a_copy_becomes_what_the_trainer_has(
    tmp_path: Path, mirror: Mirror, dtype: torch.dtype, changed: list[int] | str
) -> None:
    old, other = random_bits(dtype, 200_000, 0), random_bits(dtype, 200_000, 1)
    new = old.clone()
    where: Any = slice(None) if changed == "all" else torch.tensor(changed, dtype=torch.int64)
    bits(new)[where] = bits(other)[where]
    trainer = trainer_of(tmp_path, first=old.view(400, 500), second=old[:7].clone(), empty=old[:0].clone())
    take(mirror, trainer.write())
    assert holds(mirror, trainer.weights)
    trainer.weights["first"] = new.view(400, 500)
    take(mirror, trainer.changes())
    assert holds(mirror, trainer.weights)
    assert all(torch.equal(bits(trainer.kept[name]), bits(weight)) for name, weight in trainer.weights.items())
    assert mirror.id == trainer.id
    if changed == []:
        assert trainer.num_bytes == 0


@settings(max_examples=60, deadline=None)
@given(places=st.sets(st.integers(0, 3 * FAR + 4), max_size=6), seed=st.integers(0, 1000))
def test_any_places_are_found_again_by_the_gaps_between_them(places: set[int], seed: int) -> None:
    old = random_bits(torch.bfloat16, 3 * FAR + 5, seed)
    new = old.clone()
    for place in places:
        bits(new)[place] ^= 1
    expected = new.clone()
    written = update("w", bits(old), bits(new))
    assert torch.equal(bits(old), bits(expected))
    if not places:
        assert written == {}
        return
    reached = written["w:gaps"].to(torch.int64).cumsum(0)
    assert places <= set(reached.tolist())
    assert len(reached) <= len(places) + 3
    assert torch.equal(bits(new)[reached], written["w:bits"])


def test_few_changes_take_few_bytes_and_many_no_more_than_the_weight(tmp_path: Path, mirror: Mirror) -> None:
    weight = torch.zeros(1_000_000, dtype=torch.bfloat16)
    trainer = trainer_of(tmp_path, weight=weight)
    take(mirror, trainer.write())
    weight[::300] = 1
    take(mirror, trainer.changes())
    assert trainer.num_bytes == 4 * len(weight[::300])
    weight += 1
    take(mirror, trainer.changes())
    assert trainer.num_bytes == weight.nbytes
    assert holds(mirror, trainer.weights)


def test_a_zero_of_another_sign_and_numbers_that_are_none_are_changes_too() -> None:
    old, new = torch.tensor([0.0, 1.0, float("nan")] * 100), torch.tensor([-0.0, 1.0, float("nan")] * 100)
    bits(new)[2] += 1
    written = update("w", bits(old), bits(new))
    assert written["w:bits"].numel() == 101
    assert torch.equal(bits(old), bits(new))


def test_a_weight_is_gone_through_in_parts_and_never_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the places of all elements of an embedding would be tens of gigabytes."""
    most, spread = 1009, delta._spread

    def spread_some(places: torch.Tensor, last: int) -> torch.Tensor:
        assert places.numel() <= most
        found: torch.Tensor = spread(places, last)
        return found

    monkeypatch.setattr(delta, "_CHUNK_ELEMENTS", most)
    monkeypatch.setattr(delta, "_spread", spread_some)
    generator = torch.Generator().manual_seed(0)
    for share in (0.0, 0.00002, 0.001, 0.3, 0.9, 1.0):
        old, other = random_bits(torch.bfloat16, 300_000, 1), random_bits(torch.bfloat16, 300_000, 2)
        new = torch.where(torch.rand(300_000, generator=generator) < share, other, old)
        kept, expected = bits(old.clone()), bits(new.clone())
        written = update("w", kept, bits(new))
        assert torch.equal(kept, expected)
        assert sum(tensor.nbytes for tensor in written.values()) <= new.nbytes
        if "w:bits" in written:
            places = written["w:gaps"].to(torch.int64).cumsum(0)
            rebuilt = bits(old.clone())
            rebuilt[places] = written["w:bits"]
            assert torch.equal(rebuilt, expected)


# ------------------------------------------------------------ what does not fit


def test_changes_of_other_weights_are_refused_and_nothing_is_touched(tmp_path: Path, mirror: Mirror) -> None:
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    trainer = trainer_of(tmp_path, weight=weight)
    trainer.kept = {"weight": weight.clone()}
    unfounded = trainer.write(base="7")
    with pytest.raises(DeltaError, match=r"changes of 7, and here is nothing"):
        take(mirror, unfounded)
    take(mirror, trainer.write())
    weight[3] = 1
    missed = trainer.changes()
    weight[4] = 1
    late = trainer.changes()
    with pytest.raises(DeltaError, match=f"changes of {missed.name}"):
        take(mirror, late)
    assert not load_file(mirror.folder / FILE)["weight"].any()
    for folder in (missed, late):
        take(mirror, folder)
    assert holds(mirror, trainer.weights)


def test_a_copy_that_was_damaged_is_found_and_made_anew_from_whole_weights(tmp_path: Path, mirror: Mirror) -> None:
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    trainer = trainer_of(tmp_path, weight=weight)
    take(mirror, trainer.write())
    File(mirror.folder / FILE).bits("weight")[500] ^= 1
    weight[3] = 1
    with pytest.raises(DeltaError, match="weight is not bit for bit what the trainer has"):
        take(mirror, trainer.changes())
    assert mirror.id == ""
    weight[4] = 1
    with pytest.raises(DeltaError, match="here is nothing"):
        take(mirror, trainer.changes())
    take(mirror, trainer.write())
    assert holds(mirror, trainer.weights)


WRONG = ["too far", "too few", "too short", "too wide", "unknown", "no gaps"]


def test_damage_is_found_in_a_weight_that_has_not_changed(tmp_path: Path, mirror: Mirror) -> None:
    trainer = trainer_of(tmp_path, weight=torch.zeros(1000), frozen=torch.zeros(1000))
    take(mirror, trainer.write())
    File(mirror.folder / FILE).bits("frozen")[500] ^= 1
    trainer.weights["weight"][3] = 1
    with pytest.raises(DeltaError, match="frozen is not bit for bit"):
        take(mirror, trainer.changes())


def test_whole_weights_that_cannot_be_copied_leave_those_that_are_there(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, weight=torch.zeros(1000))
    take(mirror, trainer.write())
    before = trainer.id, dict(trainer.weights)
    trainer.weights["weight"] = torch.ones(1000)
    folder = trainer.write()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(DeltaError, match="GB free, and a copy needs"):
            take(mirror, folder)
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DeltaError, match="weight is not bit for bit"):
        take(mirror, folder)
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("/etc/hostname")
    with pytest.raises(DeltaError, match="is not a file"):
        take(mirror, folder)
    assert mirror.id == before[0]
    assert holds(mirror, before[1])
    assert len(list(mirror.folder.parent.iterdir())) == 1


def test_a_folder_of_other_weights_than_was_said_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    folder = trainer_of(tmp_path, weight=torch.zeros(10)).write()
    with pytest.raises(DeltaError, match="has the weights 0, and those should be 1"):
        mirror.update(folder, "1")


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b'{"weight":1}', b'{"weight":{"shape":[1]}}', b"\xff"])
def test_a_copy_with_a_header_that_is_none_is_damaged(tmp_path: Path, mirror: Mirror, header: bytes) -> None:
    trainer = trainer_of(tmp_path, weight=torch.zeros(1000))
    take(mirror, trainer.write())
    (mirror.folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    trainer.weights["weight"][3] = 1
    folder = trainer.changes()
    with pytest.raises(DeltaError):
        take(mirror, folder)
    take(mirror, trainer.write())
    assert holds(mirror, trainer.weights)


def test_a_path_that_is_none_is_refused(mirror: Mirror) -> None:
    for path in ("a\0b", "", "/dev/null", "/no/such"):
        with pytest.raises(DeltaError):
            mirror.update(Path(path), "1")


def damage(folder: Path, how: str) -> None:
    changes = load_file(folder / FILE)
    if how == "cut":
        (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1])
    elif how == "gone":
        (folder / FILE).unlink()
    elif how == "too far":
        changes["weight:gaps"] = changes["weight:gaps"].to(torch.int32).add(1000).to(torch.uint16)
    elif how == "too few":
        changes["weight:bits"] = changes["weight:bits"][:-1].clone()
    elif how == "too short":
        changes["weight:whole"] = changes.pop("weight:bits")
    elif how == "too wide":
        changes["weight:bits"] = changes["weight:bits"].to(torch.int32)
    elif how == "unknown":
        changes["other:whole"] = changes.pop("weight:bits")
    elif how == "no gaps":
        del changes["weight:gaps"]
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    elif how == "no json":
        (folder / MANIFEST).write_text("{")
    elif how == "outside":
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["sums"] = {f"../{FILE}": manifest["sums"][FILE]}
        (folder / MANIFEST).write_text(json.dumps(manifest))
    if how in WRONG:
        save_file(changes, folder / FILE)


@pytest.mark.parametrize("how", ["cut", "gone", "no manifest", "no json", "outside", *WRONG])
def test_a_damaged_folder_is_refused_and_whole_weights_mend_the_copy(tmp_path: Path, mirror: Mirror, how: str) -> None:
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    trainer = trainer_of(tmp_path, weight=weight)
    take(mirror, trainer.write())
    weight[::10] = 1
    folder = trainer.changes()
    damage(folder, how)
    with pytest.raises(DeltaError):
        take(mirror, folder)
    take(mirror, trainer.write())
    assert holds(mirror, trainer.weights)


def test_whole_weights_leave_nothing_of_those_before_in_the_copy(tmp_path: Path, mirror: Mirror) -> None:
    trainer = trainer_of(tmp_path, weight=torch.zeros(10))
    folder = trainer.write()
    take(mirror, folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    before = mirror.folder
    take(mirror, trainer.write())
    assert [path.name for path in mirror.folder.iterdir()] == [FILE]
    assert before.exists()  # SGLang may still read it
    take(mirror, trainer.changes())
    assert not before.exists()
