"""The weights of a tile: leaves that stand in their places while tiles run, and the sums of their gradients.

NOTE [Leaves]
A tile's graph begins at leaves, one for each weight, which stand in the weight's places while tiles run: in
``_parameters``, and in the plain attributes where FSDP keeps views of its flat weights. What takes a leaf's gradient
adds it to the sum, so only one gradient is alive next to the sums. ``finally`` takes the leaves out, also after Ctrl-C.
Another thread that runs the module meanwhile would give its gradients to these leaves, so a module belongs to one
thread during each call and each recompute, and another thread gets an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.errors import TwoThreadsError
from lt_tiled.modules.patch import is_of

Place = tuple[nn.Module, str]
"""A module and the name of an attribute."""
Weights = dict[Tensor, list[Place]]
"""Trainable tensors with all their places: a tied weight has several."""


@contextmanager
def one_thread(parts: Sequence[nn.Module], name: str) -> Iterator[None]:
    """Let modules belong to this thread.

    Args:
        parts: The modules, with their submodules.
        name: The name in messages.

    Raises:
        TwoThreadsError: If one belongs to another thread.
    """
    mine = _Use(get_ident())
    try:
        try:
            for part in parts:
                # One step of the interpreter, so that no other thread comes between the question and the answer.
                if _USED.setdefault(part, mine).thread != mine.thread:
                    raise TwoThreadsError(
                        f"{name} is trained by two threads at once, which share its weights: run it in one thread at a"
                        " time, or give each thread a copy.deepcopy of the model."
                    )
            yield
        finally:
            _release(parts, mine)
    finally:  # again, after Ctrl-C in the first attempt
        _release(parts, mine)


@dataclass(eq=False)
class _Use:
    """A call or a recompute that runs."""

    thread: int


_USED: dict[nn.Module, _Use] = {}
"""The modules that run, and the outermost use of each."""


def _release(parts: Sequence[nn.Module], mine: _Use) -> None:
    for part in parts:
        if _USED.get(part) is mine:
            del _USED[part]


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
                places = found.setdefault(value, [])
                if (part, attribute) not in places:
                    places.append((part, attribute))
    return found


@contextmanager
def in_place(places: Sequence[Sequence[Place]], leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let leaves stand in the places of weights: see NOTE [Leaves].

    Args:
        places: Those of each weight.
        leaves: What stands there, one for each weight.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        try:
            for several, leaf in zip(places, leaves, strict=True):
                for place in several:
                    _put(place, leaf, before)
            yield
        finally:
            _restore(before)
    finally:  # again, after Ctrl-C in the first attempt
        _restore(before)


def _put(place: Place, leaf: Tensor, before: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Put a leaf into a place of a weight, and note what was there."""
    part, attribute = place
    # FSDP moves a weight from one to the other between the passes.
    for holder in (part._parameters, part._buffers, part.__dict__):
        if attribute in holder:
            # The dictionaries of ZeRO-3 all-gather a weight that is looked up in their own way.
            there = dict.__getitem__(holder, attribute)
            if isinstance(there, Tensor):
                before.append((holder, attribute, there))
                dict.__setitem__(holder, attribute, leaf)


def _restore(before: list[tuple[dict[str, Any], str, Any]]) -> None:
    for holder, attribute, there in reversed(before):
        dict.__setitem__(holder, attribute, there)


ADDS_PRODUCTS = ("cuda",) if torch.version.cuda else ()
"""The devices that add a product of 16-bit factors to a float32 sum."""


def adds_in_product(total: Tensor, factor: Tensor) -> bool:
    """Whether a matrix product of 16-bit factors can be added to a float32 sum without rounding it first."""
    return factor.device.type in ADDS_PRODUCTS and total.dtype == torch.float32 != factor.dtype


def sum_dtype(dtype: torch.dtype, accumulate: str) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are summed."""
    return torch.float32 if accumulate == "float32" and dtype in (torch.bfloat16, torch.float16) else dtype


class GradientSum:
    """Sums one tensor's gradients over the tiles while autograd produces them.

    Sums of 16-bit gradients are kept in float32 and rounded once: summed in their own dtype, their error grows with the
    number of tiles. A gradient is added as it is; autograd's own accumulation would make a float32 copy of it first.
    """

    def __init__(self, tensor: Tensor, accumulate: str) -> None:
        self.dtype, self.sum_dtype = tensor.dtype, sum_dtype(tensor.dtype, accumulate)
        self.sum: Tensor | None = None
        self.leaf = nn.Parameter(tensor.detach())
        self.leaf.__dict__.update({**tensor.__dict__, **self.leaf.__dict__})  # code may read attributes of its weights
        mine = weakref.ref(self)  # the leaf keeps its hook, so the hook must not keep the sum

        def take_gradient(leaf: Tensor) -> None:
            total, gradient = mine(), leaf.grad
            leaf.grad = None
            if total is not None and gradient is not None:
                total.add(gradient)

        self.leaf.register_post_accumulate_grad_hook(take_gradient)

    def add(self, gradient: Tensor) -> None:
        """Add one tile's gradient, or a part of it."""
        if self.sum is None:
            self.sum = gradient.to(self.sum_dtype)
        else:
            self.sum.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right``.

        A 16-bit product is rounded before it is added, as autograd's is, except on a CUDA GPU from the second one on.
        """
        if self.sum is not None and self.sum.dtype == left.dtype:
            torch.addmm(self.sum, left, right, out=self.sum)  # FlopCounterMode does not count addmm_
        elif self.sum is not None and adds_in_product(self.sum, left):
            torch.addmm(self.sum, left, right, out_dtype=torch.float32, out=self.sum)
        else:
            self.add(left.mm(right))

    def take(self, zeros: bool = False) -> Tensor | None:
        """Return the sum in the tensor's own dtype; if no tile used it, ``None``, or zeros where they are wanted."""
        total, self.sum = self.sum, None
        if total is None:
            return torch.zeros_like(self.leaf, requires_grad=False) if zeros else None
        return total.to(self.dtype)


def wants_zeros(weight: Tensor) -> bool:
    """Whether hooks wait for the gradient of a weight, so that it must not be missing where no tile used the weight.

    Those of ZeRO-1 and 2 fill a bucket, and a user's would be called with ``None``.
    """
    # Ours stand on the leaves of a tiled module around this one.
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        if not is_of(hook, ("lt_tiled.",)):
            return True
    return not all(is_of(hook, ("torch.",)) for hook in (weight._backward_hooks or {}).values())
