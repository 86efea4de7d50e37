"""A server's own copy of its weights on its machine, so that of new ones only the changes must come to it.

The server reads it as it reads any folder of weights. Servers that this library starts have one; a trainer asks what
is in it, and has it brought up to date, over HTTP.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
from safetensors import SafetensorError

from sglrollout.wire.delta import DeltaError, File, Manifest

ROUTE = "/sglrollout/weights"


class Mirror:
    """Safetensors files in a folder of this server's own. Whole weights get a new one, and that of those before stays
    until the next update: SGLang may still read it, for a trainer that waits no more.

    Args:
        root: in which these folders are; made when it is first needed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root
        self.id = ""
        """Of the weights that are there; empty where there are none, or a half of some."""
        self._lock = threading.Lock()

    def update(self, source: Path, new_id: str) -> None:
        """Have the weights of a folder that a trainer wrote: copied, or what is there changed by it.

        Raises:
            DeltaError: that is not possible: the folder has other weights, or changes of others than those here, or is
                damaged, or cannot be read; there is no room; or what is here is not what the trainer has, after it.
        """
        with self._lock:
            try:
                self._update(source, new_id)
            except (
                OSError,
                LookupError,
                AttributeError,
                TypeError,
                ValueError,
                OverflowError,
                SafetensorError,
            ) as error:
                raise DeltaError(f"{type(error).__name__}: {error}") from error

    def _update(self, source: Path, new_id: str) -> None:
        manifest = Manifest.read(source)
        if manifest.id != new_id:
            raise DeltaError(f"{source} has the weights {manifest.id}, and those should be {new_id}")
        if manifest.base and manifest.base != self.id:
            raise DeltaError(f"these are changes of {manifest.base}, and here is {self.id or 'nothing'}")
        self._remove_outdated()
        if manifest.base:
            self.id = ""
            for name in manifest.changed:
                File(self.folder / name).apply(_read(source / name))
            _check(self.folder, manifest.sums)
        else:
            self.folder = self._copy(source, manifest)
        self.id = new_id

    def _copy(self, source: Path, manifest: Manifest) -> Path:
        """A new folder of whole weights, or none."""
        files = [_regular(source / name) for name in manifest.changed]
        self._root.mkdir(exist_ok=True)
        needed, free = sum(path.stat().st_size for path in files), shutil.disk_usage(self._root).free
        if needed > free:
            raise DeltaError(f"{self._root} has {free / 1e9:.3g} GB free, and a copy needs {needed / 1e9:.3g}")
        folder = self._root / manifest.id
        folder.mkdir()
        try:
            for path in files:
                shutil.copyfile(path, folder / path.name, follow_symlinks=False)
            _check(folder, manifest.sums)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _remove_outdated(self) -> None:
        if self._root.exists():
            for folder in self._root.iterdir():
                if folder != self.folder:
                    shutil.rmtree(folder, ignore_errors=True)


def _check(folder: Path, sums: Mapping[str, Mapping[str, int]]) -> None:
    for name, of_file in sums.items():
        File(folder / name).check(of_file)


def _read(path: Path) -> dict[str, Any]:
    from safetensors.numpy import load

    changes: dict[str, Any] = load(_regular(path).read_bytes())  # not mapped: a share that breaks would kill the server
    return changes


def _regular(path: Path) -> Path:
    if path.is_symlink() or not path.is_file():
        raise DeltaError(f"{path} is not a file")
    return path


def add_to(app: Any, mirror: Mirror) -> None:
    """Let a FastAPI app of SGLang's answer for it: GET what it has, POST what it is to have."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def state() -> dict[str, Any]:
        return {"id": mirror.id, "folder": str(mirror.folder)}

    async def update(body: dict[str, str]) -> dict[str, Any]:
        try:
            await anyio.to_thread.run_sync(mirror.update, Path(body.get("folder", "")), body.get("id", ""))
        except DeltaError as error:
            return {"refusal": str(error), **await state()}
        return {"refusal": None, **await state()}

    app.add_api_route(ROUTE, auth_level(AuthLevel.ADMIN_OPTIONAL)(state), methods=["GET"])
    app.add_api_route(ROUTE, auth_level(AuthLevel.ADMIN_OPTIONAL)(update), methods=["POST"])
