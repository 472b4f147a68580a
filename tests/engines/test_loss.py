"""The tiled loss under every engine: the head's weight is an input, and its gradient is returned once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp.wrap import CustomPolicy

from lt_tiled import tiled_linear_cross_entropy
from tests.engines.cells import ENGINES, launch, set_up, step_on
from tests.engines.conftest import OnRanks
from tests.models import TinyLM, lm_loss, tiny_llama
from tests.parity import near
from tests.world import RanksFailed, World


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


@pytest.mark.table("ddp|fsdp2|fsdp_flat|zero3")
@pytest.mark.parametrize("engine", ENGINES)
def test_losses(on_ranks: OnRanks, engine: str) -> None:
    """Three steps have the losses of whole logits, with labels ignored unevenly over tiles and ranks."""
    true = on_ranks.once(losses, engine, False, False)
    assert on_ranks(losses, engine, True, False) == [near(values) for values in true]


@pytest.mark.table("ddp|zero3")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_tied_embeddings(on_ranks: OnRanks, engine: str) -> None:
    """The same where the head's weight is the embedding's."""
    true = on_ranks.once(losses, engine, False, True)
    assert on_ranks(losses, engine, True, True) == [near(values) for values in true]


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


def with_logits(engine: str, loss: bool, head_alone: bool = True) -> list[float]:
    """Two steps of a loss of a model plus one of its logits, each with a metric of both before the update, and an
    evaluation.
    """
    torch.manual_seed(0)
    net: Any = tiny_llama().double()
    units = CustomPolicy(lambda module: module is net.lm_head or "DecoderLayer" in type(module).__name__)
    options = {"auto_wrap_policy": units} if engine == "fsdp" and head_alone else {}
    fabric = launch(engine, tiling=3, loss=loss, **options)
    model, optimizer = set_up(fabric, net, engine)
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for _ in range(2):
        output = model(input_ids=ids, labels=ids)
        with torch.no_grad():
            found.append(float(output.logits[:, :-1].argmax(-1).eq(ids[:, 1:]).double().mean()))
        found.append(step_on(fabric, optimizer, output.loss + 0.1 * torch.logsumexp(output.logits, -1).mean()))
    with torch.no_grad():
        found.append(float(model(input_ids=ids, labels=ids).logits.std()))
    fabric.strategy.release()
    return found


@pytest.mark.table("fsdp2|zero3")
@pytest.mark.parametrize("engine", ENGINES)
def test_logits_of_an_output(on_ranks: OnRanks, engine: str) -> None:
    """Metrics, gradients and evaluations that read ``output.logits`` are those of whole logits."""
    true = on_ranks(with_logits, engine, False)
    assert on_ranks(with_logits, engine, True) == [pytest.approx(values, rel=1e-6) for values in true]


def test_logits_of_a_head_that_fsdp_shards_with_others(world: World) -> None:
    """FSDP shards the weights of its root unit when the forward pass ends, and logits that are read later say so."""
    with pytest.raises(RanksFailed, match=r"FSDP has sharded the weights of its head.*auto_wrap_policy.*loss=False"):
        world(with_logits, "fsdp", True, False)
