"""``CausalLM`` on sharded engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lt_tiled.lm import CausalLM
from lt_tiled.verification.steps import full_gradients as full_weights  # of those that train
from tests.lit import sequences, trainer
from tests.lm.test_causal import LLAMA
from tests.models import tiny_llama
from tests.world import OnRanks, World


class Watched(CausalLM):
    """Notes its whole weights before the first step."""

    def on_train_start(self) -> None:
        self.weights = full_weights(self.trainer.model, self.model)


def causal(_: str, name: str, **source: Any) -> dict[str, Tensor]:
    pl.seed_everything(1, verbose=False)
    model = Watched(**source)
    loader = DataLoader([{"input_ids": x} for x in sequences(4)])  # type: ignore[arg-type]
    trainer(name, devices=dist.get_world_size(), max_steps=1).fit(model, loader)
    return model.weights


@pytest.mark.parametrize(("engine", "name"), [("fsdp", "tiled_fsdp"), ("zero3", "tiled_deepspeed_stage_3")])
def test_causal_lm(engine: str, name: str, on_ranks: OnRanks) -> None:
    """A Hugging Face model has its own initial weights, also built sharded."""
    for weights in on_ranks(partial(causal, config=LLAMA), engine, name):
        (spread,) = {float(w.std()) for path, w in weights.items() if path.endswith("layers.0.mlp.gate_proj.weight")}
        assert spread == pytest.approx(0.02, rel=0.1)  # transformers' initializer_range; torch's default gives 0.1


def test_pretrained_weights_under_zero3(deepspeed_world: World, tmp_path: Path) -> None:
    """A model from a local directory has its weights when ZeRO-3 builds it sharded."""
    torch.manual_seed(3)
    llama = tiny_llama()
    llama.save_pretrained(tmp_path)
    run = partial(causal, path=str(tmp_path))
    for weights in deepspeed_world(run, "zero3", "tiled_deepspeed_stage_3"):
        for path, weight in llama.named_parameters():
            torch.testing.assert_close(weights[path], weight.detach())
