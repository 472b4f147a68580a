"""Models without memory: fake tensors and the ledger that knows which module runs, fake weights and tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from lt_tiled.errors import NothingFoundError, SimulationError
from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.patch import get_patch
from lt_tiled.modules.targets import find_tileable
from lt_tiled.offload.offloader import Offloader
from lt_tiled.offload.pinned import Stored
from lt_tiled.planner.ledger import Ledger, Work
from lt_tiled.policies import ActivationCheckpointing, Tiling
from lt_tiled.recompute.blocks import BlockPatch
from lt_tiled.tiling.weights import swapped
from lt_tiled.training_step.step import nothing

aten = torch.ops.aten


@contextmanager
def without_memory(model: nn.Module) -> Iterator[FakeLedger]:
    """Make the tensors of a model fake, and all new ones, and record them in a ledger."""
    with ExitStack() as stack:
        if find_spec("transformers") is not None:
            from transformers import masking_utils
            from transformers.integrations import hub_kernels

            # It reads the values of position ids to look for packed sequences, and for fake ones it would make their
            # mask: https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py
            stack.enter_context(swapped([(vars(masking_utils), "find_packed_sequence_indices", nothing)]))
            # Kernels of layers with a state cannot run on fake tensors. An export takes the torch code in their place:
            # https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/hub_kernels.py
            stack.enter_context(swapped([(vars(hub_kernels), "is_torchdynamo_exporting", lambda: True)]))
        stack.enter_context(FakeTensorMode())
        ledger = FakeLedger(model)
        stack.callback(register_module_forward_pre_hook(ledger.enter).remove)
        stack.callback(register_module_forward_hook(ledger.leave, always_call=True).remove)
        stack.enter_context(ledger)
        _fake_weights(model)
        ledger.name([*model.parameters(), *model.buffers()], "weights")
        yield ledger


def _fake_weights(model: nn.Module) -> None:
    """Replace all tensors of a model by fake ones on the CPU."""

    @cache  # tied weights stay tied
    def fake(tensor: Tensor) -> Tensor:
        new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        return new

    for module in model.modules():
        # Parameters, buffers, and others such as the state of a metric.
        for name, value in vars(module).items():
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                vars(module)[name] = pytree.tree_map_only(Tensor, fake, value)


class FakeLedger(Ledger):
    """Records fake tensors with the part of the step that allocates them.

    It follows modules by hooks. In the backward pass each of autograd's nodes works for the part that made it, in a
    forward pass or a recompute. Autograd has no public name for the current node and the next node's number.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.outside = "rest"
        """The part of what runs in no block."""
        self.phases: dict[str, int] = {}
        """The moment at which each phase of the last step began."""
        self._blocks = {block for _, block in find_blocks(model)}
        self._parts: dict[nn.Module, str] = {}
        for block in self._blocks:
            self._parts |= dict.fromkeys(block.modules(), "attention")
        with suppress(NothingFoundError):
            for target in find_tileable(model, Tiling(targets="mlp")):
                for module in (target.module, *target.before, *target.after):
                    self._parts |= dict.fromkeys(module.modules(), "MLP")
        self._running: list[str | None] = []
        """The parts of the modules that are running. One in no block, such as a loss, belongs to its caller."""
        self._made: dict[int, str] = {}
        """The part that made each node, by the node's number."""

    def begin(self, phase: str) -> None:
        """Enter the forward, backward or optimizer phase. A new step has a peak and FLOPs of its own."""
        self.phases[phase] = len(self.events)
        self.outside = "rest"
        if phase == "optimizer":
            self.outside = phase
        elif phase == "forward":
            self.restart_peak()
            self.work = Work()

    def part(self) -> str:
        if self._running:
            return self._running[-1] or self.outside
        node: Any = torch._C._current_autograd_node()  # None in a forward pass
        if node is None:
            return self.outside
        return self._made.get(node._sequence_nr(), "gradients")  # of a node that accumulates a weight's gradient

    def enter(self, module: nn.Module, args: Any) -> None:
        above = self._running[-1] if self._running else None
        self._running.append(self._parts.get(module, above))
        if module in self._blocks and get_patch(module, BlockPatch) is not None:
            self.name([t for t in args if isinstance(t, Tensor) and t.is_floating_point()], "block inputs")

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        if module in self._blocks:
            self.outside = "loss"

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, also where torch's fake kernels lack something."""
        self._made.setdefault(torch._C._autograd._get_sequence_nr() - 1, self.part())  # its node is the last one
        # 1. Name the buffers of FSDP's collectives, and the weights that it gathers.
        if func.name() == "fsdp::all_gather_copy_in":  # inputs, output
            self.name(args[1], "gathered")
        elif func.name() == "fsdp::split_with_sizes_copy":  # from the output to weights
            self.name(kwargs["out"], "gathered")
        elif func.name() == "c10d::_reduce_scatter_base_":  # output, input
            self.name(args[0], "gradients")
            self.name(args[1], "communication")
        # 2. Run it.
        if func is aten._local_scalar_dense.default and not self._running:  # a training step may read its loss
            return 1.0 if args[0].is_floating_point() else 1
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # torch's fake kernel demands bfloat16
            left, right, *rest = args
            return func(left.bfloat16(), right.bfloat16(), *rest, **kwargs).to(left.dtype)
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            reason = f"{func} needs the values of tensors, which a simulation does not have"
            raise SimulationError(f"{reason}: leave out .item() and branches on tensors.") from error


def fake_offloader(name: Callable[[Tensor], None], policy: ActivationCheckpointing, _: int | None) -> Offloader:
    """Return an offloader that moves nothing, to the first tier of a policy. ``name`` names what it loads.

    Bytes come back as new ones: from CPU memory as soon as they are prefetched, from a disk when they are needed.
    """
    is_disk = policy.offload == "disk"
    stored = Stored(None, done=lambda: False, wait=nothing)  # it leaves when the offloader waits for it

    def new(nbytes: int) -> Tensor:
        loaded = torch.empty(nbytes, dtype=torch.uint8)
        name(loaded)
        return loaded

    def load(room: None, nbytes: int, device: torch.device) -> Callable[[], Tensor]:
        if is_disk:
            return partial(new, nbytes)
        loaded = new(nbytes)
        return lambda: loaded

    tier: Any = SimpleNamespace(store=lambda raw, after: stored, load=load, close=nothing)
    return Offloader(policy, None, tier) if is_disk else Offloader(policy, tier, None)
