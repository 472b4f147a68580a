"""``lt_tiled.verify`` and ``lt-tiled verify``: what passes, what fails, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_tiled
from lt_tiled import TiledDeepSpeedStrategy, TiledSingleDeviceStrategy, Tiling, verify
from lt_tiled.callbacks import TiledMLP
from lt_tiled.cli import main
from lt_tiled.tiling.autograd import TiledFunction
from tests.architectures import ARCHITECTURES
from tests.engines.cells import draw, strategy
from tests.lit import LitTiny, replaced
from tests.models import GatedMLP, TinyLM, lm_loss
from tests.world import World

_true_backward = TiledFunction.backward


def too_large(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """A backward pass with gradients that are 1 % too large."""
    return tuple(None if g is None else g * 1.01 for g in _true_backward(ctx, *gradients))


def step(model: Any, ids: Tensor) -> Tensor:
    return lm_loss(model(ids), ids)


IDS = draw((2, 40), 0)


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-2", "Mixtral", "T5", "BERT", "ViT", "OPT"])
def test_architectures(name: str) -> None:
    """Architectures of all kinds pass, in several tiles if they have an MLP to tile."""
    model = ARCHITECTURES[name].build(torch.float32)
    result = verify(model, ARCHITECTURES[name].feed(model))
    assert result.passed, str(result)
    assert result.tiles == (5 if ARCHITECTURES[name].finds else None)


def test_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiled function whose gradient is 1 % too large fails, and the module with the error is named."""
    net = TinyLM()
    assert verify(net, IDS, step=step).passed
    monkeypatch.setattr(TiledFunction, "backward", staticmethod(too_large))
    result = verify(net, IDS, step=step)
    assert not result.passed
    assert result.worst.path.startswith(("blocks.*.mlp.", "blocks.*.norm2"))
    assert 0.009 < result.worst.tiled < 0.011
    assert f"fail: {result.worst.path}, error {result.worst.tiled:.1e} of " in result.verdict
    assert not verify(net, IDS, step=step, reference=False).passed


def only_32_bits(model: Any, ids: Tensor) -> Tensor:
    if model.head.weight.dtype == torch.float64:
        raise TypeError("no kernel")
    return step(model, ids)


class Mixing(GatedMLP):
    """Adds the mean of its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True))


class Noisy(GatedMLP):
    """Scales each call with a random number, and each tile with another."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(()))


class Dropping(GatedMLP):
    """Has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


@pytest.mark.parametrize(
    ("mlp", "verdict"),
    [(Mixing, "fail: blocks."), (Noisy, "draws random numbers without dropout"), (Dropping, "pass: ")],
)
def test_other_mlps(mlp: type[GatedMLP], verdict: str) -> None:
    """Without the self-check, an MLP that mixes tokens fails; noise fails, with that reason; dropout is turned off."""
    net = TinyLM()
    for block in net.blocks:
        block.mlp = mlp()
    chosen = TiledSingleDeviceStrategy(tiling=Tiling(targets=mlp.__name__, self_check=False), checkpointing=True)
    assert verdict in verify(net, IDS, step=step, strategy=chosen).verdict


def test_the_model_stays(tmp_path: Path) -> None:
    """The user's model keeps its weights, gradients, buffers and random numbers, and offloading takes part."""
    net = TinyLM()
    net.register_buffer("count", torch.zeros(1))
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    chosen = TiledSingleDeviceStrategy(
        tiling=7, checkpointing=lt_tiled.Checkpointing(offload="disk", directory=str(tmp_path), keep_last=0)
    )
    result = verify(net, IDS, step=step, strategy=chosen)
    assert (result.passed, result.tiles) == (True, 7)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert replaced(net) == 0


def test_figures() -> None:
    """The two steps have the same loss and gradient norm; activation checkpointing shows in FLOPs and live bytes."""
    result = verify(TinyLM(), draw((2, 256), 0), step=step)
    untiled, tiled = result.untiled, result.tiled
    assert tiled.loss == pytest.approx(untiled.loss, rel=1e-5)
    assert tiled.norm == pytest.approx(untiled.norm, rel=1e-5)
    assert untiled.flops < tiled.flops < 4 / 3 * untiled.flops
    assert 0 < tiled.peak < untiled.peak
    assert "peak of live bytes" in str(result)
    assert "float64" in str(result)
    assert torch.finfo(torch.bfloat16).eps / 100 < verify(TinyLM().bfloat16(), IDS, step=step).worst.untiled < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": lambda model, ids: model(ids)[0, 0, 0] * 0}, "The step has no gradients"),
        ({}, "TinyLM returns no loss for the batch"),
        ({"step": step, "strategy": "auto"}, "lt_tiled changes nothing in TinyLM"),
        ({"step": only_32_bits}, r"does not run in torch.float64 \(no kernel\): pass reference=False"),
    ],
)
def test_what_cannot_be_verified(arguments: dict[str, Any], message: str) -> None:
    """A step without a loss, without gradients, without lt_tiled or without a higher precision raises."""
    with pytest.raises(ValueError, match=message):
        verify(TinyLM(), IDS, **arguments)


def test_callbacks_and_modules() -> None:
    """Callbacks of lt_tiled take part with a stock strategy, and a LightningModule runs its own step."""
    assert verify(LitTiny(), IDS, strategy="auto", accelerator="cpu", callbacks=[TiledMLP(3)]).tiles == 3


def on_engine(engine: str, wrong_rank: int | None) -> bool:
    """Whether sequences of its own pass on a rank."""
    offloaded = TiledDeepSpeedStrategy(stage=2, offload_optimizer=True) if engine == "offload" else None
    chosen = offloaded or strategy(lt_tiled, engine)
    if dist.get_rank() == wrong_rank:
        TiledFunction.backward = staticmethod(too_large)  # type: ignore[method-assign]
    try:
        ids = draw((2, 24 + 6 * dist.get_rank()), dist.get_rank())
        return verify(TinyLM(), ids, step=step, strategy=chosen, devices=dist.get_world_size()).passed
    finally:
        TiledFunction.backward = staticmethod(_true_backward)  # type: ignore[method-assign]


def on_engines(cells: list[tuple[str, int | None]]) -> list[bool]:
    return [on_engine(*cell) for cell in cells]


def test_engines(world: World) -> None:
    """FSDP with flat weights and FSDP2 pass; an error on one rank of DDP fails on all."""
    assert world(on_engines, [("fsdp_flat", None), ("fsdp2", None), ("ddp", 1)]) == [[True, True, False]] * 2


def test_deepspeed(deepspeed_world: World) -> None:
    """ZeRO-2 with the optimizer in CPU memory passes; an error on one rank of ZeRO-3 fails on all."""
    assert deepspeed_world(on_engines, [("offload", None), ("zero3", 1)]) == [[True, False]] * 2


CONFIG = """\
model: tests.lit.LitTiny
trainer:
  accelerator: cpu
  devices: 1
  strategy: {class_path: lt_tiled.TiledDDPStrategy, init_args: {tiling: {tile_tokens: 4096}, checkpointing: cpu}}
  max_epochs: 3
  fast_dev_run: true
"""


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``lt-tiled verify`` prints the table and ends with 0 if the configuration passes, and with 1 if it fails."""
    Path("my.yaml").write_text(CONFIG)
    main(["verify", "--config", "my.yaml", "--seq=20"])
    text = capsys.readouterr().out
    assert "LitTiny, 20 tokens, 32-true, TiledDDPStrategy" in text
    assert "\npass: worst " in text
    monkeypatch.setattr(TiledFunction, "backward", staticmethod(too_large))
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--config", "my.yaml", "--reference=false"])
    assert stop.value.code == 1
    text = capsys.readouterr().out
    assert "errors are relative to the untiled step" in text
    assert "\nfail: net.blocks.*." in text
