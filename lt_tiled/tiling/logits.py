"""The loss of Hugging Face models, tile by tile, without a change to their code.

While a causal model runs with labels its head computes nothing and returns :class:`PendingLogits`. What the model does to them before
its loss (a scale, a cap, a cast, a view) joins, and ``F.cross_entropy`` of them runs in tiles: head, what joined, and loss. The head
is called once more for that, through its hooks, so that engines gather its weights. Whatever else touches them gets whole logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._find import NothingFound, walk
from lt_tiled._log import inform_once
from lt_tiled._marks import Mark, get_mark, get_marks, remove_mark, set_mark
from lt_tiled.tiling.cross_entropy import CrossEntropy
from lt_tiled.tiling.loss import LossTiles, loss_bounds
from lt_tiled.tiling.mark import CountedMark
from lt_tiled.tiling.weights import substituted, trainable_weights
from lt_tiled.tiling.work import Work


class _SharedMark(Mark):
    """Set by several owners, and there until the last of them takes it off."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The model's class."""
        self.owners: dict[object, int | Literal["auto"]] = {}
        """And how many tiles each asked for."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        copy = super().__deepcopy__(memo)
        copy.__dict__["owners"] = dict(self.owners)
        return copy


class LossMark(_SharedMark):
    """On a model that computes its own loss from the logits of its head."""

    attribute = "_lt_tiled_loss"

    def head(self, module: nn.Module) -> nn.Module:
        """The model's head as it is now: peft may have put another in its place."""
        return module.get_output_embeddings()  # type: ignore[operator,no-any-return]


class HeadMark(CountedMark, _SharedMark):
    """On that head."""

    attribute = "_lt_tiled_head"

    wanted = False
    """While the model runs with labels."""

    @property
    def num_shards(self) -> int | Literal["auto"]:
        """What was asked for last, in numbers if anybody gave one."""
        return next((count for count in reversed(self.owners.values()) if count != "auto"), "auto")


class NoLogits:
    """Stands in an output in the place of logits that were never whole, and says so when it is touched."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> Any:
        raise AttributeError(
            f"{self._name} computed its loss in tiles, so there are no whole logits. Call it without labels for logits, use"
            " lt_tiled.metrics, or turn this off with Tiling(loss=False)."
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __add__ = __mul__ = _refuse


@dataclass(frozen=True)
class _OnHead:
    """What a head that is called with it runs on itself."""

    function: Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """Something done to each of the logits; ``upcast`` if it only makes them float32."""

    function: Callable[[Tensor], Tensor]
    upcast: bool


class PendingLogits:
    """Logits ``[..., V]`` that are not computed yet, and what is to be done to them.

    It answers as a tensor does and is none, so that hooks which look for tensors in a head's output (ZeRO-3's) leave it alone.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, steps: tuple[Step, ...], like: Tensor) -> None:
        self.head, self.hidden, self.steps = head, hidden, steps
        self.like = like
        """Of their shape and dtype, without storage."""
        self.whole: Tensor | None = None
        self.grad_mode = torch.is_grad_enabled()

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def value(self, because: str) -> Tensor:
        """Whole logits.

        Raises:
            RuntimeError: If gradients were on when the head was called and are off now, so that their graph would be lost.
        """
        if self.whole is None:
            mark = get_mark(self.head, HeadMark)
            name = mark.name if mark is not None else "a model"
            if self.grad_mode != torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: a custom autograd Function, or code without gradients, uses whole logits ({because}), which a tiled loss does"
                    " not have: turn it off with Tiling(loss=False)."
                )
            inform_once(f"whole logits {name}", f"the loss of {name} is not tiled: its code uses whole logits ({because})")
            steps, shape = self.steps, self.like.shape
            self.whole = self.head(self.hidden, _OnHead(lambda head, hidden: _applied(_own(head)(hidden), steps).view(shape)))
        return self.whole

    def __getattr__(self, name: str) -> Any:
        function = getattr(Tensor, name)
        if not callable(function) or name in _DESCRIBES:
            return getattr(self.like, name)
        return partial(_dispatch, function, self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pending = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, PendingLogits))
        if pending.whole is None:
            if func is F.cross_entropy and (loss := _loss(pending, *args, **kwargs)) is not None:
                return loss
            if (joined := _joined(pending, func, args, kwargs)) is not None:
                return joined
        name = getattr(func, "__name__", str(func))
        args, kwargs = pytree.tree_map_only(PendingLogits, lambda t: t.value(name), (args, kwargs))
        return func(*args, **kwargs)


def _dispatch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return PendingLogits.__torch_function__(function, (), args, kwargs)


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)
    return lambda *args: _dispatch(function, *args)


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(PendingLogits, _side, _operator(_side))
for _name in ("__getitem__", "__neg__", "__iter__", "__len__", "__lt__", "__gt__", "__le__", "__ge__"):
    setattr(PendingLogits, _name, _operator(_name))

_DESCRIBES = ("size", "dim", "numel", "is_floating_point", "is_complex", "nelement", "element_size", "stride", "ndimension")
_ENTRYWISE = {torch.tanh, Tensor.tanh, Tensor.float, Tensor.to, torch.mul, torch.div, torch.true_divide}
_ENTRYWISE |= {getattr(Tensor, name) for name in ("mul", "div", "__mul__", "__rmul__", "__truediv__", "__div__", "true_divide")}
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.flatten, torch.flatten}


def _joined(pending: PendingLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingLogits | None:
    """The logits with one more thing done to them, if each stays in its row and depends on itself alone."""
    others = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    to_device = func is Tensor.to and any(not isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values()))
    if others or to_device or func not in _ENTRYWISE | _RESHAPES:
        return None
    shape = pending.like.shape

    def step(logits: Tensor) -> Tensor:
        return func(*pytree.tree_map_only(PendingLogits, lambda _: logits, args), **kwargs)  # type: ignore[no-any-return]

    like = step(pending.like)
    if func in _RESHAPES:
        return PendingLogits(pending.head, pending.hidden, pending.steps, like) if like.shape[-1:] == shape[-1:] else None
    if like.shape != shape or not like.is_floating_point():
        return None
    upcast = func in (Tensor.float, Tensor.to) and like.dtype == torch.float32
    return PendingLogits(pending.head, pending.hidden, (*pending.steps, Step(step, upcast)), like)


def _loss(
    pending: PendingLogits,
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy`` of pending logits in tiles, unless its arguments ask for what tiles do not do."""
    shape = pending.like.shape
    plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
    if not plain or shape[:-1] != target.shape or pending is not input:
        return None
    steps = pending.steps
    while steps and steps[-1].upcast:  # as tiles do themselves
        steps = steps[:-1]

    def compute(head: nn.Module, hidden: Tensor) -> Tensor:
        own = _own(head)
        weights = trainable_weights(Work(own, (head,))) if torch.is_grad_enabled() else []

        def logits(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
            with substituted(weights, leaves):
                return _applied(own(rows), steps)

        mark = _mark_of(head)
        tiles = LossTiles(CrossEntropy(ignore_index, label_smoothing), reduction, mark.num_shards)
        rows = hidden.reshape(-1, hidden.shape[-1])
        mark.note(len(rows), loss_bounds(mark.num_shards, len(rows), shape[-1]), f"the loss of {mark.name}")
        loss = tiles.loss(logits, rows, target.reshape(-1), [w.tensor for w in weights], shape[-1])
        return loss.view(target.shape) if reduction == "none" else loss

    return pending.head(pending.hidden, _OnHead(compute))  # type: ignore[no-any-return]


def _mark_of(head: nn.Module) -> HeadMark:
    mark = get_mark(head, HeadMark)
    assert mark is not None
    return mark


def _own(head: nn.Module) -> Callable[[Tensor], Tensor]:
    return partial(_mark_of(head).inner, head)


def _applied(logits: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        logits = step.function(logits)
    return logits


def _head_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    mark = self.__dict__[HeadMark.attribute]
    if len(args) == 2 and isinstance(args[1], _OnHead):
        return args[1].function(self, args[0])
    if not mark.wanted or kwargs or len(args) != 1 or torch.compiler.is_compiling():
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
    if head is None or given.get("labels") is None or torch.compiler.is_compiling():
        return mark.inner(self, *args, **kwargs)
    before, head.wanted = head.wanted, True
    try:
        output = mark.inner(self, *args, **kwargs)
    finally:
        head.wanted = before
    return _without_logits(output, mark.name)


def _without_logits(output: Any, name: str) -> Any:
    def instead(value: Any) -> Any:
        if not isinstance(value, PendingLogits):
            return value
        return NoLogits(name) if value.whole is None else value.whole

    if isinstance(output, dict):  # transformers' ModelOutput
        for key, value in list(output.items()):
            if isinstance(value, PendingLogits):
                output[key] = instead(value)
        return output
    return tuple(map(instead, output)) if isinstance(output, tuple) else output


_head_forward.__name__ = _model_forward.__name__ = "forward"  # what pickle looks up on the class


def find_losses(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The models of transformers, in a model, that compute their loss from labels and the logits of a linear head.

    Raises:
        NothingFound: If there is none.
    """
    found = [(path, m) for path, m in [("", model), *walk(model)] if _head_of(m) is not None]
    if not found:
        raise NothingFound(
            f"Tiling(loss=True) found no model of transformers in {type(model).__name__} that computes a loss from labels: use"
            " lt_tiled.tiled_linear_cross_entropy in your own loss, or leave loss=True out."
        )
    return found


def _head_of(module: nn.Module) -> nn.Module | None:
    get = getattr(module, "get_output_embeddings", None)
    if get is None or not hasattr(module, "loss_function") or "labels" not in inspect.signature(type(module).forward).parameters:
        return None
    head = get()
    return head if isinstance(getattr(head, "out_features", None), int) else None


def mark_losses(found: Sequence[tuple[str, nn.Module]], num_shards: int | Literal["auto"], owner: object) -> None:
    """Let these models compute their losses in tiles, for the owner to undo. If several ask, the last number of tiles counts."""
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
