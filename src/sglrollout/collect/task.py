"""What a source of prompts yields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglrollout.errors import ConfigError
from sglrollout.types import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and what its reward needs to know of it.

    Attributes:
        prompt: a text, token ids, or chat messages.
        data: anything: the right answer, a row of the dataset. Rewards, filters and episodes get it.
    """

    prompt: Prompt
    data: Any = field(default=None, repr=False)


def as_task(item: object, name: str) -> Task:
    """A source's item as a task: a :class:`Task`, a prompt, or a row with a ``prompt``, which becomes the data.

    Raises:
        ConfigError: of ``name``.
    """
    if isinstance(item, Task):
        return item
    if isinstance(item, Mapping):
        if "prompt" not in item:
            raise ConfigError(name, item, 'must have a "prompt"')
        return Task(item["prompt"], item)
    return Task(item)  # type: ignore[arg-type]  # checked as a prompt, by the sampler
