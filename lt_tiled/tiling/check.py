"""The self-check: a few tokens of a module's first call run whole and in two tiles, and must give the same.

NOTE [What is checked]
Outputs: those of the tiles are computed without a graph, as in the forward pass. Gradients of inputs and of each
weight; with zero gradients of the outputs they must be zero, or the module attaches a loss of its own, which each tile
would attach again. How many random numbers a tile draws, because a mask that several tokens share would be another one
for each tile. And what the call changes or leaves behind (``effects.py``): its arguments, weights, buffers, attributes,
a tensor with a graph, and collectives, which ranks with other tiles would not match.

It runs in float64 where the module allows it and the copies of its weights take at most :data:`MOST_BYTES`, so that a
small error is not mistaken for rounding. Training and evaluation are checked each in its first call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError, TwoThreadsError
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.cut import Assembly, Bounds, Tokens
from lt_tiled.tiling.effects import PLAIN_TENSORS, HeldState, Probe
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.recompute import TOLERANCE, PlainSavedTensors, hidden_from_modes, random_state_kept, version_of
from lt_tiled.tiling.run import leaves_of
from lt_tiled.tiling.state import Owner
from lt_tiled.tiling.weights import Weights, in_place

CHECK_TOKENS = 32
MOST_BYTES = 256 * 2**20
"""The most bytes of the copies of weights and buffers in float64."""
_FLOOR = 1e-3
"""Smaller values, relative to the inputs or the outputs' gradients, are compared as if they had this size: they may be
rounding."""
_UNLESS = "Pass self_check=False only if you know why it differs."


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor], owner: Owner | None) -> bool:
    """Check on a few tokens of a call that it may run in tiles. One call of each kind of module is checked.

    Returns:
        Whether they showed anything: zeros, as of a new adapter, do not.

    Raises:
        NotPositionWiseError: If it may not, or fails on a few tokens.
    """
    state = HeldState(call)
    kind = _kind_of(call, inputs, state)
    if owner is not None and kind in owner.passed:
        return True
    held = _weights_and_buffers(call)
    plain = all(type(tensor) in PLAIN_TENSORS for tensor in held)
    wide = plain and sum(8 * tensor.numel() for tensor in held) <= MOST_BYTES
    # An activation checkpoint around it would count what its graphs save, and keep what it computes.
    with hidden_from_modes(inputs[0]), PlainSavedTensors(), random_state_kept(call.device):
        shown = _check(call, inputs, state, held if wide else None)
    if shown and owner is not None:
        owner.passed.add(kind)
    return shown


def _kind_of(call: TiledCall, inputs: Sequence[Tensor], state: HeldState) -> Hashable:
    """Return what is equal for calls of modules of the same classes, shapes, dtypes and attributes."""
    facts: list[Any] = [call.kind[1:]]  # without what tells functions of one module apart
    for held in state.held.values():
        facts.append((held.label, held.fact))
    for part in call.function.parts:
        for weight in part._parameters.values():
            if weight is not None:
                facts.append((weight.shape, weight.dtype, weight.requires_grad))
    for tensor, per_token in zip(inputs, call.per_token, strict=True):
        lead = len(call.tokens.lead) if per_token else 0
        facts.append((tensor.shape[lead:], tensor.dtype))
    return tuple(facts)


def _weights_and_buffers(call: TiledCall) -> Weights:
    found: Weights = {weight: list(places) for weight, places in call.weights.items()}
    for part in call.function.parts:
        for holder in (part._parameters, part._buffers):
            for name, tensor in holder.items():
                if tensor is not None and (part, name) not in found.get(tensor, ()):
                    found.setdefault(tensor, []).append((part, name))
    return found


def _check(call: TiledCall, inputs: Sequence[Tensor], state: HeldState, held: Weights | None) -> bool:
    """Check a call, and leave its modules and arguments as they were.

    Args:
        call: The call.
        inputs: The tensors among its arguments.
        state: What they held.
        held: Weights and buffers, to compute in float64; ``None`` to compute in their own dtypes.
    """
    try:
        return _Check(call, inputs, held).run()
    except (NotPositionWiseError, TwoThreadsError):
        raise
    except Exception as error:
        if held is None:
            if isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise
            raise NotPositionWiseError(
                f"{call.name} fails when it is given a few of its tokens: {error}. Arguments that broadcast over"
                f" tokens must be expanded to all of them before the call. {REMEDY}"
            ) from error
    finally:
        state.restore()
    # The module's own code may name a dtype.
    return _check(call, inputs, state, None)


class _Check:
    """A few tokens of a call, in the module's own layout: see :func:`_check`."""

    def __init__(self, call: TiledCall, inputs: Sequence[Tensor], held: Weights | None) -> None:
        self.call = call
        self.wide = held is not None
        self.probe = Probe(call)
        self.targets: list[tuple[str, Tensor]] = []
        """What wants a gradient, with its name: inputs, then weights."""
        # 1. A few tokens of the inputs.
        self.tokens, picked = _pick(call.tokens.lead, call.device)
        self.inputs: list[Tensor] = []
        for index, (tensor, per_token) in enumerate(zip(inputs, call.per_token, strict=True)):
            if per_token:
                few = call.tokens.flatten(tensor.detach())[picked]
                tensor = few.view(self.tokens.lead + few.shape[1:])
            self.inputs.append(self._as_leaf(tensor, call.wants_grad[index], f"argument {index}"))
        # 2. What stands in the places of weights and buffers.
        weights = call.weights if held is None else held
        self.places = list(weights.values())
        self.leaves: dict[Tensor, str] = {}
        """Each with its name."""
        for tensor, places in weights.items():
            name = f"{type(places[0][0]).__name__}.{places[0][1]}"
            self.leaves[self._as_leaf(tensor, tensor in call.weights, name)] = name
        # 3. What is compared.
        self.given: list[Tensor] = []
        """A random gradient for each output."""
        self.rest: list[Tensor] = []
        """The gradients of all tokens, less those of the tiles."""
        for _, target in self.targets:
            self.rest.append(torch.zeros_like(target, requires_grad=False))

    def _as_leaf(self, tensor: Tensor, wants: bool, name: str) -> Tensor:
        leaf = tensor.detach()
        if self.wide and leaf.is_floating_point():
            leaf = leaf.to(torch.float64, copy=True)
        # Code that parametrizes a weight for a while, as peft does, makes a buffer of what is no parameter.
        if isinstance(tensor, nn.Parameter):
            leaf = nn.Parameter(leaf, requires_grad=False)
        if wants and self.call.differentiable:
            self.targets.append((name, leaf.requires_grad_()))
        return leaf

    def run(self) -> bool:
        """Run all tokens and then two tiles; return whether anything that was compared is not zero.

        Raises:
            NotPositionWiseError: If they differ, or the module changes something.
        """
        count = self.tokens.count
        first = max(1, count * 3 // 4)  # so unequal that sums over tokens differ
        with_graph = torch.is_grad_enabled()
        tiles = [(0, first), (first, count)]
        with in_place(self.places, list(self.leaves)):
            before = list(map(_norm, self.leaves))
            # 1. All tokens at once.
            outputs = self._run([(0, count)], with_graph)
            sizes = list(map(_norm, self.rest))
            # 2. Tiles as in the forward pass, and as in its recompute. The first run may have filled caches.
            state = HeldState(self.call)
            of_tiles = self._run(tiles, with_graph=False)
            if with_graph:
                self._run(tiles, with_graph)
            # 3. Nothing may have changed.
            changes = state.changes()
            for leaf, size in zip(self.leaves, before, strict=True):
                if abs(_norm(leaf) - size) > 0:
                    changes.append(self.leaves[leaf])
        if changes:
            self._refuse(
                f"changes {changes[0]} in its forward, which would be changed once for each tile, and again in the"
                " recompute. Return it as an output instead."
            )
        # 4. Both must be equal, but for rounding.
        shown = False
        for index, (whole, tiled) in enumerate(zip(outputs, of_tiles, strict=True)):
            shown |= self._compare_output(f"output {index}", whole, tiled)
        for (name, _), size, rest in zip(self.targets, sizes, self.rest, strict=True):
            shown |= self._compare(f"gradient of {name}", size, _norm(rest), self.given)
        return shown

    def _run(self, bounds: Sequence[Bounds], with_graph: bool) -> list[Tensor]:
        """Run the tokens in tiles; return the outputs, and add or subtract gradients of inputs and weights."""
        call = self.call
        whole = len(bounds) == 1
        assembly = Assembly(self.tokens, bounds, call.name)
        for index, (low, high) in enumerate(bounds):
            # 1. The tile's graph begins at leaves of its own.
            tile: list[Tensor] = []
            for tensor, per_token in zip(self.inputs, call.per_token, strict=True):
                part = tensor.detach()
                if per_token:
                    part = self.tokens.tiles(part, bounds)[index]
                tile.append(part.requires_grad_(with_graph and tensor.requires_grad))
            # 2. Run it on copies, which it may change.
            kept = kept_tensors(call.function)
            drawn = self.probe.drawn
            with torch.set_grad_enabled(with_graph), self.probe:
                given = list(map(torch.clone, tile))
                versions = list(map(version_of, given))
                output = call.run(given)
            # 3. What it did beside.
            if versions != list(map(version_of, given)):
                self._refuse("changes its input in place, which tiles cannot do. Make the change out of place.")
            drawn = self.probe.drawn - drawn
            if whole:
                self.drawn = drawn
            if drawn * self.tokens.count != self.drawn * (high - low):
                self._refuse(
                    "draws one random mask for several tokens, such as locked dropout or stochastic depth, and each"
                    " tile would draw another."
                )
            check_closed(output, None if call.differentiable else (), call.function, kept, call.name)
            # 4. Its output and gradients.
            assembly.add(index, pytree.tree_map_only(Tensor, torch.Tensor.detach, output))
            if whole:
                self._give(assembly.wholes)
            if with_graph:
                own = list(assembly.gradients(self.given))[index]
                targets = [leaf for leaf in [*tile, *self.leaves] if leaf.requires_grad]
                found = self._gradients(leaves_of(output), own, targets)
                self._add(found, slice(low, high), 1 if whole else -1)
        return assembly.wholes

    def _give(self, outputs: Sequence[Tensor]) -> None:
        """Choose gradients of the outputs, by a generator of their own."""
        random = torch.Generator().manual_seed(0)
        for output in outputs:
            gradient = torch.zeros(output.shape, dtype=output.dtype)
            if output.is_floating_point():
                gradient.normal_(generator=random)
            self.given.append(gradient.to(output.device))

    def _gradients(self, ends: Sequence[Any], own: Sequence[Any], targets: list[Tensor]) -> Sequence[Tensor | None]:
        outputs: list[Tensor] = []
        given: list[Tensor] = []
        for end, gradient in zip(ends, own, strict=True):
            if end.requires_grad:
                outputs.append(end)
                given.append(gradient)
        if not outputs or not targets:
            return [None] * len(targets)
        with self.probe:
            # A loss that the module attaches itself has a gradient of one, whatever that of the output is.
            zeros = list(map(torch.zeros_like, outputs))
            for found in torch.autograd.grad(outputs, targets, zeros, retain_graph=True, allow_unused=True):
                if found is not None and bool(found.to_dense().nan_to_num().count_nonzero()):
                    self._refuse(
                        "has gradients that do not come from its output, such as those of a loss that it attaches"
                        " itself, which each tile would attach again. Return the loss as an output instead."
                    )
            return torch.autograd.grad(outputs, targets, given, allow_unused=True)

    def _add(self, gradients: Sequence[Tensor | None], tokens: slice, sign: int) -> None:
        """Add or subtract the gradients of some tokens."""
        wants = [p for p, tensor in zip(self.call.per_token, self.inputs, strict=True) if tensor.requires_grad]
        per_token = wants + [False] * (len(self.rest) - len(wants))
        for gradient, rest, in_part in zip(gradients, self.rest, per_token, strict=True):
            if gradient is None:
                continue
            if in_part:
                rest = self.tokens.flatten(rest)[tokens]
                gradient = gradient.flatten(0, len(self.tokens.lead) - 1)
            rest.add_(gradient.to_dense(), alpha=sign)

    def _compare_output(self, what: str, whole: Tensor, tiled: Tensor) -> bool:
        if whole.is_complex():
            whole = torch.view_as_real(whole.resolve_conj())
            tiled = torch.view_as_real(tiled.resolve_conj())
        if not torch.equal(whole.isfinite(), tiled.isfinite()):
            self._refuse(f"is not position-wise: its {what} is finite elsewhere in tiles. {_UNLESS}")
        return self._compare(what, _norm(whole), _norm(whole - tiled), self.inputs)

    def _compare(self, what: str, size: float, difference: float, sources: Sequence[Tensor]) -> bool:
        """Refuse a difference that rounding does not explain; return whether the value is not zero.

        Args:
            what: What is compared.
            size: Its norm.
            difference: The norm of the difference.
            sources: What it is computed from: a sum that cancels is as inexact as they are large.
        """
        # The least precise dtype of the run decides.
        bound = max(TOLERANCE.get(dtype, 0.0) for dtype in self.probe.dtypes)
        noise = bound * _FLOOR * sum(map(_norm, filter(torch.is_floating_point, sources)))
        if difference > max(bound * size, noise):
            self._refuse(
                f"is not position-wise: its {what} for {self.tokens.count} tokens differs by"
                f" {difference / max(size, 1e-30):.1e} in tiles (relative; rounding explains {bound:.0e}). {_UNLESS}"
            )
        return size != 0

    def _refuse(self, problem: str) -> None:
        raise NotPositionWiseError(f"{self.call.name} {problem} {REMEDY}")


def _norm(tensor: Tensor) -> float:
    """Return the norm of what is finite."""
    finite = tensor.detach().nan_to_num(0, 0, 0)
    if not finite.is_floating_point():
        finite = finite.float()
    # Without a copy in float32.
    wide = torch.float64 if finite.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(finite, dtype=wide))


def _pick(lead: Sequence[int], device: torch.device) -> tuple[Tokens, Tensor]:
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
    return Tokens(torch.Size(counts)), picked
