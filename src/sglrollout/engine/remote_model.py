"""What a server does not say of its model, from the files of the rollout's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglrollout.config import RolloutConfig
from sglrollout.engine.remote_server import ModelFacts


def facts_of(config: RolloutConfig | None) -> ModelFacts:
    """Vocabulary, end tokens and kind of model. It may load from the Hub: call it on a worker thread."""
    if config is None:
        return ModelFacts(problem="no model is configured")
    try:
        model = _read(config, "config.json")
        generation = _read(config, "generation_config.json", optional=True)
        text = model.get("text_config") or model
        ends = _ids(text.get("eos_token_id")) | _ids(generation.get("eos_token_id"))
        return ModelFacts(int(text["vocab_size"]), tuple(sorted(ends)), tuple(model.get("architectures") or ()))
    except Exception as error:  # whatever a Hub's client raises
        return ModelFacts(problem=f"the configuration of {config.model} cannot be read ({type(error).__name__})")


def _read(config: RolloutConfig, name: str, optional: bool = False) -> dict[str, Any]:
    path = Path(config.model, name)
    if not Path(config.model).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = Path(hf_hub_download(config.model, name, revision=config.revision))
        except EntryNotFoundError:
            if optional:
                return {}
            raise
    if optional and not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _ids(value: Any) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)
