"""The loss of Hugging Face models, tile by tile, without a change to their code.

NOTE [Deferred logits]
While a causal model runs with labels its head computes nothing and returns deferred logits. What the model does to them
before its loss joins: a scale, a cap or a cast is done in the tiles, a slice or a view of tokens to the hidden states.
``F.cross_entropy`` of them runs in tiles: the head, what joined, and the loss. The head is called once more for that,
through its hooks, so that engines gather its weights. Any other use in the model's code computes full logits at once.
The logits of the output are ``None``, as in Liger.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import EllipsisType
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform, warn
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.autograd import LossTiles, loss_bounds
from lt_tiled.loss.cross_entropy import CrossEntropy
from lt_tiled.loss.products import linear
from lt_tiled.modules.cache import by_name
from lt_tiled.modules.find import ENGINES, walk_all
from lt_tiled.modules.patch import HOOKS, Order, Patch, get_patch, get_patches, is_of, remove_patch, set_patch
from lt_tiled.policies import LossShards
from lt_tiled.recompute.mode import Precision, is_transformed
from lt_tiled.tiling.call import LargestCall
from lt_tiled.tiling.pending import Deferred
from lt_tiled.tiling.weights import in_places, one_thread, swapped, weights_of

# The model and its head


@dataclass(eq=False)
class LossPatch(Patch):
    """On a model that computes its own loss, for one owner: in tiles in training, and maybe in evaluation, too."""

    order = Order.CALLER
    name: str
    evaluation: bool
    owner: object

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the head know whether the model computes a loss in tiles."""
        head = get_patch(module.get_output_embeddings(), HeadPatch)  # as it is now: peft may have put another there
        labeled = by_name(type(module).forward, args, kwargs).get("labels") is not None
        asked = labeled and (module.training or self.evaluation)
        if head is None or not asked or torch.compiler.is_compiling():
            return self.inner(module, *args, **kwargs)
        with swapped([(vars(head), "grad_mode", torch.is_grad_enabled())]):
            output = self.inner(module, *args, **kwargs)
        if not head.called:  # MobileBERT computes its logits from the head's weight
            head.called = False
            warn(
                f"the loss of {self.name} is not tiled: its code does not call its head. Use"
                " lt_tiled.tiled_linear_cross_entropy in your own loss, or set loss=False to silence this warning.",
                once=f"head {self.name}",
            )
        return pytree.tree_map_only(DeferredLogits, lambda logits: logits.computed, output)


@dataclass(eq=False)
class HeadPatch(Patch):
    """On the head of a model that computes its own loss, for one owner."""

    order = Order.HEAD
    name: str
    num_shards: int | Literal["auto"]
    owner: object
    largest: LargestCall = field(default_factory=LargestCall)
    called: bool | None = None
    """Whether the model's code calls its head; ``None`` if it did not run yet."""
    grad_mode: bool | None = None
    """The gradient mode of the model's call, while the model computes a loss in tiles."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return deferred logits where the model computes a loss in tiles, or run a function in place of the head."""
        if len(args) == 2 and isinstance(args[1], partial):
            return args[1](args[0])
        self.called = True
        # 1. Gradients that are off in the head alone are those of a reentrant checkpoint, which returns another graph.
        if self.grad_mode != torch.is_grad_enabled() or len(args) != 1 or kwargs or is_transformed():
            return self.inner(module, *args, **kwargs)
        # 2. Hooks of engines gather the weights of the head. Those inside of it would do so for each tile.
        own, *inside = [[hook for place in HOOKS for hook in getattr(m, place).values()] for m in module.modules()]
        if any(inside) or not all(is_of(hook, ENGINES) for hook in own) or hasattr(args[0], "placements"):  # a DTensor
            inform(
                f"the loss of {self.name} is not tiled: hooks on its head, or tensor parallelism, need full logits",
                once=f"hooks {self.name}",
            )
            return self.inner(module, *args)
        # 3. Logits without values, which hooks of engines would compute: those see None.
        precision = Precision.now(args[0].device)
        logits = DeferredLogits.of(HeadCall(module, self, torch.is_grad_enabled(), precision), args[0])
        if not own:
            return logits

        def last(head: nn.Module, args: Any, output: Any) -> DeferredLogits:
            handle.remove()
            return logits

        handle = module.register_forward_hook(last)
        return None


@dataclass
class HeadCall:
    """One call of a head, which runs when its logits are used."""

    head: Any
    patch: HeadPatch
    grad_mode: bool
    precision: Precision
    used: bool = False
    """Whether full logits were computed, which the model's code may have changed in place since."""

    def run(self, function: partial[Tensor], hidden: Tensor) -> Tensor:
        """Run a function on hidden states in place of the head, with its hooks around: its weights are there."""
        with torch.set_grad_enabled(self.grad_mode), self.precision.context():
            return cast("Tensor", self.head(hidden, function))

    def loss(self, hidden: Tensor, steps: Sequence[Step], target: Tensor, tiles: LossTiles) -> Tensor:
        """Return the loss of hidden states ``[T, H]``. Its node keeps the head and the steps."""
        head, patch = self.head, self.patch
        patch.largest.note(len(hidden), loss_bounds(tiles.num_shards, *hidden.shape), f"the loss of {patch.name}")
        if not steps and patch.replaced is None and type(head).forward is nn.Linear.forward:
            return tiles.loss(linear, hidden, target, [w for w in (head.weight, head.bias) if w is not None])
        weights = weights_of(list(head.modules())) if torch.is_grad_enabled() else {}

        def logits(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
            with one_thread(patch, patch.name), swapped(in_places(weights.values(), leaves)):
                found: Tensor = patch.inner(head, rows)
                for step in steps:
                    found = step(found)
            return found

        return tiles.loss(logits, hidden, target, list(weights))


# Its logits

Step = Callable[[Tensor], Tensor]
"""Something that a model does to its logits."""


class DeferredLogits(Deferred):
    """Logits ``[..., V]`` that are not computed yet: see NOTE [Deferred logits]."""

    call: HeadCall
    hidden: Tensor
    """The hidden states of their tokens, ``[..., H]``."""
    steps: tuple[Step, ...]
    """What is to be done to the head's logits."""
    source: tuple[DeferredLogits, Step] | None
    """The logits that these were made of, and how."""

    @classmethod
    def of(
        cls, call: HeadCall, hidden: Tensor, dtype: Any = None, steps: tuple[Step, ...] = (), source: Any = None
    ) -> DeferredLogits:
        """Return deferred logits of a call."""
        dtype = dtype or call.precision.dtype or hidden.dtype
        logits: DeferredLogits = cls.like((*hidden.shape[:-1], call.head.out_features), dtype, hidden.device)
        if call.grad_mode:
            with torch._C.DisableTorchFunctionSubclass():
                logits.requires_grad_().register_hook(partial(_refuse, call.patch.name))
        vars(logits).update(call=call, hidden=hidden, steps=steps, source=source)
        return logits

    def compute(self) -> Tensor:
        """Return the full logits with their graph; views of others are views of their full logits."""
        self.call.used = True
        if self.source is None:
            return self.call.run(partial(self.call.patch.inner, self.call.head), self.hidden)
        logits, step = self.source
        with torch.set_grad_enabled(self.call.grad_mode):
            return step(logits.value())

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss in tiles, or the logits with one more thing to be done to them."""
        if self.call.used:
            return NotImplemented
        found = NotImplemented
        if self.call.grad_mode == torch.is_grad_enabled() and args and args[0] is self:
            # torch hands on the arguments of the loss behind its target by name.
            loss = func is F.cross_entropy
            found = self._loss(*args[1:], **kwargs) if loss else self._step(func, args[1:], kwargs)
        if found is NotImplemented:
            message = f"the loss of {self.call.patch.name} is not tiled: its code uses full logits"
            inform(f"{message} ({getattr(func, '__name__', func)})", once=message)
        return found

    def _step(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def step(tensor: Tensor) -> Tensor:
            return cast("Tensor", func(tensor, *rest, **kwargs))

        kinds = _JOIN.get(getattr(func, "__name__", "").removeprefix("__").removesuffix("__"))
        if kinds is None or not all(isinstance(value, kinds) for value in pytree.tree_leaves((rest, kwargs))):
            return NotImplemented
        hidden, steps = self.hidden, self.steps
        like = step(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        if kinds is _NUMBER:
            steps = (*steps, step)
        elif kinds is torch.dtype:
            steps = (*steps, Tensor.float if like.dtype == torch.float32 else step)
        elif func is Tensor.__getitem__:  # of tokens, as the next one: of which there are hidden states
            hidden = step(hidden)
        elif like.shape[-1] == self.shape[-1]:
            hidden = hidden.reshape(*like.shape[:-1], hidden.shape[-1])
        fit = like.shape == (*hidden.shape[:-1], self.shape[-1]) and hidden.shape[-1] == self.hidden.shape[-1]
        if not fit or not like.is_floating_point():
            return NotImplemented
        return DeferredLogits.of(self.call, hidden, like.dtype, steps, (self, step))

    def _loss(self, target: Tensor, ignore_index: int, reduction: Any, label_smoothing: float, **others: Any) -> Any:
        """Return ``F.cross_entropy`` in tiles, unless its arguments ask for what tiles do not do."""
        plain = all(value is None for value in others.values()) and target.dtype in (torch.long, torch.uint8)
        if not plain or self.dim() != 2 or self.shape[:-1] != target.shape:
            return NotImplemented
        call, steps = self.call, self.steps
        while steps and steps[-1] is Tensor.float:  # tiles are float32 themselves
            steps = steps[:-1]
        kind = CrossEntropy(ignore_index, label_smoothing)
        tiles = LossTiles(kind, reduction, call.patch.num_shards, f"the head of {call.patch.name}")
        return call.run(partial(call.loss, steps=steps, target=target, tiles=tiles), self.hidden)


def _refuse(name: str, gradient: Tensor) -> None:
    """Raise for a gradient of deferred logits, which only code below Python's operators can give them."""
    raise RuntimeError(f"{name}: a custom autograd Function uses the full logits: turn the tiled loss off, loss=False.")


_NUMBER = int | float
_JOIN: dict[str, Any] = {
    **dict.fromkeys(("float", "to"), torch.dtype),
    **dict.fromkeys(("tanh", "mul", "rmul", "div", "truediv", "true_divide"), _NUMBER),
    **dict.fromkeys(("view", "reshape", "contiguous", "flatten"), int | torch.Size),
    "getitem": slice | int | EllipsisType | None,
}
"""The names of functions and operators that join, and the types of their arguments besides the logits."""

# Finding, patching and restoring


def find_losses(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the models of transformers, in a model, that compute their loss from labels and a linear head.

    Raises:
        NothingFoundError: If there is none.
    """
    found = [(path, m) for path, m in walk_all(model) if _head_of(m) is not None]
    if not found:
        raise NothingFoundError(
            f"loss=True found no model of transformers in {type(model).__name__} that computes a loss from labels: use"
            " lt_tiled.tiled_linear_cross_entropy in your own loss, or leave loss=True out."
        )
    return found


def _head_of(module: nn.Module) -> Any:
    get = getattr(module, "get_output_embeddings", None)
    # In this order: transformers warns when a model that has no loss is asked for its function.
    if get is None or "labels" not in inspect.signature(type(module).forward).parameters:
        return None
    head = get() if hasattr(module, "loss_function") else None
    return head if isinstance(getattr(head, "out_features", None), int) else None


def patch_losses(
    found: Sequence[tuple[str, nn.Module]], loss: LossShards, owner: object, evaluation: bool = False
) -> None:
    """Let these models compute their losses in tiles, for the owner to undo. The last number of tiles counts.

    With ``evaluation`` or ``"always"``, losses of the evaluation are in tiles, too.
    """
    for _, module in found:
        head, name = _head_of(module), type(module).__name__
        set_patch(module, LossPatch(name, evaluation or loss == "always", owner))
        before = get_patch(head, HeadPatch)
        if before is None or before.owner is not owner:  # models may share a head
            set_patch(head, HeadPatch(name, loss if isinstance(loss, int) else "auto", owner))


def restore_losses(model: nn.Module, owner: object) -> None:
    """Undo :func:`patch_losses`."""
    for _, module in walk_all(model):
        for patch in (*get_patches(module, LossPatch), *get_patches(module, HeadPatch)):
            if patch.owner is owner:
                remove_patch(module, patch)
