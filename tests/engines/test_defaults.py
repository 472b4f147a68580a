"""What nobody named and cannot be tiled, with several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import lt_tiled
from tests.engines.cells import ENGINES, strategy
from tests.engines.conftest import OnRanks
from tests.lit import LitTiny, trainer
from tests.parity import near
from tests.world import World

pytestmark = pytest.mark.self_checks


class Mixing(nn.Module):
    """Looks like an MLP, and subtracts the mean over all tokens."""

    def __init__(self, mlp: nn.Module, mixes: bool = True) -> None:
        super().__init__()
        self.mlp, self.mixes = mlp, mixes

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x)
        return y - y.mean(1, keepdim=True) if self.mixes else y


def read(module: nn.Module, args: Any, output: Tensor) -> None:
    """A hook that reads a norm's output, which then runs before the MLP and not in its tiles."""
    float(output.detach().float().sum())


class Differs(LitTiny):
    """Some ranks mix tokens in the MLP of the first block, or have a hook on the norm before it."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.what, self.ranks = what, ranks

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            block, here = self.net.blocks[0], dist.get_rank() in self.ranks
            if self.what == "mixes":
                block.mlp = Mixing(block.mlp, here)
            elif here:
                block.norm2.register_forward_hook(read)


def losses(engine: str, what: str, ranks: tuple[int, ...], tiled: bool = True) -> tuple[list[float], str]:
    """The losses, or the message of the error."""
    module = Differs(what, ranks)
    options: dict[str, Any] = {"tiling": 4} if tiled else {"tiling": None, "activation_checkpointing": None}
    try:
        trainer(strategy(lt_tiled, engine, **options), devices=dist.get_world_size()).fit(module)
    except RuntimeError as error:
        return [], str(error)
    return module.losses, ""


@pytest.mark.table("ddp|zero1|zero2")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_that_mixes_stays_untiled(engine: str, on_ranks: OnRanks) -> None:
    """An MLP that ``auto`` found and that mixes tokens runs untiled under each engine, and training goes on."""
    plain = on_ranks(losses, engine, "mixes", (0, 1), False)
    assert on_ranks(losses, engine, "mixes", (0, 1)) == [(near(expected), "") for expected, _ in plain]


@pytest.mark.parametrize("what", ["mixes", "hooked"])
def test_ranks_that_differ(what: str, deepspeed_world: World) -> None:
    """Where one rank alone cannot tile a module, or its hook keeps a norm out of the tiles, ranks under ZeRO-2 train as
    without tiles: gradients arrive in one order.
    """
    plain = deepspeed_world(losses, "zero2", what, (0,), False)
    for (expected, _), (found, message) in zip(plain, deepspeed_world(losses, "zero2", what, (0,)), strict=True):
        assert found == near(expected), message
