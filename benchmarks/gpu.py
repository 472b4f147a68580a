"""Measure on a GPU: ``python -m benchmarks.gpu [MINUTES]``.

It runs the tests that need a GPU in the first half of the time, and then the benchmarks whose figures only a GPU can
show. Without a GPU it runs the same benchmarks at small sizes, which tells whether they run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TESTS = ["-m", "pytest", "-q", "-m", "gpu", "tests"]
BENCHMARKS = ["-m", "benchmarks", "--only", "step_time", "host", "loss", "longest"]


def main() -> None:
    """Run both commands, which print what they find."""
    end = time.monotonic() + 60 * float(sys.argv[1] if sys.argv[1:] else 10)
    commands = [TESTS, BENCHMARKS]
    if not torch.cuda.is_available():
        print("There is no CUDA device: no figure counts.")
        commands = [[*BENCHMARKS, "--quick"]]
    failed = []
    for index, command in enumerate(commands):
        left = (end - time.monotonic()) / (len(commands) - index)
        try:
            if subprocess.run([sys.executable, *command], cwd=ROOT, timeout=max(left, 1)).returncode:
                failed.append(f"{' '.join(command)} failed")
        except subprocess.TimeoutExpired:
            failed.append(f"{' '.join(command)} had no more than {left:.0f} s")
    sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
