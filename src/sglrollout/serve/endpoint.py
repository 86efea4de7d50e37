"""OpenAIEndpoint: what a training script has of the endpoint. Starlette and uvicorn are imported once it opens."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

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
        _check(model, host, port, api_key, max_conversations)
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

        bound = _bind(self._host, self._port)
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
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

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


def _check(model: str, host: str, port: int, api_key: str | None, max_conversations: int) -> None:
    for name, value in (("model_name", model), ("host", host)):
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(name, value, "must be a text that is not empty")
    if type(port) is not int or not 0 <= port < 65536:
        raise ConfigError("port", port, "must be an integer from 0 to 65535")
    if api_key is not None and not (isinstance(api_key, str) and api_key and all("!" <= c <= "~" for c in api_key)):
        raise ConfigError("api_key", "...", "must be a text of ASCII characters without spaces")
    if type(max_conversations) is not int or max_conversations < 1:
        raise ConfigError("max_conversations", max_conversations, "must be an integer of at least 1")


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the address.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle's delays on
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError("port", port, f"must be one that is free on {host} ({error.strerror})") from error
        raise ConfigError("host", host, f"must be an address of this machine ({error})") from error
    return bound
