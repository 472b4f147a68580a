"""Inputs of tiled calls that are sums, which the backward pass computes again tile by tile.

NOTE [Sums]
A block with a norm behind attention adds what the norm returns to its own input, and its MLP takes the sum. The block's
input and the norm's input are both saved until the block's backward pass ends, and they give the sum without a matrix
product. So the anchor of the MLP saves these two in place of the sum, of which one tile then exists at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt_tiled.tiling.observe import restored
from lt_tiled.tiling.recompute import SAMPLES

if TYPE_CHECKING:
    from lt_tiled.tiling.call import Call
    from lt_tiled.tiling.layout import Bounds, TokenShape
    from lt_tiled.tiling.tiled_call import Trace


@dataclass(frozen=True)
class Sum:
    """How a sum is computed. It refers to no activation."""

    add: Callable[..., Tensor]
    norm: Call
    trace: Trace
    """Of the norm's forward pass."""
    norm_first: bool
    dtype: torch.dtype

    def of(self, block_input: Tensor, norm_input: Tensor) -> Tensor:
        """Compute the sum of some tokens, or of all."""
        with self.norm.autocast.context():
            normed = self.norm.run_views([norm_input])
            return self.add(normed, block_input) if self.norm_first else self.add(block_input, normed)


Known = tuple[Sum, tuple[Tensor, Tensor]]


@dataclass
class Running:
    """A module that calls tiled ones, while it runs."""

    inputs: Sequence[Any]
    deferred: list[weakref.ref[Any]] = field(default_factory=list)
    """What was deferred inside."""
    sums: dict[int, tuple[weakref.ref[Tensor], list[int], Known]] = field(default_factory=dict)
    """Each sum with the versions of it and of its parts, by its id."""

    def may_note(self, parts: tuple[Any, Tensor], normed: Tensor) -> bool:
        """Whether the first part is an input of this module, and the norm of the second part is added to it."""
        plain = type(parts[0]) is type(parts[1]) and parts[0].shape == parts[1].shape == normed.shape
        return plain and any(value is parts[0] for value in self.inputs)

    def note(self, total: Tensor, how: Sum, parts: tuple[Tensor, Tensor]) -> None:
        """Note a sum of these."""
        if total.is_contiguous():
            self.sums[id(total)] = weakref.ref(total), [t._version for t in (total, *parts)], (how, parts)

    def find(self, call: Call, inputs: Sequence[Tensor]) -> list[Known | None] | None:
        """Return what each input of a call is the sum of; ``None`` if none is one."""
        found: list[Known | None] = []
        for tensor, per_token in zip(inputs, call.per_token, strict=True):
            reference, versions, known = self.sums.get(id(tensor), (None, [], None))
            same = known is not None and reference is not None and reference() is tensor and per_token
            found.append(known if same and known and versions == [t._version for t in (tensor, *known[1])] else None)
        return found if any(found) else None


running: ContextVar[Running | None] = ContextVar("running", default=None)


class SumInTiles:
    """Stands for a sum in a backward pass."""

    def __init__(self, how: Sum, parts: tuple[Tensor, Tensor]) -> None:
        self.how, self.parts, self.shape = how, parts, parts[0].shape

    def detach(self) -> SumInTiles:
        """Return itself: its tiles begin graphs of their own."""
        return self

    def new_empty(self, shape: Sequence[int]) -> Tensor:
        """Return memory for a gradient."""
        return self.parts[0].new_empty(shape, dtype=self.how.dtype)

    def tiles(self, shape: TokenShape, bounds: Sequence[Bounds]) -> Iterator[Tensor]:
        """Yield each tile, as a view of a leaf."""
        for parts in zip(*(shape.tiles(part.detach(), bounds) for part in self.parts), strict=True):
            with torch.no_grad():
                tile = self.how.of(*parts)
            yield tile.requires_grad_(torch.is_grad_enabled()).view_as(tile)

    def samples(self, shape: TokenShape) -> Tensor:
        """Return the elements of the sum that ``samples_of`` returns."""
        width, count = self.shape[-1], self.shape.numel()
        index = torch.arange(0, count, count // SAMPLES | 1, device=self.parts[0].device)
        rows = [shape.as_tile(shape.flatten(part.detach())[index // width]) for part in self.parts]
        with torch.no_grad():
            return self.how.of(*rows).reshape(-1, width).gather(1, (index % width)[:, None])[:, 0]


Input = Tensor | SumInTiles
"""What a backward pass computes a tile of an argument from."""


@contextmanager
def with_sums(saved: Sequence[Tensor], sums: Sequence[Sum | None], whole: bool) -> Iterator[Sequence[Any]]:
    """Return a call's inputs from what its anchor saved last.

    Args:
        saved: Two tensors for each sum, and one for each other input.
        sums: Which inputs are sums.
        whole: Compute them in full, with their graph if gradients are on.
    """
    inputs, rest = list[Input](), list(saved)
    with ExitStack() as stack:
        for how in reversed(sums):
            last = rest.pop()
            if how is None:
                inputs.insert(0, last)
                continue
            stack.enter_context(restored(how.trace.modules, "its backward pass"))
            parts = rest.pop(), last
            inputs.insert(0, how.of(*parts) if whole else SumInTiles(how, parts))
        yield inputs
