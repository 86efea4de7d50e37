"""Environments that a session plays in: ``reset`` and ``step``, plain or async, gymnasium's shapes included."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sglrollout.errors import ConfigError
from sglrollout.session.conversation import as_messages
from sglrollout.threads import Worker, is_async, outcome
from sglrollout.types import Message


@runtime_checkable
class Environment(Protocol):
    """What :meth:`sglrollout.Session.play` plays in.

    Both methods may be plain functions, which run on a thread (all calls of one play on the same one), or ``async``.

    ``reset(task)``, or ``reset()`` where ``play`` was given no task, returns the first observation: a text, which
    becomes a user turn, one chat message, or a list of them. Gymnasium's ``(observation, info)`` is taken as well.

    ``step(text)`` takes what the model said and returns ``(observation, reward, done)``, or gymnasium's
    ``(observation, reward, terminated, truncated, info)``. When it is done the observation is not looked at.
    """

    @property
    def reset(self) -> Callable[..., Any]: ...

    @property
    def step(self) -> Callable[[str], Any]: ...


class Step(NamedTuple):
    """What came of one step. There are no messages when it is done."""

    messages: list[Message]
    reward: float
    done: bool


class Play:
    """The calls of one play."""

    def __init__(self, environment: Environment) -> None:
        if not callable(getattr(environment, "reset", None)) or not callable(getattr(environment, "step", None)):
            raise ConfigError("environment", environment, "must have reset and step")
        self._environment, self._worker = environment, Worker()

    async def reset(self, task: object) -> list[Message]:
        """The first observation.

        Raises:
            ConfigError: it is no text and no message.
        """
        reset = self._environment.reset
        observation = await outcome(reset if task is None else partial(reset, task), is_async(reset), self._worker)
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):
            observation = observation[0]
        return as_messages(observation, "environment")

    async def step(self, text: str) -> Step:
        """One step.

        Raises:
            ConfigError: the environment returned something else than a step.
        """
        step = self._environment.step
        result = await outcome(partial(step, text), is_async(step), self._worker)
        match result:
            case (observation, reward, done):
                ended = bool(done)
            case (observation, reward, terminated, truncated, _):
                ended = bool(terminated or truncated)
            case _:
                rule = "must return (observation, reward, done) or gymnasium's five from step"
                raise ConfigError("environment", result, rule)
        return Step([] if ended else as_messages(observation, "environment"), _as_reward(reward), ended)

    def end(self) -> None:
        """Let go of its thread."""
        self._worker.end()


def _as_reward(reward: Any) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(reward, str) or not math.isfinite(value):
        raise ConfigError("environment", reward, "must return a finite number as the reward")
    return value
