"""A request's body: read up to a limit, and parsed."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import anyio
from starlette.requests import Request

from sglrollout.serve.problems import ProblemError
from sglrollout.session.parsing import MOST_DEPTH, is_shallow
from sglrollout.text import is_unicode

MOST_BYTES = 32 * 2**20
READ_S = 60.0


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object that a request carries.

    Raises:
        ProblemError: it is too large, takes too long to come, or is none.
    """
    try:
        with anyio.fail_after(READ_S):
            body = await _read(request)
    except TimeoutError:
        raise ProblemError(408, f"the body did not come within {READ_S:g} s") from None
    return _parsed(body)


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MOST_BYTES:
        raise _too_large()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise _too_large()
    return bytes(body)


def _too_large() -> ProblemError:
    return ProblemError(413, f"the body has more than {MOST_BYTES} bytes", code="body_too_large")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode(), parse_constant=_no_constant, parse_float=_finite)
    except ValueError as error:
        raise ProblemError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    if not is_shallow(value):
        raise _too_deep()
    if not isinstance(value, dict):
        raise ProblemError(400, "the body must be a JSON object")
    if b"\\u" in body and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ProblemError(400, "the body must hold valid Unicode, without lone surrogates")
    return value


def _too_deep() -> ProblemError:
    return ProblemError(400, f"the body is nested too deeply: {MOST_DEPTH} levels are allowed")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number:.40} is too large a number")
    return value
