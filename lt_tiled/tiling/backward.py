"""The backward pass of a call: each tile is recomputed with a graph, and its gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled.tiling.compiled import CannotCompile, CompiledTile
from lt_tiled.tiling.layout import each_tile, tile_gradients
from lt_tiled.tiling.recompute import (
    Precision,
    RandomState,
    SavedCounter,
    differ,
    hidden_from_modes,
    other_values,
    random_state_kept,
    samples_of,
    saves_elsewhere,
)
from lt_tiled.tiling.skip import CannotSkip, LastProjectionSkip, hooked
from lt_tiled.tiling.weights import GradientSum, Substituted, check_leaves, differentiate, paired

if TYPE_CHECKING:
    from lt_tiled.tiling.tiled_call import TiledCall, Trace


class Backward:
    """The recompute of a call's tiles, and their gradients. What is the same for all tiles is made once.

    Args:
        call: The call.
        trace: What its forward pass left.
        sums: The gradient sums of its weights.
        wholes: The gradient sums of the arguments that every tile sees in full.
    """

    def __init__(
        self, call: TiledCall, trace: Trace, sums: Sequence[GradientSum], wholes: Sequence[GradientSum]
    ) -> None:
        self.call, self.trace, self.sums, self.wholes = call, trace, sums, wholes
        pairs = zip(call.wants_grad, call.per_token, strict=True)
        self._wanted = [index for index, (wants, per_token) in enumerate(pairs) if wants and per_token]
        there = paired(call.weights, sums)
        # What code gets that does not get the leaves: see NOTE [Substitution].
        self._direct = [(total, t) for t, total in there if t.requires_grad]
        self._all = (*sums, *wholes)
        leaves = [s.leaf for s in self._all]
        self._targets, self._own = (*leaves, *(t for _, t in self._direct)), len(self._wanted) + len(leaves)
        self._pairs = [(t, total.leaf) for t, total in there]
        self._last = self._last_linear({id(t): total for t, total in there})
        self._mode = self._last or Substituted(self._pairs)
        self._outside = call.autocast.disabled()
        self._compiled = call.compiled
        self._known: set[int] | None = None
        """The leaves that the graph of the first tile may have."""

    def _last_linear(self, sums: dict[int, GradientSum]) -> LastLinear | None:
        index = self.call.patch.learned.last.get(self.call.key)
        part = None if index is None else self.call.work.parts()[index]
        if type(part) is not nn.Linear:  # or another module since
            return None
        own = sums.get(id(part.weight)), sums.get(id(part.bias))
        return LastLinear(self._pairs, part, own, self.call.autocast.dtype)

    def run(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
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
        # The compiler may compile a tile twice, with other rounding.
        if self.trace.samples[1] and self._compiled is None and self.call.due():
            self._compare(inputs)
        try:
            # An offloader's hooks must not see a tile; without hooks, counting costs time for nothing.
            with torch.enable_grad(), SavedCounter() if saves_elsewhere() else nullcontext():
                leaves = call.leaves(inputs, self.wholes)
                held = [t for part in call.work.parts() for t in (*part._parameters.values(), *part._buffers.values())]
                self._known = {id(t) for t in (*leaves, *self._targets, *held)}
                tiles = call.tiles(leaves)
                for tile, own, into in each_tile(zip(tiles, _rows(given), _rows(parts))):  # noqa: B905
                    self._tile(tile, list(own), into)
        finally:
            self._mode.end()
        return results

    def _compare(self, inputs: Sequence[Tensor]) -> None:
        """Refuse a recompute that computes other outputs than the forward pass: see NOTE [What no observation sees]."""
        call, given, returned = self.call, *self.trace.samples
        if any(map(differ, given, samples_of(list(inputs)))):
            return
        with (
            hidden_from_modes(inputs[0]),
            random_state_kept(call.device),
            torch.no_grad(),
            SavedCounter(),
            Substituted(self._pairs),
        ):
            output = call.run_views(next(call.tiles([t.detach() for t in inputs])))
        if any(map(differ, returned, samples_of(output))):
            assert self.trace.modules is not None
            raise other_values(call.patch.name, "its output", self.trace.modules.remedy)

    def _tile(self, tile: Sequence[Tensor], given: list[Tensor | None], into: Sequence[Tensor]) -> None:
        """Recompute a tile and differentiate it.

        Args:
            tile: Its tensors.
            given: The gradients of the leaves of its output.
            into: Where the gradients of its per-token arguments go.
        """
        if self._compiled is not None and self._run_compiled(self._compiled, tile, given, into):
            return
        found: Sequence[Tensor | None] = [None] * len(into)
        roots = self._recompute(tile, given)
        targets = (*[tile[index] for index in self._wanted], *self._targets)
        if self._known is not None:  # in each backward pass: what was frozen, or not used, in the first call counts too
            nodes = [end.node if isinstance(end, GradientEdge) else end.grad_fn for end, _ in roots]
            check_leaves([node for node in nodes if node is not None], self._known, self.call.patch.name)
            self._known = None
        if roots and targets:
            ends, grads = zip(*roots)  # noqa: B905
            with self._outside:  # as the untiled backward pass
                found = differentiate(self._all, ends, targets, grads)
        for tensor in tile:
            if tensor._backward_hooks:  # all tiles come from one node, which would call them for each later tile
                tensor._backward_hooks.clear()
        for part, gradient in zip(into, found):  # noqa: B905
            part.zero_() if gradient is None else part.copy_(gradient)
        for (total, tensor), gradient in zip(self._direct, found[self._own :]):  # noqa: B905
            if gradient is not None:
                total.add_direct(tensor, gradient, self.call.patch.name)

    def _recompute(self, tile: Sequence[Tensor], given: list[Tensor | None]) -> list[tuple[Any, Tensor]]:
        """Run a tile with a graph; return where the graph ends, with the gradients there."""
        start = RandomState.now(self.call.device) if self.trace.random is not None else None
        outputs = None if self._last is None else self._without_last(self._last, tile, start)
        if self._last is None or outputs is None:
            outputs, roots = self._whole(tile, start), []
        else:
            roots = self._last.before(outputs, given)
        for output, gradient in zip(outputs, given, strict=True):
            if gradient is not None and output.requires_grad:
                roots.append((output, gradient))
        return roots

    def _outputs(self, tile: Sequence[Tensor]) -> list[Any]:
        with self._mode:
            output = self.call.arguments.call(self.call.work.function, tile)
        return [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)

    def _without_last(self, last: LastLinear, tile: Sequence[Tensor], start: RandomState | None) -> list[Any] | None:
        try:
            outputs = self._outputs(tile)
            last.check(outputs)
            return outputs
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not last.seen and not isinstance(error, CannotSkip):  # the tile's code failed by itself
                raise
            last.end()
            self._last, self._mode = None, Substituted(self._pairs)
            self.call.patch.learned.last.pop(self.call.key, None)
            if start is not None:
                start.set()
            return None

    def _whole(self, tile: Sequence[Tensor], start: RandomState | None) -> list[Any]:
        learned, key = self.call.patch.learned, self.call.key
        saved = learned.saved.get(key)
        if saved is not None:
            skip = LastProjectionSkip(saved)
            try:
                with skip:
                    outputs = self._outputs(tile)
                skip.check(outputs)
                if not skip.skipped:  # there is none
                    learned.saved[key] = None
                return outputs
            except CannotSkip:
                learned.saved[key] = None
                if start is not None:
                    start.set()
        return self._outputs(tile)

    def _run_compiled(
        self,
        compiled: CompiledTile,
        tile: Sequence[Tensor],
        given: Sequence[Tensor | None],
        into: Sequence[Tensor],
    ) -> bool:
        """Do the same compiled; return whether that could be done."""
        wanted = {index: gradient for index, gradient in enumerate(given) if gradient is not None}
        try:
            found = compiled.backward(self.call, tile, [s.leaf for s in self.sums], wanted, self.trace.layout)
        except CannotCompile as error:
            self._compiled = None
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


def _rows(columns: Sequence[Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the entries of all columns for one tile after the other."""
    return zip(*columns) if columns else repeat(())  # noqa: B905  # some repeat one entry


class LastLinear(Substituted):
    """Also leaves out the last projection of a tile, a linear module: see NOTE [What the recompute leaves out].

    Args:
        pairs: Each tensor and what is to be seen in its place.
        linear: The module.
        sums: The gradient sums of weight and bias; ``None`` for one that is absent or frozen.
        dtype: Autocast's, where it is enabled.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Tensor, Tensor]],
        linear: nn.Linear,
        sums: tuple[GradientSum | None, GradientSum | None],
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(pairs)
        self._own: tuple[Any, Any] | None = (linear.weight, linear.bias)
        weight = self._instead(linear.weight).detach()  # that of the forward pass
        self._sums, self._dtype, self._weight = sums, dtype, weight if dtype is None else weight.to(dtype)
        self._trains = any(total is not None for total in sums)
        self._stand_ins: dict[Any, _StandIn] = {}
        """Shared by tiles of one size: making one takes a node of autograd."""
        self._input: Tensor | None = None
        self._edge: Any = None
        """Where the input's graph ends. An edge, because the code may change the input in place afterwards."""
        self._version = 0
        self._output: _StandIn | None = None

    @property
    def seen(self) -> bool:
        """Whether this tile had a stand-in."""
        return self._input is not None

    def end(self) -> None:
        """Substitute nothing any more, and leave nothing out."""
        super().end()
        self._own = self._input = self._edge = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and self._own is not None and len(args) == 3:  # as nn.Linear calls it
            weight, bias = self._own
            if args[1] is weight and args[2] is bias:
                return self._instead_of(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def _instead_of(self, input: Tensor) -> Tensor:
        if self._output is not None and self._input is not None:
            self._output.read = True  # the module's own code may catch the exception
            raise CannotSkip
        self._input, self._version = input, input._version
        if input.requires_grad:
            node: Any = input.grad_fn
            self._edge = get_gradient_edge(input) if node is None else GradientEdge(node, input.output_nr)
        key = input.shape, input.dtype, input.requires_grad
        self._output = self._stand_ins.get(key)
        if self._output is None:
            self._output = self._stand_ins[key] = self._stand_in(input)
        return self._output

    def _stand_in(self, input: Any) -> _StandIn:
        dtype = self._dtype or input.dtype
        wrapped = is_traceable_wrapper_subclass(input) or is_traceable_wrapper_subclass(self._weight)
        if Precision.now(input.device).dtype != self._dtype:  # the module's own code changed it
            raise CannotSkip
        kept = input.dtype == torch.float64 and dtype != torch.float64  # autocast leaves float64 as it is
        if wrapped or kept or dtype.is_complex or self._weight.dtype != dtype:
            raise CannotSkip
        edge = torch.empty(0, device=input.device, requires_grad=input.requires_grad or self._trains)
        stand_in: _StandIn = _Unread.apply((*input.shape[:-1], self._weight.shape[0]), dtype, edge)
        return stand_in

    def check(self, outputs: Sequence[Any]) -> None:
        """Raise if the output of the projection was or can be read, or is not what the tile returned.

        Raises:
            CannotSkip: If so.
        """
        output = self._output
        there = outputs[0] is output if len(outputs) == 1 else sum(leaf is output for leaf in outputs) == 1
        if self._input is None or output is None or not there or output.read:
            raise CannotSkip
        if self._input._version != self._version and self._sums[0] is not None:
            raise CannotSkip
        if output._backward_hooks and hooked(output):
            raise CannotSkip

    def before(self, outputs: Sequence[Any], given: list[Tensor | None]) -> list[tuple[Any, Tensor]]:
        """Add the gradients of weight and bias to their sums, and return where the tile's graph ends, with a gradient.

        Args:
            outputs: What the tile returned, checked.
            given: The gradients of these; that of the projection is taken out.
        """
        where = 0 if len(outputs) == 1 else [leaf is self._output for leaf in outputs].index(True)
        input = self._input
        assert input is not None
        gradient, given[where] = given[where], None
        edge, self._edge, self._input = self._edge, None, None
        if gradient is None:
            return []
        rows, (weight, bias) = gradient.reshape(-1, gradient.shape[-1]), self._sums
        if weight is not None:
            flat = input.detach().reshape(-1, input.shape[-1])
            weight.add_product(rows.t(), flat if self._dtype is None else flat.to(self._dtype))
        if bias is not None:
            bias.add(rows.sum(0))
        if edge is None:
            return []
        grad = rows.mm(self._weight).view(input.shape)
        return [(edge, grad if self._dtype is None else grad.to(input.dtype))]


class _StandIn(Tensor):
    """A tensor without a value, which notes each use."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    read = False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, cls):
                tensor.read = True  # the module's own code may catch the exception
        raise CannotSkip


class _Unread(torch.autograd.Function):
    """Gives a stand-in a node, as the output of a projection has one."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, edge: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(_StandIn, shape, dtype=dtype, device=edge.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise CannotSkip
