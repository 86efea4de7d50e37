"""Session: a conversation of several turns, whose tokens are those that the model saw and said."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

from sglrollout.config import Sampling
from sglrollout.errors import ConfigError
from sglrollout.generation.sampler import Sampler
from sglrollout.session.block import Block
from sglrollout.session.conversation import Conversation, as_messages
from sglrollout.session.environment import Environment, Play
from sglrollout.session.parsing import UserParser
from sglrollout.session.speaker import Speaker, checked_sampling, note_failure, speaker_options
from sglrollout.session.stream import SessionStream
from sglrollout.session.tools import Tool, ToolResult, tools_of
from sglrollout.session.turn import Turn
from sglrollout.types import Completion, FinishReason, Message, VersionSpan


class Session:
    """A conversation of several turns, made by :meth:`sglrollout.AsyncRolloutEngine.session`.

    Its token ids only grow: what the model sampled stays as it was sampled, and what comes between two turns is added.
    All its turns go to the engine that holds its prefix, and to another one when that dies.

    ``async with`` bounds its life: at the end of the block what it runs is cancelled, and every later use but reading
    it is a :class:`LifecycleError`. Without the block it lives as long as its rollout.

    Args:
        sampler: gives the running pool's sampler.
        system: a system message to begin with.
        tools: functions that the model may call, or :class:`Tool` objects.
        tool_parser: what finds calls in the model's text: SGLang's name of one of its parsers, or a function of the
            text that gives ``(content, [(name, arguments), ...])``. Default: what the chat template suggests.
        max_turns: turns of the model, at most. Later ones come back at once, empty, with ``length``.
        tool_timeout_s: for each tool call.
        sampling: of all turns that are not given their own. Default: ``Sampling()``.
        timeout_s: for each turn, the wait for a slot included.
        chunk_tokens: of :meth:`stream`.
        chat_template_kwargs: more names for the chat template, such as ``{"enable_thinking": False}``.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        sampler: Callable[[], Awaitable[Sampler]],
        *,
        system: str | None = None,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        tool_parser: str | UserParser | None = None,
        max_turns: int | None = None,
        tool_timeout_s: float = 30.0,
        sampling: Sampling | None = None,
        timeout_s: float | None = None,
        chunk_tokens: int = 8,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        if system is not None and not isinstance(system, str):
            raise ConfigError("system", system, "must be a text")
        options = speaker_options(
            tools_of(tools),
            tool_parser,
            max_turns,
            tool_timeout_s,
            checked_sampling(sampling, Sampling()),
            timeout_s,
            chat_template_kwargs,
        )
        self._speaker, self._chunk_tokens = Speaker(sampler, options), chunk_tokens
        self._state = Conversation(
            [] if system is None else as_messages({"role": "system", "content": system}, "system")
        )
        self._block = Block()

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        self._block.check()
        await self._speaker.ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.close()

    def fork(self) -> Session:
        """A session of its own that goes on from here: for trees of turns. It costs a copy of the lists.

        It prefers the engine that this one uses, which holds its prefix. It ends with this one's block, and may have a
        smaller one of its own; until then both may be used at the same time.

        Raises:
            LifecycleError: this one is generating, or its block was left.
        """
        self._block.check()
        other = copy.copy(self)
        other._state, other._block = self._state.copy(), Block(self._block)
        return other

    def _fork_with_past(self, messages: Sequence[Message], turns: Sequence[Turn]) -> Session:
        """A fork in which just this was said: for the endpoint, which keeps what conversations have in common once.

        Args:
            turns: their prompts are without what came before them.
        """
        other = self.fork()
        other._state.set_past(messages, turns)
        return other

    def wait_out_sleep(self) -> None:
        """Let turns wait while the engines are asleep or stale, and go on after that, where they would raise.

        It is for forks as well. A collection's episodes do so by themselves.
        """
        self._speaker.be_patient()

    # ------------------------------------------------------------ what the model is told

    def add(self, message: str | Message | Sequence[Message]) -> None:
        """Say something to the model, before its next turn.

        Args:
            message: a text (a user turn), a chat message, or several.

        Raises:
            ConfigError: it is none of these, or follows token ids that the model has not answered yet.
            LifecycleError: it is generating, or its block was left.
        """
        self._block.check()
        self._state.add(message)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Put these token ids before the model's next turn, as they are, after the messages that wait for it.

        Where messages wait, they are the beginning of the model's turn. Where none do, they are all that comes between
        the last turn and the next: what closes the one and opens the other included.

        Raises:
            ConfigError: they are no token ids.
            LifecycleError: it is generating, or its block was left.
        """
        self._block.check()
        self._state.add_tokens(token_ids)

    def discard(self) -> None:
        """Take back what waits for the model's next turn: all that was added since its last one.

        For messages that the chat template refuses, or that are not to be said after all.

        Raises:
            LifecycleError: it is generating, or its block was left.
        """
        self._block.check()
        self._state.discard()

    # ------------------------------------------------------------ turns

    async def generate(self, sampling: Sampling | None = None) -> Turn:
        """Sample one turn of the model. Its tool calls are found, and not run.

        Where the context has no room left, or ``max_turns`` are used up, it comes back at once without tokens and with
        ``length``, and nothing is sent.

        Args:
            sampling: default: the session's.

        Raises:
            ConfigError: messages do not fit the chat template (:meth:`discard` takes them back), or an option is wrong;
                nothing was started.
            EngineDiedError: more engines died under this turn than ``max_failovers``, or the last one.
            EngineRequestError, RequestTimeoutError, NoEngineError, QueueFullError, StaleWeightsError: as for any
                sample. The session is as it was before, and the turn may be asked for again.
            LifecycleError: it is generating already, nothing was added to say something to, the engines are asleep, or
                its block or the rollout's was left.
        """
        sampling = self._sampling(sampling)
        with self._block.used():
            return await self._speaker.generate(self._state, sampling)

    def stream(self, sampling: Sampling | None = None, *, chunk_tokens: int | None = None) -> SessionStream:
        """The same, as it is sampled: ``async for chunk in session.stream()``.

        Args:
            sampling: default: the session's.
            chunk_tokens: tokens per chunk at most. Default: the config's.
        """
        if chunk_tokens is not None and (type(chunk_tokens) is not int or not 1 <= chunk_tokens <= 1024):
            raise ConfigError("chunk_tokens", chunk_tokens, "must be an integer from 1 to 1024")
        size, speaker, state = chunk_tokens or self._chunk_tokens, self._speaker, self._state
        begin = partial(speaker.begin, state, self._sampling(sampling), size)
        return SessionStream(self._block, begin, partial(speaker.finish, state), partial(note_failure, state), size)

    async def run_tools(self, turn: Turn) -> list[Message]:
        """Run a turn's tool calls, all at once. For loops of your own: ``session.add(await session.run_tools(turn))``.

        Returns:
            a message for each call, in their order. Whatever goes wrong in a call is told to the model, and in
            :attr:`tool_results`.
        """
        with self._block.used():
            return await self._speaker.run_tools(self._state, turn)

    async def run(self, message: str | Message | Sequence[Message] | None = None) -> Completion:
        """Take turns with the tools until the model answers without a call, or there is no room or turn left.

        Args:
            message: to say first, as by :meth:`add`. It is taken back where this fails before the model took a turn.

        Returns:
            :attr:`completion`.

        Raises:
            as :meth:`generate`.
        """
        with self._block.used():
            with nullcontext() if message is None else self._state.said(message):
                await self._speaker.answer(self._state)
            return self.completion

    async def play(self, environment: Environment, task: object = None) -> float:
        """Play one episode: the environment's observations are user turns, the model's answers are its steps.

        It ends when the environment is done, there is no room or turn left, or a turn was aborted. Tools are run in
        between, if there are.

        Args:
            environment: see :class:`Environment`.
            task: for its ``reset``.

        Returns:
            the sum of the rewards.

        Raises:
            ConfigError: the environment returned something else than it should.
            as :meth:`generate`, and whatever the environment raises.
        """
        with self._block.used():
            play = Play(environment)
            try:
                return await self._play(play, task)
            finally:
                play.end()

    async def _play(self, play: Play, task: object) -> float:
        total, messages = 0.0, await play.reset(task)
        while True:
            self._state.add(messages)
            turn = await self._speaker.answer(self._state)
            if self._state.empty_end is not None or turn.finish_reason == "abort":
                return total
            messages, reward, done = await play.step(turn.text)
            total += reward
            if done:
                return total

    def _sampling(self, sampling: Sampling | None) -> Sampling:
        return checked_sampling(sampling, self._speaker.options.sampling)

    # ------------------------------------------------------------ what there is

    @property
    def completion(self) -> Completion:
        """The whole as one sample, as groups, rewards and batches take it.

        Its prompt is all before the first token that the model sampled, and its tokens are all after that.
        ``loss_mask`` is 1 at those that the model sampled; the others have 0.0 as their logprob, and the weight version
        of the token before them. What waits for the next turn is not in it.

        Raises:
            LifecycleError: no turn was asked for yet.
        """
        return self._state.completion()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that the model was given or sampled, ``[N]``."""
        return tuple(self._state.trajectory.token_ids)

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 where the model sampled the token, else 0, ``[N]``."""
        return tuple(self._state.trajectory.loss_mask)

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """Of the tokens that the model sampled, 0.0 at the others, ``[N]``; ``None`` if a turn came without them."""
        logprobs = self._state.trajectory.logprobs
        return None if logprobs is None else tuple(logprobs)

    @property
    def weight_versions(self) -> tuple[VersionSpan, ...]:
        """The weight versions of the tokens that the model sampled, at their places in :attr:`token_ids`."""
        return tuple(self._state.trajectory.spans)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, those that wait for the next turn included. Token ids that were added are in none of them."""
        return tuple(dict(message) for message in self._state.messages)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The model's turns."""
        return tuple(self._state.turns)

    @property
    def num_turns(self) -> int:
        """How many turns of the model there are."""
        return len(self._state.turns)

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        """What came of every tool call that was run."""
        return tuple(self._state.tool_results)

    @property
    def finish_reason(self) -> FinishReason | None:
        """``length`` when the context or ``max_turns`` are used up, ``error`` when the last try of a turn failed.

        Otherwise that of the last turn; ``None`` before the first.
        """
        return self._state.finish_reason
