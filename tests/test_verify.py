"""``lt_tiled.verify`` and ``lt-tiled verify``: what passes, what fails, and what is said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import lt_tiled
from lt_tiled import TiledDeepSpeedStrategy, TiledSingleDeviceStrategy, Tiling, verify
from lt_tiled.callbacks import Tiled
from lt_tiled.cli import main
from lt_tiled.loss.autograd import _TiledLoss
from lt_tiled.recompute.mode import RandomState
from lt_tiled.tiling.run import TiledFunction
from tests.architectures import ARCHITECTURES
from tests.engines.cells import draw, strategy
from tests.lit import LitTiny, accelerator, replaced
from tests.models import GatedMLP, TinyLM, lm_loss, tiny_llama
from tests.world import World


def step(model: Any, ids: Tensor) -> Tensor:
    return lm_loss(model(ids), ids)


IDS = draw((2, 40), 0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.self_checks
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "T5", "BERT", "ViT"])
def test_architectures(name: str) -> None:
    """Architectures of all kinds pass, in several tiles if they have an MLP to tile."""
    architecture = ARCHITECTURES[name]
    model = architecture.build(torch.float32)
    result = verify(model, architecture.feed(model))
    assert result.passed, str(result)
    assert set(result.tiles.values()) == ({5} if architecture.finds else set())
    assert not result.not_tiled


true = TiledFunction.backward


def too_large(ctx: Any, *gradients: Any) -> Any:
    """All gradients of tiles are 1 % too large."""
    return tuple(None if g is None else g * 1.01 for g in true(ctx, *gradients))


def lacks_a_token(ctx: Any, gradient: Tensor, *others: Any) -> Any:
    """The gradient of one token does not arrive."""
    gradient = gradient.clone()
    gradient[0, 0] = 0
    return true(ctx, gradient, *others)


@contextmanager
def wrong_gradients(wrong: Any = too_large) -> Iterator[None]:
    """Let tiles have wrong gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TiledFunction, "backward", staticmethod(wrong))
        yield


@pytest.mark.slow
def test_a_wrong_gradient() -> None:
    """A tiled function whose gradient is 1 % too large fails, and the module with the error is named."""
    net = TinyLM()
    assert verify(net, IDS, step=step).passed
    with wrong_gradients():
        result = verify(net, IDS, step=step)
    assert not result.passed
    assert result.worst.path.startswith(("model.blocks.*.mlp.", "model.blocks.*.norm2"))
    assert 0.009 < result.worst.tiled < 0.03  # two blocks are wrong
    assert f"fail: {result.worst.path}, error {result.worst.tiled:.1e} of " in result.verdict


class Mixing(GatedMLP):
    """Adds the mean of its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True))


class WrongInTraining(GatedMLP):
    """Returns too much in tiles, which it sees as one row, in training mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.01 if self.training and len(x) == 1 else 1.0)


class Dropping(GatedMLP):
    """Has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class Jittery(GatedMLP):
    """Adds jitter in front and behind, which tiles draw in another order."""

    jitter_noise: float

    def __init__(self) -> None:
        super().__init__()
        self.jitter_noise = 0.1

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.jitter_noise * torch.rand_like(x))
        return y + self.jitter_noise * torch.rand_like(y)


@pytest.mark.parametrize(
    ("mlp", "verdict"),
    [
        (Mixing, "fail: model.blocks."),
        (WrongInTraining, "fail: model.blocks."),
        (Dropping, "pass: "),
        (Jittery, "pass: "),
    ],
)
def test_other_mlps(mlp: type[GatedMLP], verdict: str) -> None:
    """Without the self-check, an MLP that mixes tokens fails; dropout and jitter are off; a model in evaluation mode is
    verified in training mode.
    """
    net = TinyLM()
    for block in net.blocks:
        block.mlp = mlp()
    net.eval()
    chosen = TiledSingleDeviceStrategy(
        tiling=Tiling(targets=mlp.__name__, self_check=False), activation_checkpointing=True
    )
    assert verdict in verify(net, IDS, step=step, strategy=chosen).verdict


def test_on_an_accelerator(device: str) -> None:
    """A step runs on the device of the model, whose generator and weights stay as they are."""
    torch.manual_seed(0)
    net = TinyLM().to(device)
    before = RandomState.now(net.head.weight.device)
    result = verify(net, IDS, step=step, accelerator=accelerator(device), devices=1)
    assert result.passed, str(result)
    assert RandomState.now(net.head.weight.device).same_as(before)
    assert {p.device.type for p in net.parameters()} == {device}


def test_nothing_to_tile() -> None:
    """A run without tiles passes, and says that no tiling was verified."""
    chosen = TiledSingleDeviceStrategy(tiling=False, activation_checkpointing=True)
    result = verify(TinyLM(), IDS, step=step, strategy=chosen)
    assert (result.passed, result.tiles) == (True, {})
    assert "; no MLP and no loss is tiled, so only the rest, such as activation checkpointing" in result.verdict


LABELLED = {"input_ids": IDS, "labels": IDS}


def test_zero_weights() -> None:
    """The weights before zeros, those of a new LoRA adapter, are compared too: a wrong gradient there fails."""
    adapted: Any = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["gate_proj"]))
    assert verify(adapted, LABELLED).passed
    with wrong_gradients():
        failed = [row.path for row in verify(adapted, LABELLED).rows if not row.passed]
    assert any("lora_A" in path for path in failed)
    assert not any(weight.any() for name, weight in adapted.named_parameters() if "lora_B" in name)


def test_what_is_not_tiled() -> None:
    """A module that does not run in tiles is named, and one that fails next to it still fails."""
    net = TinyLM()
    net.blocks[1].mlp.up.register_forward_hook(lambda *_: None)
    result = verify(net, IDS, step=step)
    assert result.passed
    assert result.not_tiled == ["model.blocks.1.mlp"]
    assert result.verdict.endswith("not tiled, so not verified: 1 x model.blocks.*.mlp")
    assert not verify(TinyLM(), IDS, step=step).not_tiled
    net.blocks[0].mlp.up.register_forward_hook(lambda *_: None)
    result = verify(net, IDS, step=step)
    assert result.verdict.startswith("fail: nothing ran in several tiles")


class Clipping(LitTiny):
    """Changes gradients in a hook."""

    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 2e-2)


def test_hooks_on_gradients() -> None:
    """Gradients are compared as the backward pass left them, without the clipping of the module's own hooks."""
    result = verify(Clipping(), IDS)
    assert result.passed, str(result)
    assert result.norms[1] > 0.1


def policy_loss(model: Any, ids: Tensor) -> Tensor:
    """A loss of zero with gradients, as that of a policy before its first update."""
    loss = step(model, ids)
    return loss - loss.detach()


_true_loss = _TiledLoss.forward


@pytest.mark.slow
def test_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong loss with right gradients fails; a loss of zero passes."""
    assert verify(TinyLM(), IDS, step=policy_loss).passed
    monkeypatch.setattr(_TiledLoss, "forward", staticmethod(lambda *args: _true_loss(*args) * 1.01))
    result = verify(tiny_llama(), LABELLED, strategy=TiledSingleDeviceStrategy(loss="always"))
    assert [row.path for row in result.rows if not row.passed] == ["loss"]


def test_the_model_stays(tmp_path: Path) -> None:
    """The user's model keeps its weights, gradients, buffers and random numbers, and offloading takes part."""
    net = TinyLM()
    net.register_buffer("count", torch.zeros(1))
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    policy = lt_tiled.ActivationCheckpointing(offload="disk", directory=str(tmp_path), keep_last=0)
    chosen = TiledSingleDeviceStrategy(tiling=7, activation_checkpointing=policy)
    result = verify(net, IDS, step=step, strategy=chosen)
    assert (result.passed, set(result.tiles.values())) == (True, {7})
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert replaced(net) == 0


@pytest.mark.slow
@pytest.mark.low_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    """The bounds of 16-bit weights follow from their rounding, and tell a token that a gradient lacks."""
    result = verify(TinyLM().to(dtype), IDS, step=step)
    assert result.passed, str(result)
    assert torch.finfo(dtype).eps / 100 < result.worst.untiled < 0.1
    with wrong_gradients(lacks_a_token):
        assert not verify(TinyLM().to(dtype), IDS, step=step).passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": step, "frozen": True}, "All weights are frozen"),
        ({"step": lambda model, ids: model(ids)[0, 0, 0] * 0}, "The step has no gradients"),
        ({}, "TinyLM returns no loss for the batch"),
        ({"step": step, "strategy": "auto"}, "lt_tiled changes nothing in TinyLM"),
    ],
)
def test_what_cannot_be_verified(arguments: dict[str, Any], message: str) -> None:
    """A step without a loss, gradients, weights to train or lt_tiled raises."""
    net = TinyLM().requires_grad_("frozen" not in arguments)
    arguments = {name: value for name, value in arguments.items() if name != "frozen"}
    with pytest.raises(ValueError, match=message):
        verify(net, IDS, **arguments)


def test_callbacks_and_modules() -> None:
    """Callbacks of lt_tiled take part with a stock strategy, and a LightningModule runs its own step."""
    assert verify(LitTiny(), IDS, strategy="auto", accelerator="cpu", callbacks=[Tiled(3, None)]).tiles == {
        "net.blocks.0.mlp": 3,
        "net.blocks.1.mlp": 3,
    }


def on_engine(engine: str, wrong_rank: int | None) -> bool:
    """Whether the weights before zeros pass with sequences of its own on a rank, or with wrong gradients there."""
    offloaded = TiledDeepSpeedStrategy(stage=2, offload_optimizer=True) if engine == "offload" else None
    chosen = offloaded or strategy(lt_tiled, engine)
    ids, net = draw((2, 24 + 6 * dist.get_rank()), dist.get_rank()), TinyLM()
    for block in net.blocks:
        nn.init.zeros_(block.mlp.down.weight)  # so the gradients before them are, too
    with wrong_gradients() if dist.get_rank() == wrong_rank else nullcontext():
        result = verify(net, ids, step=step, strategy=chosen, devices=dist.get_world_size())
    passed = {row.path: row.passed for row in result.rows}["model.blocks.*.mlp.gate"]
    assert passed == result.passed
    return passed


def sharing() -> bool:
    """Whether a model whose sequences two ranks share passes."""
    chosen = lt_tiled.TiledDDPStrategy(sequence_parallel=2)
    return verify(tiny_llama(), LABELLED, strategy=chosen, devices=2).passed


def on_engines(cells: list[tuple[str, int | None]]) -> list[bool]:
    return [on_engine(*cell) for cell in cells]


def test_a_wrong_rank(world: World) -> None:
    """A wrong gradient on one rank fails on all."""
    assert world(on_engines, [("fsdp2", None), ("ddp", 1)]) == [[True, False]] * 2


@pytest.mark.full
def test_engines(world: World) -> None:
    """FSDP with flat weights, FSDP2 and sequence parallelism pass, and a wrong gradient fails."""
    cells = [("fsdp_flat", None), ("fsdp_flat", 0), ("fsdp2", 1)]
    assert world(on_engines, cells) == [[True, False, False]] * 2
    assert world(sharing) == [True, True]


def in_half() -> tuple[bool, float]:
    """Whether ZeRO-2 in float16 passes if its first loss scales are too large."""
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    before = accelerator.supported_dtypes, accelerator.is_fp16_supported
    accelerator.supported_dtypes = lambda _: [torch.float32, torch.float16]
    accelerator.is_fp16_supported = lambda _: True
    try:
        chosen = TiledDeepSpeedStrategy(stage=2, initial_scale_power=24)
        result = verify(TinyLM(), IDS, step=step, strategy=chosen, devices=2, precision="16-mixed")
        return result.passed, result.norms[1]
    finally:
        accelerator.supported_dtypes, accelerator.is_fp16_supported = before


@pytest.mark.full
def test_deepspeed(deepspeed_world: World) -> None:
    """ZeRO-2 with the optimizer in CPU memory and ZeRO-3 pass; an error on one rank of ZeRO-3 fails on all."""
    assert deepspeed_world(on_engines, [("offload", None), ("zero3", None), ("zero3", 1)]) == [[True, True, False]] * 2


@pytest.mark.low_precision
def test_loss_scales(deepspeed_world: World) -> None:
    """DeepSpeed's loss scale settles before gradients in float16 are compared."""
    for passed, norm in deepspeed_world(in_half):
        assert passed
        assert 0.1 < norm < 10


CONFIG = """\
model: tests.lit.LitTiny
trainer:
  accelerator: cpu
  devices: 1
  strategy:
    class_path: lt_tiled.TiledDDPStrategy
    init_args: {tiling: {tile_tokens: 4096}, activation_checkpointing: cpu}
  max_epochs: 3
  fast_dev_run: true
"""


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """``lt-tiled verify`` prints the table and ends with 0 if the configuration passes, and with 1 if it fails."""
    Path("my.yaml").write_text(CONFIG)
    main(["verify", "--config", "my.yaml", "--seq=20"])
    text = capsys.readouterr().out
    assert "LitTiny, 20 tokens, 32-true, TiledDDPStrategy" in text
    assert "\npass: the largest error " in text
    with wrong_gradients(), pytest.raises(SystemExit) as stop:
        main(["verify", "--config", "my.yaml"])
    assert stop.value.code == 1
    text = capsys.readouterr().out
    assert "\nfail: net.blocks.*." in text
