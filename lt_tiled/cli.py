"""The command line: those of ``LightningCLI``, such as ``fit``, and ``plan`` and ``verify``."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerTypeTuple,
    ReduceLROnPlateau,
    SaveConfigCallback,
    instantiate_class,
)
from torch.optim import Optimizer

import lt_tiled
from lt_tiled import lm as lm  # short names: --model=CausalLM --data=TextFiles
from lt_tiled._log import quiet_libraries
from lt_tiled.callbacks import TilingReport
from lt_tiled.errors import DoesNotFitError
from lt_tiled.planner.command import run_plan
from lt_tiled.verification import run_verify


class CommandsTrainer(Trainer):
    """A Trainer with the other commands as methods, from which the command line takes their arguments and help."""

    plan = staticmethod(run_plan)
    verify = staticmethod(run_verify)


class TiledCLI(LightningCLI):
    """Adds the commands ``plan``, which makes modules without memory, and ``verify``.

    They get no Trainer: they take its arguments.

    Args:
        command: The command that runs, if it is known: no parsers are built for the others, because that is slow.
    """

    def __init__(self, command: str, **kwargs: Any) -> None:
        self.command = command
        super().__init__(**kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static in LightningCLI, called on objects
        arguments = {"config", "trainer", "model", "datamodule"}
        commands = {**LightningCLI.subcommands(), "plan": arguments, "verify": arguments}
        return {self.command: commands[self.command]} if self.command in commands else commands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args((Optimizer,))
        parser.add_lr_scheduler_args(LRSchedulerTypeTuple)

    def instantiate_classes(self) -> None:
        with torch.device("meta") if self.subcommand == "plan" else nullcontext():
            super().instantiate_classes()
        optimizer, scheduler = (self._get(self.config_init, name) for name in ("optimizer", "lr_scheduler"))
        if optimizer:

            def configure_optimizers(module: LightningModule) -> Any:
                return _optimizers(module, optimizer, scheduler)

            self.model.configure_optimizers = MethodType(configure_optimizers, self.model)
        elif scheduler:
            raise ValueError("lr_scheduler needs an optimizer: add one, such as --optimizer=AdamW.")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.subcommand not in ("plan", "verify"):
            return super().instantiate_trainer(**kwargs)
        return SimpleNamespace(plan=self._plan, verify=self._verify)  # type: ignore[return-value]

    def _plan(self, **kwargs: Any) -> None:
        self._dump_config()
        gc.freeze()  # else each collection looks through what the imports made, a tenth of the time
        try:
            run_plan(self.config_dump, self._get(self.config_init, "trainer", default={}), **kwargs)
        except DoesNotFitError as error:  # an answer
            raise SystemExit(str(error)) from error

    def _verify(self, **kwargs: Any) -> None:
        if not run_verify(self._get(self.config_init, "trainer", default={}), **kwargs).passed:
            raise SystemExit(1)


def _optimizers(module: LightningModule, optimizer: Any, scheduler: Any) -> Any:
    """Return what ``--optimizer`` and ``--lr_scheduler`` say, for the weights that ``configure_model`` has made."""
    optimizer = instantiate_class([p for p in module.parameters() if p.requires_grad], optimizer)
    if not scheduler:
        return optimizer
    scheduler = instantiate_class(optimizer, scheduler)
    interval = "step" if isinstance(module, lm.CausalLM) else "epoch"  # of its own schedule, and Lightning's default
    monitor = {"monitor": scheduler.monitor} if isinstance(scheduler, ReduceLROnPlateau) else {}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval, **monitor}}


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration of the run as Lightning does, and never overwrites a file that it was read from."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        read = {Path(str(path)).resolve() for path in self.config.get("config") or []}
        if trainer.log_dir is not None and (Path(trainer.log_dir) / self.config_filename).resolve() in read:
            self.config_filename = "config_of_run.yaml"
        super().setup(trainer, pl_module, stage)


def main(args: list[str] | None = None) -> None:
    """Run the command line on ``args``, by default those of the process.

    ``--config configs/quickstart.yaml`` and the repository's other files also work elsewhere: they are in the package.
    """
    is_process = args is None
    args = _with_own_configs(sys.argv[1:] if args is None else args)
    quiet_libraries()
    if is_process:
        sys.argv[1:] = args  # Lightning starts the other ranks with it
        sys.path.append(os.getcwd())  # for --model=my_model.MyModel
    shows_help = any(arg == "-h" or "help" in arg or "comments" in arg for arg in args)
    set_parsing_settings(docstring_parse_attribute_docstrings=shows_help)  # slow, and only help shows policies' fields
    TiledCLI(
        command=args[0] if args else "",
        args=None if is_process else args,
        trainer_class=CommandsTrainer,
        trainer_defaults={"callbacks": [TilingReport()]},
        parser_kwargs={"prog": "lt-tiled", "description": lt_tiled.__doc__, "version": lt_tiled.__version__},
        save_config_callback=SaveRunConfig,
        auto_configure_optimizers=False,  # it would make them before the weights exist
        save_config_kwargs={"overwrite": True},
    )


def _with_own_configs(args: list[str]) -> list[str]:
    """Replace ``configs/...`` by the package's file (in a checkout, the repository's) where no such file exists."""
    package, result, previous = Path(lt_tiled.__file__).parent, list[str](), ""
    for arg in args:
        option, equals, name = arg.partition("=") if arg.startswith("--") else (previous, "", arg)
        previous = arg
        if option in ("--config", "--model", "--data", "--trainer") and name.startswith("configs/"):
            places = (Path(), package, package.parent)
            name = next((str(place / name) for place in places if (place / name).exists()), name)
            arg = f"{option}={name}" if equals else name
        result.append(arg)
    return result
