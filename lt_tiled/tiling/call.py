"""What one call of a tiled module is: its arguments, its tiles, its weights, and how one tile runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.policies import Tiling
from lt_tiled.tiling.layout import Bounds, TokenShape, tile_bounds
from lt_tiled.tiling.observe import is_recomputing
from lt_tiled.tiling.recompute import (
    Due,
    PlainSavedTensors,
    Precision,
    RandomState,
    hidden_from_modes,
    never,
    random_state_kept,
)
from lt_tiled.tiling.state import Tiled
from lt_tiled.tiling.weights import Work, trainable_weights

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Arguments:
    """``(args, kwargs)`` without the tensors in them and in their tuples.

    Lists and dictionaries stay the caller's own objects, because a module may add to them.
    """

    tree: pytree.TreeSpec
    others: tuple[Any, ...]
    positions: tuple[int, ...]
    plain: bool
    """Whether the arguments are tensors alone, none of them by name or in a tuple."""

    def call_with(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of theirs."""
        leaves = list(self.others)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return args, kwargs

    def call(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        """Call a function with other tensors in place of theirs."""
        if self.plain:
            return function(*tensors)
        args, kwargs = self.call_with(tensors)
        return function(*args, **kwargs)

    def refuse_gradients_inside(self, module: str) -> None:
        """Refuse tensors that want a gradient inside lists and dictionaries, because they would get none.

        Raises:
            NotPositionWiseError: If there is one, and gradients are on.
        """
        containers = [leaf for leaf in self.others if isinstance(leaf, list | dict)]
        if containers and torch.is_grad_enabled():
            tensors = (leaf for leaf in pytree.tree_leaves(containers) if isinstance(leaf, Tensor))
            if any(t.requires_grad for t in tensors):
                raise NotPositionWiseError(
                    f"{module} was given a tensor that requires a gradient inside a list or a dictionary, and it would"
                    f" get none. Pass it as an argument of its own, or in a tuple. {REMEDY}"
                )


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Arguments]:
    """Return the tensors, and what is needed to call with others."""
    if not kwargs and set(map(type, args)) <= _PLAIN:
        return list(args), _plain_arguments(len(args))
    whole = (args, kwargs)
    leaves, tree = pytree.tree_flatten(whole, is_leaf=lambda node: node is not kwargs and not isinstance(node, tuple))
    tensors: list[Tensor] = []
    positions: list[int] = []
    others: list[Any] = []
    for position, leaf in enumerate(leaves):
        is_tensor = isinstance(leaf, Tensor)
        others.append(None if is_tensor else leaf)
        if is_tensor:
            tensors.append(leaf)
            positions.append(position)
    return tensors, Arguments(tree, tuple(others), tuple(positions), plain=False)


_PLAIN = {Tensor, torch.nn.Parameter}


@cache
def _plain_arguments(count: int) -> Arguments:
    """Return those of a call with so many tensors and nothing else."""
    tree = pytree.tree_structure(((0,) * count, {}))
    return Arguments(tree, (None,) * count, tuple(range(count)), plain=True)


class Call:
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
    ) -> tuple[Self, list[Tensor]] | None:
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
        shape, widths = TokenShape(hidden.shape[:-1]), patch.found.widths
        bounds = tile_bounds(patch.tiling, shape.tokens, hidden.shape[-1], widths)
        is_short = len(bounds) < 2 and not (patch.needs.same_order and torch.is_grad_enabled())
        if is_short:
            bounds = tile_bounds(Tiling(num_shards=2), shape.tokens, hidden.shape[-1], widths)
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
