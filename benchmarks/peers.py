"""Everyone's tiled MLP behind one call, so that all of them run the same work.

Each is the function that its authors tell users to put into an MLP's ``forward``, given the module's own forward and
all its weights, as their patches do. What is not installed, or cannot be imported on this machine, is named with the
reason.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.sheet import PACKAGES, Sheet, reason, version_of
from lt_tiled import tile

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


class Tile(Protocol):
    """Makes a module run in that many tiles, on the instance."""

    def __call__(self, module: nn.Module, shards: int) -> None: ...


@dataclass(frozen=True)
class Peer:
    """A way to tile an MLP, or why there is none here."""

    name: str
    tile: Tile | None
    missing: str = ""


def peers() -> list[Peer]:
    """lt_tiled first, then all others, importable or not."""
    return [_peer(name, make) for name, make in MAKERS.items()]


def tile_with(name: str, module: nn.Module, shards: int) -> None:
    """Tile a module by the name of a peer; ``"untiled"`` does nothing."""
    if name != "untiled":
        MAKERS[name]()(module, shards)


def roll_call(everyone: list[Peer]) -> Sheet:
    """Return a table of the packages that are measured, and why others are not."""
    sheet = Sheet("peers", "tiled MLPs on this machine", ["", ""])
    for peer in everyone:
        sheet.add(
            peer.name,
            f"not measured: {peer.missing}"
            if peer.tile is None
            else f"{PACKAGES[peer.name]} {version_of(PACKAGES[peer.name])}",
        )
    return sheet


def _peer(name: str, make: Callable[[], Tile]) -> Peer:
    try:
        return Peer(name, make())
    except Exception as error:  # a package may refuse a machine with any error
        return Peer(name, None, reason(error))


def _lt_tiled() -> Tile:
    def apply(module: nn.Module, shards: int) -> None:
        tile(module, num_shards=shards)

    return apply


def _deepspeed() -> Tile:
    function = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP
    return _of(lambda weights: function)


def _axolotl() -> Tile:
    own = importlib.import_module("axolotl.monkeypatch.tiled_mlp.base").TiledMLP
    theirs = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP

    def choose(weights: list[nn.Parameter]) -> Any:  # as its patch chooses
        return theirs if any(hasattr(w, "ds_id") or hasattr(w, "param_idx_in_group") for w in weights) else own

    return _of(choose)


def _liger() -> Tile:
    function = importlib.import_module("liger_kernel.ops.tiled_mlp").LigerTiledMLPFunction
    return _of(lambda weights: function)


def _verl() -> Tile:
    function = importlib.import_module("verl.models.transformers.tiled_mlp").TiledMLP
    return _of(lambda weights: function)


def _unsloth() -> Tile:
    function = importlib.import_module("unsloth_zoo.tiled_mlp").TiledMLP

    def apply(module: nn.Module, shards: int) -> None:
        plain = type(module).forward

        def forward(self: nn.Module, x: Tensor) -> Any:
            # As its own patch calls it, which counts tokens over the batch and gives the rest to one tile more.
            tokens = max(1, x[..., 0].numel() // shards)
            count = max(1, x[..., 0].numel() // tokens)
            return function.apply(MethodType(plain, self), self, x, True, count, tokens)

        module.forward = MethodType(forward, module)

    return apply


def _hf_kernels() -> Tile:
    raise ImportError("its code is on the Hub, and is loaded from there at run time")


def _of(choose: Callable[[list[nn.Parameter]], Any]) -> Tile:
    """For functions with the arguments of DeepSpeed's ``TiledMLP``."""

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
    "Unsloth": _unsloth,
    "HF kernels": _hf_kernels,
}
