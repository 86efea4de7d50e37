"""From what the user set to what each engine is launched with."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from sglrollout.config import RolloutConfig, check_engine_args
from sglrollout.engine.client import EngineClient
from sglrollout.engine.installed import server_arg_names, sglang_version
from sglrollout.engine.placement import Placement, cpu_cores, plan
from sglrollout.errors import ConfigError
from sglrollout.wire.messages import Launch

_CPU_DEFAULTS = {
    **{"attention_backend": "torch_native", "disable_cuda_graph": True, "max_total_tokens": 32768},
    **{"lora_backend": "torch_native"},
    **{"sleep_on_idle": True},  # else an idle engine's scheduler keeps a whole core busy, which others compute on
}


def build_engines(config: RolloutConfig) -> list[EngineClient]:
    """The engines of ``config``, checked against this machine and the installed SGLang, and not started.

    It may ask the driver for its devices, which takes a moment: call it on a worker thread.

    Raises:
        UnsupportedVersionError, ConfigError, PlacementError: before anything was started.
    """
    if config.num_engines == 0:
        return []  # SGLang need not be installed
    check_installed(config)
    placements = plan(config)
    cores = cpu_cores(config) if placements[0].device == "cpu" else ()
    return [
        EngineClient(
            f"engine-{index}",
            _launch(config, placement, index, list(cores[index]) if cores else []),
            [device.uuid for device in placement.devices],
            isolation=config.isolation,
            start_timeout_s=config.start_timeout_s,
            close_timeout_s=config.close_timeout_s,
            control_timeout_s=config.control_timeout_s,
            log_dir=config.log_dir,
        )
        for index, placement in enumerate(placements)
    ]


def check_installed(config: RolloutConfig) -> None:
    """
    Raises:
        UnsupportedVersionError: of the installed SGLang.
        ConfigError: it does not know an argument.
    """
    version, known = sglang_version(), server_arg_names()
    if known:
        check_engine_args(config.engine_args, known, version)


def _launch(config: RolloutConfig, placement: Placement, index: int, cores: list[int]) -> Launch:
    return Launch(
        engine=f"engine-{index}",
        engine_args=server_args(config, placement, index),
        fast_outputs=config.fast_outputs,
        cpu_cores=cores,
        scratch_dir="",
    )


def server_args(config: RolloutConfig, placement: Placement, index: int) -> dict[str, Any]:
    """Arguments of SGLang's ``ServerArgs`` for engine ``index``; only those that differ from SGLang's defaults."""
    typed: dict[str, Any] = {
        "model_path": config.model,
        "tokenizer_path": config.tokenizer,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code or None,
        "tp_size": config.tp_size,
        "device": placement.device,
        "dtype": config.dtype,
        "mem_fraction_static": config.mem_fraction,
        "context_length": config.context_length,
        "random_seed": None if config.seed is None else config.seed + index,
        "enable_deterministic_inference": config.deterministic or None,
        "enable_memory_saver": config.memory_saver or None,
        "load_format": config.load_format,
        "quantization": config.quantization,
        "log_level": config.log_level,
    }
    if config.lora_rank is not None:
        typed |= {"enable_lora": True, "max_lora_rank": config.lora_rank}
        typed["lora_target_modules"] = list(config.lora_target_modules)
    if config.isolation == "thread" and placement.devices:
        typed |= _by_index(config, placement)
    defaults = _CPU_DEFAULTS if placement.device == "cpu" else {}
    given = {name: value for name, value in typed.items() if value is not None}
    return {**defaults, **given, **config.engine_args}


def _by_index(config: RolloutConfig, placement: Placement) -> dict[str, int]:
    """The devices as SGLang can be told of them where it shares the user's CUDA_VISIBLE_DEVICES."""
    indices = [device.index for device in placement.devices]
    steps = {later - earlier for earlier, later in pairwise(indices)} or {1}
    if len(steps) > 1 or min(steps) < 1:
        rule = 'must be evenly spaced and in order with isolation="thread", as SGLang takes a first device and a step'
        raise ConfigError("devices", config.devices, rule)
    return {"base_gpu_id": indices[0], "gpu_id_step": steps.pop()}
