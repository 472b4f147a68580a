"""One forward pass whose sequence the ranks of a group share, from top to bottom.

In place of the forward of the module that calls the blocks, and of each block, it shares

* a causal model of transformers that is called with labels from its token ids to its loss (``model.py``);
* any other model from the input of its first block to the output of its last one (:class:`SharedBlock`). What is around
  the blocks has all tokens on each rank, and what is between them is checked;
* a module that the policy names as if it were the only block.

Each time the rank's own tokens are cut out of the arguments, the module runs in a region (``region.py``), in which
attention exchanges heads for tokens (``attention.py``), and the loss of all tokens, or all hidden states, are returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.modules.cache import has_cache
from lt_tiled.modules.patch import Order, Patch
from lt_tiled.recompute.mode import is_backward
from lt_tiled.sequence_parallel.arguments import Call, repeated_to
from lt_tiled.sequence_parallel.collectives import all_gather
from lt_tiled.sequence_parallel.region import Region, current, entered
from lt_tiled.sequence_parallel.self_check import MOST_TOKENS, TOKENS, check_shared
from lt_tiled.sequence_parallel.sharing import Sharing

_OTHER_SEQUENCE = ("encoder_hidden_states", "cross_attention_states", "key_value_states")
"""Arguments with the hidden states of another sequence, as those of an image."""


class SharedPart(Patch):
    """On each module that takes part in sharing sequences."""

    order = Order.SEQUENCE

    def __init__(self, sharing: Sharing, name: str) -> None:
        self.sharing = sharing
        self.name = name
        """The name in messages."""
        self.checked = 0
        """The largest number of tokens with which the module passed the self-check."""

    def compiles(self, module: nn.Module) -> bool:
        """Return False if a mode must see each operation."""
        return self.sharing.mode is None

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if current() is not None:
            return self.inner(module, *args, **kwargs)
        call = Call(module, args, kwargs)
        for name in _OTHER_SEQUENCE:
            if call.arguments.get(name) is not None:
                raise ValueError(
                    f"{self.name} was given {name}, and sequence parallelism does not support cross-attention: use a"
                    " decoder-only model, or sequence_parallel=1."
                )
        return self.share(call)

    def share(self, call: Call) -> Any:
        raise NotImplementedError

    def lengths_to_check(self, total: int, positions: bool = True) -> list[int]:
        """Return with how many tokens the module has still to be compared with itself on one rank.

        These are a few, and more than each length above which the model may compute otherwise. Positions count as
        lengths unless they can be chosen.
        """
        sharing = self.sharing
        if not sharing.policy.self_check:
            return []
        few = TOKENS * sharing.size + 1
        lengths = [*sharing.lengths, *(sharing.positions if positions else ())]
        past = [min(length + few, total) for length in lengths if length < total and length <= MOST_TOKENS]
        return [tokens for tokens in dict.fromkeys([few, max([few, *past])]) if tokens > self.checked]

    def check(
        self, call: Call, run: Callable[[Region], Tensor], tokens: int, in_blocks: bool = True, blocks: bool = True
    ) -> None:
        """Run the self-check with a function that calls the module in a region of so many tokens."""
        assert call.tokens is not None
        sharing = self.sharing
        alone = Region(None, tokens, sharing.owner, in_blocks, mode=sharing.mode, record=[])
        regions = [alone, sharing.region(tokens, in_blocks=in_blocks, record=[])]
        check_shared(call.module, self.name, call.tokens.device, regions, run, blocks)
        self.checked = max(self.checked, tokens)


class InBlock(Patch):
    """On each block, below its activation checkpointing."""

    order = Order.SHARED

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = current()
        if region is None:
            return self.inner(module, *args, **kwargs)
        with region.in_block():
            return self.inner(module, *args, **kwargs)


class SharedBlock(SharedPart):
    """On each module of a chain that opens a region at the first of them and closes it at the last one."""

    def __init__(self, sharing: Sharing, path: str, first: bool, last: bool) -> None:
        super().__init__(sharing, f"{sharing.owner}: {path}")
        self.first, self.last = first, last

    def share(self, call: Call) -> Any:
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
        if has_cache(call.arguments):
            inform(
                f"{sharing.owner} fills a key-value cache, so each rank computes all tokens; pass use_cache=False to"
                " share them",
                once=f"shared cache {sharing.owner}",
            )
            return None
        if sharing.given is not None:
            return sharing.given
        if not sharing.compared:
            sharing.compare(sharing.call or call)
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
        if own is not tokens:
            own = own.clone()  # a view would keep those of all ranks alive
        if not is_backward():
            for count in self.lengths_to_check(region.total):
                self._check(region, call, own, count)
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
        self.sharing.open, region.closed = None, True
        region.check_exchanged()
        whole = region.mean(leaves[0]) if is_loss else region.gathered(leaves[0])
        return pytree.tree_map(lambda leaf: whole if leaf is leaves[0] else leaf, output)

    def _check(self, region: Region, call: Call, own: Tensor, tokens: int) -> None:
        """Check so many tokens, repeated from a few of the rank's own ``own``, ``[B, n, H]``, of a block's input."""
        few = repeated_to(tokens)
        # The first tokens of each rank, from there: dropout in front of the blocks differs between ranks.
        count = min(TOKENS, min(region.lengths))
        first = own.detach()[:, :count]
        start = few(all_gather(first, [count] * region.size, 1, region.name), 1)
        call = call.changed(self.name, region.total, start, few, masks=True).without_documents()

        def run(region: Region) -> Tensor:
            local = call.changed(self.name, region.total, region.local(start), region.local)
            leaves = pytree.tree_leaves(local.run(self.inner))
            found = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
            return region.mean(found) if found.dim() == 0 else found

        self.check(call, run, tokens)
