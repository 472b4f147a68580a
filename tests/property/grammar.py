"""A training step as a case that hypothesis can draw: module, input, mode, surroundings; and what it gives."""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lt_tiled import tile
from lt_tiled.modules.patch import set_patch
from lt_tiled.recompute.blocks import BlockPatch
from tests.property.parts import MODULES, OTHER_MODULES, OTHERS, POSITION_WISE, H, build

Values = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One step. Its fields are the names of the functions and dictionaries below."""

    parts: tuple[str, ...] = ("linear",)
    lead: tuple[int, ...] = (2, 8)
    tiles: int = 4
    layout: str = "contiguous"
    wants_grad: bool = True
    training: bool = True
    extra: str = "none"
    output: str = "tensor"
    frozen: str = "nothing"
    before: str = "nothing"
    around: str = "nothing"
    backward: str = "once"
    checkpointed: bool = False
    """Whether the module is a block with activation checkpointing, too."""

    @property
    def position_wise(self) -> bool:
        """Whether the module must not be refused."""
        known = {*POSITION_WISE, *MODULES}.issuperset(self.parts)
        return known and all(self.lead) and self.extra in TAKEN and self.output in PER_TOKEN


class Composed(nn.Module):
    """Parts one after another, then what the arguments and the output ask for."""

    def __init__(self, parts: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(build(name) for name in parts)
        self.output = output

    def forward(self, x: Tensor, scale: Any = 1.0, mask: Tensor | None = None) -> Any:
        y = x
        for part in self.parts:
            y = part(y)
        y = y * scale
        if mask is not None:
            y = y.masked_fill(mask[..., None], 0.0)
        return OUTPUTS[self.output](y, x)


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, x: y,
    "tuple": lambda y, x: (y, y.sum(-1)),
    "views": lambda y, x: (y[..., :2], y[..., 2:]),
    "per token, flat": lambda y, x: (y, y.reshape(-1, H).sum(-1)),
    "indices": lambda y, x: (y, y.argmax(-1)),
    "also the input": lambda y, x: (y, x),
    "detached alone": lambda y, x: y.detach(),
    "mean": lambda y, x: (y, y.mean()),
}
PER_TOKEN = [*OUTPUTS][:7]

Extra = dict[str, Any]
EXTRAS: dict[str, Callable[[tuple[int, ...]], Extra]] = {
    "none": lambda lead: {},
    "mask": lambda lead: {"mask": _entries(*lead) > 0.3},
    "per token": lambda lead: {"scale": _entries(*lead, 1).requires_grad_()},
    "like the input": lambda lead: {"scale": _entries(*lead, H).requires_grad_()},
    "channels": lambda lead: {"scale": _entries(H).requires_grad_()},
    "number": lambda lead: {"scale": 1.5},
    "per row": lambda lead: {"scale": _entries(lead[0], *[1] * (len(lead) - 1), H)},
    "per position": lambda lead: {"scale": _entries(lead[-1], H).requires_grad_()},
}
TAKEN = [*EXTRAS][:6]
"""Arguments that tiles can be given."""

LAYOUTS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "contiguous": lambda lead: _entries(*lead, H),
    "transposed": lambda lead: _entries(H, *lead).movedim(0, -1),
    "strided": lambda lead: _entries(*lead, 2 * H)[..., ::2],
    "offset": lambda lead: _entries(lead[0] + 1, *lead[1:], H)[1:],
    "expanded": lambda lead: _entries(*lead[:-1], 1, H).expand(*lead, H),
}


def _entries(*shape: int) -> Tensor:
    """Return fixed numbers of any shape."""
    size = int(torch.Size(shape).numel())
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).view(shape)


BEFORE: dict[str, Callable[[Case], Case | None]] = {
    "nothing": lambda case: None,
    "a call": lambda case: case,
    "a call in the other mode": lambda case: replace(case, training=not case.training),
    "a call without gradients": lambda case: replace(case, backward="no_grad"),
    "a call on a frozen input": lambda case: replace(case, wants_grad=False),
    "a call on other arguments": lambda case: replace(case, extra="channels"),
    "a call on one token": lambda case: replace(case, lead=tuple(1 for _ in case.lead)),
}

FROZEN: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda module: None,
    "everything": lambda module: module.requires_grad_(False),
    "biases": lambda module: [p.requires_grad_(p.dim() > 1) for p in module.parameters()],
    "matrices": lambda module: [p.requires_grad_(p.dim() < 2) for p in module.parameters()],
}

Call = Callable[..., Any]


def _and_weight(module: nn.Module) -> Call:
    """Use a weight of the module outside of it, too."""
    outer = next((p for p in module.parameters() if p.shape == (H, H)), torch.eye(H, dtype=torch.float64))
    return lambda x, **extra: (module(x @ outer, **extra), x @ outer)


AROUND: dict[str, Callable[[nn.Module], Call]] = {
    "nothing": lambda module: module,
    "called twice": lambda module: lambda x, **extra: (module(x, **extra), module(x * 2, **extra)),
    "weights used outside": _and_weight,
    "checkpoint": lambda module: lambda x, **extra: checkpoint(module, x, use_reentrant=False, **extra),
}
BACKWARD = ("once", "twice", "no_grad")


def _seldom(names: Any) -> st.SearchStrategy[str]:
    """Return a strategy for one of the names, half of the time the first."""
    names = list(names)
    return st.just(names[0]) | st.sampled_from(names)


def _parts(names: list[str]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(names), min_size=1, max_size=3).map(tuple)


def cases() -> st.SearchStrategy[Case]:
    """Return a strategy for any case, about half of which must not be refused."""
    names = [*POSITION_WISE, *MODULES]
    one, two = st.tuples(st.integers(0, 90)), st.tuples(st.integers(0, 5), st.integers(0, 40))
    three = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 8))
    return st.builds(
        Case,
        parts=_parts(names) | _parts([*names, *OTHERS, *OTHER_MODULES]),
        lead=one | two | three,
        tiles=st.integers(2, 9),
        layout=_seldom(LAYOUTS),
        wants_grad=st.booleans(),
        training=st.booleans(),
        extra=_seldom(EXTRAS),
        output=_seldom(OUTPUTS),
        frozen=_seldom(FROZEN),
        before=_seldom(BEFORE),
        around=_seldom(AROUND),
        backward=_seldom(BACKWARD),
        checkpointed=st.booleans(),
    ).filter(lambda case: not any(known(case) for known in KNOWN))


KNOWN: list[Callable[[Case], bool]] = [
    # torch's own checkpoint changes again what a forward pass changes, before it computes gradients
    lambda case: case.around == "checkpoint" and "counts and uses" in case.parts,
    # torch's own error: the input of a block is changed before its recompute
    lambda case: case.checkpointed and "writes into its input" in case.parts,
    # an argument of as many channels as there are tokens is cut
    lambda case: case.lead == (H,) and (case.extra == "channels" or case.before == "a call on other arguments"),
]
"""What is known to differ, and is not drawn."""


def _input(case: Case) -> Tensor:
    return LAYOUTS[case.layout](case.lead).requires_grad_(case.wants_grad)


def run(case: Case, tiled: bool) -> Values:
    """Return the outputs, the gradients, and what is left in the module."""
    random.seed(0)
    torch.manual_seed(0)
    module: nn.Module = Composed(case.parts, case.output).train(case.training).double()
    FROZEN[case.frozen](module)
    if tiled:
        tile(module, num_shards=case.tiles)
        if case.checkpointed:
            set_patch(module, BlockPatch("block"))
    if (before := BEFORE[case.before](case)) is not None:
        with torch.set_grad_enabled(before.backward != "no_grad"):
            module.train(before.training)(_input(before), **EXTRAS[before.extra](before.lead))
        module.train(case.training)
    x, extra = _input(case), EXTRAS[case.extra](case.lead)
    torch.manual_seed(0)
    with torch.set_grad_enabled(case.backward != "no_grad"):
        leaves = pytree.tree_leaves(AROUND[case.around](module)(x, **extra))
    found: Values = {f"output {i}": t.detach().clone() for i, t in enumerate(leaves)}
    wanted = {"input": x} | {f"argument {name}": t for name, t in extra.items()}
    wanted |= {f"weight {name}": p for name, p in module.named_parameters()}
    wanted = {name: t for name, t in wanted.items() if isinstance(t, Tensor) and t.requires_grad}
    found |= _gradients(case, leaves, wanted)
    found |= {f"state {name}": value.clone() for name, value in module.state_dict().items()}
    found["input afterwards"] = x.detach()
    return found


def _gradients(case: Case, leaves: list[Tensor], wanted: dict[str, Tensor]) -> Values:
    chosen = [t for t in leaves if t.is_floating_point()]
    if case.backward == "no_grad" or not wanted or not any(t.requires_grad for t in chosen):
        return {}
    loss: Any = sum((t * _entries(*t.shape) + t * t / 2).sum() for t in chosen)
    loss.backward(retain_graph=case.backward == "twice")
    if case.backward == "twice":
        loss.backward()
    return {f"gradient of {name}": t.grad for name, t in wanted.items()}


def differences(tiled: Values, untiled: Values) -> list[str]:
    """Return what is not equal."""
    pairs = {name: (tiled.get(name), untiled.get(name)) for name in tiled | untiled}
    return [f"{name}: {a} instead of {b}" for name, (a, b) in pairs.items() if not _equal(a, b)]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:  # autograd gives no gradient instead of zeros where it knows
        return all(t is None or not bool(t.any()) for t in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(b.nan_to_num().abs().amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9 * (scale + 1e-2), equal_nan=True)


_REMEDY = re.compile(
    r"Remove it from targets|Do not tile|Make the change|Return it|Register it|without, or lt_tiled.untile|"
    r"Remove the hook|Leave it as it is|[Rr]emove the module from"
)


def refused(error: BaseException) -> bool:
    """Whether an error is lt_tiled's, and names the module and a remedy."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = "/lt_tiled/" in frames[-1].filename
    named = re.search(r"Composed|Part|weight \w+\.", str(error)) is not None
    return ours and isinstance(error, ValueError | RuntimeError) and named and bool(_REMEDY.search(str(error)))
