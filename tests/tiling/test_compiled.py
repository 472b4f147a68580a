"""Tiles that are compiled."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_tiled import Tiling, prepare, tile
from lt_tiled.tiling.patched import tiled_patches
from tests.models import GatedMLP, H, PlainMLP, RoutedMLP, tiny_llama
from tests.parity import gradients, less_accurate, randn, reference, spread, step_of, toggled_gradients, worst

pytestmark = pytest.mark.slow


class Graphs:
    """A backend of ``torch.compile`` that keeps the graphs it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.products: list[int] = []
        """Matrix products in each."""

    def __call__(self, graph: Any, example: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def count(graph: Any, example: Any) -> Any:
            self.products.append(sum("mm" in str(node.target) for node in graph.graph.nodes))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=count)(graph, example)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(length: int) -> Tensor:
    return randn(2, length, H, dtype=torch.float64)


@pytest.mark.table("GatedMLP")
@pytest.mark.parametrize("mlp", [GatedMLP, PlainMLP])
def test_two_graphs_for_all_layers_tiles_and_lengths(mlp: type[nn.Module]) -> None:
    """A forward and a backward are compiled once: two layers, a short last tile, other lengths and batches use the same
    two graphs.
    """
    graphs, net = Graphs(), nn.Sequential(mlp(), mlp()).double()
    for module in net:
        tile(module, tile_tokens=12, compile={"backend": graphs})
    for length in (24, 25, 19, 40):
        x = tokens(length)
        assert worst(gradients(net, x), reference(nn.Sequential(*[plain(m) for m in net]), x)) <= 1e-10
    assert len(graphs.products) == 2


def plain(module: nn.Module) -> nn.Module:
    from lt_tiled import untile

    return untile(copy.deepcopy(module))


def compiled(module: nn.Module) -> bool:
    """Return whether no tiled module has fallen back to uncompiled tiles."""
    return not any(patch.learned.uncompiled for _, _, patch in tiled_patches(module))


def test_the_backward_computes_no_value_that_it_does_not_read() -> None:
    """The compiled backward of a gated MLP has 8 products: gate and up again, and two for each of three weights; not
    ``down`` again.
    """
    graphs, module = Graphs(), GatedMLP().double()
    tile(module, tile_tokens=12, compile={"backend": graphs})
    gradients(module, tokens(24))
    assert graphs.products == [3, 8]


@pytest.mark.full
def test_inductor_with_dropout() -> None:
    """Under inductor, dropout draws the same masks in the compiled recompute: the gradient is the slope of the loss
    with one seed.
    """
    module, x = PlainMLP(dropout=0.3).double(), tokens(25)
    module.act = nn.Sequential(nn.GELU(), nn.Dropout(0.4))
    tile(module, tile_tokens=12, compile=True)

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return spread(module(x))

    torch.manual_seed(0)
    gradient = gradients(module, x)["input 0"]
    direction, eps = randn(*x.shape, seed=3, dtype=torch.float64).detach(), 1e-6
    with torch.no_grad():
        slope = (loss(x + eps * direction) - loss(x - eps * direction)) / (2 * eps)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


@pytest.mark.full
@pytest.mark.low_precision
def test_a_whole_model() -> None:
    """A checkpointed Hugging Face model with compiled tiles has the untiled loss and gradients, with autocast too."""
    graphs, model = Graphs(), tiny_llama()
    ids = torch.arange(100).view(2, 50) % 64

    def run(model: nn.Module, autocast: bool) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return step_of(model, {"input_ids": ids, "labels": ids})

    true = run(copy.deepcopy(model).double(), False)
    for autocast in (False, True):
        untiled = run(model, autocast)
        with prepare(
            model,
            tiling=Tiling(tile_tokens=16, targets="mlp", compile={"backend": graphs}),
            activation_checkpointing=True,
        ):
            dtype = torch.bfloat16 if autocast else torch.float32
            assert less_accurate(run(model, autocast), untiled, true, dtype) == {}
    assert len(graphs.products) == 4


def test_what_cannot_be_compiled_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    """A module whose code is not one graph runs uncompiled, right, and one warning says why."""
    module, x = RoutedMLP().double(), tokens(24)
    true = reference(module, x)
    tile(module, tile_tokens=12, compile={"backend": Graphs()})
    with caplog.at_level(logging.WARNING, "lt_tiled"):
        for _ in range(2):
            assert worst(gradients(module, x), true) <= 1e-10
    assert sum("RoutedMLP runs uncompiled" in line for line in caplog.messages) == 1


def test_a_tile_that_runs_out_of_memory() -> None:
    """A compiled tile that runs out of GPU memory raises that error, and the next call runs compiled again."""
    full = [True]

    def backend(graph: Any, example: Any) -> Any:
        def run(*args: Any) -> Any:
            if full and full.pop():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return graph.forward(*args)

        return run

    module, x = GatedMLP().double(), tokens(24)
    tile(module, tile_tokens=12, compile={"backend": backend})
    with pytest.raises(torch.OutOfMemoryError):
        module(x)
    assert worst(gradients(module, x), reference(plain(module), x)) <= 1e-10
    assert compiled(module)


def test_a_line_before_the_first_compilation(caplog: pytest.LogCaptureFixture) -> None:
    """A log line comes before the compiler is called, so that nobody thinks the run is stuck."""
    lines: list[list[str]] = []

    def backend(graph: Any, example: Any) -> Any:
        lines.append(list(caplog.messages))
        return graph.forward

    class Announced(GatedMLP):
        pass

    module = tile(Announced(), tile_tokens=12, compile={"backend": backend})
    with caplog.at_level(logging.INFO, "lt_tiled"):
        module(randn(1, 24, H))
    assert "compiles the tiles of Announced" in lines[0][-1]


def test_unused_weights_keep_no_gradient() -> None:
    """A weight that the module does not use has no gradient when compiled either, as untiled."""
    module = GatedMLP()
    module.spare = nn.Linear(H, H)
    tile(module, tile_tokens=12, compile={"backend": Graphs()})
    assert not any("spare" in name for name in gradients(module, randn(1, 24, H)))


class Flagged(GatedMLP):
    """Uses its gate only if it is told to."""

    def forward(self, x: Tensor, gated: bool = True) -> Tensor:
        return super().forward(x) if gated else self.down(self.up(x))


def test_weights_that_later_calls_use() -> None:
    """A weight that the first calls did not use gets its gradient from the calls that do."""
    module, x = Flagged().double(), tokens(24)
    true = reference(module, x)
    tile(module, tile_tokens=12, compile={"backend": Graphs()})
    assert "gate.weight" not in gradients(module, x, call=lambda x: module(x, gated=False))
    assert worst(gradients(module, x), true) <= 1e-10


def test_an_argument_that_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """With dropout and an argument that the module does not use, tiles are compiled and the gradient of the argument is
    zero.
    """

    class Ignores(PlainMLP):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return super().forward(x)

    module = tile(Ignores(dropout=0.3), tile_tokens=12, compile={"backend": Graphs()})
    x, other = randn(1, 24, H), randn(1, 24, H)
    module(x, other).sum().backward()
    assert not other.grad.any()
    assert "uncompiled" not in caplog.text


def test_evaluation_mode_before_the_backward() -> None:
    """A model that is set to evaluation before the backward is recomputed, compiled, as it was in the forward."""
    module, x = PlainMLP(dropout=0.3).double(), tokens(24)
    tile(module, tile_tokens=12, compile={"backend": Graphs()})
    assert torch.equal(*toggled_gradients(module, x))


class InHalf(GatedMLP):
    """Returns float32 of what autocast computes in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


@pytest.mark.slow
@pytest.mark.low_precision
def test_compiled_tiles_are_not_compared() -> None:
    """A compiled tile that rounds otherwise than uncompiled is not taken for one that reads something else."""
    m, x = tile(InHalf().float(), num_shards=4, compile=True, self_check=False), randn(1, 64, H).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x.requires_grad_())
    y.sum().backward()
    assert m.up.weight.grad is not None
