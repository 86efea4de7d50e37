"""An episode: one sample of a collection that the user's own function takes, turn by turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from sglrollout.errors import LifecycleError
from sglrollout.session.session import Session
from sglrollout.types import Completion

Episode: TypeAlias = Callable[[Session, Any], Awaitable[float | None]]
"""``async (session, task) -> reward``: adds messages and takes turns. ``None`` leaves the reward open."""


async def play_episode(session: Session, episode: Episode, task: Any) -> tuple[Completion, Any]:
    """All turns of an episode as one completion, and its reward. Whatever it raises is data in that completion.

    Its turns wait while the engines sleep, and go on after that.
    """
    session.wait_out_sleep()
    try:
        async with session:
            reward = await episode(session, task)
            return session.completion, reward
    except Exception as error:
        return _failed(session, error), None


def _failed(session: Session, error: Exception) -> Completion:
    try:
        completion = session.completion
    except LifecycleError:  # it had taken no turn
        completion = Completion((), (), (), "error")
    return dataclasses.replace(completion, finish_reason="error", error=error)
