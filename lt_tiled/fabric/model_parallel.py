"""FSDP2 and tensor parallelism (``fully_shard``, ``parallelize_module``), for Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_tiled.fabric._mixin import TiledStrategy
from lt_tiled.modules.find import plain_name
from lt_tiled.strategies._model_parallel import ModelParallelNeeds

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TiledModelParallelStrategy(ModelParallelNeeds, TiledStrategy, ModelParallelStrategy):
    """Tiling and checkpointing under FSDP2, with all of :class:`ModelParallelStrategy`'s arguments.

    ``"auto"`` sizes are all ranks for data and one for tensors, or what the other leaves.

    Args:
        parallelize_fn: As the parent's; without it the model is sharded by blocks.

    Raises:
        ValueError: At setup, if a size does not divide the ranks, a tiled module holds units, or the model cannot be
            sharded by blocks.
    """

    def __init__(
        self, parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(parallelize_fn=parallelize_fn or (lambda module, mesh: module), **kwargs)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        given: Any = self._parallelize_fn

        def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            parallelized: nn.Module = given(module, mesh)
            self.shard(parallelized, [parallelized])
            self.agree(parallelized)
            return parallelized

        self._parallelize_fn = parallelize  # type: ignore[assignment]
        try:
            return super().setup_module(module)  # type: ignore[no-any-return]
        finally:
            self._parallelize_fn = given

    @override
    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *args: Any) -> Any:
        # fully_shard makes new parameters, and with the old ones an optimizer would step without any effect.
        names = {id(weight): plain_name(name) for name, weight in module.named_parameters()}
        result = super().setup_module_and_optimizers(module, optimizers, *args)
        sharded = {plain_name(name): weight for name, weight in result[0].named_parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for index, weight in enumerate(group["params"]):
                    if id(weight) in names:
                        group["params"][index] = new = sharded[names[id(weight)]]
                        if new is not weight and weight in optimizer.state:
                            optimizer.state[new] = _sharded_state(optimizer.state.pop(weight), weight, new)
        return result


def _sharded_state(state: dict[str, Any], weight: nn.Parameter, new: nn.Parameter) -> dict[str, Any]:
    """An optimizer's state of one weight, sharded as the weight is."""
    if not isinstance(new, DTensor):
        return state
    alike = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == weight.shape}
    return state | {
        name: distribute_tensor(value.to(new.device), new.device_mesh, new.placements) for name, value in alike.items()
    }
