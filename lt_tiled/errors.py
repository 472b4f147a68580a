"""The exceptions that a user can meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lt_tiled._renamed import deprecated

__getattr__ = deprecated(
    __name__,
    {
        "NotTokenWise": "lt_tiled.errors.NotPositionWiseError",
        "OffloadDiskFull": "lt_tiled.errors.OffloadDiskFullError",
    },
)


class NothingFoundError(ValueError):
    """``targets="auto"`` finds nothing in a model."""


class NotPositionWiseError(ValueError):
    """Tiles would change a module's results, because its outputs are not computed token by token."""


class SimulationError(RuntimeError):
    """A module needs the values of tensors, which a simulation does not have."""


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
        offset: The tensor's offset in the spill file in bytes, if it has one.
        directory: The directory of the spill file, if there is one.
    """

    def __init__(
        self, reason: str, *, origin: Origin | None = None, offset: int | None = None, directory: str | None = None
    ) -> None:
        self.reason, self.origin, self.offset, self.directory = reason, origin, offset, directory
        places = (
            str(origin) if origin else "",
            f"offset {offset}" if offset is not None else "",
            f"spill file in {directory}" if directory else "",
        )
        where = ", ".join(filter(None, places))
        super().__init__(f"{reason} ({where})" if where else reason)


class OffloadDiskFullError(OffloadError):
    """The disk, or its budget, has no room for another tensor."""


@contextmanager
def name_origin(origin: Origin) -> Iterator[None]:
    """Add the origin to an :class:`OffloadError` that is raised inside."""
    try:
        yield
    except OffloadError as error:
        named = type(error)(error.reason, origin=origin, offset=error.offset, directory=error.directory)
        raise named from error.__cause__
