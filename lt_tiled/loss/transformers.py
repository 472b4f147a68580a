"""The loss of Hugging Face models, tile by tile, without a change to their code.

NOTE [Deferred logits]
While a causal model runs with labels its head computes nothing and returns deferred logits. What the model does to them
before its loss joins: a scale, a cap or a cast is done in the tiles, a slice or a view of tokens to the hidden states.
``F.cross_entropy`` of them runs in tiles: the head, what joined, and the loss. The head is called once more for that,
through its hooks, so that engines gather its weights. Any other use in the model's code computes full logits at once,
but in the output they are ``None``, as in Liger.
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

from lt_tiled._log import warn
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.autograd import linear, loss_sizes, tiled_loss
from lt_tiled.loss.cross_entropy import CrossEntropy
from lt_tiled.modules.cache import by_name
from lt_tiled.modules.find import ENGINES, walk
from lt_tiled.modules.patch import Order, Patch, get_patch, has_hooks, set_patch
from lt_tiled.policies import LossShards
from lt_tiled.recompute.mode import Precision, is_transformed
from lt_tiled.tiling.call import LargestCall
from lt_tiled.tiling.pending import Deferred
from lt_tiled.tiling.weights import in_places, swapped, weights_of

# The model and its head


@dataclass(eq=False)
class LossPatch(Patch):
    """On a model that computes its own loss, for one owner: in tiles in training, and maybe in evaluation, too."""

    order = Order.CALLER
    evaluation: bool
    owner: object

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the head know whether the model computes a loss in tiles."""
        head = get_patch(module.get_output_embeddings(), HeadPatch)  # as it is now: peft may have put another there
        labeled = by_name(type(module).forward, args, kwargs).get("labels") is not None
        if head is None or not labeled or not (module.training or self.evaluation):
            return self.inner(module, *args, **kwargs)
        head.untiled = "its code does not call its head"
        with swapped([(vars(head), "grad_mode", torch.is_grad_enabled())]):
            output = self.inner(module, *args, **kwargs)
        if head.untiled:
            message = f"the loss of {head.name} is not tiled: {head.untiled}"
            remedy = "Use lt_tiled.tiled_linear_cross_entropy in your own loss, or set loss=False."
            warn(f"{message}. {remedy}", once=message)
        return pytree.tree_map_only(DeferredLogits, lambda logits: logits.computed, output)


@dataclass(eq=False)
class HeadPatch(Patch):
    """On the head of a model that computes its own loss, for one owner."""

    order = Order.HEAD
    name: str
    num_shards: int | Literal["auto"]
    owner: object
    largest: LargestCall = field(default_factory=LargestCall)
    untiled = ""  # or why the last loss used full logits
    grad_mode: bool | None = None  # of the model's call, while it computes a loss in tiles

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return deferred logits where the model computes a loss in tiles, or run a function in place of the head."""
        # 1. Outside of such a model, or at the end of it.
        if len(args) == 2 and isinstance(args[1], partial):
            return args[1](args[0])
        if self.grad_mode is None:
            return self.inner(module, *args, **kwargs)
        # 2. Hooks of engines gather the weights of the head. Those inside of it would do so for each tile. Gradients
        # that are off in the head alone are those of a reentrant checkpoint, which returns another graph.
        inside = any(has_hooks(part) for part in module.modules() if part is not module)
        is_plain = self.grad_mode == torch.is_grad_enabled() and len(args) == 1 and not kwargs and not is_transformed()
        if inside or has_hooks(module, ENGINES) or not is_plain or hasattr(args[0], "placements"):  # a DTensor
            self.untiled = "hooks, tensor parallelism or a reentrant checkpoint of its head need full logits"
            return self.inner(module, *args, **kwargs)
        # 3. Logits without values, which hooks of engines would compute: those see None.
        precision = Precision.now(args[0].device)
        call = HeadCall(module, self, self.grad_mode, precision)
        logits = DeferredLogits.of(call, args[0], precision.dtype or args[0].dtype)
        if not has_hooks(module):
            return logits

        def last(head: nn.Module, args: Any, output: Any) -> Any:
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
    used: bool = False  # full logits were computed, which the model's code may have changed in place since

    def run(self, function: partial[Tensor], hidden: Tensor) -> Tensor:
        """Run a function on hidden states in place of the head, with its hooks around: its weights are there."""
        with torch.set_grad_enabled(self.grad_mode), self.precision.context():
            return cast("Tensor", self.head(hidden, function))

    def loss(self, hidden: Tensor, steps: Sequence[Step], target: Tensor, kind: CrossEntropy) -> Tensor:
        """Return the loss of hidden states ``[T, H]``. Its node keeps the head and the steps."""
        head = self.head
        patch = self.patch
        sizes = loss_sizes(patch.num_shards, len(hidden), hidden.shape[-1])
        patch.untiled = ""
        patch.largest.note(len(hidden), sizes, f"the loss of {patch.name}")
        name = f"the head of {patch.name}"
        loss: partial[Tensor] = partial(tiled_loss, kind=kind, num_shards=patch.num_shards, name=name)
        if not steps and patch.below is None and type(head).forward is nn.Linear.forward:
            return loss(linear, hidden, target, list(filter(torch.is_tensor, (head.weight, head.bias))))
        weights = weights_of(list(head.modules()))

        def logits(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
            with swapped(in_places(weights.values(), leaves)):
                found: Tensor = patch.inner(head, rows)
                for step in steps:
                    found = step(found)
            return found

        return loss(logits, hidden, target, list(weights))


# Its logits

Step = Callable[[Tensor], Tensor]  # something that a model does to its logits


class DeferredLogits(Deferred):
    """Logits ``[..., V]`` that are not computed yet: see NOTE [Deferred logits]."""

    call: HeadCall
    hidden: Tensor  # [..., H], of their tokens
    steps: tuple[Step, ...]  # what is to be done to the head's logits
    source: tuple[DeferredLogits, Step] | None  # the logits that these were made of, and how

    @classmethod
    def of(cls, call: HeadCall, hidden: Tensor, dtype: Any, steps: Any = (), source: Any = None) -> Any:
        """Return deferred logits of a call."""
        shape = (*hidden.shape[:-1], call.head.out_features)
        logits: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        if call.grad_mode:
            with torch._C.DisableTorchFunctionSubclass():
                logits.requires_grad_().register_hook(partial(_refuse, call.patch.name))
        vars(logits).update(call=call, hidden=hidden, steps=steps, source=source)
        return logits

    def compute(self) -> Tensor:
        """Return the full logits with their graph; views of others are views of their full logits."""
        self.call.used = True
        self.call.patch.untiled = "its code uses full logits"
        if self.source is None:
            return self.call.run(partial(self.call.patch.inner, self.call.head), self.hidden)
        logits, step = self.source
        with torch.set_grad_enabled(self.call.grad_mode):
            return step(logits.value())

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss in tiles, or the logits with one more thing to be done to them."""
        in_tiles = not self.call.used and self.call.grad_mode == torch.is_grad_enabled()
        if not in_tiles or not args or args[0] is not self:
            return NotImplemented
        if func is F.cross_entropy:  # torch hands on its arguments behind the target by name
            return self._loss(args[1], **kwargs)
        return self._step(func, args[1:], kwargs)

    def _step(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the logits with one more thing to be done to them, if tiles can do it."""
        kinds = _JOIN.get(getattr(func, "__name__", "").removeprefix("__").removesuffix("__"))
        if kinds is None or not all(isinstance(value, kinds) for value in pytree.tree_leaves((rest, kwargs))):
            return NotImplemented

        def step(tensor: Tensor) -> Tensor:
            return cast("Tensor", func(tensor, *rest, **kwargs))

        # 1. What becomes of logits without memory.
        like = step(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        hidden = self.hidden
        steps = self.steps
        # 2. Numbers and dtypes are for the tiles, shapes of tokens for the hidden states.
        if kinds is _NUMBER:
            steps += (step,)
        elif kinds is torch.dtype:
            steps += (Tensor.float if like.dtype == torch.float32 else step,)
        elif func is Tensor.__getitem__:
            hidden = step(hidden)
        elif like.shape[-1] == self.shape[-1]:
            hidden = hidden.reshape(like.shape[:-1] + hidden.shape[-1:])
        # 3. There must be hidden states for each of the tokens.
        fit = like.shape == hidden.shape[:-1] + self.shape[-1:] and hidden.shape[-1] == self.hidden.shape[-1]
        if not fit or not like.is_floating_point():
            return NotImplemented
        return DeferredLogits.of(self.call, hidden, like.dtype, steps, (self, step))

    def _loss(self, target: Tensor, ignore_index: int, reduction: Any, label_smoothing: float, **others: Any) -> Any:
        """Return ``F.cross_entropy`` in tiles, unless its arguments ask for what tiles do not do."""
        plain = all(value is None for value in others.values()) and target.dtype in (torch.long, torch.uint8)
        if not plain or self.dim() != 2 or self.shape[:-1] != target.shape:
            return NotImplemented
        steps = self.steps
        while steps and steps[-1] is Tensor.float:  # tiles are float32 themselves
            steps = steps[:-1]
        kind = CrossEntropy(ignore_index, label_smoothing, reduction=reduction)
        loss = partial(self.call.loss, steps=steps, target=target, kind=kind)
        return self.call.run(loss, self.hidden)


def _refuse(name: str, gradient: Tensor) -> None:
    """Raise for a gradient of deferred logits, which only code below Python's operators can give them."""
    raise RuntimeError(f"{name}: a custom autograd Function uses the full logits: turn the tiled loss off, loss=False.")


_NUMBER = int | float
_JOIN: dict[str, Any] = dict.fromkeys(("float", "double", "to"), torch.dtype)
_JOIN |= dict.fromkeys(("tanh", "mul", "rmul", "div", "truediv"), _NUMBER)
_JOIN |= dict.fromkeys(("view", "reshape", "contiguous", "flatten"), int | torch.Size)
_JOIN["getitem"] = slice | int | EllipsisType | None
"""The names of functions and operators that join, and the types of their arguments besides the logits."""

# Finding and patching


def find_losses(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the models of transformers, in a model, that compute their loss from labels and a linear head."""
    found = [(path, module) for path, module in walk(model) if _has_loss(module)]
    if not found:
        raise NothingFoundError(
            f"loss=True found no model of transformers in {type(model).__name__} that computes a loss from labels: use"
            " lt_tiled.tiled_linear_cross_entropy in your own loss, or leave loss=True out."
        )
    return found


def _has_loss(module: nn.Module) -> bool:
    get = getattr(module, "get_output_embeddings", None)
    # In this order: transformers warns when a model that has no loss is asked for its function.
    if get is None or "labels" not in inspect.signature(type(module).forward).parameters:
        return False
    return hasattr(module, "loss_function") and isinstance(getattr(get(), "out_features", None), int)


def patch_losses(found: Sequence[tuple[str, Any]], loss: LossShards, owner: object, evaluation: bool = False) -> None:
    """Let these models compute their losses in tiles, for the owner to undo, and maybe those of the evaluation, too."""
    num_shards: int | Literal["auto"] = loss if isinstance(loss, int) else "auto"
    for _, module in found:
        set_patch(module, LossPatch(evaluation or loss == "always", owner))
        set_patch(module.get_output_embeddings(), HeadPatch(type(module).__name__, num_shards, owner))
