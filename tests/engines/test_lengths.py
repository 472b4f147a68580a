"""Ranks whose sequences differ in length, so that some run tiles and others do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engines.cells import ENGINES, draw, launch, set_up, step_on
from tests.engines.conftest import OnRanks
from tests.models import GatedMLP, H, PythonNorm
from tests.parity import SPREADS, spread_of

LENGTHS = {"4096 and 512": (4096, 512), "1 and 4096": (1, 4096), "4096 and 0": (4096, 0)}


class Gate(nn.Module):
    """What stands for attention, whose cost would hide that of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, n: Tensor) -> Tensor:
        return torch.tanh(self.q(n)) * self.k(n)


class Layer(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.attention, self.pre_mlp_norm = PythonNorm(), Gate(), nn.LayerNorm(H)
        self.mlp, self.post_mlp_norm = GatedMLP(), nn.RMSNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Layers(nn.Module):
    """Two of them between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, H), nn.Linear(H, 32)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(engine: str, lengths: tuple[int, int], tiled: bool) -> tuple[list[float], list[list[str]]]:
    """Three steps; the losses, and the names of the weights as the gradients of each step arrived."""
    policies = {} if tiled else {"tiling": None, "activation_checkpointing": None}
    fabric = launch(engine, **policies)
    net = Layers()
    model, optimizer = set_up(fabric, net, engine)
    arrived: list[str] = []
    if engine in ("zero1", "zero2"):
        for name, p in net.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    losses, orders = [], []
    for step in range(3):  # each length on each rank, and the losses behind the gradients of both
        ids = draw((1, lengths[(dist.get_rank() + step) % 2]), dist.get_rank())
        loss = (model(ids) * torch.linspace(-1, 1, 32)).square().sum() / 2**17
        losses.append(step_on(fabric, optimizer, loss))
        orders.append(arrived.copy())
        arrived.clear()
    fabric.strategy.release()
    return losses, orders


def spread(engine: str, lengths: tuple[int, int]) -> float:
    """Return how far losses are apart that differ by rounding alone, over the ranks, at least float32's epsilon."""
    apart = torch.tensor(spread_of(lambda: train(engine, lengths, False)[0]), dtype=torch.float64)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return float(apart)


@pytest.mark.self_checks
@pytest.mark.table("(ddp|fsdp2|zero3)-4096 and 0|zero1-1 and 4096")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "fsdp_flat"])
def test_losses(engine: str, lengths: tuple[int, int], on_ranks: OnRanks) -> None:
    """Whatever the lengths on the ranks, every rank has the losses of the untiled DDP run with the default policies."""
    plain = on_ranks.once(train, "ddp", lengths, False)
    tiled = on_ranks(train, engine, lengths, True)
    off = on_ranks.once(spread, "ddp", lengths)[0]
    assert [losses for losses, _ in tiled] == [pytest.approx(losses, rel=SPREADS * off) for losses, _ in plain]


@pytest.mark.self_checks
@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_the_order_of_the_gradients(engine: str, on_ranks: OnRanks) -> None:
    """Under ZeRO-1 and 2, gradients arrive in one order on every rank, in as many tiles as its length gives."""
    for lengths in ((4096, 512), (1, 4096)):
        first, second = (orders for _, orders in on_ranks(train, engine, lengths, True))
        assert first == second == [first[0]] * 3
        assert len(first[0]) == len(set(first[0])) == 25
