"""A determinism check for torch's checkpoint that compares values: see NOTE [What no observation sees]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils import checkpoint

from lt_tiled.modules.patch import without_compiler
from lt_tiled.tiling.observe import Observation
from lt_tiled.tiling.recompute import Due, differ, hidden_from_checkpoints, other_values, sampled


class BlockSamples:
    """Samples what a block saves in its forward pass.

    Args:
        observed: The observation of the call.
        hidden: The block's hidden states ``[..., hidden]``.
        due: Whether the recompute is to be compared.
        selects: Whether a policy of operators would see how samples are taken.
    """

    def __init__(self, observed: Observation, hidden: Tensor, due: Due, selects: bool) -> None:
        self.observed, self.due, self._selects = observed, due, selects
        self._tokens = {*hidden.shape[-2:-1], math.prod(hidden.shape[:-1])}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Sample what is saved inside."""
        token = _samples.set(self)
        try:
            yield
        finally:
            _samples.reset(token)

    def sample(self, tensor: Tensor) -> Tensor | None:
        """Return some elements of a tensor that has one dimension, or one of the size of the tokens."""
        # Others may have uninitialized padding, as attention's sums of exponentials have.
        if tensor.dim() > 1 and not self._tokens.intersection(tensor.shape):
            return None
        view = sampled(tensor)
        if view is None or self.observed.holds(view):
            return None
        with hidden_from_checkpoints() if self._selects else nullcontext():
            return view.clone()

    @without_compiler
    def compare(self, sample: Tensor, tensor: Tensor) -> None:
        """Refuse a tensor of the recompute that has other values than the sample.

        Raises:
            RuntimeError: If it has.
        """
        # Batch norm changes copies of its statistics after it saved them, without a new version.
        if not self.due() or (tensor.dim() < 2 and self.observed.has_copies):
            return
        again = sampled(tensor)
        if again is not None and differ(sample, again):
            what = f"a saved tensor of shape {list(tensor.shape)}"
            raise other_values(self.observed.name, what, self.observed.remedy)


_samples: ContextVar[BlockSamples | None] = ContextVar("samples", default=None)


class _Values:
    """The values of a saved tensor among its metadata: a sample in the forward pass, all of them in the recompute."""

    def __init__(self, tensor: Tensor) -> None:
        self.samples = _samples.get()
        self.sample = None if self.samples is None else self.samples.sample(tensor)
        self.tensor = tensor if self.samples is None else None

    def __eq__(self, other: Any) -> bool:
        before, now = (other, self) if self.samples is None else (self, other)
        if before.samples is not None and before.sample is not None and now.tensor is not None:
            before.samples.compare(before.sample, now.tensor)
        return True

    def __repr__(self) -> str:
        return "..."


@without_compiler
def _metadata(tensor: Tensor) -> dict[str, Any]:
    return {**checkpoint._allowed_determinism_checks_to_fns["default"](tensor), "values": _Values(tensor)}


DETERMINISM_CHECK = "lt_tiled"
"""The name of this check. The argument of torch's checkpoint takes names only."""
checkpoint._allowed_determinism_checks_to_fns[DETERMINISM_CHECK] = _metadata
