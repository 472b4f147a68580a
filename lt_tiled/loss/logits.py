"""Deferred logits: what a head returns while its loss is computed in tiles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.loss.autograd import LossTiles, loss_bounds
from lt_tiled.loss.cross_entropy import CrossEntropy
from lt_tiled.tiling.deferred import Deferred
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.recompute import AutocastState
from lt_tiled.tiling.state import Work
from lt_tiled.tiling.weights import substituted, trainable_weights

if TYPE_CHECKING:
    from lt_tiled.loss.transformers import HeadPatch


@dataclass(frozen=True)
class OnHead:
    """What a head that is called with it runs on itself, with its hooks around it."""

    function: Callable[[nn.Module, Tensor], Tensor]


class DeferredLogits(Deferred):
    """Logits ``[..., V]`` that are not computed yet, and what is to be done to them."""

    head: nn.Module
    patch: HeadPatch
    hidden: Tensor
    steps: tuple[tuple[Callable[[Tensor], Tensor], bool], ...]
    """What is to be done to each of the logits, and whether that only makes them float32."""
    meta: Tensor
    """A tensor of their shape and dtype on the meta device."""
    grad_mode: bool
    autocast: AutocastState
    version: int
    """Of the hidden states."""
    full: Tensor | None
    """The full logits, once they were used."""

    @classmethod
    def of(cls, head: nn.Module, patch: HeadPatch, hidden: Tensor, steps: Any, meta: Tensor) -> DeferredLogits:
        """Return deferred logits of hidden states ``[..., H]``."""
        with torch._C.DisableTorchFunctionSubclass():
            link = torch.empty(0, requires_grad=True)
            logits: DeferredLogits = _OnlyFull.apply(patch.name, tuple(meta.shape), meta.dtype, hidden.device, link)
        logits.head, logits.patch, logits.hidden, logits.steps, logits.meta = head, patch, hidden, steps, meta
        logits.grad_mode, logits.autocast, logits.full = torch.is_grad_enabled(), AutocastState.now(hidden.device), None
        logits.version = 0 if hidden.is_inference() else hidden._version
        return logits

    def value(self, because: str = "") -> Tensor:
        """Return the full logits with the graph that they had when the head was called."""
        if self.full is None:
            name, shape = self.patch.name, self.meta.shape
            inform(
                f"the loss of {name} is not tiled: its code uses full logits ({because})", once=f"full logits {name}"
            )
            with torch.set_grad_enabled(self.grad_mode):
                self.full = self._on_head(
                    lambda head, hidden: _computed(self.patch, head, self.steps, hidden).view(shape)
                )
        return self.full

    def data_value(self) -> Tensor:
        """Return the full logits without a graph."""
        return self.value("a custom autograd Function").detach()

    def _on_head(self, function: Callable[[nn.Module, Tensor], Tensor]) -> Any:
        if not self.hidden.is_inference() and self.hidden._version != self.version:
            raise RuntimeError(
                f"{self.patch.name}: the hidden states were changed in place before their logits were used."
                " Make the change out of place, or turn the tiled loss off with loss=False."
            )
        with self.autocast.context():
            return self.head(self.hidden, OnHead(function))

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss in tiles, or the logits with one more thing to be done to them."""
        others = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t is not self]
        if self.full is not None or any(isinstance(t, Deferred) for t in others):
            return NotImplemented
        if func is F.cross_entropy:
            given = _CROSS_ENTROPY.bind(*args, **kwargs)
            given.apply_defaults()
            return self._loss(**given.arguments)
        if func in _DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        to_device = func is Tensor.to and any(not isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values()))
        places = [index for index, a in enumerate(args) if a is self]
        once = len(places) == 1 and not any(v is self for v in kwargs.values())
        if others or to_device or not once or func not in _ENTRYWISE | _RESHAPES:
            return NotImplemented
        left, right = args[: places[0]], args[places[0] + 1 :]  # without this tensor, which holds the hidden states

        def step(logits: Tensor) -> Any:
            return func(*left, logits, *right, **kwargs)

        meta = step(self.meta)
        if func in _RESHAPES:
            kept, steps = meta.shape[-1:] == self.meta.shape[-1:], self.steps
        else:
            upcast = func in (Tensor.float, Tensor.to) and meta.dtype == torch.float32
            kept, steps = meta.shape == self.meta.shape and meta.is_floating_point(), (*self.steps, (step, upcast))
        if not kept:
            return NotImplemented
        logits = DeferredLogits.of(self.head, self.patch, self.hidden, steps, meta)
        logits.grad_mode, logits.autocast, logits.version = self.grad_mode, self.autocast, self.version
        return logits

    def _loss(
        self,
        input: Any,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
        reduction: Any,
        **others: Any,
    ) -> Any:
        """Return ``F.cross_entropy`` in tiles, unless its arguments ask for what tiles do not do."""
        plain = all(value is None for value in others.values()) and not target.is_floating_point()
        if not plain or self.meta.shape[:-1] != target.shape or input is not self:
            return NotImplemented
        patch, steps, vocab_size = self.patch, self.steps, self.meta.shape[-1]
        while steps and steps[-1][1]:  # tiles are float32 themselves
            steps = steps[:-1]

        def compute(head: nn.Module, hidden: Tensor) -> Tensor:
            work = Work(head.forward, (head,))
            weights = trainable_weights(work) if torch.is_grad_enabled() else []

            def logits(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
                before = {} if patch.checked else kept_tensors(work)
                with substituted(weights, leaves):
                    found = _computed(patch, head, steps, rows)
                if found.requires_grad and not patch.checked:
                    known = [cast("Tensor", rows._base), *leaves]
                    check_closed(found, known, work, before, f"the head of {patch.name}")
                    patch.checked = True
                return found

            rows = hidden.reshape(-1, hidden.shape[-1])
            bounds = loss_bounds(patch.num_shards, len(rows), vocab_size)
            patch.learned.note(len(rows), bounds, f"the loss of {patch.name}")
            tiles = LossTiles(CrossEntropy(ignore_index, label_smoothing), reduction, patch.num_shards)
            loss: Tensor = tiles.loss(logits, rows, target.reshape(-1), [w.tensor for w in weights], vocab_size)
            return loss if reduction != "none" else loss.view(target.shape)

        with torch.set_grad_enabled(self.grad_mode and torch.is_grad_enabled()):
            return self._on_head(compute)


def _computed(patch: HeadPatch, head: nn.Module, steps: Any, rows: Tensor) -> Tensor:
    """Return the logits of hidden states. Not a method, because the loss's node keeps it until the backward pass."""
    logits: Tensor = patch.inner(head, rows)
    for function, _ in steps:
        logits = function(logits)
    return logits


class _OnlyFull(torch.autograd.Function):
    """The graph of deferred logits, which only code below Python's operators can reach: it raises there."""

    @staticmethod
    def forward(
        ctx: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, _: Tensor
    ) -> Any:
        ctx.name = name
        return DeferredLogits.like(shape, dtype, device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name}: a custom autograd Function uses the full logits, which a tiled loss does not have: turn it"
            " off with loss=False."
        )


class HeadOutput:
    """Carries deferred logits past the hooks of engines, which would compute a tensor; any use unwraps it."""

    def __init__(self, logits: DeferredLogits) -> None:
        self.logits = logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["logits"], name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(HeadOutput, lambda output: output.logits, (args, kwargs or {}))
        return func(*args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    return lambda output, *args: getattr(output.logits, name)(*args)


_COMPARE = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
OPERATORS = {
    name
    for name in set(dir(Tensor)) - (set(dir(object)) - _COMPARE) - {"__torch_function__"}
    if name.startswith("__") and callable(getattr(Tensor, name))
}
for _name in OPERATORS:
    setattr(HeadOutput, _name, _operator(_name))


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_DESCRIBES = {getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "stride", "ndimension")}
_DESCRIBES |= {getattr(torch._C.TensorBase, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")}
_ENTRYWISE = {torch.tanh, Tensor.tanh, Tensor.float, Tensor.to, torch.mul, torch.div, torch.true_divide}
_ENTRYWISE |= {
    Tensor.mul,
    Tensor.div,
    Tensor.true_divide,
    *(getattr(Tensor, f"__{n}__") for n in ("mul", "rmul", "truediv", "div")),
}
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.flatten, torch.flatten}
