"""One forward pass whose sequence the ranks of a group share, from top to bottom.

:func:`forward` runs in place of the forward of the module that calls the blocks, and of each block. It shares

* a causal model of transformers that is called with labels from its token ids to its loss (:class:`SharedModel`);
* any other model from the input of its first block to the output of its last one (:class:`SharedBlock`). What is around
  the blocks has all tokens on each rank, and what is between them is checked;
* a module that the policy names as if it were the only block.

Each time the rank's own tokens are cut out of the arguments, the module runs in a region (``region.py``), in which
attention exchanges heads for tokens (``attention.py``), and the loss of all tokens, or all hidden states, are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.checkpointing import CACHES
from lt_tiled.loss.transformers import AbsentLogits
from lt_tiled.modules.patch import Patch
from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel import causal
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
    open: Region | None = None
    """The region that the first block opened and the last one will close."""
    small: Region | None = None
    """The region of a self-check, which the first block opens in place of its own."""
    regions: WeakSet[Region] = field(default_factory=WeakSet)
    """Those whose graphs exist: a model's own activation checkpointing may recompute their blocks."""
    same_batch: SameBatch | None = field(init=False, default=None)
    _compared: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.group is not None and self.policy.batch == "check":
            self.same_batch = SameBatch(self.owner, self.group)

    @property
    def size(self) -> int:
        """The number of ranks that share a sequence."""
        return 1 if self.group is None else self.group.size()

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

    @property
    def few(self) -> int:
        """The number of tokens of a self-check."""
        return TOKENS * self.size + 1

    def small_regions(self, in_blocks: bool) -> list[Region]:
        """Return regions of a few tokens: of this rank, of the group, and of the group in head tiles if it has some."""
        total = self.few
        whole = Region(None, total, self.owner, in_blocks, self.mode, record=[])
        regions = [whole, self.region(total, in_blocks=in_blocks, head_tiles=1, record=[])]
        if self.policy.head_tiles > 1:
            regions.append(self.region(total, in_blocks=in_blocks))
        return regions

    @contextmanager
    def around_blocks(self) -> Iterator[None]:
        """Refuse a forward pass that ends, or fails, between the first and the last block.

        Raises:
            ValueError: If code between the blocks needs all tokens.
        """
        try:
            yield
        except (RuntimeError, IndexError) as error:
            if self.open is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"{self.owner} needs all tokens between its blocks, where each rank has its own ({error}): call it"
                " without what it uses there, as features of images that it adds to hidden states, or name one module"
                " around it in SequenceParallel(targets=...)."
            ) from error
        else:
            if self.open is not None:
                check_closed(self.open)
        finally:
            self.open = None

    def end(self, region: Region, output: Tensor) -> Tensor:
        """Return the output of a region, whose blocks may be recomputed for as long as its graph exists.

        Raises:
            ValueError: If no attention saw the tokens of all ranks.
        """
        if not region.exchanges:
            raise ValueError(
                f"{self.owner} shared its sequences, and no attention saw all tokens. Use the sdpa, flash or flex"
                " attention of transformers (attn_implementation), or F.scaled_dot_product_attention."
            )
        if output.requires_grad:
            self.regions.add(region)
        return output

    def recomputed(self, name: str) -> Region:
        """Return the region of a block that a checkpoint around it recomputes.

        Raises:
            RuntimeError: If several regions, or none, may be the one.
        """
        found = list(self.regions)
        if len(found) != 1:
            raise RuntimeError(
                f"{name} is recomputed in the backward pass by its own activation checkpointing, and {len(found)}"
                " forward passes with sequence parallelism may have saved it. Use lt_tiled's activation checkpointing"
                " (checkpointing=True), or run the backward pass of one before the next forward pass."
            )
        return found[0]


def check_closed(region: Region, _: Tensor | None = None) -> None:
    """Refuse, before a weight gets a gradient, what was computed of the rank's own tokens."""
    if not region.closed and region.size > 1:
        raise RuntimeError(
            f"{region.owner}: the first of the blocks was called, and the last of the blocks was not called after it,"
            " so what is behind them has the tokens of one rank: call the blocks in their order and up to the last one,"
            " or name one module around them in SequenceParallel(targets=...)."
        )


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of a module. Pickle looks the name up on the module's class."""
    part: SharedPart = self.__dict__[SharedPart.attribute]
    region = current()
    if not part.active:
        return part.inner(self, *args, **kwargs)
    if region is not None:
        with entered(region):  # what recomputes the whole block may begin here
            return part.inner(self, *args, **kwargs)
    return part.share(Call(self, args, kwargs))


class SharedPart(Patch):
    """On each module that takes part in sharing sequences."""

    attribute = "_lt_tiled_shared"

    def __init__(self, sharing: Sharing, name: str) -> None:
        self.sharing = sharing
        self.name = name
        """The name in messages."""
        self.checked = False
        """Whether the module passed the self-check."""

    def share(self, call: Call) -> Any:
        """Run a call outside of any region."""
        raise NotImplementedError

    @property
    def needs_check(self) -> bool:
        """Whether the module has still to be compared with itself, alone or with all heads at once."""
        policy = self.sharing.policy
        return not self.checked and policy.self_check and (self.sharing.size > 1 or policy.head_tiles > 1)

    def check(
        self, call: Call, device: torch.device, run: Callable[[Region], Tensor], in_blocks: bool = True, **options: Any
    ) -> None:
        """Run the self-check with a function that calls the module in a region of a few tokens."""
        regions = self.sharing.small_regions(in_blocks)
        check_shared(call.module, self.name, device, regions, run, **options)
        self.checked = True


class SharedModel(SharedPart):
    """On the module that calls the blocks."""

    def share(self, call: Call) -> Any:
        """Run a model whose sequences are shared from token ids to the loss, or by its blocks."""
        sharing, alone = self.sharing, True
        if sharing.mode is None:  # a model of transformers
            if sharing.size > 1:  # otherwise there are head tiles alone
                causal.refuse_outputs(sharing.owner, call)
                if causal.computes_loss(call) and call.tokens is not None:
                    with sharing.compared(call.named):
                        return self._to_loss(call, call.tokens)
            call = causal.without_unused_cache(call)
            alone = causal.fills_cache(call) or causal.is_partial(call)  # as generate: the ranks' calls may differ
        else:
            self._check_around(call)
        with sharing.around_blocks(), nullcontext() if alone else sharing.compared(call.named):
            return self.inner(call.module, *call.args, **call.kwargs)

    def _to_loss(self, call: Call, tokens: Tensor) -> Any:
        """Run a causal model on the rank's own tokens, and return its output with the loss of the whole sequence."""
        sharing, model, total = self.sharing, call.module, tokens.shape[1]
        if self.needs_check:
            self._check_to_loss(call, tokens)
        if total < sharing.size:
            return self.inner(model, *call.args, **call.kwargs)
        region = sharing.region(total)
        loss = causal.SharedLoss(region, call)
        own = causal.own_arguments(region, call)
        as_tuple = own.pop("return_dict", None) is False
        with loss.set(), entered(region):
            output = self.inner(model, **own)
        output["loss"] = sharing.end(region, region.mean(output["loss"]))
        if isinstance(output.get("logits"), Tensor):
            output["logits"] = AbsentLogits(sharing.owner, "has the logits of this rank's tokens only")
        return output.to_tuple() if as_tuple else output

    def _check_to_loss(self, call: Call, tokens: Tensor) -> None:
        """Check a few of the tokens, which the model shares or not, as if it were called without labels."""
        name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        few = repeated_to(self.sharing.few)(tokens[:1].detach(), 1)
        call = Call(call.module, (), {name: few, "use_cache": False})

        def run(small: Region) -> Tensor:
            given = call.kwargs if small.size == 1 else causal.own_arguments(small, call)
            logits: Tensor = self.inner(call.module, **given).logits
            return logits

        self.check(call, tokens.device, run, in_blocks=False)

    def _check_around(self, call: Call) -> None:
        """Check a hand-written model with a few of its token ids: code between the blocks may need all tokens."""
        sharing, ids = self.sharing, call.tokens
        if not self.needs_check or ids is None or ids.dim() != 2 or ids.is_floating_point():
            return
        few = repeated_to(sharing.few)
        small_call = call.changed(sharing.owner, ids.shape[1], few(ids, 1), few, masks=True)

        def run(small: Region) -> Tensor:
            sharing.small = small if small.size > 1 else None
            outside = None if small.size > 1 else small  # the first block opens the region
            try:
                with sharing.around_blocks(), entered(outside):
                    output = self.inner(call.module, *small_call.args, **small_call.kwargs)
            finally:
                sharing.small = None
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            return torch.cat([leaf.flatten() for leaf in leaves if leaf.is_floating_point()])

        with sharing.compared(call.named):
            self.check(call, ids.device, run, blocks=False)


class SharedBlock(SharedPart):
    """On each module of a chain that opens a region at the first of them and closes it at the last one."""

    def __init__(self, sharing: Sharing, path: str, first: bool, last: bool) -> None:
        super().__init__(sharing, f"{sharing.owner}: {path}")
        self.first, self.last = first, last

    def share(self, call: Call) -> Any:
        """Run a block in the region that the first block opens."""
        sharing = self.sharing
        if is_backward():  # a checkpoint around the block recomputes it
            region: Region | None = sharing.recomputed(self.name)
        else:
            if self.first:
                sharing.open = self._opened(call)
            region = sharing.open
        if region is None:
            return self.inner(call.module, *call.args, **call.kwargs)
        if not region.in_blocks:
            with entered(region):
                return self.inner(call.module, *call.args, **call.kwargs)
        try:
            return self._run(region, call)
        except BaseException:
            sharing.open = None
            raise

    def _opened(self, call: Call) -> Region | None:
        """Return a region for the tokens of a first block's input, unless all blocks run whole on each rank.

        Raises:
            ValueError: If the region that it opened before is still open, and the input has the tokens of one rank.
        """
        if call.tokens is None:
            return None
        sharing, before, total = self.sharing, self.sharing.open, call.tokens.shape[1]
        if before is not None and total == before.length != before.total:
            sharing.open = None
            raise ValueError(
                f"{self.name}, the first block, was called again before the last one, with the tokens of one rank: name"
                " one module around the blocks in SequenceParallel(targets=...)."
            )
        for name, value in call.named:
            if value is not None and (name in CACHES or hasattr(value, "get_seq_length")):
                inform(
                    f"{sharing.owner} fills a key-value cache, so each rank computes all tokens; pass use_cache=False"
                    " to share them",
                    once=f"shared cache {sharing.owner}",
                )
                return None
        with sharing.compared(call.named):
            if sharing.small is not None:
                return sharing.small
            return sharing.region(total, in_blocks=True) if total >= sharing.size else None

    def _run(self, region: Region, call: Call) -> Any:
        """Run a block on the rank's own tokens.

        Raises:
            ValueError: If its input has another length than the region.
        """
        tokens = call.tokens
        expected = region.total if self.first else region.length
        if tokens is None or tokens.shape[1] != expected:
            shape = None if tokens is None else list(tokens.shape)
            raise ValueError(
                f"{self.name} was given an input of the shape {shape} where {region.size} ranks share {region.total}"
                f" tokens, and [B, {expected}, ...] is needed: code between the blocks may need all tokens. Name one"
                " module around it in SequenceParallel(targets=...)."
            )
        own = region.local(tokens) if self.first else tokens
        if self.needs_check and not is_backward():
            self._check(region, call, own)
        if self.first and tokens.requires_grad and not is_backward():  # a reentrant checkpoint has no graph yet
            self.sharing.regions.add(region)
            region.kept_by(tokens)
        if region.position_ids is None:
            region.position_ids = call.given.get("position_ids")
        local = call.changed(self.name, region.total, own, region.local)
        with entered(region):
            output = self.inner(local.module, *local.args, **local.kwargs)
        return self._returned(region, output)

    def _returned(self, region: Region, output: Any) -> Any:
        """Return the output of a block; that of the last one with all tokens.

        Raises:
            ValueError: If it has other tensors than hidden states, or a loss that was computed from all labels.
        """
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        alone = self.first and self.last and len(leaves) == 1
        if alone and region.losses and leaves[0].dim() == 0:
            whole = region.mean(leaves[0])
        elif len(leaves) != 1 or leaves[0].dim() < 2 or leaves[0].shape[1] != region.length:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise ValueError(
                f"{self.name} returned tensors of the shapes {shapes or 'none'}. Where ranks share a sequence, a block"
                f" returns hidden states [B, {region.length}, ...] and nothing else: return no attention weights,"
                " router logits or losses."
            )
        elif not self.last:
            if self.first and leaves[0].requires_grad:
                leaves[0].register_hook(partial(check_closed, region))
            return output
        else:
            whole = region.gathered(leaves[0])
        self.sharing.open, region.closed = None, True
        self.sharing.end(region, whole)
        return pytree.tree_map(lambda leaf: whole if leaf is leaves[0] else leaf, output)

    def _check(self, region: Region, call: Call, own: Tensor) -> None:
        """Check a few of the rank's own tokens ``own``, ``[B, n, H]``, of a block's input."""
        few = repeated_to(self.sharing.few)
        # The first tokens of each rank, from there: dropout in front of the blocks differs between ranks.
        count = min(TOKENS, min(region.lengths))
        first = own.detach()[:, :count]
        start = few(first if region.size == 1 else all_gather(first, [count] * region.size, 1, region.name), 1)
        call = call.changed(self.name, region.total, start, few, masks=True)

        def run(small: Region) -> Tensor:
            local = call.changed(self.name, small.total, small.local(start), small.local)
            leaves = pytree.tree_leaves(self.inner(local.module, *local.args, **local.kwargs))
            found = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
            return small.mean(found) if found.dim() == 0 else found

        self.check(call, own.device, run)
