"""Selective activation checkpointing: blocks keep the outputs of chosen operators, and the recompute does not run them.

NOTE [What is kept]
Two things differ from ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. Outputs go where a block's
input goes, to CPU memory or the disk. What may draw random numbers is kept with the state after it, so that the
recompute goes on with the masks of the forward pass.

The recompute gets the output of an operator's n-th call for its n-th call. Operators that write to their arguments run
in both passes. What runs in tiles is hidden: see ``hidden_from_checkpoints``.

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
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # torch names them in no public module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from lt_tiled.recompute.mode import RandomState, version_of
from lt_tiled.recompute.saved import BlockFingerprints

Chooses = Callable[[Any], bool]
"""Whether the outputs of an operator are kept."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor among the outputs of an operator."""

    stored: Any
    version: int


@dataclass(eq=False, repr=False)
class KeepMode(TorchDispatchMode):
    """What one call of a block keeps: recorded in its forward pass, returned in its recompute."""

    chooses: Chooses
    finds_attention: bool
    """Whether a mode has to find attention functions."""
    device: torch.device
    """Where the block runs."""
    fingerprints: BlockFingerprints
    """Compare what the operators are given: their outputs are equal in any case."""
    offload: Any = None
    """Where the tensors wait, a ``BlockOffload``; ``None`` keeps them on the device."""

    supports_higher_order_operators = True

    def __post_init__(self) -> None:
        super().__init__()
        self.values: dict[Any, tuple[Any, RandomState | None]] = {}
        """By the operator and the number of its call: its outputs, and the random state behind it if it may draw."""
        self._recorded = False
        self._calls = Counter[Any]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that a block calls run compiled."""
        return True

    def run(self, function: Callable[[], Any]) -> Any:
        """Record outputs in the forward pass, the first one; return them in each recompute."""
        self._calls.clear()
        finds = FindsAttention() if self.finds_attention else nullcontext()
        everywhere = nullcontext() if self.chooses is is_attention else self
        token = _kept.set(self)
        try:
            with finds, everywhere:
                return function()
        finally:
            _kept.reset(token)
            self._recorded = True

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
                self.fingerprints.compare((call, index), argument)
            output, random = self.values[call]
            if random is not None:
                random.set()
            return tree_map_only(KeptTensor, self._unpack, output)
        output = func(*args, **kwargs)
        # What runs in the recompute alone, such as what an engine does inside a block, is not kept.
        if not self._recorded:
            for index, argument in arguments:
                self.fingerprints.take((call, index), argument)
            draws = schema is None or func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags
            random = RandomState.now(self.device) if draws else None
            self.values[call] = (tree_map_only(Tensor, self._pack, output), random)
        return output

    def _pack(self, tensor: Tensor) -> KeptTensor:
        # As above autograd, where a detached tensor sees in-place changes of the other one.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            stored = tensor.detach()
            if self.offload is not None:
                stored = self.offload.offloader.pack(stored, self.offload.block, kept=True)
        return KeptTensor(stored, version_of(tensor))

    def _unpack(self, kept: KeptTensor) -> Tensor:
        tensor: Any = kept.stored
        if isinstance(tensor, Tensor) and version_of(tensor) != kept.version:
            raise RuntimeError(
                f"An output of shape {list(tensor.shape)} that a block keeps was changed in place after its operator."
                " Make the change out of place, or name other operators in ActivationCheckpointing(keep=...)."
            )
        loaded: Tensor = tensor if self.offload is None else self.offload.offloader.unpack(tensor)
        return loaded.detach()


_kept: ContextVar[KeepMode | None] = ContextVar("kept", default=None)
"""What this thread's block keeps."""


# Attention


@cache
def is_attention(function: Any) -> bool:
    """Whether a function or an operator computes attention, or sends heads to other ranks, by its name."""
    name = str(function)
    parts = ("attention", "flash_attn", "inductor_compiled_code", "lt_tiled.all_to_all")
    return "backward" not in name and any(part in name for part in parts)


@contextmanager
def attending() -> Iterator[None]:
    """Let the block around, if there is one, keep the attention that runs inside."""
    kept = _kept.get()
    if kept is None or kept in _get_current_dispatch_mode_stack():
        yield
        return
    with kept:
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
