"""A checksum of a tensor's bits that is the same on a CPU and a GPU, for a trainer and an engine to compare.

Imports nothing of ours; torch only when called.
"""

from __future__ import annotations

from typing import Any

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""What fits into a CPU's cache, where this is ten times as fast; on a GPU so much that launches do not count."""
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
    most = _CHUNK_ELEMENTS[bits.device.type]
    num_positions = bits.numel() if bits.numel() <= most else most + _MODULUS
    positions = torch.arange(num_positions, device=bits.device) % _MODULUS + 1
    for start in range(0, bits.numel(), most):
        chunk = bits[start : start + most].to(torch.int64)
        first = start % _MODULUS
        total += (chunk * positions[first : first + chunk.numel()]).sum()
    return int(total) % (1 << 64)
