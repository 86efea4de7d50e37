"""What all requests of an endpoint share, and how the choices of one are sampled."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from sglrollout.concurrency import in_parallel
from sglrollout.config import Sampling
from sglrollout.generation.sampler import Sampler
from sglrollout.serve.conversations import Conversations, Node, node_of
from sglrollout.serve.fields import Fields
from sglrollout.serve.problems import ProblemError
from sglrollout.serve.replies import Encoded, usage_of
from sglrollout.session.parsing import UserParser
from sglrollout.session.session import Session
from sglrollout.session.tools import Tool
from sglrollout.session.turn import Turn
from sglrollout.types import Chunk

Emit: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Sends one event of a stream."""

_MOST_SEED = 2**31


@dataclass(frozen=True)
class Service:
    """An endpoint without its HTTP. See :meth:`sglrollout.AsyncRolloutEngine.serve_openai`.

    Attributes:
        sampler: gives the running pool's sampler, or raises LifecycleError.
        model: its name.
        chunk_tokens: of streams.
    """

    sampler: Callable[[], Awaitable[Sampler]]
    model: str
    conversations: Conversations
    tool_parser: str | UserParser | None = None
    timeout_s: float | None = None
    chunk_tokens: int = 8
    created: int = field(default_factory=lambda: int(time.time()))

    def session(self, tools: Sequence[Tool] = (), template_options: Mapping[str, object] | None = None) -> Session:
        """A new conversation.

        Raises:
            ConfigError: tools of the same name.
        """
        return Session(
            self.sampler,
            tools=tools,
            tool_parser=self.tool_parser,
            timeout_s=self.timeout_s,
            chunk_tokens=self.chunk_tokens,
            chat_template_kwargs=template_options,
        )


@dataclass
class Choice:
    """One of a request's samples."""

    index: int
    id: str
    session: Session
    sampling: Sampling
    turn: Turn | None = None

    async def sample(self, on_chunk: Callable[[Choice, Chunk], Awaitable[None]] | None = None) -> Turn:
        """Its turn, given out as it is sampled if anyone wants that.

        Raises:
            ProblemError: there is nothing to answer with.
        """
        if on_chunk is None:
            turn = await self.session.generate(self.sampling)
        else:
            async with self.session.stream(self.sampling) as stream:
                async for chunk in stream:
                    await on_chunk(self, chunk)
            turn = stream.turn
        if turn.finish_reason == "length" and not turn.completion.token_ids:
            message = f"the prompt has {len(turn.completion.prompt_ids)} tokens, which leaves no room in the context"
            raise ProblemError(400, message, code="context_length_exceeded")
        if turn.finish_reason == "abort":
            raise ProblemError(503, "it was aborted, by a weight sync or an end of the rollout", code="aborted")
        self.turn = turn
        return turn


class Answer:
    """The answer to one request while it is made: what its choices go on from, and who they are.

    Args:
        prefix: of its id.
        object: OpenAI's name of its shape.
        parent: the response that it goes on from.
    """

    def __init__(self, service: Service, prefix: str, object: str, parent: Node | None = None) -> None:
        self.service, self.parent = service, parent
        self.id, self._object, self._created = f"{prefix}-{uuid.uuid4().hex}", object, int(time.time())
        self.choices: list[Choice] = []

    def choose(self, sessions: Sequence[Session], sampling: Sampling) -> None:
        """Have a choice for each session."""
        ids = [self.id] if len(sessions) == 1 else [f"{self.id}-{i}" for i in range(len(sessions))]
        for i, session in enumerate(sessions):
            self.choices.append(Choice(i, ids[i], session, _seeded(sampling, i)))

    async def each(self, make: Callable[[Choice], Awaitable[object]]) -> None:
        """Make all choices at once. The first that fails ends the others."""
        await in_parallel(partial(make, choice) for choice in self.choices)

    def keep(self, choice: Choice, key: bytes | None = None, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        """Let a sampled choice be asked for, and be gone on from."""
        node = node_of(choice.id, self.session_id, choice.session, self.parent, key, messages)
        self.service.conversations.add(node)

    @property
    def session_id(self) -> str:
        """Of its conversation."""
        return self.id if self.parent is None else self.parent.session_id

    @property
    def turns(self) -> list[Turn]:
        """What was sampled."""
        return [choice.turn for choice in self.choices if choice.turn is not None]

    def shaped(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """An answer, or an event of one."""
        head = {"id": self.id, "object": self._object, "created": self._created, "model": self.service.model}
        return {**head, "session_id": self.session_id, "choices": choices, **more}


class Run(ABC):
    """One request while it is answered.

    Args:
        emit: for a stream.
    """

    def __init__(self, fields: Fields, answer: Answer, emit: Emit | None) -> None:
        self.answer, self._emit, self._with_usage = answer, emit, fields.with_usage

    async def play(self) -> Encoded | None:
        """Sample all choices: the answer, if it is not streamed. None is kept of one that cannot be encoded."""
        await self.answer.each(self._take)
        usage = usage_of(self.answer.turns)
        if self._emit is None:
            pairs = [*zip(self.answer.choices, self.answer.turns, strict=True)]
            whole = Encoded.of(self.answer.shaped([self._whole(choice, turn) for choice, turn in pairs], usage=usage))
            for choice, turn in pairs:
                self._keep(choice, turn)
            return whole
        if self._with_usage:
            await self._emit(self.answer.shaped([], usage=usage))
        return None

    async def _take(self, choice: Choice) -> None:
        """Sample one choice, and let it be gone on from before the client knows that it has ended."""
        turn = await self._sample(choice)
        if self._emit is not None:
            self._keep(choice, turn)
            await self._finish(choice, turn)

    async def _event(self, **choice: Any) -> None:
        assert self._emit is not None
        usage = {"usage": None} if self._with_usage else {}
        await self._emit(self.answer.shaped([choice], **usage))

    @abstractmethod
    async def _sample(self, choice: Choice) -> Turn:
        """A turn; where it is streamed, all its events but the last."""

    @abstractmethod
    def _keep(self, choice: Choice, turn: Turn) -> None: ...

    @abstractmethod
    def _whole(self, choice: Choice, turn: Turn) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""

    @abstractmethod
    async def _finish(self, choice: Choice, turn: Turn) -> None:
        """The last event of a choice."""


def _seeded(sampling: Sampling, index: int) -> Sampling:
    """Choices of one seed would all be the same."""
    if sampling.seed is None or index == 0:
        return sampling
    return sampling.replace(seed=(sampling.seed + index) % _MOST_SEED)
