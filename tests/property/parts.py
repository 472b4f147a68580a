"""The parts that modules of the tests consist of: those that work position by position, and those that do not."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

H = 6


class Part(nn.Module):
    """A function of :data:`POSITION_WISE` or :data:`OTHERS`, and what it may use: weights, a buffer, attributes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.inner, self.other = nn.Linear(H, H), nn.Linear(H, H, bias=False)
        self.gain = nn.Parameter(torch.rand(H) + 0.5)
        self.register_buffer("stat", torch.rand(H) + 0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return (POSITION_WISE.get(self.name) or OTHERS[self.name])(self, x)


def in_place(part: Part, x: Tensor) -> Tensor:
    y = part.inner(x)
    y.mul_(part.gain)
    y[..., 0] += 1
    return y.relu_()


def routed(part: Part, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, H)
    weight, chosen = part.other(tokens).softmax(-1).topk(2)
    y = torch.zeros_like(tokens)
    for index in range(H):
        row, slot = torch.where(chosen == index)
        y = y.index_add(0, row, (tokens[row] * part.gain[index]) * weight[row, slot, None])
    return y.view_as(x)


POSITION_WISE: dict[str, Callable[[Part, Tensor], Tensor]] = {
    "linear": lambda part, x: part.inner(x),
    "gated": lambda part, x: part.inner(F.silu(part.other(x)) * x),
    "in place": in_place,
    "residual": lambda part, x: x + part.inner(x).tanh(),
    "parts of a weight": lambda part, x: torch.cat([F.linear(x, w) for w in part.other.weight.chunk(3)], -1),
    "normalized weight": lambda part, x: F.linear(x, F.normalize(part.other.weight)),
    "embedding": lambda part, x: x + F.embedding((x[..., 0] > 0).long(), part.other.weight),
    "norm": lambda part, x: F.layer_norm(x, (H,), part.gain, part.inner.bias),
    "rms norm": lambda part, x: F.rms_norm(x, (H,), part.gain),
    "buffer": lambda part, x: x * part.stat,
    "flattened": lambda part, x: part.inner(x.reshape(-1, H)).view_as(x),
    "routed": routed,
    "checkpoint": lambda part, x: checkpoint(part.inner, x, use_reentrant=False),
    "constant": lambda part, x: torch.zeros_like(x) + part.gain,
}
"""What computes each token from itself alone."""


def capacity_of_8(part: Part, x: Tensor) -> Tensor:
    flat = part.inner(x).reshape(-1, H)
    return (flat * (torch.arange(len(flat)) < 8)[:, None]).view_as(x)


def writes_into_its_input(part: Part, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return part.inner(x)


def mixed_by_a_hook(part: Part, x: Tensor) -> Tensor:
    y: Tensor = part.inner(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient - gradient.mean(-2, keepdim=True))
    return y


OTHERS: dict[str, Callable[[Part, Tensor], Tensor]] = {
    "mean of tokens": lambda part, x: part.inner(x - x.mean(-2, keepdim=True)),
    "mean behind a small gate": lambda part, x: x + 1e-6 * part.gain * x.mean(-2, keepdim=True),
    "token shift": lambda part, x: part.inner(x + F.pad(x, (0, 0, 1, -1))),
    "attention": lambda part, x: F.scaled_dot_product_attention(part.inner(x), part.other(x), x),
    "batch norm": lambda part, x: F.batch_norm(x.reshape(-1, H), None, None, part.gain, training=True).view_as(x),
    "capacity of 8": capacity_of_8,
    "shared noise": lambda part, x: x * torch.rand((), dtype=x.dtype),
    "Python's noise": lambda part, x: x * random.random(),
    "mixed in training": lambda part, x: x - x.mean(-2, keepdim=True) if part.training else x,
    "mixed by a hook": mixed_by_a_hook,
    "writes into its input": writes_into_its_input,
    "counts and uses": lambda part, x: (setattr(part, "calls", part.calls + 1), x * part.calls)[1],
}
"""What does not: it reads other tokens or its input's shape, shares random numbers, or changes something of its own."""


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H, bias=False))
    module[2].weight = module[0].weight
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "nn.PReLU": nn.PReLU,
    "nn.Sequential": lambda: nn.Sequential(nn.Linear(H, 9), nn.ReLU(inplace=True), nn.Linear(9, H)),
    "nn.Dropout": lambda: nn.Dropout(0.0),
    "tied": tied,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(H, H)),
}
"""Modules that work position by position."""

OTHER_MODULES: dict[str, Callable[[], nn.Module]] = {
    "nn.BatchNorm1d": lambda: nn.BatchNorm1d(H),
    "nn.Conv1d": lambda: nn.Conv1d(H, H, 3, padding=1),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(H, H)),
}
"""Modules that do not, at least in training."""


def build(name: str) -> nn.Module:
    """Return a new part of that name."""
    make = MODULES.get(name) or OTHER_MODULES.get(name)
    return Part(name) if make is None else make()
