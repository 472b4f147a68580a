"""A region around a whole causal model of transformers that is called with labels: from token ids to the loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled._log import warn
from lt_tiled.loss.cross_entropy import shifted, wide_dtype
from lt_tiled.loss.transformers import AbsentLogits, loss_function_set
from lt_tiled.modules.patch import Patch, is_of, remove_patch, set_patch
from lt_tiled.sequence_parallel.arguments import Call, repeated_to, token_dims
from lt_tiled.sequence_parallel.chain import Sharing
from lt_tiled.sequence_parallel.region import Region, current, entered
from lt_tiled.sequence_parallel.self_check import check_shared

MAX_MASK_BYTES = 2**30
"""The largest mask of all tokens that is made, in bytes."""


class ModelInRegion(Patch):
    """On a model of transformers whose sequences are shared."""

    attribute = "_lt_tiled_shared_model"

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward of a model. Pickle looks the name up on the model's class."""
    patch: ModelInRegion = self.__dict__[ModelInRegion.attribute]
    if not patch.active or current() is not None:
        return patch.inner(self, *args, **kwargs)
    given = dict(Call(self, args, kwargs).named)
    tokens = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    if patch.sharing.size == 1:  # head tiles alone
        return _shared_blocks(self, patch, given, args, kwargs)
    _refuse_outputs(patch.sharing.owner, self.config, given)
    if given.get("labels") is None or not isinstance(tokens, Tensor) or not _computes_loss(self) or _partly(given):
        return _shared_blocks(self, patch, given, args, kwargs)
    with patch.sharing.compared(given.items()):
        return _shared_loss(self, patch, given, tokens)


def _shared_blocks(
    model: Any, patch: ModelInRegion, given: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a model whose blocks share the sequence.

    Raises:
        ValueError: If code between the blocks needs all tokens.
    """
    sharing = patch.sharing
    taken = inspect.signature(type(model).forward).parameters.values()
    takes = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in taken)
    trains = model.training or given.get("labels") is not None
    if takes and trains and _caches(model, given) and not any(given.get(name) is not None for name in _NEEDS_CACHE):
        kwargs = kwargs | {"use_cache": False}  # the default, of which training has no use
    alone = _caches(model, {**given, **kwargs}) or _partly(given)  # as generate: the ranks' calls may differ
    with sharing.closed():
        try:
            with nullcontext() if alone else sharing.compared(given.items()):
                return patch.inner(model, *args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if sharing.open is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"{sharing.owner} needs all tokens between its blocks, where each rank has its own ({error}): call it"
                " without what it uses there, as features of images that it adds to hidden states, or name one module"
                " around it in SequenceParallel(targets=...)."
            ) from error


_NEEDS_CACHE = ("use_cache", "past_key_values", "position_ids")
"""Arguments with which the default cache may matter: transformers finds packed documents where there is none."""


def _partly(given: Mapping[str, Any]) -> bool:
    """Whether a call continues a cached sequence, wants the logits of some tokens alone, or changes the masks."""
    return any(given.get(name) is not None for name in ("past_key_values", "is_causal")) or bool(
        given.get("logits_to_keep")
    )


def _computes_loss(model: Any) -> bool:
    """Whether a model computes its loss by a function that takes labels which are shifted already."""
    taken = inspect.signature(type(model).forward).parameters
    function = getattr(model, "loss_function", None) if "position_ids" in taken else None
    text = model.config.get_text_config() is model.config
    if function is None or not text:
        return False
    known = is_of(function, ("transformers.", "lt_tiled."))  # another one may divide by a count of its own
    return known and "shift_labels" in inspect.signature(function).parameters


def _refuse_outputs(owner: str, config: Any, given: Mapping[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if given[name] if given.get(name) is not None else getattr(config, name, False):
            raise ValueError(
                f"{owner} is asked for {name}, of which each rank has its own tokens: with sequence parallelism set"
                " it to False."
            )


def _shared_loss(model: Any, patch: ModelInRegion, given: dict[str, Any], tokens: Tensor) -> Any:
    """Run a model on the rank's own tokens, and return its output with the loss of the whole sequence."""
    sharing, total = patch.sharing, tokens.shape[1]
    if sharing.checks and type(model) not in sharing.checked:
        _check(model, patch, tokens)
        sharing.checked.add(type(model))
    if total < sharing.size:
        return patch.inner(model, **given)
    region, labels = sharing.region(total), given["labels"]
    if labels.shape != tokens.shape[:2]:
        raise ValueError(
            f"labels have the shape {list(labels.shape)} and must have that of the tokens, {[*tokens.shape[:2]]}."
        )
    local = _local(region, model, given, tokens)
    as_tuple = local.pop("return_dict", None) is False
    function, losses = model.loss_function, 0
    default = inspect.signature(function).parameters.get("ignore_index")
    ignored = given.get("ignore_index", -100 if default is None else default.default)
    targets = shifted(labels, ignored) if given.get("shift_labels") is None else given["shift_labels"]

    def loss_function(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal losses
        losses += 1
        if (count := kwargs.get("num_items_in_batch")) is None:
            count = (targets != ignored).sum()
        # Each rank divides by the mean of the ranks' counts: see NOTE [Sequence parallelism].
        count = torch.as_tensor(count, device=logits.device).to(wide_dtype(logits)) / region.size
        own = {"shift_labels": region.local(targets).contiguous(), "num_items_in_batch": count}
        return function(logits, *args, **kwargs | own)

    with loss_function_set(model, loss_function), entered(region):
        output = patch.inner(model, **local)
    if losses != 1:
        raise ValueError(
            f"{sharing.owner} did not compute its loss by its loss_function, so its labels cannot be shared: call it"
            " without labels and compute the loss from its output."
        )
    output["loss"] = loss = region.mean(output["loss"])
    sharing.close(region, loss)
    if isinstance(output.get("logits"), Tensor):
        output["logits"] = AbsentLogits(sharing.owner, "has the logits of this rank's tokens only")
    return output.to_tuple() if as_tuple else output


def _local(region: Region, model: Any, given: Mapping[str, Any], tokens: Tensor) -> dict[str, Any]:
    """Return the arguments of a model for the rank's own tokens."""
    positions = given.get("position_ids")
    documents = None if _caches(model, given) else positions
    if documents is None and positions is not None and given.get("attention_mask") is None:
        warn(
            f"{region.owner} was given position_ids with its key-value cache on, and transformers then ignores"
            " documents that are packed in a row: pass use_cache=False.",
            once=f"packed with cache {region.owner}",
        )
    masks = _masks(region, model, given.get("attention_mask"), documents, tokens)
    if not isinstance(masks, dict):
        region.mask, region.own_mask = masks, True
        masks = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)  # four dimensions: it makes no other
    region.position_ids = torch.arange(region.total, device=tokens.device)[None] if positions is None else positions

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or name.startswith(("cu_seq_lens", "max_length")):
            return value
        named = name in ("input_ids", "inputs_embeds", "labels")
        dims = [1] if named else token_dims(region.owner, name, value, region.total)
        return region.local(value, dims[0]) if dims else value

    own = {name: cut(name, value) for name, value in given.items()}
    return own | {
        "attention_mask": masks,
        "position_ids": region.local(region.position_ids, -1),
        "use_cache": False,
    }


def _caches(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call without sequence parallelism would fill a key-value cache."""
    recomputes = model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if (asked := given.get("use_cache")) is None:
        asked = getattr(model.config.get_text_config(), "use_cache", False)
    return bool(asked) and not recomputes


def _masks(region: Region, model: Any, mask: Any, positions: Tensor | None, tokens: Tensor) -> Any:
    """Return the masks of all tokens as transformers makes them: one, or one for each kind of layer.

    Packed documents that the position ids show are noted in the region instead, where attention can run on each.

    Raises:
        ValueError: If a mask would be too large.
    """
    from transformers.masking_utils import create_masks_for_generate

    if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4):
        return mask
    config, total, batch = model.config, region.total, tokens.shape[0]
    attention = str(config._attn_implementation)
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    plain = kinds == {"full_attention"} or (not kinds and not any(windows))
    if attention == "sdpa" and positions is not None and mask is None and batch == 1:
        starts = (positions[0].diff() != 1).nonzero().flatten().add(1).tolist()
        if starts and plain:
            region.documents = [high - low for low, high in pairwise([0, *starts, total])]
            return dict.fromkeys(kinds) if kinds else None
    nbytes = batch * total**2
    if attention == "sdpa" and nbytes > MAX_MASK_BYTES:
        packed = positions is not None and bool((positions.diff() != 1).any())
        padded = mask is not None and not bool(mask.all())
        if packed or padded or (not plain and total > min(filter(None, windows), default=0)):
            raise ValueError(
                f"{region.owner} needs a mask of {nbytes >> 20} MiB for {total} tokens, and at most"
                f" {MAX_MASK_BYTES >> 20} MiB are made: use flash or flex attention, or, instead of padding, documents"
                " packed in one row with position_ids that begin at 0 for each."
            )
    like = torch.empty((), dtype=model.dtype, device=tokens.device).expand(batch, total, 1)
    return create_masks_for_generate(config, like, mask, None, positions)


def _check(model: Any, patch: ModelInRegion, tokens: Tensor) -> None:
    """Run the self-check on a few of the tokens, which the model shares or not, as if it were called without labels."""
    regions = patch.sharing.small_regions()
    few = repeated_to(regions[0].total)(tokens[:1].detach(), 1)
    name = "inputs_embeds" if few.is_floating_point() else "input_ids"

    def run(small: Region) -> Tensor:
        given: dict[str, Any] = {name: few, "use_cache": False}
        logits: Tensor = patch.inner(model, **given if small is regions[0] else _local(small, model, given, few)).logits
        return logits

    check_shared(model, patch.sharing.owner, tokens.device, regions, run)


def share_model(sharing: Sharing, model: nn.Module, undo: ExitStack) -> None:
    """Share the sequences of a model of transformers from its token ids to its loss, until ``undo`` is closed."""
    set_patch(model, ModelInRegion(sharing), forward)
    undo.callback(remove_patch, model, ModelInRegion, forward)
