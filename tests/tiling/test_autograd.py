"""The tiled Function gives the untiled loss and gradients, row by row of what others get wrong."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import tile, untile
from lt_tiled.modules.patch import get_patch
from lt_tiled.recompute.mode import RandomState
from lt_tiled.tiling.call import LargestCall
from lt_tiled.tiling.patch import TiledPatch
from lt_tiled.tiling.weights import GradientSum, swapped
from tests.models import WIDE, Coded, GatedMLP, H, PlainMLP, RoutedMLP
from tests.parity import EXACT, gradients, less_accurate, randn, reference, spread, worst

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Row(NamedTuple):
    """A module whose loss and gradients are compared."""

    build: Callable[[], nn.Module] = GatedMLP
    shapes: Sequence[tuple[int, ...]] = ((2, 19, H),)
    loss: Callable[[Any], Tensor] = spread
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)
    tiles: Mapping[str, Any] = {"num_shards": 4}
    wants_grad: bool = True


class Routed(RoutedMLP):
    """Returns more than tensors in a tuple."""

    def forward(self, x: Tensor) -> Any:
        y, logits = super().forward(x)
        return {"hidden": y, "more": (logits,), "best": y.argmax(-1)}


def frozen(*names: str) -> nn.Module:
    """An MLP some of whose weights, named by what their names begin with, do not train."""
    module = PlainMLP()
    for name, p in module.named_parameters():
        p.requires_grad_(not name.startswith(names))
    return module


def sparse() -> nn.Module:
    module = Coded(lambda m, x: m.mlp(x) + m.table((x[..., 0] > 0).long()))
    module.table = nn.Embedding(2, H, sparse=True)
    module.table.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.to_dense()))
    return module


def of_others(how: str) -> nn.Module:
    """An MLP with a projection that is called in another way than by its class."""
    module = GatedMLP()
    up, plain = module.up, module.up.forward
    if how == "closure":
        up.forward = lambda t: plain(t) * 2  # type: ignore[method-assign]
    else:
        module.act = lambda t: F.silu(t) * up.weight.square().mean()  # type: ignore[assignment]
    return module


def tied(module: Any, x: Tensor) -> Tensor:
    """Computes with what its weights tell: their type, their identity and an attribute."""
    same, parameter = module.up.bias is module.gate.bias, isinstance(module.up.weight, nn.Parameter)
    return module.mlp(x) * getattr(module.up.weight, "factor", 1.0) * (1 + same) * (1 + parameter)


def with_tied_biases() -> nn.Module:
    module = Coded(tied, bias=True)
    module.up.bias = module.gate.bias
    module.up.weight.factor = 2.0
    return module


def with_complex_weights() -> nn.Module:
    module = Coded(lambda m, x: m.down(torch.complex(m.up(x).sin(), m.up(x).cos())))
    module.down = nn.Linear(48, H, dtype=torch.complex128).requires_grad_(False)
    return module


def modulated() -> nn.Module:
    return Coded(lambda m, x, scale, *, shift, keep: m.mlp(x * scale) * keep[..., None] + shift)


def with_arguments(module: nn.Module, x: Tensor, scale: Tensor, shift: Tensor) -> Any:
    return module(x, scale, shift=shift, keep=torch.arange(38, device=x.device).view(2, 19) % 3 > 0)


ROWS = {
    "gated": Row(),
    "biases": Row(lambda: GatedMLP(bias=True)),
    "any activation": Row(lambda: GatedMLP(act=lambda x: F.relu(x).square())),
    "a norm": Row(lambda: nn.LayerNorm(H)),
    "[T, H]": Row(shapes=[(64, H)]),
    "[B, H, W, C]": Row(shapes=[(2, 5, 7, H)]),
    "[T, H], then [B, S, H]": Row(RoutedMLP, [(24, H), (2, 12, H)], call=lambda m, *xs: [m(x) for x in xs]),
    "accumulation": Row(shapes=[(1, n, H) for n in (40, 3, 17, 1)], call=lambda m, *xs: [m(x) for x in xs]),
    "a tile for each token": Row(tiles={"num_shards": 38}),
    "more tiles than tokens": Row(tiles={"num_shards": 1000}),
    "tile_tokens": Row(tiles={"tile_tokens": 5}),
    "no token": Row(shapes=[(2, 0, H)]),
    "a token": Row(shapes=[(1, 1, H)]),
    "an expanded gradient": Row(loss=torch.sum),
    "a transposed gradient": Row(loss=lambda y: spread(y.transpose(0, 1).contiguous())),
    "an input in another order": Row(call=lambda m, x: m(x.transpose(0, 1))),
    "more features": Row(lambda: PlainMLP(out=3 * H)),
    "an input without a gradient": Row(wants_grad=False),
    "frozen weights": Row(lambda: frozen("fc1")),
    "a frozen last weight": Row(lambda: frozen("fc2.weight")),
    "a frozen last bias": Row(lambda: frozen("fc2.bias")),
    "a frozen last projection": Row(lambda: frozen("fc2")),
    "all frozen": Row(lambda: frozen("")),
    "evaluation": Row(lambda: PlainMLP(dropout=0.5).eval()),
    "tied to the outside": Row(call=lambda m, x: m(F.linear(x, m.down.weight @ m.gate.weight))),
    "a sparse gradient": Row(sparse),
    "flat router logits": Row(RoutedMLP),
    "router logits": Row(lambda: RoutedMLP(flat=False)),
    "one output used": Row(RoutedMLP, loss=lambda out: spread(out[1])),
    "a tree of outputs": Row(Routed),
    "an output changed in place": Row(call=lambda m, x: m(x * 1).add_(x)),
    "called twice": Row(call=lambda m, x: m(m(x))),
    "by keyword": Row(call=lambda m, x: m(x=x)),
    "arguments": Row(modulated, [(2, 19, H), (2, 19, 1), (H,)], call=with_arguments),
    "a forward in a closure": Row(lambda: of_others("closure")),
    "a weight that others read": Row(lambda: of_others("weight")),
    "weights that code looks at": Row(with_tied_biases),
    "complex weights": Row(with_complex_weights, loss=lambda y: spread(torch.view_as_real(y))),
    "complex outputs": Row(lambda: Coded(lambda m, x: torch.complex(m.mlp(x), x)), loss=lambda y: spread(y.abs())),
}

ON_CPU = {"a sparse gradient", "weights that code looks at", "complex weights", "complex outputs"}
"""Those that the second device cannot hold."""
SHORT = {"no token", "a token"}
"""Those that run untiled."""


@pytest.mark.parametrize("name", ROWS)
def test_untiled_gradients(name: str, device: str) -> None:
    """Loss, gradients and outputs are the untiled ones: any module, shape, count of tiles, argument and output."""
    if device != "cpu" and name in ON_CPU:
        pytest.skip("torch does not do this on the device")
    row = ROWS[name]
    module = row.build().double()
    inputs = [randn(*shape, seed=seed) for seed, shape in enumerate(row.shapes)]
    inputs = [x if row.wants_grad else x.detach() for x in inputs]

    def call(*inputs: Tensor) -> Any:
        return row.call(module, *inputs)

    true, whole = gradients(module, *inputs, call=call, loss=row.loss), call(*inputs)
    tile(module, **row.tiles)
    for _ in range(2):  # the second call skips what the first has learnt
        assert worst(gradients(module, *inputs, call=call, loss=row.loss, device=device), true) < EXACT
    torch.testing.assert_close(call(*[x.to(device) for x in inputs]), whole, check_device=False)
    assert (get_patch(module, TiledPatch).largest.tiles > 1) == (name not in SHORT)


def test_the_module_sees_its_own_rank() -> None:
    """Tiles of ``[B, S, H]`` reach the module as ``[1, t, H]``, those of ``[T, H]`` as ``[t, H]``."""
    seen: list[tuple[int, ...]] = []
    module = tile(Coded(lambda m, x: seen.append(tuple(x.shape)) or x * 2), num_shards=3, self_check=False)
    for lead in ((2, 6), (12,)):
        module(torch.ones(*lead, H))
    assert set(seen) == {(1, 4, H), (4, H)}


def by_hand(module: nn.Module, x: Tensor, size: int) -> Tensor:
    """The module on one tile after the other, in plain autograd."""
    return torch.cat([module(part) for part in x.split(size, dim=1)], dim=1)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout(checkpointed: bool, device: str) -> None:
    """The recompute draws the forward's dropout masks, and the backward pass moves no generator: gradients equal those
    of plain autograd over the same tiles and seed.
    """
    module, x = PlainMLP(dropout=0.3), randn(1, 40, H)
    module.act = nn.Sequential(nn.GELU(), nn.Dropout(0.2))
    torch.manual_seed(7)
    true = gradients(module, x, call=lambda x: by_hand(module, x, 10), device=device)
    tiled = tile(copy.deepcopy(module), num_shards=4)
    for _ in range(2):
        torch.manual_seed(7)
        call = (lambda x: checkpoint(tiled, x, use_reentrant=False)) if checkpointed else tiled
        assert worst(gradients(tiled, x, call=call, device=device), true) < EXACT
    y = tiled(x.to(device))
    before = RandomState.now(y.device)
    y.sum().backward()
    assert RandomState.now(y.device).same_as(before)


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_in_the_recompute(dtype: torch.dtype, device: str) -> None:
    """The recompute runs under the forward's autocast: input gradients are bit for bit those of plain autograd over the
    same tiles, and all are as near to float64 as the untiled module's.
    """
    module = GatedMLP().float()
    x = randn(1, 400, H, dtype=torch.float32)

    def under_autocast(run):
        def call(x: Tensor) -> Tensor:
            with torch.autocast(device, dtype=dtype):
                return run(x)

        return call

    true = gradients(module, x, call=under_autocast(lambda x: by_hand(module, x, 100)), device=device)
    exact, untiled = reference(module, x), gradients(module, x, call=under_autocast(module), device=device)
    tiled = tile(copy.deepcopy(module), num_shards=4)
    for _ in range(2):
        found = gradients(tiled, x, call=under_autocast(tiled), device=device)
        assert torch.equal(found["input 0"], true["input 0"])
        assert less_accurate(found, untiled, exact, dtype) == {}
    assert not torch.equal(gradients(module, x, device=device)["input 0"], true["input 0"])


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_does_not_grow_with_the_tiles(dtype: torch.dtype) -> None:
    """At 256 tiles the gradients are as near to float64 as the untiled module's, which ``accumulate="param"`` gives up
    in 16 bits.
    """
    module, x = GatedMLP(128, 384).to(dtype), randn(1, 2048, 128, dtype=dtype)
    true, untiled = reference(module, x), gradients(module, x)
    narrow = gradients(tile(copy.deepcopy(module), num_shards=256, accumulate="param"), x)
    assert less_accurate(gradients(tile(module, num_shards=256), x), untiled, true, dtype) == {}
    assert bool(less_accurate(narrow, untiled, true, dtype)) == (dtype is not torch.float32)


@pytest.mark.low_precision
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_go_into_float32_sums(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA 16-bit products go into a float32 sum, which is nearer to float64 than one rounded product."""
    products, addmm = [], torch.addmm

    def counted(total: Tensor, left: Tensor, right: Tensor, *, out: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert (total.dtype, left.dtype, right.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
        products.append(total)
        if left.is_cuda:
            return addmm(total, left, right, out=out, out_dtype=out_dtype)
        return addmm(total, left.float(), right.float(), out=out)

    left, right = (randn(*shape, dtype=torch.bfloat16).detach().to(where) for shape in ((H, 64), (64, WIDE)))
    monkeypatch.setattr("lt_tiled.tiling.weights.ADDS_PRODUCTS", (where,))
    monkeypatch.setattr(torch, "addmm", counted)
    total = GradientSum(left @ right, "float32")
    for part in zip(left.split(16, 1), right.split(16), strict=True):
        total.add_product(*part)
    assert len(products) == 4
    true = left.double() @ right.double()
    assert (total.sum - true).norm() < ((left @ right) - true).norm() / 8


@pytest.mark.low_precision
@pytest.mark.parametrize("rows", [3, 40], ids=["the right factor in parts", "the left factor in parts"])
def test_products_are_not_rounded(rows: int) -> None:
    """On other devices a product of 16-bit tensors is computed in the precision of its float32 sum."""
    left, right = randn(rows, 256, dtype=torch.bfloat16).detach(), randn(256, 20, dtype=torch.bfloat16).detach()
    total = GradientSum(torch.zeros(rows, 20, dtype=torch.bfloat16), "float32")
    total.add_product(left, right)
    torch.testing.assert_close(total.sum, left.float() @ right.float())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: type) -> None:
    """Under ``no_grad`` and ``inference_mode`` the module tiles too, without a graph."""
    module = GatedMLP()
    x = torch.randn(2, 19, H)
    with mode():
        whole = module(x)
        tile(module, num_shards=4)
        tiled = module(x)
    assert not tiled.requires_grad
    assert torch.allclose(tiled, whole, atol=1e-6)
    assert get_patch(module, TiledPatch).largest == LargestCall(38, 4)


def test_retain_graph_twice() -> None:
    """Three backwards through one retained graph each give the whole gradient."""
    module, x = GatedMLP(), randn(1, 19, H)
    true = gradients(module, x)
    tile(module, num_shards=4)
    value = spread(module(x))
    for times in (1, 2, 3):
        value.backward(retain_graph=times < 3)
        found = {name: p.grad / times for name, p in module.named_parameters()}
        assert worst({"loss": value, "input 0": x.grad / times, **found}, true) < EXACT


def test_input_changed_before_the_backward_is_refused() -> None:
    """An input that was changed in place between forward and backward is torch's usual error."""
    module = tile(GatedMLP(), num_shards=3)
    x = randn(1, 9, H) * 1
    loss = module(x).sum()
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.self_checks
def test_hooks_of_weights_fire_once() -> None:
    """A weight's gradient hook fires once per backward pass and not per tile, with zeros if no tile used it."""
    module, fired = GatedMLP(), list[str]()
    module.unused = nn.Parameter(torch.ones(1))
    module.up.weight.register_hook(lambda _: fired.append("weight"))
    module.unused.register_hook(lambda gradient: fired.append(f"unused {gradient.item()}"))
    tile(module, num_shards=4)(randn(1, 20, H)).sum().backward()
    assert sorted(fired) == ["unused 0.0", "weight"]


@pytest.mark.self_checks
def test_outer_saved_tensor_hooks_see_inputs_and_weights() -> None:
    """An offloader around the call packs the input and the weights, as untiled, and none of the tiles' intermediates,
    also not in a backward inside it.
    """
    module = tile(GatedMLP(), num_shards=4)
    packed: list[torch.Size] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.shape)
        return t

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            torch.autograd.backward(module(randn(1, 20, H)), torch.ones(1, 20, H))
    assert packed == [(1, 20, H), *(p.shape for p in module.parameters())] * 2


@pytest.mark.parametrize(("moment", "at_call"), [("forward", 4), ("backward", 6)])
def test_an_exception_leaves_the_module_usable(moment: str, at_call: int) -> None:
    """After an exception in a tile, in the forward or in the backward, the weights are in place and the next step is
    right.
    """
    module = GatedMLP()
    x = randn(1, 20, H)
    true = reference(module, x)
    tile(module, num_shards=4, self_check=False)
    weights, act, calls = dict(module.named_parameters()), module.act, itertools.count(1)  # no data to restore

    def failing(t: Tensor) -> Tensor:
        if (call := next(calls)) == at_call:
            raise ArithmeticError("backward" if torch.is_grad_enabled() and call > 4 else "forward")
        return act(t)

    module.act = failing
    with pytest.raises(ArithmeticError, match=moment):
        module(x).sum().backward()
    module.act = act
    assert all(weights[name] is p for name, p in module.named_parameters())
    assert worst(gradients(module, x), true) < EXACT


def test_freezing_between_steps() -> None:
    """Freezing a weight between two steps changes what gets a gradient, and all of it is right."""
    module, x = tile(GatedMLP(), num_shards=4), randn(1, 20, H)
    gradients(module, x)
    module.down.requires_grad_(False)
    found = gradients(module, x)
    assert worst(found, gradients(untile(module), x)) < EXACT


def test_untiled_before_the_backward_pass() -> None:
    """A module that is untiled between its forward and its backward pass gets its gradients."""
    module, x = GatedMLP(), randn(1, 40, H)
    true = gradients(module, x)

    def call(x: Tensor) -> Any:
        y = tile(module, num_shards=4)(x)
        untile(module)
        return y

    assert worst(gradients(module, x, call=call), true) < EXACT


class Around(nn.Module):
    """Has an MLP with a weight that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = GatedMLP()
        self.mlp.unused = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.sin()).tanh()


def test_tiled_module_in_a_tiled_module() -> None:
    """Both run in tiles, and a weight that is not used has no gradient, as untiled."""
    m, x = Around(), randn(1, 40, H)
    true = gradients(m, x)
    for each in (m.mlp, m):
        tile(each, num_shards=2, self_check=False)
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT


def interrupted_at(line: int, places: dict[str, int]) -> bool:
    """Raise ``KeyboardInterrupt`` at the n-th line that swaps values; return whether there are so many."""
    lines = itertools.count(1)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith("tiling/weights.py"):
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with swapped([(places, "weight", 2), (places, "other", 3)]):
            assert places == {"weight": 2, "other": 3}
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_interrupted_anywhere() -> None:
    """Ctrl-C at any line that puts leaves in the places of weights, or takes them out, leaves the weights in place."""
    places = {"weight": 1}
    for line in range(1, 100):
        interrupted = interrupted_at(line, places)
        assert places == {"weight": 1}
        if not interrupted:
            break
    assert 20 < line < 99
