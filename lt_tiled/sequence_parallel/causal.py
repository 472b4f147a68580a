"""What a causal model of transformers needs around its region: masks and positions of all tokens, and the loss.

Whatever depends on all tokens and is small is computed from all of them here, and then cut or noted in the region.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.loss.cross_entropy import shifted, wide_dtype
from lt_tiled.modules.cache import loss_function_set
from lt_tiled.modules.patch import Order, Patch, is_of
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.positions import documents_of
from lt_tiled.sequence_parallel.region import Region, current
from lt_tiled.sequence_parallel.states import STATE_LAYERS

MAX_MASK_BYTES = 2**30
"""The largest mask of all tokens that is made, in bytes."""
_NEEDS_CACHE = ("use_cache", "past_key_values", "position_ids")
"""Arguments with which the default cache may matter: transformers finds packed documents where there is none."""


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


def fills_cache(call: Call) -> bool:
    """Whether a call without sequence parallelism would fill a key-value cache."""
    model: Any = call.module
    asked = call.arguments.get("use_cache")
    if asked is None:
        asked = getattr(model.config.get_text_config(), "use_cache", False)
    recomputes = model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return bool(asked) and not recomputes


def without_unused_cache(call: Call) -> Call:
    """Return the call without the key-value cache that is the default, of which training has no use."""
    parameters = inspect.signature(type(call.module).forward).parameters
    takes = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    trains = call.module.training or call.arguments.get("labels") is not None
    needed = any(call.arguments.get(name) is not None for name in _NEEDS_CACHE)
    if not takes or not trains or needed or not fills_cache(call):
        return call
    return Call(call.module, call.args, call.kwargs | {"use_cache": False})


def own_arguments(region: Region, call: Call) -> dict[str, Any]:
    """Return the arguments of a model for the rank's own tokens, and note masks and positions of all in the region."""
    tokens, positions = call.tokens, call.arguments.get("position_ids")
    assert tokens is not None
    documents = None if fills_cache(call) else positions  # transformers ignores them while it fills a cache
    masks = _masks(region, call, documents, tokens)
    if not isinstance(masks, dict):
        region.mask = masks
        masks = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)  # four dimensions: it makes no other
    region.position_ids = torch.arange(region.total, device=tokens.device)[None] if positions is None else positions
    own = call.changed(region.owner, region.total, region.local(tokens), region.local).arguments
    region.own_position_ids = region.local(region.position_ids, -1)
    region.made_mask = masks
    padding = call.arguments.get("attention_mask")  # which the head is given, and its decoder is not
    return own | {"attention_mask": padding, "position_ids": region.own_position_ids, "use_cache": False}


def _masks(region: Region, call: Call, positions: Tensor | None, tokens: Tensor) -> Any:
    """Return the masks of all tokens as transformers makes them: one, or one for each kind of layer.

    Packed documents that the position ids show are noted in the region instead, where attention can run on each. A mask
    that would be too large is refused.
    """
    from transformers.masking_utils import create_masks_for_generate

    model: Any = call.module
    mask = call.arguments.get("attention_mask")
    if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4):
        return mask
    config, total, batch = model.config, region.total, tokens.shape[0]
    implementation = str(config._attn_implementation)
    dense, eager = implementation == "sdpa", implementation == "eager"
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    states = kinds & STATE_LAYERS - {"hybrid_sliding"}
    plain = kinds - states - {"mlp", "moe"} <= {"full_attention"} if kinds else not any(windows)
    if dense and plain and positions is not None and mask is None and batch == 1:
        documents = documents_of(positions)
        if len(documents) > 1:
            region.documents = documents
            if states:  # models look masks up by the kinds of their parts
                kinds |= {"full_attention", "linear_attention"}
            return dict.fromkeys(kinds) if kinds else None
    nbytes = batch * total**2 * (model.dtype.itemsize if eager else 1)
    if (dense or eager) and nbytes > MAX_MASK_BYTES:
        packed = positions is not None and bool((positions.diff() != 1).any())
        padded = mask is not None and not bool(mask.all())
        if eager or packed or padded or (not plain and total > min(filter(None, windows), default=0)):
            raise ValueError(
                f"{region.owner} needs a mask of {nbytes >> 20} MiB for {total} tokens, and at most"
                f" {MAX_MASK_BYTES >> 20} MiB are made: use flash or flex attention, or, instead of padding, documents"
                " packed in one row with position_ids that begin at 0 for each."
            )
    like = torch.empty((), dtype=model.dtype, device=tokens.device).expand(batch, total, 1)
    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)  # some models have their own
    return make(config, like, mask, None, positions)


@contextmanager
def shared_loss(region: Region, call: Call) -> Iterator[None]:
    """Let a model compute its loss from the rank's own labels, which are shifted before they are cut.

    Each rank divides by the mean of the ranks' counts of labels: see NOTE [Sequence parallelism].
    """
    model, labels, tokens = cast(Any, call.module), call.arguments["labels"], call.tokens
    assert tokens is not None
    if labels.shape != tokens.shape[:2]:
        raise ValueError(
            f"labels have the shape {list(labels.shape)} and must have that of the tokens, {list(tokens.shape[:2])}."
        )
    function, calls = model.loss_function, 0
    default = inspect.signature(function).parameters.get("ignore_index")
    ignored = call.arguments.get("ignore_index", -100 if default is None else default.default)
    targets = call.arguments.get("shift_labels")
    if targets is None:
        targets = shifted(labels, ignored)

    def loss_function(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        count = kwargs.get("num_items_in_batch")
        if count is None:
            count = (targets != ignored).sum()
        kwargs["num_items_in_batch"] = torch.as_tensor(count, device=logits.device).to(wide_dtype(logits)) / region.size
        kwargs["shift_labels"] = region.local(targets).contiguous()
        return function(logits, *args, **kwargs)

    with loss_function_set(model, loss_function):
        yield
    if calls != 1:
        raise ValueError(
            f"{region.owner} did not compute its loss by its loss_function, so its labels cannot be shared: call it"
            " without labels and compute the loss from its output."
        )


class DecoderPatch(Patch):
    """On the decoder of a causal model: it is given the masks that were made for all tokens, and its head the padding.

    The head computes the load-balancing loss from the router logits and the padding of all tokens.
    """

    order = Order.POSITIONS

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region, call = current(), Call(module, args, kwargs)
        if region is None or region.made_mask is None:
            return call.run(self.inner)
        output = call.replaced(attention_mask=region.made_mask).run(self.inner)
        if output.get("router_logits") is not None:
            output["router_logits"] = _of_all_tokens(region, output["router_logits"])
        return output


def _of_all_tokens(region: Region, logits: Any) -> Any:
    """Return router logits ``[B * S, E]`` or ``[B, S, E]`` for those of the rank's own tokens, in one all-gather."""
    leaves, form = pytree.tree_flatten(logits)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rows = [tensor.reshape(-1, region.length, tensor.shape[-1]) for tensor in tensors]
    parts = region.gathered(torch.cat(rows, -1)).split([row.shape[-1] for row in rows], -1)
    whole = iter(p.flatten(0, 1) if t.dim() == 2 else p for t, p in zip(tensors, parts, strict=True))
    return pytree.tree_unflatten([next(whole) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
