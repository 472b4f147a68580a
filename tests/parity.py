"""Gradients against a reference, and their errors.

Rounding depends on the processor, so no test compares it with a number. ``less_accurate`` holds one step's gradients
against the untiled step's error, and ``near`` holds losses against untiled runs that differ by the order of sums.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tests.models import TinyLM, lm_loss

EXACT = 1e-12
"""The relative error that float64 gradients may have: thousands of roundings."""
MIXED = 16 * torch.finfo(torch.float32).eps
"""The same where parts of a float64 model compute in float32, such as the norms of transformers: 16 roundings."""


def spread(value: Any) -> Tensor:
    """A positive scalar that depends on every entry of every floating point tensor of an output, each with its own
    weight.
    """
    total: Any = 0.0
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            numbers = torch.arange(1, leaf.numel() + 1, dtype=torch.float64, device=leaf.device)
            weight = (0.7 * numbers).sin() + 1.5
            total = total + (leaf.double().square() * weight.view(leaf.shape)).sum()
    return total


def gradients(
    module: nn.Module,
    *inputs: Tensor,
    loss: Callable[[Any], Tensor] = spread,
    call: Callable[..., Any] | None = None,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """The loss, and its gradients by the name of the weight and the number of the input, on the CPU.

    Module and inputs are moved to the device on which they are computed.
    """
    copies = [x.detach().clone(memory_format=torch.preserve_format) for x in inputs]
    leaves = [x.to(device).requires_grad_(given.requires_grad) for x, given in zip(copies, inputs, strict=True)]
    module.to(device).zero_grad(set_to_none=True)
    value = loss((module if call is None else call)(*leaves))
    value.backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    found |= {f"input {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    module.zero_grad(set_to_none=True)
    return {name: gradient.cpu() for name, gradient in {"loss": value.detach(), **found}.items()}


def step_of(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The loss of a model of transformers, and its gradients by the name of the weight."""
    return gradients(model, call=lambda: model(**inputs).loss, loss=torch.sum)


def reference(module: nn.Module, *inputs: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    """The same in float64, untiled."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    return gradients(copy.deepcopy(module).double(), *wide, **kwargs)


def errors(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each gradient, which must be there in both."""
    assert found.keys() == true.keys()
    with torch.no_grad():
        return {
            name: float((found[name].double() - true[name]).norm() / true[name].norm().clamp_min(1e-12))
            for name in true
        }


def worst(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    return max(errors(found, true).values())


def worst_of_model(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """The same for a whole model, of whose gradients some have almost no size: at least a thousandth of the largest."""
    assert found.keys() == true.keys()
    least = 1e-3 * max(float(value.norm()) for value in true.values())
    return max(float((found[name] - true[name]).norm()) / max(float(true[name].norm()), least) for name in true)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype | None = None, device: str = "cpu") -> Tensor:
    """A random input that wants a gradient, of the default dtype if none is given, with values of float32 that are the
    same on each device.
    """
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return values.to(device, dtype or torch.get_default_dtype()).requires_grad_()


TIMES = 2
"""How many times the untiled error a tiled one may be: sums in another order are one more rounding that is as large.

Errors of a defect are larger: with 16-bit sums over 256 tiles, or one of 64 tiles left out, a bfloat16 gradient has 4
to 16 times the untiled error.
"""


def less_accurate(
    found: dict[str, Tensor],
    untiled: dict[str, Tensor],
    true: dict[str, Tensor],
    dtype: torch.dtype = torch.float32,
    eps: float = 0.0,
) -> dict[str, tuple[float, float]]:
    """Return the values whose error against float64 is over ``TIMES`` that of the untiled step, and the two errors.

    ``dtype`` is what both steps compute in. The untiled error counts as at least the dtype's epsilon, or ``eps``: the
    untiled loss may be exact by accident. It must not exceed the square root, or float64 computes another function.
    """
    rounding, plain = eps or torch.finfo(dtype).eps, errors(untiled, true)
    assert max(plain.values()) <= rounding**0.5, plain
    allowed = {name: TIMES * max(error, rounding) for name, error in plain.items()}
    return {name: (error, plain[name]) for name, error in errors(found, true).items() if not error <= allowed[name]}


class Reordered(TorchFunctionMode):
    """Computes linear layers over flipped features, flipped tokens or both: the same values, but for rounding."""

    def __init__(self, *flipped: str) -> None:
        super().__init__()
        self.flipped = flipped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        if "features" in self.flipped:
            x, weight = x.flip(-1), weight.flip(-1)
        return func(x.flip(-2), weight, *bias).flip(-2) if "tokens" in self.flipped else func(x, weight, *bias)


ORDERS = ((), ("features",), ("tokens",), ("features", "tokens"))
SPREADS = 16
"""How many times the spread of untiled runs a loss may be off, as tiles, ranks and recomputes round in more places.

A defect is larger: if one of four tiles adds 1 % too little to the gradients, the third loss is off by more than this.
"""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of most of the tests' runs."""
    return torch.optim.SGD(parameters, 1.0, momentum=0.9)


@functools.cache
def _spread(steps: int, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> float:
    """Return how far the losses of untiled runs are apart, relative to them, if only the order of sums differs.

    It is at least float32's epsilon.
    """
    runs = []
    for flipped in ORDERS:
        with torch.random.fork_rng(devices=[]), Reordered(*flipped):
            runs.append(_losses(steps, optimizer))
    losses = torch.tensor(runs, dtype=torch.float64)
    assert losses.isfinite().all()
    lowest = losses.amin(0)
    assert (lowest >= 0).all()
    apart = float(((losses.amax(0) - lowest) / lowest.clamp_min(1e-12)).max())
    return max(apart, torch.finfo(torch.float32).eps)


def _losses(steps: int, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(0)
    model, losses = TinyLM(), []
    chosen = optimizer(model.parameters())
    for step in range(steps):
        ids = torch.randint(32, (4, 24), generator=torch.Generator().manual_seed(step))
        loss = lm_loss(model(ids), ids)
        chosen.zero_grad()
        loss.backward()
        chosen.step()
        losses.append(float(loss.detach()))
    return losses


def rounding(steps: int = 3, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd) -> float:
    """Return the relative difference that rounding may cause in float32 after some optimizer steps.

    It is ``SPREADS`` times the spread of untiled runs of this model with this optimizer, in as many steps on this
    machine.
    """
    return SPREADS * _spread(steps, optimizer)


def near(losses: Any, **of: Any) -> Any:
    """Return what losses (one, a list or a dictionary) equal that differ from these by ``rounding(steps, **of)``."""
    steps = len(losses) + 1 if isinstance(losses, list) else 3  # validation follows the last step
    return pytest.approx(losses, rel=rounding(steps, **of))
