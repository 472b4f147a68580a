"""Compare what a forward pass and its recompute compute, in every step, without waiting for the device.

NOTE [Fingerprint]
Code can read state that cannot be observed, but a gradient is wrong only if the recompute computes different values. So
up to :data:`ROWS` rows (tokens) of a tensor are each multiplied with one vector of random signs, in both passes. What
changes a row by more than rounding changes that number, which is about as large as the row's norm. One document's mask,
or one expert of 64, would not be seen in single elements.

NOTE [Rounding]
A row differs if it is off by more than :data:`TOLERANCE` units in the last place of the least precise dtype, relative
to the root mean square of all rows. Where the recompute summed in another order, bfloat16 experts came to 4 units in
2,000 steps. A few rows may differ by anything, because kernels that sum in any order can send a token to another
expert.

NOTE [The verdict comes last]
Autograd's engine runs callbacks in the order in which they were queued, and an exception in one skips those behind it,
such as DDP's, whose next step then fails. So the callback queues itself once more, behind all others, before it raises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lt_tiled._log import warn

ROWS = 1024
"""The most rows of a tensor that are compared."""
WIDEST = 2**14
"""The most features of a row that are compared: of what is exchanged between ranks, a row has those of all tokens."""
FEW = 4
"""So many of them may differ."""
TOLERANCE = 5.0
EPS = {torch.float64: 2.0**-36, torch.float32: 2.0**-13, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
"""One unit in the last place: of float32 with TF32 in mind, of float64 with sums in another order."""


@lru_cache(64)  # not of all widths: masks are as wide as sequences
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    with torch.inference_mode(False):
        signs = torch.randint(0, 2, (width,), generator=generator).mul(2).sub(1).to(device, dtype)
        signs[0] *= 1.5  # else the sum may be zero, and with it that of a row of equal flags
        return signs


def fingerprint(tensor: Tensor, rows: int = ROWS) -> Tensor:
    """Return the products of about so many rows of ``[..., width]`` with random signs, in float32 or float64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    some = tensor.detach()
    width = tensor.shape[-1] if tensor.dim() > 1 else 1
    # 1. Rows of the longest dimension, the last one among them, before anything is copied.
    step = -(-tensor.numel() // (width * rows))
    if step > 1:
        lead = tensor.shape[: max(tensor.dim() - 1, 1)]
        dim = lead.index(max(lead))
        step = min(step, lead[dim])
        some = some[(slice(None),) * dim + (slice((lead[dim] - 1) % step, None, step),)]
    # 2. Their products.
    if width > WIDEST:
        some = some[..., :: -(-width // WIDEST)]
        width = some.shape[-1]
    if some.dim() != 2:
        some = some.reshape(-1, width)
    if some.dtype != torch.float64:
        some = some.float()
    return torch.mv(some, _signs(width, some.dtype, some.device))  # [rows]


def rows_that_differ(before: Tensor, now: Tensor, eps: Tensor | float) -> Tensor:
    """Return how many more rows of fingerprints ``[..., rows]`` differ than may; negative if fewer do."""
    scale = before.nan_to_num(0, 0, 0).square().mean(-1, keepdim=True).sqrt()
    same = ((before - now).abs() <= scale * eps * TOLERANCE) | (before == now) | (before.isnan() & now.isnan())
    return (~same).sum(-1) - _few(before.shape[-1])


def _few(rows: int) -> int:
    return min(FEW, rows // 32)


@dataclass(frozen=True)
class Sample:
    """The fingerprints of a forward pass and of its recompute."""

    name: str
    remedy: str
    eps: float
    before: Tensor
    now: Tensor
    raises: bool = True
    """Whether a difference raises, and does not only warn."""


class _Verdict:
    """Collects the samples of one backward pass, and reads them at its end: see NOTE [The verdict comes last]."""

    def __init__(self) -> None:
        self.task = -1
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Compare a sample at the end of the backward pass that runs now."""
        if sample.now.shape != sample.before.shape:
            sample = replace(sample, now=torch.full_like(sample.before, torch.nan))
        task = torch._C._current_graph_task_id()
        if task != self.task:  # each callback reads its own samples, so that another backward pass may run inside
            self.task = task
            self.samples = []
            read = partial(self.read, self.samples)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(read))
        self.samples.append(sample)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in a compiled step autograd calls it
    def read(self, samples: list[Sample]) -> None:
        """Compare all samples of a backward pass.

        Raises:
            RuntimeError: If a recompute computed different values from its forward pass.
        """
        # 1. All of one size at once.
        groups = defaultdict[Any, list[Sample]](list)
        for sample in samples:
            groups[len(sample.before), sample.before.dtype, sample.before.device, sample.eps].append(sample)
        counts: list[Tensor] = []
        for group in groups.values():
            before = torch.stack([sample.before for sample in group])  # [samples, rows]
            now = torch.stack([sample.now for sample in group])
            counts.append(rows_that_differ(before, now, group[0].eps).to(samples[0].now.device))
        samples.clear()
        # 2. The one read of a step.
        differ: list[tuple[Sample, int]] = []
        for sample, count in zip(chain(*groups.values()), torch.cat(counts).tolist(), strict=True):
            if count > 0:
                differ.append((sample, count))
        if differ:
            _tell(differ)


def describe(names: str, difference: str) -> str:
    """Return an error about recomputes, without the last words."""
    return (
        f"The recompute of {names} computes different values from the forward pass ({difference}): something it reads"
        " changed. Change it after backward()"
    )


def _tell(found: Sequence[tuple[Sample, int]]) -> None:
    """Raise an error about the samples that differ, by so many rows, or warn if all of them only warn."""
    shares: dict[str, float] = {}
    for sample, count in found:
        rows = len(sample.before)
        shares[sample.name] = max(shares.get(sample.name, 0.0), (count + _few(rows)) / rows)
    names = ", ".join(list(shares)[:2])
    if len(shares) > 2:
        names += f" and {len(shares) - 2} more"
    message = f"{describe(names, f'{max(shares.values()):.0%} of rows')}, or {found[0][0].remedy}."
    if any(sample.raises for sample, _ in found):
        raise RuntimeError(message)
    warn(message, once=names)


VERDICT = _Verdict()


class TileFingerprints:
    """The fingerprints of what the tiles of a call compute in one pass.

    Args:
        name: The name of the call in messages.
        tiles: The number of tiles.
        autocast: The dtype of autocast, if it is enabled.
        raises: Whether a difference raises, and does not only warn.
    """

    def __init__(self, name: str, tiles: int, autocast: torch.dtype | None, raises: bool = True) -> None:
        self.name = name
        self.rows = ROWS // tiles + 1
        self.raises = raises
        self.eps = 0.0 if autocast is None else EPS[autocast]
        self.taken = defaultdict[int, list[Tensor]](list)
        """Of each tile, by the place among what it returns; at -1 that of the last projection's weight."""

    def take(self, leaves: Iterable[Any]) -> None:
        """Take the fingerprints of what a tile returns."""
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dtype in EPS and leaf.numel():
                self.eps = max(self.eps, EPS[leaf.dtype])
                self.taken[place].append(fingerprint(leaf, self.rows))

    def take_weight(self, weight: Tensor) -> None:
        """Take that of the last projection's weight, once: what the recompute leaves out shows no change."""
        if weight.dtype in EPS and -1 not in self.taken:
            self.taken[-1] = [fingerprint(weight, self.rows)]

    def compare(self, now: TileFingerprints, remedy: str = "lt_tiled.untile() it") -> None:
        """Compare them with those of the recompute, at the end of the backward pass; the remedy is for messages."""
        for place, tiles in self.taken.items():
            before = torch.cat(tiles)
            after = torch.cat(now.taken[place] or [before.new_empty(0)])
            VERDICT.add(Sample(self.name, remedy, now.eps, before, after, self.raises))
