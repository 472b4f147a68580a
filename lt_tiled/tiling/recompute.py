"""Random generators, default dtype and autocast of a forward pass, which its recompute restores; and what both compute.

NOTE [What no observation sees]
Code can read more than an observation records: a variable of another module or thread, the data of a weight, a file.
Whatever it is, a gradient is wrong only if the recompute computes other values. So each forward pass keeps some
elements of what it computed, and its recompute is refused if more than a few of them differ by more than rounding. A
few may differ, because a kernel that sums in any order can send a token to another expert.

A block's elements are those of the tensors that its graph saves, and torch's checkpoint compares them as it compares
shapes and dtypes. Comparing takes time and waits for the device. So it is done where the same code ran several times
before a recompute, which is when others change what it reads, and else in calls that get rarer, because all steps are
mostly alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from lt_tiled._log import inform
from lt_tiled.tiling.places import storage_of


@dataclass(frozen=True)
class RandomState:
    """The states of the random generators that a module on ``device`` draws from."""

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the current states."""
        accelerator = None if device.type in ("cpu", "meta") else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), accelerator)

    def set(self) -> None:
        """Make them the current states."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    def same_as(self, other: RandomState) -> bool:
        """Whether both would give the same random numbers."""
        with _disable_current_modes():  # states are real tensors, also where a model runs on fake ones
            pairs = ((self.cpu, other.cpu), (self.accelerator, other.accelerator))
            return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@contextmanager
def random_state_kept(device: torch.device, start: RandomState | None = None) -> Iterator[None]:
    """Restore the generators at the end; inside, let them begin at ``start``."""
    before = RandomState.now(device)
    try:
        if start is not None:
            start.set()
        yield
    finally:
        before.set()


@contextmanager
def hidden_from_modes(tensor: Tensor) -> Iterator[None]:
    """Hide what runs on a tensor from FlopCounterMode and other modes, but for that of fake tensors."""
    fake = getattr(tensor, "fake_mode", None)
    with _disable_current_modes(), nullcontext() if fake is None else fake:
        yield


_SELECTIVE = ("torch.utils.checkpoint", "lt_tiled.selective")


@contextmanager
def hidden_from_checkpoints() -> Iterator[None]:
    """Hide what runs from selective activation checkpoints, which would keep it, and expect it in the recompute."""
    modes = _get_current_dispatch_mode_stack()
    others = [mode for mode in modes if type(mode).__module__ not in _SELECTIVE]
    with ExitStack() as stack:
        if len(others) < len(modes):
            stack.enter_context(_disable_current_modes())
            for mode in others:
                stack.enter_context(mode)
        yield


@dataclass(frozen=True)
class Precision:
    """Torch's default dtype, and the settings of ``torch.autocast`` for a device and for the CPU."""

    kind: str
    default: torch.dtype
    cache: bool
    settings: tuple[tuple[str, bool, torch.dtype], ...]
    """Kind of device, whether autocast is enabled, its dtype. Devices without autocast have none."""

    @classmethod
    def now(cls, device: torch.device) -> Precision:
        """Return the current settings."""
        settings: list[tuple[str, bool, torch.dtype]] = []
        for kind in dict.fromkeys((device.type, "cpu")):
            if torch.amp.is_autocast_available(kind):
                settings.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
        return cls(device.type, torch.get_default_dtype(), torch.is_autocast_cache_enabled(), tuple(settings))

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast on the device where it is enabled."""
        for kind, enabled, dtype in self.settings:
            if enabled and kind == self.kind:
                return dtype
        return None

    @contextmanager
    def context(self) -> Iterator[None]:
        """Apply these settings."""
        before = torch.get_default_dtype()
        with ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                if (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache))
            torch.set_default_dtype(self.default)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    def disabled(self) -> AbstractContextManager[object]:
        """Disable autocast inside of these settings, if they enable it."""
        return nullcontext() if self.dtype is None else torch.autocast(self.kind, enabled=False)


class PlainSavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Hides the saved tensors of a graph from other hooks, such as those of an offloader."""

    def __init__(self) -> None:
        super().__init__(_without_graph, lambda packed: packed)


def _without_graph(tensor: Tensor) -> Tensor:
    """Return what is saved: an output that its own node holds through a hook would keep the node alive."""
    return tensor if tensor.is_leaf else tensor.detach()


def saved_tensors_hooks() -> Any:
    """Return the hooks that see the saved tensors of a graph that is made now; ``None`` without."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # no public name


def in_checkpoint() -> bool:
    """Whether torch's activation checkpoint runs this code, or its recompute."""
    hooks = saved_tensors_hooks()
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return name.startswith(("_checkpoint_hook", "_recomputation_hook"))


def is_transformed() -> bool:
    """Whether this code runs under what autograd Functions and checkpoints cannot follow, which is logged once."""
    if torch._C._are_functorch_transforms_active():
        transform = "torch.func"
    elif forward_ad._current_level >= 0:
        transform = "forward-mode differentiation"
    elif parametrize._cache_enabled:
        transform = "torch.nn.utils.parametrize.cached()"  # whose cache the first tile would fill, without a graph
    else:
        return False
    inform(f"under {transform} nothing runs in tiles or with lt_tiled's activation checkpointing", once=transform)
    return True


def keeps_graph() -> bool:
    """Whether the backward pass that runs this keeps its graph for a second one (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # no public name


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference that rounding may cause when a matrix product has another shape (float32: TF32 included)."""
SAMPLES = 16
"""The least elements of a tensor that are kept, if it has as many; at most 31 are."""
_MAY_DIFFER = 1 / 8

Due = Callable[[], bool]
"""Whether a recompute is to be compared with its forward pass."""


def never() -> bool:
    """Return that it is not."""
    return False


class CallCounter:
    """Counts how often some code ran."""

    count = 0
    _waits = False
    """Whether a call was not recomputed yet."""

    def begin(self) -> Due:
        """Count a call, and return whether its recompute is to be compared.

        It is if another call ran between this forward pass and its recompute. Else it is in the first two calls, the
        4th, 8th, 16th and so on, because what users do may change during a run.
        """
        self.count += 1
        mine, several = self.count, self._waits
        self._waits = self._waits or torch.is_grad_enabled()

        def is_due() -> bool:
            self._waits = False
            return several or self.count > mine or mine & (mine - 1) == 0

        return is_due


def sampled(tensor: Tensor) -> Tensor | None:
    """Return a view of some elements from all over a plain tensor of floating-point numbers or flags without gaps."""
    if tensor.dtype not in (*TOLERANCE, torch.bool) or storage_of(tensor) is None:
        return None
    count = tensor.numel()
    if not tensor.is_contiguous():
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        if sum((size - 1) * stride for size, stride in strides) + 1 != count:
            return None
    if count == 0 or tensor.untyped_storage().nbytes() == 0:  # FSDP has freed the weight
        return None
    step = count // SAMPLES | 1  # odd, so that it does not meet the same feature of each token
    return tensor.detach().as_strided(((count - 1) // step + 1,), (step,), tensor.storage_offset())


def differ(before: Tensor, now: Tensor) -> bool:
    """Whether more than a few elements differ by more than rounding."""
    if torch.equal(before, now):
        return False
    a, b = before.double(), now.double()
    largest = torch.maximum(a.abs(), b.abs())
    same = (a == b) | ((a - b).abs() <= TOLERANCE.get(now.dtype, 0.0) * largest) | (a.isnan() & b.isnan())
    few = max(len(now) // SAMPLES, _MAY_DIFFER * int((largest != 0).sum()))
    return int((~same).sum()) > int(few)


def other_values(name: str, what: str, remedy: str) -> RuntimeError:
    """Return the error of a module whose recompute computes other values than its forward pass."""
    return RuntimeError(
        f"{name}: its recompute computes other values than its forward pass did ({what}), because something that it"
        f" reads changed between the two. Make the change after the backward pass, such as the optimizer's step, or"
        f" {remedy}."
    )


class Substituted(TorchFunctionMode):
    """Lets torch's functions see other tensors in place of some, on this thread alone.

    Args:
        pairs: Each tensor and what is to be seen in its place.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._pairs = list(pairs)  # whose tensors keep their ids
        self._instead_of = {id(tensor): instead for tensor, instead in self._pairs}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known: Any = self._instead_of
        instead: Any = None
        for value in (*args, *kwargs.values()) if kwargs else args:  # without calls: each operation comes here
            if type(value) is list or type(value) is tuple:
                instead = self._instead
                break
            if id(value) in known:
                instead = known.get
        if instead is not None:
            args = map(instead, map(id, args), args)
            if kwargs:
                values = kwargs.values()
                kwargs = dict(zip(kwargs, map(instead, map(id, values), values), strict=True))
        return func(*args, **kwargs) if kwargs else func(*args)

    def __len__(self) -> int:
        return len(self._instead_of)

    def end(self) -> None:
        """Substitute nothing any more: Ctrl-C in the moment when torch leaves the mode would leave it on."""
        self._instead_of = {}

    def _instead(self, key: int, value: Any) -> Any:
        """Return what is seen in place of a value with this id, or of the entries of a list or a tuple."""
        if type(value) is list or type(value) is tuple:
            return type(value)(map(self._instead, map(id, value), value))
        return self._instead_of.get(key, value)
