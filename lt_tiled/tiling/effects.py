"""What the self-check sees of a call besides its outputs: what it holds, draws and sends, and its graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.recompute.mode import PLAIN_TENSORS, version_of
from lt_tiled.tiling.call import TiledCall

# What modules hold

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference that rounding may cause when a matrix product has another shape (float32: TF32 included)."""
_BY_VALUE = (int, float, complex, str, bytes, torch.Size, torch.device)
_OF_TORCH = nn.Module().__dict__.keys() - {"training", "_parameters", "_buffers"}
Held = frozenset[tuple[str, Hashable, Hashable]]
"""Names, modules, and facts that are equal as long as what is there is the same."""


def held(parts: Sequence[nn.Module], others: Sequence[Any], fact_of: Callable[[Tensor], Hashable]) -> Held:
    """Return what modules and arguments hold, also in containers, with such facts of tensors."""
    values: list[tuple[str, Hashable, Any]] = [("its arguments", None, others)]
    for index, part in enumerate(parts):
        for name, value in _own(part).items():
            values.append((f"{type(part).__name__}.{name}", (index, type(part)), value))
    found: set[tuple[str, Hashable, Hashable]] = set()
    for label, place, value in values:
        for path, leaf in pytree.tree_leaves_with_path(value):
            fact: Hashable = id(leaf)
            if isinstance(leaf, Tensor):
                fact = fact_of(leaf)
            elif isinstance(leaf, _BY_VALUE):
                fact = leaf
            found.add((label + pytree.keystr(path), place, fact))
    return frozenset(found)


def _own(part: nn.Module) -> dict[str, Any]:
    """Return weights, buffers and training mode of a module, and the attributes that its code or a user set."""
    own: dict[str, Any] = {}
    for name, value in part.__dict__.items():
        if name not in _OF_TORCH and not name.startswith("_lt_tiled") and not isinstance(value, MethodType):
            # The dictionaries of ZeRO-3 are no containers for pytree, and have functions of their own.
            own[name] = dict(value.items()) if name == "_parameters" else value
    return own


@contextmanager
def copies_in_place(parts: Sequence[nn.Module], copy: Callable[[Any], Any]) -> Iterator[None]:
    """Let copies stand in the places of tensors and containers that modules hold, so that nothing stays changed."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for part in parts:
            before.append((part.__dict__, dict(part.__dict__)))
            part.__dict__.update(pytree.tree_map(copy, _own(part)))
        yield
    finally:
        for holder, entries in before:
            for name in holder.keys() - entries.keys():
                del holder[name]
            holder.update(entries)


def value_of(tensor: Tensor) -> Hashable:
    """Return what is equal as long as a tensor has the same values."""
    is_float8 = tensor.is_floating_point() and tensor.dtype not in TOLERANCE
    if is_float8 or type(tensor) not in PLAIN_TENSORS:
        return id(tensor), version_of(tensor)
    # Code that parametrizes a weight for a while changes its version.
    return norm(tensor), tensor.requires_grad, 0 if isinstance(tensor, nn.Parameter) else version_of(tensor)


def norm(tensor: Tensor) -> float:
    """Return the norm of what is finite."""
    finite = tensor.detach().resolve_conj()
    if not (finite.is_floating_point() or finite.is_complex()):
        finite = finite.double()
    # Without a copy in float32.
    wide = torch.promote_types(finite.dtype, torch.float32)
    return float(torch.linalg.vector_norm(finite.nan_to_num(0, 0, 0), dtype=wide))


# What operations do


class Probe(TorchDispatchMode):
    """Lets all tokens draw the same numbers, as if no tiles were there, and counts them. Refuses collectives."""

    def __init__(self, call: TiledCall) -> None:
        super().__init__()
        self.name = call.name
        self.drawn = 0
        self.dtypes: set[torch.dtype] = {torch.float64}
        """The dtypes of what was computed."""
        self.parallel = any(hasattr(weight, "placements") for weight in call.weights)
        """Whether the weights are DTensors, whose ranks make equal tiles."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # 1. Collectives.
        kwargs = kwargs or {}
        if "c10d" in func.namespace and not self.parallel:
            raise NotPositionWiseError(
                f"{self.name} communicates with other ranks in its forward ({func.name()}), and ranks with other tiles"
                f" would not answer. {REMEDY}"
            )
        # 2. Dtypes. The link of an anchor has no elements.
        found = func(*args, **kwargs)
        leaves = found if isinstance(found, tuple | list) else (found,)
        self.dtypes.update(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel())
        # 3. Random numbers: those that most masks keep, and a category that each token has.
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return found
        self.drawn += leaves[0].numel()
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(found[1])  # the backward pass scales both calls alike
        if "bernoulli" in func.name():
            leaves[0].fill_(1)
        else:
            leaves[0].fill_(0.6 if leaves[0].is_floating_point() else 0)
        return found
