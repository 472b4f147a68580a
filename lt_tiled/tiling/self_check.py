"""The self-check: a few tokens of a module's first call run at once and in two tiles, and must give the same.

Compared are outputs, gradients of arguments and weights, and how many random numbers are drawn. What the module changes
in a forward pass is refused as well, because tiles would change it several times.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, pairwise
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.tiling.autograd import backward
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.layout import TokenShape, describe_output
from lt_tiled.tiling.observe import History, Observation
from lt_tiled.tiling.places import ATOMS, Attributes
from lt_tiled.tiling.recompute import (
    TOLERANCE,
    PlainSavedTensors,
    RandomState,
    hidden_from_modes,
    random_state_kept,
    version_of,
)

CHECK_TOKENS = 32
_GRADIENT_TOLERANCE = 5e-2
"""Of gradients of any dtype; that of outputs is ``TOLERANCE`` in ``tiling/recompute.py``.

A module may compute in 16 bits inside, and weights sum what is rounded.
"""
_FLOOR = 1e-3
"""Smaller values, relative to the inputs or the outputs' gradients, are compared as if they had this size: they may be
rounding."""


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor]) -> None:
    """Check on a few tokens of a call that it may run in tiles, and remember it if they show anything.

    One call of each kind is checked. A call of a kind that failed is, too, so it fails with its own name.

    Raises:
        NotPositionWiseError: If it may not, or fails on a few tokens.
    """
    owner, learned = call.patch.owner, call.patch.learned
    kind = _kind(call, inputs)
    if owner is not None and kind in owner.passed:
        learned.checked.add(call.mode)
        return
    before = _observed(call)
    try:
        # An activation checkpoint around it would count what its graphs save, and keep what it computes.
        with hidden_from_modes(inputs[0]), PlainSavedTensors(), random_state_kept(call.device):
            check = _Check(call, inputs)
            check.run_whole(before)
            # One tile cannot differ from the untiled call, but runs again in the backward pass.
            if len(call.bounds) > 1:
                check.compare_tiles()
    except BaseException as error:
        before.undo()  # it may run untiled from here
        ours = isinstance(error, NotPositionWiseError | torch.OutOfMemoryError | MemoryError)
        if ours or not isinstance(error, Exception):
            raise
        raise NotPositionWiseError(
            f"{call.patch.name} fails when it is given a few of its tokens: {error}. Arguments that broadcast over"
            f" tokens must be expanded to all of them before the call. {REMEDY}"
        ) from error
    if check.shown or len(call.bounds) == 1:
        learned.checked.add(call.mode)
        if owner is not None:
            owner.passed.add(kind)


def _kind(call: TiledCall, inputs: Sequence[Tensor]) -> Hashable:
    """Return what is equal for calls of modules of the same classes, shapes, dtypes and attributes."""
    facts: list[Any] = [call.mode]
    for part in call.work.parts:
        facts.append(type(part))
        for name, value in sorted(Attributes("", part.__dict__).read().items()):
            # Numbers, names and containers of them by value; functions, settings and tensors by identity.
            plain = all(type(leaf) in ATOMS for leaf in pytree.tree_leaves(value))
            facts.append((name, repr(value) if plain else id(value)))
        for name, buffer in part._buffers.items():
            facts.append((name, id(buffer)))
        for weight in part._parameters.values():
            if weight is not None:
                facts.append((weight.shape, weight.dtype, weight.requires_grad))
    for tensor, per_token in zip(inputs, call.per_token, strict=True):
        shape = tensor.shape[len(call.shape.lead) :] if per_token else tensor.shape
        facts.append((shape, tensor.dtype))
    return tuple(facts)


def _observed(call: TiledCall) -> Observation:
    """Return what the modules and arguments of a call hold now."""
    arguments = {str(index): value for index, value in enumerate(call.arguments.others)}
    return Observation(call.patch.name, call.work.modules, REMEDY, History(), arguments, shared=False)


class _Uncompiled(TiledCall):
    compiles = False


class _Check:
    """A few tokens of a call, in the module's own layout."""

    shown = False
    """Whether anything that was compared is not zero."""

    def __init__(self, call: TiledCall, inputs: Sequence[Tensor]) -> None:
        self.call, self.name = call, call.patch.name
        self.shape, picked = _pick(call.shape.lead, call.device)
        self.tokens = self.shape.tokens
        self.first = max(1, self.tokens * 3 // 4)
        """The tokens of the first tile: so unequal that sums over tokens differ beyond rounding."""
        self.draws = _EqualDraws(RandomState.now(call.device))
        self.inputs: list[Tensor] = []
        cut = zip(call.cut(call.flat(inputs), picked), call.per_token, call.wants_grad, strict=True)
        for tensor, per_token, wants_grad in cut:
            tensor = self.shape.unflatten(tensor) if per_token else tensor
            self.inputs.append(tensor.requires_grad_(wants_grad))
        self.whole = self._in_tiles(0, self.tokens)
        self.output: Any = None

    def _in_tiles(self, *ends: int) -> TiledCall:
        """Return the call of these tokens in tiles that end there."""
        call = self.call
        return _Uncompiled(call.work, call.patch, self.inputs, call.arguments, self.shape, list(pairwise(ends)))

    def run_whole(self, before: Observation) -> None:
        """Run all tokens with a graph, then fewer of them, and refuse what the module changes.

        Args:
            before: What modules and arguments held before.

        Raises:
            NotPositionWiseError: If it changes something, or keeps a graph in an attribute.
        """
        work, kept = self.call.work, kept_tensors(self.call.work)
        given = [tensor.clone() for tensor in self.inputs]
        versions = [version_of(tensor) for tensor in given]
        with self.draws:
            self.output = self.whole.run_views(given)
        drawn, self.draws.count = self.draws.count, 0
        describe_output(self.output, self.shape, self.tokens, self.name)
        check_closed(self.output, None if self.call.differentiable else (), work, kept, self.name)
        # The first run may fill caches, so attributes are compared from here on.
        after = _observed(self.call)
        few = self.whole.cut(self.whole.flat(self.inputs), slice(0, self.first))
        with self.draws:
            self.whole.run_tile([tensor * 0.5 if tensor.is_floating_point() else tensor for tensor in few])
        for change, _ in chain(before.changes(attributes=False), after.changes()):
            self._refuse(
                f"changes {change} in its forward, which would be changed once for each tile, and again in the"
                " recompute. Return it as an output instead."
            )
        if versions != [version_of(tensor) for tensor in given]:
            self._refuse("changes its input in place, which tiles cannot do. Make the change out of place.")
        if len(self.call.bounds) > 1 and self.draws.count * self.tokens != drawn * self.first:
            self._refuse(
                "draws one random mask for several tokens, such as locked dropout or stochastic depth, and each tile"
                " would draw another."
            )

    def compare_tiles(self) -> None:
        """Compare outputs and gradients of all tokens at once with those of two tiles, but for rounding.

        Raises:
            NotPositionWiseError: If they differ.
        """
        tiled = self._in_tiles(0, self.first, self.tokens)
        with self.draws:
            outputs, trace = tiled.forward(self.inputs, learn=False)
            _, trace_of_whole = self.whole.forward(self.inputs, learn=False)
        given: list[Tensor | None] = [None for _ in outputs]
        """A random gradient for each output."""
        for index, whole in enumerate(pytree.tree_leaves(self.output)):
            found = outputs[index]
            self._compare(whole.detach(), found, f"output {index}", self._output_bound(whole))
            given[index] = torch.randn_like(found) if found.is_floating_point() else None
        if not tiled.differentiable:
            return
        with self.draws:
            gradients = backward(self.whole, trace_of_whole, self.inputs, given)
            of_tiles = backward(tiled, trace, self.inputs, given)
        noise = _GRADIENT_TOLERANCE * _FLOOR * sum(_norm(g) for g in given if g is not None)
        for name, whole, found in zip(self._targets(), gradients, of_tiles, strict=True):
            if whole is not None and found is not None:
                self._compare(whole.to_dense(), found.to_dense(), f"gradient of {name}", (_GRADIENT_TOLERANCE, noise))

    def _targets(self) -> list[str]:
        """Return the names of the arguments and weights that get gradients."""
        names = [f"argument {index}" for index, wants in enumerate(self.call.wants_grad) if wants]
        for weight in self.call.weights:
            owner, name = weight.places[0]
            names.append(f"{type(owner).__name__}.{name}")
        return names

    def _output_bound(self, output: Tensor) -> tuple[float, float]:
        """Return what rounding may explain of an output: relative to it, and as a norm."""
        autocast, noise = self.call.autocast.dtype, 0.0
        bound = max(TOLERANCE.get(output.dtype, 0.0), 0.0 if autocast is None else TOLERANCE.get(autocast, 0.0))
        for tensor, per_token in zip(self.inputs, self.call.per_token, strict=True):
            if per_token and tensor.is_floating_point():  # as of a sum over what a layer norm returns
                noise += min(bound * _FLOOR, 10 * torch.finfo(tensor.dtype).eps) * _norm(tensor)
        return bound, noise

    def _compare(self, whole: Tensor, tiled: Tensor, what: str, may_differ: tuple[float, float]) -> None:
        """Refuse a difference that rounding does not explain."""
        what = f"is not position-wise: its {what} for {self.tokens} tokens"
        unless = "Pass self_check=False only if you know why it differs."
        if whole.shape != tiled.shape:
            self._refuse(f"{what} has the shape {list(whole.shape)}, and {list(tiled.shape)} from tiles.")
        if whole.is_complex():
            whole, tiled = (torch.view_as_real(value.resolve_conj()) for value in (whole, tiled))
        finite = whole.isfinite()
        if not torch.equal(finite, tiled.isfinite()):
            self._refuse(f"{what} is finite elsewhere in tiles. {unless}")
        size = _norm(whole.masked_fill(~finite, 0))
        difference = _norm((whole - tiled).masked_fill(~finite, 0))
        self.shown = self.shown or size != 0
        bound, noise = may_differ
        if difference > max(bound * size, noise):
            self._refuse(
                f"{what} differs by {difference / max(size, 1e-30):.1e} in tiles (relative; rounding explains"
                f" {bound:.0e}). {unless}"
            )

    def _refuse(self, problem: str) -> None:
        raise NotPositionWiseError(f"{self.name} {problem} {REMEDY}")


def _norm(tensor: Tensor) -> float:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return float(tensor.detach().to(wide).norm())


class _EqualDraws(TorchDispatchMode):
    """Lets all tokens draw the same random numbers, as if no tiles were there, and counts them."""

    def __init__(self, start: RandomState) -> None:
        super().__init__()
        self._start, self.count = start, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        with self:
            composed = func.decompose(*args, **kwargs)  # inference mode does not take dropout apart
        if composed is not NotImplemented:
            return composed
        self._start.set()
        drawn = func(*args, **kwargs)
        self.count += (drawn if isinstance(drawn, Tensor) else drawn[0]).numel()
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(drawn[1])  # the backward pass scales both calls alike
        if isinstance(drawn, Tensor) and drawn.numel() and "randperm" not in func.name():
            number = drawn.is_floating_point() or drawn.dtype == torch.bool
            keeps = 1.0 if "bernoulli" in func.name() else 0.6  # in most masks
            drawn.fill_(keeps if number else int(drawn.flatten()[0]))
        return drawn


def _pick(lead: Sequence[int], device: torch.device) -> tuple[TokenShape, Tensor]:
    """Return the leading dimensions of a few tokens from all over ``lead``, and their indices among all tokens.

    Several entries of each dimension, where it has them: what mixes along a batch must also be seen.
    """
    several = {2: 5, 3: 3}.get(len(lead), 2)  # two would hide what moves entries by two; all of them are at most 64
    counts = [min(size, several) for size in lead]
    for index in reversed(range(len(lead))):
        counts[index] = min(lead[index], max(counts[index], ceil(CHECK_TOKENS * counts[index] / prod(counts))))
    picked = torch.zeros(1, dtype=torch.int64, device=device)
    for size, count in zip(lead, counts, strict=True):
        chosen = torch.arange(count, device=device) * (size - 1) // max(count - 1, 1)
        picked = (picked[:, None] * size + chosen).flatten()
    return TokenShape(torch.Size(counts)), picked
