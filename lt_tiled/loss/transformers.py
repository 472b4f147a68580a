"""The loss of Hugging Face models, tile by tile, without a change to their code.

While a causal model runs with labels its head computes nothing and returns deferred logits. What the model does to them
before its loss (a scale, a cap, a cast, a view) joins, and ``F.cross_entropy`` of them runs in tiles: the head, what
joined, and the loss. The head is called once more for that, through its hooks, so that engines gather its weights. Any
other use gets the full logits, also after the forward pass, until the backward pass of the loss begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform, warn
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.logits import DeferredLogits, HeadCall, LossCall, OnHead, TiledHead
from lt_tiled.modules.cache import by_name
from lt_tiled.modules.find import walk_all
from lt_tiled.modules.patch import HOOKS, Order, SharedPatch, get_patch, get_patches, is_of, remove_patch, set_patch
from lt_tiled.policies import LossShards
from lt_tiled.tiling.recompute import is_transformed


class OutputLogits:
    """Stands for logits in an output, and computes them when they are used.

    It is no tensor, because engines put hooks of their own on each tensor of an output, and that is a use.

    Args:
        read: Returns the deferred logits, or raises.
    """

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_read":  # copying and pickling ask for what an object may lack
            raise AttributeError(name)
        if name in _OF_THEIR_GRADIENT:
            raise AttributeError(
                f"{name}: the loss was computed in tiles, without a gradient of all logits: use loss=False."
            )
        found = getattr(self._read(), name)
        if not callable(found):
            return self._again(found)
        return lambda *args, **kwargs: self._again(found(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.clone(self._read()).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda logits: logits._read(), (args, kwargs or {}))
        return cls._again(func(*args, **kwargs))

    @classmethod
    def _again(cls, result: Any) -> Any:
        return output_logits(result) if isinstance(result, DeferredLogits) else result


def output_logits(logits: DeferredLogits) -> Any:
    """Return what stands for logits in an output: themselves, where hooks of engines do not use them."""
    if logits.full is not None:
        return logits.full
    return OutputLogits(partial(_read, logits)) if logits.grad_mode else logits


def _read(logits: DeferredLogits) -> DeferredLogits:
    in_function = not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())
    if in_function:
        raise RuntimeError(
            f"{logits.call.patch.name}: a custom autograd Function uses its logits, which would get no gradient from"
            " it: give it output.logits.clone(), or turn the tiled loss off with loss=False."
        )
    return logits


_OF_THEIR_GRADIENT = ("grad", "register_hook", "retain_grad", "register_post_accumulate_grad_hook")


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._again(getattr(self._read(), name)(*args))


_OPERATORS = {n for n in dir(Tensor) if n.startswith("__") and callable(getattr(Tensor, n))} - set(dir(object))
_OPERATORS |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
for _name in _OPERATORS - {"__torch_function__", "__torch_dispatch__", "__deepcopy__", "__setstate__"}:
    setattr(OutputLogits, _name, _operator(_name))
OutputLogits.__hash__ = object.__hash__  # type: ignore[method-assign]

_ENGINES = ("torch.distributed.fsdp", "deepspeed", "lt_tiled")
"""Packages whose hooks on a head gather weights alone. Those of tensor parallelism change its input and output."""
_running: ContextVar[dict[HeadPatch, LossCall | None]] = ContextVar("running", default={})  # noqa: B039 (never changed)
"""The innermost call of each head's model in this thread, if that has labels."""


class LossPatch(SharedPatch):
    """On a model that computes its own loss from the logits of its head."""

    order = Order.LOSS

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the head know whether the model is called with labels."""
        current: Any = module
        head = get_patch(current.get_output_embeddings(), HeadPatch)  # as it is now: peft may have put another there
        given = by_name(type(module).forward, args, kwargs)
        if head is None or torch.compiler.is_compiling():
            return self.inner(module, *args, **kwargs)
        call = LossCall(torch.is_grad_enabled()) if given.get("labels") is not None else None
        token = _running.set({**_running.get(), head: call})
        try:
            output = self.inner(module, *args, **kwargs)
        finally:
            _running.reset(token)
            if call is not None:
                call.over = True
        if call is not None and not head.called:
            head.learned.untiled = True
            warn(
                f"the loss of {self.name} is not tiled: its code does not call its head. Use"
                " lt_tiled.tiled_linear_cross_entropy in your own loss, or set loss=False to silence this warning.",
                once=f"head {self.name}",
            )
        return _with_output_logits(output)


class HeadPatch(TiledHead):
    """On the head of a model that computes its own loss; each owner's value is a number of tiles."""

    order = Order.HEAD

    called = False
    """Whether the head was called: MobileBERT computes its logits from the head's weight."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return deferred logits where the model computes a loss."""
        if len(args) == 2 and isinstance(args[1], OnHead):
            return args[1].function(module, args[0])
        self.called = True
        call = _running.get().get(self)
        plain = len(args) == 1 and not kwargs and not torch.compiler.is_compiling() and not is_transformed()
        # Gradients that are off in the head alone are those of a reentrant checkpoint, which gives its output a graph.
        if call is None or call.grad_mode != torch.is_grad_enabled() or not plain:
            return self.inner(module, *args, **kwargs)
        hooks = [h for place in HOOKS for h in list(getattr(module, place).values())]
        (hidden,) = args
        if not all(is_of(hook, _ENGINES) for hook in hooks) or hasattr(hidden, "placements"):  # a DTensor
            inform(
                f"the loss of {self.name} is not tiled: hooks on its head, or tensor parallelism, need full logits",
                once=f"hooks {self.name}",
            )
            return self.inner(module, hidden)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        shape: tuple[int, ...] = (*hidden.shape[:-1], int(module.out_features))  # type: ignore[arg-type]
        meta = torch.empty(shape, dtype=dtype, device="meta")
        logits = DeferredLogits.of(HeadCall(module, self, hidden, call), meta, torch.is_grad_enabled())
        if not hooks:
            return logits

        def last(head: nn.Module, args: Any, output: Any) -> DeferredLogits | None:
            if output is not logits.call:  # of another thread
                return None
            handle.remove()
            return logits

        handle = module.register_forward_hook(last)
        return logits.call  # past the hooks of engines, which would compute a tensor


def _with_output_logits(output: Any) -> Any:
    if isinstance(output, DeferredLogits):
        return output_logits(output)
    if isinstance(output, dict | list):  # in place: transformers' ModelOutput, which others may be in
        for key, value in list(output.items() if isinstance(output, dict) else enumerate(output)):
            if (instead := _with_output_logits(value)) is not value:
                output[key] = instead
    elif is_dataclass(output):
        _with_output_logits(getattr(output, "__dict__", None))
    elif isinstance(output, tuple) and not pytree.tree_is_leaf(output):
        return pytree.tree_map(_with_output_logits, output, is_leaf=lambda v: v is not output)
    return output


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


def _head_of(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    # In this order: transformers warns when a model that has no loss is asked for its function.
    if get is None or "labels" not in inspect.signature(type(module).forward).parameters:
        return None
    head = get() if hasattr(module, "loss_function") else None
    return head if isinstance(getattr(head, "out_features", None), int) else None


def patch_losses(found: Sequence[tuple[str, nn.Module]], num_shards: LossShards, owner: object) -> None:
    """Let these models compute their losses in tiles, for the owner to undo. The last number of tiles counts."""
    for _, module in found:
        head, name = _head_of(module), type(module).__name__
        assert head is not None
        if get_patch(module, LossPatch) is None:
            set_patch(module, LossPatch(name))
        if get_patch(head, HeadPatch) is None:
            set_patch(head, HeadPatch(name))
        for patch in (*get_patches(module, LossPatch), *get_patches(head, HeadPatch)):
            patch.owners[owner] = num_shards


def restore_losses(model: nn.Module, owner: object) -> None:
    """Undo :func:`patch_losses`."""
    for _, module in walk_all(model):
        for patch in (*get_patches(module, LossPatch), *get_patches(module, HeadPatch)):
            patch.owners.pop(owner, None)
            if not patch.owners:
                remove_patch(module, patch)


@contextmanager
def loss_function_set(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Set the loss function of a transformers model for a while."""
    before = vars(model).get("_loss_function")
    model.loss_function = function
    try:
        yield
    finally:
        del model._loss_function  # the attribute of the property, which has no deleter
        if before is not None:
            model.loss_function = before
