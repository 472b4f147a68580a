"""What nobody named and cannot be tiled, with several ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
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


class LitMixing(LitTiny):
    """Mixes tokens in the MLP of its first block, on all ranks or on one alone."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self.rank = rank

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            block = self.net.blocks[0]
            block.mlp = Mixing(block.mlp, self.rank in (None, dist.get_rank()))


def losses(engine: str, tiled: bool) -> tuple[list[float], list[int]]:
    module = LitMixing()
    options: dict[str, Any] = {"tiling": 4} if tiled else {"tiling": None, "activation_checkpointing": None}
    chosen, seen = strategy(lt_tiled, engine, **options), Seen()
    trainer(chosen, devices=dist.get_world_size(), callbacks=[seen]).fit(module)
    return module.losses, seen.tiles


class Seen(pl.Callback):
    """Notes the tiles of each module at the end."""

    tiles: list[int] = []

    def on_train_end(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        prepared = run.strategy.prepared  # type: ignore[attr-defined]
        self.tiles = [row.tiles for row in prepared[0].report().tiled] if prepared else []


@pytest.mark.table("ddp|zero1|zero2")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_that_mixes_stays_untiled(engine: str, on_ranks: OnRanks) -> None:
    """An MLP that ``auto`` found and that mixes tokens runs untiled under each engine, and training goes on."""
    plain = on_ranks(losses, engine, False)
    for (expected, _), (found, _) in zip(plain, on_ranks(losses, engine, True), strict=True):
        assert found == near(expected)


def refused() -> tuple[str, str]:
    chosen = strategy(lt_tiled, "zero2", tiling=4)
    try:
        trainer(chosen, devices=dist.get_world_size()).fit(LitMixing(rank=0))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_ranks_that_differ_are_refused(deepspeed_world: World) -> None:
    """Where one rank alone cannot tile a module, all ranks raise before the first backward pass under ZeRO-2."""
    for kind, text in deepspeed_world(refused):
        assert kind == "RuntimeError"
        assert "can run in tiles on some ranks and not on others" in text


def read(module: nn.Module, args: Any, output: Tensor) -> None:
    """A hook that reads a norm's output, which then runs before the MLP and not in its tiles."""
    float(output.detach().float().sum())


class LitHooked(LitTiny):
    """One rank has a hook on the norm before an MLP."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            if dist.get_rank() == self.rank:
                self.net.blocks[0].norm2.register_forward_hook(read)


def hooked(engine: str, rank: int) -> tuple[list[float], str]:
    """The losses with a hook on one rank, or the message of the error."""
    module = LitHooked(rank)
    try:
        trainer(strategy(lt_tiled, engine, tiling=4), devices=dist.get_world_size()).fit(module)
    except RuntimeError as error:
        return [], str(error)
    return module.losses, ""


@pytest.mark.parametrize("engine", ["zero1", "zero2"])
def test_a_norm_with_a_hook_on_one_rank(engine: str, deepspeed_world: World) -> None:
    """A norm that a hook on one rank keeps out of the MLP's tiles trains as without it, or all ranks raise."""
    plain = deepspeed_world(hooked, engine, -1)
    for (expected, _), (found, message) in zip(plain, deepspeed_world(hooked, engine, 0), strict=True):
        assert found == expected or "can run in tiles on some ranks and not on others" in message
