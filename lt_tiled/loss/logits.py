"""Deferred logits: what a head returns while its model computes a loss in tiles."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled._log import inform
from lt_tiled.loss.autograd import LossTiles, loss_bounds
from lt_tiled.loss.cross_entropy import CrossEntropy
from lt_tiled.loss.products import linear
from lt_tiled.modules.find import ENGINES
from lt_tiled.modules.patch import HOOKS, Order, Patch, is_of
from lt_tiled.tiling.call import LargestCall, TileFunction
from lt_tiled.tiling.effects import check_leaves
from lt_tiled.tiling.observe import Observation, restored
from lt_tiled.tiling.pending import Deferred
from lt_tiled.tiling.recompute import Precision, is_transformed, version_of
from lt_tiled.tiling.weights import in_places, one_thread, swapped, weights_of


@dataclass(frozen=True)
class OnHead:
    """A function that a head runs instead of its forward, with its hooks around: ``head(hidden, OnHead(function))``."""

    function: Callable[[nn.Module, Tensor], Tensor]


class HeadPatch(Patch):
    """On the head of a model that computes its own loss, for one owner."""

    order = Order.HEAD

    called = False
    """Whether the head was called: MobileBERT computes its logits from the head's weight."""
    grad_mode: bool | None = None
    """The gradient mode of the model's call, while the model computes a loss in tiles."""

    def __init__(self, name: str, num_shards: int | Literal["auto"], owner: object) -> None:
        self.name, self.num_shards, self.owner = name, num_shards, owner
        self.largest = LargestCall()
        self.untiled = False
        """Whether the model's code does not call its head."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy: Any = super().__deepcopy__(memo)
        copy.largest = replace(self.largest)
        return copy

    def plain(self, head: nn.Module) -> bool:
        """Whether the head computes what its weight and bias say, which are tensors of torch."""
        own = self.replaced is None and type(head).forward is nn.Linear.forward
        return own and not any(is_traceable_wrapper_subclass(p) for p in head.parameters())

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return deferred logits where the model computes a loss in tiles."""
        if len(args) == 2 and isinstance(args[1], OnHead):
            return args[1].function(module, args[0])
        self.called = True
        plain = len(args) == 1 and not kwargs and not torch.compiler.is_compiling() and not is_transformed()
        # Gradients that are off in the head alone are those of a reentrant checkpoint, which gives its output a graph.
        if self.grad_mode != torch.is_grad_enabled() or not plain:
            return self.inner(module, *args, **kwargs)
        hooks = [h for place in HOOKS for h in list(getattr(module, place).values())]
        (hidden,) = args
        if not all(is_of(hook, ENGINES) for hook in hooks) or hasattr(hidden, "placements"):  # a DTensor
            inform(
                f"the loss of {self.name} is not tiled: hooks on its head, or tensor parallelism, need full logits",
                once=f"hooks {self.name}",
            )
            return self.inner(module, hidden)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        shape: tuple[int, ...] = (*hidden.shape[:-1], int(module.out_features))  # type: ignore[arg-type]
        logits = DeferredLogits.of(HeadCall(module, self, hidden), torch.empty(shape, dtype=dtype, device="meta"))
        if not hooks:
            return logits

        def last(head: nn.Module, args: Any, output: Any) -> DeferredLogits:
            handle.remove()
            return logits

        handle = module.register_forward_hook(last)
        return logits.call  # past the hooks of engines, which would compute a tensor


class HeadCall:
    """One call of a head, which runs when its logits are used."""

    def __init__(self, head: nn.Module, patch: HeadPatch, hidden: Tensor) -> None:
        self.head, self.patch, self.hidden = head, patch, hidden
        self.grad_mode, self.autocast = torch.is_grad_enabled(), Precision.now(hidden.device)
        self.versions = self._versions()
        self.logits: list[weakref.ref[DeferredLogits]] = []
        """All that its output became, oldest first; they may share memory."""

    def run(self, function: Callable[[nn.Module, Tensor], Tensor]) -> Any:
        """Run a function on the head and the hidden states, with the head's hooks around it.

        Raises:
            RuntimeError: If the hidden states or the weights are no longer those of the call.
        """

        def checked(head: nn.Module, hidden: Tensor) -> Tensor:
            if self._versions() != self.versions:  # only here have engines all-gathered the weights
                raise RuntimeError(
                    f"{self.patch.name}: the hidden states or weights of its head were changed before its logits were"
                    " used. Use them before, or turn the tiled loss off with loss=False."
                )
            return function(head, hidden)

        with torch.set_grad_enabled(self.grad_mode), self.autocast.context():
            return self.head(self.hidden, OnHead(checked))

    def _versions(self) -> list[int]:
        return [version_of(tensor) for tensor in (self.hidden, *self.head.parameters())]


class DeferredLogits(Deferred):
    """Logits ``[..., V]`` that are not computed yet: the output of a head, or what a step made of others."""

    call: HeadCall
    source: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None
    """The logits that these were made of, and the step."""
    steps: tuple[tuple[Callable[[Tensor], Tensor], bool], ...]
    """What is to be done to each of the head's logits, and whether that only makes them float32."""
    meta: Tensor
    """A tensor of their shape and dtype on the meta device."""
    full: Tensor | None
    """The full logits, once any of the same call were used."""

    @classmethod
    def of(cls, call: HeadCall, meta: Tensor, source: Any = None, steps: Any = ()) -> DeferredLogits:
        """Return deferred logits of a call."""
        with torch._C.DisableTorchFunctionSubclass():
            link = torch.empty(0, requires_grad=True)
            logits: DeferredLogits = _OnlyFull.apply(
                call.patch.name, tuple(meta.shape), meta.dtype, call.hidden.device, link
            )
        logits.call, logits.meta, logits.full = call, meta, None
        logits.source, logits.steps = source, steps
        call.logits.append(weakref.ref(logits))
        return logits

    def value(self, because: str = "") -> Tensor:
        """Return the full logits with the graph that they had when the head was called."""
        if self.full is None:
            name = self.call.patch.name
            message = f"the loss of {name} is not tiled: its code uses full logits ({because})"
            inform(message, once=f"full logits {name}")
            for reference in self.call.logits:  # all, because this use may change memory that others share
                if (logits := reference()) is not None:
                    logits._compute()
        return cast("Tensor", self.full)

    def _compute(self) -> None:
        if self.source is None:
            self.full = self.call.run(self.call.patch.inner)
        else:
            logits, step = self.source
            with torch.set_grad_enabled(self.call.grad_mode):
                self.full = step(cast("Tensor", logits.full))
        self.source, self.has_value = None, True

    def data_value(self) -> Tensor:
        """Return the full logits without a graph."""
        return self.value("a custom autograd Function").detach()

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss in tiles, or the logits with one more thing to be done to them."""
        others = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t is not self]
        same_mode = self.call.grad_mode == torch.is_grad_enabled()
        if self.full is not None or not same_mode or any(isinstance(t, Deferred) for t in others):
            return NotImplemented
        if func is F.cross_entropy:
            given = _CROSS_ENTROPY.bind(*args, **kwargs)
            given.apply_defaults()
            return self._loss(**given.arguments)
        to_device = func is Tensor.to and any(not isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values()))
        places = [index for index, a in enumerate(args) if a is self]
        once = len(places) == 1 and not any(v is self for v in kwargs.values())
        if others or to_device or not once or func not in _ENTRYWISE | _RESHAPES:
            return NotImplemented
        left, right = args[: places[0]], args[places[0] + 1 :]  # without this tensor, which holds the hidden states

        def step(logits: Tensor) -> Any:
            return func(*left, logits, *right, **kwargs)

        meta, steps = step(self.meta), self.steps
        if func in _RESHAPES:
            kept = meta.shape[-1:] == self.meta.shape[-1:] and meta.dtype == self.meta.dtype
        else:
            kept = meta.shape == self.meta.shape and meta.is_floating_point()
            steps = (*steps, (step, func in (Tensor.float, Tensor.to) and meta.dtype == torch.float32))
        return DeferredLogits.of(self.call, meta, (self, step), steps) if kept else NotImplemented

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
        plain = all(value is None for value in others.values()) and target.dtype in (torch.long, torch.uint8)
        if not plain or self.meta.dim() > 2 or self.meta.shape[:-1] != target.shape or input is not self:
            return NotImplemented
        patch, steps = self.call.patch, self.steps
        while steps and steps[-1][1]:  # tiles are float32 themselves
            steps = steps[:-1]

        def compute(head: nn.Module, hidden: Tensor) -> Tensor:
            rows = hidden.reshape(-1, hidden.shape[-1])
            bounds = loss_bounds(patch.num_shards, *rows.shape)
            patch.largest.note(len(rows), bounds, f"the loss of {patch.name}")
            tiles = LossTiles(CrossEntropy(ignore_index, label_smoothing), reduction, patch.num_shards)
            if patch.plain(head) and not steps and reduction != "none":
                plain = [cast("Tensor", w) for w in (head.weight, head.bias) if w is not None]
                return tiles.loss(linear, hidden, target, plain)
            work = TileFunction.of(head.forward, (head,), None, whole=True)
            weights = weights_of(work.parts) if torch.is_grad_enabled() else {}
            remedy = "turn the tiled loss off with loss=False"
            state = Observation(f"the head of {patch.name}", work.modules, remedy, substituted=True)
            tiles_run = count()

            def logits(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
                first = next(tiles_run) == 0
                swap = swapped(in_places(weights.values(), leaves))
                with restored(state, "its backward pass"), one_thread(patch, patch.name), swap:
                    found = _computed(patch, head, steps, rows)
                if found.requires_grad and first:  # in each call: what was frozen in the first one counts too
                    known = [cast("Tensor", rows._base), *leaves]
                    check_leaves([found.grad_fn], set(map(id, known)), f"the head of {patch.name}")
                return found

            return tiles.loss(logits, hidden, target, list(weights))

        return self.call.run(compute)


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


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_ENTRYWISE = {torch.tanh, Tensor.tanh, Tensor.float, Tensor.to, torch.mul, torch.div, torch.true_divide}
_ENTRYWISE |= {
    Tensor.mul,
    Tensor.div,
    Tensor.true_divide,
    *(getattr(Tensor, f"__{n}__") for n in ("mul", "rmul", "truediv", "div")),
}
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.flatten, torch.flatten}
