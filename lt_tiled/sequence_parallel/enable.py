"""Share the sequences of a model: which of its modules take part, and their patches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.find import find_named, has_class, has_forward, outermost, walk_all
from lt_tiled.modules.patch import patch_until
from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel.attention import AttentionMode, calls_attention, share_interface
from lt_tiled.sequence_parallel.blocks import BlockScope, SharedBlock
from lt_tiled.sequence_parallel.causal import DecoderPatch, SharedModel
from lt_tiled.sequence_parallel.door import Door
from lt_tiled.sequence_parallel.positions import RotaryPatch, find_rotary
from lt_tiled.sequence_parallel.self_check import lengths_of
from lt_tiled.sequence_parallel.states import replace_functions


def enable(door: Door, undo: ExitStack) -> None:
    """Share the sequences of a part of a model until ``undo`` is closed."""
    caller, blocks = door.caller, door.blocks
    # 1. The blocks, and what mixes tokens inside of them.
    replace_functions(blocks, undo)
    for path, block in blocks:
        patch_until(undo, block, SharedBlock(door, path, block is blocks[0][1], block is blocks[-1][1]))
        patch_until(undo, block, BlockScope(door, path))
    if not door.hand_written:
        share_interface([block for _, block in blocks], undo)
    # 2. What computes positions for them.
    roots = [block for _, block in blocks] if caller is None else [caller]
    rotary = dict.fromkeys(part for root in roots for part in find_rotary(root))
    for part in rotary:
        patch_until(undo, part, RotaryPatch())
    # 3. The model that calls them.
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


def _of_transformers(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the modules in the models of transformers in a model, each with the configuration of its model."""
    found: dict[nn.Module, Any] = {}
    for _, module in walk_all(model):
        if _is_pretrained(module):
            for part in module.modules():
                found.setdefault(part, module.config)
    return found


def find_doors(model: nn.Module, policy: SequenceParallel, group: dist.ProcessGroup | None) -> list[Door]:
    """Return the parts of a model that share its sequences.

    These are the modules that the policy names, or every model of transformers, or the blocks of a hand-written model.
    """
    everything = dict(walk_all(model))
    configs = _of_transformers(model)

    def door(path: str, module: nn.Module, caller: nn.Module | None, blocks: list[tuple[str, nn.Module]]) -> Door:
        owner = f"{path} ({type(module).__name__})" if path else type(module).__name__
        if module not in configs:
            return Door(owner, policy, group, caller, blocks, AttentionMode(), hand_written=True)
        mode = AttentionMode() if calls_attention(module) else None
        return Door(owner, policy, group, caller, blocks, mode, False, lengths_of(configs[module].get_text_config()))

    if policy.targets != "auto":
        named = find_named(model, policy.targets, "SequenceParallel")
        return [door(path, module, None, [(path, module)]) for path, module in named]
    pretrained = outermost((path, module) for path, module in everything.items() if _is_pretrained(module))
    if pretrained:
        return [door(path, module, module, _blocks_of(path, module)) for path, module in pretrained]
    blocks = _blocks_of("", model)
    above = blocks[0][0].split(".")[:-2]
    while not has_forward(everything[".".join(above)]):  # a ModuleDict around the list of blocks
        above.pop()
    return [door("", model, everything[".".join(above)], blocks)]


def _is_pretrained(module: nn.Module) -> bool:
    return has_class(module, ("PreTrainedModel",))


def _blocks_of(path: str, model: Any) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a part of a model in their order, with full paths."""
    kind, names = type(model).__name__, {module: name for name, module in walk_all(model)}
    if _is_pretrained(model) and model.config.is_encoder_decoder:
        raise ValueError(
            f"{kind} is an encoder-decoder, whose two sequences are not shared: use a decoder-only model, or"
            " sequence_parallel=1 with activation_checkpointing='cpu'."
        )
    # The decoder of a vision-language model, and of others the model. It may be a head.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    blocks = find_blocks(decoder) or find_blocks(model)
    parents = {name.rpartition(".")[0] for name, _ in blocks}
    if not blocks or len(parents) > 1:
        found = f"blocks in {', '.join(sorted(parents))}" if blocks else "no blocks"
        raise NothingFoundError(
            f"SequenceParallel found {found} in {kind}, and needs one list of blocks: name the modules to share in"
            " SequenceParallel(targets=...)."
        )
    return [(f"{path}.{names[block]}".lstrip("."), block) for _, block in blocks]
