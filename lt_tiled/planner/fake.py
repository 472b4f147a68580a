"""Models without memory: fake weights in the place of real ones, and tiers that move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled._renamed import deprecated
from lt_tiled.errors import SimulationError
from lt_tiled.offload.offloader import Offloader
from lt_tiled.offload.tiers import Loading, Stored, TierName
from lt_tiled.planner.where import Whereabouts
from lt_tiled.policies import Checkpointing, parse_bytes

__getattr__ = deprecated(__name__, {"CannotSimulate": "lt_tiled.errors.SimulationError"})

aten = torch.ops.aten


@contextmanager
def without_memory(where: Whereabouts) -> Iterator[None]:
    """Tensors that are made inside are fake.

    Args:
        where: Says what is running, for errors.
    """
    with ExitStack() as stack:
        if find_spec("transformers") is not None:
            # It looks into position ids for packed sequences, and on fake ones builds a mask for the case that there
            # are any; a prediction is about unpacked ones:
            # https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py
            stack.enter_context(
                mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)
            )
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Kernels(where))
        yield


class _Kernels(TorchDispatchMode):
    """What torch's fake kernels do not do, or say too little of."""

    def __init__(self, where: Whereabouts) -> None:
        super().__init__()
        self.where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default and not self.where.in_module:
            return 1.0 if args[0].is_floating_point() else 1  # of a training step that notes its loss
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # which torch's fake one wants
            left, right = args[0], args[1]
            groups = [] if left.dim() + right.dim() > 4 else [(args[2] if len(args) > 2 else kwargs["offs"]).shape[0]]
            return left.new_empty([*(groups or left.shape[:-2]), left.shape[-2], right.shape[-1]])
        try:
            return func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise SimulationError(
                f"{func} in {self.where.now().path or 'the training step'} needs the values of tensors, which a simulation does not have."
            ) from error
        except AssertionError as error:
            if "FakeTensor" not in str(error):
                raise
            raise SimulationError(
                f"{func} in {self.where.now().path or 'the training step'} uses a tensor that is no weight, buffer or attribute."
            ) from error


def fake_weights(model: nn.Module) -> None:
    """Put fake tensors on the CPU in the place of a model's weights and buffers, those on the meta device included;
    call it inside.
    """
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    known[id(tensor)] = _fake(tensor)
                held[name] = known[id(tensor)]  # type: ignore[assignment]
        for name, value in list(module.__dict__.items()):  # what is no buffer, such as the state of a metric
            holds = name not in _OWN and isinstance(value, Tensor | list | tuple | dict)
            if holds and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                module.__dict__[name] = pytree.tree_map_only(
                    Tensor, lambda t: known[id(t)] if id(t) in known else _fake(t), value
                )


_OWN = ("_parameters", "_buffers", "_modules")


def _fake(tensor: Tensor) -> Tensor:
    plain = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain


class _Nowhere:
    """Bytes that were moved, and come back as new ones. They leave as late as the offloader lets them."""

    def __init__(self, tier: TierName, nbytes: int) -> None:
        self.tier: TierName = tier
        self.nbytes = nbytes
        self._waited_for = False

    def settled(self) -> bool:
        return self._waited_for

    def settle(self, seconds: float) -> None:
        self._waited_for = True

    def load(self) -> Loading:
        return Loading(torch.empty(self.nbytes, dtype=torch.uint8), lambda: True, lambda _: None)

    def free(self) -> None:
        pass


class _FakeTier:
    def __init__(self, tier: TierName, budget: int | None) -> None:
        self.tier: TierName = tier
        self.left = budget

    def store(self, raw: Tensor) -> Stored | None:
        if self.left is not None:
            if raw.nbytes > self.left:
                return None
            self.left -= raw.nbytes
        return _Nowhere(self.tier, raw.nbytes)

    def free_buffers(self) -> None:
        pass

    def close(self) -> None:
        pass


def fake_offloader(policy: Checkpointing, ranks_per_node: int | None = None) -> Offloader:
    """An offloader with the policy's tiers and budgets that moves nothing; it begins anew with each graph."""
    tiers: dict[str, _FakeTier | None] = {"cpu": None, "disk": None}
    for name, budget in (("cpu", policy.cpu_budget), ("disk", policy.disk_budget)):
        if name in (policy.offload or ""):
            limit = None if budget is None else parse_bytes(budget, f"{name}_budget") // (ranks_per_node or 1)
            tiers[name] = _FakeTier("cpu" if name == "cpu" else "disk", limit)
    return Offloader(policy, tiers["cpu"], tiers["disk"])  # type: ignore[arg-type]
