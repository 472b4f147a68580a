"""The exceptions that a user can meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class NothingFoundError(ValueError):
    """No MLP, no block or no loss was found in a model."""


class NotPositionWiseError(ValueError):
    """Tiles would change a module's results, because its outputs are not computed token by token."""


REMEDY = "Remove it from targets, untile() it, or tile its position-wise part."


class SimulationError(RuntimeError):
    """A training step cannot be simulated, for example because it reads the values of tensors."""


class DoesNotFitError(ValueError):
    """A training step does not fit into the given memory."""


@dataclass(frozen=True)
class Origin:
    """Where an offloaded tensor comes from, as errors name it."""

    step: int
    block: str
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"step {self.step}, block {self.block}, {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class OffloadError(RuntimeError):
    """A tensor cannot be offloaded, or cannot be restored bit for bit.

    Attributes:
        origin: The step, block, shape and dtype of the tensor, if the error is about one tensor.
    """

    def __init__(self, reason: str, origin: Origin | None = None) -> None:
        super().__init__(reason)
        self.origin = origin

    def __str__(self) -> str:
        reason = super().__str__()
        return reason if self.origin is None else f"{reason} ({self.origin})"


class OffloadDiskFullError(OffloadError):
    """The disk, or its budget, has no room for another tensor."""


@contextmanager
def name_origin(origin: Origin) -> Iterator[None]:
    """Add the origin to an :class:`OffloadError` that is raised inside."""
    try:
        yield
    except OffloadError as error:
        error.origin = origin
        raise
