"""The strategies for Fabric. They have the names that the strategies for Trainer have in :mod:`lt_tiled`."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.fsdp import FSDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from lt_tiled.namespaces import register
from lt_tiled.strategies import base, deepspeed, fsdp, fsdp2

__all__ = [
    "TiledDDPStrategy",
    "TiledDeepSpeedStrategy",
    "TiledFSDPStrategy",
    "TiledModelParallelStrategy",
    "TiledSingleDeviceStrategy",
]


class TiledSingleDeviceStrategy(base.SingleDevice, base.TiledFabricStrategy, SingleDeviceStrategy):
    """Tiling and activation checkpointing on the device that Fabric's arguments name."""


class TiledDDPStrategy(base.TiledFabricStrategy, DDPStrategy):
    """Tiling and activation checkpointing under DDP, with all arguments of Fabric's :class:`DDPStrategy`."""


class TiledFSDPStrategy(fsdp.FSDP, base.TiledFabricStrategy, FSDPStrategy):
    """Like the strategy for Trainer, with all arguments of Fabric's :class:`FSDPStrategy`."""


class TiledModelParallelStrategy(fsdp2.FabricFSDP2, ModelParallelStrategy):
    """Like the strategy for Trainer, with all arguments of Fabric's :class:`ModelParallelStrategy`.

    Args:
        parallelize_fn: As in the parent. Without it, blocks become FSDP units, and the model the FSDP root: its own
            weights are all-gathered in its ``forward``, in the steps of a LightningModule, and in methods given to
            ``torch.distributed.fsdp.register_fsdp_forward_method``.
    """


class TiledDeepSpeedStrategy(deepspeed.DeepSpeed, base.TiledFabricStrategy, DeepSpeedStrategy):
    """Like the strategy for Trainer, with all arguments of Fabric's :class:`DeepSpeedStrategy`."""


register(STRATEGY_REGISTRY, globals())
