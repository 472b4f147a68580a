"""CPU memory: what the budget and the system allow."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lt_tiled.offload import pinned
from lt_tiled.offload.pinned import CPUMemory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_refused_pinning_falls_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that cannot be pinned is used unpinned, with one warning and no further attempts."""
    empty = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    monkeypatch.setattr(torch, "empty", empty)
    memory = CPUMemory(2**30)
    buffers = [memory.take(2**20, GPU) for _ in range(3)]
    assert all(buffer is not None for buffer in buffers)
    assert empty.call_count == 1
    assert caplog.text.count("refuses to pin CPU memory") == 1


def test_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any size, after those of other sizes, use the whole budget, and come back from several pieces. What is
    free counts until it is used again.
    """
    monkeypatch.setattr(pinned, "PIECE", 4 * pinned.ALIGNMENT)
    memory = CPUMemory(64 * pinned.ALIGNMENT)
    for pages in (1, 5, 64, 3, 16):
        tensors, stored = [], []
        for number in range(64 // pages):
            tensors.append(torch.full((pages * pinned.ALIGNMENT - 7,), number, dtype=torch.uint8))
            stored.append(memory.store(tensors[-1], None))
            free = sum(piece.nbytes for pieces in memory._free.values() for piece in pieces)
            assert free + sum(buffer.nbytes for buffer in memory._buffers) <= memory.budget
        assert memory.store(torch.ones(pages * pinned.ALIGNMENT, dtype=torch.uint8), None) is None
        for tensor, (buffer, *_) in zip(tensors, stored, strict=True):
            assert torch.equal(memory.load(buffer, tensor.nbytes, CPU)(), tensor)
            assert max(piece.nbytes for piece in buffer.pieces) <= pinned.PIECE
        del buffer, _
