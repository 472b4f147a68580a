"""The door to a causal model of transformers: from its token ids to its loss.

Whatever depends on all tokens and is small is computed from all of them here, and then cut, or kept in the state of the
shared pass. A call without labels, or of a model that computes something else before its first block, is shared by its
blocks (``blocks.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.loss.cross_entropy import shifted, wide_dtype
from lt_tiled.modules.cache import loss_function_set
from lt_tiled.modules.patch import Order, Patch, is_of
from lt_tiled.sequence_parallel.agreement import check_same_batch
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.blocks import around_blocks, end_pass
from lt_tiled.sequence_parallel.collectives import group_mean
from lt_tiled.sequence_parallel.door import Door
from lt_tiled.sequence_parallel.masks import masks_of
from lt_tiled.sequence_parallel.self_check import Checked, checking
from lt_tiled.sequence_parallel.ulysses import UlyssesState, current, entered


class SharedModel(Patch):
    """On the module that calls the blocks."""

    order = Order.SEQUENCE

    def __init__(self, door: Door, rotary: bool) -> None:
        self.door = door
        self.rotary = rotary
        """Whether positions are rotary tables, so that nothing else before the blocks needs all tokens."""
        self.checked = Checked(door)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, door = Call(module, args, kwargs), self.door
        if current() is not None or checking() is not None:
            return call.run(self.inner)
        to_loss, trains = False, module.training or call.arguments.get("labels") is not None
        if not door.hand_written:
            to_loss = self._is_shared_to_loss(call)
            refuse_outputs(door.owner, call, to_loss)
            call = without_unused_cache(call) if trains else call
        if (trains or door.hand_written) and not is_partial(call):  # ranks may generate apart
            tokens = call.tokens
            total = 0 if tokens is None or tokens.dim() > 3 else tokens.shape[1]
            self.checked.run(call, self._decoded if to_loss else self._run, total)
        if to_loss:
            return self._to_loss(call)
        with around_blocks(door.owner, call):
            return call.run(self.inner)

    def _is_shared_to_loss(self, call: Call) -> bool:
        """Whether a call of a causal model is shared from its token ids to its loss.

        Otherwise it is shared up to the last block: GPT-2 reshapes behind its blocks to the shape of all.
        """
        if not computes_loss(call):
            return False
        model: Any = call.module
        noise = model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None)
        if self.rotary and self.door.mode is None and not noise:
            return True
        inform(
            f"{self.door.owner} computes what is before and behind its blocks for all tokens on each rank: it has no"
            " rotary position embeddings, its embeddings have noise, or it calls torch's attention itself",
            once=f"all tokens {self.door.owner}",
        )
        return False

    def _to_loss(self, call: Call) -> Any:
        """Run a causal model on the rank's own tokens, and return its output with the loss of the whole sequence."""
        check_same_batch(self.door.owner, self.door.group, call.arguments)
        state, own = shared_arguments(self.door, call)
        as_tuple = own.pop("return_dict", None) is False
        with shared_loss(state, call), entered(state):
            output = self.inner(call.module, **own)
        end_pass(state, output["loss"])
        output["loss"] = group_mean(output["loss"], state.name)  # of those that ranks computed from their own labels
        if output.get("logits") is not None:
            output["logits"] = None  # those of this rank's tokens
        return output.to_tuple() if as_tuple else output

    # In a self-check

    def _decoded(self, call: Call, shared: bool) -> list[Tensor]:
        """Return the hidden states that the decoder of a causal model gives to its head."""
        model = cast(Any, call.module)
        if not shared:
            given, state = call.arguments | {"use_cache": False}, None
        else:
            state, given = shared_arguments(self.door, call)
        taken = inspect.signature(type(model.base_model).forward).parameters
        with entered(state):
            output = model.base_model(**{name: value for name, value in given.items() if name in taken})
            return [output[0] if state is None else state.gathered(output[0])]

    def _run(self, call: Call, shared: bool) -> list[Tensor]:
        """Return the floating-point tensors of a model's output."""
        with around_blocks(self.door.owner, call) if shared else nullcontext():
            output = call.run(self.inner)
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return [leaf for leaf in leaves if leaf.is_floating_point()]


# What a call wants


def refuse_outputs(owner: str, call: Call, to_loss: bool) -> None:
    """Raise ``ValueError`` if a call asks for outputs of which each rank has its own tokens.

    Router logits are gathered in a model that is shared ``to_loss``.
    """
    for name in ("output_attentions", "output_hidden_states", *([] if to_loss else ["output_router_logits"])):
        asked = call.arguments.get(name)
        if getattr(call.module.config, name, False) if asked is None else asked:
            raise ValueError(
                f"{owner} is asked for {name}, of which each rank has its own tokens: with sequence parallelism set"
                " it to False."
            )


def computes_loss(call: Call) -> bool:
    """Whether a call computes the loss of all of its tokens, by a function that takes labels that are shifted already.

    Other loss functions may divide by a count of their own.
    """
    model: Any = call.module
    function = getattr(model, "loss_function", None)
    has_tokens = call.arguments.get("input_ids") is not None or call.arguments.get("inputs_embeds") is not None
    if call.arguments.get("labels") is None or not has_tokens or is_partial(call):
        return False
    if function is None or not is_of(function, ("transformers.", "lt_tiled.")):
        return False
    text = model.config.get_text_config() is model.config
    taken = inspect.signature(type(model).forward).parameters
    known = {"position_ids", "attention_mask"} <= set(taken) and model.base_model is not model
    return text and known and "shift_labels" in inspect.signature(function).parameters


def is_partial(call: Call) -> bool:
    """Whether a call continues a cached sequence, wants the logits of some tokens alone, or changes the masks."""
    continues = call.arguments.get("past_key_values") is not None or call.arguments.get("is_causal") is not None
    some = call.arguments.get("logits_to_keep")
    return continues or isinstance(some, Tensor) or bool(some)


def without_unused_cache(call: Call) -> Call:
    """Return the call without the key-value cache that is the default, of which training has no use."""
    parameters = inspect.signature(type(call.module).forward).parameters
    asked = call.arguments.get("use_cache") is not None or call.arguments.get("past_key_values") is not None
    config: Any = call.module.config
    has_cache = getattr(config.get_text_config(), "use_cache", False)
    takes = "use_cache" in parameters or (has_cache and any(p.kind is p.VAR_KEYWORD for p in parameters.values()))
    return Call(call.module, call.args, call.kwargs | {"use_cache": False}) if takes and not asked else call


# From all tokens to the rank's own


def shared_arguments(door: Door, call: Call) -> tuple[UlyssesState, dict[str, Any]]:
    """Return the state of a pass that is shared to the loss, and the model's arguments for the rank's own tokens."""
    tokens, positions = call.tokens, call.arguments.get("position_ids")
    assert tokens is not None
    total = tokens.shape[1]
    # 1. Masks and positions of all tokens.
    masks, documents = masks_of(door.owner, call, tokens)
    mask = None
    if not isinstance(masks, dict):
        mask = masks
        masks = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)  # four dimensions: it makes no other
    if positions is None:
        positions = torch.arange(total, device=tokens.device)[None]
    state = door.state(total, positions=positions, documents=documents, mask=mask, decoder_mask=masks)
    # 2. The rank's own tokens. The head is given the padding of all, and its decoder is not.
    own = call.changed(door.owner, total, state.own(tokens), state.own).arguments
    padding = call.arguments.get("attention_mask")
    return state, own | {"attention_mask": padding, "position_ids": state.own_positions, "use_cache": False}


@contextmanager
def shared_loss(state: UlyssesState, call: Call) -> Iterator[None]:
    """Let a model compute its loss from the rank's own labels, which are shifted before they are cut.

    Each rank divides by the mean of the ranks' counts of labels: see NOTE [Sequence parallelism].
    """
    model = cast(Any, call.module)
    function, calls = model.loss_function, 0
    default = inspect.signature(function).parameters.get("ignore_index")
    ignored = call.arguments.get("ignore_index", -100 if default is None else default.default)
    targets = call.arguments.get("shift_labels")
    if targets is None:
        targets = shifted(call.arguments["labels"], ignored)
    # Tokens that repeat the last one have no label.
    own = state.own(targets).clone()
    own[:, state.count :] = ignored

    def loss_function(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        count = kwargs.get("num_items_in_batch")
        if count is None:
            count = (targets != ignored).sum()
        kwargs["num_items_in_batch"] = torch.as_tensor(count, device=logits.device).to(wide_dtype(logits)) / state.size
        kwargs["shift_labels"] = own
        return function(logits, *args, **kwargs)

    with loss_function_set(model, loss_function):
        yield
    if calls != 1:
        raise ValueError(
            f"{state.owner} did not compute its loss by its loss_function, so its labels cannot be shared: call it"
            " without labels and compute the loss from its output."
        )


class DecoderPatch(Patch):
    """On the decoder of a causal model: it is given the masks that were made for all tokens, and its head the padding.

    The head computes the load-balancing loss from the router logits and the padding of all tokens.
    """

    order = Order.POSITIONS

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, call = current(), Call(module, args, kwargs)
        if state is None or state.decoder_mask is None:
            return call.run(self.inner)
        output = call.replaced(attention_mask=state.decoder_mask).run(self.inner)
        if output.get("router_logits") is not None:
            output["router_logits"] = _of_all_tokens(state, output["router_logits"])
        return output


def _of_all_tokens(state: UlyssesState, logits: Any) -> Any:
    """Return router logits ``[B * S, E]`` or ``[B, S, E]`` for those of the rank's own tokens, in one all-gather."""
    leaves, form = pytree.tree_flatten(logits)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rows = [tensor.reshape(-1, state.length, tensor.shape[-1]) for tensor in tensors]
    parts = state.gathered(torch.cat(rows, -1)).split([row.shape[-1] for row in rows], -1)
    whole = iter(p.flatten(0, 1) if t.dim() == 2 else p for t, p in zip(tensors, parts, strict=True))
    return pytree.tree_unflatten([next(whole) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
