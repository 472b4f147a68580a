"""The names by which Trainer and Fabric know the strategies."""

from __future__ import annotations

from typing import Any


def register(
    registry: Any, *, single_device: type, ddp: type, fsdp: type, model_parallel: type, deepspeed: type
) -> None:
    """Add every name to one of Lightning's two registries."""
    names: dict[str, tuple[type, str, dict[str, Any]]] = {
        "tiled": (single_device, "Tiled modules on a single device", {}),
        "tiled_ddp": (ddp, "Tiled modules under DDP", {}),
        "tiled_fsdp": (fsdp, "Tiled modules under FSDP", {}),
        "tiled_fsdp2": (model_parallel, "Tiled modules under FSDP2", {}),
        "tiled_fsdp_cpu_offload": (fsdp, "Tiled modules under FSDP, with weights in RAM", {"cpu_offload": True}),
        "tiled_deepspeed": (deepspeed, "Tiled modules under DeepSpeed, ZeRO stage 2", {}),
    }
    for stage in (1, 2, 3):
        names[f"tiled_deepspeed_stage_{stage}"] = (
            deepspeed,
            f"Tiled modules under DeepSpeed, ZeRO stage {stage}",
            {"stage": stage},
        )
    offload: dict[str, Any] = {"offload_optimizer": True}
    names["tiled_deepspeed_stage_2_offload"] = (
        deepspeed,
        "ZeRO stage 2 with the optimizer in RAM",
        offload | {"stage": 2},
    )
    offload |= {"stage": 3, "offload_parameters": True}
    names["tiled_deepspeed_stage_3_offload"] = (deepspeed, "ZeRO stage 3 with weights and optimizer in RAM", offload)
    nvme = {"remote_device": "nvme", "offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
    names["tiled_deepspeed_stage_3_offload_nvme"] = (
        deepspeed,
        "ZeRO stage 3 with weights and optimizer on NVMe",
        offload | nvme,
    )
    for name, (strategy, description, arguments) in names.items():
        registry.register(
            name, strategy, description, override=True, **arguments
        )  # a second import (a reloaded notebook) must not fail
