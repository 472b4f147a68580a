"""Tensors as bytes and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lt_tiled import ActivationCheckpointing
from lt_tiled.offload.offloader import OffloadedTensor, build_offloader
from lt_tiled.offload.tensors import movable

BASE = torch.arange(240.0)
TABLE = BASE.view(20, 12)


@pytest.mark.low_precision
@pytest.mark.parametrize(
    "tensor",
    [
        BASE.view(2, 10, 12).transpose(1, 2),
        TABLE.t(),
        TABLE[3:7],  # offset view
        TABLE[:, 2:9],  # gaps
        TABLE[:, :1].expand(20, 12),  # stride 0
        torch.tensor(3.0),
        BASE.as_strided((20, 8), (2, 1)),  # overlapping windows
        TABLE > 3,
        TABLE.to(torch.int16),
        TABLE.to(torch.complex64),
        TABLE.bfloat16(),
        TABLE.half(),
        TABLE.to(torch.float8_e4m3fn),
    ],
    ids=lambda t: f"{list(t.shape)}{list(t.stride())}{t.dtype}",
)
def test_values_and_strides_come_back(tensor: Tensor) -> None:
    """Views with offsets, gaps, overlaps and strides of zero, and every dtype, come back with the same values and
    strides.
    """
    offloader = build_offloader(ActivationCheckpointing(offload="cpu", keep_last=0))
    packed = offloader.pack(tensor, "block")
    assert isinstance(packed, OffloadedTensor)
    packed.free()
    back = offloader.unpack(packed)
    if tensor.dtype == torch.float8_e4m3fn:  # torch compares no fp8
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    else:
        assert torch.equal(back, tensor)
    assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)


def int8_weight() -> Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(32, 32, bias=False)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight.detach()


STAYS = {
    "empty": lambda: torch.empty(0, 4),
    "parameter": lambda: nn.Parameter(BASE),
    "gaps": lambda: TABLE[:, :2],  # more gaps than entries
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "subclass": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
    "torchao": int8_weight,
}


@pytest.mark.parametrize("kind", STAYS)
def test_what_stays(kind: str) -> None:
    """Weights, empty and lazy tensors, other layouts, subclasses, and views that are mostly gaps stay."""
    assert not movable(STAYS[kind]())
