"""The engine of a strategy: its name, its ranks, and the settings of its buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

EngineName = Literal["single", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Engine:
    """An engine, and the number of its ranks.

    Attributes:
        bucket: The elements of DeepSpeed's buffers of ``reduce_bucket_size``.
        views: DDP's ``gradient_as_bucket_view``.
        offload_optimizer: Whether DeepSpeed keeps the optimizer state in CPU memory.
        offload_weights: Whether ZeRO-3 keeps the shards in CPU memory.
        mixed: Whether FSDP all-gathers 16-bit weights from float32 shards.
        live: The elements that ZeRO-3 keeps gathered, by ``stage3_max_live_parameters`` or ``_reuse_distance``.
    """

    name: EngineName = "single"
    ranks: int = 1
    bucket: int = 0
    views: bool = False
    offload_optimizer: bool = False
    offload_weights: bool = False
    mixed: bool = False
    live: int = 0


def engine_of(strategy: Any, ranks: int) -> Engine:
    """Return the engine of a strategy, by its class: a strategy of Lightning or of this package."""
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if "DeepSpeedStrategy" in names:
        zero = strategy.config.get("zero_optimization", {})
        stage: Any = f"zero{zero.get('stage', 0)}"
        if stage == "zero0":
            return Engine("ddp", ranks)
        offload = [zero.get(f"offload_{what}", {}).get("device") or "none" for what in ("optimizer", "param")]
        overlap = zero.get("overlap_comm", False) and stage != "zero3"
        live = min(int(zero.get(f"stage3_max_{what}", 1e9)) for what in ("live_parameters", "reuse_distance"))
        return Engine(
            name=stage,
            ranks=ranks,
            bucket=int(zero.get("reduce_bucket_size", 5e8)) * (2 if overlap else 1),
            offload_optimizer=str(offload[0]) != "none",
            offload_weights=str(offload[1]) != "none",
            live=live if stage == "zero3" else 0,
        )
    if "FSDPStrategy" in names:
        return Engine("fsdp", ranks)
    if "ModelParallelStrategy" in names:
        return Engine("fsdp2", ranks)
    if "DDPStrategy" in names:  # Lightning keeps DDP's arguments in a private attribute only
        return Engine("ddp", ranks, views=bool(strategy._ddp_kwargs.get("gradient_as_bucket_view", False)))
    return Engine("ddp" if ranks > 1 else "single", ranks)
