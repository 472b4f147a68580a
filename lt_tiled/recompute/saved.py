"""The tensors that a block saves in its forward pass and in its recompute, compared by their fingerprints.

NOTE [What a block saves]
Whatever a gradient depends on is saved, or computed from what is saved. So these tensors have a fingerprint: those on
which the block's outputs depend through no other saved tensor, because the last one of each branch shows what was
computed before it; and one in turn, another one in each call, for branches that end in no output. They are found in the
graph of the outputs. What operators keep for the recompute is equal in both passes: their arguments are compared.

All are looked at when the forward pass ends, because kernels may write to a tensor after autograd saved it: RReLU to
its noise, batch norm to its statistics. Until then they are held: in a block's first call all that it saves, and then
those at the same places. A block that saves another number of tensors, as experts may, holds all in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._dynamo.decorators import skip  # torch.compiler.disable would wrap a call for each saved tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lt_tiled.recompute.compare import EPS, FEW_ROWS, ROWS, VERDICT, Sample, describe, fingerprint
from lt_tiled.recompute.mode import PLAIN_TENSORS, hidden_from_checkpoints, is_backward

MOST_ENDS = 8
"""So many of the tensors on which outputs depend are compared, the last ones."""
FEWER_ROWS = 256
"""The most rows that are compared of a tensor in turn, and of what a kept operator is given."""
MOST_NODES = 200
"""So many nodes of the graph are looked at."""


@dataclass
class BlockHistory:
    """What is known of the calls of a block so far."""

    calls: int = 0
    saved: int = 0
    """How many tensors each of them saved; 0 if that is not known, -1 if it varies."""
    ends: Collection[int] = ()
    """The places of those on which its outputs depend."""


class BlockFingerprints:
    """The fingerprints of what a block saves in one forward pass: see NOTE [What a block saves].

    Args:
        name: The block's name in messages.
        raises: Whether a difference raises, and does not only warn.
        hidden: The block's hidden states ``[..., tokens, hidden]``.
        inputs: The tensors that the block is given.
        buffers: The ids of its buffers that are put back, and change between calls.
        history: Of the block's calls.
    """

    def __init__(
        self,
        name: str,
        raises: bool,
        hidden: Tensor | None,
        inputs: Sequence[Tensor],
        buffers: Collection[int],
        history: BlockHistory,
    ) -> None:
        self.name = name
        self.raises = raises
        self.buffers = buffers
        self.history = history
        self.task = torch._C._current_graph_task_id()
        """The backward pass in which the forward pass runs, if it is part of another recompute."""
        self.tokens: tuple[int, ...] = ()
        if hidden is not None:
            self.tokens = (hidden.shape[-2], hidden.shape[:-1].numel())
        self.fingerprints: dict[Any, Tensor] = {}
        """By the place of a tensor among those that the block saves; of arguments, by the operator's call."""
        self.eps = 0.0
        """The unit in the last place of the least precise of them."""
        self._saved = 0
        self._dtypes: set[torch.dtype] = set()
        self._ends: Collection[int] | None = None
        """The places of the tensors that are held, if they are known."""
        self._turn = -1
        if history.saved > 0:
            self._ends = history.ends
            self._turn = history.calls % history.saved
        self._in_turn: tuple[int, Tensor] | None = None
        self._edges = {(tensor.grad_fn, tensor.output_nr): -1 for tensor in inputs}
        """The places of saved tensors by the edges of the graph that lead to them; -1 for inputs."""
        self._others: dict[int, list[int]] = {}
        """The places of saved tensors without a graph, by the number of the node that saved them."""
        self._held: dict[int, Tensor] = {}
        """The saved tensors by place, until the forward pass ends."""

    def forward(self, function: Callable[[], Any]) -> Any:
        """Run the forward pass, and look at what it saves."""
        token = _current.set(self)
        try:
            output = function()
            with hidden_from_checkpoints():
                self._look(output)
        finally:
            _current.reset(token)
            # Also if the step ended: torch's record of the block refers to this.
            self._edges.clear()
            self._others.clear()
            self._held.clear()
            self._in_turn = None
        return output

    def _look(self, output: Any) -> None:
        """Take the fingerprints of the tensors on which the outputs depend, and of that which has its turn."""
        history = self.history
        self.eps = max((EPS.get(dtype, 0.0) for dtype in self._dtypes), default=0.0)
        # 1. Their places, unless they are known.
        if self._ends is None:
            history.ends = self._ends = self._find_ends(output) or list(self._held)[-MOST_ENDS:]
            self._turn = history.calls % max(self._saved, 1)
        # 2. Another number of tensors than in the calls before.
        history.saved = self._saved if history.saved in (0, self._saved) else -1
        history.calls += 1
        # 3. Their fingerprints.
        for place in {*self._ends, self._turn} & self._held.keys():
            self._take(place, self._held[place])
        if self._in_turn is not None:
            self._take(*self._in_turn)

    def _take(self, place: int, tensor: Tensor) -> None:
        if _has_values(tensor) and not self._is_padded(tensor):
            self.fingerprints[place] = self._fingerprint(place, tensor)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _take_in_turn(self, place: int, tensor: Tensor) -> None:
        """Take the fingerprint of the tensor that has its turn, when the next one is saved, and hold it no longer."""
        self._in_turn = None
        with hidden_from_checkpoints():
            self._take(place, tensor)

    def _find_ends(self, output: Any) -> list[int]:
        """Return the places of the tensors that the outputs depend on through no other saved tensor."""
        waiting: list[tuple[Any, int]] = []
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                waiting.append((leaf.grad_fn, leaf.output_nr))
        seen: set[tuple[Any, int]] = set()
        ends: set[int] = set()
        while waiting and len(seen) < MOST_NODES:
            edge = waiting.pop()
            if edge in seen or edge[0] is None:
                continue
            seen.add(edge)
            # 1. The value of a saved tensor depends on all that was computed before.
            if edge in self._edges:
                ends.add(self._edges[edge])
                continue
            # 2. What the node saved besides: weights, masks, indices, its own output.
            node = edge[0]
            ends.update(self._others.get(node._sequence_nr(), ()))
            waiting.extend(node.next_functions)
        return sorted(ends - {-1})[-MOST_ENDS:]

    @skip
    def save(self, tensor: Tensor) -> _Saved:
        """Hold a tensor until the forward pass ends, and return its metadata."""
        place = self._saved
        self._saved += 1
        self._dtypes.add(tensor.dtype)
        if self._in_turn is not None and self._in_turn[1].dim() > 1:  # a vector may be statistics: see above
            self._take_in_turn(*self._in_turn)
        if self._ends is not None and place == self._turn and self._is_plain(tensor):
            self._in_turn = (place, tensor)
        if (self._ends is None or place in self._ends) and self._is_plain(tensor):
            self._held[place] = tensor
            if tensor.grad_fn is not None:
                self._edges.setdefault((tensor.grad_fn, tensor.output_nr), place)
            else:
                self._others.setdefault(torch._C._autograd._get_sequence_nr() - 1, []).append(place)
        return _Saved(tensor.shape, tensor.dtype, place, self)

    @skip
    def _is_plain(self, tensor: Tensor) -> bool:
        plain = _plain(tensor)
        return type(plain) in PLAIN_TENSORS and plain.layout is torch.strided and id(tensor) not in self.buffers

    def _is_padded(self, tensor: Tensor) -> bool:
        """Whether it may be attention's sums of exponentials, ``[B, heads, S]``, with padding that nobody fills."""
        if not self.tokens or tensor.dim() != 3 or tensor.shape[-2] in self.tokens:
            return False
        return 0 < tensor.shape[-1] - self.tokens[0] < 32

    def _fingerprint(self, place: Any, tensor: Tensor) -> Tensor:
        plain = _plain(tensor)
        most = FEWER_ROWS
        if plain.numel() > ROWS and plain.dim() == 2 and plain.shape[0] not in self.tokens:  # a weight
            most = FEW_ROWS
        elif self._ends is not None and place in self._ends:
            most = ROWS
        return fingerprint(plain, most)

    def argument(self, call: Any, argument: Any) -> None:
        """Look at an argument of an operator whose output is kept; in the recompute, compare it."""
        before = self.fingerprints.get(call)
        is_plain = isinstance(argument, Tensor) and self._is_plain(argument) and _has_values(argument)
        if before is not None:
            self.compare(call, argument if is_plain else None)
        elif is_plain:
            with hidden_from_checkpoints():
                self.fingerprints[call] = self._fingerprint(call, argument)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # in a compiled step autograd calls it
    def compare(self, place: Any, tensor: Tensor | None) -> None:
        """Compare a tensor of the recompute at the end of the backward pass."""
        if not is_backward() or (tensor is not None and not _has_values(tensor)):
            return
        before = self.fingerprints[place]
        now = torch.full_like(before, torch.nan)
        eps = 0.0
        if tensor is not None:
            with hidden_from_checkpoints():
                found = self._fingerprint(place, tensor)
            if found.shape == before.shape:
                now = found
            if tensor.is_floating_point() or tensor.is_complex():
                eps = self.eps
        remedy = "name other blocks in ActivationCheckpointing"
        VERDICT.add(Sample(self.name, remedy, eps, before, now, self.raises))


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


@skip
def _plain(tensor: Tensor) -> Tensor:
    """Return what holds the values of a tensor: the part on this rank, or the values of a nested one."""
    plain: Any = tensor
    while is_traceable_wrapper_subclass(plain):
        names, _ = plain.__tensor_flatten__()
        plain = getattr(plain, names[0])
    return cast("Tensor", plain)


def _has_values(tensor: Tensor) -> bool:
    """Return False for an empty tensor, one of a simulation, and a weight that its engine has released."""
    plain = _plain(tensor)
    return plain.numel() > 0 and not plain.is_meta and plain.untyped_storage().nbytes() > 0


@skip
def _metadata(tensor: Tensor) -> Any:
    # A forward pass may differentiate blocks that ran before: what they recompute is not of this one.
    block = _current.get()
    if block is None or block.task != torch._C._current_graph_task_id():
        return tensor
    return block.save(tensor)


COMPARED = "lt_tiled"
"""The name of this determinism check. The argument of torch's checkpoint takes names only."""
checkpoint._allowed_determinism_checks_to_fns[COMPARED] = _metadata
