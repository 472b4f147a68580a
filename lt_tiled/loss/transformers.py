"""The loss of Hugging Face models, tile by tile, without a change to their code.

While a causal model runs with labels its head computes nothing and returns deferred logits. What the model does to them
before its loss (a scale, a cap, a cast, a view) joins, and ``F.cross_entropy`` of them runs in tiles: the head, what
joined, and the loss. The head is called once more for that, through its hooks, so that engines gather its weights. Any
other use in the model's code gets the full logits. The logits of the output are ``None``, as in Liger.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lt_tiled._log import warn
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.logits import DeferredLogits, HeadPatch
from lt_tiled.modules.cache import by_name
from lt_tiled.modules.find import walk_all
from lt_tiled.modules.patch import Order, Patch, get_patch, get_patches, remove_patch, set_patch
from lt_tiled.policies import LossShards


class LossPatch(Patch):
    """On a model that computes its own loss, for one owner: in tiles in training, and maybe in evaluation, too."""

    order = Order.CALLER

    def __init__(self, name: str, evaluation: bool, owner: object) -> None:
        self.name, self.evaluation, self.owner = name, evaluation, owner

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the head know whether the model computes a loss in tiles."""
        current: Any = module
        head = get_patch(current.get_output_embeddings(), HeadPatch)  # as it is now: peft may have put another there
        if head is None or torch.compiler.is_compiling():
            return self.inner(module, *args, **kwargs)
        labeled = by_name(type(module).forward, args, kwargs).get("labels") is not None
        tiles = labeled and (module.training or any(patch.evaluation for patch in get_patches(module, LossPatch)))
        before, head.grad_mode = head.grad_mode, torch.is_grad_enabled() if tiles else None
        try:
            output = self.inner(module, *args, **kwargs)
        finally:
            head.grad_mode = before
        if tiles and not head.called:
            head.untiled = True
            warn(
                f"the loss of {self.name} is not tiled: its code does not call its head. Use"
                " lt_tiled.tiled_linear_cross_entropy in your own loss, or set loss=False to silence this warning.",
                once=f"head {self.name}",
            )
        return pytree.tree_map_only(DeferredLogits, lambda logits: logits.full, output) if tiles else output


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


def patch_losses(
    found: Sequence[tuple[str, nn.Module]], loss: LossShards, owner: object, evaluation: bool = False
) -> None:
    """Let these models compute their losses in tiles, for the owner to undo. The last number of tiles counts.

    With ``evaluation`` or ``"always"``, losses of the evaluation are in tiles, too.
    """
    for _, module in found:
        head, name = _head_of(module), type(module).__name__
        assert head is not None
        set_patch(module, LossPatch(name, evaluation or loss == "always", owner))
        before = get_patch(head, HeadPatch)
        if before is None or before.owner is not owner:  # models may share a head
            default = "auto" if before is None else before.num_shards
            set_patch(head, HeadPatch(name, loss if isinstance(loss, int) else default, owner))


def restore_losses(model: nn.Module, owner: object) -> None:
    """Undo :func:`patch_losses`."""
    for _, module in walk_all(model):
        for patch in (*get_patches(module, LossPatch), *get_patches(module, HeadPatch)):
            if patch.owner is owner:
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
