"""Deferred logits: what a head returns while its loss is computed in tiles."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled._log import inform
from lt_tiled.loss.autograd import LossTiles, loss_bounds
from lt_tiled.loss.cross_entropy import CrossEntropy
from lt_tiled.loss.products import linear
from lt_tiled.modules.patch import SharedPatch
from lt_tiled.policies import LossShards
from lt_tiled.tiling.deferred import READS, Deferred
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.observe import Observation, restored
from lt_tiled.tiling.recompute import Precision, version_of
from lt_tiled.tiling.state import Learned
from lt_tiled.tiling.weights import Work, substituted, trainable_weights


class TiledHead(SharedPatch):
    """The head of a model whose loss is computed in tiles; each owner's value is a number of tiles."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.learned = Learned()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy: Any = super().__deepcopy__(memo)
        copy.learned = Learned(self.learned.largest)
        return copy

    def plain(self, head: nn.Module) -> bool:
        """Whether the head computes what its weight and bias say, which are tensors of torch."""
        own = self.replaced is None and type(head).forward is nn.Linear.forward
        return own and not any(is_traceable_wrapper_subclass(p) for p in head.parameters())

    @property
    def num_shards(self) -> LossShards:
        """The number of tiles that was asked for last."""
        return next((count for count in reversed(self.owners.values()) if count != "auto"), "auto")


@dataclass(frozen=True)
class OnHead:
    """A function that a head runs instead of its forward, with its hooks around: ``head(hidden, OnHead(function))``."""

    function: Callable[[nn.Module, Tensor], Tensor]


@dataclass
class LossCall:
    """One call of a model with labels."""

    grad_mode: bool
    over: bool = False


_optimizer_steps = [0]


def _count_step(*_: Any) -> None:
    _optimizer_steps[0] += 1


# FSDP and ZeRO-3 gather new weights with the version counters of the old ones, so versions miss optimizer steps.
register_optimizer_step_pre_hook(_count_step)


class HeadCall:
    """One call of a head, which runs when its logits are used."""

    def __init__(self, head: nn.Module, patch: TiledHead, hidden: Tensor, model: LossCall) -> None:
        self.head, self.patch, self.model = head, patch, model
        self.hidden: Tensor | None = hidden
        self.device = hidden.device
        self.autocast = Precision.now(hidden.device)
        remedy = "turn the tiled loss off with loss=False"
        self.state = None if patch.plain(head) else Observation(f"the head of {patch.name}", (head,), remedy)
        """What a head with code of its own can read, such as the adapters that are on."""
        self.versions = self._versions()
        self.logits: list[weakref.ref[DeferredLogits]] = []
        """All that its output became, oldest first; they may share memory."""

    def run(self, function: Callable[..., Tensor]) -> Any:
        """Run a function on the head and the hidden states, with the head's hooks around it.

        Raises:
            RuntimeError: If the hidden states or the weights may no longer be those of the call.
        """
        name, hidden = self.patch.name, self.hidden
        if hidden is None:
            raise RuntimeError(
                f"The logits of {name} are computed when they are used, and the hidden states were freed when the"
                " backward pass of its loss began. Use the logits before, or turn the tiled loss off with loss=False."
            )

        def checked(head: nn.Module, hidden: Tensor) -> Tensor:
            found = self._versions()  # only here have engines all-gathered the weights
            if [kind for kind, _ in found] != [kind for kind, _ in self.versions]:
                raise RuntimeError(
                    f"{name}: FSDP has sharded the weights of its head since its forward pass, so its logits cannot be"
                    " computed. Make the head an FSDP unit of its own with auto_wrap_policy, use FSDP2, or turn the"
                    " tiled loss off with loss=False."
                )
            if found != self.versions:
                raise RuntimeError(
                    f"{name}: the hidden states or weights of its head were changed, or an optimizer made a step,"
                    " before its logits were used. Use them before, or turn the tiled loss off with loss=False."
                )
            return function(head, hidden)

        def as_called(head: nn.Module, hidden: Tensor) -> Tensor:
            with restored(self.state, "the use of its logits"):  # here for the same reason
                return checked(head, hidden)

        with self.autocast.context():
            return self.head(hidden, OnHead(checked if self.state is None else as_called))

    def _versions(self) -> list[tuple[Any, int]]:
        tensors = (cast("Tensor", self.hidden), *self.head.parameters())
        return [(None, _optimizer_steps[0]), *(((type(t), t.shape), version_of(t)) for t in tensors)]


class DeferredLogits(Deferred):
    """Logits ``[..., V]`` that are not computed yet: the output of a head, or what a step made of others."""

    call: HeadCall
    source: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None
    """The logits that these were made of, and the step."""
    steps: tuple[tuple[Callable[[Tensor], Tensor], bool], ...]
    """What is to be done to each of the head's logits, and whether that only makes them float32."""
    meta: Tensor
    """A tensor of their shape and dtype on the meta device."""
    grad_mode: bool
    full: Tensor | None
    """The full logits, once any of the same call were used."""

    @classmethod
    def of(cls, call: HeadCall, meta: Tensor, grad_mode: bool, source: Any = None, steps: Any = ()) -> DeferredLogits:
        """Return deferred logits of a call."""
        with torch._C.DisableTorchFunctionSubclass():
            link = torch.empty(0, requires_grad=True)
            name, device = call.patch.name, call.device
            logits: DeferredLogits = _OnlyFull.apply(name, tuple(meta.shape), meta.dtype, device, link)
        logits.call, logits.meta, logits.grad_mode, logits.full = call, meta, grad_mode, None
        logits.source, logits.steps = source, steps
        call.logits.append(weakref.ref(logits))
        return logits

    def value(self, because: str = "") -> Tensor:
        """Return the full logits with the graph that they had when the head was called."""
        if self.full is None:
            name = self.call.patch.name
            if not self.call.model.over:
                message = f"the loss of {name} is not tiled: its code uses full logits ({because})"
                inform(message, once=f"full logits {name}")
            for reference in self.call.logits:  # all, because this use may change memory that others share
                if (logits := reference()) is not None:
                    logits._compute()
        return cast("Tensor", self.full)

    def _compute(self) -> None:
        with torch.set_grad_enabled(self.grad_mode), self.call.autocast.context():
            if self.source is None:
                self.full = self.call.run(self.call.patch.inner)
            else:
                self.full = self.source[1](cast("Tensor", self.source[0].full))
        self.source, self.has_value = None, True

    def data_value(self) -> Tensor:
        """Return the full logits without a graph."""
        return self.value("a custom autograd Function").detach()

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss in tiles, or the logits with one more thing to be done to them."""
        others = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t is not self]
        if self.full is not None or any(isinstance(t, Deferred) for t in others):
            return NotImplemented
        if func in READS and not self.grad_mode:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
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
        grad_mode = self.grad_mode and (meta is self.meta or torch.is_grad_enabled()) and func is not Tensor.detach
        return DeferredLogits.of(self.call, meta, grad_mode, (self, step), steps) if kept else NotImplemented

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
        patch, steps, vocab_size = self.call.patch, self.steps, self.meta.shape[-1]
        while steps and steps[-1][1]:  # tiles are float32 themselves
            steps = steps[:-1]

        def compute(head: nn.Module, hidden: Tensor) -> Tensor:
            rows = hidden.reshape(-1, hidden.shape[-1])
            bounds = loss_bounds(patch.num_shards, *rows.shape)
            patch.learned.note(len(rows), bounds, f"the loss of {patch.name}")
            kind, holder = CrossEntropy(ignore_index, label_smoothing), weakref.ref(self.call)
            tiles = LossTiles(kind, reduction, patch.num_shards, holder=holder)
            if patch.plain(head) and not steps and reduction != "none":
                plain = [cast("Tensor", w) for w in (head.weight, head.bias) if w is not None]
                return tiles.loss(linear, hidden, target, plain, vocab_size)
            work = Work(head.forward, (head,))
            weights = trainable_weights(work.parts) if torch.is_grad_enabled() else []
            remedy = "turn the tiled loss off with loss=False"
            state = Observation(f"the head of {patch.name}", work.modules, remedy, substituted=True)
            tiles_run = count()

            def logits(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
                first = next(tiles_run) == 0
                before = kept_tensors(work) if first else {}
                with restored(state, "its backward pass"), substituted(weights, leaves):
                    found = _computed(patch, head, steps, rows)
                if found.requires_grad and first:  # in each call: what was frozen in the first one counts too
                    known = [cast("Tensor", rows._base), *leaves]
                    check_closed(found, known, work, before, f"the head of {patch.name}")
                return found

            return tiles.loss(logits, hidden, target, [w.tensor for w in weights], vocab_size)

        with torch.set_grad_enabled(self.grad_mode and torch.is_grad_enabled()):
            return self.call.run(compute)


def _computed(patch: TiledHead, head: nn.Module, steps: Any, rows: Tensor) -> Tensor:
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
_ENTRYWISE = {torch.tanh, Tensor.tanh, Tensor.detach, Tensor.float, Tensor.to, torch.mul, torch.div, torch.true_divide}
_ENTRYWISE |= {
    Tensor.mul,
    Tensor.div,
    Tensor.true_divide,
    *(getattr(Tensor, f"__{n}__") for n in ("mul", "rmul", "truediv", "div")),
}
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.flatten, torch.flatten}
