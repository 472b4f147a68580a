"""Losses of a projection without full logits: ``python -m benchmarks --only loss``.

Every package computes the cross-entropy of ``hidden @ weight.T`` and the gradients of both. Errors are relative, of the
worse gradient, against float64. Times are relative to full logits of all tokens, in one run. Packages that are not
installed are named: DeepSpeed (``deepspeed``), Cut Cross-Entropy (``cut-cross-entropy`` and ``triton``; on a CPU its
``torch_compile`` implementation).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import CPU, Options, Table, attempt, compared, interleaved, judged, machine, usable
from lt_tiled import tiled_linear_cross_entropy
from tests.meters import flops

Loss = Callable[..., Tensor]
"""Of hidden states ``[T, H]``, a weight ``[V, H]``, labels ``[T]``, and ``reduction``."""
TILES = 16
BASE = "full logits"
COMPILED = "Cut Cross-Entropy"  # a kernel, of which neither FLOPs nor bytes on a CPU can be counted


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Compute the loss as transformers' models do, from logits in float32."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction=reduction)


def lt_tiled() -> Loss:
    return partial(tiled_linear_cross_entropy, num_shards=TILES)


def deepspeed() -> Loss:
    tiled = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledFusedLogitsLoss

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        # Its way for labels that are ignored unevenly: each tile's sum, over the number of labels in all.
        count = (labels != -100).sum() if reduction == "mean" else 1

        def tile(_: None, rows: Tensor, own: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(rows, weight).float(), own, reduction="sum") / count

        value: Tensor = tiled.apply(tile, None, hidden[None], labels[None], None, TILES, [weight], "sum")
        return value

    return loss


def cut_cross_entropy(device: torch.device) -> Loss:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    way: Loss = partial(function, impl="cce" if device.type == "cuda" else "torch_compile")
    return way


def loss(options: Options) -> list[Table]:
    """Return the table of errors and the table of costs."""
    device = options.device
    makers: dict[str, Callable[[], Loss]] = {
        BASE: lambda: full_logits,
        "lt_tiled": lt_tiled,
        "DeepSpeed": deepspeed,
        COMPILED: partial(cut_cross_entropy, device),
    }
    ways, missing = usable(makers)
    return [errors(ways, device, missing), costs(ways, options)]


def drawn(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device = CPU, ignored: int = 0
) -> list[Tensor]:
    """Return hidden states, a weight, and labels of which the first ``ignored`` do not count."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    weight = torch.randn(vocab, hidden, generator=generator).div(hidden**0.5).to(device, dtype)
    labels = torch.randint(vocab, (tokens,), generator=generator).to(device)
    labels[:ignored] = -100
    return [states.requires_grad_(), weight.requires_grad_(), labels]


def gradients(loss: Loss, inputs: list[Tensor], scale: float = 1.0, reduction: str = "mean") -> list[Any]:
    """Return the gradients of hidden states and weight, of the loss times ``scale``."""
    for leaf in inputs[:2]:
        leaf.grad = None
    (loss(*inputs, reduction=reduction) * scale).backward()
    return [leaf.grad for leaf in inputs[:2]]


def error(loss: Loss, dtype: torch.dtype, device: torch.device, bound: float, **how: Any) -> str:
    """Return the relative error of the worse gradient with a verdict, or what was raised."""
    inputs = drawn(1000, 64, 1001, dtype, device, ignored=500)
    exact = [inputs[0].detach().double().requires_grad_(), inputs[1].detach().double().requires_grad_(), inputs[2]]
    true = gradients(full_logits, exact, **how)
    found = attempt(partial(gradients, loss, inputs, **how))
    if isinstance(found, str):
        return judged(found, bound)
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, true, strict=True))
    return judged(worst, bound)


def errors(ways: dict[str, Loss], device: torch.device, missing: str = "") -> Table:
    """One row for each package, one column for each case."""
    headings = ["", "float32", "bfloat16", "float16, sum", "loss / 24"]
    table = Table(f"Losses: error of the worse gradient, in {TILES} tiles", headings)
    table.note = f"1000 tokens, half of them ignored, a vocabulary of 1001, {machine(device)}.{missing}"
    for name, way in ways.items():
        table.add(
            name,
            error(way, torch.float32, device, 1e-5),
            error(way, torch.bfloat16, device, 1e-2),
            error(way, torch.float16, device, 1e-3, reduction="sum"),
            error(way, torch.float32, device, 1e-5, scale=1 / 24),
        )
    return table


def costs(ways: dict[str, Loss], options: Options) -> Table:
    """One row for each package: time, FLOPs and peak of a forward and a backward pass."""
    device, dtype = options.device, options.size(torch.float32, torch.float32, torch.bfloat16)
    tokens, hidden, vocab = options.size((2048, 128, 8192), (4096, 256, 16384), (16384, 4096, 128256))
    title = f"Losses: {tokens} tokens of {hidden}, a vocabulary of {vocab}, {str(dtype)[6:]}, in {TILES} tiles"
    table = Table(title, ["", "time", "range", "time, half ignored", "FLOPs", "peak memory"])
    table.note = f"Relative to full logits of all tokens; {options.rounds} rounds, {machine(device)}."
    all_count = drawn(tokens, hidden, vocab, dtype, device)
    half = drawn(tokens, hidden, vocab, dtype, device, ignored=tokens // 2)
    runs: dict[str, Callable[[], Any]] = {}
    for name, way in ways.items():
        runs[name] = partial(gradients, way, all_count)
        runs[f"{name}, half"] = partial(gradients, way, half)
    times = interleaved(runs, options.rounds, partial(harness.seconds_of, device=device))
    for name in ways:
        relative, spread = compared(times, name, BASE)
        ignoring, _ = compared(times, f"{name}, half", BASE)
        counted = ["in a kernel", "in a kernel"]
        if name != COMPILED:
            counted = [f"{flops(runs[name]) / flops(runs[BASE]):.2f}"]
            counted.append(f"{harness.peak_of(runs[name], device) / harness.peak_of(runs[BASE], device):.2f}")
        table.add(name, f"{relative:.2f}", spread, f"{ignoring:.2f}", *counted)
    return table
