"""The longest sequence that trains within a fixed memory, setting by setting: ``python -m benchmarks --only longest``.

Each setting has a process of its own, in which ``SequenceLengthFinder`` tries a
Llama's training step on longer and longer text until memory ends: on a GPU what the process may allocate there, on a
CPU its address space beyond what it has before the run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback

from benchmarks.harness import Options, Table, machine
from lt_tiled import ActivationCheckpointing, TiledSingleDeviceStrategy, Tiling
from lt_tiled.callbacks import SequenceLengthFinder
from lt_tiled.lm import CausalLM, TextFiles
from lt_tiled.memory import gib
from tests.lit import trainer

SETTINGS = ["plain", "activation checkpointing", "+ tiled loss", "+ tiled MLPs", "+ block inputs on disk"]
SMALL = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4}
SMALL |= {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
LLAMA_8B = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA_8B |= {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4}  # of 32 in Llama 3 8B
# Tensors have mappings of their own, which are given back when they end: a heap in pieces does not count as taken.
HEAP = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}


class Room(NamedTuple):
    """A model, the memory that a run of it may take, and the step of the search in tokens."""

    model: dict[str, Any]
    nbytes: int
    granule: int
    shards: int | None = 32
    """Tiles of the MLPs and of the loss: at small sizes ``"auto"`` finds none worth it."""


ROOMS = {
    "quick": Room(SMALL | {"vocab_size": 8192}, 2**27, 256),
    "cpu": Room(SMALL | {"vocab_size": 16384}, 3 * 2**26, 256),
    "gpu": Room(LLAMA_8B, 40 * 2**30, 4096, None),
}


def longest(options: Options) -> list[Table]:
    """One row for each setting."""
    size = options.size(*ROOMS)
    room = ROOMS[size]
    title = f"The longest sequence in {gib(room.nbytes)}: {room.model['num_hidden_layers']} layers of a Llama"
    table = Table(title, ["", "tokens", "relative to plain"])
    table.note = f"Within {room.granule} tokens, {machine(options.device)}."
    plain = 0
    for setting in SETTINGS:
        command = [sys.executable, "-m", "benchmarks.longest", setting, size]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env={**os.environ, **HEAP})
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        tokens = int(done.stdout.split()[-1])
        plain = plain or tokens
        table.add(setting, str(tokens), f"{tokens / plain:.1f}")
    return [table]


def main() -> None:
    """Find the longest sequence of one setting."""
    setting, size = sys.argv[1:]
    room, index = ROOMS[size], SETTINGS.index(setting)
    policies: dict[str, Any] = {"tiling": None, "activation_checkpointing": None}
    if index >= 1:
        policies["activation_checkpointing"] = ActivationCheckpointing()
    if index >= 3:
        policies["tiling"] = Tiling(room.shards or "auto")
    if index >= 4:
        policies["activation_checkpointing"] = ActivationCheckpointing(offload="disk", directory=tempfile.gettempdir())
    model = CausalLM(room.model, loss=index >= 2 and (room.shards or True))
    finder = SequenceLengthFinder(start=room.granule, granule=room.granule)

    def fit(tokens: int, *callbacks: Callback) -> None:
        run = trainer(
            TiledSingleDeviceStrategy(**policies),
            accelerator="auto",
            precision="bf16-true" if torch.cuda.is_available() else "32-true",
            max_steps=1,
            limit_val_batches=0,
            callbacks=list(callbacks),
        )
        run.fit(model, datamodule=TextFiles(seq_len=tokens))

    fit(64)  # what is imported and started on the way is there before the limit
    limit(room.nbytes)
    try:
        fit(room.granule, finder)
    except RuntimeError:  # the run after the search may find the heap in pieces
        if finder.found is None:
            raise
    print(finder.found)


def limit(nbytes: int) -> None:
    """Let the process take so many bytes more."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)
        return
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE") + nbytes, -1))


if __name__ == "__main__":
    main()
