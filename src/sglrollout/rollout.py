"""AsyncRolloutEngine: composes pool, dispatcher and generation; little logic of its own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from sglrollout.collect.batch import Padding
from sglrollout.collect.calls import Filter, GroupReward, Reward
from sglrollout.collect.collector import Collector
from sglrollout.collect.options import Play, Source, Surplus, collect_options
from sglrollout.concurrency import in_parallel, unwrapped
from sglrollout.config import RolloutConfig, Sampling, config_of
from sglrollout.engine.launch import build_engines
from sglrollout.engine.protocol import Engine
from sglrollout.engine.remote import RemoteEngine, checked_remote
from sglrollout.errors import ConfigError, LifecycleError, NoEngineError, RolloutError, fresh
from sglrollout.generation.batch import BatchOptions, GroupStream, OnError, Ready
from sglrollout.generation.sample import Failover
from sglrollout.generation.sampler import Sampler
from sglrollout.generation.stream import Stream
from sglrollout.observe import progress as _progress
from sglrollout.observe.metrics import Metrics
from sglrollout.observe.prometheus import export
from sglrollout.observe.recorder import Recorder
from sglrollout.observe.report import write_report
from sglrollout.observe.timeline import write_timeline
from sglrollout.pool.pool import Member, Pool
from sglrollout.pool.sleep import TAGS, SleepReport, sleep, wake
from sglrollout.pool.supervisor import Restarts
from sglrollout.pool.watchdog import Watchdog
from sglrollout.serve.endpoint import OpenAIEndpoint
from sglrollout.session.episode import Episode, play_episode
from sglrollout.session.parsing import UserParser
from sglrollout.session.session import Session
from sglrollout.session.tools import Tool
from sglrollout.text import Tokenizer
from sglrollout.threads import is_async
from sglrollout.types import Group, Prompt
from sglrollout.wire.messages import EngineInfo, Load

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

_log = logging.getLogger("sglrollout")
_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine, now.

    Attributes:
        name: for example ``engine-0``.
        state: ``starting``, ``ready``, ``held`` (a sync or the like is under way), ``asleep``, ``stale`` (its weights
            are not the trainer's), ``restarting`` (it died, and comes back) or ``dead`` (it died for good).
        num_inflight: samples this pool has in it.
        limit: samples it may have at once.
        info: what it said of itself when it last came up; ``None`` while it starts.
        load: what it last said of its load.
        num_restarts: how often it was started again after a death, in vain included.
    """

    name: str
    state: str
    num_inflight: int
    limit: int
    info: EngineInfo | None
    load: Load | None
    num_restarts: int = 0


class AsyncRolloutEngine:
    """A pool of SGLang engines in this machine's GPUs (or on its CPU), and of servers elsewhere, driven from one event
    loop.

    ``async with`` starts it and ends it with everything it started. In a notebook, ``await rollout.start()`` and
    ``await rollout.close()`` may stand in different cells.

    Args:
        model: path or Hub id; or give a whole ``config``.
        config: every option, as an object; see :class:`RolloutConfig`.
        engines: engines to use in place of those that ``config`` describes, for tests of a loop: for example
            ``sglrollout.testing.ScriptedEngine``.
        remote: SGLang HTTP servers to use beside these; ``num_engines=0`` uses them alone.
        **options: options of :class:`RolloutConfig` by name.

    Raises:
        ConfigError: an option is wrong. Nothing was started.
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
        self._given_engines = engines
        self._remote = checked_remote(remote, self.config, engines is None)
        for engine, name in self._remote:
            engine.join(self.config, name)
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: asyncio.Task[None] | None = None
        self._pool: Pool | None = None
        self._ready: Ready | None = None
        self._settled = asyncio.Event()
        self._stop = asyncio.Event()
        self._failure: Exception | None = None
        self._recorder = Recorder(self.config.timeline_events)
        self._exports: list[Callable[[], None]] = []

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> Self:
        """With the options of a YAML, TOML or JSON file.

        Raises:
            ConfigError: the file or an option in it is wrong.
        """
        return cls(config=RolloutConfig.from_file(path, **overrides))

    # ------------------------------------------------------------ life

    async def start(self, wait: bool = True) -> Self:
        """Check the options against this machine, then start all engines in parallel.

        Args:
            wait: ``False`` returns at once, while engines load; the first call that needs them waits for them. Use it
                to load the trainer meanwhile.

        Raises:
            UnsupportedVersionError, ConfigError, PlacementError: nothing was started.
            EngineStartError: an engine failed to start; the others were ended.
            LifecycleError: it was started before.
        """
        if self._runner is not None:
            raise LifecycleError("this rollout was started already; make a new one to start again")
        if not wait and self.config.isolation == "thread":
            rule = 'must be True with isolation="thread": this process\'s environment is not its own while SGLang loads'
            raise ConfigError("wait", wait, rule)
        self._loop = asyncio.get_running_loop()
        self._runner = self._loop.create_task(self._run(), name="sglrollout")
        if wait:
            try:
                await self._until_ready()
            except BaseException:
                await self.close()
                raise
        return self

    async def close(self) -> None:
        """End all engines and free what they held. What still runs is aborted. Safe to call twice."""
        refuse_fork(self._pid)
        if self._runner is None:
            self._withdraw_exports()
            return
        if not self._runner.done():
            self._check_loop()
            self._stop.set()
            with anyio.CancelScope(shield=True):
                await _until_done(self._runner)
        if not self._runner.cancelled():
            self._runner.result()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        """The one task that owns the pool, from start to end, whoever calls start and close."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_on_stop, tasks)
                await self._serve(tasks)
        except Exception as error:
            self._failure = unwrapped(error)
            if not isinstance(self._failure, RolloutError):
                _log.error("the rollout failed and is closed", exc_info=self._failure)
        finally:
            self._ready = None
            self._failure = self._failure or LifecycleError("this rollout is closed")
            self._settled.set()
            self._withdraw_exports()

    def _withdraw_exports(self) -> None:
        while self._exports:
            self._exports.pop()()

    async def _cancel_on_stop(self, tasks: TaskGroup) -> None:
        await self._stop.wait()
        tasks.cancel_scope.cancel()

    async def _serve(self, tasks: TaskGroup) -> None:
        engines = self._given_engines
        if engines is None:
            engines = tuple(await anyio.to_thread.run_sync(build_engines, self.config))
        config = self.config
        engines = (*engines, *(engine for engine, _ in self._remote))
        pool = self._pool = Pool(engines, config.max_inflight, config.max_queued, _restarts(config))
        with self._recorder.watching(pool):
            await self._serve_pool(pool, tasks)

    async def _serve_pool(self, pool: Pool, tasks: TaskGroup) -> None:
        config = self.config
        try:
            tokenizer = await self._bring_up(pool, tasks)
            if config.stall_timeout_s is not None:
                tasks.start_soon(Watchdog(pool, config.stall_timeout_s, config.start_timeout_s).run)
            info = pool.common_info
            tasks.start_soon(self._recorder.run)
            self._ready = Ready(Sampler(pool, tokenizer, info, tasks, _failover(config), self._recorder), tasks)
            self._settled.set()
            await anyio.sleep_forever()
        finally:
            self._ready = None
            self._failure = LifecycleError("this rollout is closed")  # for calls that come while engines end
            pool.shut(self._failure)
            with anyio.CancelScope(shield=True):
                await pool.close()

    async def _bring_up(self, pool: Pool, tasks: TaskGroup) -> Tokenizer | None:
        """Start engines, and load the tokenizer beside them."""
        loaded: list[Tokenizer] = []

        async def load_tokenizer() -> None:
            config = self.config
            path = config.tokenizer or config.model
            loaded.append(await anyio.to_thread.run_sync(Tokenizer, path, config.revision, config.trust_remote_code))

        async with _progress.starting(pool, _progress.wanted(self.config.progress)), anyio.create_task_group() as both:
            if not self.config.engine_args.get("skip_tokenizer_init"):
                both.start_soon(load_tokenizer)
            await pool.start(tasks)
        return loaded[0] if loaded else None

    async def _until_ready(self) -> Ready:
        refuse_fork(self._pid)
        if self._runner is None:
            raise LifecycleError('this rollout is not started: use "async with", or await start()')
        self._check_loop()
        await self._settled.wait()
        if self._ready is None:
            assert self._failure is not None
            raise fresh(self._failure)
        return self._ready

    async def _ready_pool(self) -> Pool:
        """For a weight syncer."""
        return (await self._until_ready()).sampler.pool

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise LifecycleError("this rollout was started on another event loop, and can be used on that one alone")

    # ------------------------------------------------------------ generation

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        chunk_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """One completion, as it is sampled: ``async for chunk in rollout.stream("...")``.

        Args:
            prompt: a text, token ids, or chat messages (rendered by the model's chat template).
            sampling: default: ``Sampling()``.
            chunk_tokens: tokens per chunk at most; 1 gives every token by itself. Default: the config's.
            timeout_s: for the whole, the wait for a slot included. Default: the config's.
        """
        if chunk_tokens is not None and (type(chunk_tokens) is not int or not 1 <= chunk_tokens <= 1024):
            raise ConfigError("chunk_tokens", chunk_tokens, "must be an integer from 1 to 1024")
        chunk_tokens = self.config.chunk_tokens if chunk_tokens is None else chunk_tokens
        return Stream(self._sampler, prompt, _sampling(sampling), chunk_tokens, self._timeout(timeout_s))

    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        on_error: OnError = "raise",
        timeout_s: float | None = None,
        progress: bool | None = None,
    ) -> list[Group]:
        """Sample ``n`` completions of every prompt.

        Args:
            prompts: texts, token id lists or chat message lists; one text alone is one prompt.
            n: samples per prompt. They go to one engine, unless that is overloaded.
            sampling: default: ``Sampling()``.
            on_error: ``raise`` ends the call at the first sample that failed; ``return`` gives such samples with
                ``finish_reason="error"`` and their ``error``.
            timeout_s: per sample, its wait for a slot included. Default: the config's.
            progress: show a bar. Default: the config's.

        Returns:
            a group per prompt, in the order of the prompts.

        Raises:
            ConfigError: a prompt or option is wrong; nothing was started.
            EngineRequestError, EngineDiedError, RequestTimeoutError: of a sample, with ``on_error="raise"``. One whose
                engine dies goes on in another (``failover``), and fails only when it lost too many, or the last.
            NoEngineError, QueueFullError, LifecycleError: of the pool, whatever ``on_error`` is.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence):
            raise ConfigError("prompts", type(prompts).__name__, "must be a list; as_completed takes any iterable")
        options = self._options(n, sampling, on_error, timeout_s)
        show = _progress.wanted(self.config.progress if progress is None else progress)
        with _progress.generating(len(prompts) * n, show) as bar:
            options = options._replace(on_sample=bar.advance)
            async with GroupStream(self._until_ready, prompts, options) as groups:
                return sorted([group async for group in groups], key=lambda group: group.index)

    def as_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        on_error: OnError = "raise",
        timeout_s: float | None = None,
    ) -> GroupStream:
        """Groups in the order in which they complete: ``async for group in rollout.as_completed(prompts, n=8)``.

        Prompts may be any iterable, also an endless or an async one: it is read as slots become free, and no further
        ahead of the loop than the engines need to stay busy. Arguments and errors are those of :meth:`generate`; a
        prompt that is wrong in a plain iterable ends the loop when it is reached.
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts", prompts, "must be an iterable of prompts; put a single one into a list")
        if not isinstance(prompts, (Iterable, AsyncIterable)):
            raise ConfigError("prompts", prompts, "must be an iterable of prompts")
        options = self._options(n, sampling, on_error, timeout_s)
        return GroupStream(self._until_ready, prompts, options._replace(bounded=True))

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
    ) -> Collector:
        """Batches of rewarded, filtered groups: ``async for batch in rollout.collect(...)``, or ``await`` for the next.

        Work goes on in the background, between batches and beside the trainer, as far ahead as ``max_staleness``
        allows. Rewards are computed while other samples run, and take no slot of an engine. Of finished groups those
        go first that are due, then the oldest. A failed sample is data: it keeps its place in its group, without a
        reward, and its tokens are masked.

        Args:
            source: prompts, :class:`Task` objects, or rows with a ``prompt`` (which become the task's data); any
                iterable, also an endless or an async one. It is read one prompt ahead of what is being sampled.
            n: samples per prompt.
            sampling: default: ``Sampling()``.
            target_groups: groups per batch, after filters. ``None`` is one batch of the whole source.
            reward: of a sample: ``(completion)`` or ``(completion, task)`` to a number. A plain function runs in a
                worker thread, an async one is awaited. (A second argument with a default is the task if it is called
                so.)
            group_reward: in place of ``reward``, of a whole group: ``(group)`` or ``(group, task)`` to a number each.
            filter: of a rewarded group, or several in turn: to a :class:`Verdict`, or to ``True`` for one that is kept.
                Others are replaced by new ones, until the batch is full. See :mod:`sglrollout.filters`.
            episode: for samples of several turns: ``async (session, task)`` to a reward, or to ``None`` where
                ``reward`` is to judge the whole. It adds messages to the session and takes turns; the task's prompt is
                its own to use. An episode that raises is a failed sample. One that is taken back starts over.
            session: options of the episodes' sessions, as :meth:`session` takes them.
            over_sample: groups to start for each that a batch needs, so that it need not wait for the slowest.
            surplus: what becomes of the groups that a batch did not need. ``run``: they go on, for the next batch, and
                what has become too stale by then starts over. ``abort`` and ``partial``: those that run, and have no
                place in time, are taken back when the batch is taken, until the next sync or the next wait for a batch,
                so that they take no engine meanwhile; ``partial`` goes on from their tokens then, if they are not too
                stale (they keep their logprobs and versions). A prompt always stays, first in line.
            max_staleness: bound on the weight version at which a batch is taken less that of its samples' oldest token.
                0 is strictly on-policy; ``None`` is no bound.
            max_failures: share of failed samples, among the latest 256, at which the collection stops.
            drop_last: leave out a last batch that is not full.
            padding: of the batch's tensors; the model's pad token, on the right, by default.
            seed: of the samples' seeds, with ``RolloutConfig(deterministic=True)``.
            timeout_s: per sample, its wait for a slot included, without the time in which engines sleep; anew when it
                was taken back. Default: the config's.
            reward_timeout_s: for one call of a reward or a filter. A plain function that takes longer keeps its thread.
            reward_workers: threads for rewards and filters that are plain functions.
            progress: show a live view while a batch is waited for. Default: the config's.

        Raises (also from the loop):
            ConfigError: an option or a prompt is wrong.
            FailureBudgetError: too many samples failed.
            NoEngineError: every engine is dead.
            LifecycleError, StaleWeightsError: no engine can take work now, and no batch can be made of what there is.
                Once they can, it goes on where it was.
        """
        options = collect_options(
            source,
            _sampling(sampling),
            _check_n(n),
            target_groups=target_groups,
            reward=reward,
            group_reward=group_reward,
            filter=filter,
            over_sample=over_sample,
            surplus=surplus,
            max_staleness=max_staleness,
            max_failures=max_failures,
            drop_last=drop_last,
            timeout_s=self._timeout(timeout_s),
            reward_timeout_s=None if reward_timeout_s is None else check_timeout(reward_timeout_s, "reward_timeout_s"),
            reward_workers=reward_workers,
            seed=seed,
            play=self._play(episode, session, sampling, timeout_s),
        )
        show = _progress.wanted(self.config.progress if progress is None else progress)
        if padding is not None and not isinstance(padding, Padding):
            raise ConfigError("padding", padding, "must be a sglrollout.Padding")
        return Collector(self._until_ready, source, options, padding or Padding(), show, self._recorder.collected)

    def _play(
        self,
        episode: Episode | None,
        options: Mapping[str, Any] | None,
        sampling: Sampling | None,
        timeout_s: float | None,
    ) -> Play | None:
        if episode is None:
            if options is not None:
                raise ConfigError("session", options, "is for episodes, and no episode is given")
            return None
        if not is_async(episode):
            raise ConfigError("episode", episode, "must be an async function of a session and a task")
        given = {"sampling": sampling, "timeout_s": timeout_s, **(options or {})}
        self.session(**given)  # refused now, if it is to be refused
        return lambda task: play_episode(self.session(**given), episode, task)

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
    ) -> Session:
        """A conversation of several turns, token by token: ``async with rollout.session(tools=[...]) as session``.

        Args:
            system: a system message to begin with.
            tools: functions that the model may call, or :class:`Tool` objects.
            tool_parser: what finds calls in the model's text: SGLang's name of one of its parsers, or a function of
                the text that gives ``(content, [(name, arguments), ...])``. Default: what the chat template suggests.
            max_turns: turns of the model, at most. Later ones come back at once, empty, with ``length``.
            tool_timeout_s: for each tool call.
            sampling: of all turns that are not given their own. Default: ``Sampling()``.
            timeout_s: for each turn, its wait for a slot included. Default: the config's.
            chat_template_kwargs: more names for the chat template, such as ``{"enable_thinking": False}``.

        Raises:
            ConfigError: an option is wrong.
        """
        return Session(
            self._sampler,
            system=system,
            tools=tools,
            tool_parser=tool_parser,
            max_turns=max_turns,
            tool_timeout_s=tool_timeout_s,
            sampling=sampling,
            timeout_s=self._timeout(timeout_s),
            chunk_tokens=self.config.chunk_tokens,
            chat_template_kwargs=chat_template_kwargs,
        )

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
    ) -> OpenAIEndpoint:
        """Serve agents that are written against the OpenAI API: ``async with rollout.serve_openai() as endpoint``.

        Each conversation is a session: its turns go on from its exact tokens, which can be had afterwards by the id of
        a response. See :class:`OpenAIEndpoint`.

        Args:
            host: to listen on; the default is this machine alone.
            port: 0 takes a free one.
            api_key: that clients must have; a random one by default.
            model_name: that requests give; the config's ``model`` by default.
            tool_parser: as of :meth:`session`.
            max_conversations: conversations to keep, with all their branches; those unused for longest go first.
            timeout_s: per turn, its wait for a slot included. Default: the config's.

        Raises:
            ConfigError: an option is wrong; when it opens: the address cannot be had.
        """
        return OpenAIEndpoint(
            self._sampler,
            self.config.model if model_name is None else model_name,
            host=host,
            port=port,
            api_key=api_key,
            tool_parser=tool_parser,
            max_conversations=max_conversations,
            timeout_s=self._timeout(timeout_s),
            chunk_tokens=self.config.chunk_tokens,
        )

    async def _sampler(self) -> Sampler:
        return (await self._until_ready()).sampler

    def _options(self, n: int, sampling: Sampling | None, on_error: OnError, timeout_s: float | None) -> BatchOptions:
        if on_error not in ("raise", "return"):
            raise ConfigError("on_error", on_error, 'must be "raise" or "return"')
        return BatchOptions(_sampling(sampling), _check_n(n), self._timeout(timeout_s), on_error)

    def _timeout(self, timeout_s: float | None) -> float | None:
        if timeout_s is None:
            return self.config.request_timeout_s
        return check_timeout(timeout_s)

    # ------------------------------------------------------------ the pool

    async def flush_cache(self, timeout_s: float = 5.0) -> None:
        """Empty the prefix cache of every engine.

        Args:
            timeout_s: how long to wait for running requests to end; nothing is aborted.

        Raises:
            EngineRequestError: requests still run in an engine.
            NoEngineError: every engine is dead.
        """
        check_timeout(timeout_s)
        pool = await self._ready_pool()
        if not pool.serving and not pool.restarting:
            raise NoEngineError("every engine of the pool is dead")
        with pool.exclusive("flush_cache", changes=False):
            ready = [member for member in pool.members if member.ready]
            await in_parallel(partial(member.engine.command, "flush_cache", timeout_s) for member in ready)

    async def sleep(self, tags: Sequence[str] = TAGS, *, drain_s: float = 30.0, timeout_s: float = 60.0) -> SleepReport:
        """Give device memory back to the trainer; calls that need engines are refused until :meth:`wake`.

        Args:
            tags: what to give up: ``kv_cache``, ``weights``, ``cuda_graph``. Weights come back as garbage, so that a
                sync must follow, unless SGLang's ``enable_weights_cpu_backup`` is set.
            drain_s: how long running samples may take to end, before they are aborted.
            timeout_s: for each engine to answer.

        Raises:
            ConfigError: an unknown tag.
            LifecycleError: asleep already, busy, or engines without ``memory_saver``. Nothing was done.
        """
        if not isinstance(drain_s, (int, float)) or not 0 <= drain_s < _LONGEST_S:
            raise ConfigError("drain_s", drain_s, "must be a number of seconds, at least 0")
        tags = tags if isinstance(tags, str) else tuple(tags)
        report = await sleep(await self._ready_pool(), tags, drain_s, check_timeout(timeout_s))
        self._recorder.slept(report)
        return report

    async def wake(self, tags: Sequence[str] | None = None, *, timeout_s: float = 60.0) -> None:
        """Take device memory again. After ``weights``, engines serve once a sync has filled them.

        :meth:`WeightSyncer.sync` wakes engines by itself: their weights first, the rest once those are loaded.

        Args:
            tags: what to wake; by default all that is asleep.

        Raises:
            DeviceMemoryError: a device has not enough free memory, with a breakdown. Nothing was woken.
            ConfigError, LifecycleError: an unknown tag, or one that is not asleep.
        """
        await wake(await self._ready_pool(), None if tags is None else tuple(tags), check_timeout(timeout_s))

    # ------------------------------------------------------------ what can be seen

    def metrics(self) -> Metrics:
        """Every number, now: cheap, and from any thread; ``metrics().to_dict()`` is for a logger.

        Before :meth:`start` there are no engines in it; after :meth:`close` it is as it was then.
        """
        return self._recorder.metrics()

    def export_metrics(self, registry: CollectorRegistry | None = None) -> None:
        """Let prometheus_client show the same numbers until this rollout is closed.

        They are read when they are asked for. Serve them with ``prometheus_client.start_http_server``.

        Args:
            registry: default: prometheus_client's own.

        Raises:
            ImportError: prometheus_client is missing: ``pip install "sglrollout[metrics]"``.
            ConfigError: this or another rollout is in this registry.
            LifecycleError: this rollout is closed.
        """
        if self._stop.is_set() or (self._runner is not None and self._runner.done()):
            raise LifecycleError("this rollout is closed")
        self._exports.append(export(self._recorder, registry))

    async def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write a trace of the latest samples, syncs, sleeps and deaths, for https://ui.perfetto.dev, as JSON.

        How many are kept is :attr:`RolloutConfig.timeline_events`.

        Raises:
            ConfigError: ``timeline_events`` is 0.
            OSError: the file cannot be written.
        """
        await anyio.to_thread.run_sync(self._write_timeline, path)

    async def report(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page, which loads nothing, with plots of the whole past.

        Raises:
            OSError: the file cannot be written.
        """
        await anyio.to_thread.run_sync(self._write_report, path)

    def _write_timeline(self, path: str | os.PathLike[str]) -> None:
        if not self.config.timeline_events:
            raise ConfigError("timeline_events", 0, "must be at least 1 for a timeline")
        write_timeline(self._recorder, Path(path))

    def _write_report(self, path: str | os.PathLike[str]) -> None:
        write_report(self._recorder, f"sglrollout: {self.config.model}", Path(path))

    @property
    def _members(self) -> list[Member]:
        return self._pool.members if self._pool is not None else []

    @property
    def engines(self) -> tuple[EngineStatus, ...]:
        """Every engine's state now; empty before :meth:`start`."""
        return tuple(
            EngineStatus(
                name=member.name,
                state=member.state.value,
                num_inflight=self._pool.dispatcher.num_inflight(member) if self._pool is not None else 0,
                limit=member.limit,
                info=member.engine.info,
                load=member.engine.load,
                num_restarts=member.num_restarts,
            )
            for member in self._members
        )

    @property
    def num_queued(self) -> int:
        """Callers that wait for a slot."""
        return self._pool.dispatcher.num_queued if self._pool is not None else 0

    @property
    def weight_version(self) -> int:
        """The version of the weights that engines sample with; 0 until the first sync."""
        return self._pool.weight_version if self._pool is not None else 0

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loaded it.

        Raises:
            LifecycleError: not started yet, or there is none (``skip_tokenizer_init``).
        """
        if self._ready is None or self._ready.sampler.tokenizer is None:
            raise LifecycleError("there is no tokenizer: the rollout is not started, or skip_tokenizer_init is set")
        return self._ready.sampler.tokenizer.inner


def _sampling(sampling: Sampling | None) -> Sampling:
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ConfigError("sampling", sampling, "must be a sglrollout.Sampling")
    return sampling or Sampling()


def _check_n(n: int) -> int:
    if type(n) is not int or n < 1:
        raise ConfigError("n", n, "must be an integer of at least 1")
    return n


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """``timeout_s`` as a float, or ConfigError."""
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s < _LONGEST_S:
        raise ConfigError(name, timeout_s, "must be a number of seconds greater than 0")
    return float(timeout_s)


def refuse_fork(pid: int) -> None:
    """Raise LifecycleError unless this is process ``pid``: a fork has neither the loop nor the engines."""
    if os.getpid() != pid:
        raise LifecycleError("this rollout belongs to the process that made it, and this is a fork of that")


async def _until_done(task: asyncio.Task[None]) -> None:
    """Wait for its end, which has deadlines, also when cancelled meanwhile: by Ctrl-C, from which no scope shields."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _failover(config: RolloutConfig) -> Failover:
    return Failover(config.failover != "none", config.failover == "resume", config.max_failovers)


def _restarts(config: RolloutConfig) -> Restarts:
    most = 0 if config.isolation == "thread" else config.max_restarts
    return Restarts(most, config.restart_delay_s, config.start_timeout_s, config.keep_weights_snapshot)
