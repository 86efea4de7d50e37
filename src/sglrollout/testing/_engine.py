"""What the engines of this room share: their life, the requests they hold, their load reports and their commands.

May import engine, wire and errors.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

import anyio

from sglrollout.engine.protocol import Request
from sglrollout.errors import EngineDiedError, EngineError, EngineRequestError, EngineStartError, LifecycleError
from sglrollout.testing.tool_calls import parse_tool_calls
from sglrollout.wire.messages import EngineInfo, Finish, Load

DEFAULT_NEW_TOKENS = 128

T = TypeVar("T")


class EngineOptions(TypedDict, total=False):
    """The options of :class:`FakeEngine`, for those who hand them on."""

    max_running: int
    start_s: float
    context_length: int
    vocab_size: int
    deterministic: bool
    weight_version: int
    kv_usage: float
    memory_saver: bool
    fail_start: str | None
    fail_restart: Callable[[int], str | None] | None
    fail_request: Callable[[Request], str | None] | None
    fail_command: Callable[[str], str | None] | None
    hang: bool


class FakeEngine(ABC, Generic[T]):
    """All of :class:`sglrollout.engine.protocol.Engine` but the sampling. It runs on the event loop.

    ``T`` is what an engine notes on a request that it holds. For the options see
    :class:`sglrollout.testing.ScriptedEngine`.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        name: str = "engine-0",
        *,
        max_running: int = 256,
        start_s: float = 0.0,
        context_length: int = 32768,
        vocab_size: int = 32000,
        deterministic: bool = False,
        weight_version: int = 0,
        kv_usage: float = 0.0,
        memory_saver: bool = False,
        fail_start: str | None = None,
        fail_restart: Callable[[int], str | None] | None = None,
        fail_request: Callable[[Request], str | None] | None = None,
        fail_command: Callable[[str], str | None] | None = None,
        hang: bool = False,
    ) -> None:
        self.name, self.max_running, self.start_s = name, max_running, start_s
        self.context_length, self.vocab_size, self.deterministic = context_length, vocab_size, deterministic
        self.kv_usage, self.memory_saver = kv_usage, memory_saver
        self.fail_start, self.fail_restart = fail_start, fail_restart
        self.fail_request, self.fail_command = fail_request, fail_command
        self.url = ""
        self.devices: Sequence[str] = ()
        self.info: EngineInfo | None = None
        self.load: Load | None = None
        self.num_outputs = self.num_unanswered = self.num_pending = 0
        self.on_load: Callable[[Load], None] | None = None
        self.on_death: Callable[[Exception], None] | None = None
        self.commands: list[str] = []
        self.num_submitted = self.peak_running = self.num_starts = 0
        self.weights = self._first_version = self._weight_version = weight_version
        self._hang, self._paused, self._loaded = hang, False, False
        self._export: int | None = None
        self._waiting: OrderedDict[Request, T] = OrderedDict()
        self._running: dict[Request, T] = {}
        self._times_asked: dict[tuple[int, ...], int] = {}
        self._stage = "not started"
        self._death: EngineDiedError | None = None

    # ------------------------------------------------------------ for those who sample

    @abstractmethod
    def _plan(self, request: Request, prompt: tuple[int, ...], index: int) -> T:
        """What to note on a request that has come. ``index`` counts those that came with this prompt before."""

    @abstractmethod
    def _begin(self, held: T, now: float) -> None:
        """A request runs from now on."""

    @abstractmethod
    def _hand_over(self, held: T) -> None:
        """Deliver what has been sampled of a running request so far."""

    @abstractmethod
    def _changed(self) -> None:
        """Requests came or went, or the engine halted, goes on or has ended."""

    @property
    def _halted(self) -> bool:
        return self._hang or self._paused

    # ------------------------------------------------------------ life

    @property
    def alive(self) -> bool:
        return self._stage == "ready"

    @property
    def stage(self) -> str:
        return self._stage

    async def start(self) -> EngineInfo:
        """Come up after ``start_s``, with the weights that it had at first. It may start again once it is dead.

        Raises:
            EngineStartError: ``fail_start`` or ``fail_restart`` says so, or it is up, starting or closed.
        """
        if self._stage not in ("not started", "dead"):
            raise EngineStartError(self.name, f"it cannot start: it is {self._stage}")
        self._begin_life()
        try:
            await anyio.sleep(self.start_s)
        except BaseException:
            if self._stage == "starting":
                self._stage = "not started"
            raise
        if self._stage != "starting":
            raise EngineStartError(self.name, f"it ended while it was starting: {self._death or self._stage}")
        reason = self.fail_start
        if reason is None and self.num_starts > 1 and self.fail_restart is not None:
            reason = self.fail_restart(self.num_starts - 1)
        if reason is not None:
            self._stage = "dead"
            raise EngineStartError(self.name, reason)
        self._stage, self._death = "ready", None
        self.info = self._describe()
        return self.info

    def _begin_life(self) -> None:
        self._stage, self.info, self.load = "starting", None, None
        self.num_outputs = self.num_unanswered = self.num_pending = 0
        self.num_starts += 1
        self.weights = self._weight_version = self._first_version
        self._paused = self._loaded = False

    def _describe(self) -> EngineInfo:
        return EngineInfo(
            sglang_version=self.kind,
            pid=0,
            child_pids=[],
            context_length=self.context_length,
            max_prompt_tokens=self.context_length - 1,
            vocab_size=self.vocab_size,
            max_running_requests=self.max_running,
            max_total_tokens=self.context_length,
            eos_token_ids=[],
            fast_outputs=True,
            deterministic=self.deterministic,
            has_tokenizer=False,
            memory_saver=self.memory_saver,
            keeps_weights=False,
            tp_size=1,
            weight_version=self._weight_version,
            start_s=self.start_s,
            lora=False,
        )

    @abstractmethod
    async def run(self) -> None:
        """Serve until closed or dead."""

    def die(self, reason: str = "it was told to die") -> None:
        """End as a crash does: fail what it holds, then tell the pool. Does nothing once it has ended."""
        if self._stage in ("dead", "closed"):
            return
        started, self._stage = self.alive, "dead"
        self._death = EngineDiedError(self.name, reason)
        for request in self._empty():
            request.end(Finish("error", message=reason), self._death)
        self._drop_export()
        if started and self.on_death is not None:
            self.on_death(self._death)

    async def kill(self, reason: str) -> None:
        """As :meth:`die`."""
        self.die(reason)

    async def close(self) -> None:
        """End; what it holds ends with a ``LifecycleError``."""
        if self._stage != "dead":
            self._stage = "closed"
        self._drop_export()
        message = "the rollout was closed"
        for request in self._empty():
            request.end(Finish("abort", message=message), LifecycleError(message))

    def _empty(self) -> list[Request]:
        held = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._changed()
        return held

    # ------------------------------------------------------------ requests

    @property
    def progress(self) -> int:
        return self.num_outputs

    @property
    def num_running(self) -> int:
        """Requests that are being sampled."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine for one of those to end."""
        return len(self._waiting)

    async def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            EngineDiedError: the engine is dead.
            EngineError: it is not started, or closed.
        """
        if self._death is not None:
            raise self._death
        if not self.alive:
            raise EngineError(self.name, f"the engine is not running, it is {self._stage}")
        prompt = tuple(request.prompt_ids)
        index = self._times_asked.get(prompt, 0)
        self._times_asked[prompt] = index + 1
        request.request_id = self.num_submitted
        self.num_submitted += 1
        self._waiting[request] = self._plan(request, prompt, index)
        self._changed()

    def abort(self, request: Request) -> None:
        """Drop a request, once it has what was sampled of it. Its end is the caller's to set."""
        running = self._running.get(request)
        if running is not None:
            self._hand_over(running)
        if self._running.pop(request, None) or self._waiting.pop(request, None):
            self._changed()

    def drop(self, error: Exception) -> None:
        """Abort all that it holds; each ends with ``error``."""
        for request in [*self._waiting, *self._running]:  # in this order none of them comes to run
            self.abort(request)
            request.end(Finish("error", message=str(error)), error)

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self.max_running:
            request, held = self._waiting.popitem(last=False)
            reason = self.fail_request(request) if self.fail_request is not None else None
            if reason is not None:
                request.end(Finish("error", message=reason), EngineRequestError(self.name, reason))
                continue
            self._running[request] = held
            self._begin(held, now)
        self.peak_running = max(self.peak_running, len(self._running))

    def _report(self) -> None:
        running, waiting = len(self._running), len(self._waiting)
        load = Load(running + waiting, running, waiting, self.kv_usage, 0.0, 0.0)
        if load != self.load:
            self.load = load
            if self.on_load is not None:
                self.on_load(load)

    # ------------------------------------------------------------ what may change at any time

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        for held in list(self._running.values()):
            self._hand_over(held)
        self._weight_version = version
        if self.info is not None:
            self.info = self._describe()

    @property
    def hang(self) -> bool:
        return self._hang

    @hang.setter
    def hang(self, hang: bool) -> None:
        self._hang = hang
        self._changed()

    # ------------------------------------------------------------ commands

    async def command(self, name: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Run a command as a host would. Weights that a sync brings go nowhere, by the portable path.

        Raises:
            EngineRequestError: ``fail_command`` says so, or it cannot run it as things are.
            EngineDiedError: the engine is dead.
        """
        if self._death is not None:
            raise self._death
        self.commands.append(name)
        reason = self.fail_command(name) if self.fail_command is not None else None
        if reason is not None:
            raise EngineRequestError(self.name, f"{name} failed: {reason}")
        if name not in _COMMANDS:
            raise EngineRequestError(self.name, f"{name} failed: a {self.kind} engine has no such command")
        return _COMMANDS[name](self, **arguments)

    def _flush_cache(self) -> dict[str, Any]:
        if not self._paused and (self._running or self._waiting):
            raise EngineRequestError(self.name, "flush_cache failed: requests are running")
        return {}

    def _pause(self, mode: str) -> dict[str, Any]:
        self._paused = True
        self._changed()
        for request in [*self._running, *self._waiting] if mode == "abort" else []:
            self.abort(request)
            request.end(Finish("abort", message="aborted by a weight sync"))
        return {"attached": False}

    def _resume(self, version: int, flush: bool) -> dict[str, Any]:
        if self._loaded:
            self.weights, self._loaded = version, False
        self.weight_version, self._paused = version, False
        self._changed()
        return {"ranks": [{"flush_s": 0.0, "resume_s": 0.0}]}

    def _describe_weights(self, weights: list[Any], allow_missing: list[str]) -> dict[str, Any]:
        report = {
            **{"tp_rank": 0, "dtypes": [weight[2] for weight in weights], "copies": [[] for _ in weights]},
            **{
                "unexpected": [],
                "missing": [],
                "unwritten": [],
                "duplicates": [],
                "mismatched": [],
            },
            "unsuited": f"a {self.kind} engine has no parameters",
        }
        return {"reports": [report]}

    def _memory(self) -> dict[str, Any]:
        return {"ranks": [{"free": 1 << 40, "total": 1 << 40, "reserved": 0}]}

    def _parse_tool_calls(self, text: str, tools: list[dict[str, Any]], parser: str) -> dict[str, Any]:
        return parse_tool_calls(text, tools, parser)

    def _load_portable(self, **arguments: Any) -> dict[str, Any]:
        self._loaded = True
        return {}

    def _weights_size(self) -> dict[str, Any]:
        return {"num_bytes": len(str(self.weights))}

    def _export_weights(self) -> dict[str, Any]:
        """As a scheduler does: a file without a name, in which there is one number."""
        self._drop_export()
        self._export = os.memfd_create("sglrollout-weights")
        os.write(self._export, str(self.weights).encode())
        return {"version": self._weight_version, "ranks": [{"pid": os.getpid(), "fd": self._export}]}

    def _drop_export(self) -> dict[str, Any]:
        if self._export is not None:
            os.close(self._export)
            self._export = None
        return {}

    def _adopt_weights(self, paths: list[str]) -> dict[str, Any]:
        self.weights = int(Path(paths[0]).read_bytes())
        return {}

    def _nothing(self, **arguments: Any) -> dict[str, Any]:
        return {}


_COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "flush_cache": FakeEngine._flush_cache,
    "pause": FakeEngine._pause,
    "resume": FakeEngine._resume,
    "describe_weights": FakeEngine._describe_weights,
    "detach_weights": FakeEngine._nothing,
    "begin_portable": FakeEngine._nothing,
    "load_portable": FakeEngine._load_portable,
    "end_portable": FakeEngine._nothing,
    "weights_size": FakeEngine._weights_size,
    "export_weights": FakeEngine._export_weights,
    "drop_export": FakeEngine._drop_export,
    "adopt_weights": FakeEngine._adopt_weights,
    "sleep": FakeEngine._nothing,
    "wake": FakeEngine._nothing,
    "memory": FakeEngine._memory,
    "parse_tool_calls": FakeEngine._parse_tool_calls,
}
