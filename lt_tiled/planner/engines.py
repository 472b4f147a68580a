"""An engine as the planner sees it: its name, its ranks, and what it was told about its buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

EngineName = Literal["single", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Engine:
    """An engine, and over how many ranks it works."""

    name: EngineName = "single"
    ranks: int = 1
    bucket: int = 0
    """DeepSpeed's ``reduce_bucket_size``, in entries: it keeps a buffer of that size."""
    buckets: int = 1
    """How many of them."""
    views: bool = False
    """DDP's ``gradient_as_bucket_view``."""
    offload_optimizer: bool = False
    """Whether DeepSpeed keeps optimizer state in RAM."""
    offload_weights: bool = False
    """Whether ZeRO-3 keeps the shards in RAM."""
    mixed: bool = False
    """Whether FSDP gathers 16-bit weights of float32 shards."""
    live: int = 0
    """Entries of weights that ZeRO-3 keeps gathered: the smaller of ``stage3_max_live_parameters`` and
    ``stage3_max_reuse_distance``."""

    @property
    def casts_weights(self) -> bool:
        """Whether mixed precision gathers and keeps 16-bit weights, beside float32 ones that the optimizer steps on."""
        return self.name == "fsdp" or self.name.startswith("zero")


SINGLE = Engine()


def engine_of(strategy: Any, ranks: int) -> Engine:
    """The engine of a strategy, by its class: Lightning's own, and those of this package."""
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if "DeepSpeedStrategy" in names:
        zero = strategy.config.get("zero_optimization", {})
        stage: Any = f"zero{zero.get('stage', 0)}"
        if stage == "zero0":
            return Engine("ddp", ranks)
        buckets = 2 if zero.get("overlap_comm", False) and stage != "zero3" else 1
        offload = [
            str(zero.get(f"offload_{what}", {}).get("device", "none")) != "none" for what in ("optimizer", "param")
        ]
        live = min(int(zero.get(f"stage3_max_{what}", 1e9)) for what in ("live_parameters", "reuse_distance"))
        return Engine(
            name=stage,
            ranks=ranks,
            bucket=int(zero.get("reduce_bucket_size", 5e8)),
            buckets=buckets,
            offload_optimizer=offload[0],
            offload_weights=offload[1],
            live=live if stage == "zero3" else 0,
        )
    if "FSDPStrategy" in names:
        return Engine("fsdp", ranks)
    if "ModelParallelStrategy" in names:
        return Engine("fsdp2", ranks)
    if "DDPStrategy" in names:
        return Engine(
            "ddp", ranks, views=bool(getattr(strategy, "_ddp_kwargs", {}).get("gradient_as_bucket_view", False))
        )
    return Engine("ddp" if ranks > 1 else "single", ranks)
