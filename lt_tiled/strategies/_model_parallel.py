"""What FSDP2 needs beside the shared mixins, for Trainer and for Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lt_tiled.policies import Checkpointing, Tiling
from lt_tiled.strategies._units import shard_blocks
from lt_tiled.tiling.api import tile_marks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ModelParallelNeeds:
    """Mixed into both model-parallel strategies."""

    checkpointing: Checkpointing | None
    tiling: Tiling | None
    device_mesh: DeviceMesh
    num_nodes: int
    num_processes: int
    _data_parallel_size: Any
    _tensor_parallel_size: Any

    def setup_environment(self) -> None:
        """Choose the sizes that are ``"auto"``.

        Raises:
            ValueError: If a size does not divide the number of ranks.
        """
        # The parents take all devices of a node for tensors: a model without a plan would be neither sharded nor
        # reduced.
        ranks, data, tensor = self.num_nodes * self.num_processes, self._data_parallel_size, self._tensor_parallel_size
        for name, size in (("data_parallel_size", data), ("tensor_parallel_size", tensor)):
            if size != "auto" and ranks % size:
                raise ValueError(f"{name}={size} does not divide the {ranks} ranks: choose a divisor.")
        if tensor == "auto":
            tensor = 1 if data == "auto" else ranks // data
        self._data_parallel_size, self._tensor_parallel_size = (ranks // tensor if data == "auto" else data), tensor
        super().setup_environment()  # type: ignore[misc]

    def shard(self, model: nn.Module, roots: list[nn.Module]) -> None:
        """Shard what nobody parallelized, by blocks.

        Args:
            model: The whole model.
            roots: The modules in it that are called, which hold all of its weights.

        Raises:
            ValueError: If tensor-parallel ranks want a plan, or a plan leaves gradients unreduced, or units share a
                weight.
        """
        tensor, data = (self.device_mesh[name].size() for name in ("tensor_parallel", "data_parallel"))
        name = type(model).__name__
        if any(isinstance(m, FSDPModule) for m in model.modules()):
            return
        if any(isinstance(p, DTensor) for p in model.parameters()):
            if data > 1:
                raise ValueError(
                    f"{name} has a tensor-parallel plan and no unit, so that nobody reduces its gradients over the {data} data-parallel"
                    f" ranks: call fully_shard too, or pass tensor_parallel_size={tensor * data}."
                )
            return
        if tensor > 1:
            raise ValueError(
                f"{name} was not parallelized, and tensor_parallel_size={tensor} needs a plan: apply parallelize_module yourself (in"
                " configure_model, or parallelize_fn for Fabric), or pass tensor_parallel_size=1 to have the model sharded by blocks."
            )
        shard_blocks(model, roots, self.device_mesh["data_parallel"], self.checkpointing)

    def agree(self, model: nn.Module) -> None:
        """Adapt tiles to ranks that run together.

        Raises:
            ValueError: If tensor-parallel ranks would cut a sequence differently, and wait for each other for ever.
        """
        if self.device_mesh.size() > 1:
            for _, _, mark in tile_marks(model):
                # FSDP2 reduces the gradients that there are: ranks whose tokens chose different experts have different
                # ones.
                mark.needs.zeros_for_unused = True
        mesh = self.device_mesh["tensor_parallel"]
        if mesh.size() > 1:
            policies: list[Tiling | None] = [None] * mesh.size()
            dist.all_gather_object(policies, self.tiling, group=mesh.get_group())
            if any(policy != self.tiling for policy in policies):
                raise ValueError(
                    f"The ranks of one tensor-parallel group communicate in every tile and have different tilings: {policies}. Give them"
                    " the same one."
                )
