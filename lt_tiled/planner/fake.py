"""Models without memory: fake tensors and the ledger that knows which module runs, fake weights, groups and tiers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from lt_tiled.errors import NothingFoundError, SimulationError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.patch import get_patch
from lt_tiled.modules.targets import find_tileable
from lt_tiled.offload.offloader import Offloader
from lt_tiled.offload.pinned import Stored
from lt_tiled.planner.ledger import Ledger
from lt_tiled.policies import ActivationCheckpointing, Tiling
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.training_step.step import nothing, swapped

aten = torch.ops.aten
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_ACCUMULATES = 2**63
"""Nodes that accumulate a weight's gradient have a number above all others."""


@contextmanager
def without_memory(model: nn.Module) -> Iterator[FakeLedger]:
    """Make all new tensors fake, and record them in a ledger."""
    with ExitStack() as stack:
        if find_spec("transformers") is not None:
            from transformers import masking_utils
            from transformers.integrations import hub_kernels

            # It reads the values of position ids to look for packed sequences, and for fake ones it would make their
            # mask: https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py
            stack.enter_context(swapped(vars(masking_utils), "find_packed_sequence_indices", nothing))
            # Kernels of layers with a state cannot run on fake tensors. An export takes the torch code in their place:
            # https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/hub_kernels.py
            stack.enter_context(swapped(vars(hub_kernels), "is_torchdynamo_exporting", lambda: True))
        stack.enter_context(FakeTensorMode())
        yield stack.enter_context(FakeLedger(model))


class FakeLedger(Ledger):
    """Records fake tensors with the part of the step that allocates them.

    It follows modules by hooks, and in the backward pass by the numbers of autograd's nodes: the number of a node tells
    in which forward or recompute it was made, and so for which part it works. Autograd has no public name for the
    current node and the next number.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.outside = "rest"
        """The part of what runs in no block."""
        self.gathers_in_place = False
        """Whether FSDP gathers into the weights themselves, as ``FullyShardedDataParallel`` does."""
        self._blocks = {block for _, block in find_blocks(model)}
        self._parts = {part: "attention" for block in self._blocks for part in block.modules()}
        with suppress(NothingFoundError):
            for target in find_tileable(model, Tiling(targets="mlp")):
                for module in (target.module, *target.before, *target.after):
                    self._parts |= dict.fromkeys(module.modules(), "MLP")
        self._stack: list[str | None] = []
        """The parts of the modules that are running. One in no block, such as a loss, belongs to its caller."""
        self._numbers: list[int] = []
        self._noted: list[str] = []

    def __enter__(self) -> FakeLedger:
        self._undo.callback(register_module_forward_pre_hook(self._enter).remove)
        self._undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        super().__enter__()
        return self

    def begin(self, phase: str) -> None:
        """Enter the forward, backward or optimizer phase."""
        self.outside = "optimizer" if phase == "optimizer" else "rest"
        self._stack.clear()
        self._note()

    def part(self) -> str:
        node = None if self._stack else torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            index = bisect_right(self._numbers, number) - 1
            return self._noted[index] if 0 <= number < _ACCUMULATES and index >= 0 else "gradients"
        running = self._stack[-1] if self._stack else None
        return running or self.outside

    def _note(self) -> None:
        """Assign the nodes that are made from now on to what is running now."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._noted.append(self.part())

    def _enter(self, module: nn.Module, args: Any) -> None:
        above = self._stack[-1] if self._stack else None
        self._stack.append(self._parts.get(module, above))
        self._note()
        if module in self._blocks and get_patch(module, BlockPatch) is not None:
            self.name([t for t in args if isinstance(t, Tensor) and t.is_floating_point()], "block inputs")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        if module in self._blocks:
            self.outside = "loss"
        self._note()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, also where torch's fake kernels lack something."""
        if self.gathers_in_place and func.namespace == "fsdp" and "split_with_sizes_copy" in str(func):
            self.drop(args[0])  # what is copied to the weights would be the weights
        if func is aten._local_scalar_dense.default and not self._stack:
            return 1.0 if args[0].is_floating_point() else 1  # a training step may read its loss
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # torch's fake kernel demands bfloat16
            left, right, *rest = args
            return func(left.bfloat16(), right.bfloat16(), *rest, **kwargs).to(left.dtype)
        try:
            return func(*args, **kwargs)
        except _NEEDS_VALUES as error:
            raise SimulationError(f"{func} needs the values of tensors, which a simulation does not have.") from error


def fake_weights(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace all tensors of a model by fake ones on the CPU. Call it under :func:`without_memory`.

    ``dtype`` is the dtype of the weights, by default the one that they have.
    """
    known: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            is_weight = isinstance(tensor, nn.Parameter)
            chosen = dtype if is_weight and dtype is not None else tensor.dtype
            plain = torch.empty_strided(tensor.size(), tensor.stride(), dtype=chosen, device="cpu")
            known[id(tensor)] = nn.Parameter(plain, tensor.requires_grad) if is_weight else plain
        return known[id(tensor)]

    for module in model.modules():
        for name, value in vars(module).items():  # parameters, buffers, and others such as the state of a metric
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                vars(module)[name] = pytree.tree_map_only(Tensor, fake, value)


def fake_group(ranks: int) -> Any:
    """Return a stand-in for a process group, seen from its first rank, which has the most tokens and heads.

    Sequence parallelism reads these attributes. The fake implementations of its operators communicate nothing.
    """
    return SimpleNamespace(group_name="simulated", size=lambda: ranks, rank=lambda: 0)


@dataclass(frozen=True)
class _FakeTier:
    """A tier with room for all. Bytes come back as new ones: at once, or from a disk when they are needed."""

    name: Callable[[Tensor], None]
    at_once: bool

    def store(self, raw: Tensor, after: None) -> Stored:
        return Stored(None, done=lambda: False, wait=nothing)  # it leaves when the offloader waits for it

    def load(self, room: None, nbytes: int, device: torch.device) -> Callable[[], Tensor]:
        def new() -> Tensor:
            loaded = torch.empty(nbytes, dtype=torch.uint8)
            self.name(loaded)
            return loaded

        if not self.at_once:
            return new
        loaded = new()
        return lambda: loaded

    free_buffers = close = nothing


def fake_offloader(
    name: Callable[[Tensor], None], policy: ActivationCheckpointing, ranks_per_node: int | None
) -> Offloader:
    """Return an offloader that moves nothing, to the first tier of a policy. ``name`` names what it loads."""
    tier: Any = _FakeTier(name, at_once=policy.offload != "disk")
    return Offloader(policy, None, tier) if policy.offload == "disk" else Offloader(policy, tier, None)
