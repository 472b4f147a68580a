"""Several patches of one method."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.modules.patch import Order, Patch, remove_patch, set_patch


class Noted(Patch):
    """Notes that it ran."""

    def __init__(self, order: Order, ran: list[Order]) -> None:
        self.order, self.ran = order, ran  # type: ignore[misc]

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.ran.append(self.order)
        return self.inner(module, *args, **kwargs)


class Plain(nn.Module):
    """Doubles."""

    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        return x * scale


ORDERS = [Order.DOOR, Order.CHECKPOINT, Order.PARENT, Order.TILE]


def patched(orders: Any) -> tuple[Plain, list[Noted], list[Order]]:
    module, ran = Plain(), list[Order]()
    patches = [Noted(order, ran) for order in orders]
    for patch in patches:
        set_patch(module, patch)
    return module, patches, ran


def test_patches_run_in_their_order() -> None:
    """Region, checkpoint, parent and tile run in that order, whichever was set first. Any can be removed: the others
    stay in their order, and the last one takes everything with it.
    """
    for number, orders in enumerate(permutations(ORDERS)):
        module, patches, ran = patched(orders)
        assert module(torch.ones(1)) == 2
        assert ran == ORDERS
        ran.clear()
        removed = patches.pop(number % 4)
        remove_patch(module, removed)
        module(torch.ones(1))
        assert ran == [order for order in ORDERS if order != removed.order]
        for patch in patches:
            remove_patch(module, patch)
        assert vars(module).keys() == vars(Plain()).keys()


def test_patches_below_the_code_of_others() -> None:
    """Where other code puts a method above ours, patches run where it calls ours, and it is there after release."""
    module, patches, ran = patched([Order.TILE])
    ours = module.forward

    def theirs(x: Tensor) -> Tensor:
        return ours(x) + 1

    module.forward = theirs  # type: ignore[method-assign, assignment]
    for _ in range(2):
        patches.append(Noted(Order.PARENT, ran))
        set_patch(module, patches[-1])
        assert module(torch.ones(1)) == 3
        assert ran == sorted(patch.order for patch in patches)
        while patches:
            remove_patch(module, patches.pop())
        ran.clear()
        assert module.forward is theirs
        assert module(torch.ones(1)) == 3
