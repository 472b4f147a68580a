"""Second derivatives, ``torch.func`` and forward mode: those of the untiled function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

from lt_tiled import ActivationCheckpointing, Tiling, prepare, tile
from lt_tiled.errors import NotPositionWiseError
from lt_tiled.planner.ledger import Ledger
from tests.models import H, PlainMLP
from tests.parity import EXACT, randn

pytestmark = [pytest.mark.self_checks, pytest.mark.usefixtures("float64")]


class Block(nn.Module):
    """A transformer's block without attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.mixer, self.norm, self.mlp = nn.Linear(H, H), nn.LayerNorm(H), PlainMLP(dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x).tanh()
        return x + self.mlp(self.norm(x))


class Stack(nn.Sequential):
    """Two blocks."""


POLICIES: dict[str, Any] = {
    "tiles": False,
    "checkpointed": True,
    "offloaded": ActivationCheckpointing(offload="cpu", min_bytes=0, keep_last=0),
    "all offloaded": ActivationCheckpointing(offload="cpu", min_bytes=0, keep_last=0, activations="all"),
}


@contextmanager
def tiled(model: nn.Module, policy: str) -> Iterator[nn.Module]:
    with prepare(model, tiling=Tiling(num_shards=4), activation_checkpointing=POLICIES[policy]):
        yield model


def stack(**kwargs: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(Block(**kwargs), Block(**kwargs))


Derivative = Callable[[nn.Module, Tensor], Any]


def error(found: Any, true: Any) -> float:
    """The worst error of a tensor, relative to its largest value."""
    errors = []
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(true), strict=True):
        if isinstance(b, Tensor):
            errors.append(float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-30)))
    return max(errors)


def weights_of(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def penalized(model: nn.Module, x: Tensor) -> Any:
    """A loss with a penalty on the gradient of the input."""
    x = x.detach().requires_grad_()
    loss = model(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss, gradient, *torch.autograd.grad(loss + gradient.square().sum(), [x, *weights_of(model)])


def sharpness(model: nn.Module, x: Tensor) -> Any:
    """A penalty on the gradients of the weights, of which some are frozen."""
    model.get_submodule("0.mlp.fc1" if isinstance(model, Stack) else "fc1").requires_grad_(False)
    x = x.detach().requires_grad_()
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(model(x).square().sum(), weights, create_graph=True)
    return gradients, torch.autograd.grad(sum(g.square().sum() for g in gradients), [x, *weights])


def some_inputs(model: nn.Module, x: Tensor) -> Any:
    """A gradient of one weight alone, then a first derivative of the same graph."""
    x = x.detach().requires_grad_()
    loss, weights = model(x).square().sum(), weights_of(model)
    (gradient,) = torch.autograd.grad(loss, weights[-1:], create_graph=True)
    second = torch.autograd.grad(gradient.square().sum(), x, retain_graph=True)
    return second, torch.autograd.grad(loss, [x, *weights])


def third(model: nn.Module, x: Tensor) -> Any:
    """A physics-informed network: derivatives of the input, up to the third."""
    x = x.detach().requires_grad_()
    value = model(x).sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        value = gradient.square().sum()
    return torch.autograd.grad(value, [x, *weights_of(model)], allow_unused=True)


def maml(model: nn.Module, x: Tensor) -> Any:
    """Two steps of an inner loop, differentiated."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for _ in range(2):
        loss = functional_call(model, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return torch.autograd.grad(functional_call(model, weights, (x.cos(),)).square().mean(), weights_of(model))


def twice(model: nn.Module, x: Tensor) -> Any:
    """The same weights in a call and in what gives it its input."""
    return penalized(nn.Sequential(model, model), x)


def batched(model: nn.Module, x: Tensor) -> Any:
    """Several gradients at once."""
    x = x.detach().requires_grad_()
    y = model(x)
    return torch.autograd.grad(y, [x, *weights_of(model)], torch.stack([y.cos(), y.sin()]), is_grads_batched=True)


def hessian(model: nn.Module, x: Tensor) -> Any:
    return torch.autograd.functional.hessian(lambda t: model(t).square().sum(), x[:, :4], vectorize=True)


def in_autocast(model: nn.Module, x: Tensor) -> Any:
    """A forward pass in autocast, whose float64 it leaves as it is."""
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), [x, *weights_of(model)], allow_unused=True)


DERIVATIVES: Sequence[Derivative] = (
    penalized,
    sharpness,
    some_inputs,
    third,
    maml,
    twice,
    batched,
    hessian,
    in_autocast,
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_second_derivatives(derivative: Derivative, policy: str) -> None:
    """Where a backward pass is itself differentiated or batched, all values are those of the untiled model."""
    model, x = stack(), randn(1, 24, H)
    true = derivative(copy.deepcopy(model), x)
    with tiled(model, policy):
        for _ in range(2):
            assert error(derivative(model, x), true) < EXACT


@pytest.mark.parametrize("build", [PlainMLP, lambda: nn.LayerNorm(H)])
def test_of_one_module(build: Callable[[], nn.Module]) -> None:
    """The same for one module and for a norm, with one line in the log."""
    torch.manual_seed(0)
    model, x = build(), randn(1, 40, H)
    true = penalized(model, x)
    assert error(penalized(tile(model, num_shards=4), x), true) < EXACT


def test_of_a_tiled_function() -> None:
    """The same for a tiled function."""
    torch.manual_seed(0)
    mlp, x = PlainMLP(), randn(1, 40, H)

    def function(x: Tensor) -> Tensor:
        return mlp(x).tanh()

    def second(function: Callable[[Tensor], Tensor]) -> Any:
        inside = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(inside).square().sum(), inside, create_graph=True)
        return gradient, torch.autograd.grad(gradient.square().sum(), [inside, *mlp.parameters()], allow_unused=True)

    assert error(second(tile(function, num_shards=4)), second(function)) < EXACT


def test_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The log says once that tiles save no memory there."""
    model = stack()
    with tiled(model, "tiles"):
        penalized(model, randn(1, 24, H))
        penalized(model, randn(1, 24, H))
    assert caplog.text.count("create_graph=True") == 1


@pytest.mark.parametrize("policy", ["tiles", "checkpointed"])
def test_memory(policy: str) -> None:
    """The step needs no more memory than without tiles."""
    model, x = stack(), randn(4, 256, H)
    peaks = []
    for prepared in (False, True):
        with tiled(model, policy) if prepared else torch.enable_grad():
            penalized(model, x)  # the first call checks the modules
            with Ledger() as ledger:
                penalized(model, x)
        peaks.append(ledger.peak)
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_dropout(policy: str) -> None:
    """The function that is differentiated twice has the random numbers of the forward pass."""
    model, x = stack(dropout=0.3), randn(1, 24, H).requires_grad_()

    def loss() -> Tensor:
        torch.manual_seed(1)
        value: Tensor = model(x).square().sum()
        return value

    with tiled(model, policy):
        (first,) = torch.autograd.grad(loss(), x)
        (gradient,) = torch.autograd.grad(loss(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum() / 2, x)
        step, moved = 1e-6, []
        for sign in (1, -1):
            with torch.no_grad():
                x.add_(sign * step * first)
            moved += torch.autograd.grad(loss(), x)
            with torch.no_grad():
                x.sub_(sign * step * first)
    assert error(gradient, first) < EXACT
    assert error(second, (moved[0] - moved[1]) / (2 * step)) < 1e-6


def test_hooks_see_each_gradient_once() -> None:
    """A hook on a weight's gradient sees the sum of both backward passes, once."""
    found = []
    for prepared in (False, True):
        model, seen = stack(), list[Tensor]()
        x = randn(1, 24, H).requires_grad_()
        model.get_parameter("0.mlp.fc1.weight").register_hook(lambda g, seen=seen: seen.append(g.detach()))
        with tiled(model, "tiles") if prepared else torch.enable_grad():
            loss = model(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + gradient.square().sum()).backward()
        found.append(seen)
    assert len(found[0]) == len(found[1]) == 1
    assert error(found[1], found[0]) < EXACT


def test_a_weight_that_changed_in_place() -> None:
    """A weight that changed between the forward pass and a backward pass with a graph is refused by name."""
    model, x = tile(PlainMLP(), num_shards=4), randn(1, 40, H).requires_grad_()
    loss = model(x).sum()
    with torch.no_grad():
        model.fc1.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"PlainMLP: Linear\.weight of shape .*was changed in place"):
        torch.autograd.grad(loss, x, create_graph=True)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, gain = ctx.saved_tensors
        return gradient * gain, (gradient * x).flatten(0, -2).sum(0)


class WithFunction(PlainMLP):
    """Has a weight that only a custom autograd Function uses."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(H))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scale.apply(super().forward(x), self.gain)
        return scaled


def test_a_weight_that_a_function_uses() -> None:
    """Its second derivative would be that of another tensor: it is refused, and the first one is right."""
    torch.manual_seed(0)
    model, x = WithFunction(), randn(1, 40, H).requires_grad_()
    true = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    tile(model, num_shards=4)
    assert error(torch.autograd.grad(model(x).sum(), [x, *model.parameters()]), true) < EXACT
    with pytest.raises(NotPositionWiseError, match="custom autograd Function whose second derivative is asked for"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


# Transforms


def _given(m: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in m.named_parameters()}


def _loss(m: nn.Module) -> Callable[..., Tensor]:
    return lambda weights, x: functional_call(m, weights, (x,)).square().sum()


def _dual(m: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m(forward_ad.make_dual(x, x.cos())))


def _dual_weights(m: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        given = {name: forward_ad.make_dual(p, p.cos()) for name, p in _given(m).items()}
        return forward_ad.unpack_dual(functional_call(m, given, (x,)))


def _dual_gradient(m: nn.Module, x: Tensor) -> Any:
    """The backward pass alone in forward mode."""
    x = x.detach().requires_grad_()
    y = m(x)
    with forward_ad.dual_level():
        (gradient,) = torch.autograd.grad(y, x, forward_ad.make_dual(y.detach(), y.detach().cos()))
        return forward_ad.unpack_dual(gradient)


TRANSFORMS: dict[str, Derivative] = {
    "grad": lambda m, x: torch.func.grad(_loss(m), argnums=(0, 1))(_given(m), x),
    "vjp": lambda m, x: torch.func.vjp(m, x)[1](x),
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x.cos(),)),
    "jacfwd": lambda m, x: torch.func.jacfwd(m)(x[:, :4]),
    "vmap": lambda m, x: torch.func.vmap(m)(torch.stack([x, x.cos()])),
    "vmap, then backward": lambda m, x: torch.autograd.grad(torch.func.vmap(m)(x[None]).sum(), [*m.parameters()]),
    "gradients per sample": lambda m, x: torch.func.vmap(torch.func.grad(_loss(m)), (None, 0))(_given(m), x[:, None]),
    "Hessian-vector product": lambda m, x: torch.func.jvp(torch.func.grad(lambda t: m(t).sum()), (x,), (x.cos(),)),
    "dual numbers": _dual,
    "dual weights": _dual_weights,
    "dual gradients": _dual_gradient,
}


@pytest.mark.parametrize("policy", ["tiles", "checkpointed", "offloaded"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, policy: str) -> None:
    """``torch.func`` and forward mode take the untiled function, with and without activation checkpointing; a block
    that they would recompute, and whose forward pass ran outside of them, is refused.
    """
    model, x = stack(), randn(2, 12, H)
    true = TRANSFORMS[name](model, x)
    with tiled(model, policy):
        if name == "dual gradients" and policy != "tiles":
            with pytest.raises(RuntimeError, match=r"Block is recomputed under .*activation_checkpointing=False"):
                TRANSFORMS[name](model, x)
        else:
            assert error(TRANSFORMS[name](model, x), true) < EXACT


# Parametrizations


PARAMETRIZATIONS: dict[str, Callable[[PlainMLP], Any]] = {
    "weight norm": lambda m: parametrizations.weight_norm(m.fc1),
    "weight norm of old": lambda m: nn.utils.weight_norm(m.fc1),
    "orthogonal": lambda m: parametrizations.orthogonal(m.fc2),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.fc1),
    "spectral norm of old": lambda m: nn.utils.spectral_norm(m.fc1),
}


def parametrized(name: str) -> Stack:
    model = stack()
    for block in model:
        PARAMETRIZATIONS[name](block.mlp)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("policy", ["tiles", "checkpointed"])
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrizations(name: str, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Weights that are computed have the untiled first and second derivatives, and buffers the untiled values, in each
    of several steps. Spectral norm, which changes a buffer in each call, stays untiled with one warning.
    """
    x, found = randn(2, 12, H), []
    for prepared in (False, True):
        torch.manual_seed(0)
        model = parametrized(name)
        with tiled(model, policy) if prepared else torch.enable_grad():
            steps = [penalized(model, x * step) for step in (1, 2, 3)]
            first = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        found.append((steps, first, [*model.buffers()]))
    assert error(found[1], found[0]) < 10 * EXACT
    assert caplog.text.count("runs untiled") == ("spectral" in name)


@pytest.mark.parametrize("name", ["spectral norm", "spectral norm of old"])
def test_spectral_norm_that_is_named(name: str) -> None:
    """A named target whose buffer changes in each call raises with the name of the buffer."""
    model = parametrized(name)
    with (
        prepare(model, tiling=Tiling(num_shards=4, targets=["PlainMLP"])),
        pytest.raises(NotPositionWiseError, match=r"changes .*_u of shape \[48\] in its forward"),
    ):
        model(randn(2, 12, H))


def test_cached_parametrizations() -> None:
    """While torch caches parametrizations, the module runs untiled: the first tile would fill the cache."""
    torch.manual_seed(0)
    model, x = PlainMLP(), randn(1, 40, H)
    parametrizations.weight_norm(model.fc1)
    true = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    tile(model, num_shards=4)
    assert error(torch.autograd.grad(model(x).sum(), [*model.parameters()]), true) < EXACT
    with parametrize.cached():
        assert error(torch.autograd.grad(model(x).sum(), [*model.parameters()]), true) < EXACT
