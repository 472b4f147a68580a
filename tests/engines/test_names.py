"""The registered names, trained with; and ``CausalLM`` on sharded engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled.lm import CausalLM
from tests.engines.conftest import OnRanks
from tests.lit import Ids, LitTiny, trainer
from tests.models import tiny_llama
from tests.parity import near
from tests.world import World

LLAMA = {"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def by_name(_: str, name: str) -> tuple[list[float], set[int]]:
    model = LitTiny()
    model.configure_model()
    trainer(name, devices=dist.get_world_size()).fit(model)
    return model.losses, model.forwards_replaced


STAGES = ("", "_stage_1", "_stage_2", "_stage_3", "_stage_3_offload")


@pytest.mark.table("tiled_(fsdp2|deepspeed|deepspeed_stage_3|deepspeed_stage_3_offload)")
@pytest.mark.parametrize("name", ["tiled_fsdp", "tiled_fsdp2", *(f"tiled_deepspeed{stage}" for stage in STAGES)])
def test_registered_names_train(name: str, on_ranks: OnRanks) -> None:
    """``Trainer(strategy=name)`` patches the model, and has DDP's losses."""
    plain = on_ranks.once(by_name, "ddp", "ddp")
    for (losses, _), (named, replaced) in zip(
        plain, on_ranks(by_name, "zero" if "deepspeed" in name else "fsdp", name), strict=True
    ):
        assert named == near(losses)
        assert replaced == {6}


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": Ids()[index]}


class Inspect(pl.Callback):
    """Notes the spread of a weight before the first step, gathered over the ranks, and the sizes of the optimizer's
    groups.
    """

    def on_train_start(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        weight = next(p for name, p in module.named_parameters() if name.endswith("gate_proj.weight"))
        if hasattr(weight, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([weight]):
                self.spread = float(weight.detach().std())
        else:
            self.spread = float(getattr(weight, "full_tensor", lambda: weight)().detach().std())


class Grouped(CausalLM):
    """Remembers its optimizer's groups."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        self.groups = [(len(group["params"]), group["weight_decay"]) for group in made["optimizer"].param_groups]
        return made


def causal(_: str, name: str) -> tuple[float, list[tuple[int, float]]]:
    pl.seed_everything(1, verbose=False)
    model, look = Grouped(config=LLAMA), Inspect()
    loader = torch.utils.data.DataLoader(Words(), batch_size=1)
    trainer(name, devices=dist.get_world_size(), max_steps=1, callbacks=[look]).fit(model, loader)
    return look.spread, model.groups


NAMES = ["tiled_ddp", "tiled_fsdp", "tiled_fsdp2", "tiled_deepspeed_stage_2", "tiled_deepspeed_stage_3"]


@pytest.mark.parametrize("name", NAMES)
def test_causal_lm(name: str, on_ranks: OnRanks) -> None:
    """A Hugging Face model has its own initial weights, also built sharded, and its norms alone are spared from weight
    decay, also under FSDP, whose sharded weights have one dimension each.
    """
    for spread, groups in on_ranks(causal, "zero" if "deepspeed" in name else "ddp", name):
        if name != "tiled_fsdp":  # whose weights are parts here
            assert spread == pytest.approx(0.02, rel=0.1)  # transformers' initializer_range; torch's default gives 0.1
        assert groups == [(2 + 7 * 2, 0.1), (5, 0.0)]


class Pretrained(CausalLM):
    """Gathers a weight before the first step."""

    def on_train_start(self) -> None:
        import deepspeed

        weight = self.model.model.layers[1].mlp.up_proj.weight
        with deepspeed.zero.GatheredParameters([weight]):
            self.seen = weight.detach().clone()


def from_pretrained(path: str) -> Tensor:
    model = Pretrained(path=path)
    trainer("tiled_deepspeed_stage_3", devices=2, max_steps=1).fit(
        model, torch.utils.data.DataLoader(Words(), batch_size=1)
    )
    return model.seen


def test_pretrained_weights_under_zero3(deepspeed_world: World, tmp_path: Path) -> None:
    """A model from a local directory has its weights when ZeRO-3 builds it sharded."""
    torch.manual_seed(3)
    llama = tiny_llama()
    llama.save_pretrained(tmp_path)
    for weight in deepspeed_world(from_pretrained, str(tmp_path)):
        torch.testing.assert_close(weight, llama.model.layers[1].mlp.up_proj.weight.detach())
