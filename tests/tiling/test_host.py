"""What a tile costs the host, in exact counts, and the last projection that is left out."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lt_tiled
from lt_tiled import tile, untile
from lt_tiled.modules.patch import get_patch
from lt_tiled.tiling.last import LastProjection
from lt_tiled.tiling.patch import TiledPatch
from lt_tiled.tiling.run import Recompute
from lt_tiled.tiling.weights import GradientSum
from tests.models import WIDE, GatedMLP, H, PlainMLP
from tests.parity import EXACT, gradients, less_accurate, randn, reference, worst

pytestmark = pytest.mark.usefixtures("float64")


PACKAGE = str(Path(lt_tiled.__file__).parent)
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
"""Code that is a call in some versions of Python."""


def step(module: nn.Module, tiles: int) -> Callable[[], None]:
    """Return a training step in so many tiles of four tokens, after two that learn."""
    module, x = tile(module, num_shards=tiles, self_check=False), randn(1, 4 * tiles, H)

    def run() -> None:
        module(x).sum().backward()

    run()
    run()
    return run


def compare_steps(m: nn.Module, x: Tensor, true: Any) -> None:
    """Tile a module, and compare the gradients of its first two steps."""
    tile(m, num_shards=4)
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT


def calls(run: Callable[[], None]) -> int:
    """Count the calls of lt_tiled's own functions. What torch's call depends on its version."""
    counted = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal counted
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(PACKAGE)
        counted += ours and code.co_name not in INLINED

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


def operations(run: Callable[[], None]) -> int:
    """Count torch's operations."""
    counted = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal counted
            counted += 1
            return func(*args, **(kwargs or {}))

    with Count():
        run()
    return counted


def per_tile(count: Callable[[Callable[[], None]], int], module: Callable[[], nn.Module]) -> float:
    """Return what one tile more counts."""
    few, many = (count(step(module(), tiles)) for tiles in (8, 24))
    return (many - few) / 16


def many_operations() -> nn.Module:
    """Return an MLP whose activation is eight operations more, of which each saves a tensor."""
    return GatedMLP(act=lambda x: F.silu(x).sin().cos().sin().cos().sin().cos().sin().cos())


def others_of_a_tile(module: Callable[[], nn.Module]) -> float:
    """Return how many of torch's operations one tile more is beside the module's own: two forwards and a backward."""
    plain, x = module(), randn(1, 4, H)
    plain(x).sum().backward()  # from here on gradients are added
    with torch.no_grad():
        forward = operations(lambda: plain(x))
    return per_tile(operations, module) - forward - operations(lambda: plain(x).sum().backward())


def test_calls_of_a_tile() -> None:
    """One tile more of a gated MLP is at most 20 calls of lt_tiled's functions, forward and backward, however many
    operations the tile has.
    """
    assert 0 < per_tile(calls, many_operations) == per_tile(calls, GatedMLP) <= 20


def test_operations_of_a_tile() -> None:
    """One tile more is at most one of torch's operations more than two forwards and a backward of the module."""
    assert others_of_a_tile(many_operations) == others_of_a_tile(GatedMLP) <= 1


def test_nothing_refers_to_itself() -> None:
    """After a step nothing of its backward pass is left, also without Python's garbage collection."""
    run = step(GatedMLP(), 4)
    gc.collect()
    gc.disable()
    try:
        run()
        assert [value for value in gc.get_objects() if type(value) in (Recompute, GradientSum, LastProjection)] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["closure", "bound", "other weight"])
def test_code_that_reaches_its_modules_otherwise(how: str) -> None:
    """A submodule with a forward of its own, as a function or a method, and a weight that other code reads, get the
    untiled gradients.
    """
    torch.manual_seed(0)
    m, x = GatedMLP(), randn(1, 40, H)
    up, plain = m.up, m.up.forward
    if how == "closure":
        m.up.forward = lambda t: plain(t) * 2  # type: ignore[method-assign]
    elif how == "bound":
        m.up.forward = plain  # type: ignore[method-assign]
    else:
        m.act = lambda t: F.silu(t) * up.weight.square().mean()  # type: ignore[assignment]
    true = gradients(m, x)
    compare_steps(m, x, true)


class Swaps(GatedMLP):
    """Calls its projections with other weights than their own."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.func.functional_call(self.gate, {"weight": self.up.weight * 2}, x)
        return torch.func.functional_call(self.down, {"weight": self.down.weight * 3}, F.silu(h))


def test_weights_that_are_swapped_inside() -> None:
    """Weights that the module's own code gives to its projections for a call are those that it computes with."""
    torch.manual_seed(0)
    m, x = Swaps(), randn(1, 40, H)
    true = reference(m, x)
    compare_steps(m, x, true)


@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "both", "all others"])
def test_gradients_of_the_last_projection(frozen: str) -> None:
    """Its weight and its bias have the untiled gradients, each of them trained or not."""
    torch.manual_seed(0)
    m, x = PlainMLP(), randn(2, 20, H)
    m.fc2.weight.requires_grad_(frozen not in ("weight", "both"))
    m.fc2.bias.requires_grad_(frozen not in ("bias", "both"))
    m.fc1.requires_grad_(frozen != "all others")
    true = reference(m, x)
    compare_steps(m, x, true)
    assert [plan.last for plan in get_patch(m, TiledPatch).plans.values()] == [m.fc2]


@pytest.mark.low_precision
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_last_projection_under_autocast(weights: torch.dtype) -> None:
    """Under autocast the gradients are as near to float64 as the untiled module's, whose rounding they have."""
    torch.manual_seed(0)
    m, x = GatedMLP().to(weights), randn(1, 40, H, dtype=torch.float32)
    true = reference(m, x)

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m(x).float()

    untiled = gradients(m, x, call=call)
    tile(m, num_shards=4)
    for _ in range(2):
        assert less_accurate(gradients(m, x, call=call), untiled, true, torch.bfloat16) == {}
    assert len(get_patch(m, TiledPatch).plans) == 1


class Doubled(nn.Linear):
    """Returns twice what a linear module returns."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize("how", ["class", "forward", "no weight"])
def test_another_last_projection(how: str) -> None:
    """A module in the place of the last projection, or another forward of it, is what later steps compute with."""
    torch.manual_seed(0)
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


class WritesIntoItsLastInput(GatedMLP):
    """Changes what it gave to its last projection in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.gate(x)) * self.up(x)
        y = self.down(h)
        h.mul_(2)
        return y


def test_last_input_that_is_changed_in_place() -> None:
    """Behind a frozen last projection, which needs no input in the backward pass, gradients are the untiled ones."""
    torch.manual_seed(0)
    m, x = WritesIntoItsLastInput(), randn(1, 40, H)
    m.down.requires_grad_(False)
    true = reference(m, x)
    compare_steps(m, x, true)


def test_last_input_that_is_changed_in_place_and_needed() -> None:
    """Torch's error is raised, as untiled."""
    m = tile(WritesIntoItsLastInput(), num_shards=4, self_check=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(m, randn(1, 40, H))


class OwnAutocast(GatedMLP):
    """Runs its last projection under other settings of autocast than the call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.gate(x)) * self.up(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=not torch.is_autocast_enabled("cpu")):
            return self.down(h.to(x.dtype))


@pytest.mark.low_precision
@pytest.mark.parametrize("outside", [True, False])
def test_autocast_inside(outside: bool) -> None:
    """Autocast that the module's code enables or disables applies to the last projection's gradients too."""
    torch.manual_seed(0)
    m, x = OwnAutocast().float(), randn(1, 40, H, dtype=torch.float32)

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            return m(x)

    true = reference(m, x)  # autocast does not cast float64
    untiled = gradients(m, x, call=call)
    tile(m, num_shards=4)
    for _ in range(2):
        assert less_accurate(gradients(m, x, call=call), untiled, true, torch.bfloat16) == {}


class Complex(nn.Module):
    """Has a last projection of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, WIDE), nn.Linear(WIDE, H, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(torch.complex(h.sin(), h.cos()))


def test_complex_last_projection() -> None:
    """The gradients behind complex weights have the conjugates that torch has."""
    torch.manual_seed(0)
    m, x = Complex(), randn(1, 40, H)
    m.down.requires_grad_(False)
    true = gradients(m, x, call=lambda x: torch.view_as_real(m(x)))
    tile(m, num_shards=4)
    for _ in range(2):
        assert worst(gradients(m, x, call=lambda x: torch.view_as_real(m(x))), true) < EXACT


class ReadsItsWeights(GatedMLP):
    """Multiplies with an attribute of a weight, and with what its type and its identity tell."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.up.bias = self.gate.bias
        self.up.weight.factor = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        tied, parameter = self.up.bias is self.gate.bias, isinstance(self.up.weight, nn.Parameter)
        return super().forward(x) * getattr(self.up.weight, "factor", 1.0) * (1 + tied) * (1 + parameter)


def test_code_that_looks_at_its_weights() -> None:
    """The recompute's weights have the attributes and the type of the module's, and tied ones are one tensor."""
    torch.manual_seed(0)
    m, x = ReadsItsWeights(), randn(1, 40, H)
    true = gradients(m, x)
    compare_steps(m, x, true)


class KnowsItself(GatedMLP):
    """Computes with what a table outside has for this very module."""

    table: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
    default = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.table.get(self, 1.0) if self.default else self.table[self])


@pytest.mark.parametrize("default", [True, False])
def test_code_that_looks_at_its_modules(default: bool) -> None:
    """Code that looks for its modules by identity has the untiled gradients."""
    torch.manual_seed(0)
    m, x = KnowsItself(), randn(1, 40, H)
    m.table[m], m.default = 3.0, default
    true = gradients(m, x)
    compare_steps(m, x, true)


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
    torch.manual_seed(0)
    m, x = Around(), randn(1, 40, H)
    true = gradients(m, x)
    tile(m.mlp, num_shards=2, self_check=False)
    tile(m, num_shards=2, self_check=False)
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT


class Reaches(GatedMLP):
    """Reaches a projection through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = [self.up]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.plain[0](x))


def test_hook_on_a_weight_that_is_reached_otherwise() -> None:
    """It runs once, on the gradient of all tiles."""
    torch.manual_seed(0)
    m, x = Reaches(), randn(1, 40, H)
    m.up.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    true = gradients(m, x)
    tile(m, num_shards=4, self_check=False)
    for _ in range(2):
        assert worst(gradients(m, x), true) < EXACT


class IsAlsoADict(nn.Module, dict[str, float]):
    """A module that is another container too."""

    __hash__ = object.__hash__

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.mlp = GatedMLP()
        self["factor"] = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self["factor"]


def test_module_that_is_also_a_dict() -> None:
    """It has the untiled gradients."""
    torch.manual_seed(0)
    m, x = IsAlsoADict(), randn(1, 40, H)
    true = gradients(m, x)
    tile(m, num_shards=4, self_check=False)
    assert worst(gradients(m, x), true) < EXACT


class InFloat32(nn.Module):
    """Disables autocast for its products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, WIDE, bias=False), nn.Linear(WIDE, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.down(self.up(x).tanh())


@pytest.mark.low_precision
def test_backward_pass_of_float32_under_autocast() -> None:
    """What runs in float32 inside of autocast is differentiated in float32."""
    torch.manual_seed(0)
    m, x = InFloat32().float(), randn(1, 40, H, dtype=torch.float32)
    true, untiled = reference(m, x), gradients(m, x)

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m(x)

    tile(m, num_shards=4)
    for _ in range(2):
        assert less_accurate(gradients(m, x, call=call), untiled, true) == {}


class HooksItsInput(GatedMLP):
    """Doubles the gradient of its input by a hook."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return super().forward(x)


def test_hook_on_the_input_of_a_tile() -> None:
    """It runs once for each tile, on that tile's gradient."""
    torch.manual_seed(0)
    m, x = HooksItsInput(), randn(1, 40, H)
    true = reference(m, x)
    compare_steps(m, x, true)
