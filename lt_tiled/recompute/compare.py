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

from functools import cache, partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

ROWS = 1024
"""The most rows of a tensor that are compared."""
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
