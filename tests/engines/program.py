"""A training script, as a user starts one: three steps of each engine with offload to disk, and a file of each rank
that says what it saw. The options on how a run ends are those of the last engine's.

``program.py directory engine [engine] [--nodes N] [--devices N] [--fail-on RANK] [--terminate RANK] [--kill-torchrun]
[--kill-first early|late] [--validate]``
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

import lt_tiled
from lt_tiled import ActivationCheckpointing
from tests.engines.cells import strategy
from tests.lit import LitTiny, trainer


class MayFail(LitTiny):
    def __init__(self, fail_on: int | None, terminate: int | None, kill_torchrun: bool) -> None:
        super().__init__()
        self.fail_on, self.terminate, self.kill_torchrun = fail_on, terminate, kill_torchrun

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        if index == 1 and self.global_rank == self.fail_on:
            raise ArithmeticError("this rank fails")
        if index == 1 and self.global_rank == self.terminate:
            os.kill(os.getpid(), signal.SIGTERM)
        if index == 1 and self.global_rank == 0 and self.kill_torchrun:
            os.kill(parent := os.getppid(), signal.SIGKILL)
            while os.getppid() == parent:
                time.sleep(0.01)
        return super().training_step(ids, index)

    def validation_step(self, ids: Tensor, index: int) -> None:
        if self.global_rank == self.terminate:
            os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()  # where the other rank waits
        super().validation_step(ids, index)


class Tell(pl.Callback):
    """Writes a file for each rank: its place, its share of the node's budget, its spill file, and its losses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def on_train_end(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        spill = run.strategy.prepared[0].offloader.disk.spill
        told = {
            "rank": run.global_rank,
            "node": run.node_rank,
            "world": run.world_size,
            "budget": spill.budget,
            "losses": module.losses,
            "disk_bytes": run.strategy.prepared[0].offloader.so_far().disk_bytes,
        }
        (self.directory / f"rank{run.global_rank}.json").write_text(json.dumps(told))


def kill_this(after: Path | Literal[False]) -> None:
    while after and not after.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(args: argparse.Namespace, engine: str) -> pl.Trainer:
    spill = args.directory / "spill"
    policy = ActivationCheckpointing(offload="disk", directory=str(spill), disk_budget="8MiB", min_bytes=0, keep_last=0)
    return trainer(
        strategy(lt_tiled, engine, tiling=4, activation_checkpointing=policy),
        devices=args.devices,
        num_nodes=args.nodes,
        callbacks=[Tell(args.directory / engine)],
        limit_val_batches=int(args.validate),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--fail-on", type=int)
    parser.add_argument("--terminate", type=int)
    parser.add_argument("--kill-torchrun", action="store_true")
    parser.add_argument("--kill-first", choices=["early", "late"])
    parser.add_argument("--validate", action="store_true")
    args = parser.parse_args()
    for engine in args.engines[:-1]:
        trainer_of(args, engine).fit(MayFail(None, None, False))
    run = trainer_of(args, args.engines[-1])
    if args.kill_first and "LOCAL_RANK" in os.environ:
        (args.directory / "second").touch()  # it waits for the first rank from here on
    elif args.kill_first:
        run.strategy.setup_environment = partial(
            kill_this, after=args.kill_first == "late" and args.directory / "second"
        )
    model = MayFail(args.fail_on, args.terminate, args.kill_torchrun)
    if args.validate:
        run.validate(model)
    else:
        run.fit(model)


if __name__ == "__main__":
    main()
