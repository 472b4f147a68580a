"""FSDP's own arguments, wrapping by hand, and a wrapped model that other stages and trainers use."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, wrap

import lt_tiled
from tests.engines.cells import error_of, strategy
from tests.lit import LitTiny, replaced, trainer
from tests.models import Block, GatedMLP
from tests.parity import near
from tests.world import World


def fit_validate_fit(engine: str) -> tuple[list[float], list[float], int]:
    """Fit, validate and fit again, one wrapped model and one trainer."""
    module = LitTiny()
    run = trainer(
        strategy(lt_tiled, engine, tiling=4),
        devices=dist.get_world_size(),
        max_epochs=1,
        max_steps=-1,
        num_sanity_val_steps=0,
    )
    run.fit(module)
    run.validate(module, verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module)
    return module.losses, module.val_losses, replaced(module)


def test_fit_then_validate_then_fit(world: World) -> None:
    """One model goes through ``fit``, ``validate`` and ``fit`` as under DDP, though FSDP has wrapped it by then."""
    plain, found = world(fit_validate_fit, "ddp"), world(fit_validate_fit, "fsdp")
    for (losses, val_losses, _), (sharded, sharded_val, left) in zip(plain, found, strict=True):
        assert sharded == near(losses)
        assert sharded_val == near(val_losses)
        assert left == 0


def fit_then_another(engine: str, keep: bool) -> tuple[str, str]:
    """A second strategy gets the model that the first one wrapped, while that lives or not."""
    module = LitTiny()
    first = trainer(strategy(lt_tiled, engine, tiling=4), devices=dist.get_world_size())
    first.fit(module)
    if not keep:
        del first
        module.trainer = None
        gc.collect()
    second = trainer(strategy(lt_tiled, engine, tiling=4), devices=dist.get_world_size())
    return error_of(lambda: second.validate(module, verbose=False))


def test_two_fsdp_strategies(world: World) -> None:
    """A second strategy goes on with the first one's wrapped model; once that is gone, it says what to do."""
    assert world(fit_then_another, "fsdp", True) == [("", "no error")] * 2
    for kind, text in world(fit_then_another, "fsdp", False):
        assert kind == "ValueError"
        assert "was wrapped by FSDP for a trainer that no longer exists: keep that trainer" in text


class WrapsByHand(LitTiny):
    """Wraps its blocks in ``configure_model``, in the context that the strategy gives."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.net.blocks = nn.ModuleList(wrap(block) for block in self.net.blocks)


def fit_losses(engine: str, model: type[LitTiny], options: dict[str, Any]) -> list[float]:
    module = model()
    trainer(strategy(lt_tiled, engine, **{"tiling": 4, **options}), devices=dist.get_world_size()).fit(module)
    return module.losses


@pytest.mark.table("policy of norms|cpu offload|by hand")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LitTiny, {"auto_wrap_policy": {Block}}),
        (LitTiny, {"auto_wrap_policy": ModuleWrapPolicy({GatedMLP})}),
        (LitTiny, {"auto_wrap_policy": {nn.LayerNorm}, "tiling": False}),
        (LitTiny, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (1, 2)}),
        (LitTiny, {"sharding_strategy": "SHARD_GRAD_OP"}),
        (LitTiny, {"sharding_strategy": "NO_SHARD"}),
        (LitTiny, {"cpu_offload": True}),
        (WrapsByHand, {}),
    ],
    ids=[
        "policy of blocks",
        "policy of tiled modules",
        "policy of norms",
        "hybrid",
        "gradients only",
        "no sharding",
        "cpu offload",
        "by hand",
    ],
)
def test_fsdp_arguments(model: type[LitTiny], options: dict[str, Any], world: World) -> None:
    """FSDP's own arguments, and wrapping by hand, work on the CPU and give DDP's losses."""
    plain = world(fit_losses, "ddp", LitTiny, {})
    assert world(fit_losses, "fsdp", model, options) == [near(losses) for losses in plain]
