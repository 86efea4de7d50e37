"""An OpenAI endpoint over engines that say what a script says, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx

import sglrollout as sr
from sglrollout.testing import ScriptedEngine
from sglrollout.text import Tokenizer

END = 2  # <|im_end|>
MODEL = "tiny"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ENDLESS = {**ASK, "max_tokens": 1900, "ignore_eos": True}


class Said:
    """A script that says one text after another, each ended by ``<|im_end|>``, and the last one for ever."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        self._tokenizer, self.texts, self.num_said = tokenizer, [*texts], 0

    def __call__(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], index: int
    ) -> tuple[Sequence[int], Sequence[float]]:
        text = self.texts[min(self.num_said, len(self.texts) - 1)]
        self.num_said += 1
        ids = [*self._tokenizer.inner(text, add_special_tokens=False)["input_ids"], END]
        return ids, [-0.5 - i / 8 for i in range(len(ids))]


def calling(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """A parser: ``@name {...}`` is a call, and what is before it is content."""
    content, found, call = text.partition("@")
    name, _, arguments = call.partition(" ")
    return (content, [(name, arguments)]) if found else (text, [])


@dataclass
class Serving:
    """All ends of it."""

    rollout: sr.AsyncRolloutEngine
    endpoint: sr.OpenAIEndpoint
    client: httpx.AsyncClient
    engine: ScriptedEngine

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """One answer, which must be one."""
        response = await self.client.post("/chat/completions", json={**ASK, "messages": messages, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @property
    def idle(self) -> bool:
        """No slot is taken, nobody waits, and the engine holds nothing."""
        slots = sum(status.num_inflight for status in self.rollout.engines)
        return not (slots or self.rollout.num_queued or self.engine.num_running or self.engine.num_waiting)


@asynccontextmanager
async def serving(model: Path, script: Any = None, engine: Any = None, **options: Any) -> AsyncIterator[Serving]:
    """An open endpoint. ``options`` are those of ``serve_openai``; ``engine`` those of the engine."""
    given = {"script": script} if script is not None else {}
    scripted = ScriptedEngine(**{"vocab_size": 512, "context_length": 2048, **given, **(engine or {})})
    config = sr.RolloutConfig(model=str(model), progress=False, max_restarts=0)
    async with (
        sr.AsyncRolloutEngine(config=config, engines=[scripted]) as rollout,
        rollout.serve_openai(**{"model_name": MODEL, **options}) as endpoint,
        client_of(endpoint) as client,
    ):
        yield Serving(rollout, endpoint, client, scripted)


def client_of(endpoint: sr.OpenAIEndpoint, key: str | None = None) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {endpoint.api_key if key is None else key}"}
    return httpx.AsyncClient(base_url=endpoint.url, headers=headers, trust_env=False, timeout=20)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """What an answer in OpenAI's shape says went wrong."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str)
    return error


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream but the last, which must say that it is done."""
    *events, done = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await asyncio.sleep(0.001)


def check_answer(response: httpx.Response) -> None:
    """Whether it is what may come of a request: what was asked for, or why not."""
    assert "Traceback" not in response.text
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        error_of(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        events_of(response.text)
    else:
        assert response.json()["choices"]
