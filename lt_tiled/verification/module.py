"""The module whose steps are compared: a ``training_step``, no dropout, several tiles, and what its steps change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lt_tiled.checkpointing import BlockPatch
from lt_tiled.loss.transformers import HeadPatch
from lt_tiled.modules.find import plain_name, unwrapped, walk
from lt_tiled.modules.patch import Patch, get_patch, get_patches
from lt_tiled.tiling.observe import History, Observation
from lt_tiled.tiling.patched import tiled_patches
from lt_tiled.tiling.state import TiledPatch
from lt_tiled.training_step import nothing, silence

_TILES = 5
"""Tiles where the settings leave their number open: five of a power of two have a shorter last one."""


class ModuleWithStep(LightningModule):
    """Gives a plain module a ``training_step``."""

    def __init__(self, model: nn.Module, step: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__()
        self.model, self._step = model, step or _loss_of

    def configure_model(self) -> None:
        """Do nothing: Lightning wants this hook under FSDP2."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(self.model, batch)


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch if isinstance(batch, tuple) else (batch,), {})
    output = model(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(f"{type(model).__name__} returns no loss for the batch: pass step=lambda model, batch: ...")
    return loss


def name_of(module: LightningModule) -> str:
    """Return the name of the class that the user wrote."""
    return type(unwrapped(module.model if isinstance(module, ModuleWithStep) else module)).__name__


def prefix_of(module: LightningModule) -> str:
    """Return what paths begin with that is not the user's."""
    return "model." if isinstance(module, ModuleWithStep) else ""


def make_comparable(module: LightningModule) -> None:
    """Turn off logging, hooks that change gradients, and dropout: tiles draw masks of their own."""
    silence(module)
    hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    vars(module).update(dict.fromkeys(hooks, nothing))
    if isinstance(module, ModuleWithStep) and not unwrapped(module.model).training:
        module.model.train()  # loops do: from_pretrained returns models in evaluation mode
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(part).__name__)):
                setattr(part, name, 0.0)


def force_tiles(patches: list[Patch]) -> None:
    """Let every call, however short, run in several tiles, and offload every block input that may be offloaded."""
    for patch in patches:
        if isinstance(patch, TiledPatch | HeadPatch):
            patch.learned.largest = (0, 0)  # whatever ran before
        if isinstance(patch, TiledPatch) and patch.tiling.num_shards in ("auto", 1):
            patch.tiling = replace(patch.tiling, num_shards=_TILES, tile_tokens=None)
        elif isinstance(patch, HeadPatch):
            patch.owners = {owner: _TILES if count in ("auto", 1) else count for owner, count in patch.owners.items()}
        elif isinstance(patch, BlockPatch) and patch.offload is not None:
            patch.offload.offloader.min_bytes = 0


def tiles_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the path and the number of tiles of each module that is to be tiled, and of each head."""
    for path, _, patch in tiled_patches(module):
        in_parts = patch.learned.untiled and patch.found.below  # a mixture of experts, which run in tiles
        if not (patch.found.guessed or in_parts):  # a norm that was guessed stays untiled where it cannot be tiled
            yield path, patch.learned.largest[1]
    for path, part in walk(module):
        if (head := get_patch(part, HeadPatch)) is not None:
            yield path, head.learned.largest[1]


def patches_of(module: nn.Module) -> list[Patch]:
    """Return what lt_tiled has set on a module and its submodules."""
    return [patch for part in module.modules() for patch in get_patches(part, Patch)]


def observe(module: nn.Module) -> Observation:
    """Record what the steps of a module may change, and what each of them begins with."""
    parts = [unwrapped(module), *(part for _, part in walk(module))]  # engines' units have a state of their own
    return Observation("", parts, "", History(), generators=True, submodules=False)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers of a module, on the CPU."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {plain_name(name): buffer.detach().cpu().clone() for name, buffer in buffers}


def without_untrained(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out buffers, frozen weights, and all names of a tied weight but the first."""
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    weights = dict(module.named_parameters(remove_duplicate=False))
    others = {plain_name(name) for name in weights.keys() - trained} | buffers_of(module).keys()
    return {name: value for name, value in state.items() if name not in others}
