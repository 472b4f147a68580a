"""Compare the gradients of tiled MLPs with those of the untiled MLP: ``python -m benchmarks --only correctness``.

Every case runs one module untiled in float64 and tiled in float32. A cell is the greatest relative error of the loss
and of the gradients of the input and of all weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import Options, Table, attempt, judged, usable
from benchmarks.peers import MAKERS, Tile
from tests.models import Coded, GatedMLP, H, PlainMLP, RoutedMLP
from tests.parity import gradients, randn, reference, worst

SHARDS = 4
EXACT = 1e-5
X = randn(1, 60, H)


class Called(nn.Module):
    """A module and how it is called."""

    def __init__(self, module: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.module, x)


def trial(
    tile: Tile,
    make: Callable[[], nn.Module] = GatedMLP,
    x: Tensor = X,
    call: Callable[[Any, Tensor], Any] = lambda module, x: module(x),
) -> float:
    """Return the greatest relative error of loss and gradients; 1 if one is missing or not due."""
    torch.manual_seed(0)
    model = Called(make(), call)
    true = reference(model, x)
    tile(model.module, SHARDS)
    found = gradients(model, x)
    return worst(found, true) if found.keys() == true.keys() else 1.0


def frozen(*names: str) -> nn.Module:
    module = GatedMLP()
    for name in names:
        module.get_parameter(f"{name}.weight").requires_grad_(False)
    return module


def dropout(tile: Tile) -> float:
    """Return how far the masks of the recompute, in gradients, are from those of the forward pass, in outputs."""
    module = Coded(lambda module, x: F.dropout(x, 0.5) + 0 * module.mlp(x))
    tile(module, SHARDS)
    x = randn(1, 60, H)
    out = module(x)
    out.sum().backward()
    assert x.grad is not None
    return float((x.grad - out / x).norm() / x.grad.norm())


def autocast(tile: Tile) -> float | str:
    """Return 0 if the backward pass recomputes in the dtype of the forward pass, which alone ran under autocast."""
    dtypes: list[torch.dtype] = []

    def code(module: Any, x: Tensor) -> Tensor:
        out: Tensor = module.mlp(x)
        dtypes.append(out.dtype)
        return out * 1

    module = Coded(code)
    tile(module, SHARDS)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(randn(1, 60, H))
    dtypes.clear()
    out.float().sum().backward()
    return 0.0 if set(dtypes) == {torch.bfloat16} else "recomputes in float32"


def by_autograd_grad(tile: Tile) -> float:
    """Return 1 if ``torch.autograd.grad`` does not return the gradients of all weights, or sets ``.grad`` as well."""
    module = GatedMLP()
    tile(module, SHARDS)
    found = torch.autograd.grad(module(X).sum(), list(module.parameters()), allow_unused=True)
    missing = any(gradient is None for gradient in found)
    return float(missing or any(weight.grad is not None for weight in module.parameters()))


def hooks(tile: Tile) -> float | str:
    """Return 0 if each weight's gradient is reported once to a hook, as engines listen for it."""
    module, fired = GatedMLP(), []
    for weight in module.parameters():
        weight.register_post_accumulate_grad_hook(lambda w: fired.append(id(w)))
    tile(module, SHARDS)
    module(X).sum().backward()
    return 0.0 if len(fired) == 3 else f"{len(fired) / 3:g} times"


def mixing(tile: Tile) -> float:
    """Return the error of a module that mixes tokens, or 0 if it is refused."""
    try:
        return trial(tile, lambda: Coded(lambda module, x: module.mlp(x) * x.softmax(-2)))
    except ValueError:
        return 0.0


CASES: dict[str, Callable[[Tile], float | str]] = {
    "one sequence": trial,
    "batch of 3": partial(trial, x=randn(3, 60, H)),
    "input [tokens, hidden]": partial(trial, x=randn(60, H)),
    "non-contiguous, batch of 3": partial(trial, x=randn(60, 3, H), call=lambda module, x: module(x.transpose(0, 1))),
    "5 tokens in 4 tiles": partial(trial, x=randn(1, 5, H)),
    "fewer tokens than tiles": partial(trial, x=randn(1, 2, H)),
    "no tokens": partial(trial, x=randn(1, 0, H)),
    "output size differs from input size": partial(trial, make=partial(PlainMLP, out=48)),
    "input without gradient": partial(trial, x=X.detach()),
    "frozen gate": partial(trial, make=partial(frozen, "gate")),
    "all weights frozen": partial(trial, make=partial(frozen, "gate", "up", "down")),
    "weight shared with the outside": partial(
        trial, call=lambda module, x: module(x) + F.linear(x, module.down.weight.T[:H])
    ),
    "router logits as a second output": partial(trial, make=RoutedMLP),
    "second argument per token": partial(
        trial,
        make=lambda: Coded(lambda module, x, scale: module.mlp(x) * scale),
        call=lambda module, x: module(x, x[..., :1].detach()),
    ),
    "dropout inside": dropout,
    "autocast in the recompute": autocast,
    "inside torch.utils.checkpoint": partial(trial, call=lambda module, x: checkpoint(module, x, use_reentrant=False)),
    "called twice in one graph": partial(trial, call=lambda module, x: module(module(x))),
    "torch.autograd.grad": by_autograd_grad,
    "hook of a weight fires once": hooks,
    "a module that mixes tokens is refused": mixing,
}


def correctness(options: Options) -> list[Table]:
    """One row for each case, one column for each package. It runs on the CPU, so that only the tiles differ."""
    packages, missing = usable(MAKERS)
    table = Table("Tiled MLPs compared with the untiled MLP in float64", ["", *packages])
    table.note = f"Largest relative error of loss and gradients; ✗ above {EXACT:g}.{missing}"
    for name, case in CASES.items():
        table.add(name, *(judged(attempt(case, tile), EXACT) for tile in packages.values()))
    return [table]
