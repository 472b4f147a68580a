"""Compiled tiles: the forward, and the recompute with its gradients as one graph without unused values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.policies import CompileOptions
from lt_tiled.tiling.call import Arguments, Call
from lt_tiled.tiling.layout import Kind
from lt_tiled.tiling.weights import Work


class CannotCompile(Exception):
    """A tile's code cannot be compiled as one graph, with the compiler's reason."""


class CompiledTile:
    """The two compiled functions of one kind of module, which its layers and tiles of any length share.

    Args:
        kind: The name in log lines.
        options: The arguments of ``torch.compile``.
    """

    _all: dict[tuple[str, str], CompiledTile] = {}

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self.kind = kind
        # One graph: the pieces of a broken one would compute and keep what the backward pass does not need.
        options = {"fullgraph": True, **options}
        self._forward = torch.compile(_own_code(_forward), **options)
        self._backward = torch.compile(_own_code(_backward), **options)

    @classmethod
    def of(cls, kind: str, options: Literal[True] | CompileOptions) -> CompiledTile:
        """Return the one for this kind and these options."""
        given: dict[str, Any] = {} if options is True else {**options}
        key = kind, repr(sorted(given.items()))
        if key not in cls._all:
            cls._all[key] = cls(kind, given)
        return cls._all[key]

    def forward(self, call: Call, tile: Sequence[Tensor]) -> Any:
        """Run a call's work on the tensors of a tile.

        Raises:
            CannotCompile: If its code is not one graph.
        """
        _mark(tile, call.token_dimensions)
        with self._compiling():
            return self._forward(_Holder(call.work), call.arguments, list(tile))

    def backward(
        self,
        call: Call,
        tile: Sequence[Tensor],
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        kinds: Sequence[Kind],
    ) -> tuple[Tensor | None, ...]:
        """Run a call's work on a tile again and differentiate it.

        Args:
            call: The call.
            tile: The tensors of the tile.
            weights: What stands for each of the call's weights.
            gradients: The gradients of the output's leaves.
            kinds: What these leaves are.

        Returns:
            The gradients of the weights, then of the arguments that want one; ``None`` for those that are not used.

        Raises:
            CannotCompile: If its code is not one graph.
        """
        holder = _Holder(call.work)
        paths = {id(part): path for path, part in holder.named_modules()}
        names = tuple(tuple(f"{paths[id(owner)]}.{name}" for owner, name in w.places) for w in call.weights)
        leaves = [t.detach().requires_grad_(w) for t, w in zip(tile, call.wants_grad, strict=True)]
        given = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        _mark(leaves, call.token_dimensions)
        _mark(given.values(), [call.shape.token_dimension(kinds[index]) for index in given])
        chosen = [weight.detach().requires_grad_() for weight in weights]
        wanted = tuple(index for index, wants in enumerate(call.wants_grad) if wants)
        with self._compiling(), torch.enable_grad():
            found: tuple[Tensor | None, ...] = self._backward(
                holder, call.arguments, leaves, wanted, names, chosen, tuple(given), list(given.values())
            )
        return found

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        inform(
            f"compiles the tiles of {self.kind} at their first use, which can take minutes", once=f"compile {self.kind}"
        )
        try:
            # Inductor's own random numbers would differ between the forward pass and the recompute.
            with torch._inductor.config.patch(fallback_random=True), torch._dynamo.config.patch(_LIMITS):
                yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # also the module's own error, which the uncompiled run raises again
            raise CannotCompile(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def _mark(tensors: Iterable[Tensor], dimensions: Sequence[int | None]) -> None:
    """Tell the compiler which dimensions change from tile to tile: later ones may be shorter."""
    for tensor, dimension in zip(tensors, dimensions, strict=True):
        if dimension is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)


_LIMITS = {"trace_autograd_ops": True, "recompile_limit": 64}
"""Settings of torch's compiler, which compiles layers anew whose attributes hold other numbers."""


class _Holder(nn.Module):
    """The work's modules under one root, so that ``functional_call`` can name their weights."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.parts = nn.ModuleList(work.modules)
        self.function = work.function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy with code of its own: the compiler limits how often one piece of code is compiled."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _forward(holder: _Holder, arguments: Arguments, tensors: list[Tensor]) -> Any:
    args, kwargs = arguments.call_with(tensors)
    return holder(*args, **kwargs)


def _backward(
    holder: _Holder,
    arguments: Arguments,
    tensors: list[Tensor],
    wanted: tuple[int, ...],
    names: tuple[tuple[str, ...], ...],
    weights: list[Tensor],
    kept: tuple[int, ...],
    gradients: list[Tensor],
) -> Any:
    args, kwargs = arguments.call_with(tensors)
    replaced = {name: weight for weight, several in zip(weights, names, strict=True) for name in several}
    leaves = pytree.tree_leaves(torch.func.functional_call(holder, replaced, args, kwargs))
    outputs, inputs = [leaves[index] for index in kept], [*weights, *(tensors[index] for index in wanted)]
    return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
