"""Every message between an :class:`EngineClient` and its :class:`EngineHost`.

Messages are msgspec structs in msgpack, tagged maps; the parts that repeat inside one are arrays on the wire (field
names are not sent). ``PROTOCOL`` goes up with every change here; both ends refuse another number.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from sglrollout.boxes import Box

PROTOCOL = 6


# ---------------------------------------------------------------- both ways


class Hello(msgspec.Struct, tag="hello"):
    """The first message in each direction."""

    protocol: int
    pid: int
    library_version: str


# ---------------------------------------------------------------- client to host


class Launch(msgspec.Struct, tag="launch"):
    """Build the engine. ``engine_args`` are arguments of SGLang's ``ServerArgs``, already in its names.

    ``cpu_cores`` is empty on a GPU; on a CPU it lists the cores this engine may use.
    """

    engine: str
    engine_args: dict[str, Any]
    fast_outputs: bool
    cpu_cores: list[int]
    scratch_dir: str


class Generate(msgspec.Struct, tag="generate"):
    """Start one sample. ``sampling`` holds our names and only what differs from the defaults.

    ``chunk_tokens`` 0 means: nothing until it is finished is needed (the host may still send parts).
    """

    request_id: int
    prompt_ids: list[int]
    sampling: dict[str, Any]
    chunk_tokens: int


class Abort(msgspec.Struct, tag="abort"):
    """End these requests; each is still answered by a last :class:`Output`."""

    request_ids: list[int]


CommandName: TypeAlias = Literal[
    "flush_cache",
    "pause",
    "resume",
    "describe_weights",
    "attach_weights",
    "detach_weights",
    "load_weights",
    "begin_portable",
    "load_portable",
    "end_portable",
    "checksum_weights",
    "weights_size",
    "export_weights",
    "drop_export",
    "adopt_weights",
    "load_adapter",
    "sleep",
    "wake",
    "memory",
    "parse_tool_calls",
]


RemoteCommandName: TypeAlias = Literal[
    "init_group",
    "destroy_group",
    "receive_weights",
    "begin_update",
    "end_update",
    "load_from_disk",
    "mirrors",
    "update_mirror",
    "load_mirror",
]
"""What a remote engine can do besides: it gets weights by NCCL, or from a disk that it shares, all or what changed."""

HOST_ALONE: CommandName = "parse_tool_calls"
"""The command that a host carries out without SGLang's processes: what it takes says nothing of them."""


class Command(msgspec.Struct, tag="command"):
    """Run a control method of the host; answered by a :class:`Reply` with the same ``command_id``."""

    command_id: int
    name: CommandName
    arguments: dict[str, Any] = {}


class WeightSpec(msgspec.Struct, array_like=True, frozen=True):
    """A weight that a trainer will send, under its name in the checkpoint. ``dtype`` is torch's name of it.

    ``aliases`` are other names of the same memory. An engine may ignore what is ``optional``.
    """

    name: str
    shape: list[int]
    dtype: str
    aliases: list[str] = []
    optional: bool = False


class WeightReport(msgspec.Struct, frozen=True):
    """What a TP rank says to a list of :class:`WeightSpec`: its parameters' dtypes, by weight, and what is wrong.

    ``copies`` are, by weight, the boxes that this TP rank takes of it. ``unwritten`` are missing parameters that are
    allowed to be. ``unsuited`` says why this model cannot be loaded by copying, and is empty when it can.
    """

    tp_rank: int
    dtypes: list[str]
    copies: list[list[Box]]
    unexpected: list[str]
    missing: list[str]
    unwritten: list[str]
    duplicates: list[str]
    mismatched: list[str]
    unsuited: str


class Stop(msgspec.Struct, tag="stop"):
    """End the engine and every process and file it made, then close the channel."""


ToHost: TypeAlias = Hello | Launch | Generate | Abort | Command | Stop


# ---------------------------------------------------------------- host to client


class EngineInfo(msgspec.Struct, tag="ready", frozen=True):
    """The engine is up. Lengths are in tokens."""

    sglang_version: str
    pid: int
    child_pids: list[int]
    context_length: int
    max_prompt_tokens: int
    vocab_size: int
    max_running_requests: int
    max_total_tokens: int
    eos_token_ids: list[int]
    fast_outputs: bool
    deterministic: bool
    has_tokenizer: bool
    memory_saver: bool
    keeps_weights: bool
    """Whether weights come back from a sleep as they were (SGLang's ``enable_weights_cpu_backup``)."""
    tp_size: int
    lora: bool
    weight_version: int
    start_s: float
    warnings: list[str] = []
    lora_rank: int = 0
    """Of the largest adapter that it takes; 0 where that is not known."""
    remote: bool = False
    """Whether it is a server that others started; its weights are not to be had."""


class LaunchFailed(msgspec.Struct, tag="launch_failed"):
    """The engine did not come up."""

    reason: str


class Finish(msgspec.Struct, array_like=True):
    """How a request ended. ``reason`` is stop, length, abort or error."""

    reason: str
    stop_match: str | int | None = None
    message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Output(msgspec.Struct, array_like=True):
    """New tokens of one request, and its end if it ended.

    ``logprobs`` has as many entries as ``token_ids``, or is ``None`` when they were not asked for.
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[float] | None
    finish: Finish | None = None


class Outputs(msgspec.Struct, tag="outputs"):
    """What one engine step produced, for all its requests. ``weight_version`` is that of this step's tokens."""

    weight_version: int
    outputs: list[Output]


class EncodedOutputs(msgspec.Struct, tag="outputs"):
    """:class:`Outputs` as the host forwards them: encoded by the scheduler already."""

    weight_version: int
    outputs: msgspec.Raw


class Load(msgspec.Struct, tag="load", frozen=True):
    """The engine's own account of its load. ``kv_usage`` and ``cache_hit_rate`` are fractions in [0, 1].

    ``num_inflight`` counts the requests the host has given to SGLang and not answered, ``num_running`` and
    ``num_waiting`` are the scheduler's (a snapshot it publishes every few steps, the last one at ``published_s`` on its
    clock).
    """

    num_inflight: int
    num_running: int
    num_waiting: int
    kv_usage: float
    cache_hit_rate: float
    tokens_per_s: float
    published_s: float = 0.0

    def says_the_same_as(self, other: Load) -> bool:
        """Whether only the time is another."""
        return msgspec.structs.replace(other, published_s=self.published_s) == self


class Reply(msgspec.Struct, tag="reply"):
    """Answer to a :class:`Command`: ``error`` is empty when it succeeded.

    ``timed_out``: the host waited for SGLang in vain.
    """

    command_id: int
    error: str = ""
    timed_out: bool = False
    value: dict[str, Any] = {}


class Died(msgspec.Struct, tag="died"):
    """A process of the engine ended, or the host cannot go on. The channel closes after this."""

    reason: str


FromHost: TypeAlias = Hello | EngineInfo | LaunchFailed | Outputs | Load | Reply | Died

SentByHost: TypeAlias = FromHost | EncodedOutputs
"""The same messages as the host has them: outputs may be encoded before it sends them."""
