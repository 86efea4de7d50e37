"""Where a LoRA adapter comes from: its tensors alone, under the names that PEFT saves them by."""

from __future__ import annotations

import re
from typing import Any

from sglrollout.errors import ConfigError
from sglrollout.weights.sources import FSDPSource, Weight

_TENSOR = re.compile(r"^(?P<module>.+)\.(?P<kind>lora_[AB]|lora_embedding_[AB])\.(?P<adapter>[^.]+)(?P<end>\.weight)?$")
_GOES_WITH = {"q_proj": "v_proj", "v_proj": "q_proj", "k_proj": "q_proj", "up_proj": "gate_proj"}
"""SGLang has some projections as one, and takes one on the left only with the one on the right."""


_NOT_TAKEN = (
    *("use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save", "trainable_token_indices"),
    *("alora_invocation_tokens", "layer_replication"),
)
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


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
        ConfigError: of ``adapter``, ``config`` or ``module``: there is no such adapter, or it has what SGLang cannot
            do (DoRA, other ranks or scales for some modules, biases), or more is trained than its matrices.
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
        modules = {name.partition(".lora_")[0] for name in shapes}
        for parent, target in sorted(module.rpartition(".")[::2] for module in modules):
            other = _GOES_WITH.get(target)
            if other is not None and f"{parent}.{other}" not in modules:
                rule = f"must go with {other} in {parent}: SGLang has them as one"
                raise ConfigError("config.target_modules", target, rule)
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and self._name(name) is None:
                raise ConfigError("module", name, f"is trained, and no LoRA matrix of {self.adapter!r}: freeze it")


def _settings(module: Any, adapter: str, config: Any) -> dict[str, Any]:
    if config is None:
        config = getattr(module, "peft_config", {}).get(adapter)
        if config is None:
            raise ConfigError("config", None, "must be given: the module has no peft_config of this adapter")
    if not isinstance(config, dict) and not hasattr(config, "to_dict"):
        raise ConfigError("config", config, "must be a LoraConfig of PEFT, or a mapping with r and lora_alpha")
    settings: dict[str, Any] = dict(config if isinstance(config, dict) else config.to_dict())
    for name in ("r", "lora_alpha"):
        if not isinstance(settings.get(name), (int, float)) or settings[name] <= 0:
            raise ConfigError(f"config.{name}", settings.get(name), "must be a number greater than 0")
    for name in _NOT_TAKEN:
        if settings.get(name):
            raise ConfigError(f"config.{name}", settings[name], "must not be set: SGLang cannot do it")
    if settings.get("bias", "none") != "none":
        raise ConfigError("config.bias", settings["bias"], 'must be "none": an adapter in SGLang has no biases')
    beginning = settings.get("init_lora_weights", True)
    if isinstance(beginning, str) and beginning.startswith(_CHANGE_THE_BASE):
        rule = "must leave the base model as it is in the checkpoint, which engines have"
        raise ConfigError("config.init_lora_weights", beginning, rule)
    return settings


def _target(name: str) -> str:
    """``q_proj`` of a tensor's name."""
    return re.split(r"\.lora_", name)[0].rpartition(".")[2]
