"""Tiling, for use with any strategy."""

from __future__ import annotations

from typing import Any, Literal

from lt_tiled._types import PositiveInt
from lt_tiled.callbacks._preparing import PreparingCallback
from lt_tiled.policies import Tiling


class TiledMLP(PreparingCallback):
    """Tiles modules under any strategy, for ``Trainer(callbacks=...)`` and ``Fabric(callbacks=...)``.

    Args:
        num_shards: Tiles per call, or ``"auto"``.
        loss: Whether models of transformers compute their loss in tiles: ``True``, or how many tiles.
        tiling: The other fields of :class:`~lt_tiled.policies.Tiling`.
    """

    def __init__(
        self,
        num_shards: PositiveInt | Literal["auto"] = "auto",
        loss: bool | PositiveInt | None = None,
        **tiling: Any,
    ) -> None:
        only_loss = loss and tiling.get("targets") == []
        super().__init__(tiling=None if only_loss else Tiling(num_shards, **tiling), loss=loss)
