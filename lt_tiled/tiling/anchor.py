"""What saves a call's inputs and weights: the first node of its graph.

NOTE [Anchor]
:class:`Anchor` saves the call's inputs before any arithmetic runs, and nothing behind it saves a tensor. So inside an
activation-checkpointed block torch's early stop ends the block's recompute at the anchor, and the tiles do not run once
more for it. The weights are saved, too: autograd refuses those that were changed in place before the backward pass.

NOTE [One order on all ranks]
ZeRO-1 and 2 copy gradients into a bucket in the order in which they arrive, and sum the buckets of all ranks entry by
entry. Ranks may run a call differently: its input is short on one of them, or has a hook. So every call passes its
weights through an anchor, also if it runs untiled: all their gradients then arrive together, those of a norm behind
those of what follows it. Autograd runs first what was recorded last, but nodes that add to ``weight.grad`` before all
others, in an order that depends on what else waits. So each weight goes through a node of its own before the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt_tiled.recompute.mode import is_transformed
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.weights import in_places, swapped, weights_of

Edges = Sequence[Tensor]
"""The outputs of an anchor: a call's inputs, then its weights."""


class Anchor(torch.autograd.Function):
    """Passes tensors on, and is the one node that saves them: see NOTE [Anchor]."""

    @staticmethod
    def forward(ctx: Any, saved: Sequence[Tensor], link: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return (link.view_as(link), *[t.view_as(t) for t in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients


def anchored(call: TiledCall, inputs: Sequence[Tensor]) -> tuple[Tensor, Edges]:
    """Return a link to the anchor, and its other outputs: the inputs and weights."""
    link = torch.empty(0, device=call.device, requires_grad=True)
    views = [weight.expand_as(weight) for weight in call.weights]  # whose gradients arrive one by one, also sparse ones
    link, *edges = Anchor.apply([*inputs, *call.weights], link, *inputs, *views)
    return link, edges


def several_ranks() -> bool:
    """Whether other ranks may run this call in another way."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def run_untiled(parts: Sequence[nn.Module], run: Callable[[], Any]) -> Any:
    """Run modules as they are, where ranks may differ with their weights behind an anchor.

    See NOTE [One order on all ranks]. Transforms do not need it, and ZeRO-3 has an order of its own for a leaf.
    """
    differ = several_ranks() and torch.is_grad_enabled() and not is_transformed()
    weights = weights_of(parts) if differ else {}
    if not weights or hasattr(next(iter(weights)), "ds_id"):
        return run()
    link = next(iter(weights)).new_empty(0, requires_grad=True)
    _, *edges = Anchor.apply((), link, *[weight.expand_as(weight) for weight in weights])
    with swapped(in_places(weights.values(), edges)):
        return run()
