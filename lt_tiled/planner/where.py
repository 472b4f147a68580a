"""The ledger of a simulation, which knows the module that is running, in the forward and in the backward pass."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
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
from lt_tiled.planner.ledger import Ledger
from lt_tiled.policies import Tiling
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.tiling.call import split_arguments
from lt_tiled.tiling.patch import tiled_patches

aten = torch.ops.aten
_ACCUMULATES = 2**63
"""Nodes that accumulate a weight's gradient have a number above all others."""


class FakeLedger(Ledger):
    """Records fake tensors with the part of the step that allocates them, and names the module in errors.

    It follows modules by hooks, and in the backward pass by the numbers of autograd's nodes: the number of a node tells
    in which forward or recompute it was made, and so for which part it works. Autograd has no public name for the
    current node and the next number.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.phase = "forward"
        self.gathers_in_place = False
        """Whether FSDP gathers into the weights themselves, as ``FullyShardedDataParallel`` does."""
        self._paths = {unwrapped(m): plain_name(path) for path, m in model.named_modules()}
        self._blocks = {block for _, block in find_blocks(model)}
        self._parts = {m: "attention" for block in self._blocks for m in block.modules()}
        mlps = [m for _, m, patch in tiled_patches(model) if not patch.spec.is_lone_norm]
        with suppress(NothingFoundError):
            for target in find_tileable(model, Tiling(targets="mlp")):
                mlps += [target.module, *target.before, *target.after]
        self._parts |= {part: "MLP" for m in mlps for part in m.modules()}
        self._past_blocks = False
        self._stack: list[nn.Module | None] = []
        self._numbers: list[int] = []
        self._noted: list[str] = []

    def __enter__(self) -> FakeLedger:
        self._undo.callback(register_module_forward_pre_hook(self._enter).remove)
        self._undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        super().__enter__()
        return self

    def begin(self, phase: str) -> None:
        """Enter the forward, backward or optimizer phase."""
        self.phase = phase
        self._stack.clear()
        if phase == "forward":
            self._past_blocks = False
        self._note()

    def part(self) -> str:
        node = None if self._stack else torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            index = bisect_right(self._numbers, number) - 1
            return self._noted[index] if 0 <= number < _ACCUMULATES and index >= 0 else "gradients"
        if self._stack and self._stack[-1] in self._parts:
            return self._parts[self._stack[-1]]
        if self.phase == "optimizer":
            return "optimizer"
        return "loss" if self._past_blocks else "rest"

    def _note(self) -> None:
        """Assign the nodes that are made from now on to what is running now."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._noted.append(self.part())

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module not in self._paths:  # a module outside of the model, such as a loss, belongs to its caller
            self._stack.append(self._stack[-1] if self._stack else None)
        else:
            self._stack.append(module)
        self._note()
        if module in self._blocks and get_patch(module, BlockPatch) is not None:
            for tensor in split_arguments(args, {})[0]:
                if tensor.is_floating_point() and tensor.dim() > 1:
                    self.name(tensor, "block inputs")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._past_blocks |= module in self._blocks
        self._note()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, also where torch's fake kernels lack something."""
        if self.gathers_in_place and func.namespace == "fsdp" and "split_with_sizes_copy" in str(func):
            self.drop(args[0])  # what is copied to the weights would be the weights
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
        path = self._paths.get(self._stack[-1], "") if self._stack and self._stack[-1] else ""
        return SimulationError(f"{func} in {path or 'the training step'} {reason}.")
