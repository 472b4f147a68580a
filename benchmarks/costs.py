"""What tiling costs, exactly: ``python -m benchmarks --only costs``.

One training step of a Llama with activation checkpointing, with its MLPs tiled by each package: floating point
operations, how often each token goes through an MLP, bytes alive at the peak and between forward and backward. These
figures are the same in every run on a CPU.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers import Peer, tile_with
from benchmarks.sheet import Cell, Sheet
from lt_tiled import ActivationCheckpointing, Tiling, prepare
from lt_tiled.planner.ledger import Ledger
from tests.meters import LiveBytes


@dataclass(frozen=True)
class Size:
    """Of the model and its input."""

    tokens: int = 2048
    hidden: int = 256
    intermediate: int = 1024
    layers: int = 4
    shards: int = 16


def llama(size: Size, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Llama with a small vocabulary and random weights."""
    heads = size.hidden // 64
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=512,
    )
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(device, dtype)


@contextmanager
def with_checkpointing(model: nn.Module, name: str, shards: int) -> Iterator[nn.Module]:
    """Copy the model with activation checkpointing, and with the MLPs tiled by a package or ``"untiled"``."""
    model = copy.deepcopy(model)
    tiling = Tiling(num_shards=shards) if name == "lt_tiled" else None
    if tiling is None:
        for layer in model.model.layers:  # type: ignore[union-attr]
            tile_with(name, layer.mlp, shards)
    with prepare(model, tiling=tiling, activation_checkpointing=ActivationCheckpointing()):
        yield model


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def costs(everyone: list[Peer], size: Size = Size()) -> list[Sheet]:
    """One row for each peer at hand."""
    title = (
        f"Llama with activation checkpointing, {size.layers} layers, {size.tokens} tokens, MLPs in {size.shards} tiles"
    )
    sheet = Sheet(
        "costs",
        title,
        ["", "FLOPs", "of the MLP", "forward passes of the MLP", "peak live bytes", "after the forward pass"],
    )
    sheet.notes = [
        "Relative to the untiled step, except for forward passes (per token); exact, on the CPU. FLOPs are those of"
        " the model with attention and head, and of one MLP under activation checkpointing. Bytes are those that the"
        " step allocates, without weights; ✓ if no other needs 2 % less."
    ]
    model = llama(size, torch.device("cpu"))
    ids = torch.randint(512, (1, size.tokens), generator=torch.Generator().manual_seed(0))
    found: dict[str, tuple[int, ...] | str] = {}
    for name in ["untiled", *(peer.name for peer in everyone if peer.tile is not None)]:
        try:
            with with_checkpointing(model, name, size.shards) as tiled:
                found[name] = *measured(tiled, ids), mlp_flops(model, name, size)
        except Exception as error:  # a peer may raise anything
            found[name] = type(error).__name__
    base = found["untiled"]
    assert not isinstance(base, str), base
    least = min(figures[2] for name, figures in found.items() if not isinstance(figures, str))
    for name, figures in found.items():
        if isinstance(figures, str):
            sheet.add(name, Cell(f"raises {figures}", False), "", "", "", "")
            continue
        flops, peak, saved, alone = (figures[i] / base[i] for i in (0, 2, 3, 4))
        lean = None if name == "untiled" else figures[2] < 1.02 * least
        sheet.add(
            name,
            Cell(f"{flops:.2f}", flops < 1.005),
            Cell(f"{alone:.2f}", alone < 1.005),
            f"{figures[1] / size.tokens / size.layers:g}",
            Cell(f"{peak:.2f}", lean),
            f"{saved:.2f}",
        )
    return [sheet]


def mlp_flops(model: nn.Module, name: str, size: Size) -> int:
    """Of the first MLP, under torch's checkpoint, forward and backward."""
    mlp: nn.Module = copy.deepcopy(model.model.layers[0].mlp)  # type: ignore[index, union-attr]
    tile_with(name, mlp, size.shards)
    x = torch.randn(1, size.tokens, size.hidden, requires_grad=True)
    checkpoint(mlp, x, use_reentrant=False).sum().backward()
    with Ledger() as counted:
        checkpoint(mlp, x, use_reentrant=False).sum().backward()
    return int(counted.flops)


def measured(model: nn.Module, ids: Tensor) -> tuple[int, int, int, int]:
    """Return FLOPs, tokens through MLPs, peak bytes and bytes after the forward pass of a step after a warm-up."""

    def clear() -> None:  # each run allocates its own gradients; adding to old ones in place seems to need less
        model.zero_grad(set_to_none=True)

    loss_of(model, ids).backward()
    clear()
    through = itertools.count()  # no data, which the recompute would restore

    def count(module: nn.Module, args: Any, out: Tensor) -> None:
        for _ in range(out.numel() // out.shape[-1]):
            next(through)

    handles = [layer.mlp.up_proj.register_forward_hook(count) for layer in model.model.layers]  # type: ignore[union-attr]
    with Ledger() as counted:
        loss_of(model, ids).backward()
    for handle in handles:
        handle.remove()
    clear()
    with LiveBytes() as meter:
        loss = loss_of(model, ids)
        saved = meter.now
        loss.backward()
    return counted.flops, next(through), meter.peak, saved
