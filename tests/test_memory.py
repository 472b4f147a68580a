"""The peak memory of a span of work."""

from __future__ import annotations

import pytest
import torch

from lt_tiled.memory import PeakMemory

MIB = 2**20


def test_cpu_peak_is_of_the_span() -> None:
    """On a CPU the peak holds what was alive at once since the reset, and not what was there before it."""
    memory = PeakMemory(torch.device("cpu"))
    torch.ones(256 * MIB, dtype=torch.uint8)  # freed at once
    memory.reset()
    before = memory.read()
    torch.ones(128 * MIB, dtype=torch.uint8)
    assert 120 * MIB < memory.read() - before < 160 * MIB


@pytest.mark.gpu
def test_cuda_peak_is_of_the_span() -> None:
    """On CUDA the peak is what torch allocated at most since the reset."""
    memory = PeakMemory(torch.device("cuda", 0))
    held = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    memory.reset()
    torch.ones(128 * MIB, dtype=torch.uint8, device="cuda")
    assert memory.read() == torch.cuda.memory_allocated() + 128 * MIB
    assert held.nbytes == 64 * MIB
