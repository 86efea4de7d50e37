"""SGLang's finish reasons, in our words."""

from __future__ import annotations

from typing import Any

from sglrollout.wire.messages import Finish

_NAN = "NaN happened"  # how SGLang ends a request on NaN logits: as if it had matched this stop string


def to_finish(reason: dict[str, Any], prompt_tokens: int = 0, cached_tokens: int = 0) -> Finish:
    """SGLang's finish reason in our words: an abort that carries an error status is an error."""
    kind, message = reason.get("type", "error"), str(reason.get("message") or "")
    if kind == "abort" and reason.get("status_code"):
        kind = "error"
    if reason.get("matched") == _NAN:
        return Finish("error", message="the model produced NaN, or a token outside its vocabulary")
    if kind not in ("stop", "length", "abort", "error"):
        kind, message = "error", f"unknown finish reason {reason}"
    return Finish(kind, reason.get("matched"), message, prompt_tokens or 0, cached_tokens or 0)
