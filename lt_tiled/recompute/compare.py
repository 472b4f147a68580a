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
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled._log import warn
from lt_tiled.recompute.mode import is_real

ROWS = 1024
"""The most rows of a tensor that are compared."""
WIDEST = 2**14
"""The most features of a row that are compared: of what is exchanged between ranks, a row has those of all tokens."""
FEW = 4
"""So many of them may differ."""
TOLERANCE = 5.0
EPS: dict[Any, float] = {
    torch.float64: 2.0**-36,
    torch.float32: 2.0**-13,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-8,
}
"""One unit in the last place: of float32 with TF32 in mind, of float64 with sums in another order."""


@lru_cache(64)  # not of all widths: masks are as wide as sequences
def _signs(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    with torch.inference_mode(False):
        signs = torch.randint(0, 2, (width,), generator=generator).mul(2).sub(1).to(device, dtype)
        signs[0] *= 3  # else the sum may be zero, and with it that of a row of equal flags
        return signs


def fingerprint(tensor: Tensor, rows: int = ROWS) -> Tensor:
    """Return the products of about so many rows of ``[..., width]`` with random signs.

    Flags and indices give integers, which have no rounding, and others float32 or float64.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    exact = not tensor.is_floating_point()
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
    products = torch.mv(some, _signs(width, some.dtype, some.device))  # [rows]
    return products.long() if exact else products


def rows_that_differ(before: Tensor, now: Tensor, eps: float) -> Tensor:
    """Return how many rows of fingerprints ``[..., rows]`` differ by more than rounding."""
    wide = torch.promote_types(before.dtype, torch.float32)
    scale = before.nan_to_num(0, 0, 0).square().mean(-1, keepdim=True, dtype=wide).sqrt()
    same = ((before - now).abs() <= scale * eps * TOLERANCE) | (before == now) | (before.isnan() & now.isnan())
    return (~same).sum(-1)


class Fingerprints:
    """The fingerprints of what a forward pass computes, or of what its recompute does.

    Args:
        name: The name of the block or the call in messages.
        remedy: What to do about other values, for messages.
        raises: Whether a difference raises, and does not only warn.
        tiles: Over so many tensors the rows at a place are spread.
        autocast: The dtype of autocast, if it is enabled.
    """

    def __init__(
        self, name: str, remedy: str, raises: bool = True, tiles: int = 1, autocast: torch.dtype | None = None
    ) -> None:
        self.name = name
        self.remedy = remedy
        self.raises = raises
        self.rows = ROWS // tiles + 1
        self.eps = EPS.get(autocast, 0.0)
        """The unit in the last place of the least precise dtype."""
        self.taken = defaultdict[Any, list[Tensor]](list)
        """By the place of a tensor; of a call in tiles, that among what each tile returns."""

    def take(self, place: Any, tensor: Any) -> None:
        """Take the fingerprint of a tensor, unless it is empty, sparse or simulated, or was released."""
        while is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor: what is inside may still be on its way
                tensor.trigger_wait()
            tensor = getattr(tensor, names[0])
        if is_real(tensor) and tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > 0:
            self.eps = max(self.eps, EPS.get(tensor.dtype, 0.0))
            self.taken[place].append(fingerprint(tensor, self.rows))

    def at(self, place: Any) -> Tensor:
        """Return the fingerprints at a place as one, ``[rows]``."""
        return torch.cat(self.taken[place])


class _Verdict:
    """Collects the recomputes of one backward pass, and reads them at its end: see NOTE [The verdict comes last]."""

    def __init__(self) -> None:
        self.task = -1
        self.pairs: list[tuple[Fingerprints, Fingerprints]] = []

    def add(self, before: Fingerprints, now: Fingerprints) -> None:
        """Compare what a recompute took with its forward pass, at the end of the backward pass that runs now."""
        if not now.taken:
            return
        task = torch._C._current_graph_task_id()
        if task != self.task:  # each callback reads its own pairs, so that another backward pass may run inside
            self.task = task
            self.pairs = []
            read = partial(self.read, self.pairs)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(read))
        self.pairs.append((before, now))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in a compiled step autograd calls it
    def read(self, pairs: list[tuple[Fingerprints, Fingerprints]]) -> None:
        """Compare all recomputes of a backward pass with their forward passes.

        Raises:
            RuntimeError: If one computed different values.
        """
        # 1. All tensors with the same number of rows, and the same unit, at once.
        groups = defaultdict[Any, list[tuple[Fingerprints, Tensor, Tensor]]](list)
        for of, recomputed in pairs:
            for place in recomputed.taken:
                before = of.at(place)
                now = recomputed.at(place)
                if now.shape != before.shape:
                    now = before.new_full(before.shape, torch.nan, dtype=torch.float32)
                eps = of.eps if before.is_floating_point() else 0.0
                groups[len(before), before.dtype, before.device, eps].append((of, before, now))
        pairs.clear()
        counts: list[Tensor] = []
        device = next(iter(groups))[2]
        for (_, _, _, eps), group in groups.items():
            _, befores, nows = zip(*group, strict=True)
            differ = rows_that_differ(torch.stack(befores), torch.stack(nows), eps)  # [samples]
            counts.append(differ.to(device))
        # 2. The one read of a step.
        shares: dict[Fingerprints, float] = {}
        for (of, before, _), count in zip(chain(*groups.values()), torch.cat(counts).tolist(), strict=True):
            rows = len(before)
            if count > min(FEW, rows // 32):
                shares[of] = max(shares.get(of, 0.0), count / rows)
        if shares:
            _tell(shares)


VERDICT = _Verdict()


def describe(names: str, difference: str) -> str:
    """Return an error about recomputes, without the last words."""
    return (
        f"The recompute of {names} computes different values from the forward pass ({difference}): something it reads"
        " changed. Change it after backward()"
    )


def _tell(shares: Mapping[Fingerprints, float]) -> None:
    """Raise an error about what differs, by such shares of the rows, or warn if all of it only warns."""
    known = list(dict.fromkeys([of.name for of in shares]))
    names = ", ".join(known[:2])
    if len(known) > 2:
        names += f" and {len(known) - 2} more"
    message = f"{describe(names, f'{max(shares.values()):.0%} of rows')}, or {next(iter(shares)).remedy}."
    if any(of.raises for of in shares):
        raise RuntimeError(message)
    warn(message, once=names)
