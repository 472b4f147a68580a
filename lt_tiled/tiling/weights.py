"""The weights of a tile: leaves that stand in their places while tiles run, and the sums of their gradients.

NOTE [Leaves]
A tile's graph begins at leaves, one for each weight, which stand in the weight's places while tiles run: in
``_parameters``, and in the plain attributes where FSDP keeps views of its flat weights. What takes a leaf's gradient
adds it to the sum, so only one gradient is alive next to the sums. ``finally`` takes the leaves out, also after Ctrl-C.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.errors import REMEDY, NotPositionWiseError

Place = tuple[nn.Module, str]
"""A module and the name of an attribute."""
Weights = dict[Tensor, list[Place]]
"""Trainable tensors with all their places: a tied weight has several."""


def weights_of(parts: Sequence[nn.Module]) -> Weights:
    """Return the tensors in modules, with their submodules, that want a gradient."""
    found: Weights = {}
    for part in parts:
        for holder in (part._parameters, part._buffers, part.__dict__):
            for attribute, value in holder.items():
                if not isinstance(value, Tensor) or not value.requires_grad:
                    continue
                # Other attributes with a graph are what the module computed itself.
                if holder is part.__dict__ and not (value.is_leaf or isinstance(value._base, nn.Parameter)):
                    continue
                found.setdefault(value, []).append((part, attribute))
    return found


Entry = tuple[dict[str, Any], str, Any]
"""A dictionary, a key in it, and a value."""
# The dictionaries of ZeRO-3 all-gather a weight that is looked up in their own way.
_get, _set, _remove = dict.get, dict.__setitem__, dict.pop
_ABSENT: Any = object()


def in_places(places: Iterable[Sequence[Place]], leaves: Iterable[Tensor]) -> list[Entry]:
    """Return the entries with which leaves stand in the places of weights: see NOTE [Leaves].

    Args:
        places: Those of each weight.
        leaves: What stands there, one for each weight.
    """
    entries: list[Entry] = []
    for several, leaf in zip(places, leaves, strict=True):
        for part, attribute in several:
            # FSDP moves a weight from one to the other between the passes.
            for holder in (part._parameters, part._buffers, part.__dict__):
                if isinstance(_get(holder, attribute, None), Tensor):
                    entries.append((holder, attribute, leaf))
    return entries


@contextmanager
def swapped(entries: Iterable[Entry]) -> Iterator[None]:
    """Let dictionaries hold other values for a while, also if Ctrl-C comes at any line of this."""
    before: list[Entry] = []
    try:
        try:
            for holder, key, value in entries:
                before.append((holder, key, _get(holder, key, _ABSENT)))
                _set(holder, key, value)
            yield
        finally:
            _restore(before)
    finally:
        _restore(before)  # once more, because Ctrl-C may have ended the first attempt


def _restore(before: Sequence[Entry]) -> None:
    for holder, key, value in reversed(before):
        if value is _ABSENT:
            _remove(holder, key, None)
        else:
            _set(holder, key, value)


ADDS_PRODUCTS = ("cuda",) if torch.version.cuda else ()
"""The devices that add a product of 16-bit factors to a float32 sum."""


class GradientSum:
    """Sums one tensor's gradients over the tiles while autograd produces them.

    Sums of 16-bit gradients are kept in float32 and rounded once: summed in their own dtype, their error grows with the
    number of tiles. A gradient is added as it is; autograd's own accumulation would make a float32 copy of it first.
    """

    def __init__(self, tensor: Tensor, accumulate: str) -> None:
        self.sum_dtype = tensor.dtype
        if accumulate == "float32" and tensor.dtype in (torch.bfloat16, torch.float16):
            self.sum_dtype = torch.float32
        self.sum: Tensor | None = None
        self.leaf = nn.Parameter(tensor.detach())
        self.leaf.__dict__.update({**tensor.__dict__, **self.leaf.__dict__})  # code may read attributes of its weights
        mine = weakref.ref(self)  # the leaf keeps its hook, so the hook must not keep the sum

        def take_gradient(leaf: Tensor) -> None:
            total = mine()
            gradient = leaf.grad
            leaf.grad = None
            if total is None or gradient is None:
                return
            # Without a call for each tile after the first one.
            if total.sum is None:
                total.add(gradient)
            else:
                total.sum.add_(gradient)

        self.leaf.register_post_accumulate_grad_hook(take_gradient)

    def add(self, gradient: Tensor) -> None:
        """Add one tile's gradient, or a part of it."""
        if self.sum is None:
            self.sum = gradient.to(self.sum_dtype)
        else:
            self.sum.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right`` in the precision of the sum: a 16-bit product is not rounded before."""
        if self.sum is None:
            self.sum = left.new_zeros(left.shape[0], right.shape[1], dtype=self.sum_dtype)
        total = self.sum
        if total.dtype == left.dtype:
            torch.addmm(total, left, right, out=total)  # FlopCounterMode does not count addmm_
        elif left.device.type in ADDS_PRODUCTS and total.dtype == torch.float32:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        elif left.shape[0] < right.shape[1]:
            _add_in_parts(total.t(), right.t(), left.t())
        else:
            _add_in_parts(total, left, right)

    def take(self, zeros: bool) -> Tensor | None:
        """Return the sum in the tensor's own dtype. If no tile used it: zeros, or ``None``."""
        total = self.sum
        self.sum = None
        if total is None:
            return torch.zeros_like(self.leaf, requires_grad=False) if zeros else None
        return total.to(self.leaf.dtype)


def _add_in_parts(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right``, the larger factor in parts, because each is copied to the sum's dtype."""
    right = right.to(total.dtype)
    size = max(1, len(total) // 8)
    for part, into in zip(left.split(size), total.split(size), strict=True):
        torch.addmm(into, part.to(total.dtype), right, out=into)


def check_leaves(ends: Iterable[Tensor], known: Iterable[Tensor], name: str) -> None:
    """Refuse a graph, given its ends, that begins at a leaf that is not known, and would get no gradient."""
    ids = set(map(id, known))
    todo: list[Any] = [end.grad_fn for end in ends]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            todo.append(following)
        leaf = getattr(node, "variable", None)
        # The link of an anchor has no elements.
        if isinstance(leaf, Tensor) and leaf.numel() and id(leaf) not in ids:
            raise NotPositionWiseError(
                f"{name} depends on a tensor of shape {list(leaf.shape)} that is not among its arguments, parameters"
                f" and buffers, and would get no gradient. Register it, or pass it. {REMEDY}"
            )
