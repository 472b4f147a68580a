"""What tiling costs and saves, in exact figures: FLOPs, calls of the forward, live bytes."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lt_tiled import ActivationCheckpointing, Tiling, prepare, tile
from tests.meters import LiveBytes, flops, peak_bytes, profiled_peak_bytes
from tests.models import Block, GatedMLP, PlainMLP, TinyLM, lm_loss
from tests.parity import randn

TOKENS, HIDDEN, WIDE, TILES = 512, 32, 96, 8
TILE = TOKENS // TILES
PRINT = 4 * TOKENS
"""The bytes of the fingerprints of a call: a number for each of its tokens."""
PRINT_OF_WEIGHT = 4 * HIDDEN
"""That of its last projection's weight: a number for each of its rows."""


def step(module: nn.Module, x: Tensor, checkpointed: bool = False) -> None:
    y = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
    torch.autograd.backward(y, torch.ones_like(y))


@pytest.mark.parametrize("mlp", [GatedMLP, PlainMLP])
def test_checkpointed_block_costs_nothing_more(mlp: type[nn.Module]) -> None:
    """FLOPs of a checkpointed block with its MLP tiled are 1.00 times those of the same block untiled, from the first
    step on.
    """
    block, x = Block(HIDDEN, WIDE, mlp), randn(1, TOKENS, HIDDEN)
    untiled = flops(lambda: step(block, x, checkpointed=True))
    tile(block.mlp, num_shards=TILES, self_check=False)
    assert [flops(lambda: step(block, x, checkpointed=True)) for _ in range(2)] == [untiled] * 2


@pytest.mark.parametrize(("mlp", "ratio"), [(GatedMLP, 11 / 9), (PlainMLP, 7 / 6)])
def test_cost_without_checkpointing(mlp: type[nn.Module], ratio: float) -> None:
    """Without checkpointing the MLP's FLOPs grow by the recompute of all projections but the last: 11/9 for a gated
    MLP.
    """
    module, x = mlp(HIDDEN, WIDE), randn(1, TOKENS, HIDDEN)
    untiled = flops(lambda: step(module, x))
    tile(module, num_shards=TILES, self_check=False)
    assert [flops(lambda: step(module, x)) / untiled for _ in range(2)] == [pytest.approx(ratio)] * 2


class LayerScale(nn.Module):
    """A learned factor for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((HIDDEN,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class ScaledBlock(nn.Module):
    """The end of a block of DINOv2, where the scale is a module, or of ConvNeXt, where it is in the block's code."""

    def __init__(self, inline: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mlp, self.scale, self.inline = PlainMLP(HIDDEN, WIDE), LayerScale(), inline

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x)
        y = self.mlp(self.norm2(x))
        return x + (y * self.scale.gamma if self.inline else self.scale(y))


@pytest.mark.parametrize("inline", [False, True])
def test_layer_scale(inline: bool) -> None:
    """A LayerScale runs in the MLP's tiles and costs nothing more. If the block's code multiplies, the multiplication
    saves the MLP's output: then its recompute runs the MLP, and each tile the first projection once more, exactly.
    """
    model, x = nn.Sequential(*[ScaledBlock(inline) for _ in range(2)]), randn(1, TOKENS, HIDDEN).requires_grad_()
    with prepare(model, activation_checkpointing=True):
        step(model, x)
        untiled, true, peak = flops(lambda: step(model, x)), gradients(model, x), peak_bytes(lambda: step(model, x))
    with prepare(model, tiling=TILES, activation_checkpointing=True):
        step(model, x)
        tiled, found, lower = flops(lambda: step(model, x)), gradients(model, x), peak_bytes(lambda: step(model, x))
    assert tiled - untiled == inline * 2 * (2 * TOKENS * HIDDEN * WIDE)
    assert lower < peak
    torch.testing.assert_close(found, true)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the gradients of one step."""
    model.zero_grad()
    step(model, x)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_swin_against_its_own_checkpointing() -> None:
    """Swin takes no more FLOPs than with the checkpointing of transformers, and has a lower peak."""
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {
        "image_size": 64,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    config = SwinConfig(**sizes, drop_path_rate=0.0)
    model, images = SwinForImageClassification(config).train(), torch.randn(2, 3, 64, 64)

    def run() -> None:
        model(images, labels=torch.zeros(2, dtype=torch.long)).loss.backward()

    model.gradient_checkpointing_enable()
    run()
    own = flops(run), peak_bytes(run)
    model.gradient_checkpointing_disable()
    with prepare(model, tiling=TILES, activation_checkpointing=ActivationCheckpointing(keep=None)):
        run()
        assert flops(run) <= own[0]
        assert peak_bytes(run) < own[1]


def test_lora_costs_next_to_nothing_more() -> None:
    """With LoRA on a frozen base a checkpointed block computes the last small product once more for each token."""
    from peft import LoraConfig, inject_adapter_in_model

    block, x = Block(HIDDEN, WIDE).requires_grad_(False), randn(1, TOKENS, HIDDEN)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["gate", "up", "down"]), block.mlp)
    untiled = flops(lambda: step(block, x, checkpointed=True))
    tile(block.mlp, num_shards=TILES, self_check=False)
    assert flops(lambda: step(block, x, checkpointed=True)) == untiled + 2 * TOKENS * 4 * HIDDEN


def test_each_token_runs_forward_twice() -> None:
    """In a checkpointed block each token passes the tiled forward twice, once without a graph and once with; peers run
    it three times.
    """
    block = Block(HIDDEN, WIDE)
    tokens = 0

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal tokens
        tokens += args[0].numel() // HIDDEN

    block.mlp.gate.register_forward_pre_hook(count)
    tile(block.mlp, num_shards=TILES, self_check=False)
    step(block, randn(1, TOKENS, HIDDEN), checkpointed=True)
    assert tokens == 2 * TOKENS


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_of_the_forward(dtype: torch.dtype) -> None:
    """The forward holds the output, and of one tile the three widened tensors that the module itself holds at once."""
    module, x = (
        tile(GatedMLP(HIDDEN, WIDE).to(dtype), num_shards=TILES, self_check=False),
        randn(1, TOKENS, HIDDEN, dtype=dtype),
    )
    with torch.no_grad():
        peak = peak_bytes(lambda: module(x))
        assert profiled_peak_bytes(lambda: module(x)) == peak
    output = TOKENS * HIDDEN
    one_tile = 3 * TILE * WIDE  # act(gate), up, their product
    assert peak == (output + one_tile) * x.element_size()


@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_of_forward_and_backward(dtype: torch.dtype) -> None:
    """Forward and backward together hold the output and its gradient, the input's gradient, one tile, and the gradient
    sums.
    """
    module, x = (
        tile(GatedMLP(HIDDEN, WIDE).to(dtype), num_shards=TILES, self_check=False),
        randn(1, TOKENS, HIDDEN, dtype=dtype),
    )
    step(module, x)
    peaks = []
    for meter in (peak_bytes, profiled_peak_bytes):
        x.grad = None
        module.zero_grad(set_to_none=True)
        peaks.append(meter(lambda: step(module, x)))
    peak, element = peaks[0], x.element_size()
    scratch = 0 if dtype == torch.float32 else 8 * 1024  # memory of 16-bit products that no tensor holds
    assert peak <= peaks[1] <= peak + scratch
    output_and_gradient = 2 * TOKENS * HIDDEN * element
    input_gradient = TOKENS * HIDDEN * element
    saved = 3 * TILE * WIDE * element  # gate, act(gate), up
    gradients = 3 * TILE * WIDE * element  # of their product and of two of them
    sums = 3 * HIDDEN * WIDE * 4  # one for each weight, in float32
    prints = 2 * (PRINT + PRINT_OF_WEIGHT)  # of the forward pass and of the recompute
    scalars = 64
    assert peak <= output_and_gradient + input_gradient + saved + gradients + sums + prints + scalars


def test_profiler_sees_the_same_peaks() -> None:
    """The ledger's peaks of a checkpointed block, untiled and tiled, are those of torch's profiler, byte for byte."""
    block, x = Block(HIDDEN, WIDE), randn(1, TOKENS, HIDDEN)
    peaks: dict[bool, list[int]] = {}
    for tiled in (False, True):
        if tiled:
            tile(block.mlp, num_shards=TILES, self_check=False)
        for meter in (flops, peak_bytes, profiled_peak_bytes):
            x.grad = None
            block.zero_grad(set_to_none=True)
            peaks.setdefault(tiled, []).append(meter(lambda: step(block, x, checkpointed=True)))
        assert peaks[tiled][1] == peaks[tiled][2]
    assert peaks[True][1] < peaks[False][1]


def test_profiler_sees_the_same_peaks_of_a_model() -> None:
    """The same holds for a language model, but for scratch memory of operations, which no tensor holds."""
    model, ids = TinyLM(), torch.arange(256).view(2, 128) % 32
    peaks = []
    for tiling in (None, Tiling(4, self_check=False)):
        with prepare(model, tiling=tiling, activation_checkpointing=True):
            for meter in (flops, flops, peak_bytes, profiled_peak_bytes):  # the first two calls are compared
                model.zero_grad(set_to_none=True)
                peaks.append(meter(lambda: lm_loss(model(ids), ids).backward()))
    untiled, profiled, tiled, tiled_profiled = peaks[2], peaks[3], peaks[6], peaks[7]
    assert abs(profiled - untiled) <= 12 * 1024
    assert abs(tiled_profiled - tiled) <= 12 * 1024
    assert tiled_profiled < profiled


def test_intermediates_do_not_grow_with_the_tokens() -> None:
    """With tiles of a fixed size, twice the tokens add their input-sized tensors and fingerprints to the peak."""
    module = tile(GatedMLP(HIDDEN, WIDE), tile_tokens=64, self_check=False)
    peaks = []
    for tokens in (512, 1024):
        x = randn(1, tokens, HIDDEN)
        step(module, x)
        module.zero_grad(set_to_none=True)
        x.grad = None
        peaks.append(peak_bytes(lambda x=x: step(module, x)))
    assert peaks[1] - peaks[0] == 3 * 512 * HIDDEN * 4 + 2 * PRINT


def test_forward_keeps_nothing_but_the_input() -> None:
    """Between forward and backward a tiled call keeps its input (which the caller made) and its output alive, and no
    more but a fingerprint.
    """
    module, x = tile(GatedMLP(HIDDEN, WIDE), num_shards=TILES, self_check=False), randn(1, TOKENS, HIDDEN)
    with LiveBytes() as meter:
        y = module(x)
        assert meter.now == y.nbytes + PRINT + PRINT_OF_WEIGHT
        del y
        assert meter.now == 0


@pytest.mark.self_checks
def test_no_work_at_all_for_short_inputs() -> None:
    """An input of one tile runs the module as it is: no self-check, no recompute."""
    module, x = GatedMLP(HIDDEN, WIDE), randn(1, TOKENS, HIDDEN)
    untiled = flops(lambda: step(module, x))
    assert flops(lambda: step(tile(copy.deepcopy(module)), x)) == untiled


class Normed(nn.Module):
    """Saves the outputs of its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).exp().sigmoid()


@pytest.mark.self_checks
def test_nothing_is_left_of_a_step() -> None:
    """After the first step, whose self-check makes a graph that nobody runs backward, no byte of it is alive; nor after
    others.
    """
    module = tile(Normed(), num_shards=4)
    x = torch.ones(1, 64, HIDDEN, requires_grad=True)
    for _ in range(2):
        with LiveBytes() as meter:
            torch.autograd.grad(checkpoint(module, x * 2, use_reentrant=False).sum(), x)
        gc.collect()
        assert meter.now == 0
