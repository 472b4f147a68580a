"""One call of a tiled module: its tiles, run forward without a graph and backward with one each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled._arguments import split_arguments
from lt_tiled._log import warn
from lt_tiled.tiling.closed import check_closed, kept_tensors
from lt_tiled.tiling.compiled import CannotCompile, CompiledTile, token_dimension
from lt_tiled.tiling.layout import (
    Bounds,
    OutputAssembly,
    OutputLayout,
    TokenShape,
    compare_outputs,
    describe_output,
    flat_gradient,
    tile_bounds,
    tile_gradient,
)
from lt_tiled.tiling.recompute import (
    AutocastState,
    CannotSkip,
    LastProjectionSkip,
    PackCounter,
    RandomState,
    random_state_kept,
)
from lt_tiled.tiling.state import TileMark
from lt_tiled.tiling.weights import GradientSum, Weight, gradient_sums, substituted
from lt_tiled.tiling.work import Work


class TiledCall:
    """What the forward and the backward of one call share. It holds no activation: those are the anchor's."""

    def __init__(self, work: Work, mark: TileMark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.work = work
        self.mark = mark
        self.inputs, self.arguments = split_arguments(args, kwargs)
        hidden = next((t for t in self.inputs if t.is_floating_point() and t.dim() > 1), None)
        self.bounds: list[Bounds] = []
        self.weights: list[Weight] = []
        if hidden is None:  # nothing to cut
            return
        self.device = hidden.device
        self.shape = TokenShape(hidden.shape[:-1])
        self.bounds = tile_bounds(
            mark.tiling, self.shape.tokens, hidden.shape[-1], mark.widths[1] if mark.widths else None
        )
        self.per_token = [self.shape.covers(t) for t in self.inputs]
        self.wants_grad = [t.requires_grad for t in self.inputs]
        self.autocast = AutocastState.now(self.device)
        self.random: RandomState | None = None
        self.layout: OutputLayout | None = None
        self.compiled = (
            CompiledTile.of(mark.kind, mark.tiling.compile) if not mark.plain and len(self.bounds) > 1 else None
        )
        self.anchor: Any = None

    @property
    def differentiable(self) -> bool:
        return torch.is_grad_enabled() and (any(self.wants_grad) or bool(self.weights))

    # Running one tile

    def run_tile(self, tensors: Sequence[Tensor]) -> Any:
        """Run the module's own forward on one tile: ``[t, ...]`` for per-token arguments, the others whole."""
        args, kwargs = self.arguments.call_with(self._views(tensors))
        return self.work.function(*args, **kwargs)

    def _views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # Views, because leaves that require grad break register_multi_grad_hook (FlopCounterMode, FSDP2) under
        # autograd.grad.
        return [
            self.shape.as_tile(t) if per_token else t.view_as(t)
            for t, per_token in zip(tensors, self.per_token, strict=True)
        ]

    def _run_compiled(self, tile: Sequence[Tensor]) -> Any:
        """Run a tile compiled, or not if it cannot be compiled, which only the first tile finds out."""
        if self.compiled is not None:
            try:
                return self.compiled.forward(self.work, self.arguments, self._marked(self._views(tile)))
            except CannotCompile as error:
                self._compile_no_more(error)
        return self.run_tile(tile)

    def _marked(self, views: list[Tensor]) -> list[Tensor]:
        """The views, with their tokens known to the compiler as a number that changes: the last tile is shorter."""
        for view, per_token in zip(views, self.per_token, strict=True):
            if per_token:
                token_dimension(view, len(self.shape.lead) - 1)
        return views

    def _compile_no_more(self, error: CannotCompile) -> None:
        self.compiled, self.mark.plain = None, True
        warn(f"{self.mark.name} runs uncompiled, because its tiles are not one graph: {error}")

    def flat(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The arguments without a graph, each per-token one as ``[tokens, ...]``."""
        return [
            self.shape.flatten(t.detach()) if per_token else t.detach()
            for t, per_token in zip(inputs, self.per_token, strict=True)
        ]

    def cut(self, flat: Sequence[Tensor], index: slice | Tensor) -> list[Tensor]:
        """The tokens at ``index`` of each per-token argument, beside the other arguments."""
        return [t[index] if per_token else t for t, per_token in zip(flat, self.per_token, strict=True)]

    def fill_lazy_weights(self) -> None:
        """Let lazy modules take their shapes from two tokens, so that there are weights to differentiate."""
        with torch.no_grad(), random_state_kept(self.device):
            self.run_tile(self.cut(self.flat(self.inputs), slice(0, 2)))

    def layout_of(self, output: Any, flat: Sequence[Tensor], tokens: int) -> OutputLayout:
        """How outputs like this one go together: from its shape, else from runs on two and on three tokens."""
        layout = describe_output(output, self.shape, tokens)
        if layout is not None:
            return layout
        leaves, tree = pytree.tree_flatten(output)
        kinds = tuple(leaf.dim() if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        key = (self.work.key, tree, kinds, len(self.shape.lead))
        if key not in self.mark.layouts:
            with torch.no_grad(), random_state_kept(self.device):
                small, large = (self.run_tile(self.cut(flat, slice(0, n))) for n in (2, 3))
            self.mark.layouts[key] = compare_outputs(
                small, large, (2, 3), self.shape, self.mark.tiling.reductions, self.mark.name
            )
        return self.mark.layouts[key]

    # Forward

    def forward(self, learn: bool) -> list[Any]:
        """Compute all tiles without a graph; return the leaves of the output in the untiled shape.

        Args:
            learn: Whether a backward may follow: note the randomness and count what the recompute will save.
        """
        flat, self.inputs = self.flat(self.inputs), []
        start = RandomState.now(self.device) if learn else None
        self.modes = [(part, part.training) for part in self.work.parts()] if learn else []
        assembly: OutputAssembly | None = None
        with torch.no_grad():
            if learn and self.compiled is not None and self._packs_key not in self.mark.packs:
                with random_state_kept(
                    self.device
                ):  # and uncompiled: its random numbers are not those of the recompute
                    self._count_packs(self.cut(flat, slice(*self.bounds[0])))
            for low, high in self.bounds:
                tile = self.cut(flat, slice(low, high))
                output = (
                    self._count_packs(tile)
                    if learn and self._packs_key not in self.mark.packs
                    else self._run_compiled(tile)
                )
                if assembly is None:
                    self.layout = self.layout_of(output, flat, high - low)
                    assembly = OutputAssembly(self.layout, self.shape, self.mark.name)
                assembly.add(output, (low, high))
                del output
        if start is not None and not start.same_as(RandomState.now(self.device)):
            self.random = start
        for weight in self.weights:
            weight.note_version()
        assert assembly is not None
        return assembly.leaves

    @cached_property
    def _packs_key(self) -> tuple[Any, ...]:
        return (
            self.work.key,
            self.arguments.tree,
            self.work.training,
            tuple(self.wants_grad),
            len(self.weights),
            self.autocast,
        )

    def _count_packs(self, tile: Sequence[Tensor]) -> Any:
        """Run a tile with a graph, to learn how many tensors its recompute will save."""
        counter = PackCounter()
        with (
            self._sums([w.tensor for w in self.weights]) as sums,
            self._sums(self._wholes(tile)) as wholes,
            self._weights_from(sums),
            torch.enable_grad(),
            counter,
        ):
            leaves, kept = self._leaves(tile, wholes), kept_tensors(self.work)
            output = self.run_tile(leaves)
            check_closed(output, [*leaves, *(s.leaf for s in (*sums, *wholes))], self.work, kept, self.mark.name)
        hooked = any(
            part._forward_hooks for part in self.work.parts() if part not in self.work.modules
        )  # they see what is skipped
        self.mark.packs[self._packs_key] = None if hooked else counter.count
        return pytree.tree_map_only(Tensor, torch.Tensor.detach, output)

    # Backward

    def backward(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Recompute each tile with a graph and sum its gradients.

        Args:
            inputs: The tensors of the call's arguments, as in the forward.
            gradients: One for each leaf of the output, in the untiled shape; ``None`` for leaves without one.

        Returns:
            A gradient for each tensor argument that wants one, then one for each trainable weight.
        """
        assert self.layout is not None
        flat = self.flat(inputs)
        gradients = [flat_gradient(g, kind, self.shape) for g, kind in zip(gradients, self.layout.kinds, strict=True)]
        results = [
            torch.empty_like(t, memory_format=torch.contiguous_format) if wants and per_token else None
            for t, wants, per_token in zip(flat, self.wants_grad, self.per_token, strict=True)
        ]
        with self._sums([w.checked() for w in self.weights]) as sums, self._sums(self._wholes(inputs)) as wholes:
            with self._weights_from(sums), self._as_in_forward():
                for low, high in self.bounds:
                    if self.compiled is not None and self._compiled_backward(
                        flat, gradients, results, (low, high), sums, wholes
                    ):
                        continue
                    leaves = self._leaves(self.cut(flat, slice(low, high)), wholes)
                    outputs, tile_gradients = self._recompute(leaves, gradients, (low, high))
                    self._differentiate(outputs, tile_gradients, leaves, results, (low, high), [*sums, *wholes])
                    del outputs, leaves
            totals = iter([s.take() for s in wholes])
            arguments = [
                (self.shape.unflatten(result) if result is not None else next(totals))
                for result, wants in zip(results, self.wants_grad, strict=True)
                if wants
            ]
            return [*arguments, *(s.take(self.mark.zeros_for_unused) for s in sums)]

    def _compiled_backward(
        self,
        flat: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        results: Sequence[Tensor | None],
        bounds: Bounds,
        sums: Sequence[GradientSum],
        wholes: Sequence[GradientSum],
    ) -> bool:
        """Recompute and differentiate a tile, compiled; tell whether that could be done."""
        assert self.layout is not None
        assert self.compiled is not None
        given = {
            index: tile_gradient(gradient, kind, self.shape, bounds)
            for index, (gradient, kind) in enumerate(zip(gradients, self.layout.kinds, strict=True))
            if gradient is not None
        }
        wanted = tuple(index for index, wants in enumerate(self.wants_grad) if wants)
        weights = [(s.leaf, weight.places) for s, weight in zip(sums, self.weights, strict=True)]
        tile = self._marked(self._views(self.cut(flat, slice(*bounds))))
        for index, gradient in given.items():
            if self.layout.kinds[index] in ("tokens", "flat"):
                token_dimension(gradient, len(self.shape.lead) - 1 if self.layout.kinds[index] == "tokens" else 0)
        try:
            found = self.compiled.backward(self.work, self.arguments, tile, wanted, weights, given)
        except CannotCompile as error:
            if self.random is not None:
                raise RuntimeError(
                    f"{self.mark.name}: its tiles' forward was compiled and their backward cannot be ({error}), and uncompiled it would"
                    " draw other random numbers: set compile=False in its Tiling."
                ) from error
            self._compile_no_more(error)
            return False
        whole = iter(wholes)
        targets: list[GradientSum | Tensor] = [
            *sums,
            *(result if (result := results[i]) is not None else next(whole) for i in wanted),
        ]
        for target, part in zip(targets, [*found[0], *found[1]], strict=True):
            if isinstance(target, Tensor):
                rows = target[slice(*bounds)]
                rows.zero_() if part is None else rows.copy_(part.flatten(0, len(self.shape.lead) - 1))
            elif part is not None:
                target.add(part)
        return True

    def _recompute(
        self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], bounds: Bounds
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run a tile with a graph; return the outputs that carry a gradient, and the gradients."""
        assert self.layout is not None
        output = pytree.tree_leaves(self._run_with_graph(leaves))
        pairs = [
            (tensor, tile_gradient(gradient, kind, self.shape, bounds))
            for tensor, gradient, kind in zip(output, gradients, self.layout.kinds, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def _run_with_graph(self, leaves: Sequence[Tensor]) -> Any:
        packs = self.mark.packs.get(self._packs_key)
        if packs is not None:
            start = RandomState.now(self.device) if self.random is not None else None
            skip = LastProjectionSkip(packs)
            try:
                with torch.enable_grad(), skip:
                    output = self.run_tile(leaves)
                skip.check(pytree.tree_leaves(output))
                return output
            except CannotSkip:
                self.mark.packs[self._packs_key] = None
                if start is not None:
                    start.set()
        with torch.enable_grad(), PackCounter():
            return self.run_tile(leaves)

    def _differentiate(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        leaves: Sequence[Tensor],
        results: Sequence[Tensor | None],
        bounds: Bounds,
        sums: Sequence[GradientSum],
    ) -> None:
        wanted = [(leaf, result) for leaf, result in zip(leaves, results, strict=True) if result is not None]
        targets = [*(leaf for leaf, _ in wanted), *(s.leaf for s in sums)]
        found: Sequence[Tensor | None] = [None] * len(targets)
        if outputs and targets:
            found = torch.autograd.grad(outputs, targets, gradients, allow_unused=True)
        for (_, result), gradient in zip(wanted, found, strict=False):
            part = result[slice(*bounds)]
            part.zero_() if gradient is None else part.copy_(gradient)

    def _wholes(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The arguments that every tile sees whole and that want a gradient."""
        return [
            t
            for t, wants, per_token in zip(inputs, self.wants_grad, self.per_token, strict=True)
            if wants and not per_token
        ]

    def _leaves(self, tile: Sequence[Tensor], wholes: Sequence[GradientSum]) -> list[Tensor]:
        """A tile's arguments, detached, each a leaf where it wants a gradient."""
        whole = iter(wholes)
        return [
            (t.detach().requires_grad_(wants) if per_token or not wants else next(whole).leaf)
            for t, wants, per_token in zip(tile, self.wants_grad, self.per_token, strict=True)
        ]

    def _sums(self, tensors: Sequence[Tensor]) -> AbstractContextManager[list[GradientSum]]:
        return gradient_sums(tensors, self.mark.tiling.accumulate)

    def _weights_from(self, sums: Sequence[GradientSum]) -> Any:
        return substituted(self.weights, [s.leaf for s in sums])

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """The forward's autocast state, its modes of training, and its randomness if it drew any."""
        changed = [(part, part.training, then) for part, then in self.modes if part.training != then]
        for part, _, then in changed:
            part.training = then
        autocast = self.autocast.context() if self.autocast else nullcontext()
        random = random_state_kept(self.device, self.random) if self.random else nullcontext()
        try:
            with autocast, random:
                yield
        finally:
            for part, now, _ in changed:
                part.training = now
