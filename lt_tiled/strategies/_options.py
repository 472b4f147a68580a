"""The two arguments that every tiled strategy adds to its parent's, for Trainer and for Fabric."""

from __future__ import annotations

from typing import Any

from torch import nn

from lt_tiled._prepare import PreparedModels
from lt_tiled._types import PositiveInt
from lt_tiled.policies import Checkpointing, Tiers, Tiling, as_checkpointing, as_tiling

_DEFAULT = Tiling()


class TiledOptions:
    """Keeps the policies, and the models that they were applied to.

    Args:
        tiling: What runs tile by tile; a number is a shard count, ``None`` and ``False`` turn it off.
        checkpointing: Which blocks are recomputed in the backward, and where their inputs wait; ``True`` is the default
            policy, ``"cpu"``, ``"disk"`` and ``"cpu+disk"`` offload, ``False`` turns it off.
    """

    def __init__(
        self,
        *args: Any,
        tiling: bool | PositiveInt | Tiling | None = _DEFAULT,
        checkpointing: bool | Tiers | Checkpointing | None = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.tiling = as_tiling(tiling)
        self.checkpointing = as_checkpointing(checkpointing)
        self.prepared = PreparedModels()

    def prepare_once(self, model: nn.Module) -> None:
        """Apply the policies before the engine wraps the model; a model that they were applied to keeps them."""
        devices = getattr(self, "parallel_devices", None) or [None]  # this node's, one for each of its ranks
        self.prepared.add(model, self.tiling, self.checkpointing, len(devices))

    def release(self) -> None:
        """Leave every model as it was."""
        self.prepared.release()
