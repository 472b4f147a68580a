"""Step time of checkpointed + tiled over checkpointed, in interleaved pairs.

Run ``python -m benchmarks.step_time``. Each pair times one training step (forward and backward) of a Llama with its blocks
checkpointed, and one of the same model with its MLPs tiled as well; which comes first alternates. Printed are the median and the
range of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lt_tiled import Checkpointing, Tiling, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--wide", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tile-tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.wide,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        vocab_size=512,
    )
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    model.to(device, dtype)
    ids = torch.randint(512, (1, args.tokens), device=device)

    table = Table(title="step time, checkpointed + tiled over checkpointed", caption=machine(device), caption_justify="left")
    for heading in ("tiles", "ckpt. [s]", "+ tiled [s]", "median ratio", "range"):
        table.add_column(heading, justify="right", no_wrap=True)
    for size in args.tile_tokens:
        tiled = copy.deepcopy(model)
        with prepare(model, checkpointing=Checkpointing()), prepare(tiled, checkpointing=Checkpointing(), tiling=Tiling(tile_tokens=size)):
            with_tiles, without = interleave(step_of(tiled, ids), step_of(model, ids), args.pairs)
        ratios = [a / b for a, b in zip(with_tiles, without, strict=True)]
        table.add_row(
            f"{-(-args.tokens // size)} x {size}",
            f"{statistics.median(without):.3f}",
            f"{statistics.median(with_tiles):.3f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
        )
    Console().print(table)


def step_of(model: nn.Module, ids: torch.Tensor) -> Callable[[], float]:
    """A function that runs one step and returns its seconds."""

    def step() -> float:
        seconds = seconds_of(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward(), ids.device)
        model.zero_grad(set_to_none=True)
        return seconds

    return step


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """How long a run takes."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def interleave(a: Callable[[], float], b: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """Time ``a`` and ``b`` in turn, the first of each pair alternating, after one warm-up of each."""
    a(), b()
    times_a: list[float] = []
    times_b: list[float] = []
    for index in range(pairs):
        for run, times in ((a, times_a), (b, times_b))[:: 1 if index % 2 else -1]:
            times.append(run())
    return times_a, times_b


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> str:
    """What was measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
