"""A training script, as a user starts one: three steps of each engine with offload to disk, and a file of each rank
that says what it saw.

``program.py directory engine [engine] [--nodes N] [--devices N] [--fail-on RANK]``, a rank of the last engine's run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
from torch import Tensor

import lt_tiled
from lt_tiled import ActivationCheckpointing
from tests.engines.cells import strategy
from tests.lit import LitTiny, trainer


class MayFail(LitTiny):
    def __init__(self, fail_on: int | None) -> None:
        super().__init__()
        self.fail_on = fail_on

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        if index == 1 and self.global_rank == self.fail_on:
            raise ArithmeticError("this rank fails")
        return super().training_step(ids, index)


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


def trainer_of(args: argparse.Namespace, engine: str) -> pl.Trainer:
    spill = args.directory / "spill"
    policy = ActivationCheckpointing(offload="disk", directory=str(spill), disk_budget="8MiB", keep_last=0)
    return trainer(
        strategy(lt_tiled, engine, tiling=4, activation_checkpointing=policy),
        devices=args.devices,
        num_nodes=args.nodes,
        callbacks=[Tell(args.directory / engine)],
        limit_val_batches=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--fail-on", type=int)
    args = parser.parse_args()
    for engine in args.engines[:-1]:
        trainer_of(args, engine).fit(MayFail(None))
    trainer_of(args, args.engines[-1]).fit(MayFail(args.fail_on))


if __name__ == "__main__":
    main()
