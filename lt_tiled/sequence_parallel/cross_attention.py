"""Attention to another sequence, as that of an encoder, whose tokens are all on each rank.

Its queries are those of the rank's own tokens, so it runs on them without an exchange. It is found by how it is called:
with the hidden states of the other sequence, under one of the names that transformers has for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import Order, Patch, patch_until
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.region import Region, current

_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
"""The arguments of attention modules for the hidden states of another sequence."""


class CrossAttentionPatch(Patch):
    """On a module in a block that may be given another sequence to attend to."""

    order = Order.POSITIONS

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region, call = current(), Call(module, args, kwargs)
        other = None
        for name in _OTHER_SEQUENCE if region is not None else ():
            other = call.arguments.get(name) if other is None else other
        if region is None or not isinstance(other, Tensor):
            return call.run(self.inner)
        before, region.other_tokens = region.other_tokens, other.shape[1]
        try:
            return call.run(self.inner)
        finally:
            region.other_tokens = before


def check_cross_attention(region: Region, query: Tensor, key: Tensor, mask: Any) -> None:
    """Raise ``ValueError`` unless queries ``[B, H, S/n, D]`` of a rank's own tokens attend to all of another sequence.

    The keys have the shape ``[B, K, T, D]``.
    """
    own, other = query.shape[2], key.shape[2]
    if (own, other) != (region.length, region.other_tokens):
        raise ValueError(
            f"{region.owner} attends from {own} to {other} tokens where it is given {region.other_tokens} of an encoder"
            f" and has {region.length} of its own: attention to both at once cannot be shared. Use a model with two"
            " attention modules, or sequence_parallel=1."
        )
    if mask is None or (isinstance(mask, Tensor) and (mask.dim() == 2 or mask.shape[-2] in (1, own))):
        return
    raise ValueError(
        f"{region.owner} was given a mask of an encoder of the kind {type(mask).__name__} and the shape"
        f" {list(mask.shape)}, of which sequence parallelism cannot take the {own} tokens of the rank: use sdpa, eager"
        " or flash attention, or leave out the mask."
    )


def share_cross_attention(blocks: Sequence[tuple[str, nn.Module]], undo: ExitStack) -> None:
    """Let modules in these blocks attend to another sequence, until ``undo`` is closed."""
    for _, block in blocks:
        for _, part in walk(block):
            if not set(_OTHER_SEQUENCE).isdisjoint(inspect.signature(type(part).forward).parameters):
                patch_until(undo, part, CrossAttentionPatch())
