"""The command line: those of ``LightningCLI``, such as ``fit``, and ``plan`` and ``verify``."""

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
    """Adds the commands ``plan``, which makes modules without memory, and ``verify``. They get no Trainer."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        arguments = {"trainer", "model", "datamodule"}
        return LightningCLI.subcommands() | {"plan": arguments, "verify": arguments}

    def instantiate_classes(self) -> None:
        with torch.device("meta") if self.subcommand == "plan" else nullcontext():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.subcommand not in ("plan", "verify"):
            return super().instantiate_trainer(**kwargs)
        return SimpleNamespace(plan=self._plan, verify=self._verify)  # type: ignore[return-value]

    def _plan(self, **kwargs: Any) -> None:
        try:
            run_plan(self._get(self.config_init, "trainer", default={}), **kwargs)
        except DoesNotFitError as error:  # an answer
            raise SystemExit(str(error)) from error

    def _verify(self, **kwargs: Any) -> None:
        if not run_verify(self._get(self.config_init, "trainer", default={}), **kwargs).passed:
            raise SystemExit(1)


def main(args: list[str] | None = None) -> None:
    """Run the command line on ``args``, by default those of the process.

    ``--config configs/quickstart.yaml`` and the repository's other files also work elsewhere: they are in the package.
    """
    quiet_libraries()
    if args is None:
        sys.argv[1:] = [_with_own_config(arg) for arg in sys.argv[1:]]  # Lightning starts the other ranks with it
        sys.path.append(os.getcwd())  # for --model=my_model.MyModel
    else:
        args = [_with_own_config(arg) for arg in args]
    # Lightning turns it on. It is slow, and only the help shows the fields of policies.
    shows_help = any("help" in arg for arg in args or sys.argv)
    set_parsing_settings(docstring_parse_attribute_docstrings=shows_help)
    TiledCLI(
        args=args,
        trainer_class=CommandsTrainer,
        trainer_defaults={"callbacks": [TilingReport()]},
        parser_kwargs={"prog": "lt-tiled", "description": lt_tiled.__doc__, "version": lt_tiled.__version__},
        save_config_kwargs={"config_filename": "run.yaml", "overwrite": True},  # and never the user's config.yaml
    )


def _with_own_config(arg: str) -> str:
    """Replace ``configs/...`` by the package's file (in a checkout, the repository's) where no such file exists."""
    option, equals, name = arg.rpartition("=")
    if name.startswith("configs/") and option in ("", "--config", "--model", "--data", "--trainer"):
        package = Path(lt_tiled.__file__).parent
        for place in (Path(name), package / name, package.parent / name):
            if place.exists():
                return f"{option}{equals}{place}"
    return arg
