"""The tensors that a block saves in its forward pass and in its recompute, compared by their fingerprints.

NOTE [What a block saves]
Of the tensors that a block saves these have a fingerprint:

* the last activation, which depends on what was computed before;
* the last tensor with heads, which attention saves: the MLP of a parallel block does not depend on it;
* the last mask, the last small tensor, such as a factor, and the last of the others, such as the weight of the last
  projection, each of them only behind the last activation or right before it;
* one in turn, another one in each call, for what ends earlier, such as an expert.

All are looked at when the forward pass ends, because kernels may write to a tensor after autograd saved it: RReLU to
its noise, batch norm to its statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip  # torch.compiler.disable would wrap a call for each saved tensor
from torch.utils import checkpoint

from lt_tiled.recompute.compare import EPS, FEW_ROWS, ROWS, VERDICT, Sample, describe, fingerprint
from lt_tiled.recompute.mode import PLAIN_TENSORS, hidden_from_checkpoints, is_backward

ENDS = ("mask", "small", "other")
"""Kinds of tensors on which the last activation depends where they stand before it."""


@dataclass
class BlockHistory:
    """What is known of the calls of a block so far."""

    turn: int = 0
    """How many there were."""
    count: int = 1
    """How many tensors the last one saved that could be compared."""


class BlockFingerprints:
    """The fingerprints of what a block saves in one forward pass: see NOTE [What a block saves].

    Args:
        name: The block's name in messages.
        raises: Whether a difference raises, and does not only warn.
        hidden: The block's hidden states ``[..., tokens, hidden]``.
        history: Of the block's calls.
        buffers: The ids of its buffers, which change between calls.
    """

    def __init__(
        self, name: str, raises: bool, hidden: Tensor | None, history: BlockHistory, buffers: Collection[int]
    ) -> None:
        self.name = name
        self.raises = raises
        self.history = history
        self.buffers = buffers
        self.task = torch._C._current_graph_task_id()
        """The backward pass in which the forward pass runs, if it is part of another recompute."""
        self.tokens: tuple[int, ...] = ()
        if hidden is not None:
            self.tokens = (hidden.shape[-2], hidden.shape[:-1].numel())
        self.fingerprints: dict[int, Tensor] = {}
        """By the place of a tensor among those that the block saves."""
        self.eps = 0.0
        """The unit in the last place of the least precise of them."""
        self._mine = history.turn % history.count
        """Which of the tensors that can be compared has its turn."""
        self._saved = 0
        self._comparable = 0
        self._dtypes = set[torch.dtype]()
        self._chosen: dict[str, tuple[int, Tensor]] = {}
        """The place and the tensor of the last one of each kind."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Look at what is saved inside."""
        token = _current.set(self)
        try:
            yield
            with hidden_from_checkpoints():
                end = self._chosen.get("activation", (0, None))[0] - 1
                for kind, (place, tensor) in self._chosen.items():
                    counts = kind not in ENDS or place >= end
                    if counts and place not in self.fingerprints and _has_values(tensor):
                        self.fingerprints[place] = self._fingerprint(tensor)
        finally:
            _current.reset(token)
            self._chosen.clear()  # also if the step ended: torch's record of the block refers to this
        self.eps = max((EPS.get(dtype, 0.0) for dtype in self._dtypes), default=0.0)
        self.history.turn += 1
        self.history.count = max(self._comparable, 1)

    @skip
    def save(self, tensor: Tensor) -> _Saved:
        """Choose a tensor or not, and return its metadata."""
        place = self._saved
        self._saved += 1
        kind = self._kind(tensor)
        if kind is not None:
            self._dtypes.add(tensor.dtype)
            self._chosen[kind] = (place, tensor)
            if self._comparable == self._mine:
                self._chosen["in turn"] = (place, tensor)
            self._comparable += 1
        return _Saved(tensor.shape, tensor.dtype, place, self)

    @skip
    def _kind(self, tensor: Tensor) -> str | None:
        """Return the kind of a tensor, if it can be compared."""
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided or id(tensor) in self.buffers:
            return None
        # 1. Floats and flags have fingerprints; indices and seeds show in what is computed with them.
        shape = tensor.shape
        is_float = tensor.dtype in EPS
        if not is_float and tensor.dtype is not torch.bool:
            return None
        # 2. Kernels of attention differ in the order of tokens and heads, and may see the tokens of other ranks.
        by_heads = len(shape) == 4 or (len(shape) == 3 and shape[0] in self.tokens)
        if is_float and tensor.requires_grad and by_heads and not _is_weight(tensor):
            return "heads"
        # 3. Weights may have as many rows by chance. Without a gradient are masks, and all that compiled code saves.
        if is_float and len(shape) > 1 and shape[-2] in self.tokens and not _is_weight(tensor):
            return "activation" if tensor.requires_grad else "mask"
        # 4. Attention's sums of exponentials, [B, heads, S], may have padding that nobody fills.
        if len(shape) == 3 and self.tokens:
            heads = self._chosen.get("heads")
            if 0 < shape[-1] - self.tokens[0] < 32 or (heads is not None and shape[:2] == heads[1].shape[:2]):
                return None
        return "small" if tensor.numel() <= ROWS else "other"

    def _fingerprint(self, tensor: Tensor) -> Tensor:
        all_of_it = tensor.numel() <= ROWS or tensor.dim() > 2 or tensor.shape[-2:-1].numel() in self.tokens
        return fingerprint(tensor, ROWS if all_of_it else FEW_ROWS)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in a compiled step autograd calls it
    def compare(self, place: int, tensor: Tensor) -> None:
        """Compare a tensor of the recompute at the end of the backward pass."""
        if _has_values(tensor) and is_backward():
            with hidden_from_checkpoints():
                now = self._fingerprint(tensor)
            remedy = "name other blocks in ActivationCheckpointing"
            VERDICT.add(Sample(self.name, remedy, self.eps, self.fingerprints[place], now, self.raises))


_current: ContextVar[BlockFingerprints | None] = ContextVar("fingerprints", default=None)


class _Saved(NamedTuple):
    """The metadata of a tensor that the forward pass saves. Torch asks whether it is unequal to what is recomputed."""

    shape: torch.Size
    dtype: torch.dtype
    place: int
    of: BlockFingerprints

    @skip
    def __ne__(self, recomputed: object) -> bool:
        assert isinstance(recomputed, Tensor)
        if recomputed.shape != self.shape or recomputed.dtype != self.dtype:
            difference = f"{_describe(recomputed)}, not {_describe(self)}"
            raise RuntimeError(f"{describe(self.of.name, difference)}.")
        if self.place in self.of.fingerprints:
            self.of.compare(self.place, recomputed)
        return False


def _describe(tensor: Tensor | _Saved) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _has_values(tensor: Tensor) -> bool:
    """Return False for an empty tensor, one of a simulation, and a weight that its engine has released."""
    return tensor.numel() > 0 and not tensor.is_meta and tensor.untyped_storage().nbytes() > 0


@skip
def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a weight, a view of one, or of its cast under autocast."""
    base = tensor if tensor._base is None else tensor._base
    if issubclass(type(base), nn.Parameter):  # the check of an instance runs Python code
        return True
    if tensor.dim() > 2:
        return False
    if not tensor.requires_grad:  # the cast of a frozen one, or what is no activation
        return True
    following = () if base.grad_fn is None else base.grad_fn.next_functions
    return len(following) == 1 and isinstance(getattr(following[0][0], "variable", None), nn.Parameter)


@skip
def _metadata(tensor: Tensor) -> Any:
    block = _current.get()
    # A forward pass may differentiate blocks that ran before: what they recompute is not of this one.
    if block is None or block.task != torch._C._current_graph_task_id():
        return tensor
    return block.save(tensor)


COMPARED = "lt_tiled"
"""The name of this determinism check. The argument of torch's checkpoint takes names only."""
checkpoint._allowed_determinism_checks_to_fns[COMPARED] = _metadata
