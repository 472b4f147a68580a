"""The tensors that a block saves in its forward pass and in its recompute, compared by their fingerprints.

NOTE [What a block saves]
Of the tensors that a block saves these have a fingerprint: the last activation, which depends on what was computed
before; the last one without a gradient that has a row for each token, such as a mask; the last small one, such as a
factor; the last of the others, which mostly is the weight of the block's last projection; and one in turn, another one
in each step, for what ends earlier, such as an expert. Kernels may write to a tensor after autograd saved it: RReLU to
its noise, batch norm to its statistics. So a tensor is looked at when the next one is saved, and a vector at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from lt_tiled.recompute.compare import EPS, FEW_ROWS, ROWS, VERDICT, Sample, fingerprint
from lt_tiled.recompute.mode import PLAIN_TENSORS, hidden_from_checkpoints, is_backward


@dataclass
class BlockHistory:
    """What is known of the calls of a block so far."""

    turn: int = 0
    """How many there were."""
    count: int = 1
    """How many tensors the last one saved that could be compared."""


class BlockSamples:
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
        self.name, self.raises, self.history, self.buffers = name, raises, history, buffers
        self.tokens: tuple[int, ...] = ()
        if hidden is not None:
            self.tokens = (hidden.shape[-2], hidden.shape[:-1].numel())
        self.prints: dict[int, Tensor] = {}
        """By the place of a tensor among those that the block saves."""
        self.eps = 0.0
        """The unit in the last place of the least precise of them."""
        self._mine = history.turn % history.count
        """Which of the tensors that can be compared has its turn."""
        self._saved = 0
        self._comparable = 0
        self._in_turn: tuple[int, Tensor] | None = None
        self._last: dict[str, tuple[int, Tensor]] = {}
        """The place and the tensor of the last one of each kind."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Look at what is saved inside."""
        token = _samples.set(self)
        try:
            yield
            if self._in_turn is not None:
                self._last["in turn"] = self._in_turn
            for place, tensor in self._last.values():
                self._print(place, tensor)
        finally:
            _samples.reset(token)
            self._in_turn = None
            self._last.clear()  # also if the step ended: torch's record of the block refers to this
        self.history.turn += 1
        self.history.count = max(self._comparable, 1)

    def save(self, tensor: Tensor) -> _Saved:
        """Look at a tensor, and return its metadata."""
        if self._in_turn is not None and self._in_turn[1].dim() > 1:
            self._print(*self._in_turn)
            self._in_turn = None
        place = self._saved
        self._saved += 1
        kind = self._kind(tensor)
        if kind is not None:
            self.eps = max(self.eps, EPS.get(tensor.dtype, 0.0))
            self._last[kind] = (place, tensor)
            if self._comparable == self._mine:
                self._in_turn = (place, tensor)
            self._comparable += 1
        return _Saved(tensor.shape, tensor.dtype, place, self)

    def _kind(self, tensor: Tensor) -> str | None:
        """Return the kind of a tensor, if it can be compared."""
        if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
            return None
        shape, is_float = tensor.shape, tensor.dtype in EPS
        if not (is_float or tensor.dtype == torch.bool) or id(tensor) in self.buffers:
            return None
        # A weight has as many rows by chance. Without a gradient is a mask, and all that compiled code saves.
        if is_float and len(shape) > 1 and shape[-2] in self.tokens and not _is_weight(tensor):
            return "activation" if tensor.requires_grad else "tokens"
        # Attention's sums of exponentials may have padding that nobody fills.
        if self.tokens and len(shape) == 3 and 0 < shape[-1] - self.tokens[0] < 32:
            return None
        return "small" if tensor.numel() <= ROWS else "other"

    def _print(self, place: int, tensor: Tensor) -> None:
        if place not in self.prints:
            made = self._fingerprint(tensor)
            if made is not None:
                self.prints[place] = made

    def _fingerprint(self, tensor: Tensor) -> Tensor | None:
        if tensor.numel() == 0 or tensor.is_meta or tensor.untyped_storage().nbytes() == 0:
            return None  # of a weight that its engine has released
        with hidden_from_checkpoints(), torch.no_grad():
            all_of_it = tensor.numel() <= ROWS or tensor.shape[-2:-1].numel() in self.tokens
            return fingerprint(tensor, ROWS if all_of_it else FEW_ROWS)

    def compare(self, place: int, tensor: Tensor) -> None:
        """Compare a tensor of the recompute at the end of the backward pass."""
        before = self.prints.get(place)
        if before is None or not is_backward():
            return
        now = self._fingerprint(tensor)
        if now is not None:
            remedy = "name other blocks in ActivationCheckpointing"
            VERDICT.add(Sample(self.name, remedy, self.eps, before, now, self.raises))


_samples: ContextVar[BlockSamples | None] = ContextVar("samples", default=None)


class _Saved(NamedTuple):
    """The metadata of a tensor that the forward pass saves."""

    shape: torch.Size
    dtype: torch.dtype
    place: int
    samples: BlockSamples

    def __repr__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


class _Recomputed:
    """That of a tensor of the recompute. Torch asks whether the metadata of the forward pass is unequal to it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __ne__(self, saved: object) -> bool:
        if not isinstance(saved, _Saved):
            return True
        if (self.tensor.shape, self.tensor.dtype) != saved[:2]:
            raise RuntimeError(
                f"The recompute of {saved.samples.name} computes other values than the forward pass ({self!r}, not"
                f" {saved!r}): something that it reads changed. Make the change after the backward pass."
            )
        saved.samples.compare(saved.place, self.tensor)
        return False

    def __repr__(self) -> str:
        return f"{list(self.tensor.shape)} {self.tensor.dtype}"


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a weight, a view of one, or of its cast under autocast."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    if tensor.dim() > 2:
        return False
    if not tensor.requires_grad:  # the cast of a frozen one, or what is no activation
        return True
    following = () if base.grad_fn is None else base.grad_fn.next_functions
    return len(following) == 1 and isinstance(getattr(following[0][0], "variable", None), nn.Parameter)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # in a compiled step autograd calls it
def _metadata(tensor: Tensor) -> Any:
    samples = _samples.get()
    return _Recomputed(tensor) if samples is None else samples.save(tensor)


COMPARED = "lt_tiled"
"""The name of this determinism check. The argument of torch's checkpoint takes names only."""
checkpoint._allowed_determinism_checks_to_fns[COMPARED] = _metadata
