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
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.errors import REMEDY, NotPositionWiseError, TwoThreadsError
from lt_tiled.tiling.call import Owner, TiledCall
from lt_tiled.tiling.cut import Assembly, Bounds, Tokens, flatten
from lt_tiled.tiling.effects import Probe, check_leaves, copies_in_place, held
from lt_tiled.tiling.recompute import TOLERANCE, PlainSavedTensors, hidden_from_modes, random_state_kept, version_of

CHECK_TOKENS = 32
MOST_BYTES = 256 * 2**20
"""The most bytes of the copies in float64."""
SMALL = 2**20
"""The most bytes of another tensor that is copied."""
PLAIN_TENSORS = (Tensor, nn.Parameter)
_FLOOR = 1e-3
"""Smaller values, relative to the inputs or the outputs' gradients, are compared as if they had this size: they may be
rounding."""


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor], owner: Owner | None) -> bool:
    """Check on a few tokens of a call that it may run in tiles. One call of each kind of module is checked.

    Returns:
        Whether they showed anything: zeros, as of a new adapter, do not.

    Raises:
        NotPositionWiseError: If it may not, or fails on a few tokens.
    """
    kind = _kind_of(call, inputs)
    if owner is not None and kind in owner.passed:
        return True
    # An activation checkpoint around it would count what its graphs save, and keep what it computes.
    with hidden_from_modes(inputs[0]), PlainSavedTensors(), random_state_kept(call.device):
        shown = _check(call, inputs)
    if shown and owner is not None:
        owner.passed.add(kind)
    return shown


def _kind_of(call: TiledCall, inputs: Sequence[Tensor]) -> Hashable:
    """Return what is equal for calls of modules of the same classes, attributes, shapes and dtypes."""
    facts: list[Hashable] = [call.kind[1:]]  # without what tells functions of one module apart
    facts.append(held(call.function.parts, call.arguments.others, lambda t: (t.shape, t.dtype, t.requires_grad)))
    for tensor, per_token in zip(inputs, call.per_token, strict=True):
        facts.append((tensor.shape[len(call.tokens.lead) * per_token :], tensor.dtype))
    return tuple(facts)


def _check(call: TiledCall, inputs: Sequence[Tensor], wide: bool = True) -> bool:
    try:
        return _Check(call, inputs, wide).run()
    except (NotPositionWiseError, TwoThreadsError):
        raise
    except Exception as error:
        if not wide and isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        if not wide:
            raise NotPositionWiseError(
                f"{call.name} fails when it is given a few of its tokens: {error}. Arguments that broadcast over"
                f" tokens must be expanded to all of them before the call. {REMEDY}"
            ) from error
    # Its weights are too large or quantized, or its own code names a dtype.
    return _check(call, inputs, wide=False)


class _Check:
    """A few tokens of a call, in the module's own layout, in float64 if it is wide."""

    def __init__(self, call: TiledCall, inputs: Sequence[Tensor], wide: bool) -> None:
        self.call, self.wide = call, wide
        self.probe = Probe(call)
        self.bytes = 0
        """Those of the copies in float64."""
        self.copies: dict[int, Tensor] = {}
        """What stands in the places of tensors that modules and arguments hold, by the ids of those."""
        self.targets: dict[Tensor, str] = {}
        """What wants a gradient, with its name."""
        self.given: list[Tensor] = []
        """A random gradient for each output."""
        self.inputs: list[Tensor] = []
        lead, rows = _few(call.tokens.lead)
        self.tokens = Tokens(lead)
        for index, (tensor, per_token) in enumerate(zip(inputs, call.per_token, strict=True)):
            few = tensor.detach()[rows] if per_token else tensor
            self.inputs.append(self._leaf(few, f"argument {index}" if call.wants_grad[index] else ""))
        self.arguments = replace(call.arguments, others=pytree.tree_map(self._copy, call.arguments.others))

    def _copy(self, value: Any) -> Any:
        """Return what stands in the place of a tensor while the check runs, and anything else as it is."""
        if not isinstance(value, Tensor) or id(value) in self.copies:
            return self.copies.get(id(value), value)
        leaf = value.detach()
        if value in self.call.weights:
            part, attribute = self.call.weights[value][0]
            leaf = self._leaf(value, f"{type(part).__name__}.{attribute}")
        elif value.requires_grad and value.is_leaf and torch.is_grad_enabled():
            return value  # a weight that is not the module's: an output that depends on it is refused
        elif self.wide or isinstance(value, nn.Parameter):
            leaf = self._leaf(value, "")
        elif type(value) is Tensor and value.nbytes <= SMALL:
            leaf = leaf.clone()
        self.copies[id(value)] = leaf
        return leaf

    def _leaf(self, tensor: Tensor, name: str) -> Tensor:
        """Return a leaf with the values of a tensor, which wants a gradient if it has a name."""
        leaf = tensor.detach()
        if self.wide:
            self.bytes += 8 * leaf.numel()
            if type(tensor) not in PLAIN_TENSORS or self.bytes > MOST_BYTES:
                raise TypeError("cannot be copied in float64")
            leaf = leaf.to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)
        # Code that parametrizes a weight for a while, as peft does, makes a buffer of what is no parameter.
        if isinstance(tensor, nn.Parameter):
            leaf = nn.Parameter(leaf, requires_grad=False)
        if name and self.call.differentiable:
            self.targets[leaf.requires_grad_()] = name
        return leaf

    def run(self) -> bool:
        """Run all tokens and then two tiles; return whether anything that was compared is not zero."""
        parts, others, count = self.call.function.parts, self.arguments.others, self.tokens.count
        first = max(1, count * 3 // 4)  # so unequal that sums over tokens differ
        tiles = [(0, first), (first, count)]
        with_graph = torch.is_grad_enabled()
        with copies_in_place(parts, self._copy):
            # 1. All tokens at once.
            weights = list(map(_fact, self.targets))
            outputs = self._run([(0, count)], with_graph)
            sizes: list[float] = []
            for leaf in self.targets:
                sizes.append(_norm(leaf.grad))
                leaf.grad = leaf.grad if leaf.grad is None else -leaf.grad.to_dense()
            # 2. Tiles as in the forward pass, and as in its recompute. The first run may have filled caches.
            before = held(parts, others, _fact)
            of_tiles = self._run(tiles, with_graph=False)
            if with_graph:
                self._run(tiles, with_graph)
            changed = [label for label, _, _ in before ^ held(parts, others, _fact)]
        # 3. Nothing may have changed.
        for (leaf, name), fact in zip(self.targets.items(), weights, strict=True):
            changed += [name] if _fact(leaf) != fact else []
        if changed:
            self._refuse(
                f"changes {min(changed)} in its forward, which would be changed once for each tile, and again in the"
                " recompute. Return it as an output instead."
            )
        # 4. Both must be equal, but for rounding. What is left of a gradient is the difference.
        for index, (whole, tiled) in enumerate(zip(outputs, of_tiles, strict=True)):
            if not torch.equal(whole.isfinite(), tiled.isfinite()):
                self._refuse(f"is not position-wise: its output {index} is finite elsewhere in tiles.")
            sizes.append(_norm(whole))
            self._compare(f"output {index}", sizes[-1], _norm(whole - tiled), self.inputs)
        for (leaf, name), size in zip(self.targets.items(), sizes, strict=False):
            self._compare(f"gradient of {name}", size, _norm(leaf.grad), self.given)
        return any(sizes)

    def _run(self, bounds: Sequence[Bounds], with_graph: bool) -> list[Tensor]:
        """Run the tokens in tiles, add to the gradients of inputs and weights, and return the outputs."""
        call, whole = self.call, len(bounds) == 1
        assembly = Assembly(self.tokens, bounds, call.name)
        for index, (low, high) in enumerate(bounds):
            # 1. Run it on copies, which it may change.
            drawn = self.probe.drawn
            with torch.inference_mode(False), torch.set_grad_enabled(with_graph):
                tile: list[Tensor] = []
                for tensor, per_token in zip(self.inputs, call.per_token, strict=True):
                    tile.append((self.tokens.tiles(tensor, bounds)[index] if per_token else tensor).clone())
                versions = list(map(version_of, tile))
                args, kwargs = self.arguments.call_with(tile)
                with self.probe:
                    output = call.function.run(*args, **kwargs)
            # 2. What it did besides.
            if versions != list(map(version_of, tile)):
                self._refuse("changes its input in place, which tiles cannot do. Make the change out of place.")
            drawn = self.probe.drawn - drawn
            if whole:
                self.drawn = drawn
            if drawn * self.tokens.count != self.drawn * (high - low):
                self._refuse(
                    "draws one random mask for several tokens, such as locked dropout or stochastic depth, and each"
                    " tile would draw another."
                )
            self._check_graph(flatten(output)[0])
            # 3. Its output and gradients.
            with torch.no_grad():
                assembly.add(index, output)
            if whole:
                for one in assembly.wholes:
                    has_gradient = one.is_floating_point() or one.is_complex()
                    self.given.append(torch.randn_like(one) if has_gradient else torch.zeros_like(one))
            if with_graph:
                self._differentiate(flatten(output)[0], list(assembly.gradients(self.given))[index], whole)
        return assembly.wholes

    def _check_graph(self, outputs: Sequence[Any]) -> None:
        """Refuse a tile whose graph begins at other leaves or has another end, as of an auxiliary loss."""
        ends = [output.grad_fn for output in outputs if isinstance(output, Tensor)]
        nodes = check_leaves(ends, set(map(id, self.targets)), self.call.name)
        for label, _, value in held(self.call.function.parts, (), lambda tensor: tensor.grad_fn and (tensor.grad_fn,)):
            # What the output depends on (a normalized weight) is computed in each run.
            if isinstance(value, tuple) and value[0] not in nodes:
                self._refuse(
                    f"keeps a tensor with a graph in its attribute {label}, which would be that of one tile. Return it"
                    " as an output instead."
                )

    def _differentiate(self, outputs: Sequence[Any], own: Sequence[Tensor | None], whole: bool) -> None:
        """Add the gradients of a tile to those of inputs and weights."""
        pairs = [pair for pair in zip(outputs, own, strict=True) if pair[0].requires_grad]
        if not pairs or not self.targets:
            return
        ends, given = zip(*pairs, strict=True)
        targets = list(self.targets)
        with self.probe:
            if whole:
                # A loss that the module attaches itself has a gradient of one, whatever that of the output is.
                torch.autograd.backward(ends, list(map(torch.zeros_like, ends)), retain_graph=True, inputs=targets)
                if any(_norm(leaf.grad) for leaf in targets):
                    self._refuse(
                        "has gradients that do not come from its output, such as those of a loss that it attaches"
                        " itself, which each tile would attach again. Return the loss as an output instead."
                    )
            torch.autograd.backward(ends, given, inputs=targets)

    def _compare(self, what: str, size: float, difference: float, sources: Sequence[Tensor]) -> None:
        """Refuse a difference that rounding does not explain: a sum that cancels is as inexact as its sources."""
        # The least precise dtype of the run decides.
        bound = max(TOLERANCE.get(dtype, 0.0) for dtype in self.probe.dtypes)
        noise = _FLOOR * sum(map(_norm, filter(torch.is_floating_point, sources)))
        if difference > bound * max(size, noise):
            self._refuse(
                f"is not position-wise: its {what} for {self.tokens.count} tokens differs by"
                f" {difference / max(size, 1e-30):.1e} in tiles (relative; rounding explains {bound:.0e}). Pass"
                " self_check=False only if you know why it differs."
            )

    def _refuse(self, problem: str) -> None:
        raise NotPositionWiseError(f"{self.call.name} {problem} {REMEDY}")


def _norm(tensor: Tensor | None) -> float:
    """Return the norm of what is finite; 0 of a gradient that is missing."""
    if tensor is None:
        return 0.0
    finite = tensor.detach().to_dense()
    if finite.is_complex():
        finite = torch.view_as_real(finite.resolve_conj())
    finite = finite if finite.dtype in TOLERANCE else finite.double()
    # Without a copy in float32.
    wide = torch.float64 if finite.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(finite.nan_to_num(0, 0, 0), dtype=wide))


def _fact(tensor: Tensor) -> Hashable:
    """Return what is equal as long as a tensor has the same values."""
    if tensor.grad_fn is not None:
        return None  # the graph of the output tells whether it may be there
    if type(tensor) not in PLAIN_TENSORS or (tensor.nbytes > SMALL and tensor.dtype not in TOLERANCE):
        return id(tensor), version_of(tensor)
    # Code that parametrizes a weight for a while changes its version.
    return _norm(tensor), 0 if isinstance(tensor, nn.Parameter) else version_of(tensor)


def _few(lead: Sequence[int]) -> tuple[torch.Size, tuple[slice, ...]]:
    """Return the leading dimensions of a few tokens, and what picks them from all over ``lead``.

    Several entries of each dimension, where it has them: what mixes along a batch must also be seen.
    """
    counts = [min(size, 5) for size in lead[:-1]]  # two would hide what moves entries by two
    counts.append(min(lead[-1], max(5, CHECK_TOKENS // prod(counts))))
    rows: list[slice] = []
    for size, count in zip(lead, counts, strict=True):
        step = size // count
        rows.append(slice(0, count * step, step))
    return torch.Size(counts), tuple(rows)
