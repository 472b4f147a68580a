"""The decoder of a causal model, between its head's arguments and its router logits, which are those of all tokens.

The head is given the padding of the whole call, and the router logits of all tokens, from which it computes the loss
that balances experts. The decoder is given the masks that were made for all tokens, and computes the rank's own.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.modules.patch import Order, Patch, remove_patches, set_patch
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.region import Region, current


class DecoderPatch(Patch):
    """On the decoder of a causal model of transformers."""

    order = Order.POSITIONS

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the decoder the masks of the rank's own tokens, and its head the router logits of all."""
        region, call = current(), Call(module, args, kwargs)
        if region is None or not region.from_tokens:
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
    gathered = []
    for tensor, part in zip(tensors, parts, strict=True):
        gathered.append(part.flatten(0, 1) if tensor.dim() == 2 else part)
    everything = iter(gathered)
    return pytree.tree_unflatten([next(everything) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


def share_decoder(model: nn.Module, undo: ExitStack) -> None:
    """Let the decoder of a causal model compute the rank's own tokens, until ``undo`` is closed."""
    decoder: Any = getattr(model, "base_model", None)  # the model itself if it has no head
    if decoder is not None and decoder is not model:
        set_patch(decoder, DecoderPatch())
        undo.callback(remove_patches, decoder, DecoderPatch)
