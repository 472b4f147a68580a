"""The masks of all tokens, as a model of transformers makes them, and packed documents in place of masks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.states import STATE_LAYERS

MAX_MASK_BYTES = 2**30
"""The largest mask of all tokens that is made, in bytes."""


def masks_of(owner: str, call: Call, tokens: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return the masks of all tokens: one, or one for each kind of layer.

    Packed documents that the position ids show are returned as their lengths instead, where attention can run on each.
    A mask that would be too large is refused.
    """
    from transformers.masking_utils import create_masks_for_generate

    model: Any = call.module
    mask, positions = call.arguments.get("attention_mask"), call.arguments.get("position_ids")
    if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4):
        return mask, ()
    config, batch, total = model.config, tokens.shape[0], tokens.shape[1]
    implementation = str(config._attn_implementation)
    dense, eager = implementation == "sdpa", implementation == "eager"
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    states = kinds & STATE_LAYERS - {"hybrid_sliding"}
    plain = kinds - states - {"mlp", "moe"} <= {"full_attention"} if kinds else not any(windows)
    # 1. Documents that attend to themselves alone need no mask.
    if dense and plain and positions is not None and mask is None and batch == 1:
        starts = (positions[0].diff() != 1).nonzero().flatten().add(1).tolist()
        if starts:
            if states:  # models look masks up by the kinds of their parts
                kinds |= {"full_attention", "linear_attention"}
            documents = tuple(high - low for low, high in pairwise([0, *starts, total]))
            return dict.fromkeys(kinds) if kinds else None, documents
    # 2. A dense mask grows with the square of the length. Causal attention without one is given none.
    nbytes = batch * total**2 * (model.dtype.itemsize if eager else 1)
    if (dense or eager) and nbytes > MAX_MASK_BYTES:
        packed = positions is not None and bool((positions.diff() != 1).any())
        padded = mask is not None and not bool(mask.all())
        if eager or packed or padded or (not plain and total > min(filter(None, windows), default=0)):
            raise ValueError(
                f"{owner} needs a mask of {nbytes >> 20} MiB for {total} tokens, and at most"
                f" {MAX_MASK_BYTES >> 20} MiB are made: use flash or flex attention, or, instead of padding, documents"
                " packed in one row with position_ids that begin at 0 for each."
            )
    # 3. The model's own function, or that of transformers.
    like = torch.empty((), dtype=model.dtype, device=tokens.device).expand(batch, total, 1)
    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    return make(config, like, mask, None, positions), ()
