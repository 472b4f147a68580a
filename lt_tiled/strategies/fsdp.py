"""``FullyShardedDataParallel`` (FSDP1).

Lightning 2.6 runs FSDP1 on CUDA devices only. These strategies also run it on the CPU. torch needs an explicit device
there (https://github.com/Lightning-AI/pytorch-lightning/pull/21774), and a full state dict must not be offloaded to
the CPU, because that frees the returned tensors (https://github.com/Lightning-AI/pytorch-lightning/pull/21804).
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, OptimStateKeyType, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap
from torch.optim import Optimizer

from lt_tiled._log import warn
from lt_tiled.policies import ActivationCheckpointing, ActivationCheckpointingLike
from lt_tiled.strategies.base import TiledStrategy
from lt_tiled.strategies.blocks import blocks_to_shard
from lt_tiled.strategies.optimizer_order import FabricChecksOrder, TrainerChecksOrder

if TYPE_CHECKING:
    import lightning.pytorch as pl

_ROOTS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FullyShardedDataParallel]] = weakref.WeakKeyDictionary()
"""The FSDP root of each LightningModule, for as long as a strategy refers to it."""
BlockPolicy = set[type[nn.Module]] | Callable[[nn.Module, bool, int], bool] | ModuleWrapPolicy
"""What Lightning calls an activation checkpointing policy."""
_FULL = StateDictOptions(full_state_dict=True)


def _chooses(policy: BlockPolicy, path: str, module: nn.Module) -> bool:
    """Whether a policy of Lightning chooses a module as a block."""
    if isinstance(policy, set):
        return isinstance(module, tuple(policy))
    return policy(module, False, sum(weight.numel() for weight in module.parameters()))


class _FSDP(TiledStrategy):
    cpu_offload: Any
    mixed_precision_config: Any
    sharding_strategy: Any
    global_rank: int
    _state_dict_type: Any  # Lightning has no public name for it

    def __init__(
        self,
        *args: Any,
        activation_checkpointing: ActivationCheckpointingLike | None = True,
        activation_checkpointing_policy: BlockPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        if activation_checkpointing_policy is not None and activation_checkpointing is True:
            targets = partial(_chooses, activation_checkpointing_policy)
            activation_checkpointing, activation_checkpointing_policy = ActivationCheckpointing(targets), None
        elif activation_checkpointing_policy is not None and activation_checkpointing:
            raise ValueError(
                f"{type(self).__name__} was given activation_checkpointing_policy and"
                f" activation_checkpointing={activation_checkpointing!r}, which would recompute blocks twice. Leave one"
                " out, or choose the blocks with ActivationCheckpointing(targets=...)."
            )
        super().__init__(
            *args,
            activation_checkpointing=activation_checkpointing,
            activation_checkpointing_policy=activation_checkpointing_policy,
            **kwargs,
        )
        # The parent would warn that it ignores the policy on a model that is wrapped already.
        self.auto_wrap_policy = self.fsdp_options.pop("auto_wrap_policy", None)

    @property
    def fsdp_options(self) -> dict[str, Any]:
        """The parent's keyword arguments for ``FullyShardedDataParallel``."""
        raise NotImplementedError

    @property
    def saves_full_on_cpu(self) -> bool:
        return self.on_cpu and self._state_dict_type == "full"

    def model_sharded_context(self) -> Any:
        return enable_wrap(wrapper_cls=FullyShardedDataParallel, **self.unit_arguments())

    module_sharded_context = model_sharded_context  # the names of Trainer and of Fabric

    def setup_environment(self) -> None:
        shape = self.fsdp_options.get("device_mesh")
        if self.on_cpu and isinstance(shape, tuple):
            del self.fsdp_options["device_mesh"]  # the parent would create a mesh of CUDA devices
        super().setup_environment()
        if self.on_cpu and isinstance(shape, tuple):
            self.fsdp_options["device_mesh"] = init_device_mesh("cpu", shape)

    def full_optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return, on rank 0, an optimizer's state of the full weights by their names."""
        # offload_to_cpu would not copy on the CPU, so Adam's two averages would share memory.
        config = FullOptimStateDictConfig(offload_to_cpu=not self.on_cpu, rank0_only=True)
        full = StateDictType.FULL_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(model, full, optim_state_dict_config=config):
            return FullyShardedDataParallel.optim_state_dict(model, optimizer)

    def unit_arguments(self) -> dict[str, Any]:
        return {
            "cpu_offload": None if self.on_cpu else self.cpu_offload,  # torch needs a device to offload from
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": torch.device("cpu") if self.on_cpu else self.root_device.index,
            "auto_wrap_policy": self.auto_wrap_policy,
            **self.fsdp_options,
        }

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model: by ``auto_wrap_policy`` or by blocks, or only around the FSDP units that it has already."""
        policy = self.auto_wrap_policy
        if wrapped := FullyShardedDataParallel.fsdp_modules(model):
            if policy is not None:
                warn(f"{type(model).__name__} ignores auto_wrap_policy, because it contains FSDP units already.")
            policy = None  # the parent would not shard the other weights, nor reduce their gradients
            if {weight for unit in wrapped for weight in unit.parameters()}.issuperset(model.parameters()):
                return model
        elif policy is None:
            policy = CustomPolicy(
                {block for _, block in blocks_to_shard(model, self.activation_checkpointing)}.__contains__
            )
        return FullyShardedDataParallel(model, **(self.unit_arguments() | {"auto_wrap_policy": policy}))


class TrainerFSDP(_FSDP, TrainerChecksOrder):
    """FSDP1 for Trainer."""

    kwargs: dict[str, Any]

    @property
    def fsdp_options(self) -> dict[str, Any]:
        return self.kwargs

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if isinstance(self.model, FullyShardedDataParallel):
            # The plugin raises because it does not know the root:
            # https://github.com/Lightning-AI/pytorch-lightning/issues/19235
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]

    def teardown(self) -> None:
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        super().teardown()

    def _clip_by_norm(self, optimizer: object, clip_val: float) -> None:
        assert isinstance(self.model, FullyShardedDataParallel)
        if len(self.optimizers) > 1:
            what = f"FSDP clips by the norm of all gradients, and there are {len(self.optimizers)} optimizers"
            raise ValueError(f"{what}: clip by value, or use one optimizer.")
        self.model.clip_grad_norm_(clip_val)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        # The parent wraps a wrapped model again, or not at its root:
        # https://github.com/Lightning-AI/pytorch-lightning/issues/19015
        root: nn.Module | None
        if model not in _ROOTS:
            root = super()._setup_model(self.wrap(model))
            if isinstance(root, FullyShardedDataParallel):
                _ROOTS[model] = weakref.ref(root)
        elif (root := _ROOTS[model]()) is None:
            raise ValueError(
                f"This {type(model).__name__} was wrapped by FSDP for a trainer that no longer exists: keep that"
                " trainer, or build a new model and load a checkpoint."
            )
        self._root = root  # the trainer drops its own reference between runs
        return root

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._state_dict_type != "full":
            return super().optimizer_state(optimizer)
        assert self.model is not None
        own = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
        state = self.full_optimizer_state(self.model, own)
        # As the parent does, replace names by numbers, which weights in a flat parameter do not have. The parent loads
        # both forms.
        if self.global_rank == 0 and self.kwargs["use_orig_params"]:
            return FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)
        return state

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self.saves_full_on_cpu:
            return super().lightning_module_state_dict()
        self.free_buffers()
        assert self.model is not None
        state = get_model_state_dict(self.model, options=_FULL)
        return state if self.global_rank == 0 else {}  # as Lightning's


class FabricFSDP(_FSDP, FabricChecksOrder):
    """FSDP1 for Fabric."""

    _fsdp_kwargs: dict[str, Any]

    @property
    def fsdp_options(self) -> dict[str, Any]:
        return self._fsdp_kwargs

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        path = Path(self.broadcast(path))
        modules = [value for value in state.values() if isinstance(value, nn.Module)]
        models = [module for module in modules if FullyShardedDataParallel.fsdp_modules(module)]
        sharded = path.is_dir() and (path / "meta.pt").is_file()  # so Lightning identifies a sharded checkpoint
        refused = len(models) != 1 or storage_options is not None or (path.is_dir() and not sharded)
        if refused or not self.saves_full_on_cpu:
            return super().save_checkpoint(path, state, storage_options, filter)
        # This does what the parent does, with other sources of the states.
        self.free_buffers()
        full = dict(state)
        for key, value in state.items():
            if value is models[0]:
                full[key] = get_model_state_dict(value, options=_FULL)
            elif isinstance(value, Optimizer):
                full[key] = self.full_optimizer_state(models[0], value)
        full = self._convert_stateful_objects_in_state(full, filter or {})
        if self.global_rank == 0:
            if sharded:
                shutil.rmtree(path)
            torch.save(full, path)
        return None
