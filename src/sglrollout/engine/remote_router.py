"""An SGLang router: which servers are behind it."""

from __future__ import annotations

from typing import Any

from sglrollout.engine.http import Http, UnreachableError, decoded

DROPPED = frozenset({"logit_bias"})
"""Options of sampling that a router (0.3.2) drops without a word."""


async def workers_of(http: Http, timeout_s: float) -> list[str]:
    """The addresses of its workers, in order, without those that it takes for dead.

    Raises:
        UnreachableError, RefusedError: it does not say, or has none yet.
    """
    said = decoded(await http.call("GET", "/workers", timeout_s=timeout_s))
    workers = said.get("workers", []) if isinstance(said, dict) else []
    urls = sorted({worker["url"] for worker in workers if _serves(worker)})
    if not urls:
        raise UnreachableError("the router has no worker that is up")
    return urls


def _serves(worker: Any) -> bool:
    return isinstance(worker, dict) and bool(worker.get("url")) and worker.get("is_healthy") is not False
