"""A training script that each launcher starts, with a loop of its users: ``launched.py file loop engine``. Each rank
saves its losses.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from torch import Tensor

from lt_tiled import prepare
from tests.engines.kinds import KINDS
from tests.engines.test_matrix import TILED, Losses, in_plain_loop, in_trainer, train
from tests.parity import sgd


def plain(engine: str) -> Losses:
    """A loop of the user's own, under torchrun and under DeepSpeed's launcher."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return in_plain_loop(engine, KINDS["checkpointed"], TILED)


def lightning(engine: str) -> Losses:
    """A Trainer."""
    return in_trainer(engine, KINDS["checkpointed"], TILED)


def accelerate(engine: str) -> Losses:
    """A loop with Accelerate, which ``accelerate launch`` tells the engine."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    kind = KINDS["checkpointed"]
    net = kind.build()
    with prepare(net, **TILED):
        accelerator = Accelerator(cpu=engine == "ddp")
        model, optimizer = accelerator.prepare(net, sgd(net.parameters()))
        assert engine == "ddp" or model.zero_optimization_stage() == int(engine[-1])

        def step_on(step: int) -> Tensor:
            loss = kind.loss(model, step, dist.get_rank())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train(model, kind, step_on)


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
    losses, _ = {"plain": plain, "lightning": lightning, "accelerate": accelerate}[chosen.loop](chosen.engine)
    torch.save(losses, f"{chosen.file}.{dist.get_rank()}")
    # Collect the engine, which holds process groups, so that their threads end here. One that frees a tensor of Python
    # while the interpreter ends aborts the process.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
