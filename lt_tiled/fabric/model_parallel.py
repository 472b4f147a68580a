"""FSDP2 and tensor parallelism (``fully_shard``, ``parallelize_module``), for Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lt_tiled.fabric._mixin import TiledStrategy
from lt_tiled.strategies._model_parallel import ModelParallelNeeds
from lt_tiled.strategies._units import is_parallelized, refuse_units_in_tiled_modules, shard_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TiledModelParallelStrategy(ModelParallelNeeds, TiledStrategy, ModelParallelStrategy):
    """Tiling and checkpointing under FSDP2, with all of :class:`ModelParallelStrategy`'s arguments.

    Args:
        parallelize_fn: As the parent's; without it the model is sharded by blocks, for which ``tensor_parallel_size`` has to be 1.

    Raises:
        ValueError: At setup, if a tiled module holds units, or the model cannot be sharded by blocks.
    """

    def __init__(self, parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None, **kwargs: Any) -> None:
        super().__init__(parallelize_fn=parallelize_fn or self._shard, **kwargs)

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return module if is_parallelized(module) else shard_blocks(module, self.mesh_to_shard_over(type(module).__name__))

    @override
    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *args: Any) -> Any:
        # fully_shard makes new parameters, and with the old ones an optimizer would step without any effect.
        names = {id(weight): name.replace("_orig_mod.", "") for name, weight in module.named_parameters()}
        result = super().setup_module_and_optimizers(module, optimizers, *args)
        sharded = {name.replace("_orig_mod.", ""): weight for name, weight in result[0].named_parameters()}
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"] = [sharded[names[id(weight)]] if id(weight) in names else weight for weight in group["params"]]
        return result

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        module = super().setup_module(module)
        refuse_units_in_tiled_modules(module)
        return module
