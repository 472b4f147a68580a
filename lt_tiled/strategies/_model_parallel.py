"""What FSDP2 needs beside the shared mixins, for Trainer and for Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ModelParallelNeeds:
    """Mixed into both model-parallel strategies."""

    cluster_environment: Any
    device_mesh: DeviceMesh
    num_nodes: int
    num_processes: int
    _data_parallel_size: Any
    _tensor_parallel_size: Any

    def setup_environment(self) -> None:
        # The parents' "auto" for data is the number of nodes, whatever the number for tensors is, so that 1 for tensors fails.
        if self._data_parallel_size == "auto" and self._tensor_parallel_size != "auto":
            ranks, each = self.num_nodes * self.num_processes, self._tensor_parallel_size
            if ranks % each:
                raise ValueError(f"tensor_parallel_size={each} does not divide the {ranks} ranks: choose a divisor.")
            self._data_parallel_size = ranks // each
        super().setup_environment()  # type: ignore[misc]

    def mesh_to_shard_over(self, model: str) -> DeviceMesh:
        """The data-parallel ranks.

        Raises:
            ValueError: If there are tensor-parallel ranks, which need a plan that only the user can give.
        """
        tensor = self.device_mesh["tensor_parallel"].size()
        if tensor > 1:
            raise ValueError(
                f"{model} was not parallelized, and tensor_parallel_size={tensor} needs a plan: apply parallelize_module yourself (in"
                " configure_model, or parallelize_fn for Fabric), or pass tensor_parallel_size=1 to have the model sharded by blocks."
            )
        return self.device_mesh["data_parallel"]
