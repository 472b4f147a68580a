"""Started as users start it, by each launcher with each engine: the table on docs/start/hugging_face.md."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from tests.engines.cells import zero
from tests.engines.test_matrix import run
from tests.parity import near
from tests.processes import Forked
from tests.world import OnRanks

PROGRAM = str(Path(__file__).with_name("launched.py"))
ENGINES = ("ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")
LAUNCHERS = {"torchrun": "plain", "lightning": "lightning", "accelerate": "accelerate", "deepspeed": "plain"}
"""The loop of each launcher."""
CELLS = [(a, b) for a in LAUNCHERS for b in ENGINES if a != "accelerate" or not b.startswith("fsdp")]
"""All but FSDP with Accelerate, which applies it on GPUs only and trains with DDP on the CPU."""


def command_of(launcher: str, engine: str, directory: Path) -> str:
    """Return the command that starts two ranks, without the program."""
    if launcher == "torchrun":
        return "python -m torch.distributed.run --standalone --nproc-per-node=2"
    if launcher == "lightning":
        return "python"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    if launcher == "deepspeed":
        return f"python -m deepspeed.launcher.runner --num_gpus=2 --master_port={port}"
    accelerate = f"python -m accelerate.commands.launch --num_machines=1 --num_processes=2 --main_process_port={port}"
    if engine == "ddp":
        return f"{accelerate} --mixed_precision=no --multi_gpu"
    config = directory / "zero.json"
    config.write_text(json.dumps(zero(engine)))
    return f"{accelerate} --mixed_precision=no --use_deepspeed --deepspeed_config_file={config}"


@pytest.mark.slow
@pytest.mark.table("torchrun-fsdp2")
@pytest.mark.parametrize(("launcher", "engine"), CELLS)
def test_launchers_and_engines(launcher: str, engine: str, tmp_path: Path, on_ranks: OnRanks) -> None:
    """Two ranks that the launcher starts train with the engine to the losses of an untiled run under DDP, and exit."""
    file, printed = tmp_path / "found", tmp_path / "printed.txt"
    command = command_of(launcher, engine, tmp_path).split()
    started = Forked(*command, PROGRAM, str(file), LAUNCHERS[launcher], engine, printed=printed, cwd=tmp_path)
    assert started.finish(with_children=True) == 0, printed.read_text()
    for rank, (plain, _) in enumerate(on_ranks.once(run, "ddp", "fabric", "checkpointed", False)):
        assert torch.load(f"{file}.{rank}") == near(plain)
