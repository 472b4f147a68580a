"""What goes wrong with offloaded data, in one family of exceptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Origin:
    """Where a boundary comes from: what an error names."""

    step: int
    block: str
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"step {self.step}, block {self.block}, {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class OffloadError(RuntimeError):
    """Offloaded data cannot be stored, or cannot be had back as it was.

    Attributes:
        origin: The boundary's step, block, shape and dtype, if one boundary is concerned.
        offset: Its place in the spill file in bytes, if it has one.
        directory: The directory of the spill file, if there is one.
    """

    def __init__(
        self, reason: str, *, origin: Origin | None = None, offset: int | None = None, directory: str | None = None
    ) -> None:
        self.reason = reason
        self.origin = origin
        self.offset = offset
        self.directory = directory
        places = [
            str(origin) if origin else "",
            f"offset {offset}" if offset is not None else "",
            f"spill file in {directory}" if directory else "",
        ]
        where = ", ".join(place for place in places if place)
        super().__init__(f"{reason} ({where})" if where else reason)

    def of(self, origin: Origin) -> OffloadError:
        """The same error, naming the boundary that it befell."""
        error = type(self)(self.reason, origin=origin, offset=self.offset, directory=self.directory)
        error.__cause__ = self.__cause__
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.reason, self.origin, self.offset, self.directory)


class OffloadDiskFull(OffloadError):
    """The disk, or the budget that it was given, has no room for another boundary."""


def _rebuild(
    kind: type[OffloadError], reason: str, origin: Origin | None, offset: int | None, directory: str | None
) -> OffloadError:
    return kind(reason, origin=origin, offset=offset, directory=directory)


class SimulationError(RuntimeError):
    """A module cannot be simulated, for example because it needs values, which fake tensors do not have."""


class DoesNotFitError(ValueError):
    """No settings make the training step fit into the memory."""
