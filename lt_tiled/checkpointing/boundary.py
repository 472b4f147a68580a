"""What enters a checkpointed block, and what is kept of it for the recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


def run_checkpointed(run: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a block so that only the tensors among its arguments are kept, and its inside is recomputed in the backward.

    Every tensor goes to torch's checkpoint by position, those in keywords and containers too: torch saves positional tensors
    through the saved-tensor hooks and holds all others in a closure.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def block(*tensors: Tensor) -> Any:
        values = list(others)
        for position, tensor in zip(positions, tensors, strict=True):
            values[position] = tensor
        inner_args, inner_kwargs = pytree.tree_unflatten(values, tree)
        return run(module, *inner_args, **inner_kwargs)

    return checkpoint(block, *(leaves[i] for i in positions), use_reentrant=False)
