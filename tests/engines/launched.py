"""A training script that each launcher starts: three steps of a transformers model, in the loop that users of the
launcher write. Rank 0 saves the engine, the losses of all ranks and the weights.

``launched.py file loop engine``, where the loop is ``plain``, ``accelerate`` or ``lightning``.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lt_tiled
from lt_tiled import Tiling, prepare
from tests.engines.cells import sgd, strategy
from tests.lit import trainer
from tests.models import tiny_llama

STEPS = 3
POLICIES: dict[str, Any] = {"tiling": Tiling(4), "activation_checkpointing": True, "loss": True}


def ids_of(step: int, rank: int) -> Tensor:
    return torch.randint(32, (1, 24 + step), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def zero(engine: str) -> dict[str, Any]:
    """DeepSpeed's config, with which ZeRO-3 shards weights as small as these."""
    limits = ("param_persistence_threshold", "prefetch_bucket_size", "max_reuse_distance", "max_live_parameters")
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(engine[-1])} | {f"stage3_{limit}": 0 for limit in limits},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }


def plain(engine: str, net: nn.Module, block: type[nn.Module]) -> tuple[list[float], nn.Module]:
    """A loop of the user's own, under torchrun and under DeepSpeed's launcher."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model: Any = net
    if engine == "ddp":
        model = DistributedDataParallel(net)
    elif engine == "fsdp":
        policy = ModuleWrapPolicy({block})
        model = FullyShardedDataParallel(
            net, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
    elif engine == "fsdp2":
        for module in [m for m in net.modules() if isinstance(m, block)]:
            fully_shard(module)
        fully_shard(net)
    optimizer = sgd(model.parameters())
    if engine.startswith("zero"):
        import deepspeed

        model, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=zero(engine))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, ids_of(step, dist.get_rank()))
        losses.append(float(loss.detach()))
        if engine.startswith("zero"):
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def accelerate(engine: str, net: nn.Module, block: type[nn.Module]) -> tuple[list[float], nn.Module]:
    """A loop with Accelerate, which ``accelerate launch`` tells the engine."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=engine == "ddp")
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, ids_of(step, dist.get_rank()))
        losses.append(float(loss.detach()))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


class Lit(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.model, self.losses = net, list[float]()

    def training_step(self, _: Tensor) -> Tensor:
        loss = loss_of(self.model, ids_of(self.global_step, self.global_rank))
        self.losses.append(float(loss.detach()))
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(2 * STEPS))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


class Keep(pl.Callback):
    """Reads the model before the strategy restores it."""

    def on_train_end(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        assert all(row.tiles == 4 for row in run.strategy.prepared[0].report().tiled)
        self.found = engine_of(run.strategy.model), weights(run.strategy.model)


def lightning(engine: str, net: nn.Module) -> tuple[list[float], str, list[Tensor]]:
    module, keep = Lit(net), Keep()
    chosen = strategy(lt_tiled, engine, **POLICIES)
    trainer(chosen, devices=2, max_steps=STEPS, callbacks=[keep], limit_val_batches=0).fit(module)
    return module.losses, *keep.found


def engine_of(model: Any) -> str:
    """The engine that wraps a model."""
    if hasattr(model, "zero_optimization_stage"):
        return f"zero{model.zero_optimization_stage()}"
    kinds = {DistributedDataParallel: "ddp", FullyShardedDataParallel: "fsdp", FSDPModule: "fsdp2"}
    return next(name for kind, name in kinds.items() if isinstance(model, kind))


def weights(model: Any) -> list[Tensor]:
    """The full weights, in the order of the model."""
    with ExitStack() as gathered:
        if any(hasattr(w, "ds_id") for w in model.parameters()):
            import deepspeed

            gathered.enter_context(deepspeed.zero.GatheredParameters(list(model.parameters())))
        if isinstance(model, FullyShardedDataParallel):
            gathered.enter_context(FullyShardedDataParallel.summon_full_params(model, writeback=False))
        return [(w.full_tensor() if isinstance(w, DTensor) else w).detach().float().clone() for w in model.parameters()]


def untiled(engine: str) -> tuple[list[float], list[Tensor]]:
    """The losses and weights of an untiled run on ranks that the tests started."""
    torch.manual_seed(0)
    net = tiny_llama(use_cache=False)
    losses, model = plain(engine, net, type(net.model.layers[0]))
    return losses, weights(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("file", "loop", "engine"):
        parser.add_argument(name)
    parser.add_argument("--local_rank", help="by which DeepSpeed's launcher names the rank")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.engine.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which compiles for minutes
    torch.manual_seed(0)
    net = tiny_llama(use_cache=False)
    if chosen.loop == "lightning":
        losses, found, full = lightning(chosen.engine, net)
    else:
        loop = {"plain": plain, "accelerate": accelerate}[chosen.loop]
        with prepare(net, **POLICIES) as prepared:
            losses, model = loop(chosen.engine, net, type(net.model.layers[0]))
            assert all(row.tiles == 4 for row in prepared.report().tiled)
            found, full = engine_of(model), weights(model)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    if dist.get_rank() == 0:
        torch.save((found, everyone, full), chosen.file)
    dist.barrier()


if __name__ == "__main__":
    main()
