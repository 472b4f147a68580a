"""The tiled loss under every engine: the head's weight is an input, and its gradient is returned once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lt_tiled import tiled_linear_cross_entropy
from tests.engines.cells import ENGINES, draw, launch, set_up, step_on
from tests.engines.conftest import OnRanks
from tests.models import TinyLM, lm_loss, tiny_llama
from tests.parity import near
from tests.world import World

TIED = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""Engines under which blocks and embeddings may share weights."""


def losses(engine: str, tiled: bool, tied: bool) -> list[float]:
    """Three steps, on each rank with labels of which another part is ignored."""
    rank = dist.get_rank()
    fabric = launch(engine, tiling=3)
    net = TinyLM()
    if tied:
        net.head.weight = net.embed.weight
    model, optimizer = set_up(fabric, net, engine)
    found = []
    for step in range(3):
        ids = torch.randint(32, (2, 20 + 5 * rank), generator=torch.Generator().manual_seed(10 * step + rank))
        labels: Any = ids.clone()
        labels[0, : 3 + 9 * rank] = -100
        loss = model(ids, labels) if tiled else lm_loss(model(ids), labels)
        found.append(step_on(fabric, optimizer, loss))
    fabric.strategy.release()
    return found


@pytest.mark.table("fsdp2-False|(ddp|zero3)-True")
@pytest.mark.parametrize(
    ("engine", "tied"), [*[(engine, False) for engine in ENGINES], *[(engine, True) for engine in TIED]]
)
def test_losses(on_ranks: OnRanks, engine: str, tied: bool) -> None:
    """Three steps have the losses of whole logits, with labels ignored unevenly over tiles and ranks, also where the
    head's weight is the embedding's.
    """
    true = on_ranks.once(losses, engine, False, tied)
    assert on_ranks(losses, engine, True, tied) == [near(values) for values in true]


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False},
    "DoRA": {"target_modules": ["q_proj", "lm_head"], "init_lora_weights": False, "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def losses_of_adapters(engine: str, adapter: str, loss: bool | int) -> list[float]:
    """Three steps of a model with an adapter on its head."""
    fabric = launch(engine, tiling=3, loss=loss)
    llama = get_peft_model(tiny_llama(), LoraConfig(r=2, task_type="CAUSAL_LM", **ADAPTERS[adapter]))
    model, optimizer = set_up(fabric, llama, engine)
    found = []
    for step in range(3):
        ids = draw((2, 20 + 5 * step), dist.get_rank())
        output = model(input_ids=ids, labels=ids)
        assert (output.logits is None) is bool(loss)
        found.append(step_on(fabric, optimizer, output.loss))
    fabric.strategy.release()
    return found


@pytest.mark.table("DoRA-zero3|saved-(zero3|fsdp2)|LoRA-(zero3|fsdp)")
@pytest.mark.parametrize(
    "engine", [engine for engine in ENGINES if engine != "fsdp_flat"]
)  # which mixes no frozen ones
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_on_the_head(on_ranks: OnRanks, adapter: str, engine: str) -> None:
    """A head with an adapter, or a copy of it that trains, has the losses of full logits in tiles."""
    true = on_ranks(losses_of_adapters, engine, adapter, False)
    assert on_ranks(losses_of_adapters, engine, adapter, 3) == [near(values) for values in true]


def mean_gradients() -> tuple[Tensor, Tensor]:
    """The ranks' mean of the gradients of a loss with a global count, and the gradient of the mean over all ranks'
    labels.
    """
    rank = dist.get_rank()
    weight = torch.linspace(-1, 1, 32 * 8, dtype=torch.float64).view(32, 8).requires_grad_()
    batches = [torch.Generator().manual_seed(r) for r in range(2)]
    hidden = [torch.randn(4 + 9 * r, 8, generator=batches[r], dtype=torch.float64) for r in range(2)]
    labels = [torch.randint(32, (4 + 9 * r,), generator=batches[r]) for r in range(2)]
    (mine,) = torch.autograd.grad(
        tiled_linear_cross_entropy(hidden[rank], weight, labels[rank], num_shards=2, count="global"), weight
    )
    dist.all_reduce(mine)
    (true,) = torch.autograd.grad(F.cross_entropy(torch.cat(hidden) @ weight.t(), torch.cat(labels)), weight)
    return mine / 2, true


def test_mean_over_all_ranks(world: World) -> None:
    """With ``count="global"`` the mean of the ranks' gradients is that of the mean over all of their labels, however
    they are spread.
    """
    for mean, true in world(mean_gradients):
        torch.testing.assert_close(mean, true, rtol=1e-6, atol=1e-9)
