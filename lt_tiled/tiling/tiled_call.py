"""One call of a tiled module, in the order in which it runs: forward without a graph, then each tile with one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from lt_tiled.tiling.call import Call
from lt_tiled.tiling.compiled import LeavesInPlace, compiled
from lt_tiled.tiling.graph import check_closed, check_leaves, kept_tensors
from lt_tiled.tiling.layout import OutputAssembly, OutputLayout, describe_output, each_tile, gradients_of_tiles
from lt_tiled.tiling.observe import Observation, is_recomputing, restored
from lt_tiled.tiling.recompute import (
    PlainSavedTensors,
    RandomState,
    differ,
    hidden_from_checkpoints,
    hidden_from_modes,
    other_values,
    random_state_kept,
    samples_of,
    saves_elsewhere,
)
from lt_tiled.tiling.skip import CannotSkip, LastLinear, NotesLinear
from lt_tiled.tiling.weights import GradientSum, Substituted, differentiate, paired, substituted


@dataclass(frozen=True)
class Trace:
    """What the forward pass of a call leaves for its backward pass."""

    layout: OutputLayout
    random: RandomState | None
    """The generators' state before the forward pass, if it drew random numbers."""
    modules: Observation | None
    """What it read of the modules, if a backward pass may follow."""
    samples: tuple[Sequence[Tensor], Sequence[Tensor]]
    """Of the call's inputs and of its first tile's output."""


class TiledCall(Call):
    """Runs the tiles of a call, forward and in the backward pass."""

    # Forward

    @hidden_from_checkpoints()
    def forward(
        self, inputs: Sequence[Tensor], learn: bool, observed: Observation | None = None
    ) -> tuple[list[Any], Trace]:
        """Compute all tiles without a graph.

        Args:
            inputs: The tensors of the call's arguments.
            learn: Whether a backward pass may follow: learn once what a tile's last projection is.
            observed: What the modules held when the call was made, if that was earlier.

        Returns:
            The leaves of the output in the untiled shape, and what the backward pass needs to know.
        """
        start, modules = RandomState.now(self.device), (observed or self.observe()) if learn else None
        samples = list[Tensor](), list[Tensor]()
        learns = learn and not self.compiles and self.key not in self.patch.learned.last
        assembly: OutputAssembly | None = None
        run = self.runner()
        # Graphs that the work makes for itself are hidden from an activation checkpoint around it.
        with torch.no_grad(), self.autocast.context(), PlainSavedTensors():
            for index, tile in each_tile(enumerate(self.tiles([t.detach() for t in inputs]))):
                output = self._find_last(inputs) if learns else run(tile)
                learns = False
                if assembly is None:
                    low, high = self.bounds[0]
                    layout = describe_output(output, self.shape, high - low, self.patch.name)
                    assembly = OutputAssembly(layout, self.shape, self.bounds, self.patch.name)
                    if modules is not None:
                        samples = samples_of(list(inputs)), samples_of(output)
                assembly.add(output, index)
                del output
        random = None if start.same_as(RandomState.now(self.device)) else start
        assert assembly is not None
        if modules is not None:
            modules.end_forward()
        return assembly.leaves, Trace(assembly.layout, random, modules, samples)

    def observe(self) -> Observation | None:
        """Return what the modules hold now, unless no backward pass will follow."""
        if is_recomputing():
            return None
        history = self.patch.learned.histories[self.work.key]
        remedy = "lt_tiled.untile() the module"
        return Observation(self.patch.name, self.work.modules, remedy, history, substituted=True)

    def _find_last(self, inputs: Sequence[Tensor]) -> Any:
        """Run the first tile with a graph, and learn whether a linear module returns its output."""
        sums = self.sums(inputs)
        own, count = [s.leaf for s in sums], len(self.weights)
        with torch.enable_grad():
            leaves, kept = self.leaves(inputs, own[count:]), kept_tensors(self.work)
            with substituted(self.weights, own[:count], NotesLinear) as mode:
                output = self.run_views(next(self.tiles(leaves)))
            known = [*leaves, *own, *(t for w in self.weights for t in w.now())]
            check_closed(output, known, self.work, kept, self.patch.name)
        # Hooks inside would read values that are skipped.
        hooked = any(part._forward_hooks for part in self.work.parts if part not in self.work.modules)
        self.patch.learned.last[self.key] = None if hooked else mode.part_of(self.work, pytree.tree_leaves(output))
        return pytree.tree_map_only(Tensor, torch.Tensor.detach, output)

    def sums(self, inputs: Sequence[Tensor]) -> list[GradientSum]:
        """Return gradient sums of the weights, then of the arguments that every tile sees in full."""
        triples = zip(inputs, self.wants_grad, self.per_token, strict=True)
        wholes = [t for t, wants, per_token in triples if wants and not per_token]
        tensors = (*(w.tensor for w in self.weights), *wholes)
        return [GradientSum(tensor, self.patch.tiling.accumulate) for tensor in tensors]

    @property
    def compiles(self) -> bool:
        """Whether tiles run compiled."""
        return self.patch.tiling.compile is not False

    def runner(self) -> Callable[[Sequence[Tensor]], Any]:
        """Return what runs the work on the tensors of a tile as it sees them, compiled where the policy asks for it."""
        function, options = self.work.function, self.patch.tiling.compile
        if options is not False and self.compiles:
            known = self.patch.learned.compiled
            if self.work.key not in known:
                known[self.work.key] = compiled(function, options)
            function = known[self.work.key]
        return partial(self.arguments.call, function)

    # Backward

    def backward(
        self, trace: Trace, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Recompute each tile with a graph and sum its gradients.

        Args:
            trace: What the forward pass left.
            inputs: The tensors of the call's arguments, as in the forward pass.
            gradients: One for each leaf of the output, in the untiled shape; ``None`` for leaves without one.

        Returns:
            A gradient for each tensor argument that wants one, then one for each trainable weight.
        """
        random = random_state_kept(self.device, trace.random) if trace.random is not None else nullcontext()
        with restored(trace.modules, "its backward pass"), self.autocast.context(), random:
            return Backward(self, trace, inputs).run(gradients)

    def compare(self, trace: Trace, inputs: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Refuse a recompute that computes other outputs than the forward pass: see NOTE [What no observation sees].

        Args:
            trace: What the forward pass left.
            inputs: The tensors of the call's arguments.
            pairs: Each weight and what is to be seen in its place.

        Raises:
            RuntimeError: If it does.
        """
        given, returned = trace.samples
        now = samples_of(list(inputs))
        if any(map(differ, given, now)):
            return
        with (
            hidden_from_modes(returned[0]),
            random_state_kept(self.device),
            torch.no_grad(),
            PlainSavedTensors(),
            Substituted(pairs),
        ):
            output = self.run_views(next(self.tiles([t.detach() for t in inputs])))
        if any(map(differ, returned, samples_of(output))):
            assert trace.modules is not None
            raise other_values(self.patch.name, "its output", trace.modules.remedy)

    def refuse_hooks_without_gradient(self, gradients: Sequence[Tensor | None]) -> None:
        """Refuse to end a backward pass in which the hook of an unused weight would be called with ``None``.

        Args:
            gradients: What :meth:`backward` returned.

        Raises:
            RuntimeError: If there is one.
        """
        of_weights = gradients[len(gradients) - len(self.weights) :]
        for weight, gradient in zip(self.weights, of_weights, strict=True):
            if gradient is None and weight.hooked():
                owner, name = weight.places[0]
                raise RuntimeError(
                    f"{self.patch.name}: {type(owner).__name__}.{name} has a hook and no gradient in this backward"
                    " pass, so the hook would be called with None. Remove the hook, or lt_tiled.untile() the module."
                )


class Backward:
    """The recompute of a call's tiles, and their gradients. What is the same for all tiles is made once.

    Args:
        call: The call.
        trace: What its forward pass left.
        inputs: The tensors of the call's arguments, as in the forward pass.
    """

    def __init__(self, call: TiledCall, trace: Trace, inputs: Sequence[Tensor]) -> None:
        self.call, self.trace, self.inputs = call, trace, inputs
        pairs = zip(call.wants_grad, call.per_token, strict=True)
        self._wanted = [index for index, (wants, per_token) in enumerate(pairs) if wants and per_token]
        self._sums = call.sums(inputs)
        self._there = paired(call.weights, self._sums[: len(call.weights)])
        # What code gets that does not get the leaves: see NOTE [Substitution].
        self._direct = [(total, t) for t, total in self._there if t.requires_grad]
        edges = [s.edge for s in self._sums]
        self._targets, self._own = (*edges, *(t for _, t in self._direct)), len(self._wanted) + len(edges)
        self._pairs = [(t, total.leaf) for t, total in self._there]
        self._mode = self._skip()
        self._outside, self._run_work = call.autocast.disabled(), call.runner()
        self._known: set[int] | None = None
        """The leaves that the graph of the first tile may have."""

    def _skip(self) -> LastLinear | Substituted | LeavesInPlace:
        """Return the mode in which tiles are recomputed: without the last projection if that is known to work."""
        if self.call.compiles:
            count = len(self.call.weights)
            return LeavesInPlace(self.call.weights, [total.leaf for total in self._sums[:count]])
        last = self.call.patch.learned.last.get(self.call.key)
        linear = None if last is None else self.call.work.parts[last]
        if type(linear) is not nn.Linear:  # it may be another module since
            return Substituted(self._pairs)
        sums = {id(t): total for t, total in self._there}
        own = sums.get(id(linear.weight)), sums.get(id(linear.bias))
        return LastLinear(self._pairs, linear, own, self.call.autocast.dtype)

    def _skip_no_more(self) -> None:
        """Recompute tiles in full, in later steps as well."""
        self.call.patch.learned.last[self.call.key] = None
        self._mode.end()
        self._mode = Substituted(self._pairs)

    def run(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run all tiles, and return what :meth:`TiledCall.backward` does."""
        call, inputs, bounds = self.call, self.inputs, self.call.bounds
        results = [inputs[i].new_empty(inputs[i].shape) for i in self._wanted]
        parts = [call.shape.tiles(result, bounds) for result in results]
        given = gradients_of_tiles(gradients, self.trace.layout, call.shape, bounds)
        # The compiler may compile a tile twice, with other rounding.
        if self.trace.samples[1] and not call.compiles and call.due():
            call.compare(self.trace, inputs, self._pairs)
        try:
            # An offloader's hooks must not see a tile; without hooks, hiding costs time for nothing.
            with torch.enable_grad(), PlainSavedTensors() if saves_elsewhere() else nullcontext():
                own_leaves, direct = [s.leaf for s in self._sums], [t for _, t in self._direct]
                leaves = call.leaves(inputs, own_leaves[len(call.weights) :])
                held = [t for part in call.work.parts for t in (*part._parameters.values(), *part._buffers.values())]
                self._known = {id(t) for t in (*leaves, *own_leaves, *direct, *held)}
                tiles = call.tiles(leaves)
                for tile, own, into in each_tile(zip(tiles, rows_of(given), rows_of(parts))):  # noqa: B905
                    self._tile(tile, list(own), into)
        finally:
            self._mode.end()
        totals, zeros = iter(self._sums), call.patch.needs.zeros_for_unused
        of_weights = [next(totals).take(zeros) for _ in call.weights]
        found, pairs = iter(results), zip(call.wants_grad, call.per_token, strict=True)
        arguments = [next(found) if per_token else next(totals).take() for wants, per_token in pairs if wants]
        return [*arguments, *of_weights]

    def _tile(self, tile: Sequence[Tensor], given: list[Tensor | None], into: Sequence[Tensor]) -> None:
        """Recompute a tile and differentiate it.

        Args:
            tile: Its tensors.
            given: The gradients of the leaves of its output.
            into: Where the gradients of its per-token arguments go.
        """
        outputs = self._recompute(tile)
        roots = self._mode.before(outputs, given) if isinstance(self._mode, LastLinear) else []
        for output, gradient in zip(outputs, given, strict=True):
            if gradient is not None and output.requires_grad:
                roots.append((output, gradient))
        if self._known is not None:  # in each backward pass: what was frozen, or not used, in the first call counts too
            nodes = [end.node if isinstance(end, GradientEdge) else end.grad_fn for end, _ in roots]
            check_leaves([node for node in nodes if node is not None], self._known, self.call.patch.name)
            self._known = None
        targets = (*[tile[index] for index in self._wanted], *self._targets)
        found: Sequence[Tensor | None] = [None] * len(targets)
        if roots and targets:
            ends, grads = zip(*roots)  # noqa: B905
            with self._outside:  # as the untiled backward pass
                found = differentiate(self._sums, ends, targets, grads)
        for tensor in tile:
            if tensor._backward_hooks:  # all tiles come from one node, which would call them for each later tile
                tensor._backward_hooks.clear()
        for part, gradient in zip(into, found):  # noqa: B905
            part.zero_() if gradient is None else part.copy_(gradient)
        for (total, tensor), gradient in zip(self._direct, found[self._own :]):  # noqa: B905
            if gradient is not None:
                total.add_direct(tensor, gradient, self.call.patch.name)

    def _recompute(self, tile: Sequence[Tensor]) -> Sequence[Any]:
        """Run a tile with a graph, and return the leaves of its output."""
        start = None if self.trace.random is None else RandomState.now(self.call.device)
        mode = self._mode
        if isinstance(mode, LastLinear):
            try:
                outputs = self._run(tile)
                mode.check(outputs)
                return outputs
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not (mode.skipped or isinstance(error, CannotSkip)):  # the tile's code failed by itself
                    raise
            self._skip_no_more()
            if start is not None:
                start.set()
        return self._run(tile)

    def _run(self, tile: Sequence[Tensor]) -> list[Any]:
        with self._mode:
            output = self._run_work(tile)
        return [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)


def rows_of(columns: Sequence[Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the entries of all columns for one tile after the other."""
    return zip(*columns) if columns else repeat(())  # noqa: B905  # some repeat one entry
