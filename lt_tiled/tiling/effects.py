"""What the self-check sees of a call beside its outputs: what it changes, draws and sends to other ranks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.graph import attributes
from lt_tiled.tiling.recompute import RandomState, version_of

SMALL = 2**20
"""The most bytes of a buffer, or of another tensor in an attribute, that is restored."""
PLAIN_TENSORS = (Tensor, nn.Parameter)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


class Held(NamedTuple):
    """An attribute, a buffer, an argument, or what a container in them holds."""

    label: str
    value: Any
    fact: Hashable
    """Is equal as long as it is the same."""
    copy: Any
    """A copy of a container or a small tensor."""


class HeldState:
    """What the modules and arguments of a call hold."""

    def __init__(self, call: TiledCall) -> None:
        self.call = call
        self.held: dict[Hashable, Held] = {}
        for index, value in enumerate(call.arguments.others):
            self._note(index, f"its argument {index}", value)
        for index, part in enumerate(call.function.parts):
            name = type(part).__name__
            for holder in (part.__dict__, part._buffers):
                self.held[index, id(holder)] = Held(name, holder, id(type(part)), dict(holder))
            for attribute, value in chain(attributes(part), part._buffers.items()):
                self._note((index, attribute), f"{name}.{attribute}", value)

    def _note(self, place: Hashable, label: str, value: Any) -> None:
        fact: Hashable = id(value)
        kept: Any = None
        if isinstance(value, dict | list | tuple | deque):
            fact = len(value)
            kept = copy.copy(value)
        elif isinstance(value, _PLAIN):
            fact = value
        elif isinstance(value, MethodType):
            fact = id(value.__func__)
        elif isinstance(value, Tensor) and value.grad_fn is not None:
            fact = None  # the graph of the output tells whether it may be there
        elif isinstance(value, Tensor):
            fact = (id(value), version_of(value))
            if type(value) in PLAIN_TENSORS and value.nbytes <= SMALL and not value.requires_grad:
                kept = value.clone()
        self.held[place] = Held(label, value, fact, kept)
        # What a container holds.
        if isinstance(value, dict):
            for key, inside in value.items():
                self._note((place, key), label, inside)
        elif isinstance(value, list | tuple | deque):
            for index, inside in enumerate(value):
                self._note((place, index), label, inside)

    def changes(self) -> list[str]:
        """Return the labels of what is different now."""
        now = HeldState(self.call).held
        found: list[str] = []
        for place in self.held.keys() | now.keys():
            was = self.held.get(place, _ABSENT)
            held = now.get(place, _ABSENT)
            if was.fact != held.fact or not _is_equal(was.copy, held.copy):
                found.append(was.label or held.label)
        return sorted(found)

    def restore(self) -> None:
        """Put back what was there."""
        for _, value, _, kept in self.held.values():
            if isinstance(value, dict):
                for key in value.keys() - kept.keys():
                    del value[key]
                value.update(kept)
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(kept)
            elif not _is_equal(value, kept):
                with torch.no_grad():
                    value.copy_(kept)


_ABSENT = Held("", None, object(), None)


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two small tensors have the same bits. What has no copy is equal if the fact is."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Probe(TorchDispatchMode):
    """Lets all tokens draw the same random numbers, as if no tiles were there, and counts them. Refuses collectives."""

    def __init__(self, call: TiledCall) -> None:
        super().__init__()
        self.name = call.name
        self.start = RandomState.now(call.device)
        self.drawn = 0
        self.dtypes: set[torch.dtype] = {torch.float64}
        """The floating-point dtypes of what was computed."""
        self.parallel = any(hasattr(weight, "placements") for weight in call.weights)
        """Whether the weights are DTensors, whose ranks make equal tiles."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "c10d" in func.namespace and not self.parallel:
            raise NotPositionWiseError(
                f"{self.name} communicates with other ranks in its forward ({func.name()}), and ranks with other tiles"
                f" would not answer. {REMEDY}"
            )
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        found = self._drawn(func, args, kwargs) if draws else func(*args, **kwargs)
        for leaf in found if isinstance(found, tuple | list) else (found,):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.dtypes.add(leaf.dtype)
        return found

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            composed = func.decompose(*args, **kwargs)  # inference mode does not take dropout apart
        if composed is not NotImplemented:
            return composed
        self.start.set()
        drawn = func(*args, **kwargs)
        self.drawn += (drawn if isinstance(drawn, Tensor) else drawn[0]).numel()
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(drawn[1])  # the backward pass scales both calls alike
        if isinstance(drawn, Tensor) and drawn.numel() and "randperm" not in func.name():
            if "multinomial" in func.name():
                drawn.zero_()  # a category that each token has; what a token draws depends on its probabilities
            elif drawn.is_floating_point() or drawn.dtype == torch.bool:
                drawn.fill_(1.0 if "bernoulli" in func.name() else 0.6)  # which most masks keep
            else:
                drawn.fill_(int(drawn.flatten()[0]))
        return drawn
