"""The loss of Hugging Face models, tile by tile, without a change to their code.

While a causal model runs with labels its head computes nothing and returns
:class:`~lt_tiled.loss.logits.PendingLogits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from lt_tiled._log import inform_once
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.logits import HeadMark, NoLogits, OnHead, PendingLogits, SharedMark
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import get_mark, get_marks, remove_mark, set_mark


class LossMark(SharedMark):
    """On a model that computes its own loss from the logits of its head."""

    attribute = "_lt_tiled_loss"

    def head(self, module: nn.Module) -> nn.Module:
        """The model's head as it is now: peft may have put another in its place."""
        return module.get_output_embeddings()  # type: ignore[operator,no-any-return]


def _head_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    mark = self.__dict__[HeadMark.attribute]
    if len(args) == 2 and isinstance(args[1], OnHead):
        return args[1].function(self, args[0])
    if not mark.wanted or kwargs or len(args) != 1 or torch.compiler.is_compiling():
        return mark.inner(self, *args, **kwargs)
    if _watched(self):
        inform_once(
            f"hooks {mark.name}",
            f"the loss of {mark.name} is not tiled: somebody's hooks on its head want whole logits",
        )
        return mark.inner(self, *args, **kwargs)
    (hidden,) = args
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    shape: tuple[int, ...] = (*hidden.shape[:-1], int(self.out_features))  # type: ignore[arg-type]
    return PendingLogits(self, hidden, (), torch.empty(shape, dtype=dtype, device="meta"))


def _model_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    mark = self.__dict__[LossMark.attribute]
    head = get_mark(mark.head(self), HeadMark)
    given = inspect.signature(type(self).forward).bind_partial(self, *args, **kwargs).arguments if args else kwargs
    if head is None:
        return mark.inner(self, *args, **kwargs)
    before, head.wanted = head.wanted, given.get("labels") is not None and not torch.compiler.is_compiling()
    try:
        output = mark.inner(self, *args, **kwargs)
    finally:
        head.wanted = before
    return _without_logits(output, mark.name)


def _without_logits(output: Any, name: str) -> Any:
    if isinstance(output, PendingLogits):
        return NoLogits(name) if output.whole is None else output.whole
    if isinstance(output, dict):  # transformers' ModelOutput, which others may be in
        for key, value in list(output.items()):
            if (instead := _without_logits(value, name)) is not value:
                output[key] = instead
        return output
    return tuple(_without_logits(value, name) for value in output) if type(output) is tuple else output


_ENGINES = ("torch.distributed", "deepspeed", "lt_tiled")


def _watched(head: nn.Module) -> bool:
    """Whether there are hooks on the head that are no engine's: they would see calls and values that there are not."""
    hooks = [
        h
        for place in ("forward_hooks", "forward_pre_hooks", "backward_hooks")
        for h in getattr(head, f"_{place}").values()
    ]
    return any(not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_ENGINES) for hook in hooks)


_head_forward.__name__ = _model_forward.__name__ = "forward"  # what pickle looks up on the class


def find_losses(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The models of transformers, in a model, that compute their loss from labels and the logits of a linear head.

    Raises:
        NothingFoundError: If there is none.
    """
    found = [(path, m) for path, m in [("", model), *walk(model)] if _head_of(m) is not None]
    if not found:
        raise NothingFoundError(
            f"Tiling(loss=True) found no model of transformers in {type(model).__name__} that computes a loss from labels: use"
            " lt_tiled.tiled_linear_cross_entropy in your own loss, or leave loss=True out."
        )
    return found


def _head_of(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    # In this order: transformers warns when a model that has no loss is asked for its function.
    if (
        get is None
        or "labels" not in inspect.signature(type(module).forward).parameters
        or not hasattr(module, "loss_function")
    ):
        return None
    head = get()
    return head if isinstance(getattr(head, "out_features", None), int) else None


def mark_losses(found: Sequence[tuple[str, nn.Module]], num_shards: int | Literal["auto"], owner: object) -> None:
    """Let these models compute their losses in tiles, for the owner to undo. If several ask, the last number of tiles
    counts.
    """
    for _, module in found:
        head, name = _head_of(module), type(module).__name__
        assert head is not None
        if get_mark(module, LossMark) is None:
            set_mark(module, LossMark(name), _model_forward, innermost=True)
        if get_mark(head, HeadMark) is None:
            set_mark(head, HeadMark(name), _head_forward)
        for mark in (*get_marks(module, LossMark), *get_marks(head, HeadMark)):
            mark.owners[owner] = num_shards


def unmark_losses(model: nn.Module, owner: object) -> None:
    """Undo :func:`mark_losses`."""
    for _, module in [("", model), *walk(model)]:
        for kind, function in ((LossMark, _model_forward), (HeadMark, _head_forward)):
            for mark in get_marks(module, kind):
                mark.owners.pop(owner, None)
                if not mark.owners:
                    remove_mark(module, kind, function)


@contextmanager
def untiled_losses(model: nn.Module) -> Iterator[None]:
    """Let the marks of a model's heads do nothing for a while."""
    marks = [mark for _, m in [("", model), *walk(model)] for mark in get_marks(m, HeadMark)]
    for mark in marks:
        mark.active = False
    try:
        yield
    finally:
        for mark in marks:
            mark.active = True
