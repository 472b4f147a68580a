"""Modes of torch under which tiles run or cannot: compilers, gradient scaling, transforms, nested tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations

from lt_tiled import ActivationCheckpointing, Tiling, prepare, tile, untile
from tests.models import GatedMLP, H, PlainMLP, tiny_llama
from tests.parity import EXACT, gradients, less_accurate, randn, reference, spread, worst


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [True, {"mode": "reduce-overhead"}], ids=str)
def test_compiled(compile: Any) -> None:
    """Compiled tiles, as CUDA graphs too, have the gradients of the untiled module in each of several steps."""
    torch._dynamo.reset()
    module, x = GatedMLP(64, 192), randn(1, 100, 64)
    true = reference(module, x)
    module = tile(module.to("cuda"), tile_tokens=32, compile=compile)
    assert all(worst(gradients(module, x, device="cuda"), true) < 1e-5 for _ in range(4))


@pytest.mark.low_precision
def test_gradient_scaler(device: str) -> None:
    """With float16 autocast and a ``GradScaler``, steps whose gradients overflow are skipped, as untiled, and the loss
    of later ones falls alike.
    """
    ids, found = torch.arange(50, device=device)[None] % 64, []
    offloaded = ActivationCheckpointing(offload="cpu", keep_last=0)
    for tiling, blocks, loss in ((Tiling(tile_tokens=16), offloaded, 3), (None, None, False)):
        torch.manual_seed(0)
        model = tiny_llama().to(device)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-30)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with prepare(model, tiling=tiling, activation_checkpointing=blocks, loss=loss):
            for _ in range(4):
                with torch.autocast(device, dtype=torch.float16):
                    value = model(input_ids=ids, labels=ids, use_cache=False).loss
                scaler.scale(value).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                found.append(float(value.detach()))
        assert scaler.get_scale() == 2.0**10
    assert found[0] == found[1] > found[2] > found[3]
    assert found[:4] == pytest.approx(found[4:], rel=2.0**-14)  # a part of float16's rounding


EXPORTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "export": lambda m, x: torch.export.export(m, (x,), strict=False).module(),
    "trace": lambda m, x: torch.jit.trace(m, (x,)),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_export_of_a_tiled_module(name: str) -> None:
    """``torch.export`` and ``torch.jit.trace`` see the module's own code, without tiles."""
    m, x = tile(GatedMLP(), num_shards=4), randn(1, 40, H)
    exported = EXPORTS[name](m, x)
    assert torch.equal(exported(x), untile(m)(x))


def test_create_graph() -> None:
    """A backward pass that is differentiated is refused with the module's name and the remedy."""
    m, x = tile(GatedMLP(), num_shards=4), randn(1, 40, H).requires_grad_()
    with pytest.raises(RuntimeError, match=r"GatedMLP: .*cannot be differentiated.*create_graph.*untile"):
        torch.autograd.grad(m(x).sum(), x, create_graph=True)


def _dual(m: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m(forward_ad.make_dual(x, x)))


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "torch.func": lambda m, x: torch.func.jvp(torch.func.grad(lambda t: m(t).sum()), (x,), (x,)),
    "forward mode": _dual,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    """Under a transform modules run untiled and blocks without activation checkpointing."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(PlainMLP().double() for _ in range(2))), randn(2, 12, H).double()
    parametrizations.weight_norm(model[0].fc1)
    true = TRANSFORMS[name](model, x)
    blocks = ActivationCheckpointing(targets=["PlainMLP"])
    with prepare(model, tiling=Tiling(4, targets=["PlainMLP"]), activation_checkpointing=blocks):
        torch.testing.assert_close(TRANSFORMS[name](model, x), true, rtol=EXACT, atol=EXACT)


@pytest.mark.self_checks
@pytest.mark.usefixtures("float64")
def test_nested_tensors() -> None:
    """A jagged nested tensor runs untiled, with its gradients."""
    torch.manual_seed(0)
    m = GatedMLP()

    def run() -> dict[str, Tensor]:
        rows = [randn(n, H, seed=n) for n in (5, 7)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        m(x).values().square().sum().backward()
        found = {name: p.grad for name, p in m.named_parameters()} | {"x": x.grad.values()}
        m.zero_grad()
        return found

    true = run()
    tile(m, num_shards=4)
    assert worst(run(), true) < EXACT


@pytest.mark.low_precision
def test_backward_under_another_autocast() -> None:
    """A backward pass inside another autocast region gives the gradients of the forward's own."""
    torch.manual_seed(0)
    m, x = GatedMLP().float(), randn(1, 40, H, dtype=torch.float32)
    true, untiled = reference(m, x), gradients(m, x)
    tile(m, num_shards=4)
    inside = x.detach().requires_grad_()
    y = m(inside)
    loss = spread(y)
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    found = {name: p.grad for name, p in m.named_parameters() if p.grad is not None}
    assert less_accurate({"loss": loss.detach(), **found, "input 0": inside.grad}, untiled, true) == {}
