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
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lt_tiled.recompute.compare import EPS, ROWS, VERDICT, Sample, describe, fingerprint
from lt_tiled.recompute.mode import is_backward, is_real

MOST_ENDS = 8
"""So many of the tensors on which outputs depend are compared; of many experts, others in each call."""
MOST_NODES = 200
"""So many nodes of the graph are looked at."""


class BlockFingerprints:
    """The fingerprints of one forward pass of a block, and their comparison: see NOTE [What a block saves].

    Args:
        name: The block's name in messages.
        raises: Whether a difference raises, and does not only warn.
    """

    def __init__(self, name: str, raises: bool) -> None:
        self.name = name
        self.raises = raises
        self.taken: dict[Any, Tensor] = {}
        """By the place of a tensor among those that the block saves; of arguments, by the operator's call."""
        self.eps = 0.0
        """The unit in the last place of the least precise tensor that is saved."""

    def forward(self, function: Callable[[], Any], inputs: Sequence[Tensor]) -> Any:
        """Run the forward pass on these tensors, and look at what it saves."""
        saved = _SavedTensors(self, inputs)
        token = _current.set(saved)
        try:
            output = function()
        finally:
            _current.reset(token)
        self.eps = max([EPS.get(tensor.dtype, 0.0) for tensor in saved.tensors], default=0.0)
        for place in saved.find_ends(output):
            self.take(place, saved.tensors[place])
        return output

    def take(self, place: Any, tensor: Any) -> None:
        """Take a fingerprint, if this is a tensor that has values."""
        if isinstance(tensor, Tensor) and (values := _values_of(tensor)) is not None:
            self.taken[place] = fingerprint(values, ROWS)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in a compiled step autograd calls it
    def compare(self, place: Any, tensor: Any) -> None:
        """Compare what the recompute has at this place, if the forward pass looked at it."""
        before = self.taken.get(place)
        if before is None or not is_backward():
            return
        now = before.new_empty(0)
        eps = 0.0  # for indices and flags
        if isinstance(tensor, Tensor):
            values = _values_of(tensor)
            if values is None:
                return
            now = fingerprint(values, ROWS)
            if tensor.is_floating_point() or tensor.is_complex():
                eps = self.eps
        VERDICT.add(Sample(self.name, "name other blocks in ActivationCheckpointing", eps, before, now, self.raises))


class _SavedTensors:
    """The tensors that a forward pass has saved so far, and where its graph leads to them."""

    def __init__(self, of: BlockFingerprints, inputs: Sequence[Tensor]) -> None:
        self.of = of
        self.tensors: list[Tensor] = []
        self._edges = {(tensor.grad_fn, tensor.output_nr): -1 for tensor in inputs}
        """The places of saved tensors by the edges of the graph that lead to them; -1 for inputs."""
        self._others = defaultdict[int, list[int]](list)
        """The places of saved tensors without a graph, by the number of the node that saved them."""

    def add(self, tensor: Tensor) -> _Saved:
        """Hold a tensor, and return its metadata."""
        place = len(self.tensors)
        self.tensors.append(tensor)
        if tensor.grad_fn is not None:
            self._edges.setdefault((tensor.grad_fn, tensor.output_nr), place)
        else:
            self._others[torch._C._autograd._get_sequence_nr() - 1].append(place)
        return _Saved(tensor.shape, tensor.dtype, place, self.of)

    def find_ends(self, output: Any) -> list[int]:
        """Return the places of the tensors that the outputs depend on through no other saved tensor, and another."""
        waiting: list[tuple[Any, int]] = []
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                waiting.append((leaf.grad_fn, leaf.output_nr))
        seen: set[tuple[Any, int]] = set()
        ends: set[int] = set()
        while waiting and len(seen) < MOST_NODES:
            edge = waiting.pop()
            if edge in seen or edge[0] is None:
                continue
            seen.add(edge)
            # 1. The value of a saved tensor depends on all that was computed before.
            if edge in self._edges:
                ends.add(self._edges[edge])
                continue
            # 2. What the node saved besides: weights, masks, indices, its own output.
            node = edge[0]
            ends.update(self._others.get(node._sequence_nr(), ()))
            waiting.extend(node.next_functions)
        places = sorted(ends - {-1})
        chosen = _random.sample(places, min(len(places), MOST_ENDS))
        # 3. One more, for branches that reach no output, such as that of a loss in an attribute.
        computed = [place for place in self._edges.values() if place >= 0]
        if computed:
            chosen.append(_random.choice(computed))
        return chosen


_random = random.Random(0)
_current: ContextVar[_SavedTensors | None] = ContextVar("saved", default=None)


class _Saved(NamedTuple):
    """The metadata of a tensor that the forward pass saves. Torch asks whether it is unequal to what is recomputed."""

    shape: torch.Size
    dtype: torch.dtype
    place: int
    of: BlockFingerprints

    def __ne__(self, recomputed: object) -> bool:
        """Compare the values at the end of the backward pass: only another shape or dtype raises now."""
        assert isinstance(recomputed, Tensor)
        if recomputed.shape != self.shape or recomputed.dtype != self.dtype:
            difference = f"{_describe(recomputed)}, not {_describe(self)}"
            raise RuntimeError(f"{describe(self.of.name, difference)}.")
        self.of.compare(self.place, recomputed)
        return False


def _describe(tensor: Tensor | _Saved) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor on this rank, or ``None`` if it is empty, sparse, simulated, or was released."""
    plain: Any = tensor
    while is_traceable_wrapper_subclass(plain):
        names, _ = plain.__tensor_flatten__()
        plain = getattr(plain, names[0])
    has_values = is_real(plain) and plain.layout is torch.strided and plain.untyped_storage().nbytes() > 0
    return plain if has_values else None


def _metadata(tensor: Tensor) -> Any:
    # A forward pass may differentiate blocks that ran before: what they recompute is not of this one.
    saved = _current.get()
    if saved is None or is_backward():
        return tensor
    return saved.add(tensor)


COMPARED = "lt_tiled"
"""The name of this determinism check. The argument of torch's checkpoint takes names only."""
checkpoint._allowed_determinism_checks_to_fns[COMPARED] = _metadata
