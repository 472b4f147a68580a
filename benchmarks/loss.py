"""The loss of a projection without whole logits, side by side: error, FLOPs, peak and time.

Run ``python -m benchmarks.loss``. Every way computes the mean cross-entropy of ``hidden @ weight.T`` and the gradients of both. Errors are
relative, of the worse gradient, against float64; FLOPs and peak are exact, and times are medians of interleaved rounds over whole logits.
Peers that are not installed, or need another device, are rows that say so: DeepSpeed (``pip install deepspeed``), Cut Cross-Entropy
(``cut-cross-entropy`` and ``triton``; on a CPU its ``torch_compile`` implementation), Liger (``liger-kernel``, on a GPU).
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.step_time import machine, seconds_of
from lt_tiled import tiled_linear_cross_entropy
from tests.meters import flops, peak_bytes

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of hidden states ``[T, H]``, a weight ``[V, H]`` and labels ``[T]``."""

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--tiles", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    ways = usable(candidates(args.tiles), device)
    console.print(errors(ways, device, args.tiles))
    console.print(costs(ways, device, (args.tokens, args.hidden, args.vocab), args.rounds))


# The ways


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Whole logits, in float32 as transformers' models cast them."""
    return F.cross_entropy(F.linear(hidden, weight).float() if hidden.dtype != torch.float64 else F.linear(hidden, weight), labels)


def candidates(tiles: int) -> dict[str, Callable[[torch.device], Loss]]:
    """For each way a function that returns its loss, or raises ``ImportError`` with what it needs."""
    return {
        "whole logits": lambda device: whole,
        "lt_tiled": lambda device: partial(tiled_linear_cross_entropy, num_shards=tiles),
        "DeepSpeed": partial(_deepspeed, tiles),
        "Cut Cross-Entropy": _cut_cross_entropy,
        "Liger": _liger,
    }


def _deepspeed(tiles: int, device: torch.device) -> Loss:
    tiled = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledFusedLogitsLoss

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        # Its way for labels that are ignored unevenly: each tile's sum, over the number of labels in all.
        count = (labels != -100).sum()

        def tile(_: None, rows: Tensor, own: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(rows, weight).float(), own, reduction="sum") / count

        value: Tensor = tiled.apply(tile, None, hidden[None], labels[None], None, tiles, [weight], "sum")
        return value

    return loss


def _cut_cross_entropy(device: torch.device) -> Loss:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return partial(function, impl="cce" if device.type == "cuda" else "torch_compile")


def _liger(device: torch.device) -> Loss:
    if device.type != "cuda":
        raise ImportError("its kernels need a GPU")
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = function(hidden, weight, labels)
        return value

    return loss


def usable(ways: dict[str, Callable[[torch.device], Loss]], device: torch.device) -> dict[str, Loss | str]:
    """Each way's loss, or why there is none."""
    found: dict[str, Loss | str] = {}
    for name, make in ways.items():
        try:
            found[name] = make(device)
        except ImportError as error:
            found[name] = str(error)
    return found


# Errors


def drawn(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device, ignore: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight, and labels of which the first ``ignore`` do not count."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).div(hidden**0.5).to(device, dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator).to(device)
    labels[:ignore] = -100
    return states, weight, labels


def gradients(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], scale: float) -> list[Tensor]:
    """Of the hidden states and the weight, of the loss times ``scale``, also where a way writes them to ``.grad`` itself."""
    hidden, weight, labels = inputs
    for leaf in (hidden, weight):
        leaf.grad = None
    (loss(hidden, weight, labels) * scale).backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (hidden, weight)]


def error(loss: Loss, dtype: torch.dtype, device: torch.device, scale: float = 1.0, ignore: int = 0) -> str:
    """The relative error of the worse gradient, or what was raised."""
    inputs = drawn(1000, 64, 1001, dtype, device, ignore)
    hidden, weight, labels = inputs
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), labels)
    true = gradients(whole, exact, scale)
    try:
        found = gradients(loss, inputs, scale)
    except Exception as problem:  # a peer may raise anything
        return type(problem).__name__
    return f"{max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, true, strict=True)):.1e}"


def no_grad_writes(loss: Loss, device: torch.device) -> str:
    """What a call under ``no_grad`` leaves in the weight's ``.grad``."""
    hidden, weight, labels = drawn(100, 64, 101, torch.float32, device)
    try:
        with torch.no_grad():
            loss(hidden, weight, labels)
    except Exception as problem:  # a peer may raise anything
        return type(problem).__name__
    return "nothing" if weight.grad is None and hidden.grad is None else "gradients"


def errors(ways: dict[str, Loss | str], device: torch.device, tiles: int) -> Table:
    """One row for each way, one column for each case."""
    notes = [
        f"1000 tokens in {tiles} tiles, 1001 words. half, all: of the labels are ignored; / 24, x 1024: the loss is scaled;",
        f"no_grad: what a call without gradients leaves in .grad.{machine(device)}",
    ]
    table = Table(title="error of the worse gradient against float64", caption_justify="left")
    for heading in ("", "float32", "bfloat16", "/ 24", "x 1024", "half", "all", "no_grad"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    cases: list[dict[str, Any]] = [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float32, "scale": 1 / 24},
        {"dtype": torch.float32, "scale": 1024.0},
        {"dtype": torch.float32, "ignore": 500},
    ]
    for name, loss in ways.items():
        if isinstance(loss, str):
            notes.append(f"{name}: {loss}.")
            continue
        table.add_row(
            name, *(error(loss, device=device, **case) for case in cases), all_ignored(loss, device), no_grad_writes(loss, device)
        )
    table.caption = "\n".join(notes)
    return table


def all_ignored(loss: Loss, device: torch.device) -> str:
    """Whether the loss and the gradients of labels that are all ignored are those of whole logits: ``nan`` and zeros."""
    inputs = drawn(100, 64, 101, torch.float32, device, ignore=100)
    try:
        found = gradients(loss, inputs, 1.0)
        value = loss(*inputs)
    except Exception as problem:  # a peer may raise anything
        return type(problem).__name__
    alike = bool(value.isnan()) and all(not bool(g.any()) for g in found)
    return "as torch" if alike else f"loss {float(value):.3g}"


# Costs


def costs(ways: dict[str, Loss | str], device: torch.device, sizes: tuple[int, int, int], rounds: int) -> Table:
    """FLOPs and peak of one forward and backward, and the time over that of whole logits in the same round."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = drawn(*sizes, dtype, device)
    runs = {name: partial(gradients, loss, inputs, 1.0) for name, loss in ways.items() if not isinstance(loss, str)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name in list(runs)[:: 1 if index % 2 else -1]:
            times[name].append(seconds_of(runs[name], device))
    logits = 4 * sizes[0] * sizes[2]
    title = f"cost of forward and backward: {sizes[0]} tokens of {sizes[1]}, {sizes[2]} words, {str(dtype)[6:]}, {rounds} rounds"
    caption = f"Peak in units of the whole logits in float32, {logits / 2**20:.0f} MiB. {machine(device)}"
    table = Table(title=title, caption=caption, caption_justify="left")
    for heading in ("", "FLOPs ratio", "peak / logits", "median ratio", "range"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    base = flops(runs["whole logits"])
    unseen = "cannot be seen"  # inside of a compiled graph
    for name, loss in ways.items():
        if isinstance(loss, str):
            continue
        ratios = [a / b for a, b in zip(times[name][1:], times["whole logits"][1:], strict=True)]
        compiled = name == "Cut Cross-Entropy"
        table.add_row(
            name,
            unseen if compiled else f"{flops(runs[name]) / base:.2f}",
            unseen if compiled and device.type == "cpu" else f"{peak(runs[name], device) / logits:.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        )
    return table


def peak(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a run has allocated at once: the device's own figure on a GPU."""
    if device.type != "cuda":
        return peak_bytes(run)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


if __name__ == "__main__":
    main()
