"""``/v1/chat/completions``: each request goes on from the response that it repeats, token by token."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sglrollout.errors import ConfigError
from sglrollout.serve.conversations import Node
from sglrollout.serve.fields import ChatFields, fields_of, grammar_of, sampling_of
from sglrollout.serve.messages import keys_of, plain_messages, said, tools_given
from sglrollout.serve.replies import Encoded, chat_finish, chat_logprobs, chat_message
from sglrollout.serve.service import Answer, Choice, Emit, Run, Service
from sglrollout.session.session import Session
from sglrollout.session.tools import Tool
from sglrollout.session.turn import Turn
from sglrollout.text import Tokenizer
from sglrollout.types import Chunk, Message

_log = logging.getLogger("sglrollout.serve")


async def chat(service: Service, body: Mapping[str, Any], emit: Emit) -> Encoded | None:
    """Answer a chat: by what is returned, or, if it is to be streamed, by events.

    Raises:
        ProblemError, RolloutError: no event was sent yet, or the stream ends with it.
    """
    fields, options = fields_of(ChatFields, body, service.model)
    options = {**options, **grammar_of(fields.response_format)}
    sampler = await service.sampler()
    if sampler.tokenizer is None:
        raise ConfigError("messages", fields.messages, "need a tokenizer, and skip_tokenizer_init is set")
    sampling = sampling_of(options, sampler.info.context_length)
    told = _Told(fields, plain_messages(fields.messages), tools_given(fields.tools))
    with service.conversations.going_on(told.keys()) as found:
        run = _Chat(service, told, sampler.tokenizer, emit if fields.stream else None, found)
        run.answer.choose(run.sessions(), sampling)
        return await run.play()


class _Told(NamedTuple):
    """What a request says, and that as chat templates take it."""

    fields: ChatFields
    messages: list[Message]
    tools: list[Tool]

    def keys(self, *more: Message) -> list[bytes]:
        """Of the messages, and of more after them."""
        return keys_of([*self.messages, *more], self.tools, self.fields.chat_template_kwargs)


class _Chat(Run):
    """Args:
    found: the response that is gone on from, and how many messages were said up to it.
    """

    def __init__(
        self, service: Service, told: _Told, tokenizer: Tokenizer, emit: Emit | None, found: tuple[Node, int] | None
    ) -> None:
        parent, self._num_said = found if found is not None else (None, 0)
        kind = "chat.completion" if emit is None else "chat.completion.chunk"
        super().__init__(told.fields, Answer(service, "chatcmpl", kind, parent), emit)
        self._service, self._told, self._tokenizer = service, told, tokenizer
        self._goes_on = parent is not None
        self._calls = bool(told.tools) and told.fields.tool_choice == "auto"
        self._streamed = emit is not None and not self._calls
        self._begun: set[int] = set()

    def sessions(self) -> list[Session]:
        """One for each choice, with all that was said before it and all that is new."""
        fields, tools, parent = self._told.fields, self._told.tools, self.answer.parent
        base = self._service.session(tools, fields.chat_template_kwargs) if parent is None else parent.session()
        base.add(self._told.messages[self._num_said :])
        return [base.fork() for _ in range(fields.n)]

    async def _sample(self, choice: Choice) -> Turn:
        turn = await self._turn(choice)
        if self._emit is not None and not self._streamed:
            await self._say(choice, turn)
        return turn

    async def _turn(self, choice: Choice) -> Turn:
        on_chunk = self._on_chunk if self._streamed else None
        tried = choice.session
        try:
            return await choice.sample(on_chunk)
        except ConfigError as error:
            if not self._goes_on or error.field != "messages":
                raise
            if choice.session is tried:
                self._start_over()
            return await choice.sample(on_chunk)

    def _start_over(self) -> None:
        """The template cannot go on from what the model said with these messages: they become a conversation anew."""
        _log.warning(
            "the model's chat template cannot go on with messages of roles %s after what the model said: "
            "they begin a new session, whose tokens are not those of the session before",
            [message["role"] for message in self._told.messages[self._num_said :]],
        )
        self.answer.parent, self._num_said = None, 0
        for choice, session in zip(self.answer.choices, self.sessions(), strict=True):
            choice.session = session

    def _keep(self, choice: Choice, turn: Turn) -> None:
        message = said(turn.content, turn.tool_calls) if self._calls else said(turn.text, ())
        new = [*self._told.fields.messages[self._num_said :], chat_message(turn, self._calls)]
        self.answer.keep(choice, self._told.keys(message)[-1], new)

    def _whole(self, choice: Choice, turn: Turn) -> dict[str, Any]:
        ids, logprobs = turn.completion.token_ids, turn.completion.logprobs
        return {
            "index": choice.index,
            "message": chat_message(turn, self._calls),
            "logprobs": self._logprobs(ids, logprobs),
            "finish_reason": chat_finish(turn, self._calls),
        }

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, ids, logprobs) if self._told.fields.logprobs else None

    # ------------------------------------------------------------ streams

    async def _on_chunk(self, choice: Choice, chunk: Chunk) -> None:
        if not chunk.token_ids and not chunk.text:
            return
        logprobs = self._logprobs(chunk.token_ids, chunk.logprobs)
        await self._begin(choice)
        if chunk.text or logprobs:
            await self._delta(choice, {"content": chunk.text}, logprobs)

    async def _begin(self, choice: Choice) -> None:
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            await self._delta(choice, {"role": "assistant", "content": "", "refusal": None})

    async def _say(self, choice: Choice, turn: Turn) -> None:
        """What was held back until it was whole."""
        await self._begin(choice)
        message, completion = chat_message(turn, self._calls), turn.completion
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        delta = {"content": message["content"], **({"tool_calls": calls} if calls else {})}
        await self._delta(choice, delta, self._logprobs(completion.token_ids, completion.logprobs))

    async def _finish(self, choice: Choice, turn: Turn) -> None:
        await self._delta(choice, {}, None, chat_finish(turn, self._calls))

    async def _delta(
        self, choice: Choice, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> None:
        await self._event(index=choice.index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
