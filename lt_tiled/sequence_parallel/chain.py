"""A region from the input of a model's first block to the output of its last one.

This is how hand-written models, encoders, the decoders of vision-language models, and causal models that are called
without labels share a sequence: what is before and behind the blocks is whole on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.checkpointing import CACHES
from lt_tiled.modules.patch import Patch, remove_patch, set_patch
from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel.arguments import Call, repeated_to
from lt_tiled.sequence_parallel.attention import AttentionMode
from lt_tiled.sequence_parallel.collectives import all_gather
from lt_tiled.sequence_parallel.region import Region, current, entered, is_backward
from lt_tiled.sequence_parallel.same_batch import SameBatch
from lt_tiled.sequence_parallel.self_check import TOKENS, check_shared


@dataclass(eq=False)
class Sharing:
    """How one model shares its sequences, and the regions that it is in."""

    owner: str
    """The name of the model in messages."""
    policy: SequenceParallel
    group: dist.ProcessGroup | None
    mode: AttentionMode | None = None
    """Finds the attention of models that are not of transformers."""
    live: WeakSet[Region] = field(default_factory=WeakSet)
    """The regions whose graphs exist: a model's own activation checkpointing may recompute their blocks."""
    open: Region | None = None
    """The region that the first block opened and the last one will close."""
    small: Region | None = None
    """The region of a self-check, which the first block opens in place of its own."""
    checked: set[object] = field(default_factory=set)
    """What passed the self-check."""
    same_batch: SameBatch | None = field(init=False, default=None)
    _compared: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.group is not None and self.policy.batch == "check":
            self.same_batch = SameBatch(self.owner, self.group)

    @contextmanager
    def compared(self, inputs: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Raise an error if the ranks of the group have different inputs, which are not compared again inside."""
        if self.same_batch is None or self._compared:
            yield
            return
        self.same_batch.check(inputs)
        self._compared = True
        try:
            yield
        finally:
            self._compared = False

    def region(self, total: int, **options: Any) -> Region:
        """Return a region of the group for sequences of ``total`` tokens."""
        given = {"head_tiles": self.policy.head_tiles, "keep": self.policy.keep} | options
        return Region(self.group, total, self.owner, mode=self.mode, **given)

    def small_regions(self, **options: Any) -> list[Region]:
        """Return regions of a few tokens: of this rank, of the group, and of the group in head tiles if it has some."""
        total = TOKENS * self.size + 1
        whole = Region(None, total, self.owner, mode=self.mode, record=[], **options)
        shared = self.region(total, head_tiles=1, record=[], **options)
        return [whole, shared, *([self.region(total, **options)] if self.policy.head_tiles > 1 else [])]

    @property
    def size(self) -> int:
        """The number of ranks that share a sequence."""
        return 1 if self.group is None else self.group.size()

    @property
    def checks(self) -> bool:
        """Whether a model is compared with itself, alone or with all heads at once."""
        return self.policy.self_check and (self.size > 1 or self.policy.head_tiles > 1)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Refuse a forward pass that ends between the first and the last block."""
        try:
            yield
            if self.open is not None:
                check_closed(self.open)
        finally:
            self.open = None

    def close(self, region: Region, output: Tensor) -> None:
        """End a region, whose blocks may be recomputed for as long as the graph of the output exists.

        Raises:
            ValueError: If no attention saw the tokens of all ranks.
        """
        if not region.exchanges:
            raise ValueError(
                f"{self.owner} shared its sequences, and no attention saw all tokens. Use the sdpa, flash or flex"
                " attention of transformers (attn_implementation), or F.scaled_dot_product_attention."
            )
        if output.requires_grad:
            self.live.add(region)

    def recomputed(self, name: str) -> Region:
        """Return the region of a block that a checkpoint around it recomputes.

        Raises:
            RuntimeError: If several regions, or none, may be the one.
        """
        found = list(self.live)
        if len(found) != 1:
            raise RuntimeError(
                f"{name} is recomputed in the backward pass by its own activation checkpointing, and {len(found)}"
                " forward passes with sequence parallelism may have saved it. Use lt_tiled's activation checkpointing"
                " (checkpointing=True), or run the backward pass of one before the next forward pass."
            )
        return found[0]


class BlockInRegion(Patch):
    """On each module of a chain."""

    attribute = "_lt_tiled_shared_block"

    def __init__(self, sharing: Sharing, path: str, first: bool, last: bool) -> None:
        self.sharing, self.path, self.first, self.last = sharing, path, first, last
        self.name = f"{sharing.owner}: {path}"
        """The name in messages."""


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of a module. Pickle looks the name up on the module's class."""
    patch: BlockInRegion = self.__dict__[BlockInRegion.attribute]
    sharing, inside = patch.sharing, current()
    if not patch.active:
        return patch.inner(self, *args, **kwargs)
    if inside is not None:
        with entered(inside):  # what recomputes the whole block may begin here
            return patch.inner(self, *args, **kwargs)
    call = Call(self, args, kwargs)
    if is_backward():  # a checkpoint around the block recomputes it
        region: Region | None = sharing.recomputed(patch.name)
    elif patch.first:
        region = sharing.open = _opened(patch, call)
    else:
        region = sharing.open
    if region is None:
        return patch.inner(self, *args, **kwargs)
    if not region.in_blocks:
        with entered(region):
            return patch.inner(self, *args, **kwargs)
    try:
        return _run(patch, region, call)
    except BaseException:
        sharing.open = None
        raise


def _opened(patch: BlockInRegion, call: Call) -> Region | None:
    """Return a region for the tokens of a first block's input, unless the whole chain runs on each rank.

    Raises:
        ValueError: If the region that it opened before is still open, and the input has the tokens of one rank.
    """
    if call.hidden is None:
        return None
    sharing, before, total = patch.sharing, patch.sharing.open, call.hidden.shape[1]
    if before is not None and total == before.length != before.total:
        sharing.open = None
        raise ValueError(
            f"{patch.name}, the first block, was called again before the last one, with the tokens of one rank: name"
            " one module around the blocks in SequenceParallel(targets=...)."
        )
    for name, value in call.named:
        if value is not None and (name in CACHES or hasattr(value, "get_seq_length")):
            inform(
                f"{sharing.owner} fills a key-value cache, so each rank computes all tokens; pass use_cache=False to"
                " share them",
                once=f"shared cache {sharing.owner}",
            )
            return None
    with sharing.compared(call.named):
        if sharing.small is not None:
            return sharing.small
        return sharing.region(total, in_blocks=True) if total >= sharing.size else None


def _run(patch: BlockInRegion, region: Region, call: Call) -> Any:
    """Run a block on the rank's own tokens.

    Raises:
        ValueError: If its input has another length than the region.
    """
    sharing, hidden = patch.sharing, call.hidden
    expected = region.total if patch.first else region.length
    if hidden is None or hidden.shape[1] != expected:
        shape = None if hidden is None else list(hidden.shape)
        raise ValueError(
            f"{patch.name} was given an input of the shape {shape} where {region.size} ranks share {region.total}"
            f" tokens, and [B, {expected}, ...] is needed: code between the blocks may need all tokens. Name one module"
            " around it in SequenceParallel(targets=...)."
        )
    own = region.local(hidden) if patch.first else hidden
    if sharing.checks and patch.path not in sharing.checked and not is_backward():
        _check(patch, region, call, own)
    if patch.first and hidden.requires_grad and not is_backward():  # a reentrant checkpoint's output has no graph yet
        sharing.live.add(region)
        region.kept_by(hidden)
    if region.position_ids is None:
        region.position_ids = dict(call.named).get("position_ids")
    local = call.changed(patch.name, region.total, own, region.local)
    with entered(region):
        output = patch.inner(call.module, *local.args, **local.kwargs)
    return _joined(patch, region, output)


def _joined(patch: BlockInRegion, region: Region, output: Any) -> Any:
    """Return the output of a block; that of the last one with all tokens.

    Raises:
        ValueError: If it has other tensors than hidden states, or a loss that was computed from all labels.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    if patch.first and patch.last and region.losses and len(leaves) == 1 and leaves[0].dim() == 0:
        loss = region.mean(leaves[0])
        patch.sharing.close(region, loss)
        return pytree.tree_map(lambda leaf: loss if leaf is leaves[0] else leaf, output)
    if len(leaves) != 1 or leaves[0].dim() < 2 or leaves[0].shape[1] != region.length:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        raise ValueError(
            f"{patch.name} returned tensors of the shapes {shapes or 'none'}. Where ranks share a sequence, a block"
            f" returns hidden states [B, {region.length}, ...] and nothing else: return no attention weights, router"
            " logits or losses."
        )
    if not patch.last:
        if patch.first and leaves[0].requires_grad:
            leaves[0].register_hook(partial(check_closed, region))
        return output
    patch.sharing.open, region.closed = None, True
    whole = region.gathered(leaves[0])
    patch.sharing.close(region, whole)
    return pytree.tree_map(lambda leaf: whole if leaf is leaves[0] else leaf, output)


def check_closed(region: Region, _: Tensor | None = None) -> None:
    """Refuse, before a weight gets a gradient, what was computed of the rank's own tokens."""
    if not region.closed and region.size > 1:
        raise RuntimeError(
            f"{region.owner}: the first of the blocks was called, and the last of the blocks was not called after it,"
            " so what is behind them has the tokens of one rank: call the blocks in their order and up to the last one,"
            " or name one module around them in SequenceParallel(targets=...)."
        )


def _check(patch: BlockInRegion, region: Region, call: Call, own: Tensor) -> None:
    """Run the self-check on a few of the rank's own tokens ``own``, ``[B, n, H]``, of a block's input."""
    regions = patch.sharing.small_regions(in_blocks=True)
    few = repeated_to(regions[0].total)
    # The first tokens of each rank, from there: dropout in front of the blocks differs between ranks.
    count = min(TOKENS, min(region.lengths))
    first = own.detach()[:, :count]
    start = few(first if region.size == 1 else all_gather(first, [count] * region.size, 1, region.name), 1)
    call = call.changed(patch.name, region.total, start, few, masks=True)

    def run(small: Region) -> Tensor:
        local = call.changed(patch.name, small.total, small.local(start), small.local)
        leaves = pytree.tree_leaves(patch.inner(call.module, *local.args, **local.kwargs))
        found = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return small.mean(found) if found.dim() == 0 else found

    check_shared(call.module, patch.name, own.device, regions, run)
    patch.sharing.checked.add(patch.path)


def share_chain(sharing: Sharing, modules: Sequence[tuple[str, nn.Module]], undo: ExitStack) -> None:
    """Open a region at the first of these modules and close it at the last one, until ``undo`` is closed."""
    for index, (path, module) in enumerate(modules):
        set_patch(module, BlockInRegion(sharing, path, index == 0, index == len(modules) - 1), forward)
        undo.callback(remove_patch, module, BlockInRegion, forward)
