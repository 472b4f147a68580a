"""What ``import lt_tiled`` loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, lightning.pytorch, lightning.fabric  # torchmetrics loads matplotlib if it is installed
before = set(sys.modules)
import lt_tiled
unwanted = ("lt_tiled.planner", "deepspeed", "transformers", "matplotlib", "pytorch_lightning")
print(*(name for name in sys.modules.keys() - before if name.startswith(unwanted)))
sys.modules["deepspeed"] = None
lt_tiled.TiledFSDPStrategy()
"""


def test_import_loads_no_optional_packages() -> None:
    """``import lt_tiled`` loads neither the planner nor DeepSpeed, transformers, matplotlib or a second Lightning, and
    where DeepSpeed is not installed the strategies of other engines work.
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
