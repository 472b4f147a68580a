"""Floating point operations of matrix products and attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class Flops(TorchDispatchMode):
    """Counts FLOPs by torch's formulas.

    ``FlopCounterMode`` counts the same, but the hooks by which it follows modules keep tensors alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula: Any = _OWN.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _attention(query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    """Count two products ``[S, D] x [D, K]`` per head; kernels skip the upper half of a causal mask."""
    batch, heads, tokens, head_dim = query.shape
    return int(4 * batch * heads * tokens * key.shape[-2] * head_dim // (2 if is_causal else 1))


def _attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, dropout_p: Any, is_causal: Any, **_: Any
) -> int:
    """Count five products, one of which recomputes the scores."""
    return _attention(query, key, value, dropout_p, is_causal) * 5 // 2


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Count each row of ``left`` times one matrix of ``right``."""
    return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])


_OWN: dict[Any, Any] = {  # torch has no formula for the CPU's attention and for mixtures of experts
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
