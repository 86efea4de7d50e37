"""RolloutEngine: the same rollout for plain, synchronous scripts, and beside a running loop in a notebook."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from sglrollout.collect.batch import Padding, RolloutBatch
from sglrollout.collect.calls import Filter, GroupReward, Reward
from sglrollout.collect.collector import Collector
from sglrollout.collect.options import Source, Surplus
from sglrollout.collect.stats import CollectReport, CollectStats
from sglrollout.config import RolloutConfig, Sampling, config_of
from sglrollout.engine.protocol import Engine
from sglrollout.engine.remote import RemoteEngine, checked_remote
from sglrollout.errors import ConfigError, LifecycleError
from sglrollout.generation.batch import OnError
from sglrollout.generation.stream import Stream
from sglrollout.observe.metrics import Metrics
from sglrollout.pool.sleep import TAGS, SleepReport
from sglrollout.rollout import AsyncRolloutEngine, EngineStatus, refuse_fork
from sglrollout.serve.endpoint import OpenAIEndpoint
from sglrollout.session.environment import Environment
from sglrollout.session.episode import Episode
from sglrollout.session.parsing import UserParser
from sglrollout.session.session import Session
from sglrollout.session.stream import SessionStream
from sglrollout.session.tools import Tool
from sglrollout.session.turn import Turn
from sglrollout.types import Chunk, Completion, Group, Message, Prompt
from sglrollout.weights.leader import PauseMode
from sglrollout.weights.report import SyncReport, VerifyReport
from sglrollout.weights.sources import WeightSource
from sglrollout.weights.syncer import WeightSyncer

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

T = TypeVar("T")
Item = TypeVar("Item", covariant=True)


class AsyncItems(Protocol[Item]):
    """What Stream and GroupStream have in common."""

    async def __anext__(self) -> Item: ...

    async def aclose(self) -> None: ...


class _Closing:
    """Closed by ``with``."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Blocking(_Closing, Generic[T]):
    """The items of an async iterator, by a plain ``for``. Leaving the loop early aborts what still runs."""

    def __init__(self, items: AsyncItems[T], call: Callable[..., Any]) -> None:
        self._items, self._call = items, call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            item: T = self._call(self._items.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        return item

    def close(self) -> None:
        """Abort what still runs."""
        self._call(self._items.aclose)


class BlockingStream(_Blocking[Chunk]):
    """Chunks of one sample, by ``for``: what :class:`Stream` is to ``async for``."""

    _items: Stream

    @property
    def completion(self) -> Completion:
        """The whole sample, once it has ended.

        Raises:
            LifecycleError: it has not.
        """
        return self._items.completion


class BlockingGroupStream(_Blocking[Group]):
    """Groups of one call in the order in which they complete, by ``for``."""


class BlockingCollector(_Blocking[RolloutBatch]):
    """Batches of rewarded groups, by ``for``; ``next(collector)`` is the next one. See :class:`Collector`."""

    _items: Collector

    @property
    def stats(self) -> CollectStats | None:
        """Where everything is, now; ``None`` before it has started."""
        stats: CollectStats | None = self._call(_on_loop, lambda: self._items.stats)
        return stats

    @property
    def report(self) -> CollectReport | None:
        """What the latest batch was like, and what has happened since the one before it."""
        return self._items.report

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on from here without losing or repeating a prompt, as JSON values."""
        state: dict[str, Any] = self._call(_on_loop, self._items.state_dict)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, before the first batch."""
        self._items.load_state_dict(state)


class BlockingSessionStream(_Blocking[Chunk]):
    """Chunks of one turn, by ``for``."""

    _items: SessionStream

    @property
    def turn(self) -> Turn:
        """The turn, once it has ended."""
        return self._items.turn


class BlockingSession(_Closing):
    """:class:`Session` without ``async``."""

    def __init__(self, session: Session, call: Callable[..., Any]) -> None:
        self._inner, self._call = session, call

    def __enter__(self) -> Self:
        self._call(self._inner.__aenter__)
        return self

    def close(self) -> None:
        """Cancel what it runs; it can only be read from then on."""
        self._call(self._inner.__aexit__, None, None, None)

    def fork(self) -> BlockingSession:
        """A session of its own that goes on from here."""
        return BlockingSession(self._call(_on_loop, self._inner.fork), self._call)

    def wait_out_sleep(self) -> None:
        """Let turns wait while the engines are asleep or stale, where they would raise. Another thread wakes them."""
        self._call(_on_loop, self._inner.wait_out_sleep)

    def add(self, message: str | Message | Sequence[Message]) -> None:
        """Say something to the model, before its next turn."""
        self._call(_on_loop, partial(self._inner.add, message))

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Put these token ids before the model's next turn."""
        self._call(_on_loop, partial(self._inner.add_tokens, token_ids))

    def discard(self) -> None:
        """Take back what was added since the model's last turn."""
        self._call(_on_loop, self._inner.discard)

    def generate(self, sampling: Sampling | None = None) -> Turn:
        """Sample one turn of the model."""
        turn: Turn = self._call(self._inner.generate, sampling)
        return turn

    def stream(self, sampling: Sampling | None = None, *, chunk_tokens: int | None = None) -> BlockingSessionStream:
        """The same, as it is sampled: ``for chunk in session.stream()``."""
        return BlockingSessionStream(self._inner.stream(sampling, chunk_tokens=chunk_tokens), self._call)

    def run_tools(self, turn: Turn) -> list[Message]:
        """Run a turn's tool calls, all at once; a message for each."""
        messages: list[Message] = self._call(self._inner.run_tools, turn)
        return messages

    def run(self, message: str | Message | Sequence[Message] | None = None) -> Completion:
        """Take turns with the tools until the model answers without a call, or there is no room or turn left."""
        completion: Completion = self._call(self._inner.run, message)
        return completion

    def play(self, environment: Environment, task: object = None) -> float:
        """Play one episode in an environment; the sum of its rewards."""
        total: float = self._call(self._inner.play, environment, task)
        return total

    def __getattr__(self, name: str) -> Any:
        """What there is to read, as on :class:`Session`: ``completion``, ``token_ids``, ``messages``, ..."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


def _portal_of(rollout: RolloutEngine) -> BlockingPortal:
    if rollout._portal is None:
        raise LifecycleError('this rollout is not running: use "with", or call start()')
    return rollout._portal


async def _on_loop(function: Callable[[], T]) -> T:
    """For what is not async but belongs to the loop's thread."""
    return function()


class BlockingWeightSyncer(_Closing):
    """:class:`WeightSyncer` without ``async``, for a :class:`RolloutEngine`.

    Arguments, options and errors are those of :class:`WeightSyncer`; on ranks without engines ``rollout`` is ``None``.
    """

    def __init__(self, rollout: RolloutEngine | None, source: WeightSource, **options: Any) -> None:
        if rollout is not None and not isinstance(rollout, RolloutEngine):
            raise ConfigError("rollout", type(rollout).__name__, "must be a RolloutEngine, or None")
        self._rollout = rollout
        self._inner = WeightSyncer(rollout._rollout if rollout is not None else None, source, **options)

    def sync(self, mode: PauseMode = "retract", version: int | None = None) -> SyncReport:
        """Bring the trainer's weights of now into every engine."""
        return self._call(self._inner.sync, mode, version)

    def verify(self, *, tolerance: float = 0.05) -> VerifyReport:
        """Compare every engine's parameters with the trainer's of now, bit for bit."""

        async def call() -> VerifyReport:
            return await self._inner.verify(tolerance=tolerance)

        return self._call(call)

    def close(self) -> None:
        """Give back shared memory, links and the thread."""
        self._call(self._inner.close)

    def _call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        if self._rollout is not None:
            return self._rollout._call(function, *args)
        return anyio.run(function, *args)


class RolloutEngine:
    """:class:`AsyncRolloutEngine` without ``async``: every call blocks until it is done.

    It runs on an event loop of its own, on a thread of its own, so it works in a plain script, in a notebook and in a
    thread; several threads may call it at once. Ctrl-C in a blocking call ends that call and what it started.

    Arguments, options and errors are those of :class:`AsyncRolloutEngine`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: RolloutConfig | None = None,
        engines: Sequence[Engine] | None = None,
        remote: Sequence[RemoteEngine] = (),
        **options: Any,
    ) -> None:
        self.config = config_of(model, config, options)
        self._engines, self._remote = engines, remote
        checked_remote(remote, self.config, engines is None)
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._portal: BlockingPortal | None = None
        self._inner: AsyncRolloutEngine | None = None

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> Self:
        """With the options of a YAML, TOML or JSON file."""
        return cls(config=RolloutConfig.from_file(path, **overrides))

    def start(self, wait: bool = True) -> Self:
        """Start all engines; with ``wait=False`` they load while this thread goes on."""
        if self._thread is not None:
            raise LifecycleError("this rollout was started already; make a new one to start again")
        self._portal = self._start_portal()
        try:
            self._inner = AsyncRolloutEngine(config=self.config, engines=self._engines, remote=self._remote)
            self._call(self._inner.start, wait)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End all engines, and the thread. Safe to call twice."""
        refuse_fork(self._pid)
        portal, self._portal = self._portal, None
        if portal is None or self._thread is None:
            return
        try:
            if self._inner is not None:
                portal.call(self._inner.close)
        finally:
            portal.call(portal.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        chunk_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> BlockingStream:
        """One completion, as it is sampled: ``for chunk in rollout.stream("...")``. Leaving the loop aborts it."""
        stream = self._rollout.stream(prompt, sampling, chunk_tokens=chunk_tokens, timeout_s=timeout_s)
        return BlockingStream(stream, self._call)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        on_error: OnError = "raise",
        timeout_s: float | None = None,
        progress: bool | None = None,
    ) -> list[Group]:
        """Sample ``n`` completions of every prompt; groups come in the order of the prompts."""

        async def call() -> list[Group]:
            return await self._rollout.generate(
                prompts, n, sampling, on_error=on_error, timeout_s=timeout_s, progress=progress
            )

        return self._call(call)

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        on_error: OnError = "raise",
        timeout_s: float | None = None,
    ) -> BlockingGroupStream:
        """Groups in the order in which they complete. ``prompts`` is read on the rollout's own thread."""
        groups = self._rollout.as_completed(prompts, n, sampling, on_error=on_error, timeout_s=timeout_s)
        return BlockingGroupStream(groups, self._call)

    def collect(
        self,
        source: Source,
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        target_groups: int | None = None,
        reward: Reward | None = None,
        group_reward: GroupReward | None = None,
        filter: Filter | Sequence[Filter] | None = None,
        episode: Episode | None = None,
        session: Mapping[str, Any] | None = None,
        over_sample: float = 1.0,
        surplus: Surplus = "run",
        max_staleness: int | None = None,
        max_failures: float = 0.2,
        drop_last: bool = False,
        padding: Padding | None = None,
        seed: int | None = None,
        timeout_s: float | None = None,
        reward_timeout_s: float | None = None,
        reward_workers: int = 32,
        progress: bool | None = None,
    ) -> BlockingCollector:
        """Batches of rewarded, filtered groups, by ``for``. ``source`` is read on the rollout's own thread."""
        collector = self._rollout.collect(
            source,
            n,
            sampling,
            target_groups=target_groups,
            reward=reward,
            group_reward=group_reward,
            filter=filter,
            episode=episode,
            session=session,
            over_sample=over_sample,
            surplus=surplus,
            max_staleness=max_staleness,
            max_failures=max_failures,
            drop_last=drop_last,
            padding=padding,
            seed=seed,
            timeout_s=timeout_s,
            reward_timeout_s=reward_timeout_s,
            reward_workers=reward_workers,
            progress=progress,
        )
        return BlockingCollector(collector, self._call)

    def session(
        self,
        *,
        system: str | None = None,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        tool_parser: str | UserParser | None = None,
        max_turns: int | None = None,
        tool_timeout_s: float = 30.0,
        sampling: Sampling | None = None,
        timeout_s: float | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> BlockingSession:
        """A conversation of several turns, token by token: ``with rollout.session(tools=[...]) as session``."""
        session = self._rollout.session(
            system=system,
            tools=tools,
            tool_parser=tool_parser,
            max_turns=max_turns,
            tool_timeout_s=tool_timeout_s,
            sampling=sampling,
            timeout_s=timeout_s,
            chat_template_kwargs=chat_template_kwargs,
        )
        return BlockingSession(session, self._call)

    def serve_openai(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        model_name: str | None = None,
        tool_parser: str | UserParser | None = None,
        max_conversations: int = 10_000,
        timeout_s: float | None = None,
    ) -> AbstractContextManager[OpenAIEndpoint]:
        """Serve agents that are written against the OpenAI API: ``with rollout.serve_openai() as endpoint``."""
        endpoint = self._rollout.serve_openai(
            host=host,
            port=port,
            api_key=api_key,
            model_name=model_name,
            tool_parser=tool_parser,
            max_conversations=max_conversations,
            timeout_s=timeout_s,
        )
        return _portal_of(self).wrap_async_context_manager(endpoint)

    def flush_cache(self, timeout_s: float = 5.0) -> None:
        """Empty the prefix cache of every engine, once nothing runs in it, within ``timeout_s``."""
        self._call(self._rollout.flush_cache, timeout_s)

    def sleep(self, tags: Sequence[str] = TAGS, *, drain_s: float = 30.0, timeout_s: float = 60.0) -> SleepReport:
        """Give device memory back to the trainer, until :meth:`wake`."""

        async def call() -> SleepReport:
            return await self._rollout.sleep(tags, drain_s=drain_s, timeout_s=timeout_s)

        return self._call(call)

    def wake(self, tags: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> None:
        """Take device memory again."""

        async def call() -> None:
            await self._rollout.wake(tags, timeout_s=timeout_s)

        self._call(call)

    def metrics(self) -> Metrics:
        """Every number, now, from any thread; also after :meth:`close`."""
        return self._started.metrics()

    def export_metrics(self, registry: CollectorRegistry | None = None) -> None:
        """Let prometheus_client show the same numbers until this rollout is closed."""
        self._rollout.export_metrics(registry)

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of the latest samples, syncs, sleeps and deaths, for https://ui.perfetto.dev, as JSON."""
        self._started._write_timeline(path)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page, which loads nothing, with plots of the whole past."""
        self._started._write_report(path)

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """Every engine's state now; empty before :meth:`start`."""
        return self._inner.engines if self._inner is not None else ()

    @property
    def num_queued(self) -> int:
        """Samples that wait for a slot."""
        return self._inner.num_queued if self._inner is not None else 0

    @property
    def weight_version(self) -> int:
        """The version of the weights that engines sample with; 0 until the first sync."""
        return self._inner.weight_version if self._inner is not None else 0

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loaded it."""
        return self._rollout.tokenizer

    @property
    def _started(self) -> AsyncRolloutEngine:
        """Also once it is closed."""
        if self._inner is None:
            raise LifecycleError("this rollout is not started, and has nothing to show")
        return self._inner

    @property
    def _rollout(self) -> AsyncRolloutEngine:
        if self._inner is None or self._portal is None:
            raise LifecycleError('this rollout is not running: use "with", or call start()')
        return self._inner

    def _start_portal(self) -> BlockingPortal:
        """A portal on a daemon thread: a script that fails before close() must still be able to exit."""
        started: Future[BlockingPortal] = Future()

        async def serve() -> None:
            async with BlockingPortal() as portal:
                started.set_result(portal)
                await portal.sleep_until_stopped()

        self._thread = threading.Thread(target=anyio.run, args=(serve,), name="sglrollout", daemon=True)
        self._thread.start()
        return started.result()

    def _call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run it on the rollout's loop and wait. An interrupt of the wait cancels it there."""
        refuse_fork(self._pid)
        future: Future[T] = _portal_of(self).start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
