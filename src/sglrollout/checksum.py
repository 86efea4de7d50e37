"""A checksum of a tensor's bits that is the same on a CPU and a GPU, for a trainer and an engine to compare.

Imports nothing of ours; torch only when called.
"""

from __future__ import annotations

from typing import Any

_CHUNK_ELEMENTS = 1 << 22
_MODULUS = 65521


def checksum(tensor: Any) -> int:
    """Sum of the elements' bits (those of 8 bytes in halves), each times its position modulo 65521 plus one.

    Exact integer arithmetic, modulo 2 to the 64, so it does not depend on the device or the order of summation. Any
    change of one element changes it, and so does exchanging two that differ, unless they are a multiple of 65521 apart.
    """
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
    bits = tensor.detach().contiguous().reshape(-1).view(integers[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK_ELEMENTS):
        chunk = bits[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), device=bits.device) % _MODULUS + 1
        total += (chunk * position).sum()
    return int(total) % (1 << 64)
