"""The backward pass of a call: each tile is recomputed with a graph, and its gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.tiling.compiled import CannotCompile
from lt_tiled.tiling.copies import Copies, can_copy
from lt_tiled.tiling.layout import tile_gradients
from lt_tiled.tiling.recompute import RandomState, SavedCounter, saves_elsewhere
from lt_tiled.tiling.skip import CannotSkip, LastLinear, LastProjectionSkip
from lt_tiled.tiling.weights import GradientSum, present, substituted

if TYPE_CHECKING:
    from lt_tiled.tiling.tiled_call import TiledCall, Trace

_engine = torch.autograd.Variable._execution_engine
"""What ``torch.autograd.grad`` calls: its own checks take as long as a small tile."""


class Backward:
    """The recompute of a call's tiles, and their gradients. What is the same for all tiles is made once.

    Args:
        call: The call.
        trace: What its forward pass left.
        sums: Those of the gradients of its weights.
        wholes: Of the arguments that each tile sees in full and that want a gradient.
    """

    def __init__(
        self, call: TiledCall, trace: Trace, sums: Sequence[GradientSum], wholes: Sequence[GradientSum]
    ) -> None:
        self.call, self.trace, self.sums, self.wholes = call, trace, sums, wholes
        pairs = zip(call.wants_grad, call.per_token, strict=True)
        self._wanted = [index for index, (wants, per_token) in enumerate(pairs) if wants and per_token]
        there = zip(sums, present(call.weights), strict=True)
        # What code gets that does not get the leaves: see NOTE [Substitution].
        self._direct = [(total, t) for total, tensors in there for t in tensors if t.requires_grad]
        self._targets = (*(s.leaf for s in (*sums, *wholes)), *(t for _, t in self._direct))
        self._copies = Copies(call.work, call.weights, [s.leaf for s in sums]) if can_copy(call.work) else None
        self._function = self._in_mode if self._copies is None else self._copies.function
        self._last = self._last_linear()

    def _in_mode(self, *args: Any, **kwargs: Any) -> Any:
        with substituted(self.call.weights, self.sums):
            return self.call.work.function(*args, **kwargs)

    def _last_linear(self) -> LastLinear | None:
        index = self.call.patch.learned.last.get(self.call.key)
        if index is None or self._copies is None:
            return None
        part = list(self.call.work.parts())[index]
        places = {place: s for weight, s in zip(self.call.weights, self.sums, strict=True) for place in weight.places}
        sums = places.get((part, "weight")), places.get((part, "bias"))
        return LastLinear(self._copies.of(part), sums, self.call.autocast.dtype)

    def run(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run all tiles.

        Args:
            inputs: The tensors of the call's arguments, as in the forward pass.
            gradients: One for each leaf of the output, in the untiled shape; ``None`` for leaves without one.

        Returns:
            A gradient for each tensor argument that is per token and wants one.
        """
        call, bounds, kinds = self.call, self.call.bounds, self.trace.layout.kinds
        results = [torch.empty_like(inputs[i], memory_format=torch.contiguous_format) for i in self._wanted]
        parts = [call.shape.tiles(result, bounds) for result in results]
        given = [
            repeat(None) if gradient is None else tile_gradients(gradient, kind, call.shape, bounds)
            for gradient, kind in zip(gradients, kinds, strict=True)
        ]
        with torch.enable_grad(), SavedCounter() if saves_elsewhere() else nullcontext():
            tiles = call.tiles(call.leaves(inputs, self.wholes))
            for tile, own, into in zip(tiles, _rows(given), _rows(parts)):  # noqa: B905
                self._tile(tile, list(own), into)
        if self._copies is not None:
            self._copies.check(call.patch.name)
        return results

    def _tile(self, tile: Sequence[Tensor], given: list[Tensor | None], into: Sequence[Tensor]) -> None:
        """Recompute a tile and differentiate it.

        Args:
            tile: Its tensors.
            given: The gradients of the leaves of its output.
            into: Where the gradients of its per-token arguments go.
        """
        if self.call.compiled is not None and self._compiled(tile, given, into):
            return
        roots = self._recompute(tile, given)
        targets = (*[tile[index] for index in self._wanted], *self._targets)
        found: Sequence[Tensor | None] = ()
        if roots and targets:
            ends, slopes = zip(*roots)  # noqa: B905
            del roots
            found = _engine.run_backward(
                ends, slopes, False, False, targets, allow_unreachable=True, accumulate_grad=False
            )
        for index, part in enumerate(into):
            gradient = found[index] if found else None
            part.zero_() if gradient is None else part.copy_(gradient)
        for index in range(len(targets) - len(self._direct), len(found)):
            gradient = found[index]
            if gradient is not None:
                total, tensor = self._direct[index - len(targets)]
                total.add_direct(tensor, gradient, self.call.patch.name)

    def _recompute(self, tile: Sequence[Tensor], given: list[Tensor | None]) -> list[tuple[Any, Tensor]]:
        """Run a tile with a graph; return where the graph ends, with the gradients there."""
        args, kwargs = self.call.arguments.call_with(tile)
        start = RandomState.now(self.call.device) if self.trace.random is not None else None
        roots: list[tuple[Any, Tensor]] = []
        outputs = None if self._last is None else self._without_last(self._last, args, kwargs, start)
        if outputs is None:
            outputs = self._whole(args, kwargs, start)
        elif self._last is not None:
            roots = self._last.before(outputs, given)
        return roots + [(o, g) for o, g in zip(outputs, given, strict=True) if g is not None and o.requires_grad]

    def _without_last(self, last: LastLinear, args: Any, kwargs: Any, start: RandomState | None) -> list[Any] | None:
        try:
            outputs = _leaves(self._function(*args, **kwargs))
            last.check(outputs)
            return outputs
        except Exception as error:
            if not last.end() and not isinstance(error, CannotSkip):  # the tile's code failed by itself
                raise
            self._last = None
            self.call.patch.learned.last.pop(self.call.key, None)
            if start is not None:
                start.set()
            return None

    def _whole(self, args: Any, kwargs: Any, start: RandomState | None) -> list[Any]:
        learned, key = self.call.patch.learned, self.call.key
        saved = learned.saved.get(key)
        if saved is not None:
            skip = LastProjectionSkip(saved)
            try:
                with skip:
                    outputs = _leaves(self._function(*args, **kwargs))
                skip.check(outputs)
                return outputs
            except CannotSkip:
                learned.saved[key] = None
                if start is not None:
                    start.set()
        return _leaves(self._function(*args, **kwargs))

    def _compiled(self, tile: Sequence[Tensor], given: Sequence[Tensor | None], into: Sequence[Tensor]) -> bool:
        """Do the same compiled; return whether that could be done."""
        compiled = self.call.compiled
        if compiled is None:
            return False
        wanted = {index: gradient for index, gradient in enumerate(given) if gradient is not None}
        try:
            found = compiled.backward(self.call, tile, [s.leaf for s in self.sums], wanted, self.trace.layout)
        except CannotCompile as error:
            self.call.compile_no_more(error, self.trace.random is not None)
            return False
        parts, wholes = iter(into), iter(self.wholes)
        pairs = zip(self.call.wants_grad, self.call.per_token, strict=True)
        targets = [*self.sums, *(next(parts) if per_token else next(wholes) for wants, per_token in pairs if wants)]
        for target, gradient in zip(targets, found, strict=True):
            if isinstance(target, Tensor):
                target.zero_() if gradient is None else target.copy_(gradient)
            elif gradient is not None:
                target.add(gradient)
        return True


def _leaves(output: Any) -> list[Any]:
    return [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)


def _rows(columns: Sequence[Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the entries of all columns for one tile after the other."""
    return zip(*columns) if columns else repeat(())  # noqa: B905  # some repeat one entry
