"""Where a LoRA adapter comes from: its tensors alone, under the names that PEFT saves them by."""

from __future__ import annotations

import re
from typing import Any

from sglrollout.errors import ConfigError
from sglrollout.weights.sources import FSDPSource, Weight

_TENSOR = re.compile(r"^(?P<module>.+)\.(?P<kind>lora_[AB]|lora_embedding_[AB])\.(?P<adapter>[^.]+)(?P<end>\.weight)?$")
_GOES_WITH = {"q_proj": "v_proj", "v_proj": "q_proj", "k_proj": "q_proj", "up_proj": "gate_proj"}
"""SGLang has some projections as one, and takes one on the left only with the one on the right."""


class LoRASource:
    """The tensors of a LoRA adapter alone, from a model that PEFT has put it into; sharded by FSDP2 or not.

    Engines have the base model from their start, and need ``RolloutConfig(lora_rank=...)``. All that is sampled after
    a sync is sampled with the adapter, unless :attr:`Sampling.lora` names another one, or is ``""``, the base model.

    Args:
        module: what ``peft.get_peft_model`` returns, or any module with parameters of PEFT's names.
        adapter: PEFT's name of the adapter.
        config: ``r`` and ``lora_alpha``, as PEFT's ``LoraConfig``, or its ``to_dict()``, has them; by default the
            module's own.

    Raises:
        ConfigError: of ``adapter`` or ``config``: there is no such adapter, or it has what SGLang cannot do: DoRA,
            other ranks or scales for some modules, biases, whole modules besides.
    """

    persistent = False

    def __init__(self, module: Any, adapter: str = "default", *, config: Any = None) -> None:
        self.adapter = adapter
        self._module = module
        self._given = _settings(module, adapter, config)
        self._source = FSDPSource(module, rename=self._name)
        shapes = {self._name(name): tuple(parameter.shape) for name, parameter in module.named_parameters()}
        shapes.pop(None, None)
        self._targets = sorted({_target(name) for name in shapes if name is not None})
        self._refuse_what_sglang_cannot_do(shapes)

    @property
    def config(self) -> dict[str, Any]:
        """What SGLang reads of an ``adapter_config.json``."""
        rank, alpha = self._given["r"], self._given["lora_alpha"]
        if self._given.get("use_rslora"):
            alpha *= rank**0.5  # SGLang divides by the rank
        return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": self._targets}

    def weights(self) -> list[Weight]:
        return self._source.weights()

    def changed(self) -> bool:
        return self._source.changed()

    def read(self) -> Any:
        return self._source.read()

    def _name(self, name: str) -> str | None:
        found = _TENSOR.match(name)
        if found is None or found["adapter"] != self.adapter:
            return None
        return f"{found['module']}.{found['kind']}{found['end'] or ''}"

    def _all_names(self) -> list[str]:
        return [name for name, _ in self._module.named_parameters()]

    def _refuse_what_sglang_cannot_do(self, shapes: dict[Any, tuple[int, ...]]) -> None:
        if not shapes:
            known = sorted({found["adapter"] for found in map(_TENSOR.match, self._all_names()) if found})
            raise ConfigError("adapter", self.adapter, f"must be an adapter of this module ({known or 'it has none'})")
        rank = self._given["r"]
        for name, shape in shapes.items():
            own = shape[0 if name.removesuffix(".weight").endswith("A") else -1]
            if own != rank:
                raise ConfigError("config.r", rank, f"must be the rank of every module: that of {name} is {own}")
        for target, other in _GOES_WITH.items():
            if target in self._targets and other not in self._targets:
                raise ConfigError("config.target_modules", target, f"must go with {other}: SGLang has them as one")
        for name in self._all_names():
            if f".lora_magnitude_vector.{self.adapter}" in name or f".modules_to_save.{self.adapter}." in name:
                raise ConfigError("module", name, "is of an adapter, and no LoRA matrix, which SGLang does not take")


def _settings(module: Any, adapter: str, config: Any) -> dict[str, Any]:
    if config is None:
        config = getattr(module, "peft_config", {}).get(adapter)
        if config is None:
            raise ConfigError("config", None, "must be given: the module has no peft_config of this adapter")
    settings: dict[str, Any] = dict(config if isinstance(config, dict) else config.to_dict())
    for name in ("r", "lora_alpha"):
        if not isinstance(settings.get(name), (int, float)) or settings[name] <= 0:
            raise ConfigError(f"config.{name}", settings.get(name), "must be a number greater than 0")
    for name in ("use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save"):
        if settings.get(name):
            raise ConfigError(f"config.{name}", settings[name], "must not be set: SGLang cannot do it")
    return settings


def _target(name: str) -> str:
    """``q_proj`` of a tensor's name."""
    return re.split(r"\.lora_", name)[0].rpartition(".")[2]
