"""Tiles that ``torch.compile`` compiles, as ``Tiling(compile=...)`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lt_tiled.policies import CompileOptions
from lt_tiled.tiling.weights import Weight


def compiled(function: Callable[..., Any], options: Literal[True] | CompileOptions) -> Callable[..., Any]:
    """Return a function that runs compiled, with the arguments of ``torch.compile`` in ``options``."""
    given: Mapping[str, Any] = {} if options is True else options
    # Inductor's own random numbers would differ between the forward pass and the recompute.
    run: Callable[..., Any] = torch._inductor.config.patch(fallback_random=True)(torch.compile(function, **given))
    return run


class LeavesInPlace:
    """Puts leaves into the places of weights while compiled code runs; a function mode would be compiled as well.

    Args:
        weights: The weights.
        leaves: What stands for each of them.
    """

    def __init__(self, weights: Sequence[Weight], leaves: Sequence[Tensor]) -> None:
        self._weights, self._leaves = weights, leaves
        self._replaced: list[tuple[Any, str, Tensor]] = []

    def __enter__(self) -> None:
        for weight, leaf in zip(self._weights, self._leaves, strict=True):
            for holder, name, tensor in weight.holders():
                self._replaced.append((holder, name, tensor))
                holder[name] = leaf

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Restore the weights."""
        while self._replaced:
            holder, name, tensor = self._replaced.pop()
            holder[name] = tensor
