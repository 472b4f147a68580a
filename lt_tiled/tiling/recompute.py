"""State for recomputing a tile exactly: random generators, autocast, and the tensors that a graph saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


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


def hidden_from_modes(tensor: Tensor) -> AbstractContextManager[object]:
    """Hide what runs from FlopCounterMode and other modes, unless it runs on fake tensors."""
    return _disable_current_modes() if type(tensor) in (Tensor, nn.Parameter) else nullcontext()


@contextmanager
def training_set(modes: Iterable[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set the training mode of modules for a while, without ``train()`` and ``eval()``, which modules override."""
    changed = [(part, part.training, mode) for part, mode in modes if part.training != mode]
    try:
        for part, _, mode in changed:
            part.training = mode
        yield
    finally:
        for part, before, _ in changed:
            part.training = before


@dataclass(frozen=True)
class AutocastState:
    """The settings of ``torch.autocast``; ``None`` on devices without it."""

    settings: tuple[str, bool, torch.dtype, bool] | None

    @classmethod
    def now(cls, device: torch.device) -> AutocastState:
        """Return the current settings."""
        kind = device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(None)
        enabled, cache = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        return cls((kind, enabled, torch.get_autocast_dtype(kind), cache))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast where it is enabled."""
        return self.settings[2] if self.settings is not None and self.settings[1] else None

    def context(self) -> AbstractContextManager[object]:
        """Apply these settings."""
        if self.settings is None:
            return nullcontext()
        kind, enabled, dtype, cache = self.settings
        return torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache)


class SavedCounter(torch.autograd.graph.saved_tensors_hooks):
    """Counts the saved tensors of a graph. As the innermost pair of hooks it also hides a tile from an offloader."""

    def __init__(self) -> None:
        self.count = 0

        def pack(tensor: Tensor) -> Tensor:
            self.count += 1
            # An output that its own node holds through a hook would keep the node alive if no backward pass runs.
            return tensor if tensor.is_leaf else tensor.detach()

        super().__init__(pack, lambda packed: packed)

    def innermost(self) -> bool:
        """Whether no other pair of hooks was entered since, which would save tensors uncounted."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] is self.pack_hook
