"""Running a tile a second time exactly as the first time: randomness, autocast, and no arithmetic that the backward
does not use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

aten = torch.ops.aten


@dataclass(frozen=True)
class RandomState:
    """The states of the random generators that a module on ``device`` draws from."""

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        accelerator = None if device.type in ("cpu", "meta") else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), accelerator)

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    def same_as(self, other: RandomState) -> bool:
        with _disable_current_modes():  # states are real tensors, also where a model runs on fake ones
            if not torch.equal(self.cpu, other.cpu):
                return False
            if self.accelerator is None or other.accelerator is None:
                return self.accelerator is other.accelerator
            return torch.equal(self.accelerator, other.accelerator)


@contextmanager
def random_state_kept(device: torch.device, start: RandomState | None = None) -> Iterator[None]:
    """Leave the generators as they were found; inside, let them begin at ``start``."""
    before = RandomState.now(device)
    try:
        if start is not None:
            start.set()
        yield
    finally:
        before.set()


@dataclass(frozen=True)
class AutocastState:
    """What ``torch.autocast`` was set to in the forward."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls, device: torch.device) -> AutocastState | None:
        if not torch.amp.is_autocast_available(device.type):
            return None
        enabled = torch.is_autocast_enabled(device.type)
        return cls(device.type, enabled, torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled())

    def context(self) -> torch.autocast:
        return torch.autocast(self.device_type, enabled=self.enabled, dtype=self.dtype, cache_enabled=self.cache)


class PackCounter(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a graph saves. As the innermost pair of hooks it also hides the tile from an outer offloader."""

    def __init__(self) -> None:
        self.count = 0

        def pack(tensor: Tensor) -> Tensor:
            self.count += 1
            # An output that its own node holds through a hook would keep the node for ever, if nobody runs the graph
            # backward.
            return tensor if tensor.is_leaf else tensor.detach()

        super().__init__(pack, lambda packed: packed)

    def innermost(self) -> bool:
        """Whether no other pair of hooks was entered since, which would save tensors uncounted."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] is self.pack_hook


class CannotSkip(Exception):
    """The graph did more after its last known saved tensor than a backward can do without."""


class LastProjectionSkip(TorchDispatchMode):
    """Does not compute a matrix product whose value no backward reads: the last projection of a recomputed MLP.

    Once the graph has saved its last tensor (``packs`` of them), the values that follow are of no use. A matrix product
    then gives a stand-in that takes no memory, while autograd still links its node. An operation after that which would
    carry a value out of the graph (to the host, into an existing tensor, out of autograd's sight, into a custom
    autograd Function or other hooks, which may keep it for themselves) raises :class:`CannotSkip`, and so does a tensor
    saved late.
    """

    def __init__(self, packs: int) -> None:
        super().__init__()
        self.counter = PackCounter()
        self.packs = packs
        self.skipped = False
        self.seen = False

    def __enter__(self) -> LastProjectionSkip:
        self.counter.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.counter.__exit__(*exc)

    def check(self, outputs: Iterable[Any]) -> None:
        """Raise if a skipped value was seen: the graph saved more than was known, or a hook on an output may read it
        later.
        """
        hooks = [hook for t in outputs if isinstance(t, Tensor) for hook in (t._backward_hooks or {}).values()]
        # Those of register_multi_grad_hook (FlopCounterMode, FSDP2) are for the moment, not for the value.
        hooked = any(hook.__module__ != "torch.autograd.graph" for hook in hooks)
        if self.skipped and (self.seen or hooked or self.counter.count != self.packs):
            raise CannotSkip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Gradients are off inside a custom Function.
        ours = self.counter.count >= self.packs and torch.is_grad_enabled() and self.counter.innermost()
        if ours and func in _PRODUCTS:
            left, right = args[-2:]
            if not (is_traceable_wrapper_subclass(left) or is_traceable_wrapper_subclass(right)):
                self.skipped = True
                return left.new_zeros(()).expand(*left.shape[:-1], right.shape[-1])
        if self.skipped and (
            not ours or func is aten.detach.default or func._schema.is_mutable or _OUT_OF_GRAPH.intersection(func.tags)
        ):
            self.seen = True  # the module's own code may catch the exception
            raise CannotSkip
        return func(*args, **(kwargs or {}))


_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_OUT_OF_GRAPH = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
