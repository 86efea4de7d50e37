"""What every way shares: model shapes with random weights, engine arguments, and prompts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Device = Literal["cpu", "cuda"]

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen2.5-7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}

_SHORTEST_CONTEXT = 1024
_LARGEST_GRAPH = 1024
_OPTION_OF_ARG = {
    "model_path": "model",
    "device": "device",
    "dtype": "dtype",
    "mem_fraction_static": "mem_fraction",
    "context_length": "context_length",
    "random_seed": "seed",
    "load_format": "load_format",
    "log_level": "log_level",
}
"""SGLang's argument to the option of ``RolloutConfig`` that sets it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every way is asked to do.

    Attributes:
        repeats: measured runs of each row at most, after a warm-up.
        row_budget_s: a row whose runs took so many seconds in all is not repeated again.
        extra_rows: also the rows that answer no target: one batch call, and server-sent events by 8 tokens.
        profile_dir: where profiles of the library's caller go, if wanted.
    """

    device: Device
    shape: str
    model_dir: str
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    repeats: int
    row_budget_s: float
    max_inflight: int | Literal["auto"]
    extra_rows: bool
    profile_dir: str | None

    @property
    def warmup_tokens(self) -> int:
        """Enough to reach every batch size and path once."""
        return min(self.new_tokens, 32)

    def prompts(self, seed: int) -> list[list[int]]:
        """Random token ids, ``num_prompts`` of ``prompt_tokens``; never those of another seed, so that no run finds
        its prompts in the prefix cache."""
        rng, vocab = random.Random(seed), SHAPES[self.shape]["vocab_size"]
        return [[rng.randrange(2, vocab) for _ in range(self.prompt_tokens)] for _ in range(self.num_prompts)]

    def engine_args(self) -> dict[str, Any]:
        """SGLang's arguments, the same for every way."""
        args: dict[str, Any] = {
            "model_path": self.model_dir,
            "device": self.device,
            "dtype": "float32" if self.device == "cpu" and self.shape == "tiny" else "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "context_length": max(_SHORTEST_CONTEXT, self.prompt_tokens + self.new_tokens + 16),
            "random_seed": 0,
            "log_level": "error",
        }
        if self.device == "cpu":
            args |= {"attention_backend": "torch_native", "disable_cuda_graph": True, "max_total_tokens": 32768}
        else:
            args |= {
                "attention_backend": "triton",
                "sampling_backend": "pytorch",
                "disable_prefill_cuda_graph": True,
                "cuda_graph_max_bs_decode": min(self.num_prompts, _LARGEST_GRAPH),
                "mem_fraction_static": 0.8,
            }
        return args

    def rollout_options(self) -> dict[str, Any]:
        """The same as options of ``RolloutConfig``."""
        args = self.engine_args()
        typed = {option: args.pop(name) for name, option in _OPTION_OF_ARG.items() if name in args}
        return {
            **typed,
            "num_engines": 1,
            "max_inflight": self.max_inflight,
            "progress": False,
            "engine_args": args,
        }


def write_model(directory: Path, shape: str) -> None:
    """A config.json, which is all that SGLang needs for random weights."""
    config = {**_QWEN2, **SHAPES[shape], "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def sampling_params(num_tokens: int, stream_interval: int | None = None) -> dict[str, Any]:
    """SGLang's sampling parameters: exactly ``num_tokens`` tokens at temperature 1."""
    params: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 1.0}
    return params if stream_interval is None else {**params, "stream_interval": stream_interval}
