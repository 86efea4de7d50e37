"""Inside SGLang's scheduler: writes this TP rank's weights into an anonymous file, and takes them from one.

So an engine that was restarted gets the weights of one that has them. The file is in memory and has no name: it is gone
once nobody holds it, however they ended. It holds the bytes of each tensor, then a header that describes them, then the
header's length. Both sides go on for so many bytes at a time, since a scheduler takes no step meanwhile.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Generator, Iterator
from typing import Any

import msgspec
import torch

from sglrollout.checksum import checksum

_PIECE_BYTES = 32 << 20
_LENGTH_BYTES = 8
_FORMAT = "sglrollout weights 1"


class Entry(msgspec.Struct, array_like=True):
    """A tensor in the file. ``derived``: a module computed it from its parameters, and keeps it as an attribute."""

    name: str
    dtype: str
    shape: list[int]
    derived: bool
    offset: int
    checksum: int = 0


class Header(msgspec.Struct, array_like=True):
    format: str
    entries: list[Entry]


class WeightsDifferError(Exception):
    """The file is not of a model like this one, or it is broken."""


class Export:
    """This TP rank's weights, on their way into a file. They must not change before it is done."""

    def __init__(self, model: Any) -> None:
        self.fd = os.memfd_create("sglrollout-weights")
        self._work = self._write(weights_of(model))

    def go_on(self, num_bytes: int) -> bool:
        """Write that many bytes, or a little more; whether all is written."""
        return _go_on(self._work, num_bytes)

    def close(self) -> None:
        """Let go of the file, on a thread: if nobody else holds it, its memory is freed, at 0.2 s per GB."""
        self._work.close()
        if self.fd >= 0:
            threading.Thread(target=os.close, args=(self.fd,), daemon=True, name="drop-export").start()
            self.fd = -1

    def _write(self, tensors: dict[str, tuple[torch.Tensor, bool]]) -> Generator[int, None, None]:
        entries, offset = [], 0
        buffer = _Buffer()
        for name, (tensor, derived) in tensors.items():
            entry = Entry(name, _dtype_name(tensor), list(tensor.shape), derived, offset, checksum(tensor))
            entries.append(entry)
            for piece in _pieces(tensor):
                data = buffer.holding(piece.contiguous().reshape(-1).view(torch.uint8))
                _write_all(self.fd, data, offset)
                offset += len(data)
                yield len(data)
        header = msgspec.msgpack.encode(Header(_FORMAT, entries))
        _write_all(self.fd, memoryview(header + len(header).to_bytes(_LENGTH_BYTES, "little")), offset)


class Adoption:
    """Weights from a file, on their way into this TP rank's own tensors, in place.

    Raises:
        WeightsDifferError: it is not of a model like this one; nothing was changed.
    """

    def __init__(self, model: Any, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            tensors, entries = weights_of(model), _read_header(self._fd)
            refuse_others(tensors, entries)
        except BaseException:
            os.close(self._fd)
            raise
        self._work = self._read([(entry, tensors[entry.name][0]) for entry in entries if entry.name in tensors])

    def go_on(self, num_bytes: int) -> bool:
        """Take that many bytes, or a little more; whether all is there.

        Raises:
            WeightsDifferError: what arrived is not what was written; the weights are a mixture.
        """
        return _go_on(self._work, num_bytes)

    def close(self) -> None:
        self._work.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, targets: list[tuple[Entry, torch.Tensor]]) -> Generator[int, None, None]:
        buffer = _Buffer()
        for entry, tensor in targets:
            offset = entry.offset
            for piece in _pieces(tensor):
                room = buffer.of(piece.nbytes)
                _read_all(self._fd, room, offset)
                offset += piece.nbytes
                piece.copy_(buffer.tensor[: piece.nbytes].view(piece.dtype).view(piece.shape))
                yield piece.nbytes
            if checksum(tensor) != entry.checksum:
                raise WeightsDifferError(f"the bytes of {entry.name} are not those that were written")


def size_of(model: Any) -> int:
    """Bytes that its weights take in a file, but for the header."""
    return sum(tensor.nbytes for tensor, _ in weights_of(model).values())


def weights_of(model: Any) -> dict[str, tuple[torch.Tensor, bool]]:
    """Each distinct tensor of a model under its first name, and whether it is derived from others.

    Beside parameters and buffers these are floating-point tensors that modules hold as plain attributes: a model may
    compute them from its parameters once those are loaded (for instance the absorbed projections of MLA).
    """
    derived = (
        (f"{name}.{attribute}" if name else attribute, value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )
    own = itertools.chain(model.named_parameters(), model.named_buffers())
    found: dict[str, tuple[torch.Tensor, bool]] = {}
    seen = set()
    for (name, tensor), is_derived in [*((item, False) for item in own), *((item, True) for item in derived)]:
        if tensor.is_meta or not tensor.numel():
            continue
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if place not in seen:
            seen.add(place)
            found[name] = (tensor.detach(), is_derived)
    return found


def refuse_others(tensors: dict[str, tuple[torch.Tensor, bool]], entries: list[Entry]) -> None:
    """Whether a file with these entries is of a model like the one with these tensors.

    Raises:
        WeightsDifferError: it is not; names the first tensor that differs.
    """
    theirs = {entry.name: entry for entry in entries}
    for name, (tensor, _) in tensors.items():
        entry, dtype, shape = theirs.get(name), _dtype_name(tensor), list(tensor.shape)
        if entry is None:
            raise WeightsDifferError(f"{name} is not among the weights of the other engine")
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise WeightsDifferError(f"{name} is {dtype} {shape}, and {entry.dtype} {entry.shape} in the other engine")
    for entry in entries:  # what is derived may be made when it is first needed, here too
        if entry.name not in tensors and not entry.derived:
            raise WeightsDifferError(f"{entry.name} of the other engine is not among the weights")


class _Buffer:
    """Host memory for one piece after the other, pinned where there is a GPU."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def of(self, num_bytes: int) -> memoryview:
        if self.tensor.numel() < num_bytes:
            size = max(num_bytes, _PIECE_BYTES)
            self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return memoryview(self.tensor.numpy())[:num_bytes]

    def holding(self, data: torch.Tensor) -> memoryview:
        room = self.of(data.numel())
        self.tensor[: data.numel()].copy_(data)
        return room


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in parts along its first dimension, of some megabytes or one row."""
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    most = max(1, _PIECE_BYTES * rows.shape[0] // max(1, rows.nbytes))
    for start in range(0, rows.shape[0], most):
        yield rows.narrow(0, start, min(most, rows.shape[0] - start))


def _go_on(work: Generator[int, None, None], num_bytes: int) -> bool:
    done = 0
    for size in work:
        done += size
        if done >= num_bytes:
            return False
    return True


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _read_header(fd: int) -> list[Entry]:
    end = os.fstat(fd).st_size - _LENGTH_BYTES
    try:
        length = int.from_bytes(_read_all(fd, memoryview(bytearray(_LENGTH_BYTES)), end), "little")
        data = _read_all(fd, memoryview(bytearray(length)), end - length)
        header = msgspec.msgpack.decode(data, type=Header)
    except (OSError, MemoryError, OverflowError, ValueError, msgspec.DecodeError) as error:
        raise WeightsDifferError(f"the file does not end with a header: {error}") from None
    if header.format != _FORMAT:
        raise WeightsDifferError(f"the file is of format {header.format!r:.40}, and {_FORMAT!r} is known here")
    return header.entries


def _read_all(fd: int, room: memoryview, offset: int) -> memoryview:
    """Fill ``room``. Not a mapping: to touch one of a file that was cut would end this process."""
    done = 0
    while done < len(room):
        count = os.preadv(fd, [room[done:]], offset + done)
        if not count:
            raise WeightsDifferError("the file ended early")
        done += count
    return room


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
