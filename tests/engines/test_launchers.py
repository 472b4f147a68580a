"""Started as users start it, by each launcher with each engine: the table on docs/start/hugging_face.md."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch

from tests.engines.cells import zero
from tests.engines.conftest import OnRanks
from tests.engines.launched import untiled
from tests.parity import near
from tests.processes import ROOT, Forked

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("launched.py"))
ENGINES = ("ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3")
LAUNCHERS = {"torchrun": "plain", "lightning": "lightning", "accelerate": "accelerate", "deepspeed": "plain"}
"""The loop of each launcher."""
CELLS = [(a, b) for a in LAUNCHERS for b in ENGINES if a != "accelerate" or not b.startswith("fsdp")]
"""All but FSDP with Accelerate, which applies it on GPUs only and trains with DDP on the CPU."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def commands_of(launcher: str, engine: str, directory: Path) -> list[list[str]]:
    """The commands that start two ranks, without the program: one for each node."""
    port = free_port()
    torchrun = "python -m torch.distributed.run"
    commands = {
        "torchrun": [f"{torchrun} --standalone --nproc-per-node=2"],
        "lightning": ["python"],
        "deepspeed": [f"python -m deepspeed.launcher.runner --num_gpus=2 --master_port={port}"],
        "two nodes": [
            f"{torchrun} --nnodes=2 --nproc-per-node=1 --master-addr=127.0.0.1 --master-port={port} --node-rank={node}"
            for node in range(2)
        ],
    }
    accelerate = f"python -m accelerate.commands.launch --num_machines=1 --num_processes=2 --main_process_port={port}"
    if engine.startswith("zero"):
        config = directory / "zero.json"
        config.write_text(json.dumps(zero(engine)))
        accelerate += f" --use_deepspeed --deepspeed_config_file={config}"
    commands["accelerate"] = [f"{accelerate} --mixed_precision=no" + " --multi_gpu" * (not engine.startswith("zero"))]
    return [command.split() for command in commands[launcher]]


@pytest.mark.table("torchrun-zero3|lightning-fsdp|accelerate-zero3|deepspeed-zero2")
@pytest.mark.parametrize(("launcher", "engine"), [*CELLS, ("two nodes", "fsdp2")])
def test_launchers_and_engines(launcher: str, engine: str, tmp_path: Path, on_ranks: OnRanks) -> None:
    """Two ranks that the launcher starts, on one node or by torchrun on two, train a Llama with the engine to the
    losses of an untiled run under DDP, and exit. With Lightning, ranks divide the disk of a node.
    """
    file, printed = tmp_path / "found", tmp_path / "printed.txt"
    program = [PROGRAM, str(file), LAUNCHERS.get(launcher, "lightning"), engine]
    commands = commands_of(launcher, engine, tmp_path)
    program += ["--nodes=2"] if len(commands) == 2 else []
    runs = [Forked(*command, *program, printed=printed, cwd=tmp_path) for command in commands]
    codes = [run.finish(with_children=True) for run in runs]
    assert set(codes) == {0}, printed.read_text()
    for rank, plain in enumerate(on_ranks.once(untiled, "ddp")):
        losses, found = torch.load(f"{file}.{rank}")
        assert found == engine
        assert losses == near(plain)


def test_the_table_is_what_is_tested() -> None:
    """The page has a row for each launcher and a column for each engine, and says "yes" where a test runs."""
    page = (ROOT / "docs" / "start" / "hugging_face.md").read_text()
    rows = re.findall(r"^\| `(torchrun|python|accelerate|deepspeed)[^|]*\|(.*)\|$", page, re.M)
    assert [name.replace("python", "lightning") for name, _ in rows] == list(LAUNCHERS)
    for (_, cells), launcher in zip(rows, LAUNCHERS, strict=True):
        tested = [cell.strip() == "yes" for cell in cells.split("|")]
        assert tested == [(launcher, engine) in CELLS for engine in ENGINES]
