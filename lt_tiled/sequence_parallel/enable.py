"""Share the sequences of a model: which of its modules take part, and what cannot be shared."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.find import find_named, has_class, has_forward, outermost, walk, walk_all
from lt_tiled.modules.patch import patch_until
from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel.attention import AttentionMode, calls_attention, find_sinks, share_interface
from lt_tiled.sequence_parallel.blocks import BlockScope, SharedBlock
from lt_tiled.sequence_parallel.causal import DecoderPatch, SharedModel
from lt_tiled.sequence_parallel.door import Door
from lt_tiled.sequence_parallel.groups import check_heads
from lt_tiled.sequence_parallel.positions import RotaryPatch, find_rotary
from lt_tiled.sequence_parallel.self_check import lengths_of
from lt_tiled.sequence_parallel.states import STATE_LAYERS, MixerPatch, find_mixers, replace_functions

_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""The layers of transformers that mix tokens in attention alone, as configurations name them."""
_INSTEAD_OF_EAGER = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
"""Attentions that are replaced, and what transformers says where a model supports them."""


def enable(door: Door, undo: ExitStack) -> None:
    """Share the sequences of a part of a model until ``undo`` is closed."""
    caller, blocks = door.caller, door.blocks
    replace_functions(blocks, undo)
    for path, module in find_mixers(blocks):
        patch_until(undo, module, MixerPatch(path, module))
    for path, block in blocks:
        patch_until(undo, block, SharedBlock(door, path, block is blocks[0][1], block is blocks[-1][1]))
        patch_until(undo, block, BlockScope(door, path))
    if not door.hand_written:
        share_interface([block for _, block in blocks], undo)
    roots = [block for _, block in blocks] if caller is None else [caller]
    rotary = dict.fromkeys(part for root in roots for part in find_rotary(root))
    for part in rotary:
        patch_until(undo, part, RotaryPatch())
    if caller is not None:
        decoder: Any = getattr(caller, "base_model", None)  # the model itself if it has no head
        if decoder is not None and decoder is not caller:
            patch_until(undo, decoder, DecoderPatch())
        patch_until(undo, caller, SharedModel(door, bool(rotary)))


def reach_attention(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], undo: ExitStack) -> set[nn.Module]:
    """Let blocks find attention that they keep, until ``undo`` is closed.

    Return those that call torch's attention themselves, as hand-written ones do: they need a mode that finds it.
    """
    inside = _of_transformers(model)
    known = [block for _, block in blocks if block in inside]
    if known:
        share_interface(known, undo)
    return {block for _, block in blocks if block not in inside or calls_attention(block)}


def _of_transformers(model: nn.Module) -> set[nn.Module]:
    """Return the models of transformers in a model, and the modules in them."""
    return {part for _, m in walk_all(model) if has_class(m, ("PreTrainedModel",)) for part in m.modules()}


def find_doors(model: nn.Module, policy: SequenceParallel, group: dist.ProcessGroup | None) -> list[Door]:
    """Return the parts of a model that share its sequences.

    These are the modules that the policy names, or every model of transformers, or the blocks of a hand-written model.
    """
    everything = list(walk_all(model))
    pretrained = outermost((path, m) for path, m in everything if has_class(m, ("PreTrainedModel",)))
    inside = _of_transformers(model)

    def door(path: str, module: nn.Module, caller: nn.Module | None, blocks: list[tuple[str, nn.Module]]) -> Door:
        owner = f"{path} ({type(module).__name__})" if path else type(module).__name__
        if module not in inside:
            return Door(owner, policy, group, caller, blocks, AttentionMode(), hand_written=True)
        config: Any = next(m.config for _, m in pretrained if module in set(m.modules()))
        mode = AttentionMode() if calls_attention(module) else None
        return Door(owner, policy, group, caller, blocks, mode, False, lengths_of(config.get_text_config()))

    if policy.targets != "auto":
        named = find_named(model, policy.targets, "SequenceParallel")
        return [door(path, m, None, [(path, m)]) for path, m in named]
    if pretrained:
        for _, m in pretrained:
            _refuse_unsupported(m, policy.size)
        return [door(path, m, m, _blocks_of(path, m, _decoder_of(m))) for path, m in pretrained]
    blocks = _blocks_of("", model, model)
    modules, above = dict(everything), blocks[0][0].split(".")[:-2]
    while not has_forward(modules[".".join(above)]):  # a ModuleDict around the list of blocks
        above.pop()
    return [door("", model, modules[".".join(above)], blocks)]


def _refuse_unsupported(model: nn.Module, size: int) -> None:
    """Raise ``ValueError`` for a model of transformers whose sequences cannot be shared."""
    config: Any = model.config
    text, kind = config.get_text_config(), type(model).__name__
    if config.is_encoder_decoder:
        raise ValueError(
            f"{kind} is an encoder-decoder, whose two sequences are not shared: use a decoder-only model, or"
            " sequence_parallel=1 with activation_checkpointing='cpu'."
        )
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if dropped := getattr(config, name, 0):
            raise ValueError(
                f"{kind} leaves out blocks at random ({name}={dropped}), and each rank that shares a sequence would"
                " leave out others: set it to 0 in its configuration."
            )
    kinds = set(getattr(text, "layer_types", None) or ()) - {"mlp", "moe"}
    mixers = bool(find_mixers([("", model)]))
    if others := kinds - _KINDS - (STATE_LAYERS if mixers else set()):
        raise ValueError(
            f"{kind} has layers of the kinds {' and '.join(sorted(others))}, which sequence parallelism does not"
            " support: use a model with attention to all tokens, Mamba 2, delta rules or short convolutions, or"
            " sequence_parallel=1."
        )
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int) and (not kinds or kinds - STATE_LAYERS):
        check_heads(kind, size, heads)
    if text._attn_implementation == "eager" and kinds != {"linear_attention"} and not find_sinks([model]):
        found = [name for name, flag in _INSTEAD_OF_EAGER.items() if getattr(model, flag, False)]
        remedy = f"load it with attn_implementation={' or '.join(map(repr, found))}" if found else "use another model"
        raise ValueError(
            f"{kind} uses eager attention, or no attention, which sequence parallelism does not support: {remedy}, or"
            " sequence_parallel=1."
        )


def _decoder_of(model: Any) -> nn.Module:
    """Return the decoder of a vision-language model, and of others the model."""
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder


def _blocks_of(path: str, model: nn.Module, inner: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a part of a model in their order, with full paths."""
    names = {m: name for name, m in walk_all(model)}
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
    mixers = {part for _, mixer in find_mixers([(path, block)]) for part in mixer.modules()}
    for name, layer in walk(block):
        if layer in mixers:
            continue
        convolution = isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and max(layer.kernel_size) > 1
        if convolution or isinstance(layer, nn.RNNBase | nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{path}.{name} ({type(layer).__name__}) mixes tokens outside of attention, of which sequence"
                " parallelism has a part on each rank: use a model without it, or sequence_parallel=1."
            )
