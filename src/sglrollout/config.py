"""Everything a user sets, validated before anything starts.  Imports errors and nothing else of ours."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sglrollout._engine_args import OPTION_FOR, check_engine_args, refuse_taken
from sglrollout._options import Options
from sglrollout.errors import ConfigError

__all__ = ["Options", "RolloutConfig", "Sampling", "check_engine_args", "config_of"]

_MAX_SEED = 2**31 - 1
_GRAMMARS = ("json_schema", "regex", "ebnf")


class Sampling(Options, frozen=True):
    """How to sample completions."""

    temperature: float = Field(default=1.0, ge=0, description="Divides the logits; 0 is greedy decoding.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Probability mass to sample from, most likely tokens first."
    )
    top_k: int = Field(
        default=-1, le=2**31 - 1, description="Number of most likely tokens to sample from; -1 is all of them."
    )
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Least probability of a token, relative to the likeliest one's."
    )
    max_new_tokens: int = Field(default=128, ge=1, description="Tokens to sample at most.")
    min_new_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens to sample before a stop token or end of sequence is possible; a stop string still ends it.",
    )
    stop: Sequence[str] = Field(
        default=(), max_length=32, description="Strings that end a completion; a single string is also accepted."
    )
    stop_token_ids: Sequence[int] = Field(
        default=(), description="Token ids that end a completion, besides the model's own."
    )
    ignore_eos: bool = Field(default=False, description="Go on after the model's end-of-sequence token.")
    seed: int | None = Field(
        default=None,
        ge=0,
        le=_MAX_SEED,
        description="Seed of the sampling. Sample i of a group uses seed + i. "
        "It takes effect only with RolloutConfig(deterministic=True).",
    )
    frequency_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Taken from a token's logit for each time it was sampled."
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Taken from a token's logit once it was sampled."
    )
    repetition_penalty: float = Field(
        default=1.0, gt=0, le=2, description="Scales down the logits of tokens seen before; 1 is no penalty."
    )
    logit_bias: dict[int, float] | None = Field(default=None, description="Added to the logits, by token id.")
    json_schema: str | dict[str, object] | None = Field(
        default=None, description="JSON schema that the text must match, as JSON text or as a mapping."
    )
    regex: str | None = Field(default=None, description="Regular expression that the text must match.")
    ebnf: str | None = Field(default=None, description="EBNF grammar that the text must match.")
    lora: str | None = Field(
        default=None,
        description="Name of the LoRA adapter to sample with; an empty one is the base model. "
        "None is the adapter that a weight sync has brought, if one has.",
    )
    logprobs: bool = Field(default=True, description="Return the natural-log probability of every sampled token.")
    skip_special_tokens: bool = Field(default=True, description="Leave special tokens out of the text.")

    def wire(self) -> dict[str, Any]:
        """The non-default options as plain data that msgpack can carry; ``Sampling(**wire)`` gives the same back."""
        return dict(self._plain)

    @cached_property
    def _plain(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.non_defaults().items()}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: Sequence[str]) -> Sequence[str]:
        if "" in value:
            raise ValueError("must not hold an empty string")
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _token_ids(cls, value: Sequence[int]) -> Sequence[int]:
        if any(token_id < 0 for token_id in value):
            raise ValueError("must hold token ids, which are at least 0")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _biased_ids(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        if value and min(value) < 0:
            raise ValueError("must have token ids as keys, which are at least 0")
        return value or None

    @field_validator("top_k")
    @classmethod
    def _top_k_or_all(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError("must be at least 1, or -1 for all tokens")
        return value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_text(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return _dump_schema(value)
        if value is not None and not _is_json_object(value):
            raise ValueError("must be a JSON schema: a mapping, or the JSON text of one")
        return value

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"must be a valid regular expression ({error})") from None
        return value

    @field_validator("stop", "regex", "ebnf", "json_schema", "lora")
    @classmethod
    def _unicode(cls, value: Any) -> Any:
        for text in (value,) if isinstance(value, str) else value or ():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError("must be valid Unicode, without lone surrogates") from None
        return value

    @field_validator("lora")
    @classmethod
    def _empty_or_not_blank(cls, value: str | None) -> str | None:
        return _refuse_blank(value) if value else value

    @field_validator("regex", "ebnf")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        return _refuse_blank(value)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            rule = f"must be at most max_new_tokens ({self.max_new_tokens})"
            raise ConfigError("min_new_tokens", self.min_new_tokens, rule)
        grammars = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(grammars) > 1:
            rule = f"cannot be combined with {grammars[0]} (give at most one of {', '.join(_GRAMMARS)})"
            raise ConfigError(grammars[1], getattr(self, grammars[1]), rule)
        return self


class RolloutConfig(Options, frozen=True):
    """What to run engines of, how many, where, and within which limits."""

    model: str = Field(description="Path of a model directory, or a Hugging Face Hub id.")
    tokenizer: str | None = Field(default=None, description="Path or Hub id of the tokenizer; None is the model's own.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of the model on the Hub.")
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    num_engines: int | None = Field(
        default=None,
        ge=0,
        description="Engines to run here; None is as many as fit the visible devices, and one on a CPU. 0 is for a "
        "rollout of remote engines alone.",
    )
    tp_size: int = Field(default=1, ge=1, description="Tensor-parallel ranks of each engine, a device each.")
    device: Literal["auto", "cuda", "cpu"] = Field(
        default="auto", description="auto is cuda where a GPU is visible, else cpu."
    )
    devices: Sequence[Sequence[int | str]] | None = Field(
        default=None,
        description="The devices of each engine: a list per engine of tp_size indices (as torch counts them in this "
        'process) or UUIDs ("GPU-..."). None takes them in order.',
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="Type of the engine's weights and activations; auto is SGLang's choice: the checkpoint's, or "
        "float16 for a float32 one.",
    )
    mem_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of a device's memory for weights and KV cache; None leaves it to SGLang. "
        "Lower it when a trainer shares the device.",
    )
    context_length: int | None = Field(
        default=None, ge=1, description="Tokens of a prompt and its completion at most; None is the model's own limit."
    )
    seed: int | None = Field(
        default=None, ge=0, le=_MAX_SEED, description="Seed of the engines: engine i uses seed + i. None draws one."
    )
    deterministic: bool = Field(
        default=False, description="SGLang's deterministic inference, slower; Sampling.seed takes effect only with it."
    )
    memory_saver: bool = Field(
        default=False, description="Make engines able to sleep, which gives their GPU memory back."
    )
    isolation: Literal["process", "thread"] = Field(
        default="process",
        description="Where an engine's host runs: a child process each, or a thread of this process (one engine only).",
    )
    max_inflight: int | Literal["auto"] = Field(
        default="auto", description="Samples an engine works on at once; auto adapts to the engine's load."
    )
    max_queued: int = Field(default=65536, ge=1, description="Samples that may wait for a slot, over all engines.")
    chunk_tokens: int = Field(default=8, ge=1, le=1024, description="Tokens per streamed chunk at most.")
    start_timeout_s: float = Field(default=600.0, gt=0, description="Seconds for an engine to come up.")
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds for one sample, waiting included; None is no limit."
    )
    control_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds for an engine to carry out a command, such as a flush."
    )
    failover: Literal["resume", "restart", "none"] = Field(
        default="resume",
        description="What becomes of a sample whose engine dies: another engine goes on from the tokens it has (where "
        "a grammar, a penalty or a stop string does not allow that it begins anew), begins anew, or it fails.",
    )
    max_failovers: int = Field(default=3, ge=0, description="Engines that one sample may lose before it fails.")
    stall_timeout_s: float | None = Field(
        default=120.0,
        gt=0,
        description="Seconds without a sign of progress, while requests run in it, after which an engine is taken to "
        "hang and is ended; until its first tokens it has start_timeout_s. None is never.",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="Times within an hour that an engine which dies is started again; 0 is never. "
        'With isolation="thread" it never is.',
    )
    restart_delay_s: float = Field(
        default=1.0,
        ge=0,
        lt=3600,
        description="Seconds before an engine is started again; they double with each restart within an hour, up to "
        "60.",
    )
    keep_weights_snapshot: bool = Field(
        default=False,
        description="Copy the weights of each sync from an engine to host memory, for restarted engines: without it "
        "they ask another engine, and where there is none wait for the next sync. It takes host memory for one model, "
        "and some of that engine's time after each sync.",
    )
    close_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds for an engine to end by itself before it is killed."
    )
    load_format: str = Field(default="auto", description="How SGLang loads the checkpoint; dummy is random weights.")
    quantization: str | None = Field(
        default=None, description="SGLang's name of a quantization method; None is the model's own."
    )
    lora_rank: int | None = Field(
        default=None,
        ge=1,
        description="Engines take LoRA adapters of up to this rank; None is no LoRA. See LoRASource.",
    )
    lora_target_modules: tuple[str, ...] = Field(
        default=("all",),
        min_length=1,
        description="Modules that adapters may change, by SGLang's names (q_proj, gate_proj, ...); all is every one.",
    )
    log_dir: str | None = Field(
        default=None,
        description="Directory for the engines' logs; None is a temporary one. "
        'With isolation="thread" an engine writes to this process\'s own output instead.',
    )
    timeline_events: int = Field(
        default=20_000,
        ge=0,
        description="Latest samples, and as many changes of engines, that are kept for rollout.timeline(), in about "
        "a quarter of a kilobyte each; 0 keeps none.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log lines to keep."
    )
    progress: bool | None = Field(
        default=None, description="Show progress; None shows it on a terminal or in a notebook, unless CI is set."
    )
    fast_outputs: bool = Field(
        default=True,
        description="Take an engine's outputs a step at a time; False uses SGLang's public path, which is slower.",
    )
    engine_args: dict[str, object] = Field(
        default_factory=dict, description="More arguments for SGLang's ServerArgs, by its names, as plain data."
    )

    @classmethod
    def unknown_rule(cls, name: str) -> str:
        """Also knows SGLang's names of our options, and where its other arguments go."""
        if name in OPTION_FOR:
            return f'is not an option (did you mean "{OPTION_FOR[name]}"?)'
        rule = super().unknown_rule(name)
        return rule if "(" in rule else f"{rule} (SGLang's own arguments go in engine_args)"

    @field_validator("model", "tokenizer")
    @classmethod
    def _model_exists(cls, value: str | None) -> str | None:
        return _local_or_hub(_refuse_blank(value))

    @field_validator("model")
    @classmethod
    def _model_has_config(cls, value: str) -> str:
        if Path(value).exists() and not Path(value, "config.json").is_file():
            raise ValueError("must be a model directory, with a config.json in it")
        return value

    @field_validator("revision", "load_format", "quantization", "log_dir")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        return _refuse_blank(value)

    @field_validator("devices", mode="before")
    @classmethod
    def _device_lists(cls, value: Any) -> Any:
        lists = isinstance(value, (list, tuple)) and all(isinstance(item, (list, tuple)) for item in value)
        if value is not None and (not lists or not value):
            raise ValueError("must be a list of device lists, one for each engine, such as [[0], [1]]")
        entries = [entry for item in value or () for entry in item]
        if not all(_is_device(entry) for entry in entries):
            raise ValueError('must hold device indices, at least 0, or UUIDs that start with "GPU-" or "MIG-"')
        twice = next((entry for entry in entries if entries.count(entry) > 1), None)
        if twice is not None:
            raise ValueError(f"must not name a device twice, as it does {twice!r}")
        return value

    @field_validator("max_inflight", mode="before")
    @classmethod
    def _inflight_or_auto(cls, value: Any) -> Any:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError('must be an integer of at least 1, or "auto"')
        return value

    @field_validator("engine_args")
    @classmethod
    def _engine_args_are_free(cls, value: dict[str, object]) -> dict[str, object]:
        refuse_taken(value)
        return copy.deepcopy(value)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        self._check_devices()
        self._check_isolation()
        if self.device == "cpu":
            self._check_cpu()
        return self

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if self.device == "cpu":
            raise ConfigError("devices", self.devices, 'cannot be given with device="cpu"')
        if self.num_engines not in (None, len(self.devices)):
            rule = f"must have one list for each of num_engines ({self.num_engines}), and has {len(self.devices)}"
            raise ConfigError("devices", self.devices, rule)
        for number, devices in enumerate(self.devices):
            if len(devices) != self.tp_size:
                rule = f"must have tp_size ({self.tp_size}) devices, and has {len(devices)}"
                raise ConfigError(f"devices.{number}", devices, rule)

    def _check_isolation(self) -> None:
        num_engines = len(self.devices) if self.devices else self.num_engines or 1
        if self.isolation == "thread" and num_engines > 1:
            field = "num_engines" if self.num_engines else "devices"
            rule = 'must be for one engine with isolation="thread": SGLang allows one in a process'
            raise ConfigError(field, getattr(self, field), rule)

    def _check_cpu(self) -> None:
        for field in ("memory_saver", "deterministic"):
            if getattr(self, field):
                raise ConfigError(field, True, "must be False on a CPU: SGLang has it for GPUs alone")


def config_of(
    model: str | os.PathLike[str] | None, config: RolloutConfig | None, options: dict[str, Any]
) -> RolloutConfig:
    """The one configuration that these describe.

    Raises:
        ConfigError: an option is wrong, or is given twice.
    """
    given = options if model is None else {"model": model, **options}
    if config is None:
        return RolloutConfig(**given)
    if given:
        rule = "holds every option, so none may be given beside it: use config.replace(...)"
        raise ConfigError("config", sorted(given), rule)
    return config


def _refuse_blank(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise ValueError("must not be empty")
    return value


def _local_or_hub(value: str | None) -> str | None:
    """Expand ``~``, which SGLang does not, and refuse what is plainly a path and is not there."""
    if value is None:
        return None
    path = os.path.expanduser(value)
    if path.startswith(("./", "../", "/", "~")) and not os.path.exists(path):
        raise ValueError("must be an existing path or a Hugging Face Hub id")
    return path


def _is_device(entry: Any) -> bool:
    if isinstance(entry, str):
        return entry.startswith(("GPU-", "MIG-"))
    return isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0


def _dump_schema(schema: dict[str, object]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"must be made of JSON values alone ({error})") from None


def _is_json_object(text: object) -> bool:
    try:
        return isinstance(text, str) and isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False
