"""Offloaded block inputs: bit for bit the results of activation checkpointing without offloading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled import ActivationCheckpointing, prepare

pytestmark = [pytest.mark.slow, pytest.mark.self_checks]
WIDTH = 6


@dataclass(frozen=True)
class Case:
    """One training step of a model of blocks; the fields name functions of the dictionaries below."""

    blocks: int
    lead: tuple[int, ...]
    dtype: torch.dtype
    view: str
    given: str
    output: str
    dropout: float
    frozen: bool
    wants_grad: bool
    steps: str
    offload: str
    keep_last: int
    prefetch: int
    direct_io: bool
    cpu_budget: int | None


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "swapped": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
    "strided": lambda x: torch.cat([x, x], -1)[..., ::2],
    "sliced": lambda x: torch.cat([x, x], -2)[..., 1 : x.shape[-2] + 1, :],
    "expanded": lambda x: x[..., :1, :].expand(x.shape),
    "every eighth": lambda x: x.repeat_interleave(8, -1)[..., ::8],
    "shared": lambda x: x.view(x.shape),
    "complex and back": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))).flatten(
        -2
    ),
    "of a weight": lambda x: x + 0,
}

Given = Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]
GIVEN: dict[str, Given] = {
    "hidden states": lambda x: ((x,), {}),
    "keyword": lambda x: ((), {"x": x}),
    "with a mask": lambda x: ((x,), {"mask": torch.arange(x.shape[-2])[:, None] % 3 > 0}),
    "with a tuple": lambda x: ((x,), {"more": (x.detach().sin(), x.cos())}),
    "with a list": lambda x: ((x,), {"more": [x.detach().sin(), x.cos()]}),
    "with a dict": lambda x: ((x,), {"more": {"a": x.cos(), "b": 2.0, "c": None}}),
    "with itself": lambda x: ((x,), {"more": (x, x)}),
    "with a view of itself": lambda x: ((x,), {"more": (x[..., :1], x.transpose(0, -2).transpose(0, -2))}),
    "with another dtype": lambda x: ((x,), {"more": (x.detach().half(), torch.tensor(3), torch.ones(()))}),
    "with a complex one": lambda x: (
        (x,),
        {"more": (torch.polar(x.detach().float().abs(), x.detach().float()).conj(),)},
    ),
}


class Block(nn.Module):
    """Uses all it is given."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.dropout, self.output = nn.Dropout(case.dropout), case.output

    def forward(self, x: Tensor, more: Any = (), mask: Tensor | None = None) -> Any:
        y = self.dropout(self.down(torch.tanh(self.up(x))))
        for tensor in pytree.tree_leaves(more):
            if isinstance(tensor, Tensor):
                y = y + (tensor.real if tensor.is_complex() else tensor).to(y.dtype)
        if mask is not None:
            y = y * mask
        if self.output == "changed in place":
            return y.mul_(2)
        return {"residual": x + y, "tuple": (x + y, y), "same": x.view_as(x) if x.requires_grad else x + y}[self.output]


class Model(nn.Module):
    """Blocks, each given a view of what the one before returned."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(*case.lead, WIDTH))
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.weight.transpose(0, 0) if self.case.view == "of a weight" else self.first(x)
        for block in self.blocks:
            args, kwargs = GIVEN[self.case.given](VIEWS[self.case.view](x))
            y = block(*args, **kwargs)
            x = y[0] * y[1] if isinstance(y, tuple) else y
        return x


def result(case: Case, offload: bool) -> list[Any]:
    """Return the outputs and gradients of two steps."""
    torch.manual_seed(0)
    model = Model(case).to(case.dtype)
    model.first.requires_grad_(not case.frozen)
    x = torch.randn(*case.lead, WIDTH).to(case.dtype).requires_grad_(case.wants_grad)
    fields: dict[str, Any] = {"targets": "Block"}
    if offload:
        names = ("offload", "keep_last", "prefetch", "direct_io")
        fields |= {name: getattr(case, name) for name in names}
        fields |= {"cpu_budget": case.cpu_budget} if case.cpu_budget and "cpu" in case.offload else {}
    found: list[Any] = []
    with prepare(model, activation_checkpointing=ActivationCheckpointing(**fields)):
        torch.manual_seed(1)
        for step in range(2):
            y = model(x)
            if case.steps == "evaluation between":
                with torch.no_grad():
                    found.append(model(x))
            z = model(x * 2) if case.steps == "two graphs" else None
            loss = (y * torch.arange(1, y.numel() + 1).view(y.shape)).float().square().mean()
            if case.steps == "no backward pass" and step == 0:
                continue
            loss.backward(retain_graph=case.steps == "backward twice")
            if case.steps == "backward twice":
                loss.backward()
            if z is not None:
                z.float().mean().backward()
            found += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
            found = [t.clone() if isinstance(t, Tensor) else t for t in found]
    return found


CASES = st.builds(
    Case,
    blocks=st.integers(1, 4),
    lead=st.tuples(st.integers(0, 20)) | st.tuples(st.integers(0, 3), st.integers(0, 12)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    view=st.sampled_from([*VIEWS]),
    given=st.sampled_from([*GIVEN]),
    output=st.sampled_from(["residual", "tuple", "same", "changed in place"]),
    dropout=st.sampled_from([0.0, 0.5]),
    frozen=st.booleans(),
    wants_grad=st.booleans(),
    steps=st.sampled_from(["one graph", "evaluation between", "two graphs", "no backward pass", "backward twice"]),
    offload=st.sampled_from(["cpu", "disk", "cpu+disk"]),
    keep_last=st.integers(0, 2),
    prefetch=st.sampled_from([1, 3]),
    direct_io=st.booleans(),
    cpu_budget=st.sampled_from([None, 1, 300, 4096]),
)


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return a.dtype == b.dtype and a.stride() == b.stride() and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(torch.uint8) if t.numel() else t


@given(CASES)
def test_bit_for_bit(case: Case) -> None:
    """Outputs and gradients with offloading are, bit for bit, those without."""
    try:
        true = result(case, offload=False)
    except Exception:
        assume(False)
        raise
    found = result(case, offload=True)
    assert all(_equal(a, b) for a, b in zip(found, true, strict=True))
