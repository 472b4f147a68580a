"""Compare what a forward pass and its recompute compute, in every step, without waiting for the device.

NOTE [Fingerprint]
Code can read what no one observes: a variable of another module, the data of a weight, a file. A gradient is wrong only
if the recompute computes other values. So up to :data:`ROWS` rows (tokens) of a tensor are each multiplied with one
vector of random signs, in the forward pass and in the recompute. What changes a row by more than rounding changes that
number, which is about as large as the row's norm. Single elements do not do: one document's mask, or one expert of 64,
is not seen in them.

NOTE [Rounding]
A row differs if it is off by more than :data:`TOLERANCE` units in the last place of the least precise dtype, relative
to the root mean square of all rows. A few rows may differ by anything, because kernels that sum in any order can send a
token to another expert.

NOTE [The verdict comes last]
Autograd's engine runs callbacks in the order in which they were queued, and an exception in one skips those behind it,
such as DDP's, whose next step then fails. So the callback queues itself once more, behind all others, before it raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

ROWS = 1024
"""The most rows of a tensor that are compared."""
FEW_ROWS = 64
"""The most rows of a weight."""
FEW = 4
"""So many of them may differ."""
TOLERANCE = 3.0
EPS = {torch.float64: 2.0**-36, torch.float32: 2.0**-13, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8}
"""One unit in the last place: of float32 with TF32 in mind, of float64 with sums in another order."""


@cache
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    with torch.inference_mode(False):
        return torch.randint(0, 2, (width,), generator=generator).mul(2).sub(1).to(device, dtype)


def fingerprint(tensor: Tensor, rows: int = ROWS) -> Tensor:
    """Return the products of at most so many rows of ``[..., width]`` with random signs, in float32 or float64."""
    flat = tensor.detach() if tensor.requires_grad else tensor
    flat = flat if flat.dim() == 2 else flat.reshape(-1, flat.shape[-1])  # [tokens, width]
    count = flat.shape[0]
    step = -(-count // rows)
    if step > 1:
        flat = flat[(count - 1) % step :: step]  # the last token is among them
    if flat.dtype != torch.float64:
        flat = flat.float()
    return torch.mv(flat, _signs(flat.shape[-1], flat.dtype, tensor.device))  # [rows]


def rows_that_differ(before: Tensor, now: Tensor, eps: float) -> Tensor:
    """Return how many rows of two fingerprints differ by more than rounding, less those that may; nothing waits."""
    scale = before.nan_to_num(0, 0, 0).square().mean().sqrt()
    same = ((before - now).abs() <= scale * eps * TOLERANCE) | (before == now) | (before.isnan() & now.isnan())
    return (~same).sum() - min(FEW, len(before) // 32)


class Sample(NamedTuple):
    """The fingerprints of a forward pass and of its recompute."""

    name: str
    remedy: str
    eps: float
    before: Tensor
    now: Tensor


class _Samples(list[Sample]):
    """Those of one backward pass."""


class _Verdict:
    """Collects the samples of one backward pass, and reads them at its end: see NOTE [The verdict comes last]."""

    def __init__(self) -> None:
        self.samples = WeakValueDictionary[int, _Samples]()
        """Of each backward pass that runs: the engine holds its callback, and that the samples."""

    def add(self, sample: Sample) -> None:
        """Compare a sample at the end of the backward pass that runs now."""
        task = torch._C._current_graph_task_id()
        samples = self.samples.get(task)
        if samples is None:
            samples = self.samples[task] = _Samples()
            engine = torch.autograd.Variable._execution_engine
            read = partial(self.read, samples)
            engine.queue_callback(lambda: engine.queue_callback(read))
        samples.append(sample)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in a compiled step autograd calls it
    def read(self, samples: list[Sample]) -> None:
        """Compare all samples of a backward pass.

        Raises:
            RuntimeError: If a recompute computed other values than its forward pass.
        """
        device = samples[0].now.device
        counts = torch.stack([rows_that_differ(s.before, s.now, s.eps).to(device) for s in samples])
        if bool((counts > 0).any()):  # the one read of a step
            found: dict[str, Sample] = {}
            for sample, count in zip(samples, counts.tolist(), strict=True):
                if count > 0:
                    found.setdefault(sample.name, sample)
            remedy = next(iter(found.values())).remedy
            raise RuntimeError(
                f"The recompute of {', '.join(found)} computes other values than the forward pass, because something"
                f" that it reads changed in between. Make the change after the backward pass, or {remedy}."
            )


VERDICT = _Verdict()


class Samples:
    """The fingerprints of what the tiles of a call compute in one pass.

    Args:
        name: The name of the call in messages.
        tiles: The number of tiles.
        autocast: The dtype of autocast, if it is enabled.
    """

    def __init__(self, name: str, tiles: int, autocast: torch.dtype | None) -> None:
        self.name, self.rows = name, ROWS // tiles + 1
        self.eps = 0.0 if autocast is None else EPS[autocast]
        self.tiles: list[Tensor] = []
        self.weight: list[Tensor] = []
        """Of a few rows of the last projection's weight: a recompute that leaves the projection out shows no change."""

    def take(self, leaves: Iterable[Any]) -> None:
        """Take the fingerprint of a tile, of the first of its tensors that has one."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.dtype in EPS and leaf.numel():
                self.eps = max(self.eps, EPS[leaf.dtype])
                self.tiles.append(fingerprint(leaf, self.rows))
                return

    def take_weight(self, weight: Tensor) -> None:
        """Take that of the weight of the last projection."""
        if weight.dtype in EPS:
            self.weight = [fingerprint(weight, FEW_ROWS)]

    def compare(self, now: Samples, remedy: str = "lt_tiled.untile() it") -> None:
        """Compare them with those of the recompute, at the end of the backward pass; the remedy is for messages."""
        for before, after in ((self.tiles, now.tiles), (self.weight, now.weight)):
            if before:
                same = len(before) == len(after)
                pair = torch.cat(before), torch.cat(after) if same else torch.tensor(torch.nan)
                VERDICT.add(Sample(self.name, remedy, now.eps, *pair))
