"""The arguments that every tiled strategy adds to its parent's, for Trainer and for Fabric."""

from __future__ import annotations

from typing import Any

from torch import nn

from lt_tiled._prepare import AppliesPolicies
from lt_tiled._types import PositiveInt
from lt_tiled.policies import Checkpointing, Tiers, Tiling

_DEFAULT = Tiling()


class TiledOptions(AppliesPolicies):
    """Keeps the policies, and the models that they were applied to.

    Args:
        tiling: What runs tile by tile; a number is a shard count, ``None`` and ``False`` turn it off.
        checkpointing: Which blocks are recomputed in the backward pass, and where their inputs are offloaded to;
            ``True`` is the default policy, ``"cpu"``, ``"disk"`` and ``"cpu+disk"`` offload, ``False`` turns it off.
        loss: Whether models of transformers compute their loss in tiles: ``True``, or how many tiles.
    """

    def __init__(
        self,
        *args: Any,
        tiling: bool | PositiveInt | Tiling | None = _DEFAULT,
        checkpointing: bool | Tiers | Checkpointing | None = True,
        loss: bool | PositiveInt | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.set_policies(tiling, checkpointing, loss)
        self.tiling_is_default = isinstance(tiling, Tiling) and tiling == _DEFAULT

    def prepare_once(self, model: nn.Module) -> None:
        """Apply the policies before the engine wraps the model; a model that they were applied to keeps them."""
        devices = getattr(self, "parallel_devices", None) or [None]  # this node's, one for each of its ranks
        self.prepared.add(model, self, len(devices))
