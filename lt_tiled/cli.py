"""The command line: those of ``LightningCLI``, such as ``fit``, and ``plan`` and ``verify``."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

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

    def instantiate_classes(self) -> None:
        with torch.device("meta") if self.subcommand == "plan" else nullcontext():
            super().instantiate_classes()

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
        save_config_kwargs={"config_filename": "run.yaml", "overwrite": True},  # and never the user's config.yaml
    )


def _with_own_configs(args: list[str]) -> list[str]:
    """Replace ``configs/...`` by the package's file (in a checkout, the repository's) where no such file exists."""
    package = Path(lt_tiled.__file__).parent
    result = []
    for arg in args:
        option, equals, name = arg.rpartition("=")
        if name.startswith("configs/") and option in ("", "--config", "--model", "--data", "--trainer"):
            places = [Path(name), package / name, package.parent / name]
            name = str(next((place for place in places if place.exists()), name))
        result.append(f"{option}{equals}{name}")
    return result
