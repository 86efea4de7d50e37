"""What changed of weights on a GPU is what it would be on the CPU, and takes little of the GPU's memory."""

from __future__ import annotations

import pytest
import torch

from sglrollout.wire.delta import bits, update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is visible"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.000001, 0.004, 0.2, 1.0])
def test_changes_found_on_a_gpu_are_those_found_on_the_cpu(dtype: torch.dtype, share: float) -> None:
    size = (1 << 23) + 77
    generator = torch.Generator().manual_seed(0)
    old, other = (torch.randint(256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator) for _ in "12")
    old, other = bits(old.view(dtype)), bits(other.view(dtype))
    new = torch.where(torch.rand(size, generator=generator) < share, other, old)
    kept = old.clone()
    on_cpu, on_gpu = update("w", old, new), update("w", kept, new.cuda())
    assert torch.equal(kept, new)
    assert on_gpu.keys() == on_cpu.keys()
    assert all(torch.equal(bits(on_gpu[name]), bits(on_cpu[name])) for name in on_cpu)


def test_the_gpu_need_not_hold_the_places_of_all_elements() -> None:
    new = torch.randint(-30000, 30000, (1 << 28,), dtype=torch.int16, device="cuda")
    for every in (1, 4, 300):
        old = new.cpu()
        old[::every] ^= 1
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert update("w", old, new)
        assert torch.cuda.max_memory_allocated() - before < 512 << 20
