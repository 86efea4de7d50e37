"""An SGLang router: which servers are behind it."""

from __future__ import annotations

from sglrollout.engine.http import Http, UnreachableError, decoded


async def workers_of(http: Http, timeout_s: float) -> list[str]:
    """The addresses of its workers, in order.

    Raises:
        UnreachableError, RefusedError: it does not say, or has none yet.
    """
    said = decoded(await http.call("GET", "/workers", timeout_s=timeout_s))
    workers = said.get("workers", []) if isinstance(said, dict) else []
    urls = sorted({worker["url"] for worker in workers if isinstance(worker, dict) and worker.get("url")})
    if not urls:
        raise UnreachableError("the router has no worker")
    return urls
