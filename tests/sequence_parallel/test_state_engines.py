"""Models of each kind of layer train with shared sequences on every engine as without."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel, Tiling
from tests.engines.cells import sgd, strategy
from tests.engines.test_options import whole_weights
from tests.lit import trainer
from tests.parity import near, rounding
from tests.sequence_parallel.hybrids import hybrid
from tests.sequence_parallel.models import ids
from tests.sequence_parallel.test_sinks import FIELDS
from tests.sequence_parallel.test_states import EACH_KIND
from tests.world import world_of

pytestmark = pytest.mark.slow

ENGINES = ("ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")
STEPS, TOKENS = 2, 37
SINKS = "gpt_oss"
"""Eager attention with sinks."""


def build(name: str) -> nn.Module:
    model: Any = hybrid(name, **FIELDS if name == SINKS else {}).float()
    if name == SINKS:
        model.set_attn_implementation("eager")
    return model


class Lit(pl.LightningModule):
    """Notes its losses, and what the training changes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = build(name)  # before the strategy's contexts, because ZeRO-3 draws weights of its own
        self.losses: list[float] = []
        self.changed: Any = {}

    def configure_model(self) -> None: ...

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss: Tensor = self.net(input_ids=x, labels=x).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.trainer.model.parameters())

    def on_train_start(self) -> None:
        self.changed = whole_weights(self.trainer.model, self.net)

    def on_train_end(self) -> None:
        after = whole_weights(self.trainer.model, self.net)
        self.changed = {name: after[name] - before for name, before in self.changed.items()}


def trained(engine: str, name: str, shared: bool) -> tuple[list[float], Tensor]:
    """The losses of two steps of two ranks on the same batches, and how these changed all weights."""
    lit, policy = Lit(name), SequenceParallel(2, self_check=False) if shared else None
    checkpointing = ActivationCheckpointing(keep="attention") if shared else True
    policies = {"tiling": Tiling(3, self_check=False), "activation_checkpointing": checkpointing, "loss": True}
    loader = DataLoader(torch.cat([ids(2, TOKENS, seed) for seed in range(STEPS)]), batch_size=2)
    options = {"devices": 2, "max_epochs": 1, "use_distributed_sampler": False}  # it would shuffle
    trainer(strategy(lt_tiled, engine, sequence_parallel=policy, **policies), **options).fit(lit, loader)
    changes = [change.flatten() for change in lit.changed.values()]
    return lit.losses, torch.cat(changes)


@pytest.mark.table("ddp-bamba|fsdp2-qwen3_5_text|zero3-bamba|fsdp-lfm2")
@pytest.mark.parametrize("name", [*EACH_KIND[1:], "qwen3_5_text", SINKS])
@pytest.mark.parametrize("engine", ENGINES)
def test_trainer(engine: str, name: str, request: pytest.FixtureRequest) -> None:
    """With shared sequences, losses and weights after two steps are those of the same engine without."""
    world = world_of(request, engine)
    whole, shared = world(trained, engine, name, False), world(trained, engine, name, True)
    for (losses, changed), (true, true_changed) in zip(shared, whole, strict=True):
        assert losses == near(true)
        assert losses[0] != losses[1]
        assert float((changed - true_changed).norm() / true_changed.norm()) < rounding(STEPS)
