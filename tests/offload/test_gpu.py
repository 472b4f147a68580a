"""Offloading from a GPU: copies beside the computation, in the right order. See ``test_blocks.py`` for the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_tiled import ActivationCheckpointing
from lt_tiled.offload.offloader import build_offloader
from tests.offload.offloaders import settle
from tests.offload.test_offloader import TIERS


def busy(size: int = 4096, times: int = 20) -> torch.Tensor:
    """A result that the current stream is still computing when this returns."""
    x = torch.randn(size, size, device="cuda")
    for _ in range(times):
        x = x @ x / size**0.5
        x = x / x.norm() * size
    return x


@pytest.mark.gpu
@pytest.mark.parametrize(("offload", "fields"), TIERS)
def test_copies_wait_for_the_computation(offload: str, fields: dict[str, Any]) -> None:
    """What is packed while it is still being computed, on whatever stream is current, comes back as computed.

    Without the wait of the copy stream for the compute stream it comes back as it was before.
    """
    fields = {"offload": offload, "keep_last": 0, "cpu_budget": None, **fields}
    offloader = build_offloader(ActivationCheckpointing(**fields))
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            tensors = [busy() for _ in range(3)]
            packed = [offloader.pack(t, "block") for t in tensors]
            expected = [t.clone() for t in tensors]
            del tensors
            settle(offloader)
            buffers = [buffer for tier in offloader._tiers for buffer in getattr(tier, "_memory", tier)._buffers]
            assert buffers or offload == "disk"
            assert all(piece.is_pinned() for buffer in buffers for piece in buffer.pieces)
            noise = [torch.full((4096, 4096), float("nan"), device="cuda") for _ in range(3)]  # takes the freed memory
            back = [offloader.unpack(p) for p in reversed(packed)][::-1]
            assert all(torch.equal(a, b) for a, b in zip(back, expected, strict=True))
            del noise, packed, back
    offloader.close()
