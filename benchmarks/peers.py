"""The tiled MLPs of all packages behind one call, so that they run the same work.

Each is the function that its authors tell users to put into an MLP's ``forward``, given the module's own forward and
all its weights, as their patches do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from benchmarks.harness import usable
from lt_tiled import tile

Tile = Callable[[nn.Module, int], None]  # makes a module run in that many tiles, on the instance


def tiles() -> dict[str, Tile]:
    """Return the packages that can be imported here, lt_tiled first."""
    return usable(MAKERS)[0]


def _lt_tiled() -> Tile:
    return lambda module, shards: tile(module, num_shards=shards)  # type: ignore[return-value]


def _deepspeed() -> Tile:
    function = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP
    return _of(lambda weights: function)


def _axolotl() -> Tile:
    own = importlib.import_module("axolotl.monkeypatch.tiled_mlp.base").TiledMLP
    theirs = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP

    def choose(weights: list[nn.Parameter]) -> Any:  # as its patch chooses
        by_deepspeed = any(hasattr(w, "ds_id") or hasattr(w, "param_idx_in_group") for w in weights)
        return theirs if by_deepspeed else own

    return _of(choose)


def _liger() -> Tile:
    function = importlib.import_module("liger_kernel.ops.tiled_mlp").LigerTiledMLPFunction
    return _of(lambda weights: function)


def _verl() -> Tile:
    function = importlib.import_module("verl.models.transformers.tiled_mlp").TiledMLP
    return _of(lambda weights: function)


def _of(choose: Callable[[list[nn.Parameter]], Any]) -> Tile:
    """Return what tiles with a function that has the arguments of DeepSpeed's ``TiledMLP``."""

    def apply(module: nn.Module, shards: int) -> None:
        plain = type(module).forward

        def forward(self: nn.Module, x: Tensor) -> Any:
            weights = [weight for weight in self.parameters() if weight.requires_grad]
            return choose(weights).apply(plain, self, x, shards, weights)

        module.forward = MethodType(forward, module)

    return apply


MAKERS: dict[str, Callable[[], Tile]] = {
    "lt_tiled": _lt_tiled,
    "DeepSpeed": _deepspeed,
    "axolotl": _axolotl,
    "Liger": _liger,
    "verl": _verl,
}
