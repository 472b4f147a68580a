"""``FullyShardedDataParallel`` (FSDP1).

Lightning 2.6 runs FSDP1 on CUDA devices only. These strategies also run it on the CPU, where torch needs an explicit
device (https://github.com/Lightning-AI/pytorch-lightning/pull/21774).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy, enable_wrap

from lt_tiled._log import warn
from lt_tiled.strategies.base import TiledTrainerStrategy
from lt_tiled.strategies.sharded import ShardedStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class FSDP(ShardedStrategy):
    """What FSDP1 needs under Trainer and under Fabric."""

    cpu_offload: Any
    mixed_precision_config: Any
    sharding_strategy: Any
    _state_dict_type: Any  # Lightning has no public name for it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The arguments of FullyShardedDataParallel, by Fabric's name and by Trainer's.
        self.options: dict[str, Any] = getattr(self, "_fsdp_kwargs", None) or vars(self)["kwargs"]
        # The parent would warn that it ignores the policy on a model that is wrapped already.
        self.auto_wrap_policy = self.options.pop("auto_wrap_policy", None)

    def setup_environment(self) -> None:
        """Save sharded checkpoints where full ones would be wrong.

        On the CPU torch frees weights when it offloads a full state dict, and Adam's averages share memory
        (https://github.com/Lightning-AI/pytorch-lightning/pull/21804). Weights in a flat parameter share their number
        of steps, which other engines would count for each of them, and Lightning cannot number them.
        """
        super().setup_environment()  # type: ignore[misc]
        if self._state_dict_type == "full" and (self.on_cpu or not self.options["use_orig_params"]):
            self._state_dict_type = "sharded"
            warn("FSDP saves sharded checkpoints, not full ones, on the CPU and with use_orig_params=False.")

    def unit_arguments(self) -> dict[str, Any]:
        # 1. What the parent hands to torch, too.
        arguments = dict(self.options)
        arguments["auto_wrap_policy"] = self.auto_wrap_policy
        arguments["mixed_precision"] = self.mixed_precision_config
        arguments["sharding_strategy"] = self.sharding_strategy
        # 2. The device, without which torch looks for a GPU. Weights are offloaded from a GPU alone.
        if self.on_cpu:
            arguments["device_id"] = torch.device("cpu")
        else:
            arguments["device_id"] = self.root_device.index  # type: ignore[attr-defined]
            arguments["cpu_offload"] = self.cpu_offload
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


class TrainerFSDP(FSDP, TiledTrainerStrategy):
    """What it needs under Trainer alone."""

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        # The plugin raises because it does not know the root:
        # https://github.com/Lightning-AI/pytorch-lightning/issues/19235
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def _clip_by_norm(self, optimizer: object, clip_val: float) -> None:
        # torch's method clips the gradients of all weights, also those of another optimizer.
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
