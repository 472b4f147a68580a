"""What a block with activation checkpointing keeps for its recompute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.policies import Keep
from lt_tiled.tiling.recompute import RandomState, hidden_from_checkpoints, keeps_graph, version_of

T = TypeVar("T")


def apart(tensor: Tensor) -> Tensor:
    """Return a tensor to keep: an output that its own node held through a hook would keep the node alive."""
    return tensor if tensor.is_leaf else tensor.detach()


@dataclass(eq=False)
class Kept:
    """What one call of a block keeps: recorded in its forward pass, replayed in its recompute."""

    what: Keep | None
    """What is kept, apart from outputs of operators."""
    device: torch.device
    pack: Callable[[Tensor], Any] = apart
    """Stores a tensor until the recompute, for example in CPU memory."""
    unpack: Callable[[Any], Tensor] = lambda t: t
    drew: RandomState | None = field(init=False, default=None)
    """Where random numbers began in the last computation, if it may have drawn some."""
    recorded: bool = field(init=False, default=False)
    _values: dict[Hashable, Any] = field(init=False, default_factory=dict)
    _next: int = field(init=False, default=0)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Record what the first call computes, and replay it in the same order in later ones."""
        self._next = 0
        token = current_kept.set(None if self.what is None else self)
        try:
            yield
        finally:
            current_kept.reset(token)
        self.recorded = True

    @property
    def found(self) -> tuple[bool, bool]:
        """Whether there was something to keep by name, and by a policy of operators."""
        return self._next > 0, len(self._values) > self._next

    def value(self, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns, or returned in the forward pass, where alone it is called."""
        place, self._next = self._next, self._next + 1
        with hidden_from_checkpoints():
            if self.recorded and self._holds(place):
                replayed: T = self.replay(place)
                return replayed
            self.drew = RandomState.now(self.device)
            found = compute()
            if not self.recorded:
                self.record(place, found, self.drew)
                self.drew = self._values[place][-1] and self.drew
            return found

    def _holds(self, place: Hashable) -> bool:
        """Whether something is there that no backward pass freed and nobody changed in place."""
        packed = () if self._values[place] is None else self._values[place][0]
        return bool(packed) and not any(isinstance(t, Tensor) and version_of(t) != version for version, t in packed)

    def record(self, place: Hashable, found: Any, before: RandomState | None) -> None:
        """Keep what was computed, with the state of the generators if it is not the one before."""
        after = None if before is None else RandomState.now(self.device)
        leaves, form = pytree.tree_flatten(found)
        packed = [(version_of(leaf), self.pack(leaf)) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves]
        drew = before is not None and after is not None and not before.same_as(after)
        self._values[place] = packed, form, (before, after) if drew else None

    def forget(self, place: Hashable) -> None:
        """Drop it."""
        self._values.pop(place, None)

    def __contains__(self, place: Hashable) -> bool:
        return place in self._values

    def replay(self, place: Hashable) -> Any:
        """Return what was kept. Random numbers go on where they did after it."""
        if self._values[place] is None:
            raise RuntimeError(
                "A second backward pass needs what a block kept, and the first one freed it: call that with"
                " retain_graph=True, or leave keep and policy out of ActivationCheckpointing."
            )
        packed, form, random = self._values[place]
        self.drew = random and random[0]
        if random is not None:
            random[1].set()
        if not keeps_graph():
            self._values[place] = None  # no second backward pass will need it
        return pytree.tree_unflatten(
            [leaf if version is None else unpacked(self.unpack, version, leaf) for version, leaf in packed], form
        )


def unpacked(unpack: Callable[[Any], Tensor], version: int, packed: Any) -> Tensor:
    """Unpack a tensor that had this version.

    Raises:
        RuntimeError: If it was changed in place since.
    """
    if isinstance(packed, Tensor) and version_of(packed) != version:
        raise RuntimeError(
            f"A tensor of shape {list(packed.shape)} that a block keeps for its recompute was changed in place"
            " after the block. Make the change out of place, or keep something else in ActivationCheckpointing."
        )
    return unpack(packed)


current_kept: ContextVar[Kept | None] = ContextVar("kept", default=None)
"""What this thread's block keeps."""


def kept_or(what: Keep, compute: Callable[[], T]) -> T:
    """Return what ``compute`` returns, or what this thread's block kept of it in its forward pass."""
    kept = current_kept.get()
    return compute() if kept is None or what != kept.what else kept.value(compute)
