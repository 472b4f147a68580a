"""What ``import lt_tiled`` loads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, lt_tiled
print(*(name for name in sys.modules if name.startswith(("lt_tiled.planner", "deepspeed", "transformers", "matplotlib"))))
"""


def test_import_loads_no_optional_packages() -> None:
    """``import lt_tiled`` loads neither the planner nor DeepSpeed, transformers or matplotlib."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
