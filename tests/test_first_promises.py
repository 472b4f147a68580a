"""What the package was asked for first, one test each.

DeepSpeed that is missing: ``tests/strategies/test_strategies.py`` and ``tests/test_import.py``. The settings of every
policy by YAML on every engine: ``tests/test_settings.py``.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_tiled import TiledDDPStrategy, TiledSingleDeviceStrategy, Tiling, prepare
from lt_tiled.callbacks import TilingReport
from tests.lit import LitTiny, trainer
from tests.models import tiny_llama
from tests.parity import near
from tests.processes import ROOT, Forked
from tests.world import World


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> tuple[int | None, str, Path]:
    """Return the exit code of a run under ZeRO-3 in a single process, what it printed, and where it offloaded to."""
    folder = tmp_path_factory.mktemp("zero3")
    (scratch := folder / "scratch").mkdir()
    run = Forked(
        *("lt-tiled", "fit", "--config", str(ROOT / "configs/deepspeed_zero3_disk.yaml")),
        *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=2", "--data.seq_len=2048"),
        *("--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"),
        f"--trainer.strategy.init_args.activation_checkpointing.directory={scratch}",
        printed=folder / "printed.txt",
        cwd=folder,
        finalize=True,
        COLUMNS="120",
    )
    return run.finish(with_children=True), run.printed.read_text(), scratch


@pytest.mark.slow
def test_single_process_zero3(zero3: tuple[int | None, str, Path]) -> None:
    """DeepSpeed ZeRO-3 trains in a single process, without a launcher: in tiles, and to its last step."""
    _, printed, _ = zero3
    assert "4 x LlamaMLP" in printed
    assert "`Trainer.fit` stopped: `max_steps=2` reached." in printed


@pytest.mark.slow
def test_end_of_training(zero3: tuple[int | None, str, Path]) -> None:
    """A run ends without a crash, and leaves no file where it offloaded to."""
    code, printed, scratch = zero3
    assert code == 0, printed
    assert "to disk" in printed
    assert list(scratch.iterdir()) == []


class LoRAOnLlava(pl.LightningModule):
    """A small LLaVA with LoRA adapters on the attention of its language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        model, self.processor = runpy.run_path(str(ROOT / "examples/vision_language.py"))["build"](None)
        target = r".*language_model.*\.(q_proj|v_proj)"
        self.model = get_peft_model(model, LoraConfig(r=2, target_modules=target, init_lora_weights=False))
        self.losses: list[float] = []

    def train_dataloader(self) -> DataLoader[Any]:
        pictures = runpy.run_path(str(ROOT / "examples/vision_language.py"))["Pictures"](range(4))

        def collate(pairs: list[Any]) -> Any:
            images, texts = zip(*pairs, strict=True)
            batch = self.processor([*images], [f"<image>{text}" for text in texts], return_tensors="pt", padding=True)
            return {**batch, "labels": batch["input_ids"]}

        return DataLoader(pictures, batch_size=1, collate_fn=collate)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([weight for weight in self.parameters() if weight.requires_grad], 0.1)


def losses_of_llava() -> tuple[list[float], list[float]]:
    found = []
    for policies in ({"tiling": 3, "loss": 5}, {"tiling": None, "activation_checkpointing": None}):
        module = LoRAOnLlava()
        strategy = TiledDDPStrategy(**policies)  # type: ignore[arg-type]
        trainer(strategy, devices=2, max_steps=2, limit_val_batches=0).fit(module)
        found.append(module.losses)
    return found[0], found[1]


@pytest.mark.slow
def test_vision_language_model_with_lora_under_ddp(world: World) -> None:
    """LoRA adapters of a vision-language model train under DDP with the losses of an untiled run."""
    for tiled, untiled in world(losses_of_llava):
        assert len(tiled) == 2
        assert tiled == near(untiled)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_options_of_flex_attention(place: str) -> None:
    """Options of flex attention that a model is called with stay, and so do its loss and, on a GPU, its gradients."""
    ids = torch.arange(32, device=place)[None]
    losses, gradients = [], []
    for tiling in (None, 2):
        torch.manual_seed(0)
        model = tiny_llama(attn_implementation="flex_attention").to(place).train()
        model.requires_grad_(place == "cuda")  # on the CPU, flex attention has no backward pass
        with prepare(model, tiling=tiling, activation_checkpointing=tiling is not None):
            loss = model(ids, labels=ids, use_cache=False, kernel_options={"BLOCK_M": 32, "BLOCK_N": 32}).loss
            if place == "cuda":
                loss.backward()
        losses.append(loss.detach())
        gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])


class Tower(nn.Module):
    """An MLP of another shape: three projections, and no gate."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 40)
        self.middle = nn.Linear(40, 24)
        self.narrow = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.middle(F.gelu(self.wide(x)))))


class WithTowers(LitTiny):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            block.mlp = Tower()


def test_an_mlp_of_another_shape_with_its_own_number_of_tiles() -> None:
    """An MLP of the user's own shape runs in the number of tiles that a policy gives it, with the same losses."""
    losses, report = [], TilingReport()
    for tiling in (None, Tiling(6, targets="Tower")):
        module = WithTowers()
        trainer(TiledSingleDeviceStrategy(tiling=tiling), callbacks=[report], limit_val_batches=0).fit(module)
        losses.append(module.losses)
    assert losses[1] == near(losses[0])
    assert report.report is not None
    assert [(row.kind, row.tiles) for row in report.report.tiled] == [("Tower", 6), ("Tower", 6)]
