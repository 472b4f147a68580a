"""The self-check: a few tokens through the module, at once and in tiles, must give the same result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.layout import OutputAssembly, TokenShape
from lt_tiled.tiling.recompute import RandomState, SavedCounter, random_state_kept, training_set
from lt_tiled.tiling.tiled_call import TiledCall

CHECK_TOKENS = 8

SMALL_BUFFER = 2**20
"""Larger buffers, in bytes, are weights."""
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference that rounding may cause when a matrix product has another shape (float32: TF32 included)."""


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor]) -> None:
    """Compare the outputs for :data:`CHECK_TOKENS` tokens of this call, at once and in two unequal tiles.

    That is done once for each mode, or again if it showed nothing: zeros, as of a zero-initialized projection, do not.

    Raises:
        NotPositionWiseError: If an output differs or is not per token, or the module changes arguments or buffers.
    """
    few = min(CHECK_TOKENS, call.shape.tokens)
    picked = torch.arange(few, device=call.device) * (call.shape.tokens - 1) // max(few - 1, 1)
    sample = call.cut(call.flat(inputs), picked)
    shape, kept = TokenShape(torch.Size(call.shape.tile_lead(few))), kept_tensors(call.work)
    # In the module's own mode and with a graph, if one is wanted: statistics and auxiliary losses are computed there.
    with random_state_kept(call.device), _arguments_unchanged(call, sample), _buffers_unchanged(call), SavedCounter():
        start = RandomState.now(call.device)
        whole = call.run_tile(sample)
        dropout = not start.same_as(RandomState.now(call.device))
    check_closed(whole, None, call.work, kept, call.patch.name)
    evaluation = training_set([(part, False) for part in call.work.parts()]) if dropout else nullcontext()
    with torch.no_grad(), random_state_kept(call.device), evaluation:
        whole = call.run_tile(sample) if dropout else pytree.tree_map_only(Tensor, torch.Tensor.detach, whole)
        layout = call.layout_of(whole, inputs, few)
        assembly = OutputAssembly(layout, shape, call.patch.name)
        for bounds in ((0, few // 2 + 1), (few // 2 + 1, few)):
            assembly.add(call.run_tile(call.cut(sample, slice(*bounds))), bounds)
    leaves = zip(layout.names, layout.kinds, pytree.tree_leaves(whole), assembly.leaves, strict=True)
    per_token = [(name, a, b) for name, kind, a, b in leaves if kind in ("tokens", "flat")]
    for name, a, b in per_token:
        _compare(a, b, few, name, call.patch.name)
    if any(bool(a.any()) for _, a, _ in per_token):
        call.patch.learned.checked.add(call.mode)


def _compare(whole: Tensor, tiled: Tensor, tokens: int, name: str, module: str) -> None:
    wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
    difference = float((whole.to(wide) - tiled.to(wide)).norm() / whole.to(wide).norm().clamp_min(1e-30))
    bound = _TOLERANCE.get(whole.dtype, 0.0)
    if not difference <= bound and bool(whole.isfinite().all()):
        raise NotPositionWiseError(
            f"{module} is not position-wise: its output {name + ' ' if name else ''}for {tokens} tokens differs by"
            f" {difference:.1e} between one call and two tiles (relative; rounding explains {bound:.0e}). {REMEDY}"
            " Pass self_check=False only if you know why it differs."
        )


@contextmanager
def _arguments_unchanged(call: TiledCall, sample: list[Tensor]) -> Iterator[None]:
    """Refuse a module that changes its arguments: the caller would see the change of one tile, or of each."""
    containers: list[Any] = [leaf for leaf in call.arguments.others if isinstance(leaf, list | dict | set)]
    before = [copy(container) for container in containers]
    sample = [t for t in sample if not t.is_inference()]  # those have no version
    versions = [t._version for t in sample]
    yield
    changed = [i for i, (now, then) in enumerate(zip(containers, before, strict=True)) if now != then]
    for i in changed:
        containers[i].clear()
        (containers[i].extend if isinstance(containers[i], list) else containers[i].update)(before[i])
    if changed or versions != [t._version for t in sample]:
        raise NotPositionWiseError(
            f"{call.patch.name} changes its {'arguments' if changed else 'input'} in place, which tiles cannot do for"
            f" the caller. Make the change out of place. {REMEDY}"
        )


@contextmanager
def _buffers_unchanged(call: TiledCall) -> Iterator[None]:
    """Refuse a module that counts or averages in a buffer: each tile, and its recompute, would do so once."""
    named = ((part, name, b) for part in call.work.parts() for name, b in part._buffers.items())
    buffers = [(part, name, b) for part, name, b in named if b is not None and not b.is_inference()]
    before = [(b._version, b.clone() if b.nbytes <= SMALL_BUFFER else None) for _, _, b in buffers]
    yield
    for (part, name, buffer), (version, copied) in zip(buffers, before, strict=True):
        if part._buffers[name] is not buffer or buffer._version != version:
            part._buffers[name] = buffer if copied is None else buffer.copy_(copied)
            raise NotPositionWiseError(
                f"{call.patch.name} changes its buffer {type(part).__name__}.{name} in its forward, which would be"
                f" changed once for each tile, and again in the recompute. {REMEDY}"
            )
