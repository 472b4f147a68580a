"""Rates of the disk tier, and what offloading does to the step time.

Run ``python -m benchmarks.offload [--directory /nvme/scratch]``. First the same boundaries are written and read by the disk tier, with
and without ``O_DIRECT``, and by ``torch.save`` and ``torch.load``, with and without ``fsync``, in turn; printed are the medians. Then
training steps are timed in interleaved rounds: checkpointed without offload, with the disk tier, and with one file for each tensor.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.step_time import machine, step_of
from lt_tiled import Checkpointing, prepare
from lt_tiled.offload.geometry import raw_bytes
from lt_tiled.offload.spill import SpillFile
from lt_tiled.offload.tiers import DiskTier

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--boundaries", type=int, default=32)
    parser.add_argument("--mib", type=int, default=8, help="size of a boundary")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    tensors = [torch.randn(args.mib * 2**18) for _ in range(args.boundaries)]
    console = Console()
    console.print(rates(tensors, args.directory, args.rounds))
    console.print(steps(args.tokens, args.directory, args.rounds))


# Rates


def rates(tensors: list[Tensor], directory: str, rounds: int) -> Table:
    """A table of write and read rates, each over all tensors at once."""
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "disk tier, page cache": _tier(tensors, directory, direct=False),
        "torch.save, page cache": _torch_save(tensors, directory, sync=False),
        "disk tier, O_DIRECT": _tier(tensors, directory, direct=True),
        "torch.save, fsync": _torch_save(tensors, directory, sync=True),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(way())
    total = sum(t.nbytes for t in tensors) / GIB
    title = f"GiB/s, {len(tensors)} boundaries of {tensors[0].nbytes >> 20} MiB, {rounds} rounds"
    table = Table(title=title, caption=machine(torch.device("cpu")))
    for heading in ("", "write", "read", "write, over next line"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    written = {name: [total / write for write, _ in pairs[1:]] for name, pairs in times.items()}
    read = {name: [total / back for _, back in pairs[1:]] for name, pairs in times.items()}
    names = list(ways)
    for index, name in enumerate(names):
        ratio = ""
        if index % 2 == 0:
            ratios = [a / b for a, b in zip(written[name], written[names[index + 1]], strict=True)]
            ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        table.add_row(name, f"{statistics.median(written[name]):.2f}", f"{statistics.median(read[name]):.2f}", ratio)
    return table


def _tier(tensors: list[Tensor], directory: str, direct: bool) -> Callable[[], tuple[float, float]]:
    tier = DiskTier(SpillFile(directory, direct=direct))

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        stored = [tier.store(raw_bytes(t)) for t in tensors]
        for s in stored:
            s.settle(600)
        middle = time.perf_counter()
        for s in stored:
            s.load().wait(600)
        end = time.perf_counter()
        for s in stored:
            s.free()
        return middle - start, end - middle

    return run


def _torch_save(tensors: list[Tensor], directory: str, sync: bool) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            files = [Path(folder) / str(i) for i in range(len(tensors))]
            start = time.perf_counter()
            for tensor, file in zip(tensors, files, strict=True):
                with file.open("wb") as stream:
                    torch.save(tensor, stream)
                    if sync:
                        stream.flush()
                        os.fsync(stream.fileno())
            middle = time.perf_counter()
            for file in files:
                torch.load(file)
            return middle - start, time.perf_counter() - middle

    return run


# Steps


def steps(tokens: int, directory: str, rounds: int) -> Table:
    """A table of step times, each over that of the same step without offload in the same round."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, vocab_size=512
    )
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: nn.Module = LlamaForCausalLM(config)
    model.to(device)
    ids = torch.randint(512, (1, tokens), device=device)
    models = [model, copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)]
    plain, disk = Checkpointing(), Checkpointing(offload="disk", directory=directory)
    cached = Checkpointing(offload="disk", directory=directory, direct_io=False)
    with (
        prepare(models[0], checkpointing=plain),
        prepare(models[1], checkpointing=disk),
        prepare(models[2], checkpointing=cached),
        prepare(models[3], checkpointing=plain),
        tempfile.TemporaryDirectory(dir=directory) as folder,
    ):
        ways = {
            "no offload": step_of(models[0], ids),
            "disk tier, O_DIRECT": step_of(models[1], ids),
            "disk tier, page cache": step_of(models[2], ids),
            "one file for each tensor": _one_file_each(step_of(models[3], ids), Path(folder)),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(rounds + 1):
            for name in list(ways)[:: 1 if index % 2 else -1]:
                times[name].append(ways[name]())
    table = Table(title=f"step time over no offload, {tokens} tokens, {rounds} rounds", caption=machine(device))
    for heading in ("", "median [s]", "median ratio", "range"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds[1:], times["no offload"][1:], strict=True)]
        table.add_row(
            name, f"{statistics.median(seconds[1:]):.3f}", f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"
        )
    return table


def _one_file_each(step: Callable[[], float], folder: Path) -> Callable[[], float]:
    """The step with every boundary in a file of its own, as trainers do that have a disk store."""
    count = 0

    def pack(tensor: Tensor) -> Path | Tensor:
        nonlocal count
        if tensor.nbytes < 2**20:
            return tensor
        count += 1
        file = folder / str(count)
        torch.save(tensor.cpu(), file)
        return file

    def unpack(packed: Path | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor: Tensor = torch.load(packed)
        packed.unlink()
        return tensor

    def run() -> float:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return step()

    return run


if __name__ == "__main__":
    main()
