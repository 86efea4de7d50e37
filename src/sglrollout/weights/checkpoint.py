"""Which weights a model's checkpoint has: what servers take, which do not tell their parameters.

SGLang loads any model from the names in its checkpoint, and ignores a name that it does not know.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from sglrollout.errors import WeightNamesError, listed
from sglrollout.wire.messages import WeightSpec

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_WRAPPERS = ("model", "language_model")
_SHOWN = 5
_log = logging.getLogger("sglrollout.weights")


def names_in(model: str, revision: str | None) -> frozenset[str]:
    """Names of a checkpoint's weights, from safetensors files on this machine; none where it has none there.

    Args:
        model: a folder, or an id on the Hub, of which the cache is looked at.
    """
    try:
        index = _find(model, _INDEX, revision)
        if index is not None:
            return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        whole = _find(model, _WHOLE, revision)
        return _names_in_file(whole) if whole is not None else frozenset()
    except Exception as error:  # whatever the Hub's client and the files' reader raise: then nothing is known
        _log.debug("the names of the weights in %s cannot be read: %s", model, error)
        return frozenset()


def refuse_others(weights: Sequence[WeightSpec], known: frozenset[str], model: str) -> str:
    """Hold a trainer's weights against a checkpoint's.

    A few differences are no error: a server may know other names as well, and not need all.

    Returns:
        them, in words; empty where there are none.

    Raises:
        WeightNamesError: not one is in the checkpoint.
    """
    sent = [{_bare(name) for name in (weight.name, *weight.aliases)} for weight in weights]
    wanted = {_bare(name): name for name in sorted(known)}
    unexpected = [weight.name for weight, names in zip(weights, sent, strict=True) if wanted.keys().isdisjoint(names)]
    if len(unexpected) == len(weights):
        raise WeightNamesError(unexpected=unexpected, checkpoint=model)
    all_sent = set().union(*sent)
    missing = [name for bare, name in wanted.items() if bare not in all_sent]
    differences = [
        f"{what} ({len(names)}): {listed(names, _SHOWN)}"
        for what, names in (("not in it", unexpected), ("in it and not sent", missing))
        if names
    ]
    return f"the trainer's weights and those in {model} differ: {'; '.join(differences)}" if differences else ""


def _bare(name: str) -> str:
    """Without the parts that transformers puts into one version's names and not into another's, as SGLang knows."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _find(model: str, name: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        path = Path(model, name)
        return path if path.exists() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, name, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


def _names_in_file(path: Path) -> frozenset[str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return frozenset(file.keys())
