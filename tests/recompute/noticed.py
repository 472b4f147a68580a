"""Ways in which a recompute can read something else than its forward pass read, and a block that reads all of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.models import H

SWITCH = {"scale": 1.5}
LARGE = 2**18 + H
"""So many elements take more than 1 MiB."""


class Reads(nn.Module):
    """An MLP that reads numbers, tensors and functions from many places."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 3 * H), nn.Linear(3 * H, H, bias=False)
        self.frozen = nn.Linear(H, H, bias=False).requires_grad_(False)
        self.register_buffer("mean", torch.full((H,), 0.5))
        self.register_buffer("table", torch.full((LARGE,), 1.5))
        self.factor, self.act = 1.5, torch.tanh
        self.offset, self.tensors = torch.ones(H), [torch.ones(H)]
        self.unregistered = [nn.LayerNorm(H).requires_grad_(False)]
        self.draw: Callable[[], float] = float

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        number = self.factor * SWITCH["scale"] * (self.draw() + 1.5) / 1.5**3
        h = self.unregistered[0]((x - self.mean) * mask) * self.tensors[0] + self.offset * self.table[:H]
        h = self.frozen(h) * number * torch.full((), 1.0 / 3.0)
        return self.down(F.dropout(self.act(self.up(h)), 0.25, self.training))


class ReadsBlock(Reads):
    """The same behind attention and in front of a residual connection."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = x[:, None]
        return x + super().forward(F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0], mask)


Change = Callable[[Any, Tensor], Any]
"""What happens between the passes to a module, and to the mask that it was given."""


def _wrap(m: Reads) -> None:
    m.up = nn.Sequential(m.up, nn.Linear(3 * H, 3 * H))


CHANGES: dict[str, Change] = {
    "buffer in place": lambda m, _: m.mean.add_(1),
    "buffer, replaced": lambda m, _: setattr(m, "mean", m.mean + 1),
    "buffer, by its data": lambda m, _: m.mean.data.add_(1),
    "large buffer": lambda m, _: m.table.mul_(2),
    "weight in place": lambda m, _: m.up.weight.mul_(2),
    "weight, by its data": lambda m, _: m.up.weight.data.mul_(2),
    "last weight in place": lambda m, _: m.down.weight.mul_(2),
    "last weight, by its data": lambda m, _: m.down.weight.data.mul_(2),
    "last weight's data, replaced": lambda m, _: setattr(m.down.weight, "data", m.down.weight.detach() * 2),
    "frozen weight": lambda m, _: m.frozen.weight.mul_(2),
    "submodule": lambda m, _: setattr(m, "frozen", nn.Linear(H, H, bias=False).requires_grad_(False)),
    "adapter": lambda m, _: _wrap(m),
    "hook": lambda m, _: m.up.register_forward_hook(lambda module, args, output: output * 2),
    "hook on the last projection": lambda m, _: m.down.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "unregistered module": lambda m, _: m.unregistered[0].bias.add_(1),
    "dropout off": lambda m, _: m.eval(),
    "number": lambda m, _: setattr(m, "factor", 3.0),
    "function": lambda m, _: setattr(m, "act", torch.sin),
    "tensor in an attribute": lambda m, _: m.offset.add_(1),
    "tensor in a list": lambda m, _: m.tensors[0].mul_(2),
    "mask of the caller's": lambda _, mask: mask.mul_(0.5),
    "global": lambda m, _: SWITCH.update(scale=3.0),
    "random state": lambda m, _: torch.rand(7),
}

DRAWS: dict[str, Callable[[], float]] = {
    "Python's generator": random.random,
    "a generator of its own": lambda: torch.rand((), generator=OWN).item(),
}
"""What a forward pass draws, and the recompute draws anew."""
OWN = torch.Generator().manual_seed(0)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "kernels of attention": lambda: sdpa_kernel(SDPBackend.MATH),
}
"""What is around a forward pass, and not around its backward pass."""
