"""Engines on the ranks of a world, with Lightning or without, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import lt_tiled
from lt_tiled import ActivationCheckpointing
from tests.models import Block, lm_loss
from tests.parity import sgd

ENGINES = ("ddp", "fsdp", "fsdp_flat", "fsdp2", "zero1", "zero2", "zero3")


def policies(mode: str, directory: str) -> dict[str, Any]:
    """The policies of a strategy: none if the mode is ``untiled``, or tiles and block inputs on the disk."""
    if mode == "untiled":
        return {"tiling": None, "activation_checkpointing": None}
    offload = ActivationCheckpointing(offload="disk", directory=directory, keep_last=0)
    return {"tiling": 4, "activation_checkpointing": offload}


LIMITS = ("param_persistence_threshold", "prefetch_bucket_size", "max_reuse_distance", "max_live_parameters")
NO_LIMITS = {f"stage3_{limit}": 0 for limit in LIMITS}
"""Else ZeRO-3 gathers weights as small as these together, once, and keeps them."""


def strategy(home: Any, engine: str, **kwargs: Any) -> Any:
    """A strategy of ``lt_tiled`` (for Trainer) or ``lt_tiled.fabric``."""
    if engine == "ddp":
        return home.TiledDDPStrategy(**kwargs)
    if engine == "fsdp":
        return home.TiledFSDPStrategy(**kwargs)
    if engine == "fsdp_flat":
        return home.TiledFSDPStrategy(use_orig_params=False, **kwargs)
    if engine == "fsdp2":
        return home.TiledModelParallelStrategy(**kwargs)
    zero = home.TiledDeepSpeedStrategy(stage=int(engine[-1]), **kwargs)
    zero.config["zero_optimization"].update(NO_LIMITS)
    if home.__name__.endswith("fabric"):
        zero.config["gradient_clipping"] = 0.0  # DeepSpeed's own default is 1.0; Trainer sets it from gradient_clip_val
    return zero


def launch(chosen: Any, **options: Any) -> Fabric:
    """Seed torch, and return Fabric on the ranks of this world with an engine and its options, or with a strategy."""
    chosen = strategy(lt_tiled.fabric, chosen, **options) if isinstance(chosen, str) else chosen
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=chosen)
    fabric.launch()
    torch.manual_seed(0)
    return fabric


def set_up(
    fabric: Fabric, net: nn.Module, engine: str, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
) -> tuple[Any, Any]:
    if engine != "fsdp_flat":
        return fabric.setup(net, optimizer(net.parameters()))
    model = fabric.setup_module(net)
    return model, fabric.setup_optimizers(optimizer(model.parameters()))


def zero(engine: str) -> dict[str, Any]:
    """DeepSpeed's config of a stage."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(engine[-1])} | NO_LIMITS,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }


def wrapped(engine: str, net: nn.Module, block: type[nn.Module] = Block) -> tuple[Any, Any, Any]:
    """A model in an engine without Lightning, its backward pass and its step."""
    if engine.startswith("zero"):
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        if get_accelerator().device_name() != "cpu":
            set_accelerator(CPU_Accelerator())
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which compiles for minutes
        model, *_ = deepspeed.initialize(model=net, optimizer=sgd(net.parameters()), config=zero(engine))
        return model, model.backward, model.step
    model: Any = net
    if engine == "ddp":
        model = DistributedDataParallel(net)
    elif engine in ("fsdp", "fsdp_flat"):
        arguments = {"device_id": torch.device("cpu"), "use_orig_params": engine == "fsdp"}
        model = FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({block}), **arguments)
    else:
        for module in [m for m in net.modules() if isinstance(m, block)]:
            fully_shard(module)
        fully_shard(net)
    optimizer = sgd(model.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return model, Tensor.backward, step


def train(fabric: Fabric, model: Any, optimizer: Any, batches: Iterable[Tensor]) -> list[float]:
    """One optimizer step on each batch; the losses."""
    return [step_on(fabric, optimizer, lm_loss(model(ids), ids)) for ids in batches]


def step_on(fabric: Fabric, optimizer: Any, loss: Tensor) -> float:
    """One optimizer step on a loss, which is returned."""
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def draw(shape: tuple[int, int], rank: int) -> Tensor:
    return torch.randint(32, shape, generator=torch.Generator().manual_seed(100 * rank + shape[1]))


def error_of(fn: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and the text of the error that a call ends with."""
    try:
        fn()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"
