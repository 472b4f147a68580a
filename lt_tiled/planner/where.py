"""A ledger that knows which module of a model is running, in the forward and in the backward pass."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lt_tiled.checkpointing import BlockPatch
from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.find import plain_name, unwrapped
from lt_tiled.modules.patch import get_patch
from lt_tiled.modules.targets import find_tileable
from lt_tiled.planner.ledger import Ledger, Place
from lt_tiled.policies import Tiling
from lt_tiled.tiling.call import split_arguments
from lt_tiled.tiling.patched import tiled_patches

_ACCUMULATES = 2**63
"""Nodes that accumulate a weight's gradient have a number above all others."""


if TYPE_CHECKING:
    from typing_extensions import Self


class ModelLedger(Ledger):
    """Tells which module allocates: by hooks on all modules, and in the backward pass by autograd's node numbers.

    The number of a node tells in which forward or recompute it was made, and so for which module it works. Autograd has
    no public name for the current node and the next number.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.phase = "forward"
        self._paths = {id(unwrapped(m)): plain_name(path) for path, m in model.named_modules()}
        self._blocks = {id(m) for _, m in find_blocks(model)}
        self._parts = {id(m): "attention" for _, block in find_blocks(model) for m in block.modules()}
        mlps = [m for _, m, patch in tiled_patches(model) if not patch.found.guessed]
        with suppress(NothingFoundError):
            mlps += [m for t in find_tileable(model, Tiling(targets="mlp")) for m in (t.module, *t.before, *t.after)]
        self._parts |= {id(part): "MLP" for m in mlps for part in m.modules()}
        self._past_blocks = False
        self._stack: list[int] = []
        self._numbers: list[int] = []
        self._places: list[Place] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    @property
    def in_module(self) -> bool:
        """Whether a module's forward or recompute is running."""
        return bool(self._stack)

    def begin(self, phase: str) -> None:
        """Enter the forward, backward or optimizer phase."""
        self.phase = phase
        self._stack.clear()
        if phase == "forward":
            self._past_blocks = False
        self._note()

    def place(self) -> Place:
        node = None if self._stack else torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            index = bisect_right(self._numbers, number) - 1
            return self._places[index] if 0 <= number < _ACCUMULATES and index >= 0 else Place("gradients", "")
        module = self._stack[-1] if self._stack else 0
        around = "optimizer" if self.phase == "optimizer" else "loss" if self._past_blocks else "rest"
        return Place(self._parts.get(module, around), self._paths.get(module, ""))

    def _note(self) -> None:
        """Assign the nodes that are made from now on to what is running now."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._places.append(self.place())

    def _enter(self, module: nn.Module, args: Any) -> None:
        # A module outside of the model, such as a loss, belongs to its caller.
        self._stack.append(id(module) if id(module) in self._paths else self._stack[-1] if self._stack else 0)
        self._note()
        if id(module) in self._blocks and get_patch(module, BlockPatch) is not None:
            for tensor in split_arguments(args, {})[0]:
                if tensor.is_floating_point() and tensor.dim() > 1:
                    self.name(tensor, "block inputs")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._past_blocks |= id(module) in self._blocks
        self._note()
