"""``/v1/completions``: texts or token ids, each gone on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglrollout.generation.sampler import Sampler
from sglrollout.serve.fields import COMPLETION_TOKENS, CompletionFields, fields_of, sampling_of
from sglrollout.serve.replies import completion_logprobs, usage_of
from sglrollout.serve.service import Answer, Choice, Emit, Service
from sglrollout.session.session import Session
from sglrollout.types import Chunk


async def complete(service: Service, body: Mapping[str, Any], emit: Emit) -> dict[str, Any] | None:
    """Answer a completion: by what is returned, or, if it is to be streamed, by events.

    Raises:
        ProblemError, RolloutError: no event was sent yet, or the stream ends with it.
    """
    fields, options = fields_of(CompletionFields, body, service.model)
    sampler = await service.sampler()
    run = _Completion(service, fields, sampler, emit if fields.stream else None)
    run.answer.choose(run.sessions(), sampling_of(options, COMPLETION_TOKENS))
    return await run.play()


class _Completion:
    """One request."""

    def __init__(self, service: Service, fields: CompletionFields, sampler: Sampler, emit: Emit | None) -> None:
        self._service, self._fields, self._sampler, self._emit = service, fields, sampler, emit
        self._offsets: dict[int, int] = {}
        self.answer = Answer(service, "cmpl", "text_completion")

    def sessions(self) -> list[Session]:
        """One for each choice: those of the first prompt, those of the second, and so on."""
        prepared = [self._sampler.prepare(prompt, "prompt") for prompt in self._fields.prompts]
        sessions = []
        for prompt in prepared:
            base = self._service.session()
            base.add_tokens(prompt.ids)
            sessions += [base.fork() for _ in range(self._fields.n)]
        return sessions

    async def play(self) -> dict[str, Any] | None:
        """Sample all choices."""
        await self.answer.each(self._take)
        usage = usage_of(self.answer.turns)
        if self._emit is None:
            for choice in self.answer.choices:
                self.answer.keep(choice)
            return self.answer.shaped([self._whole(choice) for choice in self.answer.choices], usage=usage)
        if self._fields.with_usage:
            await self._emit(self.answer.shaped([], usage=usage))
        return None

    async def _take(self, choice: Choice) -> None:
        turn = await choice.sample(None if self._emit is None else self._on_chunk)
        if self._emit is not None:
            self.answer.keep(choice)
            await self._part(choice, "", None, turn.finish_reason)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        turn = choice.turn
        assert turn is not None
        completion = turn.completion
        text = completion.text if self._sampler.tokenizer is not None else ""
        logprobs = self._logprobs(completion.token_ids, completion.logprobs, 0)
        reason = turn.finish_reason
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float] | None, offset: int) -> dict[str, Any] | None:
        if self._fields.logprobs is None:
            return None
        return completion_logprobs(self._sampler.tokenizer, ids, logprobs, offset)

    async def _on_chunk(self, choice: Choice, chunk: Chunk) -> None:
        offset = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = offset + len(chunk.text)
        logprobs = self._logprobs(chunk.token_ids, chunk.logprobs, offset)
        if chunk.text or (chunk.token_ids and logprobs):
            await self._part(choice, chunk.text, logprobs, None)

    async def _part(self, choice: Choice, text: str, logprobs: Any, finish_reason: str | None) -> None:
        assert self._emit is not None
        event = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._fields.with_usage else {}
        await self._emit(self.answer.shaped([event], **usage))
