"""FSDP2 and tensor parallelism (``fully_shard``, ``parallelize_module``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lt_tiled._log import inform, warn
from lt_tiled.strategies.base import TiledFabricStrategy, TiledTrainerStrategy
from lt_tiled.strategies.sharded import ShardedStrategy
from lt_tiled.training_step.step import nothing

if TYPE_CHECKING:
    import lightning.pytorch as pl


class _FSDP2(ShardedStrategy):
    device_mesh: DeviceMesh
    num_nodes: int
    num_processes: int
    _data_parallel_size: Any
    _tensor_parallel_size: Any

    def setup_environment(self) -> None:
        """Choose the ``"auto"`` sizes: all ranks shard the model.

        Lightning's ``"auto"`` is one data-parallel rank per node, chosen before it can be known whether the model has a
        tensor-parallel plan: without one, ``fully_shard`` would shard nothing, and all ranks would train on one batch.
        """
        # 1. Where no size is given, no rank is tensor-parallel.
        ranks = self.num_nodes * self.num_processes
        if self._data_parallel_size == self._tensor_parallel_size == "auto":
            self._tensor_parallel_size = 1
        # 2. One size leaves the other its ranks.
        if self._tensor_parallel_size == "auto":
            self._tensor_parallel_size = ranks // self._data_parallel_size
        if self._data_parallel_size == "auto":
            self._data_parallel_size = ranks // self._tensor_parallel_size
        # 3. Consecutive ranks would share sequences and hold parts of the same weights.
        if self._tensor_parallel_size > 1 and self.sequence_parallel is not None:
            raise ValueError(
                f"sequence_parallel={self.sequence_parallel.size} cannot be combined with"
                f" tensor_parallel_size={self._tensor_parallel_size}: set tensor_parallel_size=1."
            )
        super().setup_environment()  # type: ignore[misc]

    def shard(self, model: nn.Module) -> None:
        """Apply ``fully_shard`` to each block and to the model itself, the FSDP root, unless the user did.

        The steps of a LightningModule all-gather the weights of the root as its ``forward`` does.
        """
        if not any(isinstance(part, FSDPModule) for part in model.modules()):
            self._shard_blocks(model)
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if hasattr(model, step) and step not in vars(model):  # else an earlier run registered it
                register_fsdp_forward_method(model, step)  # has no effect on a module that is not the FSDP root

    def _shard_blocks(self, model: nn.Module) -> None:
        name = type(model).__name__
        tensor = self.device_mesh["tensor_parallel"].size()
        data = self.device_mesh["data_parallel"].size()
        # 1. A plan of the user's for tensor parallelism shards all that is sharded.
        planned = any(isinstance(weight, DTensor) for weight in model.parameters())
        if planned and data == 1:
            return
        if planned or tensor > 1:
            raise ValueError(
                f"{name} needs a plan for tensor_parallel_size={tensor} and data_parallel_size={data}: apply"
                " parallelize_module and fully_shard (in configure_model, or parallelize_fn for Fabric), or pass"
                " tensor_parallel_size=1 to shard blocks."
            )
        # 2. The root's weights are gathered for one forward and one backward pass.
        if not getattr(model, "automatic_optimization", True):
            warn(
                f"{name} becomes one FSDP root, whose weights the first backward pass of a step frees: for several in a"
                " step, call fully_shard on each network in configure_model."
            )
        # 3. Without a plan, each block is a unit. A weight that two units share would become two.
        blocks = self.blocks_to_shard(model)
        weights = len(list(model.parameters()))
        for module in [*blocks, model]:
            fully_shard(module, mesh=self.device_mesh["data_parallel"])
        if len(list(model.parameters())) > weights:
            raise ValueError(
                f"Blocks of {name} share a weight with each other, or with the rest of the model, and each would shard"
                " it: put what shares it into one module, or call fully_shard on both together."
            )
        inform(f"lt_tiled shards {name} with {len(blocks)} blocks as FSDP units")


class TrainerFSDP2(_FSDP2, TiledTrainerStrategy):
    """FSDP2 for Trainer."""

    def setup(self, trainer: pl.Trainer) -> None:
        # 1. Before the policies are applied, as in a `configure_model` that shards.
        module = self.lightning_module
        self.shard(module)
        # 2. Lightning demands a hook that shards the model, also from a model that needs none.
        hook = vars(module).setdefault("configure_model", nothing)
        try:
            super().setup(trainer)
        finally:
            if hook is nothing:
                del module.configure_model


class FabricFSDP2(_FSDP2, TiledFabricStrategy):
    """FSDP2 for Fabric."""

    def __init__(
        self, parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(parallelize_fn=self._parallelize, **kwargs)
        self._plan = parallelize_fn

    def _parallelize(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self._plan is not None:
            module = self._plan(module, mesh)
        self.shard(module)
        return module

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *args: Any) -> Any:
        before = list(module.parameters())
        result = super().setup_module_and_optimizers(module, optimizers, *args)
        # fully_shard creates new parameters. An optimizer that keeps the old ones would have no effect.
        new: dict[nn.Parameter, nn.Parameter] = dict(zip(before, result[0].parameters(), strict=True))
        for optimizer in optimizers:
            if optimizer.state:
                raise ValueError("fabric.setup shards weights, not the state of an optimizer: load it afterwards.")
            for group in optimizer.param_groups:
                group["params"] = [new.get(weight, weight) for weight in group["params"]]
        return result
