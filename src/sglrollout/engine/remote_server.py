"""One SGLang HTTP server: what it says of itself and of its load, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sglrollout.engine.http import Http, UnreachableError, Verify, decoded, quoted
from sglrollout.engine.installed import SUPPORTED_VERSIONS, support
from sglrollout.engine.mirror import ROUTE as MIRROR_ROUTE
from sglrollout.engine.remote_answers import LOADING, version_of
from sglrollout.wire.messages import EngineInfo, Load

_MOST_CONTROL_CONNECTIONS = 16
_UNKNOWN_VOCABULARY = 2**31 - 1


class Access(NamedTuple):
    """How a server is reached; what a user gives for it.

    Attributes:
        api_key: for generation and what a server says of itself.
        admin_api_key: for what it is told, where it has a key of its own for that.
    """

    api_key: str | None
    admin_api_key: str | None
    verify: Verify
    trust_env: bool


class ModelFacts(NamedTuple):
    """What a server does not say of its model, and the checkpoint does."""

    vocab_size: int = _UNKNOWN_VOCABULARY
    eos_token_ids: tuple[int, ...] = ()
    architectures: tuple[str, ...] = ()
    problem: str = ""


class UnsuitableError(Exception):
    """This server cannot be an engine of a pool, with why."""


class NotSGLangError(UnreachableError):
    """What answers there is no SGLang server."""


class _ServerInfo(msgspec.Struct):
    """Of ``/server_info``. What SGLang gives under a name in one version, it may give under none in the next."""

    version: str
    max_req_input_len: int
    max_total_num_tokens: int
    tp_size: int = 1
    dp_size: int = 1
    disaggregation_mode: str | None = None
    skip_tokenizer_init: bool | None = False
    incremental_streaming_output: bool | None = False
    enable_deterministic_inference: bool | None = False
    enable_memory_saver: bool | None = False
    enable_weights_cpu_backup: bool | None = False
    enable_lora: bool | None = None
    lora_paths: Any = None
    max_lora_rank: int | None = None
    internal_states: list[dict[str, Any]] = []


class _ModelInfo(msgspec.Struct):
    """Of ``/model_info``."""

    model_path: str
    weight_version: str | None = None
    is_generation: bool | None = True
    architectures: list[str] | None = None


class ServerLoad(msgspec.Struct):
    """Of ``/v1/loads``: a scheduler's account."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0
    cache_hit_rate: float = 0.0
    gen_throughput: float = 0.0
    timestamp: float = 0.0
    max_running_requests: int = 0


class _Loads(msgspec.Struct):
    loads: list[ServerLoad]


class _Listed(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Listed] = []


class MirrorState(msgspec.Struct):
    """Of :data:`sglrollout.engine.mirror.ROUTE`: which weights a server's copy has, and where."""

    id: str
    folder: str
    refusal: str | None = None


class Facts(NamedTuple):
    """What a server is.

    Attributes:
        label: its weight version, in its own words.
        incremental: streams bring new tokens alone.
    """

    server: _ServerInfo
    model: _ModelInfo
    load: ServerLoad
    context_length: int

    @property
    def label(self) -> str:
        return self.model.weight_version or ""

    @property
    def incremental(self) -> bool:
        return bool(self.server.incremental_streaming_output)


class Server:
    """The control side of one server, which generation cannot starve: its connections are its own."""

    def __init__(self, url: str, access: Access) -> None:
        self.url = url
        self._admin_key = access.admin_api_key
        self._http = Http(
            url,
            access.api_key,
            access.verify,
            most_connections=_MOST_CONTROL_CONNECTIONS,
            trust_env=access.trust_env,
        )

    async def tell(
        self, path: str, body: Any = None, timeout_s: float = 10.0, params: Mapping[str, Any] | None = None
    ) -> bytes:
        """Have it do something; its answer.

        Raises:
            UnreachableError, RefusedError: it did not say that it has.
        """
        body = {} if body is None else body
        return await self._http.call("POST", path, body, params, timeout_s=timeout_s, key=self._admin_key)

    async def parse_tool_calls(self, body: dict[str, Any], timeout_s: float) -> Any:
        """As :meth:`tell`; this is no matter of administration."""
        return decoded(await self._http.call("POST", "/parse_function_call", body, timeout_s=timeout_s))

    async def facts(self, timeout_s: float) -> Facts:
        """What it is.

        Raises:
            UnreachableError, RefusedError: it did not say.
        NotSGLangError: it is none.
        """
        server = await self._read("/server_info", _ServerInfo, timeout_s)
        model = await self._read("/model_info", _ModelInfo, timeout_s)
        models = await self._read("/v1/models", _Models, timeout_s)
        length = next((listed.max_model_len for listed in models.data if listed.max_model_len), None)
        return Facts(server, model, await self.load(timeout_s), length or server.max_req_input_len + 1)

    async def label(self, timeout_s: float) -> str:
        """Its weight version, in its own words."""
        return (await self._read("/model_info", _ModelInfo, timeout_s)).weight_version or ""

    async def mirror(self, timeout_s: float) -> MirrorState:
        """What its copy of its weights has.

        Raises:
            RefusedError: with status 404, it keeps none.
        """
        body = await self._http.call("GET", MIRROR_ROUTE, timeout_s=timeout_s, key=self._admin_key)
        state: MirrorState = self._decoded(body, MIRROR_ROUTE, MirrorState)
        return state

    async def update_mirror(self, folder: str, new_id: str, timeout_s: float) -> MirrorState:
        """Have its copy updated from what a trainer wrote."""
        body = await self.tell(MIRROR_ROUTE, {"folder": folder, "id": new_id}, timeout_s)
        state: MirrorState = self._decoded(body, MIRROR_ROUTE, MirrorState)
        return state

    async def load(self, timeout_s: float) -> ServerLoad:
        """What its scheduler said last of its load."""
        loads = (await self._read("/v1/loads", _Loads, timeout_s, include="core")).loads
        return loads[0] if loads else ServerLoad()

    async def _read(self, path: str, kind: type[Any], timeout_s: float, **params: Any) -> Any:
        return self._decoded(await self._http.call("GET", path, params=params, timeout_s=timeout_s), path, kind)

    def _decoded(self, body: bytes, path: str, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"its {path} is not that of an SGLang server ({error}): {quoted(body)}"
            raise NotSGLangError(message) from None

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()


def describe(facts: Sequence[Facts], model: ModelFacts, start_s: float) -> EngineInfo:
    """What these servers are together: those of one router, all alike, or one alone.

    Raises:
        UnsuitableError: one of them cannot be an engine, or they are not alike.
    """
    for each in facts:
        _check(each, model)
    first = facts[0]
    for what, values in (
        ("SGLang version", {each.server.version for each in facts}),
        ("tp_size", {each.server.tp_size for each in facts}),
        ("incremental_streaming_output", {each.incremental for each in facts}),
    ):
        if len(values) > 1:
            raise UnsuitableError(f"its workers differ in their {what}: {', '.join(map(str, sorted(values)))}")
    server = first.server
    return EngineInfo(
        sglang_version=server.version,
        pid=0,
        child_pids=[],
        context_length=min(each.context_length for each in facts),
        max_prompt_tokens=min(each.server.max_req_input_len for each in facts),
        vocab_size=model.vocab_size,
        max_running_requests=sum(_most_running(each) for each in facts),
        max_total_tokens=min(each.server.max_total_num_tokens for each in facts),
        eos_token_ids=list(model.eos_token_ids),
        fast_outputs=False,
        deterministic=all(each.server.enable_deterministic_inference for each in facts),
        has_tokenizer=not any(each.server.skip_tokenizer_init for each in facts),
        memory_saver=all(each.server.enable_memory_saver for each in facts),
        keeps_weights=all(each.server.enable_weights_cpu_backup for each in facts),
        tp_size=sum(each.server.tp_size for each in facts),
        lora=all(each.server.enable_lora or each.server.lora_paths for each in facts),
        lora_rank=min(each.server.max_lora_rank or 0 for each in facts),
        weight_version=_version(label_of(facts)),
        start_s=start_s,
        warnings=_warnings(first, label_of(facts), model),
        remote=True,
    )


def _check(facts: Facts, model: ModelFacts) -> None:
    server = facts.server
    if support(server.version) == "none":
        first, last = SUPPORTED_VERSIONS[0], SUPPORTED_VERSIONS[-1]
        raise UnsuitableError(f"it runs SGLang {server.version}; this library supports {first} to {last}")
    if facts.model.is_generation is False:
        raise UnsuitableError(f"it serves {facts.model.model_path}, which does not generate (is_generation)")
    if server.dp_size > 1:
        raise UnsuitableError(f"it runs with dp_size={server.dp_size}; give an engine for each replica instead")
    if server.disaggregation_mode not in (None, "null"):
        mode = server.disaggregation_mode
        raise UnsuitableError(f"it is half of an engine (disaggregation_mode={mode!r}): give a whole one")
    served = facts.model.architectures
    if served and model.architectures and not set(served) & set(model.architectures):
        ours = ", ".join(model.architectures)
        raise UnsuitableError(f"it serves {facts.model.model_path}, a {', '.join(served)}; the rollout's is a {ours}")


def _most_running(facts: Facts) -> int:
    stated = [state.get("effective_max_running_requests_per_dp") for state in facts.server.internal_states]
    return next((int(number) for number in stated if number), facts.load.max_running_requests)


def _version(label: str) -> int:
    """-1 is no version: weights that were half replaced."""
    version = version_of(label)
    return -1 if version is None else version


def label_of(facts: Sequence[Facts]) -> str:
    """The weight version of these servers, in their own words; of those that differ, one that is none."""
    labels = {each.label for each in facts}
    return labels.pop() if len(labels) == 1 else LOADING


def _warnings(facts: Facts, label: str, model: ModelFacts) -> list[str]:
    warnings = []
    version = facts.server.version
    if support(version) == "untested":
        warnings.append(f"SGLang {version} was not run with this library (these were: {SUPPORTED_VERSIONS})")
    if label not in ("", "default", LOADING) and not label.isdigit():
        warnings.append(f"its weight version is {label!r}, which counts as 0: the weights that it was started with")
    if model.problem:
        warnings.append(f"{model.problem}: it is left to the server to check token ids")
    return warnings


def merged(loads: Sequence[ServerLoad], num_inflight: int) -> Load:
    """The load of these servers together."""
    count = max(1, len(loads))
    return Load(
        num_inflight=num_inflight,
        num_running=sum(load.num_running_reqs for load in loads),
        num_waiting=sum(load.num_waiting_reqs for load in loads),
        kv_usage=sum(load.token_usage for load in loads) / count,
        cache_hit_rate=sum(load.cache_hit_rate for load in loads) / count,
        tokens_per_s=sum(load.gen_throughput for load in loads),
        published_s=sum(load.timestamp for load in loads),
    )
