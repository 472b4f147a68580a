"""FSDP2 and tensor parallelism (``fully_shard``, ``parallelize_module``), for Trainer."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from lt_tiled.strategies._mixin import TiledStrategy
from lt_tiled.strategies._model_parallel import ModelParallelNeeds
from lt_tiled.strategies._units import is_parallelized, refuse_units_in_tiled_modules, shard_blocks


class TiledModelParallelStrategy(ModelParallelNeeds, TiledStrategy, ModelParallelStrategy):
    """Tiling and checkpointing under FSDP2, with all of :class:`ModelParallelStrategy`'s arguments.

    A model that ``configure_model`` did not parallelize is sharded by blocks, for which ``tensor_parallel_size`` has to be 1. With a
    number there, ``data_parallel_size="auto"`` is what remains of the ranks.

    Raises:
        ValueError: At setup, if a tiled module holds units, or the model cannot be sharded by blocks.
    """

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        if not is_parallelized(self.lightning_module):
            self._shard(self.lightning_module)
        super().setup(trainer)
        refuse_units_in_tiled_modules(self.lightning_module)

    def _shard(self, module: pl.LightningModule) -> None:
        name = type(module).__name__
        mesh = self.mesh_to_shard_over(name)
        if own := [weight for weight, _ in module.named_parameters(recurse=False)]:
            # Lightning calls training_step, not forward, so that the LightningModule itself cannot be a unit.
            raise ValueError(f"{name} holds {', '.join(own)} itself: move what has weights into a module of its own, or call fully_shard.")
        for child in module.children():
            if any(True for _ in child.parameters()):
                shard_blocks(child, mesh)
