"""A determinism check for torch's checkpoint that compares values: see NOTE [What no observation sees]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.utils import checkpoint

from lt_tiled.tiling.recompute import Due, differ, entries_of, other_values


class Compared:
    """Samples what a block saves in its forward pass.

    Args:
        name: The block in messages.
        hidden: Its hidden states ``[..., hidden]``.
        due: Whether its recompute is to be compared.
        remedy: What helps against a refusal.
    """

    def __init__(self, name: str, hidden: Tensor, due: Due, remedy: str) -> None:
        self.name, self.due, self.remedy = name, due, remedy
        self._tokens = {*hidden.shape[-2:-1], math.prod(hidden.shape[:-1])}
        self._last: object = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Sample what is saved inside."""
        token = _compared.set(self)
        try:
            yield
        finally:
            _compared.reset(token)

    def sample(self, tensor: Tensor) -> Tensor | None:
        """Return some entries of a tensor with a dimension of tokens, once if several nodes in a row save it."""
        # Other dimensions may be padded with what nobody wrote, as attention's sums of exponentials are.
        if isinstance(tensor, nn.Parameter) or not self._tokens.intersection(tensor.shape):
            return None
        view = entries_of(tensor)
        if view is None or (key := (view.data_ptr(), view.shape)) == self._last:
            return None
        self._last = key
        return view.clone()


_compared: ContextVar[Compared | None] = ContextVar("compared", default=None)


class _Values:
    """The values of a saved tensor among its metadata: a sample in the forward pass, all of them in the recompute."""

    def __init__(self, tensor: Tensor) -> None:
        self.compared = _compared.get()
        self.values = tensor if self.compared is None else self.compared.sample(tensor)

    def __eq__(self, other: Any) -> bool:
        before, now = (other, self) if self.compared is None else (self, other)
        compared, sample, values = before.compared, before.values, now.values
        if compared is not None and sample is not None and values is not None and compared.due():
            entries = entries_of(values)
            assert entries is not None  # as in the forward pass
            if differ(sample, entries):
                raise other_values(compared.name, f"a saved tensor of shape {list(values.shape)}", compared.remedy)
        return True

    def __repr__(self) -> str:
        return "..."


def _metadata(tensor: Tensor) -> dict[str, Any]:
    return {**checkpoint._allowed_determinism_checks_to_fns["default"](tensor), "values": _Values(tensor)}


DETERMINISM_CHECK = "lt_tiled"
"""The name of this check. The argument of torch's checkpoint takes names only."""
checkpoint._allowed_determinism_checks_to_fns[DETERMINISM_CHECK] = _metadata
