"""Models without memory: fake weights in place of real ones, tiers that move nothing, and groups of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from lt_tiled.offload.offloader import Offloader
from lt_tiled.planner.where import FakeLedger
from lt_tiled.policies import ActivationCheckpointing, parse_bytes
from lt_tiled.training_step.step import nothing, swapped


@contextmanager
def without_memory(model: nn.Module) -> Iterator[FakeLedger]:
    """Make all new tensors fake, and record them in a ledger. Errors name the module that is running."""
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


@dataclass
class _FakeTier:
    """A tier from which bytes come back as new ones: at once, or when they are needed."""

    left: float
    name: Callable[[Tensor], None]
    at_once: bool

    def store(self, raw: Tensor, after: None) -> Any:
        if raw.nbytes > self.left:
            return None
        self.left -= raw.nbytes
        return None, lambda: False, nothing  # it leaves when the offloader waits for it

    def load(self, room: None, nbytes: int, device: torch.device) -> Any:
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
    """Return an offloader with the tiers and budgets of a policy that moves nothing. ``name`` names what it loads."""

    def tier(tier_name: str, budget: int | str | None) -> Any:
        left = math.inf if budget is None else parse_bytes(budget, f"{tier_name}_budget") // (ranks_per_node or 1)
        return _FakeTier(left, name, tier_name == "cpu") if tier_name in (policy.offload or "") else None

    return Offloader(policy, tier("cpu", policy.cpu_budget), tier("disk", policy.disk_budget))
