"""The self-check: a few tokens through the module whole and in tiles must give the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.errors import NotPositionWiseError
from lt_tiled.tiling.graph import check_kept, kept_tensors
from lt_tiled.tiling.layout import OutputAssembly, TokenShape
from lt_tiled.tiling.recompute import RandomState, SavedCounter, random_state_kept
from lt_tiled.tiling.state import Work
from lt_tiled.tiling.tiled_call import TiledCall

CHECK_TOKENS = 8

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference that rounding may cause when a matrix product has another shape (float32: TF32 included)."""


def check_first(call: TiledCall, inputs: Sequence[Tensor]) -> None:
    """Check a call's work, unless an earlier call of the same patch in the same mode was checked: losses are kept in
    training alone.

    Raises:
        NotPositionWiseError: See :func:`check_position_wise`.
    """
    mode = (call.work.key, call.work.training, torch.is_grad_enabled())
    checked = call.patch.learned.checked
    if call.patch.tiling.self_check and mode not in checked and check_position_wise(call, inputs):
        checked.add(mode)


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor]) -> bool:
    """Compare the module's outputs for :data:`CHECK_TOKENS` tokens of this call, at once and in two unequal tiles.

    Returns:
        Whether that tells anything: outputs that are all zero, as before the first step of a zero-initialised
        projection, do not.

    Raises:
        NotPositionWiseError: If an output differs, or is not per token, or if the module changes its arguments in place.
    """
    few = min(CHECK_TOKENS, call.shape.tokens)
    picked = torch.arange(few, device=call.device) * (call.shape.tokens - 1) // max(few - 1, 1)
    sample = call.cut(call.flat(inputs), picked)
    shape = TokenShape(torch.Size(call.shape.tile_lead(few)))
    kept = kept_tensors(call.work)
    # In training mode, where statistics are taken; and with a graph, if one is asked for, where auxiliary losses are.
    with random_state_kept(call.device), _arguments_unchanged(call, sample), _buffers_unchanged(call), SavedCounter():
        start = RandomState.now(call.device)
        whole = call.run_tile(sample)
        dropout = not start.same_as(RandomState.now(call.device))
    check_kept(whole, call.work, kept, call.patch.name)
    with torch.no_grad(), random_state_kept(call.device), _dropout_off(call.work) if dropout else nullcontext():
        whole = call.run_tile(sample) if dropout else pytree.tree_map_only(Tensor, torch.Tensor.detach, whole)
        layout = call.layout_of(whole, inputs, few)
        assembly = OutputAssembly(layout, shape, call.patch.name)
        for bounds in ((0, few // 2 + 1), (few // 2 + 1, few)):
            assembly.add(call.run_tile(call.cut(sample, slice(*bounds))), bounds)
    per_token = [
        (name, a, b)
        for name, kind, a, b in zip(layout.names, layout.kinds, pytree.tree_leaves(whole), assembly.leaves, strict=True)
        if kind in ("tokens", "flat")
    ]
    for name, a, b in per_token:
        _compare(a, b, few, name, call.patch.name)
    return any(bool(a.any()) for _, a, _ in per_token)


def _compare(whole: Tensor, tiled: Tensor, tokens: int, name: str, module: str) -> None:
    wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
    difference = float((whole.to(wide) - tiled.to(wide)).norm() / whole.to(wide).norm().clamp_min(1e-30))
    bound = _TOLERANCE.get(whole.dtype, 0.0)
    if not difference <= bound and bool(whole.isfinite().all()):
        raise NotPositionWiseError(
            f"{module} is not position-wise: its output {name + ' ' if name else ''}for {tokens} tokens differs by {difference:.1e} between"
            f" one call and two tiles (relative; rounding explains {bound:.0e}). Leave it out of targets, or name the part of it that"
            " works position by position; self_check=False only if you know why it differs."
        )


@contextmanager
def _arguments_unchanged(call: TiledCall, sample: list[Tensor]) -> Iterator[None]:
    """Refuse a module that changes its arguments: the caller would see one tile's change, or one for each tile."""
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
            f"{call.patch.name} changes its {'arguments' if changed else 'input'} in place, which tiles cannot do for the caller. Make the"
            " change out of place, or leave the module out of targets."
        )


@contextmanager
def _buffers_unchanged(call: TiledCall) -> Iterator[None]:
    """Refuse a module that counts or averages in a buffer: it would do so once for each tile, and again in the
    recompute.
    """
    buffers = [
        (part, n, b)
        for part in call.work.parts()
        for n, b in part._buffers.items()
        if b is not None and not b.is_inference()
    ]
    before = [(b._version, b.clone() if b.nbytes <= _SMALL else None) for _, _, b in buffers]
    yield
    for (part, name, buffer), (version, copied) in zip(buffers, before, strict=True):
        now = part._buffers[name]
        if now is not buffer or buffer._version != version:
            part._buffers[name] = buffer if copied is None else buffer.copy_(copied)
            raise NotPositionWiseError(
                f"{call.patch.name} changes its buffer {type(part).__name__}.{name} in its forward, which would be changed once for each"
                " tile, and again when the tiles are recomputed. Leave it out of targets, or name the part of it that works position by position."
            )


_SMALL = 2**20
"""Larger buffers are weights."""


@contextmanager
def _dropout_off(work: Work) -> Iterator[None]:
    """Evaluation mode without calling ``eval()``, which modules override."""
    modes = {m: m.training for m in work.parts()}
    try:
        for m in modes:
            m.training = False
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode


class RecordedError(NotPositionWiseError):
    """transformers records an output inside the module."""


def refuse_recorded(call: TiledCall) -> None:
    """Refuse a call inside of which transformers records outputs, such as router logits.

    Its hooks (transformers/utils/output_capturing.py) append what a module returns to the collector of the model's
    current call, with ``output_router_logits=True`` for one: an entry for each tile, without a graph.

    Raises:
        RecordedError: With the names of what is recorded.
    """
    capturing = sys.modules.get(_CAPTURING)
    collector = None if capturing is None else capturing._active_collector.get()
    inside = (part for part in call.work.parts() if part not in call.work.modules)
    if collector and any(h.__module__ == _CAPTURING for part in inside for h in part._forward_hooks.values()):
        raise RecordedError(
            f"{call.patch.name}: transformers records {', '.join(sorted(collector))} inside it, which tiles would change."
        )


_CAPTURING = "transformers.utils.output_capturing"
