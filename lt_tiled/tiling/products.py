"""Weight gradients that a matrix product adds to their sum.

A 16-bit gradient that autograd computes is rounded, written, and read again to be added to its float32 sum: 12 bytes
for each element of the weight in each tile. A product that is added to the sum as it is computed takes 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from lt_tiled.tiling.weights import GradientSum


class SummedLinear(torch.autograd.Function):
    """``F.linear`` of a leaf, whose gradient is added to the leaf's sum and not returned."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, leaf: Tensor, bias: Tensor | None, total: GradientSum) -> Tensor:
        ctx.save_for_backward(input)
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.total = leaf.detach(), total
        output = F.linear(input, leaf, bias)
        # With a bias that is a view, and one that a Function returns cannot be changed in place, as by nn.ReLU(True).
        own: Tensor = torch.ops.aten._unsafe_view.default(output, output.shape)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        (input,) = ctx.saved_tensors
        rows, (wants_input, _, wants_bias, _) = gradient.reshape(-1, gradient.shape[-1]), ctx.needs_input_grad
        ctx.total.add_product(rows.t(), input.reshape(-1, input.shape[-1]))
        of_input = rows.mm(ctx.weight).view(input.shape) if wants_input else None
        return of_input, None, rows.sum(0) if wants_bias else None, None
