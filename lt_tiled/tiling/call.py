"""One call of a tiled module: its arguments, its tiles, its weights, how one tile runs, and the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.policies import Tiling
from lt_tiled.tiling.compiled import compiled
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.layout import (
    Arguments,
    Bounds,
    OutputAssembly,
    OutputLayout,
    TokenShape,
    describe_output,
    each_tile,
    split_arguments,
    tile_bounds,
)
from lt_tiled.tiling.observe import Observation, is_recomputing
from lt_tiled.tiling.recompute import (
    Due,
    PlainSavedTensors,
    Precision,
    RandomState,
    hidden_from_checkpoints,
    hidden_from_modes,
    never,
    random_state_kept,
    samples_of,
)
from lt_tiled.tiling.skip import NotesLinear
from lt_tiled.tiling.state import Tiled
from lt_tiled.tiling.weights import GradientSum, Work, substituted, trainable_weights


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
    is_short = False
    """Whether it would run untiled, and is to be checked alone."""

    def __init__(
        self,
        work: Work,
        patch: Tiled,
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
        self.weights = trainable_weights(work.parts) if torch.is_grad_enabled() else []

    @classmethod
    def of(
        cls, work: Work, patch: Tiled, args: tuple[Any, ...], kwargs: dict[str, Any], short: bool = False
    ) -> tuple[TiledCall, list[Tensor]] | None:
        """Return the call and the tensors among its arguments, or ``None`` to run untiled.

        That is with fewer than two tiles, unless all ranks need the same order, and without plain hidden states.

        Args:
            work: What runs on each tile.
            patch: The state of the tiled module.
            args: The arguments of the call.
            kwargs: Those by name.
            short: Return two tiles, to be checked, for a call with enough tokens for them that would run untiled.
        """
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
        shape, sizes = TokenShape(hidden.shape[:-1]), patch.found.sizes
        bounds = tile_bounds(patch.tiling, shape.tokens, hidden.shape[-1], sizes)
        is_short = len(bounds) < 2 and not (patch.needs.same_order and torch.is_grad_enabled())
        if is_short:
            bounds = tile_bounds(Tiling(num_shards=2), shape.tokens, hidden.shape[-1], sizes)
            if not short or len(bounds) < 2:
                return None
        call = cls(work, patch, inputs, arguments, shape, bounds)
        call.due, call.is_short = due, is_short
        return call, inputs

    @property
    def differentiable(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and (any(self.wants_grad) or bool(self.weights))

    @cached_property
    def key(self) -> tuple[Hashable, ...]:
        """Identifies the code that a tile runs."""
        switches = tuple(map(_switches, self.work.parts))
        kinds = (*self.wants_grad, *self.other_shapes)
        return self.work.key, self.arguments.tree, switches, kinds, self.autocast

    @property
    def mode(self) -> tuple[Any, ...]:
        """Identifies a case that needs a self-check of its own.

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
        """Run the work on per-token arguments ``[t, ...]``, which it sees as ``[1, t, ...]``."""
        pairs = zip(tensors, self.per_token, strict=True)
        return self.run_views([self.shape.as_tile(t) if per_token else t.view_as(t) for t, per_token in pairs])

    def run_views(self, tensors: Sequence[Tensor]) -> Any:
        """Run the work on the tensors of a tile as it sees them."""
        return self.arguments.call(self.work.function, tensors)

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
            with hidden_from_modes(inputs[0]), random_state_kept(self.device), torch.no_grad(), PlainSavedTensors():
                flat = self.flat(inputs)
                if self.shape.tokens == 0:
                    flat = [t.new_zeros(2, *t.shape[1:]) if p else t for t, p in zip(flat, self.per_token, strict=True)]
                start = RandomState.now(self.device)
                output = self.run_tile(self.cut(flat, slice(0, few)))
                repeatable = start.same_as(RandomState.now(self.device))
            lead = self.shape.tile_lead(few)
            one = repeatable and isinstance(output, Tensor) and output.shape[: len(lead)] == lead
            known[key] = (output.shape[len(self.shape.lead) :], output.dtype) if one else None
        found = known[key]
        return None if found is None else ((*self.shape.lead, *found[0]), found[1])

    def leaves(self, inputs: Sequence[Tensor], wholes: Iterable[Tensor]) -> list[Tensor]:
        """Return the arguments as leaves of new graphs, those that every tile sees in full as views of ``wholes``."""
        # Views: leaves that require grad break register_multi_grad_hook (FlopCounterMode, FSDP2) under autograd.grad.
        whole = iter(wholes)
        leaves: list[Tensor] = []
        for t, wants, per_token in zip(inputs, self.wants_grad, self.per_token, strict=True):
            if per_token or not wants:
                leaves.append(t.detach().requires_grad_(wants))
            else:
                leaves.append((leaf := next(whole)).view_as(leaf))
        return leaves

    def tiles(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of each tile, as the module sees them."""
        columns: list[Iterable[Tensor]] = []
        for tensor, per_token in zip(tensors, self.per_token, strict=True):
            columns.append(self.shape.tiles(tensor, self.bounds) if per_token else repeat(tensor))
        return zip(*columns)  # noqa: B905

    def flat(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments without a graph, each per-token one as ``[tokens, ...]``."""
        pairs = zip(inputs, self.per_token, strict=True)
        return [self.shape.flatten(t.detach()) if per_token else t.detach() for t, per_token in pairs]

    def cut(self, flat: Sequence[Tensor], index: slice | Tensor) -> list[Tensor]:
        """Return the tokens at ``index`` of each per-token argument, and the other arguments in full."""
        return [t[index] if per_token else t for t, per_token in zip(flat, self.per_token, strict=True)]

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
        return Observation(
            self.patch.name, self.work.modules, "lt_tiled.untile() the module", history, substituted=True
        )

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


def _switches(part: nn.Module) -> tuple[Hashable, ...]:
    """Return what tells whether a module runs other code, or reaches other tensors, than before.

    These are its flags and names (the training mode, the active adapters), which numbers are zero, its hooks, and its
    attributes with a graph.
    """
    found: list[Hashable] = [len(part._forward_hooks), len(part._forward_pre_hooks)]
    for name, value in part.__dict__.items():
        if type(value) is bool or type(value) is str:
            found.append(value)
        elif type(value) is int or type(value) is float:
            found.append(value == 0)  # often turns something off, such as a loss that is added
        elif type(value) is list and value and all(type(entry) is str for entry in value):
            found.append(tuple(value))
        elif isinstance(value, Tensor) and value.requires_grad:
            found.append(name)
    return tuple(found)
