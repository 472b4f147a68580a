"""Selective activation checkpointing: blocks keep the outputs of the operators that a policy chooses.

NOTE [What a policy keeps]
A policy is that of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. The modes of that function keep
tensors in a dictionary of their own, for one backward pass, and refuse operators that only the recompute runs. Here
outputs go where a block's input goes, with the state of random generators, and serve as many backward passes as the
graph does. What else runs in one pass alone, such as what an engine does inside a block, is run. Compiled blocks run
uncompiled: the modes do not see what compiled code computes.

An output is returned for the operator of the same number among those with the same shapes. Views, operators that write
to their arguments, and those that only allocate memory (``empty``), which engines fill past torch, run in both passes.
An output that is changed in place inside the block is not kept. What runs in tiles, and what ``keep`` names, is hidden:
see ``hidden_from_checkpoints``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # torch names them in no public module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from lt_tiled.kept import Kept
from lt_tiled.tiling.places import storage_of
from lt_tiled.tiling.recompute import RandomState

Chooses = Callable[..., Any]
"""A policy ``(ctx, operator, *args, **kwargs)``, which returns a ``CheckpointPolicy`` or whether to keep the output."""


class Selective(TorchDispatchMode):
    """Keeps outputs of operators in the forward pass of a block, and returns them in its recompute.

    Args:
        chooses: The policy.
        kept: Where outputs are kept.
    """

    supports_higher_order_operators = True

    def __init__(self, chooses: Chooses, kept: Kept) -> None:
        super().__init__()
        self._chooses, self._kept = chooses, kept
        self._counts = Counter[Hashable]()
        self._places: dict[StorageWeakRef, list[Hashable]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that a block calls run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or return its output of the forward pass."""
        run = partial(func, *args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and (schema.is_mutable or getattr(func, "is_view", False) or "empty" in schema.name):
            self._forget_changed(schema, args, kwargs or {})
            return run()
        key = (func, *(leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
        self._counts[key] += 1
        place = (*key, self._counts[key])
        if self._kept.recorded:
            return tree_map_only(Tensor, Tensor.detach, self._kept.replay(place)) if place in self._kept else run()
        known = schema is not None and func.namespace == "aten" and torch.Tag.nondeterministic_seeded not in func.tags
        before = None if known else RandomState.now(self._kept.device)
        output, context = run(), SelectiveCheckpointContext(is_recompute=False)
        context.op_output = output  # torch 2.11 has no argument for it
        if _keeps(self._chooses(context, func, *args, **(kwargs or {})), func):
            # As above autograd, where a detached tensor sees in-place changes of the other one.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                self._kept.record(place, tree_map_only(Tensor, Tensor.detach, output), before)
            for storage in _storages(output):
                self._places.setdefault(storage, []).append(place)
        return output

    def _forget_changed(self, schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Forget kept outputs that an operator changes in place."""
        for index, argument in enumerate(schema.arguments if self._places else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for storage in _storages(args[index] if index < len(args) else kwargs.get(argument.name)):
                    for place in self._places.pop(storage, ()):
                        self._kept.forget(place)


def _keeps(decision: Any, func: Any) -> bool:
    if isinstance(decision, bool):
        return decision
    if not isinstance(decision, CheckpointPolicy):
        raise ValueError(
            f"policy returned {decision!r} for {func}: return a torch.utils.checkpoint.CheckpointPolicy, or whether to"
            " keep the output."
        )
    return decision not in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _storages(values: Any) -> list[StorageWeakRef]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and storage_of(leaf) is not None]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def policy_of(given: Chooses | Sequence[Any] | None) -> Chooses | None:
    """Return the function of a policy, which may be a list of operators or of their names.

    Raises:
        ValueError: If a name is not that of one operator.
    """
    if given is None or callable(given):
        return given
    return partial(_is_among, frozenset(map(_operator, given)))


def _is_among(operators: Collection[Any], context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in operators else CheckpointPolicy.PREFER_RECOMPUTE


def _operator(name: Any) -> Any:
    found = name
    if isinstance(name, str):
        found = torch.ops
        for part in name.split("."):
            found = getattr(found, part, None)
    if isinstance(found, OpOverload | HigherOrderOperator):
        return found
    if isinstance(found, OpOverloadPacket):
        overloads = ", ".join(f"{name}.{overload}" for overload in found.overloads())
        raise ValueError(f"policy names {str(name)!r}, which stands for several operators: name {overloads}.")
    raise ValueError(
        f"policy names {name!r}, which is no operator of torch.ops: write namespace, name and overload, as in"
        " 'aten.mm.default', and import the package that registers it."
    )
