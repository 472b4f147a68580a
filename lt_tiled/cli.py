"""The command line: ``lt-tiled fit``, ``validate``, ``test`` and ``predict`` of ``LightningCLI``, and ``plan``."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningCLI

import lt_tiled
from lt_tiled import lm as lm  # short names: --model=CausalLM --data=TextFiles
from lt_tiled.callbacks import TilingReport
from lt_tiled.planner.command import run_plan
from lt_tiled.planner.fake import CannotSimulate


class PlanningTrainer(Trainer):
    """A Trainer in whose name ``plan`` takes its arguments; nothing else is different."""

    plan = staticmethod(run_plan)


class TiledCLI(LightningCLI):
    """Adds ``plan``, for which modules are made without memory and no Trainer is made."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), "plan": {"config", "trainer", "model", "datamodule"}}

    def instantiate_classes(self) -> None:
        with torch.device("meta") if self.subcommand == "plan" else nullcontext():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.subcommand != "plan":
            return super().instantiate_trainer(**kwargs)
        return SimpleNamespace(plan=self._plan)  # type: ignore[return-value]

    def _plan(self, **kwargs: Any) -> None:
        self._dump_config()
        try:
            run_plan(self.config_dump, self._get(self.config_init, "trainer", default={}), **kwargs)
        except (ValueError, CannotSimulate) as error:
            raise SystemExit(f"lt-tiled plan: {error}") from error


def main(args: ArgsType = None) -> None:
    """Run the command line on ``args``, by default those of the process.

    ``--config configs/quickstart.yaml`` and the others of the repository also work where there is no such file: the package brings them.
    """
    if args is None:
        sys.argv[1:] = [_brought(arg) for arg in sys.argv[1:]]  # also for the ranks, which Lightning starts by it
        sys.path.insert(0, os.getcwd())  # for a model and data of one's own: --model=my_model.MyModel
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # the fields of the policies show their help
    TiledCLI(
        args=args,
        trainer_class=PlanningTrainer,
        trainer_defaults={"callbacks": [TilingReport()]},
        parser_kwargs={"prog": "lt-tiled", "description": lt_tiled.__doc__, "version": lt_tiled.__version__},
        save_config_kwargs={"overwrite": True},
    )


def _brought(arg: str) -> str:
    """The package's own config (in a checkout, the repository's), where an argument names one that the working directory has not."""
    option, equals, name = arg.rpartition("=")
    package = Path(__file__).parent
    if name.startswith("configs/") and not Path(name).exists():
        for home in (package, package.parent):
            if (home / name).is_file():
                return f"{option}{equals}{home / name}"
    return arg
