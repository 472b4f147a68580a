"""A region from the input of a model's first block to the output of its last one.

This is how hand-written models, encoders, the decoders of vision-language models, and causal models that are called
without labels share a sequence: what is before and behind the blocks is whole on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.checkpointing import CACHES
from lt_tiled.modules.patch import Patch, remove_patch, set_patch
from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel.arguments import changed_arguments, hidden_of, named_arguments, repeated_to
from lt_tiled.sequence_parallel.attention import SeesAttention
from lt_tiled.sequence_parallel.collectives import all_gather
from lt_tiled.sequence_parallel.region import Live, Region, current, entered, is_backward
from lt_tiled.sequence_parallel.same_batch import SameBatch
from lt_tiled.sequence_parallel.self_check import TOKENS, check_shared


@dataclass(eq=False)
class Sharing:
    """How one model shares its sequences, and the regions that it is in."""

    owner: str
    """The name of the model in messages."""
    policy: SequenceParallel
    group: dist.ProcessGroup | None
    sees: SeesAttention | None = None
    """Finds the attention of models that are not of transformers."""
    live: Live = field(default_factory=Live)
    open: Region | None = None
    """The region that the first block opened and the last one will close."""
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
        return Region(self.group, total, self.owner, sees=self.sees, **given)

    def small_regions(self, **options: Any) -> tuple[Region, Region]:
        """Return two regions of a few tokens: of this rank alone with all heads at once, and of the group."""
        shared = self.region(TOKENS * self.size + 1, **options)
        whole = Region(None, shared.total, self.owner, sees=self.sees, **options)
        return whole, shared

    @property
    def size(self) -> int:
        """The number of ranks that share a sequence."""
        return 1 if self.group is None else self.group.size()

    @property
    def checks(self) -> bool:
        """Whether a model is compared with itself, alone or with all heads at once."""
        return self.policy.self_check and (self.size > 1 or self.policy.head_tiles > 1)

    def shares(self, total: int) -> bool:
        """Whether a sequence is long enough to be shared."""
        return total >= self.size

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


class BlockInRegion(Patch):
    """On each module of a chain."""

    attribute = "_lt_tiled_shared_block"

    def __init__(self, sharing: Sharing, path: str, first: bool, last: bool) -> None:
        self.sharing, self.path, self.first, self.last = sharing, path, first, last


class AroundBlocks(Patch):
    """On the module that calls the blocks of a hand-written model."""

    attribute = "_lt_tiled_around_blocks"

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing


def _around(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    patch: AroundBlocks = self.__dict__[AroundBlocks.attribute]
    try:
        output = patch.inner(self, *args, **kwargs)
        if patch.sharing.open is not None:
            check_closed(patch.sharing.open)
        return output
    finally:
        patch.sharing.open = None


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    patch: BlockInRegion = self.__dict__[BlockInRegion.attribute]
    sharing, inside = patch.sharing, current()
    if not patch.active:
        return patch.inner(self, *args, **kwargs)
    if inside is not None:
        with entered(inside):  # what recomputes the whole block may begin here
            return patch.inner(self, *args, **kwargs)
    name = f"{sharing.owner}: {patch.path}"
    hidden = hidden_of(self, args, kwargs)
    if is_backward():  # a checkpoint around the block recomputes it
        region: Region | None = sharing.live.only(name)
    elif patch.first:
        region = sharing.open = None if hidden is None else _opened(patch, self, hidden, args, kwargs)
    else:
        region = sharing.open
    if region is None:
        return patch.inner(self, *args, **kwargs)
    if not region.in_blocks:
        with entered(region):
            return patch.inner(self, *args, **kwargs)
    try:
        return _run(patch, self, region, name, args, kwargs)
    except BaseException:
        sharing.open = None
        raise


_forward.__name__ = _around.__name__ = "forward"  # what pickle looks up on the class


def _opened(
    patch: BlockInRegion, module: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Region | None:
    """Return a region for the tokens of a first block's input, unless the whole chain runs on each rank."""
    sharing, before = patch.sharing, patch.sharing.open
    if before is not None and hidden.shape[1] == before.length != before.total:
        sharing.open = None
        raise ValueError(
            f"{sharing.owner}: {patch.path}, the first block, was called again before the last one, with the tokens of"
            " one rank: name one module around the blocks in SequenceParallel(targets=...)."
        )
    for name, value in named_arguments(module, args, kwargs):
        if value is not None and (name in CACHES or hasattr(value, "get_seq_length")):
            inform(
                f"{sharing.owner} fills a key-value cache, so each rank computes all tokens; pass use_cache=False to"
                " share them",
                once=f"shared cache {sharing.owner}",
            )
            return None
    with sharing.compared(named_arguments(module, args, kwargs)):
        return sharing.region(hidden.shape[1], in_blocks=True) if sharing.shares(hidden.shape[1]) else None


def _run(
    patch: BlockInRegion, module: nn.Module, region: Region, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a block on the rank's own tokens."""
    sharing, hidden = patch.sharing, hidden_of(module, args, kwargs)
    expected = region.total if patch.first else region.length
    if hidden is None or hidden.shape[1] != expected:
        shape = None if hidden is None else list(hidden.shape)
        raise ValueError(
            f"{name} was given an input of the shape {shape} where {region.size} ranks share {region.total} tokens,"
            f" and [B, {expected}, ...] is needed: code between the blocks may need all tokens. Name one module around"
            " it in SequenceParallel(targets=...)."
        )
    if sharing.checks and patch.path not in sharing.checked and not is_backward():
        _check(patch, module, region, name, hidden, args, kwargs)
    own = region.local(hidden) if patch.first else hidden
    if patch.first and hidden.grad_fn is not None and not is_backward():  # a recompute may begin without an output's
        sharing.live.add(region)
        region.kept_by(hidden)
    if region.position_ids is None:
        region.position_ids = dict(named_arguments(module, args, kwargs)).get("position_ids")
    args, kwargs = changed_arguments(name, module, args, kwargs, region.total, own, region.local)
    with entered(region):
        output = patch.inner(module, *args, **kwargs)
    return _joined(patch, region, name, output)


def _joined(patch: BlockInRegion, region: Region, name: str, output: Any) -> Any:
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
            f"{name} returned tensors of the shapes {shapes or 'none'}. Where ranks share a sequence, a block returns"
            f" hidden states [B, {region.length}, ...] and nothing else: return no attention weights, router logits or"
            " losses."
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


def _check(
    patch: BlockInRegion,
    module: nn.Module,
    region: Region,
    name: str,
    hidden: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run the self-check on a few tokens of a block's input."""
    sharing = patch.sharing
    whole, shared = sharing.small_regions(in_blocks=True)
    few = repeated_to(shared.total)
    # The first tokens of each rank, from there: dropout in front of the blocks differs between ranks.
    count, own = min(TOKENS, min(region.lengths)), region.local(hidden) if patch.first else hidden
    first = own.detach()[:, :count]
    start = few(first if region.size == 1 else all_gather(first, [count] * region.size, 1, region.name), 1)
    args, kwargs = changed_arguments(name, module, args, kwargs, region.total, start, few, masks=True)

    def run(small: Region) -> Tensor:
        own, named = changed_arguments(name, module, args, kwargs, small.total, small.local(start), small.local)
        leaves = pytree.tree_leaves(patch.inner(module, *own, **named))
        found = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return small.mean(found) if found.dim() == 0 else found

    check_shared(module, name, hidden.device, whole, shared, run)
    sharing.checked.add(patch.path)


def share_chain(
    sharing: Sharing, modules: Sequence[tuple[str, nn.Module]], around: nn.Module | None = None
) -> Callable[[], None]:
    """Open a region at the first of these modules and close it at the last one. Return what undoes it.

    Args:
        sharing: How the sequences are shared.
        modules: The blocks.
        around: The module that calls them all, if that is to be checked.
    """
    for index, (path, module) in enumerate(modules):
        patch = BlockInRegion(sharing, path, index == 0, index == len(modules) - 1)
        set_patch(module, patch, _forward)

    if around is not None:
        set_patch(around, AroundBlocks(sharing), _around)

    def undo() -> None:
        for _, module in modules:
            remove_patch(module, BlockInRegion, _forward)
        if around is not None:
            remove_patch(around, AroundBlocks, _around)

    return undo
