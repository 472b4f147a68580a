"""Selective activation checkpointing: blocks keep the outputs of chosen operators, and the recompute does not run them.

NOTE [What is kept]
A policy chooses operators, as that of ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` does. Two things
differ from the modes of that function. Outputs go where a block's input goes, to CPU memory or the disk. What may draw
random numbers is kept with the state after it, so that the recompute goes on with the masks of the forward pass.

The recompute gets the output of an operator's n-th call for its n-th call. What runs in one pass alone, such as what an
engine does inside a block, is run. Views, operators that write to their arguments, and those that only allocate memory,
which code outside of torch may fill, run in both passes. What runs in tiles is hidden: see ``hidden_from_checkpoints``.

NOTE [Attention]
A mode that sees each operator of a block doubles its host time. So with ``keep="attention"`` the mode stands only while
an attention function runs (:func:`attending`): in the functions of transformers and of sequence parallelism, which are
wrapped, and in blocks that call torch's functions themselves, where a torch function mode finds them. Kernels are known
by their names. Of compiled attention the mode sees the compiled code as one operator if it was made by
``torch.compile(..., options={"wrap_inductor_compiled_regions": True})``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # torch names them in no public module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from lt_tiled.recompute.mode import RandomState, version_of
from lt_tiled.recompute.saved import BlockFingerprints

Chooses = Callable[..., Any]
"""A policy ``(ctx, operator, *args, **kwargs)``, which returns a ``CheckpointPolicy`` or whether to keep the output."""


class KeptOutput(NamedTuple):
    """What one call of an operator returned."""

    leaves: list[Any]
    """What it returned, tensors as they were stored."""
    versions: list[int | None]
    """Of its tensors; ``None`` for other values."""
    form: Any
    """How leaves are nested."""
    random: RandomState | None
    """The state behind it, if it may have drawn random numbers."""


class KeepMode(TorchDispatchMode):
    """What one call of a block keeps: recorded in its forward pass, returned in its recompute.

    Args:
        chooses: The policy.
        finds_attention: Whether a mode has to find attention functions.
        device: Where the block runs.
        fingerprints: Compare what the operators are given: their outputs are equal in any case.
        store: Has ``pack`` and ``unpack`` of the tensors that wait; ``None`` keeps them on the device.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        chooses: Chooses,
        finds_attention: bool,
        device: torch.device,
        fingerprints: BlockFingerprints,
        store: Any = None,
    ) -> None:
        super().__init__()
        self.chooses = chooses
        self.finds_attention = finds_attention
        self.device = device
        self.fingerprints = fingerprints
        self.store = store
        self.values: dict[Any, KeptOutput] = {}
        """By the operator and the number of its call."""
        self.is_on = False
        """Whether the mode is on."""
        self._recorded = False
        self._calls = Counter[Any]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that a block calls run compiled."""
        return True

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Record outputs in the forward pass; return them in each recompute."""
        self._calls.clear()
        token = _kept.set(self)
        try:
            with ExitStack() as stack:
                if self.finds_attention:
                    stack.enter_context(FindsAttention())
                if self.chooses is not keeps_attention:
                    stack.enter_context(self.turned_on())
                yield
        finally:
            _kept.reset(token)
            self._recorded = True

    @contextmanager
    def turned_on(self) -> Iterator[None]:
        """Turn the mode on for a while, unless it is."""
        if self.is_on:
            yield
            return
        self.is_on = True
        try:
            with self:
                yield
        finally:
            self.is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or return its output of the forward pass."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and (schema.is_mutable or getattr(func, "is_view", False) or "empty" in schema.name):
            return func(*args, **kwargs)
        place = (func, self._calls[func])
        self._calls[func] += 1
        if self._recorded:
            kept = self.values.get(place)
            if kept is not None:
                self._compare(place, (args, kwargs))
                return self._unpack(kept)
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = output  # torch 2.11 has no argument for it
        if _saves(self.chooses(context, func, *args, **kwargs), func):
            draws = schema is None or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags
            self.values[place] = self._pack(output, draws)
            self._compare(place, (args, kwargs))
        return output

    def _compare(self, place: Any, arguments: Any) -> None:
        for index, leaf in enumerate(tree_leaves(arguments)):
            if self._recorded:
                self.fingerprints.compare((place, index), leaf)
            elif isinstance(leaf, Tensor):
                self.fingerprints.take((place, index), leaf)

    def _pack(self, output: Any, draws: bool) -> KeptOutput:
        leaves, form = tree_flatten(output)
        versions: list[int | None] = []
        for index, leaf in enumerate(leaves):
            versions.append(version_of(leaf) if isinstance(leaf, Tensor) else None)
            if isinstance(leaf, Tensor):
                # As above autograd, where a detached tensor sees in-place changes of the other one.
                with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                    detached = leaf.detach()
                    leaves[index] = detached if self.store is None else self.store.pack(detached, kept=True)
        return KeptOutput(leaves, versions, form, RandomState.now(self.device) if draws else None)

    def _unpack(self, kept: KeptOutput) -> Any:
        if kept.random is not None:
            kept.random.set()
        leaves: list[Any] = []
        for leaf, version in zip(kept.leaves, kept.versions, strict=True):
            if version is None:
                leaves.append(leaf)
                continue
            if isinstance(leaf, Tensor) and version_of(leaf) != version:
                raise RuntimeError(
                    f"An output of shape {list(leaf.shape)} that a block keeps was changed in place after its"
                    " operator. Make the change out of place, or name other operators in"
                    " ActivationCheckpointing(keep=...)."
                )
            leaves.append((leaf if self.store is None else self.store.unpack(leaf)).detach())
        return tree_unflatten(leaves, kept.form)


_kept: ContextVar[KeepMode | None] = ContextVar("kept", default=None)
"""What this thread's block keeps."""


# Attention


@cache
def is_attention(function: Any) -> bool:
    """Whether a function or an operator computes attention, or sends heads to other ranks, by its name."""
    name = str(function)
    parts = ("attention", "flash_attn", "inductor_compiled_code", "lt_tiled.all_to_all")
    return "backward" not in name and any(part in name for part in parts)


def keeps_attention(context: Any, func: Any, *args: Any, **kwargs: Any) -> bool:
    """Keep the outputs of attention: the policy of ``keep="attention"``."""
    return is_attention(func)


@contextmanager
def attending() -> Iterator[None]:
    """Let the block around, if there is one, keep the attention that runs inside."""
    kept = _kept.get()
    if kept is None:
        yield
        return
    with kept.turned_on():
        yield


class FindsAttention(TorchFunctionMode):
    """Finds the attention functions that a block calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not is_attention(func):
            return func(*args, **kwargs)
        with attending():
            return func(*args, **kwargs)


# Policies


def _saves(decision: Any, func: Any) -> bool:
    if isinstance(decision, bool):
        return decision
    if not isinstance(decision, CheckpointPolicy):
        raise ValueError(
            f"keep returned {decision!r} for {func}: return a torch.utils.checkpoint.CheckpointPolicy, or whether to"
            " keep the output."
        )
    return decision in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def policy_of(keep: Literal["attention"] | Sequence[Any] | Chooses | None) -> Chooses | None:
    """Return the function of a policy, which may be a list of operators or of their names.

    Raises:
        ValueError: If a name is not that of one operator.
    """
    if keep == "attention":
        return keeps_attention
    if keep is None or callable(keep):
        return keep
    chosen = frozenset(map(_operator, keep))
    return lambda context, func, *args, **kwargs: func in chosen


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
        raise ValueError(f"keep names {str(name)!r}, which stands for several operators: name {overloads}.")
    raise ValueError(
        f"keep names {name!r}, which is no operator of torch.ops: write namespace, name and overload, as in"
        " 'aten.mm.default', and import the package that registers it."
    )
