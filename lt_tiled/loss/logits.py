"""The logits of a Hugging Face model's head while its loss is computed in tiles: not there yet, or never.

What the model does to them before its loss (a scale, a cap, a cast, a view) joins, and ``F.cross_entropy`` of them runs
in tiles: head, what joined, and loss. The head is called once more for that, through its hooks, so that engines gather
its weights. Whatever else touches them gets whole logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform_once
from lt_tiled.loss.autograd import LossTiles, loss_bounds
from lt_tiled.loss.cross_entropy import CrossEntropy
from lt_tiled.modules.patch import Mark, get_mark
from lt_tiled.tiling.closed import check_closed, kept_tensors
from lt_tiled.tiling.state import CountedMark
from lt_tiled.tiling.weights import substituted, trainable_weights
from lt_tiled.tiling.work import Work


class SharedMark(Mark):
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


class HeadMark(CountedMark, SharedMark):
    """On that head."""

    attribute = "_lt_tiled_head"

    wanted = False
    """While the model runs with labels."""
    checked = False
    """Whether a tile has shown that nothing else than the hidden states and the head's own weights wants a gradient."""

    @property
    def num_shards(self) -> int | Literal["auto"]:
        """What was asked for last, in numbers if anybody gave one."""
        return next((count for count in reversed(self.owners.values()) if count != "auto"), "auto")


class NoLogits:
    """Stands in an output in the place of logits that were never whole, and says so when it is touched."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, name: Any = None, *_: Any) -> Any:
        if isinstance(name, str) and name.startswith("_"):  # copying and pickling ask for what an object may lack
            raise AttributeError(name)
        raise AttributeError(
            f"{self._name} computed its loss in tiles, so there are no whole logits. Call it without labels for logits, use"
            " lt_tiled.metrics, or turn this off with Tiling(loss=False)."
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __add__ = __mul__ = _refuse


@dataclass(frozen=True)
class OnHead:
    """What a head that is called with it runs on itself."""

    function: Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """Something done to each of the logits; ``upcast`` if it only makes them float32."""

    function: Callable[[Tensor], Tensor]
    upcast: bool


class PendingLogits:
    """Logits ``[..., V]`` that are not computed yet, and what is to be done to them.

    It answers as a tensor does and is none, so that hooks which look for tensors in a head's output (ZeRO-3's) leave it
    alone.
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
            RuntimeError: If gradients were on when the head was called and are off now, so that their graph would be
                lost.
        """
        if self.whole is None:
            mark = get_mark(self.head, HeadMark)
            name = mark.name if mark is not None else "a model"
            if self.grad_mode != torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: a custom autograd Function, or code without gradients, uses whole logits ({because}), which a tiled loss does"
                    " not have: turn it off with Tiling(loss=False)."
                )
            inform_once(
                f"whole logits {name}", f"the loss of {name} is not tiled: its code uses whole logits ({because})"
            )
            steps, shape = self.steps, self.like.shape
            self.whole = self.head(
                self.hidden, OnHead(lambda head, hidden: _applied(_own(head)(hidden), steps).view(shape))
            )
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
        alone = all(t is pending for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, PendingLogits))
        if pending.whole is None and alone:
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


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(PendingLogits, _side, _operator(_side))
for _name in (
    "__getitem__",
    "__setitem__",
    "__neg__",
    "__abs__",
    "__invert__",
    "__iter__",
    "__len__",
    "__and__",
    "__or__",
    "__xor__",
):
    setattr(PendingLogits, _name, _operator(_name))
for _name in ("__lt__", "__gt__", "__le__", "__ge__", "__eq__", "__ne__"):
    setattr(PendingLogits, _name, _operator(_name))

PendingLogits.__hash__ = object.__hash__  # type: ignore[method-assign]

_DESCRIBES = (
    "size",
    "dim",
    "numel",
    "is_floating_point",
    "is_complex",
    "nelement",
    "element_size",
    "stride",
    "ndimension",
)
_ENTRYWISE = {torch.tanh, Tensor.tanh, Tensor.float, Tensor.to, torch.mul, torch.div, torch.true_divide}
_ENTRYWISE |= {
    getattr(Tensor, name) for name in ("mul", "div", "__mul__", "__rmul__", "__truediv__", "__div__", "true_divide")
}
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
        return (
            PendingLogits(pending.head, pending.hidden, pending.steps, like) if like.shape[-1:] == shape[-1:] else None
        )
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
        mark, work = _mark_of(head), Work(own, (head,))
        weights = trainable_weights(work) if torch.is_grad_enabled() else []

        def logits(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
            before = {} if mark.checked else kept_tensors(work)
            with substituted(weights, leaves):
                found = _applied(own(rows), steps)
            if found.requires_grad and not mark.checked:
                check_closed(found, [cast("Tensor", rows._base), *leaves], work, before, f"the head of {mark.name}")
                mark.checked = True
            return found

        tiles = LossTiles(CrossEntropy(ignore_index, label_smoothing), reduction, mark.num_shards)
        rows = hidden.reshape(-1, hidden.shape[-1])
        mark.note(len(rows), loss_bounds(mark.num_shards, len(rows), shape[-1]), f"the loss of {mark.name}")
        loss = tiles.loss(logits, rows, target.reshape(-1), [w.tensor for w in weights], shape[-1])
        return loss.view(target.shape) if reduction == "none" else loss

    return pending.head(pending.hidden, OnHead(compute))  # type: ignore[no-any-return]


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
