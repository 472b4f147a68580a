"""A determinism check for torch's checkpoint that compares values: see NOTE [What no observation sees]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils import checkpoint

from lt_tiled.tiling.observe import Observation
from lt_tiled.tiling.recompute import Due, differ, other_values, sampled


class BlockSamples:
    """Samples what a block saves in its forward pass.

    Args:
        observed: The observation of the call.
        hidden: The block's hidden states ``[..., hidden]``.
        due: Whether the recompute is to be compared.
    """

    def __init__(self, observed: Observation, hidden: Tensor, due: Due) -> None:
        self.observed, self.due = observed, due
        self._tokens = {*hidden.shape[-2:-1], math.prod(hidden.shape[:-1])}
        self._last: object = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Sample what is saved inside."""
        token = _samples.set(self)
        try:
            yield
        finally:
            _samples.reset(token)

    def sample(self, tensor: Tensor) -> Tensor | None:
        """Return some elements of a tensor with a dimension of tokens, once if several nodes in a row save it."""
        # Other dimensions may be padded with what nobody wrote, as attention's sums of exponentials are.
        if isinstance(tensor, nn.Parameter) or not self._tokens.intersection(tensor.shape):
            return None
        view = sampled(tensor)
        if view is None or (key := (view.data_ptr(), view.shape)) == self._last:
            return None
        self._last = key
        return view.clone()


_samples: ContextVar[BlockSamples | None] = ContextVar("samples", default=None)


class _Values:
    """The values of a saved tensor among its metadata: a sample in the forward pass, all of them in the recompute."""

    def __init__(self, tensor: Tensor) -> None:
        self.samples = _samples.get()
        self.values = tensor if self.samples is None else self.samples.sample(tensor)

    def __eq__(self, other: Any) -> bool:
        before, now = (other, self) if self.samples is None else (self, other)
        samples, sample, values = before.samples, before.values, now.values
        if samples is not None and sample is not None and values is not None and samples.due():
            again, observed = sampled(values), samples.observed
            if again is not None and differ(sample, again):
                raise other_values(observed.name, f"a saved tensor of shape {list(values.shape)}", observed.remedy)
        return True

    def __repr__(self) -> str:
        return "..."


def _metadata(tensor: Tensor) -> dict[str, Any]:
    return {**checkpoint._allowed_determinism_checks_to_fns["default"](tensor), "values": _Values(tensor)}


DETERMINISM_CHECK = "lt_tiled"
"""The name of this check. The argument of torch's checkpoint takes names only."""
checkpoint._allowed_determinism_checks_to_fns[DETERMINISM_CHECK] = _metadata
