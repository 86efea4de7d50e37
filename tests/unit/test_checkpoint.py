"""With servers alone, which do not tell their parameters, names are held against the checkpoint's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sglrollout as sr
from sglrollout.testing import ScriptedEngine
from sglrollout.weights.checkpoint import names_in
from tests.remote_engine import RemoteEngine

NAMES = ("model.embed.weight", "model.layers.0.up.weight", "model.norm.weight")


def checkpoint(folder: Path, names: tuple[str, ...] = NAMES, *, in_parts: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    if in_parts:
        weight_map = {name: f"model-{i}-of-{len(names)}.safetensors" for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        save_file({name: torch.zeros(2) for name in names}, folder / "model.safetensors")
    return folder


async def sync(model: Path, sent: Any, *engines: ScriptedEngine) -> None:
    """Twice, with weights of these names or those of a source."""
    config: dict[str, Any] = {"engine_args": {"skip_tokenizer_init": True}, "progress": False, "max_restarts": 0}
    source = sent if hasattr(sent, "weights") else sr.TensorSource({name: torch.ones(2) for name in sent})
    async with (
        sr.AsyncRolloutEngine(str(model), engines=engines or [RemoteEngine("remote-0")], **config) as rollout,
        sr.WeightSyncer(rollout, source, timeout_s=5) as syncer,
    ):
        for _ in range(2):
            await syncer.sync()


@pytest.mark.parametrize("in_parts", [False, True])
async def test_weights_of_which_the_checkpoint_has_none_are_refused_before_anything_is_sent(
    in_parts: bool, tmp_path: Path
) -> None:
    engine = RemoteEngine("remote-0")
    wrapped = [f"base_model.{name}" for name in NAMES]
    with pytest.raises(sr.WeightNamesError, match=r"not those of .*model, which the servers have") as raised:
        await sync(checkpoint(tmp_path / "model", in_parts=in_parts), wrapped, engine)
    assert raised.value.unexpected == tuple(wrapped)
    assert "receive_weights" not in engine.commands


@pytest.mark.parametrize("in_parts", [False, True])
async def test_some_that_differ_are_sent_with_one_warning(
    in_parts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = RemoteEngine("remote-0")
    with caplog.at_level(logging.WARNING, "sglrollout.weights"):
        await sync(checkpoint(tmp_path / "model", in_parts=in_parts), [*NAMES[:2], "model.extra.weight"], engine)
    assert set(engine.received) >= {*NAMES[:2], "model.extra.weight"}
    (record,) = caplog.records
    assert "not in it (1): model.extra.weight; in it and not sent (1): model.norm.weight" in record.message


@pytest.mark.parametrize(
    "names",
    [
        NAMES,
        [name.replace("model.", "model.language_model.") for name in NAMES],
        [name.removeprefix("model.") for name in NAMES],
    ],
)
async def test_the_same_names_are_no_news_in_any_layout_that_transformers_has(
    names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sglrollout.weights"):
        await sync(checkpoint(tmp_path / "model"), names)
    assert not caplog.records


async def test_an_engine_that_knows_its_names_is_asked_and_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote, folder = RemoteEngine("remote-0"), checkpoint(tmp_path / "model")
    with caplog.at_level(logging.WARNING, "sglrollout.weights"):
        await sync(folder, ["another.name"], ScriptedEngine("engine-0"), remote)
    assert "another.name" in remote.received
    assert not caplog.records


async def test_a_tied_weight_may_be_in_the_checkpoint_under_either_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Tied(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

    with caplog.at_level(logging.WARNING, "sglrollout.weights"):
        for name in ("embed.weight", "head.weight"):
            await sync(checkpoint(tmp_path / name, (name,)), sr.ModuleSource(Tied()))
    assert not caplog.records


async def test_without_the_checkpoints_files_nothing_is_known_and_nothing_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    await sync(folder, ["anything"])
    (folder / "model.safetensors").unlink()
    await sync(folder, ["anything"])
    assert names_in("no such/model id!", None) == frozenset()


def test_a_model_of_the_hub_is_looked_for_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    checkpoint(repository / "snapshots" / "abc", in_parts=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert names_in("org/name", None) == frozenset(NAMES)
    assert names_in("org/other", None) == frozenset()
