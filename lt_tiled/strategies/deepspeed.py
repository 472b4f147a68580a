"""DeepSpeed ZeRO-1, 2 and 3. DeepSpeed is imported only where it is used, because it is an optional dependency."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled.namespaces import is_a
from lt_tiled.strategies.base import TiledStrategy


class DeepSpeed(TiledStrategy):
    """What DeepSpeed needs under Trainer and under Fabric."""

    config: Any
    parallel_devices: list[torch.device] | None
    zero_stage_3: bool

    def setup_environment(self) -> None:
        """Let DeepSpeed also run on the CPU, which it supports and Lightning does not allow."""
        if not self.on_cpu:
            super().setup_environment()  # type: ignore[misc]
            return
        import deepspeed
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        # 1. DeepSpeed itself takes a GPU where there is one.
        set_accelerator(CPU_Accelerator())
        # 2. It would compile both for minutes at their first use; gloo and torch's optimizers do the same work.
        # https://github.com/deepspeedai/DeepSpeed/pull/5391
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "offload_optimizer" in self.config.get("zero_optimization", {}):
            self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        # 3. DeepSpeed and Lightning's check index devices by the local rank; an indexed CPU is the CPU.
        assert self.parallel_devices is not None
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
        # 4. The environment is that of DDP: the parent's own method does the same and accepts only CUDA devices.
        parent: Any = next(kind for kind in type(self).__mro__ if kind.__name__ == "DeepSpeedStrategy")
        super(parent, self).setup_environment()  # type: ignore[misc]

    @contextmanager
    def sharded_context(self, inherited: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Build models sharded, and tell transformers about it.

        Otherwise Hugging Face models start with torch's default weights, and ``from_pretrained`` loads none:
        https://huggingface.co/docs/transformers/deepspeed#non-trainer-integration.
        """
        with inherited():  # completes the config
            known = None  # transformers refers to the config weakly
            if self.zero_stage_3 and find_spec("transformers") is not None and find_spec("accelerate") is not None:
                from transformers.integrations.deepspeed import HfDeepSpeedConfig

                known = HfDeepSpeedConfig(self.config)
            yield
            del known

    def model_sharded_context(self) -> Any:
        """Trainer's hook in which modules are built."""
        return self.sharded_context(super().model_sharded_context)  # type: ignore[misc]

    def module_sharded_context(self) -> Any:
        """Fabric's hook in which modules are built."""
        return self.sharded_context(super().module_sharded_context)  # type: ignore[misc]


# What other packages need to know of it


def step_with_own_optimizer(strategy: Any) -> None:
    """Let the module's optimizer step in place of the config's or DeepSpeed's, on gradients that are not clipped."""
    if is_a(strategy, "DeepSpeedStrategy"):
        config = {name: value for name, value in strategy.config.items() if name not in ("optimizer", "scheduler")}
        config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
        strategy.config = config | {"gradient_clipping": 0.0}


def gathered(weights: Iterable[Tensor], change: bool = False) -> Any:
    """All-gather weights that ZeRO-3 shards, to read them, or to change them as the first rank does."""
    sharded = [weight for weight in weights if hasattr(weight, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if change else None)


@contextmanager
def not_sharded_yet(model: nn.Module) -> Iterator[None]:
    """Let ZeRO-3 shard what is added to a sharded model when it starts, and not as it is made."""
    if not any(hasattr(weight, "ds_id") for weight in model.parameters()):
        yield
        return
    from deepspeed.runtime.zero import partition_parameters as zero

    zero.shutdown_init_context()
    try:
        yield
    finally:
        zero.restore_init_context()
