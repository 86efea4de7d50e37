"""Which of SGLang's arguments a user may pass through ``engine_args``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from sglrollout._options import nearest
from sglrollout.errors import ConfigError

OPTION_FOR = {
    "model_path": "model",
    "model": "model",
    "tokenizer_path": "tokenizer",
    "tokenizer": "tokenizer",
    "revision": "revision",
    "trust_remote_code": "trust_remote_code",
    "tp_size": "tp_size",
    "tensor_parallel_size": "tp_size",
    "device": "device",
    "base_gpu_id": "devices",
    "gpu_id_step": "devices",
    "dtype": "dtype",
    "mem_fraction_static": "mem_fraction",
    "context_length": "context_length",
    "random_seed": "seed",
    "enable_deterministic_inference": "deterministic",
    "enable_memory_saver": "memory_saver",
    "stream_interval": "chunk_tokens",
    "load_format": "load_format",
    "quantization": "quantization",
    "max_lora_rank": "lora_rank",
    "lora_target_modules": "lora_target_modules",
    "log_level": "log_level",
}
"""SGLang's name of an argument that a typed option sets, to the option's name."""

_ONE_ONLY = {
    "dp_size": "use num_engines for data parallelism, as weight updates fail with SGLang's own",
    "data_parallel_size": "use num_engines for data parallelism, as weight updates fail with SGLang's own",
    "nnodes": "use remote engines for more than one machine",
    "pp_size": "an engine takes tp_size devices and no more",
    "pipeline_parallel_size": "an engine takes tp_size devices and no more",
}

_OWNED = frozenset(
    {
        "custom_sigquit_handler",
        "incremental_streaming_output",
        "host",
        "port",
        "api_key",
        "nccl_port",
        "dist_init_addr",
        "node_rank",
        "tokenizer_worker_num",
        "detokenizer_worker_num",
        "weight_version",
    }
)


def refuse_taken(engine_args: Mapping[str, object]) -> None:
    """Refuse names that a typed option sets or that are sglrollout's own, and values that cannot be sent to a host.

    Raises:
        ConfigError: of ``engine_args.<name>``.
    """
    for name, value in engine_args.items():
        field = f"engine_args.{name}"
        if name in OPTION_FOR:
            raise ConfigError(field, value, f"is set by the option {OPTION_FOR[name]}; use that instead")
        if name in _OWNED:
            raise ConfigError(field, value, "is sglrollout's own to set and cannot be given")
        if name in _ONE_ONLY and value != 1:
            raise ConfigError(field, value, f"must be 1 ({_ONE_ONLY[name]})")
        if not _is_plain(value):
            raise ConfigError(field, value, "must be plain data (None, bool, finite number, string, list or mapping)")


def check_engine_args(engine_args: Mapping[str, object], known: Collection[str], version: str) -> None:
    """Refuse names that the installed SGLang does not know.

    Args:
        engine_args: what the user gave.
        known: the names of the installed ``ServerArgs``.
        version: the installed SGLang's version, for the message.

    Raises:
        ConfigError: of ``engine_args.<name>``, with the nearest known name.
    """
    for name, value in engine_args.items():
        if name not in known:
            match = nearest(name, known)
            hint = f' (did you mean "{match}"?)' if match else ""
            raise ConfigError(
                f"engine_args.{name}", value, f"is not an argument of the installed SGLang {version}{hint}"
            )


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, str))
