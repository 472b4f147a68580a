"""What the self-check sees of a call besides its outputs: what it holds, changes, draws and sends, and its graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.modules.patch import is_patched
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.recompute import RandomState

# What modules hold

_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_BY_VALUE = (int, float, complex, str, bytes, torch.Size, torch.device)
Held = frozenset[tuple[str, Hashable, Hashable]]
"""Names, places, and facts that are equal as long as what is there is the same."""


def held(parts: Sequence[nn.Module], others: Sequence[Any], fact_of: Callable[[Tensor], Hashable]) -> Held:
    """Return what modules and arguments hold, also in containers, with such facts of tensors."""
    values: list[tuple[str, Hashable, Any]] = [("its arguments", None, others)]
    for index, part in enumerate(parts):
        for holder in (part.__dict__, part._buffers, part._parameters):
            for name, value in holder.items():
                if holder is not part.__dict__ or _is_users(name, value):
                    values.append((f"{type(part).__name__}.{name}", (index, type(part), name), value))
    found: set[tuple[str, Hashable, Hashable]] = set()
    for label, place, value in values:
        for path, leaf in pytree.tree_leaves_with_path(value):
            fact = leaf if isinstance(leaf, _BY_VALUE) else id(leaf)
            found.add((label, (place, path), fact_of(leaf) if isinstance(leaf, Tensor) else fact))
    return frozenset(found)


def _is_users(name: str, value: Any) -> bool:
    """Whether a module's own code or a user set an attribute, or it is its training mode."""
    return name not in _OF_TORCH and not name.startswith("_lt_tiled") and not is_patched(value)


@contextmanager
def copies_in_place(parts: Sequence[nn.Module], copy: Callable[[Any], Any]) -> Iterator[None]:
    """Let copies stand in the places of tensors and containers that modules hold, so that nothing stays changed."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for part in parts:
            for holder in (part.__dict__, part._buffers, part._parameters):
                entries = dict(holder.items())
                before.append((holder, entries))
                for name, value in entries.items():
                    if holder is not part.__dict__ or _is_users(name, value):
                        # The dictionaries of ZeRO-3 have functions of their own.
                        dict.__setitem__(holder, name, pytree.tree_map(copy, value))
        yield
    finally:
        for holder, entries in before:
            for name in holder.keys() - entries.keys():
                del holder[name]
            dict.update(holder, entries)


# What operations do


class Probe(TorchDispatchMode):
    """Lets all tokens draw the same random numbers, as if no tiles were there, and counts them. Refuses collectives."""

    def __init__(self, call: TiledCall) -> None:
        super().__init__()
        self.name = call.name
        self.start = RandomState.now(call.device)
        self.drawn = 0
        self.dtypes: set[torch.dtype] = {torch.float64}
        """The dtypes of what was computed."""
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
        if draws:
            self.start.set()
        found = func(*args, **kwargs)
        leaves = found if isinstance(found, tuple | list) else (found,)
        self.dtypes.update(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor))
        if not draws:
            return found
        self.drawn += leaves[0].numel()
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(found[1])  # the backward pass scales both calls alike
        _fill(leaves[0], func.name())
        return found


def _fill(drawn: Tensor, name: str) -> None:
    """Let all tokens have drawn the same value."""
    if "multinomial" in name:
        drawn.zero_()  # a category that each token has; what a token draws depends on its probabilities
    elif "bernoulli" in name:
        drawn.fill_(1)
    elif drawn.is_floating_point():
        drawn.fill_(0.6)  # which most masks keep
    elif drawn.numel():
        drawn.fill_(int(drawn.flatten()[0]))


# The graph of a tile: it must begin at the arguments and weights, and end at the outputs


def check_leaves(ends: Iterable[Any], known: Container[int], name: str) -> set[Any]:
    """Return the nodes of the graph that ends at some, and refuse leaves whose ids are not known."""
    todo = list(ends)
    nodes: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for following, _ in node.next_functions:
            todo.append(following)
        variable = getattr(node, "variable", None)  # of a leaf
        # The link of an anchor has no elements.
        if isinstance(variable, Tensor) and variable.numel() and id(variable) not in known:
            raise NotPositionWiseError(
                f"{name}: its output depends on a tensor of shape {list(variable.shape)} that is neither one of its"
                " arguments nor one of its registered parameters or buffers, and would get no gradient. Register it, or"
                f" pass it as an argument. {REMEDY}"
            )
    return nodes
