"""Several engines of DeepSpeed for one model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

import lt_tiled
from tests.engines.cells import strategy
from tests.lit import Ids, LitTiny, trainer
from tests.parity import near
from tests.world import World


class AllStages(LitTiny):
    """Evaluates three batches on each rank: after a single one, DeepSpeed's next engine dies without tiles, too."""

    def test_step(self, ids: Tensor, index: int) -> None:
        self.validation_step(ids, index)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Ids(12), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader


def losses_after(stage: str | None, two_trainers: bool, tiled: bool) -> list[float]:
    """The losses of a fit under ZeRO-3 after another stage, each with an engine of its own."""
    options: dict[str, Any] = {"tiling": 4} if tiled else {"tiling": None, "activation_checkpointing": None}
    module = AllStages()
    run = trainer(strategy(lt_tiled, "zero3", **options), devices=2)
    if stage is not None:
        getattr(run, stage)(module)
    if two_trainers:
        run = trainer(strategy(lt_tiled, "zero3", **options), devices=2)
    module.losses.clear()
    run.fit(module)
    return module.losses


@pytest.mark.table("validate-True")
@pytest.mark.parametrize("two_trainers", [False, True])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_before_fit(stage: str, two_trainers: bool) -> None:
    """A fit under ZeRO-3 has the losses of an untiled one in a fresh process, whatever its model ran before."""
    found: list[list[float]] = []
    for arguments in ((None, False, False), (stage, two_trainers, True)):
        world = World(2)  # an engine of an earlier test in the process would hide what goes wrong
        try:
            found.append(world(losses_after, *arguments)[0])
        finally:
            world.close()
    plain, tiled = found
    assert len(plain) == 3
    assert tiled == near(plain)
