"""The recompute leaves out the last projection only where nothing can see it, with the untiled gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune

from lt_tiled import Tiling, prepare, tile, untile
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.patch import TiledPatch
from tests.models import WIDE, Coded, GatedMLP, H, PlainMLP
from tests.parity import EXACT, gradients, less_accurate, randn, reference, worst

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def hidden(module: GatedMLP, x: Tensor) -> Tensor:
    """Return the input of the last projection."""
    return module.act(module.gate(x)) * module.up(x)


def with_own_autocast(module: GatedMLP, x: Tensor) -> Tensor:
    """Run the last projection under other settings of autocast than the call."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not torch.is_autocast_enabled("cpu")):
        return module.down(hidden(module, x).to(x.dtype))


def in_float32(module: GatedMLP, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return module.down(hidden(module, x))


AUTOCAST: dict[str, tuple[Callable[[], nn.Module], torch.dtype, bool, torch.dtype]] = {
    # the module, the dtype of its weights, autocast around the call, and the dtype whose rounding is allowed
    "float32 weights": (GatedMLP, torch.float32, True, torch.bfloat16),
    "bfloat16 weights": (GatedMLP, torch.bfloat16, True, torch.bfloat16),
    "disabled around it": (lambda: Coded(with_own_autocast), torch.float32, True, torch.bfloat16),
    "enabled around it": (lambda: Coded(with_own_autocast), torch.float32, False, torch.bfloat16),
    "disabled by the module": (lambda: Coded(in_float32), torch.float32, True, torch.float32),
}


@pytest.mark.low_precision
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name: str) -> None:
    """Under autocast, the module's own too, the gradients of a call in tiles and of a short one behind it are as near
    to float64 as the untiled module's.
    """
    build, weights, around, dtype = AUTOCAST[name]
    m, x = build().to(weights), randn(1, 40, H, dtype=torch.float32)
    wide = copy.deepcopy(m).double()

    def call(module: nn.Module) -> Any:
        def run(x: Tensor) -> list[Tensor]:
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                return [module(t).float() for t in (x, x[:, :1])]

        return run

    true = gradients(wide, x.detach().double().requires_grad_(), call=call(wide))  # autocast does not cast float64
    untiled = gradients(m, x, call=call(m))
    tile(m, num_shards=4)
    for _ in range(2):
        assert less_accurate(gradients(m, x, call=call(m)), untiled, true, dtype) == {}
    assert len(get_patch(m, TiledPatch).plans) == 1


class Doubled(nn.Linear):
    """Returns twice what a linear module returns."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize("how", ["class", "forward", "no weight"])
def test_another_last_projection(how: str) -> None:
    """A module in the place of the last projection, or another forward of it, is what later steps compute with."""
    m, x = PlainMLP(WIDE, WIDE), randn(1, 40, WIDE)
    tile(m, num_shards=4)
    gradients(m, x)
    other, fc2 = Doubled(WIDE, WIDE), m.fc2
    if how == "forward":
        fc2.forward = MethodType(lambda self, t: nn.Linear.forward(self, t) * 2, fc2)  # type: ignore[method-assign]
    else:
        m.fc2 = nn.Identity() if how == "no weight" else other  # type: ignore[assignment]
    found = gradients(m, x)
    assert worst(found, gradients(untile(m), x)) < EXACT


def masked(m: PlainMLP) -> None:
    prune.random_unstructured(m.fc2, "weight", 0.3)


def substituted(m: PlainMLP) -> None:
    """Let the code of the MLP give its last projection another weight for a call."""
    m.mask = nn.Parameter(randn(WIDE, 1))

    def forward(x: Tensor) -> Tensor:
        return functional_call(m.fc2, {"weight": m.fc2.weight * m.mask}, (m.act(m.fc1(x)),))

    m.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("compute", [masked, substituted])
def test_a_last_weight_that_is_computed(compute: Callable[[PlainMLP], None]) -> None:
    """What a hook of torch, or the code, computes as the weight for each tile passes its gradient on."""
    m, x = PlainMLP(WIDE, WIDE), randn(1, 40, WIDE)
    compute(m)
    found = gradients(tile(m, num_shards=4), x)
    assert worst(found, gradients(untile(m), x)) < EXACT


def twice_later(module: Any, x: Tensor) -> Tensor:
    h = hidden(module, x)
    y = module.down(h)
    return module.down(h * y.mean(-1, keepdim=True)) if module.later else y


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_second_use_that_comes_later(dropout: float) -> None:
    """A last projection that later calls use twice is computed. The call that finds out draws the same random numbers
    as those behind it.
    """
    m, x, found = Coded(twice_later, act=nn.Dropout(dropout)), randn(1, 40, H), []
    m.later = False
    gradients(tile(m, num_shards=4), x)
    m.later = True
    for _ in range(2):
        torch.manual_seed(1)
        found.append(gradients(m, x))
    assert worst(*found) < EXACT
    if not dropout:
        assert worst(found[0], gradients(untile(m), x)) < EXACT


def writing_into_its_input(module: GatedMLP, x: Tensor) -> Tensor:
    h = hidden(module, x)
    y = module.down(h)
    h.mul_(2)
    return y


def test_last_input_that_is_changed_in_place() -> None:
    """Behind a frozen last projection, which needs no input in the backward pass, gradients are the untiled ones; with
    one that trains, torch's error is raised, as untiled.
    """
    m, x = Coded(writing_into_its_input), randn(1, 40, H)
    m.down.requires_grad_(False)
    true = reference(m, x)
    tile(m, num_shards=4, self_check=False)
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT
    m.down.requires_grad_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(m, x)


def written(module: Any, x: Tensor) -> Tensor:
    y = module.mlp(x)
    module.gain.copy_(y.detach().abs().max())
    return y


def kept(module: Any, x: Tensor) -> Tensor:
    y = module.mlp(x)
    module.last = y.detach()
    return y


def read_later(module: Any, x: Tensor) -> Tensor:
    """Read the output from the second call on, and swallow exceptions."""
    module.calls = getattr(module, "calls", 0) + 1
    y = module.mlp(x)
    if module.calls > 1:
        with contextlib.suppress(Exception):
            assert bool(y.detach().sum() < 1e9)
    return y


def hooked(module: Any, x: Tensor) -> Tensor:
    y = module.mlp(x)
    if y.requires_grad and getattr(module, "hooks", True):
        y.register_hook(lambda g: g * y.detach().sign())
    return y


def doubled(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.mlp(x)
    return y.mul_(2)


@pytest.mark.parametrize("code", [written, kept, read_later, hooked, doubled])
def test_a_value_that_is_seen_is_computed(code: Callable[..., Tensor]) -> None:
    """A module that reads, stores, hooks or changes the value of its last projection has the untiled gradients."""
    m, x = Coded(code), randn(1, 40, H)
    m.register_buffer("gain", torch.zeros(()))
    true = reference(m, x)
    tile(m, num_shards=4, self_check=False)
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT
    last = [plan.last for plan in get_patch(m, TiledPatch).plans.values()]
    assert last == [None if code in (hooked, doubled) else m.down]


@pytest.mark.parametrize("compare", ["raise", "warn"])
def test_a_hook_that_comes_later_is_refused(compare: Literal["raise", "warn"]) -> None:
    """A hook on the output that the first call did not show, and that the recompute would lose, is refused. It has no
    gradients to go on with.
    """
    m, x = Coded(hooked), randn(1, 40, H)
    m.hooks = False
    model = nn.ModuleList([m])
    prepare(model, tiling=Tiling(4, targets=["Coded"], compare=compare))
    gradients(m, x)
    m.hooks = True
    with pytest.raises(RuntimeError, match=r"0 \(Coded\) computes different values"):
        gradients(m, x)


def test_hooks_of_torch_see_real_values() -> None:
    """A hook of ``torch.nn.utils`` on the last projection sees its real output in the recompute too."""
    m, seen = GatedMLP(), []

    def hook(_: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(float(output.detach().abs().sum()))

    hook.__module__ = "torch.nn.utils"
    m.down.register_forward_hook(hook)
    tile(m, num_shards=4, self_check=False)
    for _ in range(3):
        seen.clear()
        m(randn(1, 40, H)).sum().backward()
    assert seen[:4] == seen[4:]
    assert min(seen) > 0
