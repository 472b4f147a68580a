"""Share the sequences of a model: which of its modules take part, and their patches."""

from __future__ import annotations

import inspect
import re
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.backends import mha

from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.cache import leave_out_caches
from lt_tiled.modules.find import find_named, has_class, has_forward, outermost, walk
from lt_tiled.modules.patch import patch_until
from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel.attention import calls_attention, replace, sdpa, share_interface
from lt_tiled.sequence_parallel.doors import DecoderPatch, SharedBlock, SharedModel
from lt_tiled.sequence_parallel.self_check import TOKENS
from lt_tiled.sequence_parallel.states import replace_functions
from lt_tiled.sequence_parallel.ulysses import Door

_PRETRAINED = ("PreTrainedModel",)
_LENGTHS = "window|chunk|original_max_position|floor_scale|seq_length|seq_len|logn|log_n"


def enable(door: Door, undo: ExitStack) -> None:
    """Share the sequences of a part of a model until ``undo`` is closed."""
    caller = door.caller
    # 1. The blocks, and what mixes tokens inside of them.
    modules = [block for _, block in door.blocks]
    for path, block in door.blocks:
        patch_until(undo, block, SharedBlock(door, f"{door.owner}: {path}", block is modules[0], block is modules[-1]))
    parts = modules if caller is None else [caller]
    replace_functions(parts, undo)
    if not door.hand_written:
        share_interface(undo)
    if door.finds_attention:
        replace(vars(F), "scaled_dot_product_attention", sdpa, undo)
        # A kernel for evaluation, in which nn.MultiheadAttention and layers of it do not call that function.
        replace(vars(mha), "get_fastpath_enabled", lambda *_: False, undo)
    # 2. The model that calls them.
    if caller is not None:
        leave_out_caches(caller, undo)
        decoder: Any = getattr(caller, "base_model", None)  # the model itself if it has no head
        if decoder is not None and decoder is not caller:
            patch_until(undo, decoder, DecoderPatch())
        patch_until(undo, caller, SharedModel(door, has_rotary(caller)))


def _of_transformers(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the modules in the models of transformers in a model, each with the configuration of its model."""
    found: dict[nn.Module, Any] = {}
    for _, module in walk(model):
        if has_class(module, _PRETRAINED):
            for part in module.modules():
                found.setdefault(part, module.config)
    return found


def find_doors(model: nn.Module, policy: SequenceParallel, group: dist.ProcessGroup) -> list[Door]:
    """Return the parts that share sequences: the policy's modules, or models of transformers, or blocks of others."""
    everything = dict(walk(model))
    configs = _of_transformers(model)

    def door(path: str, module: nn.Module, caller: nn.Module | None, blocks: list[tuple[str, nn.Module]]) -> Door:
        owner = f"{path} ({type(module).__name__})" if path else type(module).__name__
        if module not in configs:
            return Door(owner, policy, group, caller, blocks)
        config = configs[module].get_text_config()
        if getattr(config, "attn_temperature_tuning", False):
            raise ValueError(
                f"{owner} scales attention by positions that it counts from its own tokens (attn_temperature_tuning):"
                " use sequence_parallel=1 with activation_checkpointing='cpu'."
            )
        return Door(owner, policy, group, caller, blocks, calls_attention(module), False, lengths_of(config))

    if policy.targets != "auto":
        named = find_named(model, policy.targets, "SequenceParallel")
        return [door(path, module, None, [(path, module)]) for path, module in named]
    pretrained = outermost(pair for pair in everything.items() if has_class(pair[1], _PRETRAINED))
    if pretrained:
        return [door(path, module, module, _blocks_of(path, module)) for path, module in pretrained]
    blocks = _blocks_of("", model)
    above = blocks[0][0].split(".")[:-2]
    while not has_forward(everything[".".join(above)]):  # a ModuleDict around the list of blocks
        above.pop()
    return [door("", model, everything[".".join(above)], blocks)]


def _blocks_of(path: str, model: Any) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a part of a model in their order, with full paths."""
    kind = type(model).__name__
    if has_class(model, _PRETRAINED) and model.config.is_encoder_decoder:
        raise ValueError(
            f"{kind} is an encoder-decoder, whose two sequences are not shared: use a decoder-only model, or"
            " sequence_parallel=1 with activation_checkpointing='cpu'."
        )
    # The decoder of a vision-language model, and of others the model. It may be a head.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    blocks = find_blocks(decoder) or find_blocks(model)
    parents = sorted({name.rpartition(".")[0] for name, _ in blocks})
    if len(parents) != 1:
        raise NothingFoundError(
            f"SequenceParallel found blocks in {', '.join(parents) or 'no module'} of {kind}, and needs one list of"
            " blocks: name the modules to share in SequenceParallel(targets=...)."
        )
    names = {module: name for name, module in walk(model)}
    return [(f"{path}.{names[block]}".lstrip("."), block) for _, block in blocks]


def has_rotary(model: nn.Module) -> bool:
    """Whether a module in a model computes something from ``position_ids``, and has no weights."""
    for part in model.modules():
        takes_positions = "position_ids" in inspect.signature(type(part).forward).parameters
        if takes_positions and next(part.parameters(), None) is None:
            return True
    return False


def lengths_of(config: Any) -> list[int]:
    """Return the numbers of tokens, by their names, above which a model computes otherwise, if they can be checked."""
    fields = config.to_dict()
    found = {int(number) for number in re.findall(rf"'\w*(?:{_LENGTHS})\w*': (\d+)", str(fields))}
    if "'dynamic'" in str(fields):  # rotary positions
        found.add(fields.get("max_position_embeddings") or 0)
    return sorted(length for length in found if length <= 2 * TOKENS)
