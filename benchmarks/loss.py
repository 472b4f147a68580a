"""Compare losses of a projection without full logits: ``python -m benchmarks --only loss``.

Every way computes the mean cross-entropy of ``hidden @ weight.T`` and the gradients of both. Errors are relative, of
the worse gradient, against float64; FLOPs and peak are exact, and times are medians of interleaved rounds, relative to
full logits of all tokens. Peers that are not installed, or need another device, are named: DeepSpeed (``pip install
deepspeed``), Cut Cross-Entropy (``cut-cross-entropy`` and ``triton``; on a CPU its ``torch_compile`` implementation),
Liger (``liger-kernel``, on a GPU).
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import peers as peers  # chooses DeepSpeed's accelerator before its import
from benchmarks.sheet import Cell, Sheet, machine, reason, spread
from benchmarks.step_time import device_peak, interleaved, ratios, seconds_of
from lt_tiled import tiled_linear_cross_entropy
from tests.meters import flops, peak_bytes

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of hidden states ``[T, H]``, a weight ``[V, H]`` and labels ``[T]``."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def loss(
    device: torch.device, sizes: tuple[int, int, int] = (4096, 256, 16384), tiles: int = 16, rounds: int = 7
) -> list[Sheet]:
    """Errors, and costs of ``sizes`` (tokens, hidden_size, vocab_size)."""
    ways = usable(candidates(tiles), device)
    return [errors(ways, device, tiles), costs(ways, device, sizes, tiles, rounds)]


# The ways


def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Full logits, in float32 as transformers' models cast them."""
    return F.cross_entropy(
        F.linear(hidden, weight).float() if hidden.dtype != torch.float64 else F.linear(hidden, weight), labels
    )


def candidates(tiles: int) -> dict[str, Callable[[torch.device], Loss]]:
    """For each way a function that returns its loss, or raises ``ImportError`` with what it needs."""
    return {
        "full logits": lambda device: whole,
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
        except Exception as error:  # a package may refuse a machine with any error
            found[name] = reason(error)
    return found


# Errors


def drawn(
    tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device, ignore: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight, and labels of which the first ``ignore`` do not count."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).div(hidden**0.5).to(device, dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator).to(device)
    labels[:ignore] = -100
    return states, weight, labels


def gradients(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], scale: float) -> list[Tensor]:
    """Return the gradients of hidden states and weight, of the loss times ``scale``."""
    hidden, weight, labels = inputs
    for leaf in (hidden, weight):
        leaf.grad = None
    (loss(hidden, weight, labels) * scale).backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (hidden, weight)]


def error(loss: Loss, dtype: torch.dtype, device: torch.device, scale: float = 1.0, ignore: int = 0) -> Cell:
    """The relative error of the worse gradient, or what was raised."""
    inputs = drawn(1000, 64, 1001, dtype, device, ignore)
    hidden, weight, labels = inputs
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), labels)
    true = gradients(whole, exact, scale)
    try:
        found = gradients(loss, inputs, scale)
    except Exception as problem:  # a peer may raise anything
        return Cell(
            f"raises {type(problem).__name__}", None if _is_16_bits_only(loss) and dtype == torch.float32 else False
        )
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, true, strict=True))
    return Cell(f"{worst:.1e}", worst < TOLERANCE[dtype])


def _is_16_bits_only(loss: Loss) -> bool:
    """Cut Cross-Entropy's kernels take no float32, by their design."""
    return isinstance(loss, partial) and loss.keywords.get("impl") == "cce"


def no_grad_writes(loss: Loss, device: torch.device) -> Cell:
    """What a call under ``no_grad`` leaves in the weight's ``.grad``."""
    hidden, weight, labels = drawn(100, 64, 101, torch.float32, device)
    try:
        with torch.no_grad():
            loss(hidden, weight, labels)
    except Exception as problem:  # a peer may raise anything
        return Cell(f"raises {type(problem).__name__}", False)
    clean = weight.grad is None and hidden.grad is None
    return Cell("nothing" if clean else "gradients", clean)


def all_ignored(loss: Loss, device: torch.device) -> Cell:
    """Whether loss and gradients with all labels ignored are those of full logits: ``nan`` and zeros."""
    inputs = drawn(100, 64, 101, torch.float32, device, ignore=100)
    try:
        found = gradients(loss, inputs, 1.0)
        value = loss(*inputs)
    except Exception as problem:  # a peer may raise anything
        return Cell(f"raises {type(problem).__name__}", False)
    alike = bool(value.isnan()) and all(not bool(g.any()) for g in found)
    return Cell("as torch" if alike else f"loss {float(value):.3g}", alike)


def errors(ways: dict[str, Loss | str], device: torch.device, tiles: int) -> Sheet:
    """One row for each way, one column for each case."""
    headings = ["", "float32", "bfloat16", "loss / 24", "loss x 1024", "half ignored", "all ignored", "no_grad leaves"]
    sheet = Sheet("loss_errors", f"the loss: error of the worse gradient against float64, {tiles} tiles", headings)
    sheet.notes = [
        f"1000 tokens, a vocabulary of 1001, {machine(device)}.",
        *(f"{name}: {why}." for name, why in ways.items() if isinstance(why, str)),
    ]
    for name, way in ways.items():
        if not isinstance(way, str):
            single = partial(error, way, torch.float32, device)
            sheet.add(
                name,
                single(),
                error(way, torch.bfloat16, device),
                single(scale=1 / 24),
                single(scale=1024.0),
                single(ignore=500),
                all_ignored(way, device),
                no_grad_writes(way, device),
            )
    return sheet


# Costs


def costs(
    ways: dict[str, Loss | str], device: torch.device, sizes: tuple[int, int, int], tiles: int, rounds: int
) -> Sheet:
    """FLOPs and peak of one forward and backward, and the time over that of full logits in the same round."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    usable = {name: loss for name, loss in ways.items() if not isinstance(loss, str)}
    cases = {"": drawn(*sizes, dtype, device), HALF: drawn(*sizes, dtype, device, ignore=sizes[0] // 2)}
    runs = {n + case: partial(gradients, f, inputs, 1.0) for n, f in usable.items() for case, inputs in cases.items()}
    times = interleaved({name: partial(seconds_of, run, device) for name, run in runs.items()}, rounds)
    logits = 4 * sizes[0] * sizes[2]
    threads = "" if device.type == "cuda" else f"threads: {torch.get_num_threads()}, "
    size = f"{sizes[0]} tokens of {sizes[1]}, a vocabulary of {sizes[2]}"
    title = f"the loss: {size}, {str(dtype)[6:]}, {tiles} tiles, forward and backward"
    headings = ["", "FLOPs", "time, median", "range", "peak / logits", "peak / tile, bfloat16"]
    sheet = Sheet("loss_costs", title, [*headings, "FLOPs, half ignored", "time, half ignored"])
    sheet.notes = [
        f"FLOPs and time relative to full logits of all tokens; peak relative to the {logits / 2**20:.0f} MiB of"
        f" float32 logits, and to one tile of bfloat16 logits with hidden states of 4; {rounds} rounds,"
        f" {threads}{machine(device)}."
    ]
    base, unseen = flops(runs["full logits"]), "inside a kernel"
    narrow = drawn(sizes[0], 4, sizes[2], torch.bfloat16, device)
    tile = 2 * sizes[0] * sizes[2] / tiles
    for name, loss in usable.items():
        compiled = name == "Cut Cross-Entropy"
        hidden = compiled and device.type == "cpu"
        peaks = [0.0 if hidden else peak_of(partial(gradients, loss, i, 1.0), i, device) for i in (cases[""], narrow)]
        of, half = (ratios(times, name + case, "full logits") for case in cases)
        sheet.add(
            name,
            unseen if compiled else f"{flops(runs[name]) / base:.2f}",
            f"{statistics.median(of):.2f}",
            spread(of),
            unseen if hidden else f"{peaks[0] / logits:.2f}",
            unseen if hidden else f"{peaks[1] / tile:.1f}",
            unseen if compiled else f"{flops(runs[name + HALF]) / base:.2f}",
            f"{statistics.median(half):.2f}",
        )
    return sheet


HALF = ", half ignored"


def peak_of(run: Callable[[], object], inputs: tuple[Tensor, Tensor, Tensor], device: torch.device) -> float:
    """The peak of a run that begins without gradients."""
    for leaf in inputs[:2]:
        leaf.grad = None
    return peak_bytes(run) if device.type == "cpu" else device_peak(run, device)
