"""Every engine, in Trainer and in Fabric, trains on two ranks as it does untiled, whatever is tiled, checkpointed and
offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.engines.cells import ENGINES, MODES, SHARDED, in_fabric, in_trainer
from tests.engines.conftest import OnRanks
from tests.parity import near
from tests.world import World

pytestmark = pytest.mark.self_checks

LOOPS = {"trainer": in_trainer, "fabric": in_fabric}


@pytest.mark.table("trainer-.*-loss|fabric-(ddp|fsdp2|zero3)-loss|.*-ddp-.*|fabric-(fsdp|fsdp2|zero2)-tiled")
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", LOOPS)
def test_losses_are_the_untiled_ones(loop: str, engine: str, mode: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """Losses of several optimizer steps and of validation equal the untiled run's, on sequences of unequal length in
    Fabric.
    """
    untiled = on_ranks.once(LOOPS[loop], engine, "untiled", "")
    shards = (4, 4) if loop == "trainer" else (5, 2)
    for rank, (plain, tiled) in enumerate(
        zip(untiled, on_ranks(LOOPS[loop], engine, mode, str(tmp_path)), strict=True)
    ):
        assert len(plain.losses) >= 3
        assert plain.losses[-1] != plain.losses[0]
        assert tiled.losses == near(plain.losses)
        assert tiled.val_losses == near(plain.val_losses)
        assert (plain.tiles, plain.blocks) == ([], 0)
        assert tiled.tiles == [shards[rank]] * 2
        assert tiled.blocks == (0 if mode == "tiled" else 2)
        assert (tiled.disk_bytes > 0) == (mode == "loss")
        assert tiled.left == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.table("trainer-(zero3|fsdp|fsdp2)")
@pytest.mark.parametrize("engine", SHARDED)
@pytest.mark.parametrize("loop", LOOPS)
def test_engines_agree(loop: str, engine: str, on_ranks: OnRanks, tmp_path: Path) -> None:
    """A sharded engine with everything on has the losses of DDP with everything off."""
    alike = {"built": True} if loop == "trainer" else {"accumulate": False}  # zero.Init has initial weights of its own
    plain = on_ranks.once(partial(LOOPS[loop], **alike), "ddp", "untiled", "")
    sharded = on_ranks(partial(LOOPS[loop], **alike), engine, "loss", str(tmp_path))
    assert [r.losses for r in sharded] == [near(r.losses) for r in plain]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


@pytest.mark.table("ddp|fsdp2|zero3")
@pytest.mark.parametrize("engine", ENGINES)
def test_one_device(engine: str, one_rank: World, tmp_path: Path) -> None:
    """Every engine runs on one device, ZeRO-3 too, with the losses of plain training."""
    (plain,) = one_rank(partial(in_trainer, built=True), "ddp", "untiled", str(tmp_path))
    (tiled,) = one_rank(partial(in_trainer, built=True), engine, "disk", str(tmp_path))
    assert tiled.losses == near(plain.losses)
    assert tiled.disk_bytes > 0
    (plain,) = one_rank(partial(in_fabric, accumulate=False), "ddp", "untiled", str(tmp_path))
    (tiled,) = one_rank(partial(in_fabric, accumulate=False), engine, "disk", str(tmp_path))
    assert tiled.losses == near(plain.losses)
