"""A training script that each launcher starts: three steps of a transformers model, in the loop that users of the
launcher write. Each rank saves its losses and the engine that it found.

``launched.py file loop engine [--nodes N]``, where the loop is ``plain``, ``accelerate`` or ``lightning``.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import lt_tiled
from lt_tiled import ActivationCheckpointing, Tiling, prepare
from tests.engines.cells import sgd, strategy, wrapped
from tests.lit import trainer
from tests.models import tiny_llama

STEPS = 3
POLICIES: dict[str, Any] = {"tiling": Tiling(4), "activation_checkpointing": True, "loss": True}
DISK = 8 * 2**20
"""The budget of a node, in bytes."""


def loss_of(model: Any, step: int) -> Tensor:
    rank = dist.get_rank()
    ids = torch.randint(32, (1, 24 + step), generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def plain(engine: str, net: nn.Module) -> tuple[list[float], nn.Module]:
    """A loop of the user's own, under torchrun and under DeepSpeed's launcher."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, backward, step = wrapped(engine, net, type(net.model.layers[0]))  # type: ignore[index, union-attr]
    losses = []
    for index in range(STEPS):
        loss = loss_of(model, index)
        losses.append(float(loss.detach()))
        backward(loss)
        step()
    return losses, model


def accelerate(engine: str, net: nn.Module) -> tuple[list[float], nn.Module]:
    """A loop with Accelerate, which ``accelerate launch`` tells the engine."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=engine == "ddp")
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
    losses = []
    for index in range(STEPS):
        loss = loss_of(model, index)
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
        loss = loss_of(self.model, self.global_step)
        self.losses.append(float(loss.detach()))
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(2 * STEPS))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())

    def on_train_end(self) -> None:
        """Read the model, and this rank's share of its node's disk, before the strategy restores it."""
        (prepared,) = self.trainer.strategy.prepared
        assert all(row.tiles == 4 for row in prepared.report().tiled)
        assert prepared.offloader.stats.disk_bytes > 0
        assert prepared.offloader.disk.limit == DISK * self.trainer.num_nodes // self.trainer.world_size
        self.engine = engine_of(self.trainer.strategy.model)


def lightning(engine: str, net: nn.Module, nodes: int) -> tuple[list[float], str]:
    """A Trainer that offloads to the disk."""
    offload = ActivationCheckpointing(offload="disk", directory=".", disk_budget=DISK, keep_last=0)
    chosen = strategy(lt_tiled, engine, **{**POLICIES, "activation_checkpointing": offload})
    options = {"devices": 2 // nodes, "num_nodes": nodes, "max_steps": STEPS, "limit_val_batches": 0}
    trainer(chosen, **options).fit(module := Lit(net))
    return module.losses, module.engine


def engine_of(model: Any) -> str:
    """The engine that wraps a model."""
    if hasattr(model, "zero_optimization_stage"):
        return f"zero{model.zero_optimization_stage()}"
    kinds = {DistributedDataParallel: "ddp", FullyShardedDataParallel: "fsdp", FSDPModule: "fsdp2"}
    return next(name for kind, name in kinds.items() if isinstance(model, kind))


def untiled(engine: str) -> list[float]:
    """The losses of this rank without lt_tiled, on ranks that the tests started."""
    torch.manual_seed(0)
    return plain(engine, tiny_llama(use_cache=False))[0]


def trained(loop: str, engine: str, nodes: int) -> tuple[list[float], str]:
    """The losses of this rank, and the engine that was found."""
    torch.manual_seed(0)
    net = tiny_llama(use_cache=False)
    if loop == "lightning":
        return lightning(engine, net, nodes)
    with prepare(net, **POLICIES) as prepared:
        losses, model = {"plain": plain, "accelerate": accelerate}[loop](engine, net)
        assert all(row.tiles == 4 for row in prepared.report().tiled)
        return losses, engine_of(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("file", "loop", "engine"):
        parser.add_argument(name)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--local_rank", help="by which DeepSpeed's launcher names the rank")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.engine.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which compiles for minutes
    torch.save(trained(chosen.loop, chosen.engine, chosen.nodes), f"{chosen.file}.{dist.get_rank()}")
    # Collect the engine, which holds process groups, so that their threads end here. One that frees a tensor of Python
    # while the interpreter ends aborts the process.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
