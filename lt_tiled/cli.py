"""The command line: ``lt-tiled fit``, ``validate``, ``test`` and ``predict`` of ``LightningCLI``."""

from __future__ import annotations

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import ArgsType, LightningCLI

import lt_tiled
from lt_tiled import lm as lm  # short names: --model=CausalLM --data=TextFiles
from lt_tiled.callbacks import TilingReport


def main(args: ArgsType = None) -> None:
    """Run the command line on ``args``, by default those of the process."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # the fields of the policies show their help
    LightningCLI(
        args=args,
        trainer_defaults={"callbacks": [TilingReport()]},
        parser_kwargs={"prog": "lt-tiled", "description": lt_tiled.__doc__, "version": lt_tiled.__version__},
        save_config_kwargs={"overwrite": True},
    )
