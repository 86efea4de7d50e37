"""A LoRA adapter that engines sample with, where a weight syncer brings one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglrollout.engine.protocol import Engine


@dataclass(frozen=True)
class Adapter:
    """One version of it.

    Attributes:
        name: the same in every version, by which requests ask for it.
        folder: has it as PEFT saves one: ``adapter_config.json`` and ``adapter_model.safetensors``.
        config: what the former says.
    """

    name: str
    folder: Path
    config: dict[str, Any] = field(hash=False)

    async def bring(self, engine: Engine, timeout_s: float) -> None:
        """Let an engine load it, in place of the version that it has.

        Raises:
            EngineError: it did not.
        """
        arguments = {"adapter": self.name, "folder": str(self.folder), "config": self.config}
        await engine.command("load_adapter", timeout_s, **arguments)
