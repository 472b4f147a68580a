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

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.loss.transformers import AbsentLogits
from lt_tiled.modules.cache import CACHES
from lt_tiled.modules.patch import Patch
from lt_tiled.sequence_parallel import causal
from lt_tiled.sequence_parallel.arguments import Call, repeated_to
from lt_tiled.sequence_parallel.collectives import all_gather
from lt_tiled.sequence_parallel.region import Region, current, entered, is_backward
from lt_tiled.sequence_parallel.self_check import TOKENS, check_shared
from lt_tiled.sequence_parallel.sharing import Sharing


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

    def check(self, call: Call, run: Callable[[Region], Tensor], in_blocks: bool = True, blocks: bool = True) -> None:
        """Run the self-check with a function that calls the module in a region of a few tokens."""
        assert call.tokens is not None
        regions = self.sharing.check_regions(in_blocks)
        check_shared(call.module, self.name, call.tokens.device, regions, run, blocks)
        self.checked = True


class SharedModel(SharedPart):
    """On the module that calls the blocks."""

    def share(self, call: Call) -> Any:
        """Run a model whose sequences are shared from token ids to the loss, or by its blocks."""
        sharing, compares = self.sharing, False
        if sharing.mode is not None:  # a hand-written model, whose first block compares the batches
            self._check_around(call)
        else:
            if sharing.size > 1:  # otherwise there are head tiles alone
                causal.refuse_outputs(sharing.owner, call)
                if causal.computes_loss(call):
                    with sharing.compared(call):
                        return self._to_loss(call)
            call = causal.without_unused_cache(call)
            compares = not causal.fills_cache(call) and not causal.is_partial(call)  # ranks may generate apart
        with sharing.around_blocks(), sharing.compared(call) if compares else nullcontext():
            return call.run(self.inner)

    def _to_loss(self, call: Call) -> Any:
        """Run a causal model on the rank's own tokens, and return its output with the loss of the whole sequence."""
        sharing, tokens = self.sharing, call.tokens
        assert tokens is not None
        if self.needs_check:
            self._check_to_loss(call, tokens)
        if (total := tokens.shape[1]) < sharing.size:
            return call.run(self.inner)
        region = sharing.region(total)
        own = causal.own_arguments(region, call)
        as_tuple = own.pop("return_dict", None) is False
        with causal.shared_loss(region, call), entered(region):
            output = self.inner(call.module, **own)
        output["loss"] = region.mean(output["loss"])
        region.check_exchanged()
        if isinstance(output.get("logits"), Tensor):
            output["logits"] = AbsentLogits(sharing.owner, "has the logits of this rank's tokens only")
        return output.to_tuple() if as_tuple else output

    def _check_to_loss(self, call: Call, tokens: Tensor) -> None:
        """Check a few of the tokens, which the model shares or not, as if it were called without labels."""
        name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        few = repeated_to(self.sharing.check_tokens)(tokens[:1].detach(), 1)
        call = Call(call.module, (), {name: few, "use_cache": False})

        def run(region: Region) -> Tensor:
            arguments = call.kwargs if region.size == 1 else causal.own_arguments(region, call)
            logits: Tensor = self.inner(call.module, **arguments).logits
            return logits

        self.check(call, run, in_blocks=False)

    def _check_around(self, call: Call) -> None:
        """Check a hand-written model with a few of its token ids: code between the blocks may need all tokens."""
        sharing, ids = self.sharing, call.tokens
        if not self.needs_check or ids is None or ids.dim() != 2 or ids.is_floating_point():
            return
        few = repeated_to(sharing.check_tokens)
        small_call = call.changed(sharing.owner, ids.shape[1], few(ids, 1), few, masks=True)

        def run(region: Region) -> Tensor:
            sharing.check_region = region if region.size > 1 else None
            outside = None if region.size > 1 else region  # the first block opens the region
            try:
                with sharing.around_blocks(), entered(outside):
                    output = small_call.run(self.inner)
            finally:
                sharing.check_region = None
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            return torch.cat([leaf.flatten() for leaf in leaves if leaf.is_floating_point()])

        with sharing.compared(call):
            self.check(call, run, blocks=False)


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
            return call.run(self.inner)
        if not region.in_blocks:
            with entered(region):
                return call.run(self.inner)
        try:
            return self._run(region, call)
        except BaseException:
            sharing.open = None
            raise

    def _opened(self, call: Call) -> Region | None:
        """Return a region for the tokens of a first block's input, unless each rank runs all blocks on all tokens."""
        if call.tokens is None:
            return None
        sharing, before, total = self.sharing, self.sharing.open, call.tokens.shape[1]
        if before is not None and total == before.length != before.total:
            sharing.open = None
            raise ValueError(
                f"{self.name}, the first block, was called again before the last one, with the tokens of one rank: name"
                " one module around the blocks in SequenceParallel(targets=...)."
            )
        for name, value in call.arguments.items():
            if value is not None and (name in CACHES or hasattr(value, "get_seq_length")):
                inform(
                    f"{sharing.owner} fills a key-value cache, so each rank computes all tokens; pass use_cache=False"
                    " to share them",
                    once=f"shared cache {sharing.owner}",
                )
                return None
        with sharing.compared(call):
            if sharing.check_region is not None:
                return sharing.check_region
            return sharing.region(total, in_blocks=True) if total >= sharing.size else None

    def _run(self, region: Region, call: Call) -> Any:
        """Run a block on the rank's own tokens, of which the first block is given all and the others these."""
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
        if self.first and not is_backward():  # in a reentrant checkpoint the output has no graph yet
            region.kept_by(tokens)
        if region.position_ids is None:
            region.position_ids = call.arguments.get("position_ids")
        local = call.changed(self.name, region.total, own, region.local)
        with entered(region):
            output = local.run(self.inner)
        return self._returned(region, output)

    def _returned(self, region: Region, output: Any) -> Any:
        """Return the output of a block: hidden states, those of the last one with all tokens, or the loss of all."""
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        alone = len(leaves) == 1
        is_loss = alone and leaves[0].dim() == 0 and region.losses > 0 and self.first and self.last
        is_hidden = alone and leaves[0].dim() > 1 and leaves[0].shape[1] == region.length
        if not is_loss and not is_hidden:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise ValueError(
                f"{self.name} returned tensors of the shapes {shapes or 'none'}. Where ranks share a sequence, a block"
                f" returns hidden states [B, {region.length}, ...] and nothing else: return no attention weights,"
                " router logits or losses."
            )
        if not self.last:
            if self.first:
                region.kept_by(leaves[0])  # which refuses an open region before a weight gets a gradient
            return output
        whole = region.mean(leaves[0]) if is_loss else region.gathered(leaves[0])
        self.sharing.open, region.closed = None, True
        region.check_exchanged()
        return pytree.tree_map(lambda leaf: whole if leaf is leaves[0] else leaf, output)

    def _check(self, region: Region, call: Call, own: Tensor) -> None:
        """Check a few of the rank's own tokens ``own``, ``[B, n, H]``, of a block's input."""
        few = repeated_to(self.sharing.check_tokens)
        # The first tokens of each rank, from there: dropout in front of the blocks differs between ranks.
        count = min(TOKENS, min(region.lengths))
        first = own.detach()[:, :count]
        start = few(first if region.size == 1 else all_gather(first, [count] * region.size, 1, region.name), 1)
        call = call.changed(self.name, region.total, start, few, masks=True).without_documents()

        def run(region: Region) -> Tensor:
            local = call.changed(self.name, region.total, region.local(start), region.local)
            leaves = pytree.tree_leaves(local.run(self.inner))
            found = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
            return region.mean(found) if found.dim() == 0 else found

        self.check(call, run)
