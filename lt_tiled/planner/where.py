"""The ledger of a simulation, which knows the module that is running, in the forward and in the backward pass."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lt_tiled.errors import NothingFoundError, SimulationError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.find import plain_name, unwrapped
from lt_tiled.modules.patch import get_patch
from lt_tiled.modules.targets import find_tileable
from lt_tiled.planner.ledger import Ledger, Place
from lt_tiled.policies import Tiling
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.tiling.call import split_arguments
from lt_tiled.tiling.patch import tiled_patches

aten = torch.ops.aten
_ACCUMULATES = 2**63
"""Nodes that accumulate a weight's gradient have a number above all others."""


class FakeLedger(Ledger):
    """Records fake tensors with the module that allocates them, and names the module in errors of torch's fake kernels.

    It follows modules by hooks, and in the backward pass by the numbers of autograd's nodes: the number of a node tells
    in which forward or recompute it was made, and so for which module it works. Autograd has no public name for the
    current node and the next number.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.phase = "forward"
        self._paths = {id(unwrapped(m)): plain_name(path) for path, m in model.named_modules()}
        self._blocks = {id(m) for _, m in find_blocks(model)}
        self._parts = {id(m): "attention" for _, block in find_blocks(model) for m in block.modules()}
        mlps = [m for _, m, patch in tiled_patches(model) if not patch.spec.is_lone_norm]
        with suppress(NothingFoundError):
            mlps += [m for t in find_tileable(model, Tiling(targets="mlp")) for m in (t.module, *t.before, *t.after)]
        self._parts |= {id(part): "MLP" for m in mlps for part in m.modules()}
        self._past_blocks = False
        self._stack: list[int] = []
        self._numbers: list[int] = []
        self._places: list[Place] = []
        self._hooks = ExitStack()

    def __enter__(self) -> FakeLedger:
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

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

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, also where torch's fake kernels lack something."""
        if func is aten._local_scalar_dense.default and not self._stack:
            return 1.0 if args[0].is_floating_point() else 1  # a training step may read its loss
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # torch's fake kernel demands bfloat16
            left, right = args[0], args[1]
            groups = [] if left.dim() + right.dim() > 4 else [(args[2] if len(args) > 2 else kwargs["offs"]).shape[0]]
            return left.new_empty([*(groups or left.shape[:-2]), left.shape[-2], right.shape[-1]])
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise self._error(func, "needs the values of tensors, which a simulation does not have") from error
        except AssertionError as error:
            if "FakeTensor" not in str(error):
                raise
            raise self._error(func, "uses a tensor that is not a parameter, buffer or attribute") from error

    def _error(self, func: Any, reason: str) -> SimulationError:
        return SimulationError(f"{func} in {self.place().path or 'the training step'} {reason}.")
