"""What goes wrong with a request, in OpenAI's words: a status, and ``{"error": {...}}``."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from sglrollout.errors import (
    ConfigError,
    EngineConnectionError,
    EngineDiedError,
    EngineRequestError,
    LifecycleError,
    NoEngineError,
    QueueFullError,
    RequestTimeoutError,
    StaleWeightsError,
)

_log = logging.getLogger("sglrollout.serve")

_SENT_AS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "json_schema": "response_format"}
"""Our options of sampling that a client knows by another name."""

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ProblemError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for a person.
        param: the field of the request that it is about.
        code: for a program.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self.message, self.param, self.code = status, message, param, code
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = _KINDS.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def problem_of(error: Exception) -> ProblemError:
    """The answer to a request that ended with ``error``. One that nobody foresaw is logged, without its message."""
    match error:
        case ProblemError():
            return error
        case ConfigError():
            field = _as_sent(error.field)
            return ProblemError(400, str(ConfigError(field, error.value, error.rule)), param=field)
        case RequestTimeoutError():
            return ProblemError(504, str(error), code="timeout")
        case QueueFullError():
            return ProblemError(429, str(error), code="queue_full")
        case NoEngineError() | LifecycleError() | StaleWeightsError() | EngineDiedError() | EngineConnectionError():
            first_line, *_ = str(error).splitlines()  # what follows is an engine's log, which is the trainer's alone
            return ProblemError(503, first_line, code="unavailable")
        case EngineRequestError() if "grammar" in str(error).lower():
            return ProblemError(400, str(error), code="invalid_grammar")
        case EngineRequestError():
            return ProblemError(500, str(error), code="engine_error")
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("a request to the OpenAI endpoint failed with %s:\n%s", type(error).__name__, where)
    return ProblemError(
        500, f"the endpoint failed with {type(error).__name__}: its log says where", code="internal_error"
    )


def _as_sent(field: str) -> str:
    name, dot, rest = field.removeprefix("sampling.").partition(".")
    return _SENT_AS.get(name, name) + dot + rest
