"""Selective activation checkpointing: blocks keep the outputs of chosen operators, and the recompute does not run them.

NOTE [What is kept]
Two things differ from ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. Outputs go where a block's
input goes, to CPU memory or the disk. What may draw random numbers is kept with the state after it, so that the
recompute goes on with the masks of the forward pass.

The recompute gets the output of an operator's n-th call for its n-th call. Operators that write to their arguments run
in both passes. What runs in tiles is hidden: see ``hidden_from_checkpoints``.

NOTE [Attention]
The kernels of attention are known by their names. Of compiled attention the mode sees the compiled code as one operator
if it was made by ``torch.compile(..., options={"wrap_inductor_compiled_regions": True})``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # torch names them in no public module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lt_tiled.offload.offloader import Offloader
from lt_tiled.recompute.compare import Fingerprints
from lt_tiled.recompute.mode import RandomState, is_backward, version_of
from lt_tiled.recompute.saved import compare_at

Chooses = Callable[[Any], bool]
"""Whether the outputs of an operator are kept."""


class KeepMode(TorchDispatchMode):
    """What one call of a block keeps: recorded in its forward pass, returned in its recompute.

    Args:
        chooses: Whether the outputs of an operator are kept.
        device: Where the block runs.
        prints: Compare what the operators are given: their outputs are equal in any case.
        offloader: Where the outputs wait; ``None`` keeps them on the device.
        block: The block's path, for messages.
    """

    supports_higher_order_operators = True

    def __init__(
        self, chooses: Chooses, device: torch.device, prints: Fingerprints, offloader: Offloader | None, block: str
    ) -> None:
        super().__init__()
        self.chooses = chooses
        self.device = device
        self.prints = prints
        self.offloader = offloader
        self.block = block
        self.values: dict[Any, tuple[Any, RandomState | None]] = {}
        """By the operator and the number of its call: its outputs, with functions that return the tensors among them,
        and the random state behind it if it may draw."""
        self._calls = Counter[Any]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that a block calls run compiled."""
        return True

    def run(self, function: Callable[[], Any]) -> Any:
        """Record outputs in the forward pass; return them in each recompute."""
        self._calls.clear()
        with self:
            return function()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or return its output of the forward pass."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # which operators of a higher order do not have
        if not self.chooses(func) or (schema is not None and schema.is_mutable):
            return func(*args, **kwargs)
        call = (func, self._calls[func])
        self._calls[func] += 1
        arguments = enumerate(tree_leaves((args, kwargs)))
        if call in self.values:
            for index, argument in arguments:
                compare_at(self.prints, (call, index), argument)
            output, random = self.values[call]
            if random is not None:
                random.set()
            return tree_map_only(partial, partial.__call__, output)
        output = func(*args, **kwargs)
        # What runs in the recompute alone, such as what an engine does inside a block, is not kept.
        if not is_backward():
            for index, argument in arguments:
                self.prints.take((call, index), argument)
            draws = schema is None or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags
            random = RandomState.now(self.device) if draws else None
            self.values[call] = (tree_map_only(Tensor, self._pack, output), random)
        return output

    def _pack(self, tensor: Tensor) -> partial[Tensor]:
        # As above autograd, where a detached tensor sees in-place changes of the other one.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            stored: Any = tensor.detach()
            if self.offloader is not None:
                stored = self.offloader.pack(stored, self.block, kept=True)
        return partial(self._unpack, self.offloader, stored, version_of(tensor))

    @staticmethod  # a reference to the mode would be a cycle, which keeps its values until the next collection
    def _unpack(offloader: Offloader | None, tensor: Any, version: int) -> Tensor:
        if isinstance(tensor, Tensor) and version_of(tensor) != version:
            raise RuntimeError(
                f"An output of shape {list(tensor.shape)} that a block keeps was changed in place after its operator."
                " Make the change out of place, or name other operators in ActivationCheckpointing(keep=...)."
            )
        loaded: Tensor = tensor if offloader is None else offloader.unpack(tensor)
        return loaded.detach()


@cache
def is_attention(function: Any) -> bool:
    """Whether a function or an operator computes attention, or sends heads to other ranks, by its name."""
    name = str(function)
    parts = ("attention", "flash_attn", "inductor_compiled_code", "lt_tiled.all_to_all")
    return "backward" not in name and any(part in name for part in parts)


def policy_of(keep: Literal["attention"] | Sequence[Any] | None) -> Chooses | None:
    """Return which operators a policy names; a name without its overload stands for all of them.

    Raises:
        ValueError: If a name is not that of an operator.
    """
    if keep == "attention":
        return is_attention
    if keep is None:
        return None
    chosen: set[Any] = set()
    for name in keep:
        operator = name
        if isinstance(name, str):
            operator = torch.ops
            for part in name.split("."):
                operator = getattr(operator, part, None)
        if isinstance(operator, OpOverloadPacket):
            chosen.update([getattr(operator, overload) for overload in operator.overloads()])
        elif isinstance(operator, OpOverload | HigherOrderOperator):
            chosen.add(operator)
        else:
            raise ValueError(
                f"keep names {name!r}, which is no operator of torch.ops: write namespace and name, as in 'aten.mm',"
                " and import the package that registers it."
            )
    return chosen.__contains__
