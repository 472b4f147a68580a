"""Share the sequences of a whole model: which of its parts, and by which patches."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.find import find_blocks, find_named, has_class, outermost, walk
from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel.around import watch_around
from lt_tiled.sequence_parallel.attention import AttentionMode, SharedInterface
from lt_tiled.sequence_parallel.causal import share_model
from lt_tiled.sequence_parallel.chain import Sharing, share_chain
from lt_tiled.sequence_parallel.heads import find_attention, tile_heads

_INTERFACE = SharedInterface()
Chain = tuple[Sharing, nn.Module | None, list[tuple[str, nn.Module]]]
"""How a model is shared; the module that calls its blocks, unless they are named; and the modules of its region."""


def find_chains(model: nn.Module, policy: SequenceParallel, group: dist.ProcessGroup | None) -> list[Chain]:
    """Return the parts of a model that share its sequences.

    Raises:
        NothingFoundError: If there are no blocks.
        ValueError: If a target matches nothing, or a model cannot be shared.
    """
    everything = [("", model), *walk(model)]
    pretrained = outermost((path, m) for path, m in everything if has_class(m, ("PreTrainedModel",)))
    inside = {id(part) for _, m in pretrained for part in m.modules()}

    def sharing(path: str, module: nn.Module) -> Sharing:
        owner = f"{path} ({type(module).__name__})" if path else type(module).__name__
        return Sharing(owner, policy, group, None if id(module) in inside else AttentionMode())

    if policy.targets != "auto":
        named = find_named(model, policy.targets, "SequenceParallel")
        return [(sharing(path, m), None, [(path, m)]) for path, m in named]
    if not pretrained:
        blocks = _blocks_of("", model)
        around = dict(everything).get(".".join(blocks[0][0].split(".")[:-2]), model)
        return [(sharing("", model), around, blocks)]
    for _, m in pretrained:
        _refuse_unsupported(m)
    return [(sharing(path, m), m, _blocks_of(path, m)) for path, m in pretrained]


_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""The layers of transformers that mix tokens in attention alone, as configurations name them."""
_INSTEAD_OF_EAGER = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
"""Attentions that are replaced in a region, and what transformers says where a model supports them."""


def _refuse_unsupported(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model of transformers whose sequences cannot be shared."""
    config: Any = model.config
    text, kind = config.get_text_config(), type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{kind} has an encoder and a decoder, and sequence parallelism supports one of them alone: use a model"
            " with one, or sequence_parallel=1."
        )
    if others := set(getattr(text, "layer_types", None) or ()) - _KINDS:
        raise ValueError(
            f"{kind} has layers of the kinds {sorted(others)}, which pass on a state from token to token that sequence"
            " parallelism does not exchange: use a model with attention layers alone, or sequence_parallel=1."
        )
    if text._attn_implementation == "eager":
        found = [name for name, flag in _INSTEAD_OF_EAGER.items() if getattr(model, flag, False)]
        remedy = f"load it with attn_implementation={' or '.join(map(repr, found))}" if found else "use another model"
        raise ValueError(
            f"{kind} uses eager attention, or no attention, which sequence parallelism does not support: {remedy}, or"
            " sequence_parallel=1."
        )


def _blocks_of(path: str, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model in their order, with full paths."""
    decoder: Any = getattr(model, "get_decoder", None)  # of a vision-language model
    inner: nn.Module = model if decoder is None else decoder()
    names = {m: name for name, m in [("", model), *walk(model)]}
    blocks = find_blocks(inner) or find_blocks(model)  # a decoder may be a head
    parents = {name.rpartition(".")[0] for name, _ in blocks}
    if not blocks or len(parents) > 1:
        found = f"blocks in {', '.join(sorted(parents))}" if blocks else "no blocks"
        raise NothingFoundError(
            f"SequenceParallel found {found} in {type(model).__name__}, and needs one list of blocks: name the modules"
            " to share in SequenceParallel(targets=...)."
        )
    for _, m in blocks:
        _refuse_mixing(names[m], m)
    return [(f"{path}.{names[m]}".lstrip("."), m) for _, m in blocks]


def _refuse_mixing(path: str, block: nn.Module) -> None:
    """Raise ``ValueError`` if a layer of torch in a block mixes tokens, whatever its weights are now."""
    for name, layer in walk(block):
        mixes = isinstance(layer, nn.RNNBase | nn.modules.batchnorm._BatchNorm) or (
            isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and max(layer.kernel_size) > 1
        )
        if mixes:
            raise ValueError(
                f"{path}.{name} ({type(layer).__name__}) mixes tokens outside of attention, of which sequence"
                " parallelism has a part on each rank: use a model without it, or sequence_parallel=1."
            )


def share(chains: list[Chain], undo: ExitStack) -> None:
    """Share what :func:`find_chains` found, until ``undo`` is closed."""
    for sharing, around, modules in chains:
        if sharing.policy.head_tiles > 1:
            tile_heads(find_attention(modules, sharing.policy.head_tiles), undo)
        share_chain(sharing, modules, undo)
        if sharing.mode is None:
            _INTERFACE.wrap(undo)
        if around is not None:
            (watch_around if sharing.mode else share_model)(sharing, around, undo)
