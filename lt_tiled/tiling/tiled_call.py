"""One call of a tiled module: its tiles, run forward without a graph and in the backward pass with one each."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from lt_tiled._log import inform, warn
from lt_tiled.tiling.backward import Backward
from lt_tiled.tiling.compiled import CannotCompile, CompiledTile
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.layout import (
    Arguments,
    Bounds,
    OutputAssembly,
    OutputLayout,
    TokenShape,
    compare_outputs,
    describe_output,
    each_tile,
    split_arguments,
    tile_bounds,
    whole_output,
)
from lt_tiled.tiling.observe import Observation, is_recomputing, restored
from lt_tiled.tiling.recompute import (
    Due,
    Precision,
    RandomState,
    SavedCounter,
    hidden_from_checkpoints,
    hidden_from_modes,
    never,
    random_state_kept,
    samples_of,
)
from lt_tiled.tiling.skip import NotesLinear
from lt_tiled.tiling.state import TiledPatch, Work
from lt_tiled.tiling.weights import GradientSum, substituted, trainable_weights


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


class TiledCall:
    """One call of a tiled module. It holds no activation: the anchor saves those.

    Args:
        work: What runs on each tile.
        patch: The state of the tiled module.
        inputs: The tensors among the arguments.
        arguments: How the work is called with them.
        shape: The leading dimensions of the hidden states.
        bounds: The tiles.
    """

    due: Due = staticmethod(never)
    """Whether the recompute is to be compared with the forward pass."""

    def __init__(
        self,
        work: Work,
        patch: TiledPatch,
        inputs: Sequence[Tensor],
        arguments: Arguments,
        shape: TokenShape,
        bounds: Sequence[Bounds],
    ) -> None:
        self.work, self.patch, self.arguments, self.shape, self.bounds = work, patch, arguments, shape, bounds
        self.per_token = [shape.covers(t) for t in inputs]
        self.wants_grad = [t.requires_grad for t in inputs]
        self.other_shapes = [None if p else t.shape for t, p in zip(inputs, self.per_token, strict=True)]
        self.device = next(t for t, per_token in zip(inputs, self.per_token, strict=True) if per_token).device
        self.autocast = Precision.now(self.device)
        self.weights = trainable_weights(work.parts()) if torch.is_grad_enabled() else []

    @classmethod
    def of(
        cls, work: Work, patch: TiledPatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[TiledCall, list[Tensor]] | None:
        """Return the call and the tensors among its arguments, or ``None`` where there are no two tiles to run."""
        # By the module that runs last: with a graph it may run together with a neighbor, and without one alone.
        runs = patch.learned.runs[tuple(map(id, work.modules[-1:]))]
        due = never if is_recomputing() else runs.begin()
        inputs, arguments = split_arguments(args, kwargs)
        hidden = next((t for t in inputs if t.is_floating_point() and t.dim() > 1), None)
        if hidden is None:
            return None
        if hidden.is_nested or hasattr(hidden, "placements"):  # a DTensor, whose tokens may be spread over ranks
            inform(f"{patch.name} runs untiled on nested tensors and DTensors", once=f"nested {patch.name}")
            return None
        arguments.refuse_gradients_inside(patch.name)
        shape, widths = TokenShape(hidden.shape[:-1]), patch.found.widths
        bounds = tile_bounds(patch.tiling, shape.tokens, hidden.shape[-1], widths)
        if len(bounds) < 2 and not (patch.needs.same_order and torch.is_grad_enabled()):
            return None
        call = cls(work, patch, inputs, arguments, shape, bounds)
        if any(is_lazy(p) for module in work.modules for p in module.parameters()):
            call.probe(inputs, 2)  # which gives lazy modules their weights
            call = cls(work, patch, inputs, arguments, shape, bounds)
        call.due = due
        return call, inputs

    @property
    def differentiable(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and (any(self.wants_grad) or bool(self.weights))

    @cached_property
    def key(self) -> Hashable:
        """Tells calls apart whose tiles run different code."""
        switches = tuple(_switches(part) for part in self.work.parts())
        kinds = (*self.wants_grad, *self.other_shapes)
        return self.work.key, self.arguments.tree, switches, kinds, self.autocast

    @property
    def mode(self) -> Hashable:
        """Tells apart what the self-check must see by itself.

        Auxiliary losses are computed in training only, a batch of one row does not show what mixes rows, and frozen
        weights or arguments not what their gradients show.
        """
        several = (len(self.bounds) > 1, *(size > 1 for size in self.shape.lead))
        return self.key, torch.is_grad_enabled(), several, len(self.weights)

    @property
    def checked(self) -> bool:
        """Whether the work passed the self-check in this mode, or has no tokens to check."""
        return self.shape.tokens == 0 or self.mode in self.patch.learned.checked

    # Running one tile

    def run_tile(self, tensors: Sequence[Tensor]) -> Any:
        """Run the module's own forward on per-token arguments ``[t, ...]``, which it sees as ``[1, t, ...]``."""
        pairs = zip(tensors, self.per_token, strict=True)
        return self.run_views([self.shape.as_tile(t) if per_token else t.view_as(t) for t, per_token in pairs])

    def run_views(self, tensors: Sequence[Tensor]) -> Any:
        """Run the module's own forward on the tensors of a tile as it sees them."""
        return self.arguments.call(self.work.function, tensors)

    def probe(self, inputs: Sequence[Tensor], tokens: int) -> Any:
        """Run the first tokens without a graph, and leave the random generators as they were."""
        with torch.no_grad(), random_state_kept(self.device), SavedCounter():
            return self.run_tile(self.cut(self.flat(inputs), slice(0, tokens)))

    def signature(self, inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of the output, from a run of two tokens that is made once.

        Args:
            inputs: The tensors of the call's arguments.

        Returns:
            ``None`` if the output is not one per-token tensor, or random numbers are drawn: an output that is used by
            a neighbor and once more would be computed with different ones.
        """
        key, known = (self.key, tuple(t.dtype for t in inputs)), self.patch.learned.signatures
        if key not in known:
            few = min(2, self.shape.tokens) or 2  # none would not show whether random numbers are drawn
            with hidden_from_modes(inputs[0]), random_state_kept(self.device), torch.no_grad(), SavedCounter():
                flat = self.flat(inputs)
                if self.shape.tokens == 0:
                    flat = [t.new_zeros(2, *t.shape[1:]) if p else t for t, p in zip(flat, self.per_token, strict=True)]
                start = RandomState.now(self.device)
                output = self.run_tile(self.cut(flat, slice(0, few)))
                repeatable = start.same_as(RandomState.now(self.device))
            one = repeatable and describe_output(output, self.shape, few) is not None
            known[key] = (output.shape[len(self.shape.lead) :], output.dtype) if one else None
        found = known[key]
        return None if found is None else ((*self.shape.lead, *found[0]), found[1])

    def leaves(self, inputs: Sequence[Tensor], wholes: Sequence[GradientSum]) -> list[Tensor]:
        """Return the arguments as the beginning of new graphs, where they want a gradient."""
        # Views: leaves that require grad break register_multi_grad_hook (FlopCounterMode, FSDP2) under autograd.grad.
        whole = iter(wholes)
        return [
            t.detach().requires_grad_(wants) if per_token or not wants else (leaf := next(whole).leaf).view_as(leaf)
            for t, wants, per_token in zip(inputs, self.wants_grad, self.per_token, strict=True)
        ]

    def tiles(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of each tile, as the module sees them."""
        pairs = zip(tensors, self.per_token, strict=True)
        columns = [self.shape.tiles(t, self.bounds) if per_token else repeat(t) for t, per_token in pairs]
        return zip(*columns)  # noqa: B905

    @property
    def compiled(self) -> CompiledTile | None:
        """The compiled code, unless a tile showed that it cannot be compiled."""
        options = False if self.patch.learned.uncompiled else self.patch.tiling.compile
        return None if options is False else CompiledTile.of(self.patch.found.kind, options)

    def _run_compiled(self, tile: Sequence[Tensor]) -> Any:
        if (compiled := self.compiled) is not None:
            try:
                return compiled.forward(self, tile)
            except CannotCompile as error:
                self.compile_no_more(error)
        return self.run_views(tile)

    def compile_no_more(self, error: CannotCompile, random: bool = False) -> None:
        """Run uncompiled from now on.

        Raises:
            RuntimeError: If compiled code drew random numbers for the forward pass of this backward pass.
        """
        if random:
            raise RuntimeError(
                f"{self.patch.name}: the forward pass of its tiles was compiled and their backward pass cannot be"
                f" ({error}); uncompiled it would draw other random numbers. Set compile=False in its Tiling."
            ) from error
        self.patch.learned.uncompiled = True
        warn(f"{self.patch.name} runs uncompiled, because its tiles are not one graph: {error}")

    def flat(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments without a graph, each per-token one as ``[tokens, ...]``."""
        pairs = zip(inputs, self.per_token, strict=True)
        return [self.shape.flatten(t.detach()) if per_token else t.detach() for t, per_token in pairs]

    def cut(self, flat: Sequence[Tensor], index: slice | Tensor) -> list[Tensor]:
        """Return the tokens at ``index`` of each per-token argument, and the other arguments in full."""
        return [t[index] if per_token else t for t, per_token in zip(flat, self.per_token, strict=True)]

    def layout_of(self, output: Any, inputs: Sequence[Tensor], tokens: int) -> OutputLayout:
        """Return how outputs like this one go together: from its shape, or from runs on two and on three tokens."""
        layout = describe_output(output, self.shape, tokens)
        if layout is not None:
            return layout
        if len(self.bounds) == 1:
            return whole_output(output, self.patch.name)
        leaves, tree = pytree.tree_flatten(output)
        kinds = tuple(leaf.dim() if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        key = (self.work.key, tree, kinds, len(self.shape.lead))
        layouts, reductions = self.patch.learned.layouts, self.patch.tiling.reductions
        if key not in layouts:
            outputs = self.probe(inputs, 2), self.probe(inputs, 3)
            layouts[key] = compare_outputs(outputs, (2, 3), self.shape, reductions, self.patch.name)
        return layouts[key]

    # Forward

    @hidden_from_checkpoints()
    def forward(self, inputs: Sequence[Tensor], learn: bool) -> tuple[list[Any], Trace]:
        """Compute all tiles without a graph.

        Args:
            inputs: The tensors of the call's arguments.
            learn: Whether a backward pass may follow: count once what a tile's graph saves.

        Returns:
            The leaves of the output in the untiled shape, and what the backward pass needs to know.
        """
        start, modules = RandomState.now(self.device), self.observe() if learn else None
        samples = list[Tensor](), list[Tensor]()
        counts = learn and self.key not in self.patch.learned.saved
        assembly: OutputAssembly | None = None
        # The counter hides graphs that the work makes for itself from an activation checkpoint around it.
        with torch.no_grad(), self.autocast.context(), SavedCounter():
            if counts and self.compiled is not None:
                with random_state_kept(self.device):  # uncompiled: its random numbers are not those of the recompute
                    self._count_saved(inputs)
                    counts = False
            uncompiled = partial(self.arguments.call, self.work.function)
            run = uncompiled if self.compiled is None else self._run_compiled
            for index, tile in each_tile(enumerate(self.tiles([t.detach() for t in inputs]))):
                output = self._count_saved(inputs) if counts else run(tile)
                counts = False
                if assembly is None:
                    low, high = self.bounds[0]
                    layout = self.layout_of(output, inputs, high - low)
                    assembly = OutputAssembly(layout, self.shape, self.bounds, self.patch.name)
                    if modules is not None:
                        samples = samples_of(list(inputs)), samples_of(output)
                assembly.add(output, index)
                del output
        random = None if start.same_as(RandomState.now(self.device)) else start
        assert assembly is not None
        seen = None if modules is None else modules.end_forward()
        return assembly.leaves, Trace(assembly.layout, random, seen, samples)

    def observe(self) -> Observation | None:
        """Return what the modules hold now, unless no backward pass will follow."""
        if is_recomputing():
            return None
        history = self.patch.learned.histories[self.work.key]
        remedy = "lt_tiled.untile() the module"
        return Observation(self.patch.name, self.work.modules, remedy, history, substituted=True)

    def _count_saved(self, inputs: Sequence[Tensor]) -> Any:
        """Run the first tile with a graph; learn how many tensors it saves and if its last part is a linear module."""
        counter = SavedCounter()
        with (
            self._sums([w.tensor for w in self.weights]) as sums,
            self._sums(self._wholes(inputs)) as wholes,
            torch.enable_grad(),
        ):
            leaves, kept = self.leaves(inputs, wholes), kept_tensors(self.work)
            with counter, substituted(self.weights, [s.leaf for s in sums], NotesLinear) as mode:
                output = self.run_views(next(self.tiles(leaves)))
            known = [*leaves, *(s.leaf for s in (*sums, *wholes)), *(t for w in self.weights for t in w.now())]
            check_closed(output, known, self.work, kept, self.patch.name)
        # Hooks inside would read values that are skipped.
        hooked = any(part._forward_hooks for part in self.work.parts() if part not in self.work.modules)
        learned, last = self.patch.learned, mode.part_of(self.work, pytree.tree_leaves(output))
        learned.saved[self.key] = None if hooked else counter.count
        if last is not None and not hooked:
            learned.last[self.key] = last
        return pytree.tree_map_only(Tensor, torch.Tensor.detach, output)

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
        weights = [w.tensor for w in self.weights]
        with (
            restored(trace.modules, "its backward pass"),
            self._sums(weights) as sums,
            self._sums(self._wholes(inputs)) as wholes,
        ):
            with self.autocast.context(), random:
                parts = iter(Backward(self, trace, sums, wholes).run(inputs, gradients))
            totals = iter([s.take() for s in wholes])
            pairs = zip(self.wants_grad, self.per_token, strict=True)
            arguments = [next(parts) if per_token else next(totals) for wants, per_token in pairs if wants]
            return [*arguments, *(s.take(self.patch.needs.zeros_for_unused) for s in sums)]

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

    def _wholes(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments that every tile sees in full and that want a gradient."""
        triples = zip(inputs, self.wants_grad, self.per_token, strict=True)
        return [t for t, wants, per_token in triples if wants and not per_token]

    @contextmanager
    def _sums(self, tensors: Sequence[Tensor]) -> Iterator[list[GradientSum]]:
        """Return a sum for the gradients of each tensor, closed at the end."""
        sums = [GradientSum(tensor, self.patch.tiling.accumulate) for tensor in tensors]
        try:
            yield sums
        finally:
            for total in sums:
                total.close()


def _switches(part: nn.Module) -> tuple[Hashable, ...]:
    """Return what tells whether a module runs other code, or reaches other tensors, than before.

    These are its flags and names (the training mode, the active adapters), its hooks, and its attributes with a graph.
    """
    found: list[Hashable] = [len(part._forward_hooks), len(part._forward_pre_hooks)]
    for name, value in part.__dict__.items():
        if type(value) is bool or type(value) is str:
            found.append(value)
        elif type(value) is list and value and all(type(entry) is str for entry in value):
            found.append(tuple(value))
        elif isinstance(value, Tensor) and value.requires_grad:
            found.append(name)
    return tuple(found)
