"""The loss of Hugging Face models, tile by tile, without a change to their code.

While a causal model runs with labels its head computes nothing and returns deferred logits. What the model does to them
before its loss (a scale, a cap, a cast, a view) joins, and ``F.cross_entropy`` of them runs in tiles: the head, what
joined, and the loss. The head is called once more for that, through its hooks, so that engines gather its weights. Any
other use gets the full logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform_once
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.autograd import LossTiles, loss_bounds
from lt_tiled.loss.cross_entropy import CrossEntropy
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import Patch, get_patch, get_patches, remove_patch, set_patch
from lt_tiled.policies import LossShards
from lt_tiled.tiling.deferred import Deferred
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.state import Learned, Work
from lt_tiled.tiling.weights import substituted, trainable_weights


class SharedPatch(Patch):
    """A patch that several owners may set, and that is there until the last of them removes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The model's class."""
        self.owners: dict[object, LossShards] = {}
        """The owners, and how many tiles each asked for."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copy = super().__deepcopy__(memo)
        copy.__dict__["owners"] = dict(self.owners)
        return copy


class LossPatch(SharedPatch):
    """On a model that computes its own loss from the logits of its head."""

    attribute = "_lt_tiled_loss"

    def head(self, module: nn.Module) -> nn.Module:
        """Return the model's head as it is now: peft may have put another in its place."""
        return module.get_output_embeddings()  # type: ignore[operator,no-any-return]


class HeadPatch(SharedPatch):
    """On that head."""

    attribute = "_lt_tiled_head"

    wanted = False
    """Whether the model runs with labels."""
    checked = False
    """Whether a tile showed that only the hidden states and the head's own weights want a gradient."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.learned = Learned()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copy = super().__deepcopy__(memo)
        copy.__dict__["learned"] = Learned(self.learned.largest)
        return copy

    @property
    def num_shards(self) -> LossShards:
        """The number of tiles that was asked for last."""
        return next((count for count in reversed(self.owners.values()) if count != "auto"), "auto")


# Deferred logits


class DeferredLogits(Deferred):
    """Logits ``[..., V]`` that are not computed yet, and what is to be done to them."""

    head: nn.Module
    hidden: Tensor
    steps: tuple[Step, ...]
    meta: Tensor
    """A tensor of their shape and dtype on the meta device."""
    grad_mode: bool
    _full: Tensor | None

    @classmethod
    def of(cls, head: nn.Module, hidden: Tensor, steps: tuple[Step, ...], meta: Tensor) -> DeferredLogits:
        """Return deferred logits of hidden states ``[..., H]``."""
        logits: DeferredLogits = cls.like(tuple(meta.shape), meta.dtype, hidden.device)
        logits.head, logits.hidden, logits.steps, logits.meta = head, hidden, steps, meta
        logits.grad_mode, logits._full = torch.is_grad_enabled(), None
        return logits

    def value(self, because: str = "") -> Tensor:
        """Return the full logits.

        Raises:
            RuntimeError: If gradients were on when the head was called and are off now, so that its graph would be lost.
        """
        if self._full is None:
            name = _patch_of(self.head).name
            if self.grad_mode != torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name}: a custom autograd Function, or code without gradients, uses the full logits ({because}),"
                    " which a tiled loss does not have: turn it off with loss=False."
                )
            inform_once(
                f"full logits {name}", f"the loss of {name} is not tiled: its code uses full logits ({because})"
            )
            steps, shape = self.steps, self.meta.shape
            self._full = self.head(self.hidden, OnHead(lambda head, x: _applied(_own(head)(x), steps).view(shape)))
        return self._full

    def data_value(self) -> Tensor:
        """Return the full logits without a graph; raises as :meth:`value`."""
        with torch.no_grad():
            return self.value("a custom autograd Function")

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss in tiles, or the logits with one more thing done to them."""
        given = pytree.tree_leaves((args, kwargs))
        if self._full is not None or any(isinstance(t, Deferred) and t is not self for t in given):
            return NotImplemented
        if func in _DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.cross_entropy:
            return self._loss(*args, **kwargs)
        return self._with_step(func, args, kwargs, given)

    def _with_step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Any]) -> Any:
        others = any(isinstance(t, Tensor) and t is not self for t in given)
        to_device = func is Tensor.to and any(not isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values()))
        if others or to_device or func not in _ENTRYWISE | _RESHAPES:
            return NotImplemented

        def step(logits: Tensor) -> Tensor:
            return func(*pytree.tree_map_only(DeferredLogits, lambda _: logits, args), **kwargs)  # type: ignore[no-any-return]

        meta, shape = step(self.meta), self.meta.shape
        if func in _RESHAPES:
            same = meta.shape[-1:] == shape[-1:]
            return DeferredLogits.of(self.head, self.hidden, self.steps, meta) if same else NotImplemented
        if meta.shape != shape or not meta.is_floating_point():
            return NotImplemented
        upcast = func in (Tensor.float, Tensor.to) and meta.dtype == torch.float32
        return DeferredLogits.of(self.head, self.hidden, (*self.steps, Step(step, upcast)), meta)

    def _loss(
        self,
        input: Any,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: Any = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        """Return ``F.cross_entropy`` in tiles, unless its arguments ask for what tiles do not do."""
        plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
        if not plain or self.meta.shape[:-1] != target.shape or input is not self:
            return NotImplemented
        steps, vocab_size = self.steps, self.meta.shape[-1]
        while steps and steps[-1].upcast:  # as tiles do themselves
            steps = steps[:-1]

        def compute(head: nn.Module, hidden: Tensor) -> Tensor:
            own, patch = _own(head), _patch_of(head)
            work = Work(own, (head,))
            weights = trainable_weights(work) if torch.is_grad_enabled() else []

            def logits(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
                before = {} if patch.checked else kept_tensors(work)
                with substituted(weights, leaves):
                    found = _applied(own(rows), steps)
                if found.requires_grad and not patch.checked:
                    check_closed(
                        found, [cast("Tensor", rows._base), *leaves], work, before, f"the head of {patch.name}"
                    )
                    patch.checked = True
                return found

            rows = hidden.reshape(-1, hidden.shape[-1])
            bounds = loss_bounds(patch.num_shards, len(rows), vocab_size)
            patch.learned.note(len(rows), bounds, f"the loss of {patch.name}")
            tiles = LossTiles(CrossEntropy(ignore_index, label_smoothing), reduction, patch.num_shards)
            loss = tiles.loss(logits, rows, target.reshape(-1), [w.tensor for w in weights], vocab_size)
            return loss.view(target.shape) if reduction == "none" else loss

        return self.head(self.hidden, OnHead(compute))


@dataclass(frozen=True)
class OnHead:
    """What a head that is called with it runs on itself."""

    function: Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """Something done to each of the logits."""

    function: Callable[[Tensor], Tensor]
    upcast: bool
    """Whether it only makes them float32."""


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


_KEPT = {"__init__", "__new__", "__class__", "__dict__", "__getattribute__", "__setattr__", "__torch_function__"}
for _name in dir(Tensor):
    if _name.startswith("__") and callable(getattr(Tensor, _name)) and _name not in {*dir(object), *_KEPT} - {"__eq__"}:
        setattr(HeadOutput, _name, _operator(_name))

_DESCRIBES = {getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "stride", "ndimension")}
_DESCRIBES |= {getattr(torch._C.TensorBase, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")}
_ENTRYWISE = {torch.tanh, Tensor.tanh, Tensor.float, Tensor.to, torch.mul, torch.div, torch.true_divide}
_ENTRYWISE |= {getattr(Tensor, f"__{name}__") for name in ("mul", "rmul", "truediv", "div")}
_ENTRYWISE |= {Tensor.mul, Tensor.div, Tensor.true_divide}
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.flatten, torch.flatten}


def _patch_of(head: nn.Module) -> HeadPatch:
    patch: HeadPatch = head.__dict__[HeadPatch.attribute]
    return patch


def _own(head: nn.Module) -> Callable[[Tensor], Tensor]:
    return partial(_patch_of(head).inner, head)


def _applied(logits: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        logits = step.function(logits)
    return logits


class AbsentLogits:
    """Stands in an output where the full logits were never computed, and raises when it is accessed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, name: Any = None, *_: Any) -> Any:
        if isinstance(name, str) and name.startswith("_"):  # copying and pickling ask for what an object may lack
            raise AttributeError(name)
        raise AttributeError(
            f"{self._name} computed its loss in tiles, so its logits are unavailable. Call it without labels for logits,"
            " use lt_tiled.metrics, or turn this off with loss=False."
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __add__ = __mul__ = _refuse


# What runs in place of the forwards


def _head_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    patch = _patch_of(self)
    if len(args) == 2 and isinstance(args[1], OnHead):
        return args[1].function(self, args[0])
    if not patch.wanted or kwargs or len(args) != 1 or torch.compiler.is_compiling():
        return patch.inner(self, *args, **kwargs)
    hooks = [h for place in _HOOKS for h in getattr(self, place).values()]
    if any(not str(getattr(getattr(h, "func", h), "__module__", "")).startswith(_ENGINES) for h in hooks):
        inform_once(f"hooks {patch.name}", f"the loss of {patch.name} is not tiled: hooks on its head need full logits")
        return patch.inner(self, *args, **kwargs)
    (hidden,) = args
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    shape: tuple[int, ...] = (*hidden.shape[:-1], int(self.out_features))  # type: ignore[arg-type]
    logits = DeferredLogits.of(self, hidden, (), torch.empty(shape, dtype=dtype, device="meta"))
    return HeadOutput(logits) if hooks else logits


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
_ENGINES = ("torch.distributed", "deepspeed", "lt_tiled")


def _model_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    patch = self.__dict__[LossPatch.attribute]
    head = get_patch(patch.head(self), HeadPatch)
    given = inspect.signature(type(self).forward).bind_partial(self, *args, **kwargs).arguments if args else kwargs
    if head is None:
        return patch.inner(self, *args, **kwargs)
    before, head.wanted = head.wanted, given.get("labels") is not None and not torch.compiler.is_compiling()
    try:
        output = patch.inner(self, *args, **kwargs)
    finally:
        head.wanted = before
    return _without_logits(output, patch.name)


def _without_logits(output: Any, name: str) -> Any:
    if isinstance(output, HeadOutput):
        output = output.logits
    if isinstance(output, DeferredLogits):
        return AbsentLogits(name) if output._full is None else output._full
    if isinstance(output, dict):  # transformers' ModelOutput, which others may be in
        for key, value in list(output.items()):
            if (instead := _without_logits(value, name)) is not value:
                output[key] = instead
        return output
    return tuple(_without_logits(value, name) for value in output) if type(output) is tuple else output


_head_forward.__name__ = _model_forward.__name__ = "forward"  # what pickle looks up on the class


# Finding, patching and restoring


def find_losses(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the models of transformers, in a model, that compute their loss from labels and a linear head.

    Raises:
        NothingFoundError: If there is none.
    """
    found = [(path, m) for path, m in [("", model), *walk(model)] if _head_of(m) is not None]
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
            set_patch(module, LossPatch(name), _model_forward, innermost=True)
        if get_patch(head, HeadPatch) is None:
            set_patch(head, HeadPatch(name), _head_forward)
        for patch in (*get_patches(module, LossPatch), *get_patches(head, HeadPatch)):
            patch.owners[owner] = num_shards


def restore_losses(model: nn.Module, owner: object) -> None:
    """Undo :func:`patch_losses`."""
    for _, module in [("", model), *walk(model)]:
        for kind, function in ((LossPatch, _model_forward), (HeadPatch, _head_forward)):
            for patch in get_patches(module, kind):
                patch.owners.pop(owner, None)
                if not patch.owners:
                    remove_patch(module, kind, function)


@contextmanager
def untiled_losses(model: nn.Module) -> Iterator[None]:
    """Let the models compute their losses from full logits for a while."""
    patches = [patch for _, m in [("", model), *walk(model)] for patch in get_patches(m, HeadPatch)]
    for patch in patches:
        patch.active = False
    try:
        yield
    finally:
        for patch in patches:
            patch.active = True
