"""FSDP2 and tensor parallelism (``fully_shard``, ``parallelize_module``), for Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from lt_tiled.strategies._mixin import TiledStrategy
from lt_tiled.strategies._model_parallel import ModelParallelNeeds
from lt_tiled.strategies._units import callable_children


class TiledModelParallelStrategy(ModelParallelNeeds, TiledStrategy, ModelParallelStrategy):
    """Tiling and checkpointing under FSDP2, with all of :class:`ModelParallelStrategy`'s arguments.

    A model that ``configure_model`` did not parallelize is sharded by blocks, and each child of the LightningModule
    around them, which then has to be called through its ``forward``. ``"auto"`` sizes are all ranks for data and one
    for tensors, or what the other leaves.

    Raises:
        ValueError: At setup, if a size does not divide the ranks, a tiled module holds units, or the model cannot be
            sharded by blocks.
    """

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        self.shard(self.lightning_module, callable_children(self.lightning_module))
        super().setup(trainer)
        self.agree(self.lightning_module)
