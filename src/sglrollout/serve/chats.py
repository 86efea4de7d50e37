"""``/v1/chat/completions``: each request goes on from the response that it repeats, token by token."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sglrollout.errors import ConfigError
from sglrollout.serve.fields import ChatFields, fields_of, grammar_of, sampling_of
from sglrollout.serve.messages import keys_of, plain_messages, said, tools_given
from sglrollout.serve.replies import chat_finish, chat_logprobs, chat_message, usage_of
from sglrollout.serve.service import Answer, Choice, Emit, Service
from sglrollout.session.session import Session
from sglrollout.session.turn import Turn
from sglrollout.text import Tokenizer
from sglrollout.types import Chunk, Message

_log = logging.getLogger("sglrollout.serve")


async def chat(service: Service, body: Mapping[str, Any], emit: Emit) -> dict[str, Any] | None:
    """Answer a chat: by what is returned, or, if it is to be streamed, by events.

    Raises:
        ProblemError, RolloutError: no event was sent yet, or the stream ends with it.
    """
    fields, options = fields_of(ChatFields, body, service.model)
    options = {**options, **grammar_of(fields.response_format)}
    sampler = await service.sampler()
    if sampler.tokenizer is None:
        raise ConfigError("messages", fields.messages, "need a tokenizer, and skip_tokenizer_init is set")
    run = _Chat(service, fields, sampler.tokenizer, emit if fields.stream else None)
    run.answer.choose(run.sessions(), sampling_of(options, sampler.info.context_length))
    return await run.play()


class _Chat:
    """One request."""

    def __init__(self, service: Service, fields: ChatFields, tokenizer: Tokenizer, emit: Emit | None) -> None:
        self._service, self._fields, self._tokenizer, self._emit = service, fields, tokenizer, emit
        self._messages, self._tools = plain_messages(fields.messages), tools_given(fields.tools)
        self._keys = keys_of(self._messages, self._tools, fields.chat_template_kwargs)
        self._calls = bool(self._tools) and fields.tool_choice == "auto"
        self._begun: set[int] = set()
        found = service.conversations.match(self._keys)
        parent, self._num_said = found if found is not None else (None, 0)
        self._goes_on = parent is not None
        kind = "chat.completion" if emit is None else "chat.completion.chunk"
        self.answer = Answer(service, "chatcmpl", kind, parent)

    def sessions(self) -> list[Session]:
        """One for each choice, with all that was said before it and all that is new."""
        if self.answer.parent is not None:
            base, new = self.answer.parent.session.fork(), self._messages[self._num_said :]
        else:
            base, new = self._service.session(self._tools, self._fields.chat_template_kwargs), self._messages
        base.add(new)
        return [base.fork() for _ in range(self._fields.n)]

    async def play(self) -> dict[str, Any] | None:
        """Sample all choices."""
        await self.answer.each(self._take)
        usage = usage_of(self.answer.turns)
        if self._emit is None:
            for choice in self.answer.choices:
                self._keep(choice)
            return self.answer.shaped([self._whole(choice) for choice in self.answer.choices], usage=usage)
        if self._fields.with_usage:
            await self._emit(self.answer.shaped([], usage=usage))
        return None

    async def _take(self, choice: Choice) -> None:
        """Sample one choice, and let it be gone on from before the client knows that it has ended."""
        on_chunk = None if self._emit is None or self._calls else self._on_chunk
        tried = choice.session
        try:
            turn = await choice.sample(on_chunk)
        except ConfigError as error:
            if not self._goes_on or error.field != "messages":
                raise
            if choice.session is tried:
                self._start_over()
            turn = await choice.sample(on_chunk)
        if self._emit is not None:
            self._keep(choice)
            await self._finish(choice, turn, on_chunk is not None)

    def _start_over(self) -> None:
        """The template cannot go on from what the model said with these messages: they become a conversation anew."""
        _log.warning(
            "the model's chat template cannot go on with messages of roles %s after what the model said: "
            "they begin a new session, whose tokens are not those of the session before",
            [message["role"] for message in self._messages[self._num_said :]],
        )
        self.answer.parent, self._num_said = None, 0
        for choice, session in zip(self.answer.choices, self.sessions(), strict=True):
            choice.session = session

    def _keep(self, choice: Choice) -> None:
        turn = choice.turn
        assert turn is not None
        message: Message = said(turn.content, turn.tool_calls) if self._calls else said(turn.text, ())
        keys = keys_of([*self._messages, message], self._tools, self._fields.chat_template_kwargs)
        self.answer.keep(choice, keys[-1])

    def _whole(self, choice: Choice) -> dict[str, Any]:
        turn = choice.turn
        assert turn is not None
        ids, logprobs = turn.completion.token_ids, turn.completion.logprobs
        return {
            "index": choice.index,
            "message": chat_message(turn, self._calls),
            "logprobs": self._logprobs(ids, logprobs),
            "finish_reason": chat_finish(turn, self._calls),
        }

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, ids, logprobs) if self._fields.logprobs else None

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

    async def _finish(self, choice: Choice, turn: Turn, streamed: bool) -> None:
        if not streamed:
            await self._begin(choice)
            message, completion = chat_message(turn, self._calls), turn.completion
            calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
            delta = {"content": message["content"], **({"tool_calls": calls} if calls else {})}
            await self._delta(choice, delta, self._logprobs(completion.token_ids, completion.logprobs))
        await self._delta(choice, {}, None, chat_finish(turn, self._calls))

    async def _delta(
        self, choice: Choice, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> None:
        assert self._emit is not None
        event = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._fields.with_usage else {}
        await self._emit(self.answer.shaped([event], **usage))
