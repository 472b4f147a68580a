"""Compiled tiles: the forward, and the recompute with its gradients as one graph without unused values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._arguments import Arguments
from lt_tiled._log import inform_once
from lt_tiled.policies import CompileOptions
from lt_tiled.tiling.state import Work


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
    def of(cls, kind: str, options: bool | CompileOptions) -> CompiledTile | None:
        """Return the one for this kind and these options, or ``None`` if nothing is to be compiled."""
        if options is False:
            return None
        given: dict[str, Any] = {} if options is True else {**options}
        key = kind, repr(sorted(given.items()))
        if key not in cls._all:
            cls._all[key] = cls(kind, given)
        return cls._all[key]

    def forward(self, work: Work, arguments: Arguments, tensors: Sequence[Tensor]) -> Any:
        """Run the work."""
        with self._compiling():
            return self._forward(_Holder(work), arguments, list(tensors))

    def backward(
        self,
        work: Work,
        arguments: Arguments,
        tensors: Sequence[Tensor],
        wanted: tuple[int, ...],
        weights: Sequence[tuple[Tensor, Sequence[tuple[nn.Module, str]]]],
        gradients: Mapping[int, Tensor],
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run the work again and differentiate it.

        Args:
            work: What to run.
            arguments: How it is called.
            tensors: The tensors of the call.
            wanted: The indices of those that want a gradient.
            weights: The weights that want one, each with the places that hold it.
            gradients: The gradients of the output's leaves, by index.

        Returns:
            The gradients of the weights and of the wanted tensors; ``None`` for those that are not used.
        """
        holder = _Holder(work)
        paths = {id(part): path for path, part in holder.named_modules()}
        names = tuple(tuple(f"{paths[id(owner)]}.{name}" for owner, name in places) for _, places in weights)
        leaves = [_like(t, t.detach().requires_grad_(index in wanted)) for index, t in enumerate(tensors)]
        chosen = [w.detach().requires_grad_() for w, _ in weights]
        with self._compiling(), torch.enable_grad():
            found = self._backward(
                holder, arguments, leaves, wanted, names, chosen, tuple(gradients), list(gradients.values())
            )
        return list(found[: len(chosen)]), list(found[len(chosen) :])

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        inform_once(
            f"compile {self.kind}", f"compiles the tiles of {self.kind} at their first use, which can take minutes"
        )
        try:
            # Inductor's own random numbers would differ between the forward pass and the recompute.
            with torch._inductor.config.patch(fallback_random=True), torch._dynamo.config.patch(_LIMITS):
                yield
        except Exception as error:  # also the module's own error, which the uncompiled run raises again
            raise CannotCompile(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def token_dimension(tensor: Tensor, dimension: int) -> None:
    """Tell the compiler that a dimension changes from tile to tile: the last one is shorter."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def _like(marked: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor with the dynamic dimensions of another one."""
    for dimension in getattr(marked, "_dynamo_weak_dynamic_indices", ()):
        token_dimension(tensor, dimension)
    return tensor


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
