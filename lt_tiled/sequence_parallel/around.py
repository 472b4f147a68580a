"""What is around the blocks of a hand-written model: it must not use the tokens of one rank as if they were all."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.modules.patch import Patch, remove_patch, set_patch
from lt_tiled.sequence_parallel.arguments import Call, repeated_to
from lt_tiled.sequence_parallel.chain import Sharing
from lt_tiled.sequence_parallel.region import Region, current, entered
from lt_tiled.sequence_parallel.self_check import check_shared


class AroundBlocks(Patch):
    """On the module that calls the blocks."""

    attribute = "_lt_tiled_around_blocks"

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of a module. Pickle looks the name up on the module's class."""
    patch: AroundBlocks = self.__dict__[AroundBlocks.attribute]
    if not patch.active or current() is not None:
        return patch.inner(self, *args, **kwargs)
    sharing, call = patch.sharing, Call(self, args, kwargs)
    tokens = call.hidden
    ids = tokens is not None and tokens.dim() == 2 and not tokens.is_floating_point()
    if ids and sharing.checks and self not in sharing.checked:
        with sharing.compared(call.named):
            _check(patch, call)
        sharing.checked.add(self)
    with sharing.closed():
        return patch.inner(self, *args, **kwargs)


def _check(patch: AroundBlocks, call: Call) -> None:
    """Run the self-check on the module with a few of its token ids: code between the blocks may need all tokens."""
    sharing, ids = patch.sharing, call.hidden
    assert ids is not None
    regions = sharing.small_regions(in_blocks=True)
    few = repeated_to(regions[0].total)
    call = call.changed(sharing.owner, ids.shape[1], few(ids, 1), few, masks=True)

    def run(small: Region) -> Tensor:
        alone = small is regions[0]
        sharing.small = None if alone else small
        try:
            with sharing.closed(), nullcontext() if alone else entered(None):  # the first block opens the region
                leaves = pytree.tree_leaves(patch.inner(call.module, *call.args, **call.kwargs))
        finally:
            sharing.small = None
        return torch.cat([leaf.flatten() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()])

    check_shared(call.module, sharing.owner, ids.device, regions, run, blocks=False)


def watch_around(sharing: Sharing, module: nn.Module, undo: ExitStack) -> None:
    """Check the module that calls the blocks, until ``undo`` is closed."""
    set_patch(module, AroundBlocks(sharing), forward)
    undo.callback(remove_patch, module, AroundBlocks, forward)
