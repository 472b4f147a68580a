"""FSDP2 and tensor parallelism (``fully_shard``, ``parallelize_module``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lt_tiled._log import inform, warn
from lt_tiled.modules.find import plain_name
from lt_tiled.policies import check_count
from lt_tiled.strategies.base import TiledStrategy
from lt_tiled.strategies.blocks import blocks_to_shard
from lt_tiled.strategies.optimizer_order import FabricChecksOrder, TrainerChecksOrder
from lt_tiled.training_step.step import nothing

if TYPE_CHECKING:
    import lightning.pytorch as pl


class _FSDP2(TiledStrategy):
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
        ranks, data, tensor = self.num_nodes * self.num_processes, self._data_parallel_size, self._tensor_parallel_size
        for name, size in (("data_parallel_size", data), ("tensor_parallel_size", tensor)):
            check_count(name, size, "auto")
            if size != "auto" and ranks % size:
                raise ValueError(f"{name}={size} does not divide the {ranks} ranks: choose a divisor.")
        if tensor == "auto":
            tensor = 1 if data == "auto" else ranks // data
        if tensor > 1 and self.sequence_parallel is not None:
            raise ValueError(
                f"sequence_parallel={self.sequence_parallel.size} cannot be combined with"
                f" tensor_parallel_size={tensor}: set tensor_parallel_size=1."
            )
        self._data_parallel_size, self._tensor_parallel_size = (ranks // tensor if data == "auto" else data), tensor
        super().setup_environment()

    def shard(self, model: nn.Module) -> None:
        """Apply ``fully_shard`` to each block and to the model itself, the FSDP root, unless the user did."""
        tensor, data = (self.device_mesh[name].size() for name in ("tensor_parallel", "data_parallel"))
        name = type(model).__name__
        if any(isinstance(m, FSDPModule) for m in model.modules()):
            return
        if any(isinstance(p, DTensor) for p in model.parameters()):
            if data > 1:
                raise ValueError(
                    f"{name} has a tensor-parallel plan and no FSDP unit, so its gradients are not reduced over the"
                    f" {data} data-parallel ranks: call fully_shard too, or pass tensor_parallel_size={tensor * data}."
                )
            return
        if tensor > 1:
            raise ValueError(
                f"{name} was not parallelized, and tensor_parallel_size={tensor} needs a plan: apply parallelize_module"
                " yourself (in configure_model, or parallelize_fn for Fabric), or pass tensor_parallel_size=1 to shard"
                " the model by blocks."
            )
        blocks = blocks_to_shard(model, self.activation_checkpointing)
        if shared := next(_shared_weights(model, blocks), None):
            first, second, weight = shared
            raise ValueError(
                f"{first} and {second} share a weight of shape {list(weight.shape)} and would shard it twice: put them"
                " into one module, or call fully_shard on both together."
            )
        _copy_from_first_rank(model, self.root_device)
        for module in (*(block for _, block in blocks), model):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])
        inform(f"lt_tiled shards {name} with {len(blocks)} blocks as FSDP units")


class TrainerFSDP2(_FSDP2, TrainerChecksOrder):
    """FSDP2 for Trainer."""

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        if not module.automatic_optimization and not any(isinstance(part, FSDPModule) for part in module.modules()):
            warn(
                f"{type(module).__name__} becomes one FSDP root, whose weights the first backward pass of a step frees:"
                " for several in a step, call fully_shard on each network in configure_model."
            )
        self.shard(module)
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            if step not in vars(module):  # else an earlier run registered it
                register_fsdp_forward_method(module, step)  # has no effect on a module that is not the FSDP root
        hook = vars(module).setdefault("configure_model", nothing)  # Lightning demands one that shards the model
        try:
            super().setup(trainer)
        finally:
            if hook is nothing:
                del module.configure_model


def _shared_weights(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield the weights that belong to two blocks, or to a block and the rest of the model, after their names."""
    inside = {part for _, block in blocks for part in block.modules()}
    rest = (weight for m in model.modules() if m not in inside for weight in m.parameters(recurse=False))
    owner: dict[nn.Parameter, str] = {}
    for path, weights in [*((p, b.parameters()) for p, b in blocks), (f"the rest of {type(model).__name__}", rest)]:
        for weight in weights:
            if owner.setdefault(weight, path) != path:
                yield owner[weight], path, weight


def _copy_from_first_rank(model: nn.Module, device: torch.device) -> None:
    """Give all ranks the weights and buffers of rank 0, as DDP does: ranks may have built the model from other seeds.

    This does nothing if some ranks have tensors without memory, which are filled after sharding.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if type(t.data) is Tensor and t.numel()]
    empty = torch.tensor(int(any(t.is_meta for t in tensors)), device=device)
    dist.all_reduce(empty, dist.ReduceOp.MAX)
    if empty:
        return
    for tensor in tensors:
        values = tensor.detach().to(device, copy=True).contiguous()
        dist.broadcast(values.flatten().view(torch.uint8), 0)  # bytes, because backends do not know all dtypes
        values = values.to(tensor.device)
        if not torch.equal(values, tensor.detach()):
            tensor.detach().copy_(values)


class FabricFSDP2(_FSDP2, FabricChecksOrder):
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

    def setup_module(self, module: nn.Module) -> nn.Module:
        module = super().setup_module(module)
        return _Root(module) if isinstance(module, FSDPModule) else module

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *args: Any) -> Any:
        # fully_shard creates new parameters. An optimizer that keeps the old ones would have no effect.
        before = {plain_name(name): weight for name, weight in module.named_parameters()}
        result = super().setup_module_and_optimizers(module, optimizers, *args)
        after = {plain_name(name): weight for name, weight in _without_root(result[0]).named_parameters()}
        new: dict[Any, nn.Parameter] = {old: after[name] for name, old in before.items() if after[name] is not old}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new.get(weight, weight) for weight in group["params"]]
            for weight in [w for w in new if w in optimizer.state]:  # in the same order on all ranks: it communicates
                optimizer.state[new[weight]] = _sharded_state(optimizer.state.pop(weight), new[weight])
        return result

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(path, {key: _without_root(value) for key, value in state.items()}, *args, **kwargs)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if isinstance(state, dict):  # Fabric reads the loaded values from this very dictionary
            state.update({key: _without_root(value) for key, value in state.items()})
        return super().load_checkpoint(path, _without_root(state), strict, weights_only)


class _Root(nn.Module):
    """Calls the FSDP root.

    Fabric runs the steps of a LightningModule, and the methods given to ``mark_forward_method``, through ``forward``
    and thus through FSDP's hooks, but only if the strategy returns another module than the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _without_root(value: Any) -> Any:
    return value.module if isinstance(value, _Root) else value


def _sharded_state(state: dict[str, Any], weight: nn.Parameter) -> dict[str, Any]:
    """Shard an optimizer's state of one weight as the weight is sharded."""
    return {
        name: distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
        if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.shape == weight.shape
        else value
        for name, value in state.items()
    }
