"""The self-check of sequence parallelism: a first batch, whole on each rank and shared, must give the same.

The model runs whole, and each of its blocks is compared there: its output and the gradient of its input, whole and
shared by the ranks. Then the model runs shared, and what its first block is given, such as rotary tables, and what
comes out is compared with the whole run. Both happen in training mode, if the model is in it, with the probability of
dropout set to 0; a model that draws random numbers all the same is compared in evaluation mode.

A batch of more than ``TOKENS`` tokens is cut to these, or to more than the windows and other lengths that the
configuration names. A longer batch is compared again once it is beyond another one of these lengths.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.modules.patch import turned_off
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.recompute.buffers import ModuleState
from lt_tiled.recompute.mode import RandomState, random_state_kept
from lt_tiled.sequence_parallel.agreement import check_same_batch
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.door import Door
from lt_tiled.sequence_parallel.ulysses import entered

TOKENS = 2**11
"""A sequence of at most so many tokens is checked whole."""
MOST_TOKENS = 2**13
"""No length above half of this one is checked with more tokens."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the norm of a difference, relative to the norm: models of float64 may compute a part in float32."""
TF32 = 1e-2
"""For float32, where its products may be rounded to TF32, with errors of 1e-3, or autocast may round to 16 bits."""
COARSE = 0.1
"""For 16-bit dtypes."""
_RANDOM = ("drop", "noise", "jitter")
"""Parts of the names of attributes with the probability or size of what is random."""
_LENGTHS = "window|chunk|original_max_position|floor_scale|seq_length|seq_len|logn|log_n"
"""Parts of the names of lengths above which tokens see, or positions are, something else."""
_REMEDY = (
    "Use sdpa, flash or flex attention, pass position_ids, or name other modules in SequenceParallel(targets=...)."
)
Run = Callable[[Call, bool], list[Tensor]]
"""Calls a module, shared or not, and returns what to compare, for all tokens."""


class Check:
    """One comparison of a model with itself."""

    def __init__(self, door: Door, module: nn.Module, total: int) -> None:
        self.door, self.module, self.gradients = door, module, torch.is_grad_enabled()
        self.total = total
        """The sequence length, or 0 if it is not known."""
        self.whole = True
        """Whether the model runs whole now, and not shared."""
        self.problems: list[str] = []
        self.given: dict[bool, list[tuple[str, Tensor]]] = {True: [], False: []}
        """What blocks were given besides hidden states, for the rank's own tokens: in the whole run, and shared."""

    def note(self, call: Call) -> None:
        """Note what a block is given for the rank's own tokens, such as rotary tables."""
        for name, value in call.arguments.items():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf is not call.tokens:
                    self.given[self.whole].append((name, leaf))

    def block(self, name: str, call: Call, inner: Callable[..., Any]) -> Any:
        """Run a block on all tokens, and compare it with the same block shared by the ranks."""
        tokens = call.tokens
        if tokens is None or tokens.shape[1] != (self.total or tokens.shape[1]):
            return call.run(inner)
        # 1. For all tokens.
        output, true, gradient = self._run(call, inner, None)
        # 2. For the rank's own.
        state = self.door.state_of_blocks(call, tokens)
        local = call.changed(name, state.total, state.own(tokens), state.own)
        self.note(local)
        with on_own_tokens(name), entered(state):
            _, found, own_gradient = self._run(local, inner, state.count)
            true = state.own(true)[:, : state.count]
        self.compare(name, "another output", found, true)
        if gradient is not None and own_gradient is not None:
            mine = state.own(gradient)[:, : state.count]
            self.compare(name, "another gradient of its input", own_gradient[:, : state.count], mine)
        return output

    def _run(self, call: Call, inner: Callable[..., Any], count: int | None) -> tuple[Any, Tensor, Tensor | None]:
        """Run a block, and return its output, the first hidden states of it, and a gradient of its input.

        Their own gradient would be zero behind a norm: they are its direction in another order of channels.
        """
        assert call.tokens is not None
        graph = self.gradients and call.tokens.is_floating_point()
        gradients = torch.enable_grad() if graph else nullcontext()
        # Both runs begin with the same statistics, as those of a norm.
        with gradients, turned_off(call.module, BlockPatch), _as_it_was(call.module, call.module.training):
            x = call.tokens.detach().clone().requires_grad_(graph)
            output = call.with_tokens(x).run(inner)
            hidden = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))[:, :count]
            if not graph or not hidden.requires_grad:
                return output, hidden.detach(), None
            gradient = torch.autograd.grad(hidden, x, hidden.detach().flip(-1), allow_unused=True)[0]
        return output, hidden.detach(), gradient

    def compare(self, name: str, what: str, found: Tensor, true: Tensor) -> None:
        """Note a problem if two tensors differ by more than rounding."""
        if error := _excess(found, true, self.module):
            self.problems.append(
                f"{name} has {what} when {self.door.size} ranks share the sequence (relative difference {error:.1e})."
                " It mixes tokens outside of attention, or computes positions or a scale from the number of its"
                f" tokens. {_REMEDY}"
            )

    def verdict(self) -> None:
        """Raise ``ValueError`` on all ranks if there is a problem on any: each of them has seen its own tokens."""
        found: list[list[str]] = [[] for _ in range(self.door.size)]
        dist.all_gather_object(found, self.problems[:1], group=self.door.group)
        for problem in chain.from_iterable(found):
            raise ValueError(problem)


_check: ContextVar[Check | None] = ContextVar("check", default=None)


def checking() -> Check | None:
    """Return the comparison that runs now."""
    return _check.get()


class Checked:
    """What a part of a model passed the self-check with."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.passed: dict[bool, int] = {}
        """How many of the lengths that the configuration names are below the longest sequence that was checked, in
        training mode and in evaluation mode."""

    def run(self, call: Call, run: Run, total: int) -> None:
        """Compare a call with itself, once for each mode and each length above which the model may compute otherwise.

        All ranks raise ``ValueError`` if there is a difference on any. ``total`` is 0 if the length is not known.
        """
        training, door = call.module.training, self.door
        below = [length for length in door.lengths if length < total]
        if not door.policy.self_check or len(below) <= self.passed.get(training, -1):
            return
        check_same_batch(door.owner, door.group, call.arguments)
        tokens = min(total, max([TOKENS, *(2 * length for length in below if 2 * length <= MOST_TOKENS)]))
        short = call.shortened(door.owner, total, tokens) if tokens < total else call
        if short.tokens is not None and short.tokens.is_floating_point():
            # Dropout in front of the module differs between ranks.
            same = short.tokens.detach().clone()
            dist.broadcast(same, group=door.group, group_src=0)
            short = short.with_tokens(same)
        # In the mode of the call, and if random numbers are drawn in it, in evaluation mode.
        if not self._compared(short, run, training, tokens, tokens < total):
            self._compared(short, run, False, tokens, tokens < total)
        self.passed[training] = len(below)

    def _compared(self, call: Call, run: Run, training: bool, total: int, is_cut: bool) -> bool:
        """Compare in one mode, and return whether that was possible: in training no random numbers may be drawn."""
        owner, device = self.door.owner, torch.device("cpu") if call.tokens is None else call.tokens.device
        check = Check(self.door, call.module, total)
        token = _check.set(check)
        try:
            with torch.no_grad(), random_state_kept(device), _as_it_was(call.module, training):
                before = RandomState.now(device)
                try:
                    whole = run(call, False)
                except (RuntimeError, IndexError, TypeError) as error:
                    if not is_cut:
                        raise
                    inform(f"{owner} is not checked, because it cannot run on a part of its tokens: {error}")
                    return True
                if training and not before.same_as(RandomState.now(device)):
                    return False
                check.verdict()
                check.whole = False
                with on_own_tokens(owner):
                    outputs = run(call, True)
                for (name, true), (_, found) in zip(check.given[True], check.given[False], strict=False):
                    if found.shape == true.shape:
                        check.compare(owner, f"other {name} in its blocks", found, true)
                for found, true in zip(outputs, whole, strict=True):
                    check.compare(owner, "another output", found, true)
                check.verdict()
        finally:
            _check.reset(token)
        return True


@contextmanager
def on_own_tokens(name: str) -> Iterator[None]:
    """Say what it means that something which runs on all tokens fails on those of one rank."""
    try:
        yield
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        refused = isinstance(error, ValueError) and str(frame.f_globals.get("__name__")).startswith("lt_tiled.")
        if refused or isinstance(error, torch.OutOfMemoryError | dist.DistError):
            raise
        raise ValueError(
            f"{name} runs on all tokens, and cannot run on those of one rank ({error}). Pass blocks what they read as"
            f" arguments. {_REMEDY}"
        ) from error


@contextmanager
def _as_it_was(module: nn.Module, training: bool) -> Iterator[None]:
    """Run a module in a mode, without dropout. Undo changes of buffers and attributes, training modes among them."""
    state = ModuleState(list(module.modules()))
    try:
        for part in module.modules():
            part.training = part.training and training
            for name, value in list(vars(part).items()):
                random = any(of in name for of in _RANDOM) or (name == "p" and "Dropout" in type(part).__name__)
                if random and isinstance(value, float):
                    vars(part)[name] = 0.0
        yield
    finally:
        state.put_back()


def _excess(found: Tensor, true: Tensor, module: nn.Module) -> float:
    """Return the relative difference of what a module computes if it is above the tolerance, and 0 otherwise."""
    same = (found == true) | (found.isnan() & true.isnan())  # infinite ones too
    difference = torch.where(same, 0.0, (found - true).double())
    error = float(difference.norm() / true.double().nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-30))
    # A float32 tensor of a module of 16 bits was upcast.
    narrow = any(weight.is_floating_point() and weight.dtype.itemsize < 4 for weight in module.parameters())
    rounded = narrow or rounds_products() or torch.is_autocast_enabled(true.device.type)
    tolerance = TF32 if rounded and true.dtype == torch.float32 else TOLERANCE.get(true.dtype, COARSE)
    return 0.0 if error <= tolerance else error


def rounds_products() -> bool:
    """Whether products of float32 may be rounded to TF32 or bfloat16."""
    # torch.get_float32_matmul_precision() raises where these attributes were set.
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    return any(backend.fp32_precision in ("tf32", "bf16") for backend in backends)


def lengths_of(config: Any) -> list[int]:
    """Return the numbers of tokens above which a model of transformers computes otherwise."""
    fields = config.to_dict()
    found = {int(number) for number in re.findall(rf"'\w*(?:{_LENGTHS})\w*': (\d+)", str(fields))}
    rope = [fields.get(name) for name in ("rope_parameters", "rope_scaling")]
    if "dynamic" in str(rope) and (longest := fields.get("max_position_embeddings")):
        found.add(longest)
    return sorted(found)
