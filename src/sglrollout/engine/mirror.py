"""A server's own copy of its weights on its machine, so that of new ones only the changes must come to it.

The server reads it as it reads any folder of weights. Servers that this library starts have one; a trainer asks what
is in it, and has it brought up to date, over HTTP.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import anyio.to_thread
from safetensors import SafetensorError

from sglrollout.wire.delta import MANIFEST, DeltaError, File, Manifest

ROUTE = "/sglrollout/weights"


class Mirror:
    """Safetensors files in a folder of this server's own.

    Args:
        folder: made when it is first needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = ""
        """Of the weights that are there; empty where there are none, or a half of some."""
        self._lock = threading.Lock()

    def update(self, source: Path) -> None:
        """Have the weights of a folder that a trainer wrote: copied, or what is there changed by it.

        Raises:
            DeltaError: they are changes of other weights than those here, or are not what the trainer has: then there
                are none here any more.
            OSError: files could not be read, or written.
        """
        with self._lock:
            manifest = Manifest.read(source)
            if manifest.base and manifest.base != self.id:
                raise DeltaError(f"these are changes of {manifest.base}, and here is {self.id or 'nothing'}")
            self.id = ""
            if not manifest.base:
                self._copy(source)
            for name, sums in manifest.sums.items():
                file = File(self.folder / name)
                if manifest.base:
                    file.apply(_read(source / name))
                file.check(sums)
            self.id = manifest.id

    def _copy(self, source: Path) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir()
        for path in source.iterdir():
            if path.name != MANIFEST:
                shutil.copyfile(path, self.folder / path.name)


def _read(path: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    try:
        changes: dict[str, Any] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DeltaError(f"{path} cannot be read: {error}") from error
    return changes


def add_to(app: Any, mirror: Mirror) -> None:
    """Let a FastAPI app of SGLang's answer for it: GET what it has, POST what it is to have."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def state() -> dict[str, Any]:
        return {"id": mirror.id, "folder": str(mirror.folder)}

    async def update(body: dict[str, Any]) -> dict[str, Any]:
        try:
            await anyio.to_thread.run_sync(mirror.update, Path(str(body.get("folder"))))
        except (DeltaError, OSError) as error:
            return {"success": False, "message": f"{error}"}
        return {"success": True, "message": "", **await state()}

    app.add_api_route(ROUTE, auth_level(AuthLevel.ADMIN_OPTIONAL)(state), methods=["GET"])
    app.add_api_route(ROUTE, auth_level(AuthLevel.ADMIN_OPTIONAL)(update), methods=["POST"])
