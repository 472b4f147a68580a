"""The self-check of sequence parallelism: a first batch, whole on each rank and shared, must give the same.

What each block gives and the model returns is compared without dropout. A batch of more than ``TOKENS`` tokens is cut
to these, or to more than the lengths that the configuration names, such as windows, each of which is checked once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.modules.find import set_rates_to_zero
from lt_tiled.modules.patch import turned_off
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.recompute.mode import Buffers, PlainSavedTensors, RandomState, random_state_kept, rounds_products
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.groups import check_same_batch, group_mean, name_of
from lt_tiled.sequence_parallel.ulysses import Door, UlyssesState, held

TOKENS = 2**11
"""A sequence of at most so many tokens is checked whole."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the norm of a difference, relative to the norm: models of float64 may compute a part in float32."""
TF32 = 1e-2  # for float32, where its products may be rounded to TF32, or other parts to 16 bits
COARSE = 0.1  # for 16-bit dtypes
_RANDOM = ("dropout", "drop_prob", "drop_path", "noise", "jitter")  # in names of probabilities and sizes
_REMEDY = "Use sdpa, flash or flex attention, pass position_ids, or name modules in SequenceParallel(targets=...)."
Found = defaultdict[tuple[str, str], list[Tensor]]
"""What calls gave for the rank's own tokens, by the name of the block and what a message calls a difference."""


@dataclass
class Check:
    """One comparison of a model with itself."""

    door: Door
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    whole: bool = True
    """Whether the model runs whole now, and not shared."""
    found: Found = field(default_factory=lambda: Found(list))

    def run(self, call: Call, forward: Callable[..., Any], whole: bool) -> Found:
        """Run a call; return what blocks noted, and its floating-point outputs: with labels the loss alone."""
        self.whole = whole
        self.found = Found(list)
        leaves = pytree.tree_leaves(call.run(forward))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if call.arguments.get("labels") is not None:
            outputs = outputs[:1]
        self.found[self.door.owner, "another output"] = outputs
        return self.found

    def note(self, name: str, what: str, tensor: Tensor, state: UlyssesState | None) -> None:
        """Keep a tensor ``[B, S, ...]`` of a block, or with a state ``[B, length, ...]``."""
        if state is None:
            state = self.door.state(tensor.shape[1])
            tensor = state.own(tensor)
        self.found[name, what].append(tensor[:, : state.count])


checking: ContextVar[Check | None] = ContextVar("checking", default=None)
"""The comparison that runs now."""


def run_block(name: str, call: Call, inner: Callable[..., Any], state: UlyssesState | None) -> Any:
    """Run a block on all tokens, or with a state on the rank's own. A self-check notes what it gives."""
    check = checking.get()
    module = call.module
    if state is not None:
        call = call.cut(name, state.total, state.own)
    if check is None or call.tokens is None:
        return call.run(inner)
    # 1. The hidden states, and two gradients of the input. One is for the hidden states with reversed channels: for
    # themselves it would be zero behind a norm. The other is for zeros: that of a loss that the block attaches, which
    # the ranks average. Each has a run of its own, because engines free weights after a backward pass.
    graph = check.gradients and call.tokens.is_floating_point()
    ranks = 1
    length = call.tokens.shape[1]
    if state is not None:
        ranks = state.group.size()
        length = state.length
    with torch.set_grad_enabled(graph), turned_off(module, BlockPatch), _as_it_was(module, module.training):
        for what, factor, divisor in (("another gradient of its input", 1, 1), ("another loss attached", 0, ranks)):
            x = call.tokens.detach().clone().requires_grad_(graph)
            with PlainSavedTensors():  # a checkpoint around it counts what is saved
                output = call.with_tokens(x).run(inner)
            hidden = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
            if hidden.shape[:2] != (x.shape[0], length):  # refused where it is shared, or [4, B, S, H] of Gemma 3n
                return output
            check.note(name, "another output", hidden.detach(), state)
            if graph and hidden.requires_grad:
                direction = factor * hidden.detach().flip(-1)
                if state is not None:
                    direction[:, state.count :] = 0
                gradient = torch.autograd.grad(hidden, x, direction, materialize_grads=True)[0]
                check.note(name, what, gradient / divisor, state)
        # 2. Losses that the block left in attributes, which the ranks average.
        for part in module.modules():
            for value in vars(part).values():
                if isinstance(value, Tensor) and value.grad_fn is not None and value.numel() == 1:
                    loss = group_mean(value.detach().reshape(()), name_of(check.door.group))
                    check.found[name, "another loss in an attribute"].append(loss)
    return output


def check_once(door: Door, call: Call, forward: Callable[..., Any]) -> None:
    """Compare a call with itself as ``forward`` shares it. All ranks raise ``ValueError`` if one finds a difference."""
    training = call.module.training
    total = 0 if call.tokens is None else call.tokens.shape[1]
    below = [length for length in door.lengths if length < total]
    if not door.policy.self_check or len(below) <= door.checked.get(training, -1):
        return
    check_same_batch(door.owner, door.group, call.arguments)
    # 1. As many tokens as that takes, the same ones on all ranks: dropout in front of the module makes others on each.
    most = max(TOKENS, 2 * max(below, default=0))
    if most < total:
        call = call.shortened(door.owner, total, most)
    if total:
        tokens = call.tokens.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(tokens, group=door.group, group_src=0)
        call = call.with_tokens(tokens)
    # 2. In the mode of the call, and if random numbers are drawn in it, in evaluation mode.
    if not _compared(door, call, forward, training, most < total):
        _compared(door, call, forward, False, most < total)
    if total == 0 or total >= 4 * door.policy.size:  # a few tokens may be alike
        door.checked[training] = len(below)


def _compared(door: Door, call: Call, forward: Callable[..., Any], training: bool, is_cut: bool) -> bool:
    """Compare in one mode, and return whether that was possible: in training no random numbers may be drawn."""
    device = next(call.module.parameters()).device if call.tokens is None else call.tokens.device
    check = Check(door)
    before = RandomState.now(device)
    with held(checking, check), torch.no_grad(), random_state_kept(device), _as_it_was(call.module, training):
        try:
            whole = check.run(call, forward, whole=True)
            if training and not before.same_as(RandomState.now(device)):
                return False
            shared = check.run(call, forward, whole=False)
            problem = _problem(call.module, door.policy.size, whole, shared)
        except Exception as error:
            known = isinstance(error, ValueError | torch.OutOfMemoryError | dist.DistError)
            if known or (check.whole and not is_cut):
                raise
            raise ValueError(
                f"{door.owner} cannot run on a part of its tokens ({error}). Pass blocks what they read as arguments."
                f" {_REMEDY}"
            ) from error
        problems = [""] * door.policy.size
        dist.all_gather_object(problems, problem, group=door.group)
        for problem in filter(None, problems):  # each rank has seen its own tokens
            raise ValueError(problem)
    return True


def _problem(module: nn.Module, size: int, whole: Found, shared: Found) -> str:
    """Return a sentence about the first tensors that differ by more than rounding."""
    narrow = any(weight.is_floating_point() and weight.dtype.itemsize < 4 for weight in module.parameters())
    for (name, what), tensors in whole.items():
        for true, found in zip(tensors, shared[name, what], strict=False):
            rounds = narrow or rounds_products() or torch.is_autocast_enabled(true.device.type)
            tolerance = TOLERANCE.get(true.dtype, COARSE)
            if true.dtype == torch.float32 and rounds:
                tolerance = TF32
            same = (found == true) | (found.isnan() & true.isnan())  # infinite ones too
            difference = torch.where(same, 0.0, (found - true).double())
            error = float(difference.norm() / true.double().nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-30))
            if not error <= tolerance:
                return (
                    f"{name} has {what} when {size} ranks share the sequence (relative difference {error:.1e} of"
                    f" {tolerance:.0e}): it, or code before it, mixes tokens outside of attention, or counts them."
                    f" {_REMEDY}"
                )
    return ""


@contextmanager
def _as_it_was(module: nn.Module, training: bool) -> Iterator[None]:
    """Run a module in a mode, without dropout. Undo changes of buffers and attributes, not those in containers."""
    parts = list(module.modules())
    attributes = [dict(vars(part)) for part in parts]
    try:
        for part in parts:
            part.training = part.training and training
            part._forward_hooks = part._forward_hooks.copy()  # transformers adds some in a model's first call
        set_rates_to_zero(module, _RANDOM)
        with Buffers(parts).in_place():
            yield
    finally:
        for part, before in zip(parts, attributes, strict=True):
            vars(part).clear()
            vars(part).update(before)
