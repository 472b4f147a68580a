"""The self-check: a few tokens through the module whole and in tiles must give the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.layout import OutputAssembly, TokenShape
from lt_tiled.tiling.recompute import random_state_kept

CHECK_TOKENS = 8

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference that rounding may cause when a matrix product has another shape (float32: TF32 included)."""


def check_token_wise(call: TiledCall) -> None:
    """Compare the module's outputs for :data:`CHECK_TOKENS` tokens of this call, at once and in two unequal tiles.

    Raises:
        ValueError: If an output differs, or is not per token.
    """
    few = min(CHECK_TOKENS, call.shape.tokens)
    picked = torch.linspace(0, call.shape.tokens - 1, few, device=call.device).long()
    sample = call.cut(call.flat(call.inputs), picked)
    shape = TokenShape(torch.Size(call.shape.tile_lead(few)))
    with torch.no_grad(), random_state_kept(call.device), _dropout_off(call.module):
        whole = call.run_tile(sample)
        layout = call.layout_of(whole, sample, few)
        assembly = OutputAssembly(layout, shape, call.mark.name)
        for bounds in ((0, few // 2 + 1), (few // 2 + 1, few)):
            assembly.add(call.run_tile(call.cut(sample, slice(*bounds))), bounds)
    for name, kind, a, b in zip(layout.names, layout.kinds, pytree.tree_leaves(whole), assembly.finish(), strict=True):
        if kind in ("tokens", "flat"):
            _compare(a, b, few, name, call.mark.name)


def _compare(whole: Tensor, tiled: Tensor, tokens: int, name: str, module: str) -> None:
    difference = float((whole.double() - tiled.double()).norm() / whole.double().norm().clamp_min(1e-30))
    bound = _TOLERANCE.get(whole.dtype, 0.0)
    if not difference <= bound and bool(whole.isfinite().all()):
        raise ValueError(
            f"{module} is not token-wise: its output {name + ' ' if name else ''}for {tokens} tokens differs by {difference:.1e} between"
            f" one call and two tiles (relative; rounding explains {bound:.0e}). Leave it out of targets, or name the part of it that"
            " works token by token; self_check=False only if you know why it differs."
        )


@contextmanager
def _dropout_off(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without calling ``eval()``, which modules override."""
    modes = {m: m.training for m in module.modules()}
    try:
        for m in modes:
            m.training = False
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
