"""``/v1/completions``: texts or token ids, each gone on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglrollout.generation.sampler import Sampler
from sglrollout.serve.fields import COMPLETION_TOKENS, CompletionFields, fields_of, sampling_of
from sglrollout.serve.replies import Encoded, completion_logprobs
from sglrollout.serve.service import Answer, Choice, Emit, Run, Service
from sglrollout.session.session import Session
from sglrollout.session.turn import Turn
from sglrollout.types import Chunk


async def complete(service: Service, body: Mapping[str, Any], emit: Emit) -> Encoded | None:
    """Answer a completion: by what is returned, or, if it is to be streamed, by events.

    Raises:
        ProblemError, RolloutError: no event was sent yet, or the stream ends with it.
    """
    fields, options = fields_of(CompletionFields, body, service.model)
    sampler = await service.sampler()
    run = _Completion(service, fields, sampler, emit if fields.stream else None)
    run.answer.choose(run.sessions(), sampling_of(options, COMPLETION_TOKENS))
    return await run.play()


class _Completion(Run):
    def __init__(self, service: Service, fields: CompletionFields, sampler: Sampler, emit: Emit | None) -> None:
        super().__init__(fields, Answer(service, "cmpl", "text_completion"), emit)
        self._service, self._fields, self._sampler = service, fields, sampler
        self._offsets: dict[int, int] = {}

    def sessions(self) -> list[Session]:
        """One for each choice: those of the first prompt, those of the second, and so on."""
        prepared = [self._sampler.prepare(prompt, "prompt") for prompt in self._fields.prompts]
        sessions = []
        for prompt in prepared:
            base = self._service.session()
            base.add_tokens(prompt.ids)
            sessions += [base.fork() for _ in range(self._fields.n)]
        return sessions

    async def _sample(self, choice: Choice) -> Turn:
        return await choice.sample(None if self._emit is None else self._on_chunk)

    def _keep(self, choice: Choice, turn: Turn) -> None:
        self.answer.keep(choice)

    def _whole(self, choice: Choice, turn: Turn) -> dict[str, Any]:
        completion = turn.completion
        text = completion.text if self._sampler.tokenizer is not None else ""
        logprobs = self._logprobs(completion.token_ids, completion.logprobs, 0)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": turn.finish_reason}

    async def _finish(self, choice: Choice, turn: Turn) -> None:
        await self._event(index=choice.index, text="", logprobs=None, finish_reason=turn.finish_reason)

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float] | None, offset: int) -> dict[str, Any] | None:
        if self._fields.logprobs is None:
            return None
        return completion_logprobs(self._sampler.tokenizer, ids, logprobs, offset)

    async def _on_chunk(self, choice: Choice, chunk: Chunk) -> None:
        offset = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = offset + len(chunk.text)
        logprobs = self._logprobs(chunk.token_ids, chunk.logprobs, offset)
        if chunk.text or (chunk.token_ids and logprobs):
            await self._event(index=choice.index, text=chunk.text, logprobs=logprobs, finish_reason=None)
