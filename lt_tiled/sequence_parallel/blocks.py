"""The door to any model but causal ones of transformers: from the first block's input to the last block's output.

What is around the blocks has all tokens on each rank. What is between them has the rank's own. A module that the policy
names is shared as if it were the only block.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.modules.cache import has_cache
from lt_tiled.modules.patch import Order, Patch
from lt_tiled.recompute.mode import is_backward
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.exchange import block_name
from lt_tiled.sequence_parallel.groups import check_same_batch
from lt_tiled.sequence_parallel.self_check import check_once, checking, run_block
from lt_tiled.sequence_parallel.ulysses import Door, UlyssesState, held, shared_pass

batch: ContextVar[Call | None] = ContextVar("batch", default=None)
"""The call of the model that calls the blocks, whose arguments are the batch."""


@dataclass(eq=False)
class SharedBlock(Patch):
    """On each block: the first one begins a shared pass, and the last one ends it."""

    order = Order.DOOR
    door: Door
    name: str  # in messages
    first: bool
    last: bool

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(module, args, kwargs)
        state = shared_pass.get()
        check = checking.get()
        is_whole = check is not None and check.whole
        inside = module.training and getattr(module, "gradient_checkpointing", False)
        around = state is None and is_backward() and not (self.first and self.last)  # a block alone is shared again
        if inside or around:
            raise ValueError(
                f"{self.door.owner} has activation checkpointing of its own in its blocks or around them, and would"
                " recompute the tokens of one rank. Use lt_tiled's (activation_checkpointing=True) in place of"
                " gradient_checkpointing_enable() or torch's checkpoint."
            )
        block_name.set(self.name)
        if state is None and self.first and not is_whole:
            return self._first(call)
        if state is None or state.to_loss:
            return run_block(self.name, call, self.inner, state)
        return self._shared(state, call)

    def _first(self, call: Call) -> Any:
        """Begin a shared pass with the tokens of the first block's input, unless a cache is filled."""
        tokens = call.tokens
        if tokens is None or tokens.shape[1] == 0 or has_cache(call.arguments):
            return call.run(self.inner)
        check_same_batch(self.door.owner, self.door.group, (batch.get() or call).arguments)
        if self.door.caller is None and checking.get() is None:
            check_once(self.door, call, self)
        state = self.door.state(tokens.shape[1], positions=call.arguments.get("position_ids"))
        return self._shared(state, call)

    def _shared(self, state: UlyssesState, call: Call) -> Any:
        """Run a block on the rank's own tokens. The last one returns the hidden states of all tokens."""
        with held(shared_pass, state):  # an error in the first one begins no pass
            output = run_block(self.name, call.cut(self.name, state.total, state.own), self.inner, state)
        shared_pass.set(None if self.last else state)
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(leaves) != 1 or leaves[0].dim() < 2 or leaves[0].shape[1] != state.length:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise ValueError(
                f"{self.name} returned tensors of the shapes {shapes or 'none'}. A shared block returns hidden states"
                f" [B, {state.length}, ...] and nothing else: return no attention weights, router logits or losses."
            )
        if not self.last:
            return output
        state.end()
        return pytree.tree_map_only(Tensor, state.gathered, output)
