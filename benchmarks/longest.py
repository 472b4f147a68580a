"""The longest sequence that trains within a fixed memory, feature by feature: ``python -m benchmarks --only longest``.

Each rung is a process of its own (``python -m benchmarks.longest``), in which ``SequenceLengthFinder`` tries a Llama's
training step on longer and longer text until memory ends: on a GPU what the process may allocate there, on a CPU its
address space beyond what it has before the run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.memory import is_oom_error

from benchmarks.sheet import Sheet, machine
from lt_tiled import ActivationCheckpointing, TiledSingleDeviceStrategy, Tiling
from lt_tiled.callbacks import SequenceLengthFinder
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.memory import gib
from lt_tiled.policies import Tiers

RUNGS: dict[str, tuple[bool, bool, Tiers | None, bool]] = {
    "plain": (False, False, None, False),
    "activation checkpointing": (True, False, None, False),
    "+ tiled loss": (True, True, None, False),
    "+ tiled MLPs": (True, True, None, True),
    "+ block inputs on disk": (True, True, "disk", True),
}
"""Activation checkpointing, tiled loss, offload, tiled MLPs."""


@dataclass(frozen=True)
class Room:
    """A model and the memory that a run of it may take."""

    model: dict[str, Any]
    nbytes: int
    granule: int
    start: int
    shards: int | None = 32
    """Tiles of the MLPs and of the loss: at this size ``"auto"`` finds none worth it."""


LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4}
QUICK = Room(
    {**LLAMA, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 8192}, 2**27, 256, 256
)
HERE = Room(
    {**LLAMA, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 16384},
    3 * 2**26,
    256,
    256,
)
ON_GPU = Room(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    40 * 2**30,
    4096,
    8192,
    None,
)


def longest(device: torch.device, quick: bool, directory: str) -> list[Sheet]:
    """One row for each rung."""
    size = "gpu" if device.type == "cuda" else "quick" if quick else "here"
    room = ROOMS[size]
    if device.type == "cuda" and room.nbytes > 0.9 * torch.cuda.get_device_properties(device).total_memory:
        raise RuntimeError(f"this GPU has no room for {gib(room.nbytes)}")
    title = f"the longest sequence in {gib(room.nbytes)}: {room.model['num_hidden_layers']} layers of a Llama"
    sheet = Sheet("longest", title, ["", "tokens", "relative to plain"])
    sheet.notes = [f"Within {room.granule} tokens, {machine(device)}."]
    found: dict[str, int] = {}
    for rung in RUNGS:
        found[rung] = _find(rung, size, directory)
        sheet.add(rung, str(found[rung]), f"{found[rung] / max(found['plain'], 1):.1f}")
    return [sheet]


HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""Tensors have mappings of their own, which are given back when they end: no heap that is cut into pieces counts as
taken."""
ROOMS = {"quick": QUICK, "here": HERE, "gpu": ON_GPU}


def _find(rung: str, size: str, directory: str) -> int:
    command = [sys.executable, "-m", "benchmarks.longest", "--rung", rung, "--size", size, "--directory", directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env={**os.environ, **HEAP})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return int(json.loads(done.stdout.strip().splitlines()[-1])["found"])


def main() -> None:
    """One rung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rung", choices=RUNGS, required=True)
    parser.add_argument("--size", choices=ROOMS, default="here")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    room = ROOMS[args.size]
    recompute, loss, offload, tiled = RUNGS[args.rung]
    activation_checkpointing = (
        ActivationCheckpointing(offload=offload, directory=args.directory if offload else None) if recompute else None
    )
    model = CausalLM(room.model, loss=loss and (room.shards or True))
    finder = SequenceLengthFinder(start=room.start, granule=room.granule)

    def fit(seq_len: int, *callbacks: Callback) -> None:
        strategy = TiledSingleDeviceStrategy(
            tiling=Tiling(room.shards or "auto") if tiled else None, activation_checkpointing=activation_checkpointing
        )
        trainer = _trainer(strategy, [*callbacks])
        trainer.fit(model, datamodule=TextFiles(seq_len=seq_len))

    fit(64)  # what is imported and started on the way is there before the limit
    _limit(room.nbytes)
    print(json.dumps({"found": _that_trains(fit, finder)}))


def _that_trains(fit: Callable[..., None], finder: SequenceLengthFinder) -> int:
    """What the finder found, or less: between its steps and the run's, the heap is cut into pieces."""
    try:
        fit(finder.start, finder)
    except RuntimeError as error:
        tokens = finder.found
        if tokens is None or not is_oom_error(error):
            raise
        while (tokens := tokens - finder.granule) > 0:
            try:
                fit(tokens)
            except RuntimeError as shorter:
                if not is_oom_error(shorter):
                    raise
            else:
                return tokens
    return finder.found or 0


QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
"""Arguments of a Trainer that prints and writes nothing."""


def _trainer(strategy: TiledSingleDeviceStrategy, callbacks: list[Callback]) -> Trainer:
    return Trainer(
        strategy=strategy,
        precision="bf16-true" if torch.cuda.is_available() else "32-true",
        max_steps=1,
        limit_val_batches=0,
        **QUIET,
        callbacks=callbacks,
    )


def _limit(nbytes: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)
        return
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE") + nbytes, -1))


if __name__ == "__main__":
    main()
