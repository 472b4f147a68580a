"""Which part of a model is running, in the forward and in the backward."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lt_tiled._arguments import split_arguments
from lt_tiled.checkpointing import BlockMark
from lt_tiled.errors import NothingFoundError
from lt_tiled.modules.feed_forward import find_tileable
from lt_tiled.modules.find import find_blocks, plain_name, unwrapped
from lt_tiled.modules.patch import get_mark
from lt_tiled.planner.ledger import Ledger, Place
from lt_tiled.policies import Tiling
from lt_tiled.tiling.api import tile_marks


class Whereabouts(AbstractContextManager["Whereabouts"]):
    """Follows a model through its forward by hooks on all modules, and through its backward by the numbers of
    autograd's nodes.

    A node's number tells in which forward, or recompute, it was made, and with that for which module it works.

    Args:
        model: The model; its blocks, their feed-forward parts and what is tiled are told apart from the rest.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ledger: Ledger | None = None
        """Where the inputs of checkpointed blocks are named, once there is one."""
        self.phase = "forward"
        self._paths = {id(unwrapped(m)): plain_name(path) for path, m in model.named_modules()}
        self._blocks = {id(m): m for _, m in find_blocks(model)}
        self._parts = {id(m): "attention" for block in self._blocks.values() for m in block.modules()}
        self._parts |= {id(m): "MLP" for m in _feed_forwards(model)}
        self._past_blocks = False
        self._stack: list[int] = []
        self._numbers: list[int] = []
        self._places: list[Place] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Whereabouts:
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @property
    def in_module(self) -> bool:
        """Whether a module's forward runs, or a recompute of it."""
        return bool(self._stack)

    def begin(self, phase: str) -> None:
        """Enter the forward, the backward or the optimizer's step."""
        self.phase = phase
        self._stack.clear()
        if phase == "forward":
            self._past_blocks = False
        self._note()

    def now(self) -> Place:
        """What is running."""
        node = None if self._stack else torch._C._current_autograd_node()
        return self._in_forward() if node is None else self._of_node(node._sequence_nr())

    def _in_forward(self) -> Place:
        module = self._stack[-1] if self._stack else 0
        around = "optimizer" if self.phase == "optimizer" else "loss" if self._past_blocks else "rest"
        return Place(self._parts.get(module, around), self._paths.get(module, ""))

    def _of_node(self, number: int) -> Place:
        index = bisect_right(self._numbers, number) - 1
        return self._places[index] if 0 <= number < _ACCUMULATES and index >= 0 else Place("gradients", "")

    def _note(self) -> None:
        """Nodes that are made from now on belong to what is running now."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._places.append(self.now())

    def _enter(self, module: nn.Module, args: Any) -> None:
        # What is in none of the model's modules, a loss for one, belongs to what calls it.
        self._stack.append(id(module) if id(module) in self._paths else self._stack[-1] if self._stack else 0)
        self._note()
        if self.ledger is not None and id(module) in self._blocks and get_mark(module, BlockMark) is not None:
            for given in split_arguments(args, {})[0]:
                if given.is_floating_point() and given.dim() > 1:
                    self.ledger.name(given, "boundaries")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._past_blocks |= id(module) in self._blocks
        self._note()


_ACCUMULATES = 2**63
"""Nodes that accumulate a weight's gradient have a number above all others."""


def _feed_forwards(model: nn.Module) -> list[nn.Module]:
    found = [m for _, m, _ in tile_marks(model)]
    with suppress(NothingFoundError):
        found += [m for t in find_tileable(model, Tiling()) for m in (t.module, *(other for other, _ in t.members))]
    return [part for m in found for part in m.modules()]
