"""The strategies for Trainer, which :mod:`lt_tiled` exports."""

from lightning.pytorch import strategies

from lt_tiled.namespaces import register
from lt_tiled.strategies import base, deepspeed, fsdp, fsdp2


class TiledSingleDeviceStrategy(base.SingleDevice, base.TiledTrainerStrategy, strategies.SingleDeviceStrategy):
    """Tiling and activation checkpointing on the device that the Trainer's arguments name."""


class TiledDDPStrategy(base.TiledTrainerStrategy, strategies.DDPStrategy):
    """Tiling and activation checkpointing under DDP, with all arguments of :class:`DDPStrategy`."""


class TiledFSDPStrategy(fsdp.TrainerFSDP, strategies.FSDPStrategy):
    """Tiling and activation checkpointing under FSDP1, with all arguments of :class:`FSDPStrategy`.

    Without ``auto_wrap_policy`` each block is an FSDP unit. With ``activation_checkpointing_policy`` Lightning
    recomputes blocks, and ``activation_checkpointing`` leaves these to it. A model stays wrapped from ``fit`` to
    ``validate``, ``test`` or ``predict``. Gradients can be clipped by their norm over all ranks.

    Raises:
        ValueError: In the first step, if a tiled module contains FSDP units.
    """


class TiledModelParallelStrategy(fsdp2.TrainerFSDP2, strategies.ModelParallelStrategy):
    """Tiling and activation checkpointing under FSDP2, with all arguments of :class:`ModelParallelStrategy`.

    A module needs no ``configure_model``. If it does not parallelize the model there, each block becomes an FSDP unit,
    and the LightningModule becomes the FSDP root: its own weights are all-gathered in its ``forward`` and in its steps.
    ``"auto"`` sizes use all ranks for data parallelism, or the ranks that the other size leaves.

    Raises:
        ValueError: At setup, if the model cannot be sharded by blocks; in the first step, if a tiled module contains
            FSDP units.
    """


class TiledDeepSpeedStrategy(deepspeed.DeepSpeed, base.TiledTrainerStrategy, strategies.DeepSpeedStrategy):
    """Tiling and activation checkpointing under DeepSpeed, with all arguments of :class:`DeepSpeedStrategy`."""


register(strategies.StrategyRegistry, globals())
