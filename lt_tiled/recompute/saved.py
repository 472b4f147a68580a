"""The tensors that a block saves in its forward pass and in its recompute, compared by their fingerprints.

NOTE [What a block saves]
Whatever a gradient depends on is saved, or computed from what is saved. The last tensor that is saved on a branch shows
what was computed before it. So those tensors are compared on which the block's outputs depend through no other saved
tensor: they are found in the graph of the outputs. In each call one of the others is compared, too. What operators keep
for the recompute is equal in both passes: their arguments are compared.

The forward pass holds all of them, as the recompute does, and looks at them when it ends, because kernels may write to
a tensor after autograd saved it: RReLU to its noise, batch norm to its statistics.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from lt_tiled.recompute.compare import EPS, VERDICT, Fingerprints, describe
from lt_tiled.recompute.mode import is_backward

MOST_ENDS = 8
"""So many of the tensors on which outputs depend are compared; of many experts, others in each call."""
_random = random.Random(0)
_current: ContextVar[_SavedTensors | None] = ContextVar("saved", default=None)
"""The tensors of the block whose forward pass runs now."""


def compared_forward(prints: Fingerprints, function: Callable[[], Any]) -> Any:
    """Run the forward pass of a block, and take fingerprints of what it saves."""
    saved = _SavedTensors(prints)
    token = _current.set(saved)
    try:
        output = function()
    finally:
        _current.reset(token)
    for tensor in saved.tensors:
        prints.eps = max(prints.eps, EPS.get(tensor.dtype, 0.0))
    for place in saved.find_ends(output):
        prints.take(place, saved.tensors[place])
    return output


@torch.compiler.disable  # type: ignore[untyped-decorator]  # in a compiled step autograd calls it
def compare_at(prints: Fingerprints, place: Any, tensor: Any) -> None:
    """Compare a tensor of the recompute, if the forward pass took the fingerprint of that at this place."""
    if place in prints.taken and is_backward():
        now = Fingerprints(prints.name, prints.remedy)
        now.take(place, tensor)
        VERDICT.add(prints, now)


class _SavedTensors:
    """The tensors that a forward pass has saved so far, and where its graph leads to them."""

    def __init__(self, prints: Fingerprints) -> None:
        self.prints = prints
        self.first = torch._C._autograd._get_sequence_nr()
        """The number of the first node that the block makes."""
        self.tensors: list[Tensor] = []
        self._places = defaultdict[Any, list[int]](list)
        """By the edge of the graph that leads to a saved tensor; of those without a graph, by the number of the node
        that saved them."""

    def add(self, tensor: Tensor) -> _Saved:
        """Hold a tensor, and return its metadata."""
        place = len(self.tensors)
        self.tensors.append(tensor)
        source: Any = (tensor.grad_fn, tensor.output_nr)
        if tensor.grad_fn is None:
            source = torch._C._autograd._get_sequence_nr() - 1
        self._places[source].append(place)
        return _Saved(tensor.shape, tensor.dtype, place, self.prints)

    def find_ends(self, output: Any) -> set[int]:
        """Return the places of the tensors that the outputs depend on through no other saved tensor, and another."""
        waiting: list[tuple[Any, int]] = []
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                waiting.append((leaf.grad_fn, leaf.output_nr))
        seen: set[tuple[Any, int]] = set()
        ends: set[int] = set()
        while waiting:
            edge = waiting.pop()
            node = edge[0]
            number = -1 if node is None else node._sequence_nr()
            if edge in seen or number < self.first:  # or made in front of the block
                continue
            seen.add(edge)
            # 1. The value of a saved tensor depends on all that was computed before.
            if edge in self._places:
                ends.update(self._places[edge][:1])
                continue
            # 2. What the node saved besides: weights, masks, indices, its own output.
            ends.update(self._places.get(number, ()))
            waiting.extend(node.next_functions)
        chosen = set(_random.sample(sorted(ends), min(len(ends), MOST_ENDS)))
        # 3. One more, for branches that reach no output, such as that of a loss in an attribute.
        if self.tensors:
            chosen.add(_random.randrange(len(self.tensors)))
        return chosen


class _Saved(NamedTuple):
    """The metadata of a tensor that the forward pass saves. Torch asks whether it is unequal to what is recomputed."""

    shape: torch.Size
    dtype: torch.dtype
    place: int
    prints: Fingerprints

    def __ne__(self, recomputed: object) -> bool:
        """Compare the values at the end of the backward pass: only another shape or dtype raises now."""
        assert isinstance(recomputed, Tensor)
        if recomputed.shape != self.shape or recomputed.dtype != self.dtype:
            now = f"{list(recomputed.shape)} {recomputed.dtype}"
            difference = f"{now}, not {list(self.shape)} {self.dtype}"
            raise RuntimeError(f"{describe(self.prints.name, difference)}.")
        compare_at(self.prints, self.place, recomputed)
        return False


def _metadata(tensor: Tensor) -> Any:
    # A forward pass may differentiate blocks that ran before: what they recompute is not of this one.
    saved = _current.get()
    if saved is None or is_backward():
        return tensor
    return saved.add(tensor)


COMPARED = "lt_tiled"
"""The name of this determinism check. The argument of torch's checkpoint takes names only."""
checkpoint._allowed_determinism_checks_to_fns[COMPARED] = _metadata
