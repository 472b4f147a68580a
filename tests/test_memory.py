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


@pytest.mark.parametrize("device", ["second", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_peak_of_an_accelerator_is_of_the_span(device: str) -> None:
    """On an accelerator the peak is what its allocator handed out at most since the reset."""
    memory = PeakMemory(torch.device(device, 0))
    held = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    memory.reset()
    torch.ones(128 * MIB, dtype=torch.uint8, device=device)
    assert memory.read() == torch.get_device_module(device).memory_allocated() + 128 * MIB
    assert memory.describe(memory.read()).endswith(f"(allocated on {device}:0)")
    assert held.nbytes == 64 * MIB


@pytest.mark.parametrize("device", ["second"], indirect=True)
def test_peak_of_one_of_two_accelerators(device: str) -> None:
    """The peak is that of the device that is asked for, and not of another one in the process."""
    memories = [PeakMemory(torch.device(device, index)) for index in range(2)]
    before = [memory.read() for memory in memories]
    held = torch.ones(MIB, dtype=torch.uint8, device=f"{device}:1")
    assert [memory.read() - peak for memory, peak in zip(memories, before, strict=True)] == [0, held.nbytes]
