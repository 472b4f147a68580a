"""Gradients against a reference, and their errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

FP32 = 1e-6
"""The relative error that fp32 gradients may have against float64."""


def spread(value: Any) -> Tensor:
    """A positive scalar that depends on every entry of every floating point tensor of an output, each with its own
    weight.
    """
    total: Any = 0.0
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            weight = (
                torch.arange(1, leaf.numel() + 1, dtype=torch.float64, device=leaf.device)
                .mul(0.7)
                .sin()
                .add(1.5)
                .view(leaf.shape)
            )
            total = total + (leaf.double().square() * weight).sum()
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


def reference(module: nn.Module, *inputs: Tensor, **kwargs: Any) -> dict[str, Tensor]:
    """The same in float64, untiled."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    return gradients(copy.deepcopy(module).double(), *wide, **kwargs)


def errors(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each gradient, which must be there in both."""
    assert found.keys() == true.keys()
    return {
        name: float((found[name].double() - true[name]).norm() / true[name].norm().clamp_min(1e-12)) for name in true
    }


def worst(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    return max(errors(found, true).values())


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """A random input that wants a gradient, the same on each device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_()


def toggled_gradients(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The input's gradient from training mode, and the same where the module is set to evaluation before the backward,
    which stays so.
    """
    found = []
    for toggled in (False, True):
        torch.manual_seed(0)
        y = module.train()(x)
        module.train(not toggled)
        found.append(torch.autograd.grad(y.sum(), x)[0])
        assert module.training is not toggled
    return found[0], found[1]
