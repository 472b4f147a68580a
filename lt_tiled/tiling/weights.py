"""The weights of a tile: leaves of its own in their place, and the sums of their gradients over the tiles.

NOTE [Substitution]
A tile's graph begins at leaves of its own, one for each weight, whose hooks sum the gradients of all tiles. They are
not put into the module, where another thread would see them and Ctrl-C could leave them: a ``TorchFunctionMode``, which
belongs to one thread, hands them to torch's functions in place of the weights. Custom autograd Functions bypass
such modes and see the real weights, so the gradients of those are asked for as well.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lt_tiled.modules.patch import HOOKS, is_of

T = TypeVar("T")


_CAPTURING = "transformers.utils.output_capturing"
_NO_USERS = ("torch.", "deepspeed.", "lt_tiled.", _CAPTURING)


@dataclass(frozen=True)
class Work:
    """A position-wise function of tensors: a module's forward, a method, an MLP with its norms."""

    function: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    """The modules that hold its weights."""
    key: Hashable = None
    """Identifies this work among those of one tiled module."""
    whole: bool = True
    """Whether the modules run by their forward, so that their own hooks run around the tiles and not in them."""

    @cached_property
    def parts(self) -> Sequence[nn.Module]:
        """The modules and their submodules."""
        return [part for module in self.modules for part in module.modules()]

    def hooked(self) -> str | None:
        """Return the class of a module in the work whose hook, set by a user, would see tiles.

        Hooks of torch do not count: they compute weights (``torch.nn.utils``) or follow modules.
        """
        for part in self.parts:
            if self.whole and part in self.modules:
                continue
            for kind in HOOKS:
                for hook in part.__dict__[kind].values():
                    if not is_of(hook, _NO_USERS):
                        return type(part).__name__
        return None

    def recorded(self) -> Sequence[str]:
        """Return the names of what transformers records inside the modules, such as router logits.

        Its hooks append what a module returns to the collector of the model's current call, with
        ``output_router_logits=True`` for one: that would be an entry for each tile, without a graph.
        """
        capturing = sys.modules.get(_CAPTURING)
        collector = (None if capturing is None else capturing._active_collector.get()) or {}
        inside = (part for part in self.parts if part not in self.modules)
        recorded = collector and any(h.__module__ == _CAPTURING for p in inside for h in p._forward_hooks.values())
        return sorted(collector) if recorded else []


@dataclass
class Weight:
    """One trainable tensor and every place in the modules that holds it (tied weights have several)."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def hooked(self) -> bool:
        """Whether a hook of a user is on its gradient."""
        hooks = (hook for tensor in self.now() for hook in (tensor._backward_hooks or {}).values())
        return not all(is_of(hook, ("torch.", "deepspeed.", "lt_tiled.")) for hook in hooks)

    def now(self) -> list[Tensor]:
        """Return what stands in the weight's places now, each tensor once: engines swap it."""
        there = {id(self.tensor): self.tensor}
        for _, _, tensor in self.holders():
            there[id(tensor)] = tensor
        return list(there.values())

    def holders(self) -> Iterator[tuple[Any, str, Tensor]]:
        """Yield what holds a tensor in the weight's places now, the name there, and the tensor."""
        for owner, name in self.places:  # of which FSDP with use_orig_params=True fills two
            for holder in (owner._parameters, owner._buffers, owner.__dict__):
                tensor = holder.get(name)  # holder[name] would all-gather it under ZeRO-3
                if isinstance(tensor, Tensor):
                    yield holder, name, tensor


def trainable_weights(parts: Iterable[nn.Module]) -> list[Weight]:
    """Return the tensors of modules that want a gradient, each once.

    Leaves in plain attributes count, and views of a parameter: FSDP with ``use_orig_params=False`` keeps its views of
    the flat weights there. Other attributes are what the module computed itself.
    """
    found: dict[int, Weight] = {}
    for owner in parts:
        tensors = list(owner._parameters.items()) + list(owner._buffers.items())
        for name, value in owner.__dict__.items():
            if isinstance(value, Tensor) and (value.is_leaf or isinstance(value._base, nn.Parameter)):
                tensors.append((name, value))
        for name, tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                places = found.setdefault(id(tensor), Weight(tensor)).places
                if (owner, name) not in places:
                    places.append((owner, name))
    return list(found.values())


class Substituted(TorchFunctionMode):
    """Lets torch's functions see other tensors in place of some, on this thread alone: see NOTE [Substitution].

    Args:
        pairs: Each tensor and what is to be seen in its place.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._pairs = list(pairs)  # whose tensors keep their ids
        self._instead_of = {id(tensor): instead for tensor, instead in self._pairs}

    unread: Tensor | None = None
    """The weight of a linear module whose output is left out."""

    def left_out(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Return what stands for the output of that module."""
        raise AssertionError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) == 3 and args[1] is self.unread:  # as nn.Linear calls it
            return self.left_out(args[0], args[2])
        known: Any = self._instead_of
        instead: Any = None
        for value in (*args, *kwargs.values()) if kwargs else args:  # without calls: each operation comes here
            if type(value) is list or type(value) is tuple:
                instead = self._instead
                break
            if id(value) in known:
                instead = known.get
        if instead is not None:
            args = map(instead, map(id, args), args)
            if kwargs:
                values = kwargs.values()
                kwargs = dict(zip(kwargs, map(instead, map(id, values), values), strict=True))
        return func(*args, **kwargs) if kwargs else func(*args)

    def __len__(self) -> int:
        return len(self._instead_of)

    def end(self) -> None:
        """Substitute nothing any more: Ctrl-C in the moment when torch leaves the mode would leave it on."""
        self._instead_of, self.unread = {}, None

    def _instead(self, key: int, value: Any) -> Any:
        """Return what is seen in place of a value with this id, or of the entries of a list or a tuple."""
        if type(value) is list or type(value) is tuple:
            return type(value)(map(self._instead, map(id, value), value))
        return self._instead_of.get(key, value)


def paired(weights: Sequence[Weight], leaves: Sequence[T]) -> list[tuple[Tensor, T]]:
    """Return each tensor that stands in the places of a weight now, with what belongs to the weight.

    Raises:
        RuntimeError: If a tensor stands in the places of two of them.
    """
    pairs = [(there, leaf) for weight, leaf in zip(weights, leaves, strict=True) for there in weight.now()]
    if len({id(there) for there, _ in pairs}) < len(pairs):
        owner, name = weights[0].places[0]
        raise RuntimeError(
            f"Weights of the tiled module with {type(owner).__name__}.{name} were exchanged or tied since its forward"
            " pass, so its backward pass cannot tell them apart. Do so after the backward pass."
        )
    return pairs


@contextmanager
def substituted(
    weights: Sequence[Weight], leaves: Sequence[Tensor], kind: type[Substituted] = Substituted
) -> Iterator[Any]:
    """Let the modules' code compute with other leaves in place of their weights, as they are now."""
    mode = kind(paired(weights, leaves))
    try:
        with mode:
            yield mode
    finally:
        mode.end()


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

    The leaf's hook adds a tile's gradient to the sum and hands autograd a stand-in without memory, so that only one
    gradient is alive next to the sum. Sums of 16-bit gradients are kept in float32 and rounded once: summed in their
    own dtype, their error grows with the number of tiles.
    """

    def __init__(self, tensor: Tensor, accumulate: str) -> None:
        self.dtype = tensor.dtype
        self.sum_dtype = sum_dtype(tensor.dtype, accumulate)
        self.sum: Tensor | None = None
        self.leaf = tensor.detach().requires_grad_()
        self.edge = get_gradient_edge(self.leaf)  # kept: each tile would make the node anew
        self._nothing = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(self.leaf)
        self.open = False
        mine = weakref.ref(self)  # self refers to the leaf, and the hook of the leaf must not refer to self
        self.leaf.register_hook(lambda gradient: total._arrived(gradient) if (total := mine()) else gradient)

    def _arrived(self, gradient: Tensor | None) -> Tensor | None:
        if self.open:
            return self.add(gradient)
        raise RuntimeError(
            f"A tiled module asks autograd in its forward pass for the gradient of its own weight of shape"
            f" {list(self.leaf.shape)}, which would be summed as the tile's: lt_tiled.untile() the module."
        )

    def add(self, gradient: Tensor | None) -> Tensor | None:
        """Add one tile's gradient, or a part of it; a tiled module inside has none for a weight it does not use."""
        if gradient is None:
            return None
        dense = gradient.layout is torch.strided
        if self.sum is None:
            form: Any = {"memory_format": torch.contiguous_format} if dense else {}
            self.sum = gradient.to(self.sum_dtype, copy=True, **form)
        else:
            self.sum.add_(gradient)
        return self._nothing if dense else gradient

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

    def add_direct(self, tensor: Tensor, gradient: Tensor, module: str) -> None:
        """Add a gradient of the tensor that stands in the weight's place, which code used instead of the leaf.

        Raises:
            RuntimeError: If that is another one than the forward pass saw, or has hooks, which ran for this tile.
        """
        same = tensor.data_ptr() == self.leaf.data_ptr()
        if not same or tensor._backward_hooks:
            why = "its hooks would run for each tile" if same else "it was replaced since the forward pass"
            raise RuntimeError(
                f"{module}: a custom autograd Function uses its weight of shape {list(tensor.shape)} directly, and"
                f" {why}. Leave it as it is until the backward pass, or lt_tiled.untile() the module."
            )
        self.add(gradient)

    def take(self, zeros: bool = False) -> Tensor | None:
        """Return the sum in the tensor's own dtype; if no tile used it, ``None``, or zeros where they are wanted."""
        total, self.sum = self.sum, None
        if total is None:
            return torch.zeros_like(self.leaf, requires_grad=False) if zeros else None
        return total.to(self.dtype)


def differentiate(
    sums: Sequence[GradientSum], outputs: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of inputs, as ``torch.autograd.grad``; those of the sums' leaves are added to the sums.

    The engine is called directly. ``torch.autograd.grad`` does the same after checks of shapes in Python, which the
    engine repeats, for each tile.
    """
    for total in sums:
        total.open = True
    try:
        found: tuple[Tensor | None, ...] = _engine_run_backward(
            tuple(outputs), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
        return found
    finally:
        for total in sums:
            total.open = False
