"""The commands of the pool, as what SGLang HTTP servers can be told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from sglrollout.concurrency import in_parallel
from sglrollout.engine.http import RefusedError, decoded, message_of
from sglrollout.engine.remote_answers import LOADING
from sglrollout.engine.remote_server import Server
from sglrollout.wire.messages import EngineInfo

_GRACE_S = 5.0
_FROM_DISK = "/update_weights_from_disk"
_SESSIONS_SINCE = (0, 5, 21)
"""From here on weights are loaded within a session, and a cache can be emptied beside retracted requests."""


class CannotError(Exception):
    """A server cannot do this, with what to do instead."""


class Commands:
    """Tells all servers of one engine what the pool tells the engine.

    Args:
        info: of the engine.
        label: its servers' weight version, in their words.
    """

    def __init__(self, servers: Sequence[Server], info: EngineInfo, label: str) -> None:
        self._servers, self._info = servers, info
        self.label = label
        self.paused = False
        self._mode = ""
        self._has_sessions = _numbers(info.sglang_version) >= _SESSIONS_SINCE

    async def run(self, name: str, timeout_s: float, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one; its answer has the shape of a local engine's.

        Raises:
            CannotError: servers cannot.
            UnreachableError, RefusedError: one failed to.
        """
        method = getattr(self, f"_on_{name}", None)
        if method is None:
            raise CannotError(f"{name} is for engines of this machine, and this is a remote one: {_INSTEAD}")
        answer: dict[str, Any] = await method(timeout_s, **arguments)
        return answer

    async def _all(self, call: Callable[[Server], Awaitable[object]]) -> None:
        await in_parallel(partial(call, server) for server in self._servers)

    async def _tell(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> None:
        await self._all(lambda server: server.tell(path, body, timeout_s))

    # ------------------------------------------------------------ generation

    async def _on_flush_cache(self, timeout_s: float) -> dict[str, Any]:
        await self._flush(timeout_s)
        return {}

    async def _flush(self, timeout_s: float) -> None:
        # SGLang waits for requests to end if it is given a time, and those of a paused engine do not.
        params = {} if self.paused else {"timeout": timeout_s}
        await self._all(lambda server: server.tell("/flush_cache", timeout_s=timeout_s + _GRACE_S, params=params))

    async def _on_pause(self, timeout_s: float, mode: str) -> dict[str, Any]:
        if mode == "retract" and not self._has_sessions:
            version = self._info.sglang_version
            raise CannotError(f'SGLang {version} empties no cache beside retracted requests: use "abort" or "in_place"')
        self.paused, self._mode = True, mode
        await self._tell("/pause_generation", {"mode": mode}, timeout_s)
        return {"attached": False}

    async def _on_resume(self, timeout_s: float, version: int, flush: bool) -> dict[str, Any]:
        begun = time.perf_counter()
        await self._relabel(str(version), timeout_s)
        if flush:
            if self.paused and self._mode == "in_place":  # SGLang would flush beside what runs, and die of it
                raise CannotError("the prefix cache cannot be emptied under an in_place pause")
            await self._flush(timeout_s)
        flushed = time.perf_counter()
        await self._tell("/continue_generation", None, timeout_s)
        self.paused = False
        return {"ranks": [{"flush_s": flushed - begun, "resume_s": time.perf_counter() - flushed}]}

    async def _relabel(self, label: str, timeout_s: float) -> None:
        """Give the weights a version. What runs goes on: SGLang would abort it unless it is told not to."""
        if label != self.label:
            body = {"new_version": label, "abort_all_requests": False}
            await self._tell("/update_weight_version", body, timeout_s)
            self.label = label

    async def _on_parse_tool_calls(
        self, timeout_s: float, text: str, tools: list[dict[str, Any]], parser: str
    ) -> dict[str, Any]:
        body = {"text": text, "tools": tools, "tool_call_parser": parser}
        found = await self._servers[0].parse_tool_calls(body, timeout_s)
        calls = [[call.get("name") or "", call.get("parameters") or ""] for call in found.get("calls") or ()]
        return {"content": found.get("normal_text", "") if calls else text, "calls": calls}

    # ------------------------------------------------------------ memory

    async def _on_sleep(self, timeout_s: float, tags: list[str]) -> dict[str, Any]:
        if not self._info.memory_saver:
            raise CannotError("it was started without --enable-memory-saver")
        await self._on_pause(timeout_s, "abort")  # a scheduler that is not idle would end itself
        if "weights" in tags and not self._info.keeps_weights:
            await self._relabel(LOADING, timeout_s)
        await self._tell("/release_memory_occupation", {"tags": tags}, timeout_s)
        return {}

    async def _on_wake(self, timeout_s: float, tags: list[str]) -> dict[str, Any]:
        await self._tell("/resume_memory_occupation", {"tags": tags}, timeout_s)
        return {}

    async def _on_memory(self, timeout_s: float) -> dict[str, Any]:
        """SGLang does not say how much memory is free."""
        return {"ranks": []}

    # ------------------------------------------------------------ weights

    async def _on_init_group(
        self,
        timeout_s: float,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> dict[str, Any]:
        """Join a group of a trainer's: rank ``rank_offset`` plus the TP rank, counted through all servers."""
        group = {"master_address": master_address, "master_port": master_port, "world_size": world_size}
        tp_size = self._info.tp_size // len(self._servers)

        async def join(server: Server, rank: int) -> None:
            body = {**group, "rank_offset": rank, "group_name": group_name, "backend": backend}
            await _checked(server, "/init_weights_update_group", body, timeout_s)

        await in_parallel(
            partial(join, server, rank_offset + index * tp_size) for index, server in enumerate(self._servers)
        )
        return {}

    async def _on_destroy_group(self, timeout_s: float, group_name: str) -> dict[str, Any]:
        await self._check("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)
        return {}

    async def _on_begin_update(self, timeout_s: float) -> dict[str, Any]:
        """Open SGLang's own weight update, where this version has such a session."""
        await self._relabel(LOADING, timeout_s)
        if self._has_sessions:
            await self._all(lambda server: _begun(server, timeout_s))
        return {}

    async def _on_end_update(self, timeout_s: float) -> dict[str, Any]:
        if self._has_sessions:
            await self._check("/end_weight_update", {}, timeout_s)
        return {}

    async def _on_receive_weights(
        self,
        timeout_s: float,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None = None,
    ) -> dict[str, Any]:
        """Take weights that rank 0 of the group broadcasts now."""
        await self._relabel(LOADING, timeout_s)
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name}
        body |= {"flush_cache": False, "abort_all_requests": False}
        if load_format is not None:
            body["load_format"] = load_format
        await self._check("/update_weights_from_distributed", body, timeout_s)
        return {}

    async def _on_load_from_disk(self, timeout_s: float, path: str) -> dict[str, Any]:
        """Load safetensors files from a directory that the servers see under this path; they stay paused."""
        await self._relabel(LOADING, timeout_s)
        await self._check(_FROM_DISK, _from_disk(path), timeout_s)
        return {}

    async def _on_mirrors(self, timeout_s: float) -> dict[str, Any]:
        """Which weights servers have in copies of their own; ``None`` where one keeps no copy."""
        ids: list[str] = []

        async def ask(server: Server) -> None:
            ids.append((await server.mirror(timeout_s)).id)

        try:
            await self._all(ask)
        except RefusedError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return {"ids": None}
        return {"ids": ids}

    async def _on_update_mirror(self, timeout_s: float, folder: str, new_id: str) -> dict[str, Any]:
        """Update the servers' copies of their weights from a directory that they see under this path. If one cannot,
        the answer says why."""
        refusals: list[str] = []

        async def update(server: Server) -> None:
            state = await server.update_mirror(folder, new_id, timeout_s)
            if state.refusal is not None or state.id != new_id:
                refusals.append(state.refusal or f"it has {state.id or 'nothing'}")

        await self._all(update)
        return {"refusal": "; ".join(refusals) if refusals else None}

    async def _on_load_mirror(self, timeout_s: float, new_id: str) -> dict[str, Any]:
        """Load the servers' copies of their weights; they stay paused."""
        await self._relabel(LOADING, timeout_s)

        async def load(server: Server) -> None:
            state = await server.mirror(timeout_s)
            if state.id == new_id:
                await _checked(server, _FROM_DISK, _from_disk(state.folder), timeout_s)
                state = await server.mirror(timeout_s)
            if state.id != new_id:
                raise CannotError("its copy of the weights was changed meanwhile, by another trainer")

        await self._all(load)
        return {}

    async def _on_load_adapter(
        self, timeout_s: float, adapter: str, folder: str, config: dict[str, Any]
    ) -> dict[str, Any]:
        """Load a LoRA adapter from a directory that the servers see under this path, with its config in it. One of this
        name is unloaded first, which waits for the requests that use it to end."""
        await self._all(lambda server: _unloaded(server, adapter, timeout_s))
        await self._check("/load_lora_adapter", {"lora_name": adapter, "lora_path": folder}, timeout_s)
        return {}

    async def _check(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        await self._all(lambda server: _checked(server, path, body, timeout_s))


_INSTEAD = "weights reach it through a group (init_group, receive_weights) or a disk (load_from_disk)"


def _from_disk(path: str) -> dict[str, Any]:
    return {
        **{"model_path": path, "load_format": "safetensors"},  # a server may have been started with another format
        **{"flush_cache": False, "abort_all_requests": False, "keep_pause": True},
    }


async def _checked(server: Server, path: str, body: dict[str, Any], timeout_s: float) -> None:
    """Have it done, by a server that may answer an error with success."""
    answer = await server.tell(path, body, timeout_s)
    said = decoded(answer)
    if not isinstance(said, dict) or said.get("success") is not True:
        raise RefusedError(200, message_of(answer))


async def _begun(server: Server, timeout_s: float) -> None:
    """Have a weight update begin, in place of one that a sync left open: it was broken off, or its trainer is gone."""
    try:
        await _checked(server, "/begin_weight_update", {}, timeout_s)
    except RefusedError:
        with contextlib.suppress(RefusedError):  # none was open: then the next one says what is wrong
            await _checked(server, "/end_weight_update", {}, timeout_s)
        await _checked(server, "/begin_weight_update", {}, timeout_s)


async def _unloaded(server: Server, name: str, timeout_s: float) -> None:
    with contextlib.suppress(RefusedError):  # it has none of this name: else loading says what is wrong
        await _checked(server, "/unload_lora_adapter", {"lora_name": name}, timeout_s)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
