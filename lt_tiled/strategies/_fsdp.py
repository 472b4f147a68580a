"""What ``FullyShardedDataParallel`` needs beside the shared mixins, for Trainer and for Fabric.

Lightning 2.6 runs it on CUDA devices alone. Here it runs on the CPU too: torch wants an explicit device there
(https://github.com/Lightning-AI/pytorch-lightning/pull/21774), and a full state that is not "offloaded to the CPU",
because that frees what it returns (https://github.com/Lightning-AI/pytorch-lightning/pull/21804).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from lt_tiled._log import warn
from lt_tiled.policies import Checkpointing
from lt_tiled.strategies._device import on_cpu
from lt_tiled.strategies._units import policy_of_blocks

CPU = torch.device("cpu")


class FSDPNeeds:
    """Mixed into both FSDP strategies."""

    options_name: ClassVar[str]
    """Where the parent keeps its keyword arguments for ``FullyShardedDataParallel``."""
    root_device: torch.device
    checkpointing: Checkpointing | None
    cpu_offload: Any
    mixed_precision_config: Any
    sharding_strategy: Any
    _activation_checkpointing_kwargs: dict[str, Any]
    _state_dict_type: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.auto_wrap_policy = self.fsdp_options.pop(
            "auto_wrap_policy", None
        )  # else the parent warns where we have wrapped
        if self._activation_checkpointing_kwargs and self.checkpointing is not None:
            name = (
                "activation_checkpointing"
                if "check_fn" in self._activation_checkpointing_kwargs
                else "activation_checkpointing_policy"
            )
            raise ValueError(
                f"{type(self).__name__} was given {name} and checkpointing={self.checkpointing!r}: blocks would be recomputed twice. Leave"
                f" {name} out, or pass checkpointing=False."
            )

    @property
    def fsdp_options(self) -> dict[str, Any]:
        options: dict[str, Any] = getattr(self, self.options_name)
        return options

    @property
    def saves_full_on_cpu(self) -> bool:
        return on_cpu(self) and self._state_dict_type == "full"

    def setup_environment(self) -> None:
        shape = self.fsdp_options.get("device_mesh")
        if not on_cpu(self) or not isinstance(shape, tuple):
            return super().setup_environment()  # type: ignore[misc,no-any-return]
        del self.fsdp_options["device_mesh"]  # the parent would make it a mesh of CUDA devices
        try:
            super().setup_environment()  # type: ignore[misc]
            shape = init_device_mesh("cpu", shape)
        finally:
            self.fsdp_options["device_mesh"] = shape
        return None

    def wrapper_arguments(self) -> dict[str, Any]:
        """What each unit is made with."""
        return {
            "cpu_offload": None if on_cpu(self) else self.cpu_offload,  # torch looks for a device to offload from
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": CPU if on_cpu(self) else self.root_device.index,
            **({} if self.auto_wrap_policy is None else {"auto_wrap_policy": self.auto_wrap_policy}),
            **self.fsdp_options,
        }

    def wrap(self, model: nn.Module) -> nn.Module:
        """Make each block a unit, or what ``auto_wrap_policy`` says, unless there are units already; and one of the
        rest.
        """
        units = units_of(model)
        if not units:
            policy = self.auto_wrap_policy or policy_of_blocks(model, self.checkpointing)
            return FullyShardedDataParallel(model, **(self.wrapper_arguments() | {"auto_wrap_policy": policy}))
        if self.auto_wrap_policy is not None:
            warn(f"auto_wrap_policy is ignored: {type(model).__name__} has units already.")
        sharded = {id(weight) for unit in units for weight in unit.parameters()}
        if all(id(weight) in sharded for weight in model.parameters()):
            return model
        # The parent leaves what is around units made by hand alone, and nobody would reduce its gradients.
        return FullyShardedDataParallel(model, **(self.wrapper_arguments() | {"auto_wrap_policy": None}))


def units_of(model: nn.Module) -> list[FullyShardedDataParallel]:
    """The model's units, itself among them if it is one."""
    return [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole state of a model that is sharded over CPU ranks, on each of them."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
