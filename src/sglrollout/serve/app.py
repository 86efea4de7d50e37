"""The endpoint's HTTP: who may ask, what is asked, and what becomes of it when somebody leaves."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sglrollout.errors import ConfigError, LifecycleError
from sglrollout.serve import replies
from sglrollout.serve.body import read_object
from sglrollout.serve.chats import chat
from sglrollout.serve.completions import complete
from sglrollout.serve.problems import ProblemError, problem_of
from sglrollout.serve.service import Emit, Service

Handler: TypeAlias = Callable[[Mapping[str, Any], Emit], Awaitable[replies.Encoded | None]]
"""Takes a request's body; returns its answer, or sends it by events."""

SESSION_HEADER = "x-session-id"
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?")


class Gate:
    """Lets requests in until it is closed, which ends those that are being served."""

    def __init__(self) -> None:
        self.closed = False
        self._running: set[anyio.CancelScope] = set()

    def close(self) -> None:
        """End what is being served, and let nothing in any more."""
        self.closed = True
        for scope in tuple(self._running):
            scope.cancel()

    @contextmanager
    def passed(self) -> Iterator[anyio.CancelScope]:
        """What runs in here is cancelled when this is closed."""
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            try:
                yield scope
            finally:
                self._running.discard(scope)


class _Reply:
    """One answer: a JSON object, or events as they come."""

    def __init__(self, send: Send) -> None:
        self._send, self._begun, self._lock = send, False, anyio.Lock()
        self._streams = False

    async def whole(self, response: Response) -> None:
        """All of it, at once."""
        self._begun = True
        await response({"type": "http"}, _never, self._send)

    async def event(self, data: Mapping[str, Any]) -> None:
        """One event. The first one commits to a stream."""
        event = b"data: " + replies.encoded(data) + b"\n\n"
        async with self._lock:
            if not self._begun:
                self._begun = self._streams = True
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                if session_id := data.get("session_id"):
                    headers[SESSION_HEADER] = session_id
                raw = [(name.encode(), value.encode()) for name, value in headers.items()]
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            await self._body(event)

    async def end(self) -> None:
        """The end of a stream."""
        await self._body(b"data: [DONE]\n\n", more=False)

    async def fail(self, error: Exception) -> None:
        """What went wrong: as the answer, or as the last event of the stream that it ends."""
        problem = problem_of(error)
        if not self._begun:
            await self.whole(json_response(problem.body, problem.status))
        elif self._streams:
            await self._body(b"data: " + replies.encoded(problem.body) + b"\n\n", more=False)

    async def _body(self, body: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


def json_response(body: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON object."""
    return Response(replies.encoded(body), status, media_type="application/json")


def _in_conversation(answer: replies.Encoded) -> Response:
    """An answer, whose header names its conversation."""
    return Response(answer.body, headers={SESSION_HEADER: answer.session_id}, media_type="application/json")


async def _never() -> Any:
    raise AssertionError("a response does not read")


class _Post:
    """A route whose requests carry a JSON object."""

    def __init__(self, handler: Handler, gate: Gate) -> None:
        self._handler, self._gate = handler, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, reply = Request(scope, receive), _Reply(send)
        if self._gate.closed:
            return await reply.fail(_closed())
        gone = False
        with self._gate.passed() as passed:
            try:
                gone = await self._serve(request, reply)
            except ClientDisconnect:
                gone = True
        if passed.cancelled_caught and not gone:
            await reply.fail(_closed())

    async def _serve(self, request: Request, reply: _Reply) -> bool:
        """Answer, unless the client leaves first; whether it has left."""
        try:
            body = await read_object(request)
        except ProblemError as error:
            await reply.fail(error)
            return False
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone = True
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await self._answer(body, reply)
            tasks.cancel_scope.cancel()
        return gone

    async def _answer(self, body: Mapping[str, Any], reply: _Reply) -> None:
        try:
            answer = await self._handler(body, reply.event)
            await (reply.end() if answer is None else reply.whole(_in_conversation(answer)))
        except Exception as error:
            await reply.fail(error)


def _closed() -> ProblemError:
    return problem_of(LifecycleError("this endpoint is closed"))


class _Locked:
    """Lets in those who have the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._key = app, api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not all(_HOST.fullmatch(value) for name, value in scope["headers"] if name == b"host"):
            problem = ProblemError(400, "the Host header names no host")
        elif scope["path"] == "/health" or self._has_key(scope):
            return await self._app(scope, receive, send)
        else:
            problem = ProblemError(
                401, "the API key is missing or wrong: send it as a Bearer token", code="invalid_api_key"
            )
        await json_response(problem.body, problem.status)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(key.strip(), self._key)


def build_app(service: Service, gate: Gate, api_key: str) -> Starlette:
    """All routes, behind the key."""
    model = {"id": service.model, "object": "model", "created": service.created, "owned_by": "sglrollout"}

    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        return (
            json_response(model)
            if name == service.model
            else _no(f"there is no model {name!r:.200}", "model_not_found")
        )

    async def conversation(request: Request) -> Response:
        try:
            node = service.conversations.get(request.path_params["id"])
        except ConfigError as error:
            return _no(str(error), "conversation_not_found")
        try:
            return _in_conversation(replies.Encoded.of(replies.conversation(node)))
        except Exception as error:
            problem = problem_of(error)
            return json_response(problem.body, problem.status)

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/conversations/{id}", conversation),
        Route("/v1/chat/completions", _Post(partial(chat, service), gate), methods=["POST"]),
        Route("/v1/completions", _Post(partial(complete, service), gate), methods=["POST"]),
    ]
    handlers = {HTTPException: _http_problem}
    app = Starlette(routes=routes, middleware=[Middleware(_Locked, api_key=api_key)], exception_handlers=handlers)
    app.router.redirect_slashes = False  # to an address that is made of the client's own Host header
    return app


def _no(message: str, code: str) -> Response:
    return json_response(ProblemError(404, message, code=code).body, 404)


async def _http_problem(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    problem = ProblemError(error.status_code, f"{request.method} {request.scope['path']}: {error.detail}")
    response = json_response(problem.body, problem.status)
    response.headers.update(error.headers or {})
    return response
