"""The door to any model but causal ones of transformers: from the first block's input to the last block's output.

What is around the blocks has all tokens on each rank. What is between them has the rank's own. A module that the policy
names is shared as if it were the only block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.modules.cache import has_cache
from lt_tiled.modules.patch import Order, Patch
from lt_tiled.recompute.mode import in_checkpoint, is_backward
from lt_tiled.sequence_parallel.agreement import check_same_batch, check_same_block
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.door import Door
from lt_tiled.sequence_parallel.exchange import in_block, refuse_checkpoint
from lt_tiled.sequence_parallel.self_check import Checked, checking
from lt_tiled.sequence_parallel.ulysses import UlyssesState, current, entered, pack_hook, set_current

_batch: ContextVar[Call | None] = ContextVar("batch", default=None)
"""The call of the model that calls the blocks, whose arguments are the batch."""


@contextmanager
def around_blocks(owner: str, call: Call) -> Iterator[None]:
    """Run the model that calls the blocks. Refuse a call that ends between the first and the last of them."""
    token = _batch.set(call)
    with entered(None):
        try:
            yield
        finally:
            _batch.reset(token)
        if current() is not None:
            raise ValueError(
                f"{owner}: the first of the blocks was called, and the last of the blocks was not called after it, so"
                " what is behind them has the tokens of one rank: call the blocks in their order and up to the last"
                " one, or name one module around them in SequenceParallel(targets=...)."
            )


def end_pass(state: UlyssesState, tensor: Tensor) -> None:
    """Agree with the other ranks that all blocks ran, and that tokens were exchanged in some."""
    if not state.calls:
        raise ValueError(
            f"{state.owner} shared its sequences, and no attention saw all tokens. Use the sdpa, flash or flex"
            " attention of transformers (attn_implementation), or F.scaled_dot_product_attention."
        )
    check_same_block(state.owner, state.group, "the end of the blocks", tensor)


class BlockScope(Patch):
    """On each block, below its activation checkpointing: names the block, and finds attention inside."""

    order = Order.SHARED

    def __init__(self, door: Door, name: str) -> None:
        self.mode, self.name = door.mode, name

    def compiles(self, module: nn.Module) -> bool:
        """Return False if a mode must see each operation."""
        return self.mode is None

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if current() is None:
            return self.inner(module, *args, **kwargs)
        with in_block(self.name), self.mode or nullcontext():
            return self.inner(module, *args, **kwargs)


class SharedBlock(Patch):
    """On each block: the first one begins a shared pass, and the last one ends it."""

    order = Order.SEQUENCE

    def __init__(self, door: Door, path: str, first: bool, last: bool) -> None:
        self.door, self.first, self.last = door, first, last
        self.name = f"{door.owner}: {path}"
        """The name in messages."""
        self.checked = Checked(door)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, state, check = Call(module, args, kwargs), current(), checking()
        if state is None and check is not None and check.whole:
            return check.block(self.name, call, self.inner)
        if not (self.first and self.last):  # a block alone begins another pass in a recompute
            inside = state is not None and in_checkpoint() and pack_hook() is not state.hooks
            refuse_checkpoint(self.door.owner, inside or (state is None and is_backward()))
        if state is not None and state.decoder_mask is not None:  # a causal model is shared up to its loss
            if check is not None:
                check.note(call)
            return call.run(self.inner)
        if self.first:
            return self._first(call, state)
        return call.run(self.inner) if state is None else self._shared(state, call)

    def _first(self, call: Call, before: UlyssesState | None) -> Any:
        """Begin a shared pass with the tokens of the first block's input, unless a cache is filled."""
        door, tokens = self.door, call.tokens
        if before is not None:
            raise ValueError(
                f"{self.name}, the first block, was called again before the last one, with the tokens of one rank: name"
                " one module around the blocks in SequenceParallel(targets=...)."
            )
        if has_cache(call.arguments):
            inform(
                f"{door.owner} fills a key-value cache, so each rank computes all tokens; pass use_cache=False to"
                " share them",
                once=f"shared cache {door.owner}",
            )
            return call.run(self.inner)
        if tokens is None or tokens.shape[1] == 0:
            return call.run(self.inner)
        check_same_batch(door.owner, door.group, (_batch.get() or call).arguments)
        if door.caller is None:
            self.checked.run(call, self._run_whole, tokens.shape[1])
        state = door.state_of_blocks(call, tokens)
        set_current(state)
        return self._shared(state, call)

    def _run_whole(self, call: Call, shared: bool) -> list[Tensor]:
        """Run a module that the policy names in a self-check, which compares it as a block."""
        if not shared and (check := checking()) is not None:
            check.block(self.name, call, self.inner)
        return []

    def _shared(self, state: UlyssesState, call: Call) -> Any:
        """Run a block on the rank's own tokens, of which the first block is given all and the others these."""
        try:
            own = call.tokens
            if self.first and own is not None:
                own = state.own(own).clone()  # a view would keep the tokens of all ranks alive
            local = call.changed(self.name, state.total, own, state.own)
            if (check := checking()) is not None:
                check.note(local)
            return self._returned(state, local.run(self.inner))
        except BaseException:
            set_current(None)
            raise

    def _returned(self, state: UlyssesState, output: Any) -> Any:
        """Return the output of a block: hidden states, and those of the last one with all tokens."""
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(leaves) != 1 or leaves[0].dim() < 2 or leaves[0].shape[1] != state.length:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise ValueError(
                f"{self.name} returned tensors of the shapes {shapes or 'none'}. Where ranks share a sequence, a block"
                f" returns hidden states [B, {state.length}, ...] and nothing else: return no attention weights,"
                " router logits or losses."
            )
        if not self.last:
            return output
        set_current(None)
        end_pass(state, leaves[0])
        whole = state.gathered(leaves[0])
        return pytree.tree_map(lambda leaf: whole if leaf is leaves[0] else leaf, output)
