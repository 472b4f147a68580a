"""DeepSpeed ZeRO-1, 2 and 3, for Trainer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

from lt_tiled.strategies._deepspeed import DeepSpeedNeeds
from lt_tiled.strategies._device import on_cpu
from lt_tiled.strategies._mixin import TiledStrategy


class TiledDeepSpeedStrategy(DeepSpeedNeeds, TiledStrategy, DeepSpeedStrategy):
    """Tiling and checkpointing under DeepSpeed, with all of :class:`DeepSpeedStrategy`'s arguments.

    Raises:
        ModuleNotFoundError: If deepspeed is not installed.
        ValueError: If ``cpu_checkpointing`` and ``checkpointing`` are both given.
    """

    @override
    def setup_environment(self) -> None:
        if not on_cpu(self):
            return super().setup_environment()
        self.prepare_for_cpu()
        return super(DeepSpeedStrategy, self).setup_environment()  # without the parent's guard against all but CUDA

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with self.sharded_context(super().model_sharded_context):
            yield
