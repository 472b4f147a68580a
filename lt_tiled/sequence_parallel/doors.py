"""The doors of a shared pass: where a model, or its blocks, begins to compute on the rank's own tokens.

A causal model of transformers is shared from its token ids to its loss. Whatever depends on all tokens and is small is
computed from all of them here, and then cut, or kept in the state of the pass. A call without labels, or of a model
that computes something else before its first block, and any other model, is shared from the first block's input to the
last block's output. What is around the blocks has all tokens on each rank, and what is between them has the rank's own.
A module that the policy names is shared as if it were the only block.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.loss.cross_entropy import shifted, wide_dtype
from lt_tiled.modules.cache import has_cache
from lt_tiled.modules.patch import Order, Patch, is_of
from lt_tiled.recompute.mode import is_backward
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.exchange import block_name
from lt_tiled.sequence_parallel.groups import check_same_batch, check_same_block, group_mean, name_of
from lt_tiled.sequence_parallel.self_check import check_once, checking, run_block
from lt_tiled.sequence_parallel.ulysses import Door, UlyssesState, held, shared_pass
from lt_tiled.tiling.weights import swapped

batch: ContextVar[Call | None] = ContextVar("batch", default=None)
"""The call of the model that calls the blocks, whose arguments are the batch."""


@dataclass(eq=False)
class SharedModel(Patch):
    """On the module that calls the blocks."""

    order = Order.DOOR
    door: Door
    rotary: bool
    """Whether positions are rotary tables, so that nothing else before the blocks needs all tokens."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(module, args, kwargs)
        door = self.door
        check = checking.get()
        if shared_pass.get() is not None or (check is not None and check.whole):
            return call.run(self.inner)
        to_loss = self._is_shared_to_loss(call)
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            asked = call.arguments.get(name)
            if asked is None:
                asked = getattr(getattr(module, "config", None), name, False)
            if asked and not (to_loss and name == "output_router_logits"):  # which are all-gathered
                raise ValueError(
                    f"{door.owner} is asked for {name}, of which each rank has its own tokens: with sequence"
                    " parallelism set it to False."
                )
        # Ranks may generate apart, so these calls are not compared.
        trains = door.hand_written or module.training or call.arguments.get("labels") is not None
        if trains and check is None and not is_partial(call):
            check_once(door, call, self)
        return self._to_loss(call) if to_loss else self._by_blocks(call, trains)

    def _is_shared_to_loss(self, call: Call) -> bool:
        """Whether a call of a causal model computes the loss of all its tokens, and its own code works on some of them.

        Loss functions of users may divide by a count of their own, and take no labels that are shifted already. GPT-2
        reshapes behind its blocks to the shape of all tokens, and noise of embeddings depends on their number.
        """
        model: Any = call.module
        function: Any = getattr(model, "loss_function", None)
        known = is_of(function, ("transformers.", "lt_tiled."))
        if call.arguments.get("labels") is None or is_partial(call) or not known:
            return False
        text = model.config.get_text_config() is model.config and model.base_model is not model
        taken = inspect.signature(type(model).forward).parameters.keys()
        takes = {"position_ids", "attention_mask"} <= taken and "shift_labels" in inspect.signature(function).parameters
        if not (self.rotary and text and takes) or self.door.finds_attention:
            return False
        return not (model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None))

    def _to_loss(self, call: Call) -> Any:
        """Run a causal model on the rank's own tokens, and return its output with the loss of the whole sequence."""
        # 1. Positions and documents of all tokens.
        check_same_batch(self.door.owner, self.door.group, call.arguments)
        total = call.tokens.shape[1]
        positions = call.arguments.get("position_ids")
        if positions is None:
            positions = torch.arange(total, device=call.tokens.device)[None]
        state = self.door.state(total, to_loss=True, positions=positions, documents=documents_of(call))
        # 2. The rank's own tokens. Padding and positions are those of all, from which the model makes masks and rotary
        # tables.
        own = call.cut(self.door.owner, total, state.own).arguments
        own |= {"position_ids": positions, "use_cache": False}
        as_tuple = own.pop("return_dict", None) is False
        # 3. Each rank's loss is that of its own labels.
        with shared_loss(state, call, own), held(shared_pass, state):
            output = self.inner(call.module, **own)
        state.end()
        output["loss"] = group_mean(output["loss"], name_of(state.group))
        if output.get("logits") is not None:
            output["logits"] = None  # those of this rank's tokens
        return output.to_tuple() if as_tuple else output

    def _by_blocks(self, call: Call, trains: bool) -> Any:
        """Run a model whose blocks are shared. Refuse a call that ends between the first and the last of them."""
        with held(batch, call), held(shared_pass, None):
            output = call.run(self.inner)
            if trains:  # a rank that left out its first block has exchanged nothing
                check_same_block(self.door.group, f"{self.door.owner}: the end of the call")
            if shared_pass.get() is not None:
                raise ValueError(
                    f"{self.door.owner}: the last of the blocks was not called after it began to share the sequence."
                    " Call the blocks up to the last one, or name one module around them in"
                    " SequenceParallel(targets=...)."
                )
        return output


def is_partial(call: Call) -> bool:
    """Whether a call continues a cached sequence, wants the logits of some tokens alone, or changes the masks."""
    continues = has_cache(call.arguments) or call.arguments.get("is_causal") is not None
    some = call.arguments.get("logits_to_keep")
    return continues or isinstance(some, Tensor) or bool(some)


# The blocks


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
        inside = module.training and getattr(module, "gradient_checkpointing", False)
        around = state is None and is_backward() and not (self.first and self.last)  # a block alone is shared again
        if inside or around:
            raise ValueError(
                f"{self.door.owner} has activation checkpointing of its own in its blocks or around them, and would"
                " recompute the tokens of one rank. Use lt_tiled's (activation_checkpointing=True) in place of"
                " gradient_checkpointing_enable() or torch's checkpoint."
            )
        block_name.set(self.name)
        if state is None and self.first and not (check is not None and check.whole):
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
            output = run_block(self.name, call, self.inner, state)
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


# From token ids to the loss


def documents_of(call: Call) -> tuple[int, ...]:
    """Return the lengths of packed documents, if attention can run for each of them apart and so without a mask."""
    model: Any = call.module
    positions: Any = call.arguments.get("position_ids")
    is_packed = positions is not None and call.arguments.get("attention_mask") is None and len(positions) == 1
    if not is_packed or model.config._attn_implementation != "sdpa":
        return ()
    starts = (positions[0].diff() != 1).nonzero().flatten().add(1).tolist()
    return tuple(high - low for low, high in pairwise([0, *starts, positions.shape[1]]))


@contextmanager
def shared_loss(state: UlyssesState, call: Call, own: dict[str, Any]) -> Iterator[None]:
    """Let a model compute its loss from the rank's own labels, which are shifted before they are cut.

    Each rank divides by the mean of the ranks' counts of labels: see NOTE [Sequence parallelism].
    """
    function: Any = call.module.loss_function
    ignored = call.arguments.get("ignore_index", -100)
    targets: Any = call.arguments.get("shift_labels")
    if targets is None:
        targets = shifted(call.arguments["labels"], ignored)
    # 1. Tokens that repeat the last one have no label. Another loss than that of this function finds no labels at all.
    labels = state.own(targets).clone()  # which may be the ids
    labels[:, state.count :] = ignored
    own["labels"] = torch.full_like(labels, ignored)

    def loss_function(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        # 2. The whole sequence's count, as the model was given it.
        count = kwargs.get("num_items_in_batch")
        if count is None:
            count = (targets != ignored).sum()
        count = torch.as_tensor(count, device=logits.device).to(wide_dtype(logits))
        kwargs["num_items_in_batch"] = count / state.group.size()
        kwargs["shift_labels"] = labels
        return function(logits, *args, **kwargs)

    with swapped([(vars(call.module), "_loss_function", loss_function)]):  # the setter has no deleter
        yield


class DecoderPatch(Patch):
    """On the decoder of a causal model: it returns the router logits of all tokens.

    From them and the padding of all tokens the head computes the load-balancing loss.
    """

    order = Order.DECODER

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = shared_pass.get()
        output = self.inner(module, *args, **kwargs)
        if state is None or not state.to_loss or output.get("router_logits") is None:
            return output

        def of_all(logits: Tensor) -> Tensor:  # [B * S, E] or [B, S, E]
            rows = state.gathered(logits.reshape(-1, state.length, logits.shape[-1]))
            return rows.flatten(0, 1) if logits.dim() == 2 else rows

        output["router_logits"] = pytree.tree_map_only(Tensor, of_all, output["router_logits"])
        return output
