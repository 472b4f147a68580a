"""DeepSpeed ZeRO-1, 2 and 3, for Trainer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lt_tiled._log import warn
from lt_tiled.strategies._deepspeed import DeepSpeedNeeds
from lt_tiled.strategies._mixin import TiledStrategy


class TiledDeepSpeedStrategy(DeepSpeedNeeds, TiledStrategy, DeepSpeedStrategy):
    """Tiling and checkpointing under DeepSpeed, with all of :class:`DeepSpeedStrategy`'s arguments.

    Raises:
        ModuleNotFoundError: If deepspeed is not installed.
        ValueError: If ``cpu_checkpointing`` and ``checkpointing`` are both given.
    """

    guarded = DeepSpeedStrategy

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if (batches := trainer.accumulate_grad_batches) > 1 and trainer.state.fn == TrainerFn.FITTING:
            warn(
                f"Lightning and DeepSpeed each divide the loss by accumulate_grad_batches={batches}: gradients are {batches} times smaller"
                " than with other strategies, tiled or not (https://github.com/Lightning-AI/pytorch-lightning/issues/6170)."
            )
        super().setup(trainer)

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with self.sharded_context(super().model_sharded_context):
            yield
