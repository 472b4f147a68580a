"""The self-check of sequence parallelism: a first batch, whole on each rank and shared, must give the same.

The model runs whole on each rank, and then shared. The output of each of its blocks, the gradient of the block's input,
and what the model returns are compared. Both happen in training mode, if the model is in it, with the probability of
dropout set to 0; a model that draws random numbers all the same is compared in evaluation mode.

A batch of more than ``TOKENS`` tokens is cut to these, or to more than the windows and other lengths that the
configuration names. A longer batch is compared again once it is beyond another one of these lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.modules.patch import turned_off
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.recompute.mode import RandomState, random_state_kept, rounds_products
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.groups import check_same_batch, group_mean, name_of
from lt_tiled.sequence_parallel.ulysses import Door, UlyssesState, held

TOKENS = 2**11
"""A sequence of at most so many tokens is checked whole."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the norm of a difference, relative to the norm: models of float64 may compute a part in float32."""
TF32 = 1e-2
"""For float32, where its products may be rounded to TF32, with errors of 1e-3, or autocast may round to 16 bits."""
COARSE = 0.1
"""For 16-bit dtypes."""
_RANDOM = ("dropout", "drop_prob", "drop_path", "noise", "jitter")
"""Parts of the names of attributes with the probability or size of what is random."""
_REMEDY = "Use sdpa, flash or flex attention, pass position_ids, or name modules in SequenceParallel(targets=...)."


@dataclass
class Check:
    """One comparison of a model with itself."""

    door: Door
    module: nn.Module
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    whole: bool = True
    """Whether the model runs whole now, and not shared."""
    seen: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    """What the calls of each block gave in the whole run, for the rank's own tokens."""
    problem: str = ""
    """The first thing that differs."""

    def compare(self, name: str, what: str, found: Tensor, true: Tensor) -> None:
        """Note a problem if two tensors differ by more than rounding."""
        same = (found == true) | (found.isnan() & true.isnan())  # infinite ones too
        difference = torch.where(same, 0.0, (found - true).double())
        error = float(difference.norm() / true.double().nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-30))
        tolerance = TOLERANCE.get(true.dtype, COARSE)
        # A float32 tensor of a module of 16 bits was upcast.
        narrow = any(weight.is_floating_point() and weight.dtype.itemsize < 4 for weight in self.module.parameters())
        if true.dtype == torch.float32 and (narrow or rounds_products() or torch.is_autocast_enabled(true.device.type)):
            tolerance = TF32
        if not (error <= tolerance or self.problem):
            self.problem = (
                f"{name} has {what} when {self.door.policy.size} ranks share the sequence (relative difference"
                f" {error:.1e}). It, or the code in front of it, mixes tokens outside of attention, or computes"
                f" positions or a scale from the number of its tokens. {_REMEDY}"
            )


checking: ContextVar[Check | None] = ContextVar("checking", default=None)
"""The comparison that runs now."""


def run_block(name: str, call: Call, inner: Callable[..., Any], state: UlyssesState | None) -> Any:
    """Run a block on all tokens, or with a state on the rank's own. In a self-check, compare these two runs."""
    check = checking.get()
    module = call.module
    if check is None or call.tokens is None:
        return call.run(inner)
    # 1. Both runs begin with the same statistics, as those of a norm.
    graph = check.gradients and call.tokens.is_floating_point()
    with torch.set_grad_enabled(graph), turned_off(module, BlockPatch), _as_it_was(module, module.training):
        x = call.tokens.detach().clone().requires_grad_(graph)
        output = call.with_tokens(x).run(inner)
        hidden = _hidden_states(output)
        if hidden.shape[:2] != x.shape[:2]:  # which is refused where the block is shared
            return output
        # 2. The hidden states, and a gradient of the input. Their own gradient would be zero behind a norm: they are
        # its direction in another order of channels.
        found = {"another output": hidden.detach()}
        if graph and hidden.requires_grad:
            direction = hidden.detach().flip(-1)
            if state is not None:
                direction[:, state.count :] = 0
            gradient = torch.autograd.grad(hidden, x, direction, materialize_grads=True)[0]
            found["another gradient of its input"] = gradient
            # The gradient of a loss that the block attaches, of another run, because engines free weights behind the
            # first one. Ranks average theirs, so each has that of all of them.
            again = _hidden_states(call.with_tokens(x).run(inner))
            attached = torch.autograd.grad(again, x, torch.zeros_like(again), materialize_grads=True)[0]
            found["another loss attached"] = attached if state is None else attached / state.size
        losses = _losses_in(module)
    # 3. For the rank's own tokens. Losses in attributes are averaged by the ranks.
    shared = state or check.door.state(x.shape[1])
    for what, tensor in found.items():
        if state is None:
            tensor = shared.own(tensor)
        found[what] = tensor[:, : shared.count].clone()
    if losses and isinstance(shared.group, dist.ProcessGroup):
        found["another loss in an attribute"] = group_mean(torch.stack(losses), name_of(shared.group))
    seen = check.seen.setdefault(name, [])
    if check.whole:
        seen.append(found)
    elif seen:
        for what, true in seen.pop(0).items():
            if found[what].shape == true.shape:  # hidden states may begin with another dimension
                check.compare(name, what, found[what], true)
    return output


def _hidden_states(output: Any) -> Tensor:
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def _losses_in(module: nn.Module) -> list[Tensor]:
    """Return the scalars with a graph that a call left in attributes."""
    found: list[Tensor] = []
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and value.grad_fn is not None and value.numel() == 1:
                found.append(value.detach().reshape(()))
    return found


def check_once(door: Door, passed: dict[bool, int], call: Call, forward: Callable[..., Any]) -> None:
    """Compare a call with itself, once for each mode and each length above which the model may compute otherwise.

    ``passed`` has the number of these lengths that checked sequences were beyond, in training and in evaluation mode.
    All ranks raise ``ValueError`` if there is a difference on any. ``forward`` shares the call.
    """
    training = call.module.training
    total = 0 if call.tokens is None else call.tokens.shape[1]
    below = [length for length in door.lengths if length < total]
    if not door.policy.self_check or len(below) <= passed.get(training, -1):
        return
    check_same_batch(door.owner, door.group, call.arguments)
    # 1. As many tokens as that takes.
    most = max(TOKENS, 2 * max(below, default=0))
    is_cut = most < total
    if is_cut:
        call = call.shortened(door.owner, total, most)
    # 2. The same ones, which dropout in front of the module makes others on each rank.
    if total:
        tokens = call.tokens.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(tokens, group=door.group, group_src=0)
        call = call.with_tokens(tokens)
    # 3. In the mode of the call, and if random numbers are drawn in it, in evaluation mode.
    if not _compared(door, call, forward, training, is_cut):
        _compared(door, call, forward, False, is_cut)
    if total == 0 or total >= 4 * door.policy.size:  # a few tokens may be alike
        passed[training] = len(below)


def _compared(door: Door, call: Call, forward: Callable[..., Any], training: bool, is_cut: bool) -> bool:
    """Compare in one mode, and return whether that was possible: in training no random numbers may be drawn."""
    device = next(call.module.parameters()).device if call.tokens is None else call.tokens.device
    check = Check(door, call.module)
    try:
        with held(checking, check), torch.no_grad(), random_state_kept(device), _as_it_was(call.module, training):
            before = RandomState.now(device)
            whole = _results(call, forward)
            if training and not before.same_as(RandomState.now(device)):
                return False
            check.whole = False
            for found, true in zip(_results(call, forward), whole, strict=True):
                check.compare(door.owner, "another output", found, true)
            problems = [""] * door.policy.size
            dist.all_gather_object(problems, check.problem, group=door.group)  # each rank has seen its own tokens
            for problem in filter(None, problems):
                raise ValueError(problem)
    except Exception as error:
        if check.whole and is_cut:
            inform(f"{door.owner} is not checked, because it cannot run on a part of its tokens: {error}")
            return True
        refused = isinstance(error, ValueError) and str(error).startswith((door.owner, "sequence_parallel="))
        if check.whole or refused or isinstance(error, torch.OutOfMemoryError | dist.DistError):
            raise
        raise ValueError(
            f"{door.owner} runs on all tokens, and cannot run on those of one rank ({error}). Pass blocks what they"
            f" read as arguments. {_REMEDY}"
        ) from error
    return True


def _results(call: Call, forward: Callable[..., Any]) -> list[Tensor]:
    """Run a call, and return its floating-point tensors; with labels the first one, which is the loss."""
    leaves = pytree.tree_leaves(call.run(forward))
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return found if call.arguments.get("labels") is None else found[:1]


@contextmanager
def _as_it_was(module: nn.Module, training: bool) -> Iterator[None]:
    """Run a module in a mode, without dropout. Undo changes of buffers and attributes, training modes among them.

    What containers in attributes hold stays.
    """
    parts = list(module.modules())
    attributes = [(part, dict(vars(part)), dict(part._buffers), set(part._forward_hooks)) for part in parts]
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if not buffer.requires_grad]
    try:
        for part in parts:
            part.training = part.training and training
            for name, value in list(vars(part).items()):
                random = any(of in name for of in _RANDOM) or (name == "p" and "Dropout" in type(part).__name__)
                if random and isinstance(value, float):
                    vars(part)[name] = 0.0
        yield
    finally:
        for part, before, buffers, hooks in attributes:
            vars(part).clear()
            vars(part).update(before)
            part._buffers.clear()
            part._buffers.update(buffers)
            # transformers sets hooks in a model's first call, and notes in an attribute that it has.
            for key in part._forward_hooks.keys() - hooks:
                del part._forward_hooks[key]
        for buffer, value in values:
            buffer.data.copy_(value)
