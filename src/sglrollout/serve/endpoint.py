"""OpenAIEndpoint: what a training script has of the endpoint. Starlette and uvicorn are imported once it opens."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from sglrollout._address import bound_socket, check_address, url_of
from sglrollout.errors import ConfigError, LifecycleError
from sglrollout.generation.sampler import Sampler
from sglrollout.serve.conversations import Conversations
from sglrollout.serve.service import Service
from sglrollout.session.parsing import UserParser
from sglrollout.types import Completion

if TYPE_CHECKING:
    from sglrollout.serve.server import Server


class OpenAIEndpoint:
    """An OpenAI-compatible HTTP endpoint over the pool, made by :meth:`sglrollout.AsyncRolloutEngine.serve_openai`.

    ``async with`` opens and closes it. Agents talk to :attr:`url` with :attr:`api_key`; each response they get can be
    asked for here by its id: as one completion of all turns up to it, with the exact tokens. That remains after the
    block.

    A chat that repeats a response that was given before goes on from its tokens. Two that repeat the same one are two
    branches. What repeats none is a new conversation.

    Args:
        sampler: gives the running pool's sampler.
        model: its name.
        host, port, api_key, tool_parser, max_conversations, timeout_s: see
            :meth:`sglrollout.AsyncRolloutEngine.serve_openai`.
        chunk_tokens: of streams.

    Raises:
        ConfigError: an option is wrong.
    """

    def __init__(
        self,
        sampler: Callable[[], Awaitable[Sampler]],
        model: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        tool_parser: str | UserParser | None = None,
        max_conversations: int = 10_000,
        timeout_s: float | None = None,
        chunk_tokens: int = 8,
    ) -> None:
        _check(model, max_conversations)
        check_address(host, port, api_key)
        self._conversations = Conversations(max_conversations)
        self._service = Service(sampler, model, self._conversations, tool_parser, timeout_s, chunk_tokens)
        self._service.session()  # refuses a parser that is none
        self._host, self._port = host, port
        self._key = secrets.token_urlsafe(32) if api_key is None else api_key
        self._server: Server | None = None

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        """Wait for the pool, and open.

        Raises:
            ConfigError: the address cannot be had.
            LifecycleError: the rollout is not running, or this was open before.
        """
        if self._server is not None:
            raise LifecycleError("this endpoint was open before: make a new one")
        await self._service.sampler()
        from sglrollout.serve.server import Server

        bound = bound_socket(self._host, self._port)
        self._port = bound.getsockname()[1]
        self._server = Server(self._service, self._key, bound)
        try:
            await self._server.start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close: what is being served ends with status 503, and its samples are aborted."""
        if self._server is not None:
            with anyio.CancelScope(shield=True):
                await self._server.close()

    # ------------------------------------------------------------ for clients

    @property
    def url(self) -> str:
        """The ``base_url`` of a client.

        Raises:
            LifecycleError: it is not open yet.
        """
        if self._server is None:
            raise LifecycleError('this endpoint is not open yet: use "async with"')
        return f"{url_of(self._host, self._port)}/v1"

    @property
    def api_key(self) -> str:
        """The key that clients must have."""
        return self._key

    @property
    def model(self) -> str:
        """The model's name, which requests give."""
        return self._service.model

    # ------------------------------------------------------------ what was said

    def completion(self, response_id: str) -> Completion:
        """A conversation up to this response, as one sample: exact tokens, logprobs and versions, and a mask.

        Args:
            response_id: the ``id`` of a response; of one with several choices, followed by ``-0``, ``-1``, ...

        Raises:
            ConfigError: there is no such response, or no longer.
        """
        return self._conversations.get(response_id).session().completion

    def completions(self) -> dict[str, Completion]:
        """All conversations, each up to its latest response, by the id of that; a branch is one of its own."""
        return {node.id: node.session().completion for node in self._conversations.leaves()}

    def forget(self, response_id: str) -> None:
        """Let go of this response, of what goes on from it, and of what came before it and led to nothing else.

        Raises:
            ConfigError: there is no such response, or no longer.
        """
        self._conversations.forget(self._conversations.get(response_id))

    def take(self, response_id: str) -> Completion:
        """:meth:`completion`, and then :meth:`forget`.

        Raises:
            ConfigError: there is no such response, or no longer.
        """
        completion = self.completion(response_id)
        self.forget(response_id)
        return completion


def _check(model: str, max_conversations: int) -> None:
    if not isinstance(model, str) or not model.strip():
        raise ConfigError("model_name", model, "must be a text that is not empty")
    if type(max_conversations) is not int or max_conversations < 1:
        raise ConfigError("max_conversations", max_conversations, "must be an integer of at least 1")
