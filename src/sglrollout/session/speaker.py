"""Makes the turns of a session and of its forks: what is the same for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from sglrollout.config import Sampling
from sglrollout.errors import ConfigError, LifecycleError, RolloutError
from sglrollout.generation.sample import Prepared
from sglrollout.generation.sampler import Sampler
from sglrollout.session.conversation import Conversation
from sglrollout.session.parsing import ToolParser, UserParser
from sglrollout.session.template import ChatTemplate
from sglrollout.session.tools import Tool, ToolCall, run_tools
from sglrollout.session.turn import Turn, TurnRun
from sglrollout.types import Completion, Message

CHUNK_TOKENS = 32  # so often a turn's tokens come in: no more of them are lost when its engine dies
_keys = itertools.count()
_OURS = frozenset(
    {
        *("conversation", "messages", "chat_template", "tools", "documents", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding"),
        *("truncation", "max_length", "tokenizer_kwargs"),
    }
)


class SpeakerOptions(NamedTuple):
    """See :meth:`sglrollout.AsyncRolloutEngine.session`."""

    tools: Mapping[str, Tool]
    tool_parser: str | UserParser | None
    max_turns: int | None
    tool_timeout_s: float
    sampling: Sampling
    timeout_s: float | None
    chat_template_kwargs: Mapping[str, object]
    patient: bool = False


class _Parts(NamedTuple):
    """What it needs of a running pool."""

    sampler: Sampler
    template: ChatTemplate | None
    parser: ToolParser | None
    end_ids: frozenset[int]


class Speaker:
    """Makes turns, from a conversation's state and back into it.

    Args:
        sampler: gives the running pool's sampler, or raises LifecycleError.
        options: checked as far as they can be without it.
    """

    def __init__(self, sampler: Callable[[], Awaitable[Sampler]], options: SpeakerOptions) -> None:
        self._sampler, self.options = sampler, options
        self._schemas = [tool.schema for tool in options.tools.values()]
        self._key = ("session", next(_keys))
        self._parts: _Parts | None = None

    async def ready(self) -> _Parts:
        """Wait for the pool, and check the options against it, once.

        Raises:
            ConfigError: tools that no engine could parse calls of, a parser that SGLang does not have, ...
            LifecycleError: the rollout is closed.
        """
        sampler = await self._sampler()
        if self._parts is None:
            parts = self._parts_of(sampler)
            if parts.parser is not None:
                await parts.parser.check()
            self._parts = parts
        return self._parts

    def _parts_of(self, sampler: Sampler) -> _Parts:
        options, tokenizer, template, parser = self.options, sampler.tokenizer, None, None
        sampler.check(options.sampling)
        end_ids = set(sampler.info.eos_token_ids)
        if tokenizer is not None:
            end_ids |= {tokenizer.inner.eos_token_id} - {None}
            if tokenizer.inner.chat_template:
                template = ChatTemplate(tokenizer, end_ids, options.chat_template_kwargs)
        if options.tools:
            if tokenizer is None:
                raise ConfigError("tools", list(options.tools), "need a tokenizer, and skip_tokenizer_init is set")
            source = template.source(self._schemas) if template is not None else ""
            parser = ToolParser(sampler.pool, options.tool_parser, source, self._schemas)
        return _Parts(sampler, template, parser, frozenset(end_ids))

    async def generate(self, state: Conversation, sampling: Sampling) -> Turn:
        """One turn, from the first to the last."""
        try:
            run = await self.begin(state, sampling, CHUNK_TOKENS)
            try:
                await run.to_the_end()
            finally:
                run.cancel("the turn was left")
            return await self.finish(state, run)
        except Exception as error:
            note_failure(state, error)
            raise

    async def begin(self, state: Conversation, sampling: Sampling, chunk_tokens: int) -> TurnRun:
        """A turn that is ready to be sampled."""
        sampler, template, _, _ = await self.ready()
        sampler.check(sampling)
        new = state.new_ids(template, self._schemas)
        if new:
            sampler.prepare(new, "token_ids")
        prompt = state.trajectory.prompt(new)
        room = 0 if self.turns_used_up(state) else sampler.room(len(prompt))
        state.begin(prompt)
        return TurnRun(
            sampler,
            Prepared(prompt, prompt, room),
            sampling,
            key=self._key,
            chunk_tokens=chunk_tokens,
            timeout_s=self.options.timeout_s,
            patient=self.options.patient,
        )

    async def finish(self, state: Conversation, run: TurnRun) -> Turn:
        """Take what was sampled into the state, as a turn."""
        assert self._parts is not None
        completion, index = run.completion, len(state.turns)
        if run.sampler.tokenizer is None:
            turn = Turn(index, completion, "")
            state.take(turn, None)
            return turn
        content, calls = await self._parsed(self._parts, completion, state.num_calls)
        turn = Turn(index, completion, completion.text if content is None else content, tuple(calls))
        message: Message = {"role": "assistant", "content": turn.content}
        if calls:
            message["tool_calls"] = [call.as_sent for call in calls]
        state.take(turn, message)
        return turn

    async def _parsed(self, parts: _Parts, completion: Completion, first: int) -> tuple[str | None, list[ToolCall]]:
        ids, tokenizer = completion.token_ids, parts.sampler.tokenizer
        if parts.parser is None or tokenizer is None or not ids:
            return None, []
        text = tokenizer.decode(ids[:-1] if ids[-1] in parts.end_ids else ids, skip_special_tokens=False)
        return await parts.parser.parse(text, completion.engine, first)

    async def run_tools(self, state: Conversation, turn: Turn) -> list[Message]:
        """Run a turn's calls, and note what came of them."""
        results = await run_tools(turn.tool_calls, self.options.tools, self.options.tool_timeout_s)
        state.tool_results += results
        return [result.message for result in results]

    async def answer(self, state: Conversation) -> Turn:
        """Turns, and results of tools, until there is a turn without calls, one that was aborted, or no turn left."""
        while True:
            turn = await self.generate(state, self.options.sampling)
            if not turn.tool_calls or turn.finish_reason == "abort":
                return turn
            state.add(await self.run_tools(state, turn))
            if self.turns_used_up(state):
                state.empty_end = "length"
                return turn

    def be_patient(self) -> None:
        """Let turns wait while engines sleep, and go on after that."""
        self.options = self.options._replace(patient=True)

    def turns_used_up(self, state: Conversation) -> bool:
        return self.options.max_turns is not None and len(state.turns) >= self.options.max_turns


def note_failure(state: Conversation, error: Exception) -> None:
    """Note what ended a turn, unless it was the call that was wrong."""
    if isinstance(error, RolloutError) and not isinstance(error, (ConfigError, LifecycleError)):
        state.error = error


def checked_sampling(sampling: Sampling | None, default: Sampling) -> Sampling:
    """``sampling`` or the default, or ConfigError."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ConfigError("sampling", sampling, "must be a sglrollout.Sampling")
    return default if sampling is None else sampling


def speaker_options(
    tools: Mapping[str, Tool],
    tool_parser: str | UserParser | None,
    max_turns: int | None,
    tool_timeout_s: float,
    sampling: Sampling,
    timeout_s: float | None,
    chat_template_kwargs: Mapping[str, object] | None,
) -> SpeakerOptions:
    """The options, checked as far as they can be without an engine.

    Raises:
        ConfigError: one is wrong.
    """
    if tool_parser is not None and not isinstance(tool_parser, str) and not callable(tool_parser):
        raise ConfigError("tool_parser", tool_parser, "must be a name of one of SGLang's parsers, or a function")
    if max_turns is not None and (type(max_turns) is not int or max_turns < 1):
        raise ConfigError("max_turns", max_turns, "must be an integer of at least 1, or None")
    number = isinstance(tool_timeout_s, (int, float)) and not isinstance(tool_timeout_s, bool)
    if not number or not 0 < tool_timeout_s < 1e9:
        raise ConfigError("tool_timeout_s", tool_timeout_s, "must be a number of seconds greater than 0")
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise ConfigError("chat_template_kwargs", chat_template_kwargs, "must be a mapping")
    if taken := _OURS & set(chat_template_kwargs or ()):
        rule = "must be names of the template's own: transformers' arguments are set here"
        raise ConfigError("chat_template_kwargs", min(taken), rule)
    return SpeakerOptions(
        tools,
        tool_parser,
        max_turns,
        float(tool_timeout_s),
        sampling,
        timeout_s,
        dict(chat_template_kwargs or {}),
    )
