"""``FullyShardedDataParallel`` (FSDP1).

Lightning 2.6 runs FSDP1 on CUDA devices only. These strategies also run it on the CPU, where torch needs an explicit
device (https://github.com/Lightning-AI/pytorch-lightning/pull/21774), and where a full state dict must not be
offloaded: that frees weights, and lets Adam's averages share memory
(https://github.com/Lightning-AI/pytorch-lightning/pull/21804).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, enable_wrap
from torch.optim import Optimizer

from lt_tiled.strategies.base import TiledFabricStrategy, TiledTrainerStrategy
from lt_tiled.strategies.sharded import ShardedStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class _FSDP(ShardedStrategy):
    options_name: str
    """The name of the parent's keyword arguments for ``FullyShardedDataParallel``."""
    cpu_offload: Any
    mixed_precision_config: Any
    sharding_strategy: Any
    global_rank: int
    _state_dict_type: Any  # Lightning has no public name for it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options: dict[str, Any] = getattr(self, self.options_name)
        # The parent would warn that it ignores the policy on a model that is wrapped already.
        self.auto_wrap_policy = self.options.pop("auto_wrap_policy", None)

    def unit_arguments(self) -> dict[str, Any]:
        arguments = dict(self.options)
        arguments["auto_wrap_policy"] = self.auto_wrap_policy
        arguments["mixed_precision"] = self.mixed_precision_config
        arguments["sharding_strategy"] = self.sharding_strategy
        if self.on_cpu:
            arguments["device_id"] = torch.device("cpu")
        else:
            arguments["device_id"] = self.root_device.index  # type: ignore[attr-defined]
            arguments["cpu_offload"] = self.cpu_offload  # torch needs a device to offload from
        return arguments

    def model_sharded_context(self) -> Any:
        return enable_wrap(wrapper_cls=FullyShardedDataParallel, **self.unit_arguments())

    module_sharded_context = model_sharded_context  # the names of Trainer and of Fabric

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model: by ``auto_wrap_policy`` or by blocks, or only around the FSDP units that it has already."""
        arguments = self.unit_arguments()
        if FullyShardedDataParallel.fsdp_modules(model):
            arguments["auto_wrap_policy"] = None  # the parent would not reduce the gradients of the other weights
        elif self.auto_wrap_policy is None:
            arguments["auto_wrap_policy"] = CustomPolicy(set(self.blocks_to_shard(model)).__contains__)
        return FullyShardedDataParallel(model, **arguments)

    def full_states(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the states of a model and its optimizers are full, and complete on rank 0."""
        offload = not self.on_cpu
        return FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True),
        )

    def full_optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer on rank 0."""
        with self.full_states(model):
            full = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        # The weights of a flat parameter share their number of steps, which other engines would count for each of them.
        for state in full.get("state", {}).values():
            if "step" in state:
                state["step"] = deepcopy(state["step"])
        return full


class TrainerFSDP(_FSDP, TiledTrainerStrategy):
    """FSDP1 for Trainer."""

    options_name = "kwargs"

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        # The plugin raises because it does not know the root:
        # https://github.com/Lightning-AI/pytorch-lightning/issues/19235
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _clip_by_norm(self, optimizer: object, clip_val: float) -> None:
        if len(self.optimizers) > 1:
            raise ValueError("FSDP clips by the norm of all gradients: clip by value, or use one optimizer.")
        assert isinstance(self.model, FullyShardedDataParallel)
        self.model.clip_grad_norm_(clip_val)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        # The parent wraps a wrapped model again, or not at its root:
        # https://github.com/Lightning-AI/pytorch-lightning/issues/19015
        root = vars(model).get("_lt_tiled_fsdp_root")
        if root is None:
            root = super()._setup_model(self.wrap(model))
            vars(model)["_lt_tiled_fsdp_root"] = root
        return root

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._state_dict_type != "full":
            return super().lightning_module_state_dict()
        assert self.model is not None
        with self.full_states(self.model):
            return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._state_dict_type != "full":
            return super().optimizer_state(optimizer)
        assert self.model is not None
        own = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
        state = self.full_optimizer_state(self.model, own)
        # As the parent does, replace names by numbers, which weights in a flat parameter do not have. The parent loads
        # both forms.
        if self.global_rank == 0 and self.options["use_orig_params"]:
            return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)
        return state


class FabricFSDP(_FSDP, TiledFabricStrategy):
    """FSDP1 for Fabric."""

    options_name = "_fsdp_kwargs"

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        if not self.on_cpu or self._state_dict_type != "full":
            return super().save_checkpoint(path, state, storage_options, filter)
        # This does what the parent does, without offloading.
        full = dict(state)
        model = next(value for value in state.values() if isinstance(value, FullyShardedDataParallel))
        for key, value in state.items():
            if isinstance(value, Optimizer):
                full[key] = self.full_optimizer_state(model, value)
        with self.full_states(model):
            full = self._convert_stateful_objects_in_state(full, filter or {})
        if self.global_rank == 0:
            torch.save(full, path)
        return None
