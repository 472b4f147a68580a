"""How many bytes the blocks of a model may save, or keep of attention, until their backward pass.

NOTE [What auto keeps]
Under ``keep="auto"`` a block keeps the output of attention where there is room for it. The room is half of the memory
that is free at the start of a pass beyond what a pass takes without keeping anything, and no more is kept at any time.
The other half is for fragmentation, and for later passes that need more than those that were measured. A pass begins
with the first forward call of a block after a backward pass, or when no call of the last pass waits for its backward
pass any more, as after an evaluation. In the first two passes, and in two more from each that is larger than those
before it, nothing is kept, and the backward pass measures the peak above the start of the pass. What changes between
passes, as optimizer state does after the first one, is seen at the start of a pass. So a step that fits without
``keep`` fits, as long as it needs no more above its start than similar steps did before.

If block inputs are offloaded, what is kept still stays on the device, and the measured passes include the offloader's
buffers. Later backward passes may load more block inputs ahead, so the most that they may load is not part of the room.

Each rank decides for itself, even if ranks share sequences. Then the part of attention between the two exchanges is
kept, and the recompute exchanges whether or not something is kept. Torch's recompute of a block ends with the last
tensor that the block saves. On all ranks this tensor must be on the same side of each exchange, so attention that saves
no tensor is not kept. What communicates itself is not kept either: the exchange of tokens before a convolution, a
user's attention in which a collective runs, and blocks whose code names one, as it may run in later calls only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lt_tiled.memory import ranks_on_node, usage
from lt_tiled.offload.prefetch import MAX_PREFETCH, MAX_PREFETCH_BYTES

SHARE = 0.5
"""The share of the free memory that is room."""
MEASURED = 2
"""The passes that keep nothing and are measured, from each that is larger than those before it."""


class Allowance:
    """Bytes that the blocks of a model may hold until their backward pass."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def fits(self, nbytes: int) -> bool:
        """Whether there are so many bytes left."""
        return self.used + nbytes <= self.limit

    def hold(self, nbytes: int, output: Any) -> None:
        """Count bytes until the backward pass of a block's output."""
        nodes = (leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        if (node := next((node for node in nodes if node is not None), None)) is not None:
            node.register_prehook(_Held(self, nbytes))


class _Held:
    """Bytes that are in use until the backward pass, or until a graph that has none is freed."""

    def __init__(self, allowance: Allowance, nbytes: int) -> None:
        self.allowance, self.nbytes = allowance, nbytes
        allowance.used += nbytes

    def __call__(self, _: Any = None) -> None:
        """Give the bytes back, and leave the gradients as they are."""
        self.allowance.used -= self.nbytes
        self.nbytes = 0

    __del__ = __call__


class Room(Allowance):
    """The bytes that blocks may keep of attention: see NOTE [What auto keeps].

    Args:
        ranks_per_node: Processes that share the memory of a node; by default the launcher's number, else all ranks.
        loads_ahead: Whether later passes may load more offloaded tensors ahead than those that were measured.
    """

    def __init__(self, ranks_per_node: int | None = None, loads_ahead: bool = False) -> None:
        super().__init__(0)
        self.ranks_per_node, self.loads_ahead = ranks_per_node, loads_ahead
        self.device: torch.device | None = None
        self.growth = 0
        """The most that a measured pass took above its start."""
        self.most = 0
        """The most bytes of hidden states of calls in a pass that waited for their backward pass at once."""
        self.waiting = Allowance(0)
        """The bytes of hidden states of the calls in this pass whose backward pass is still to come."""
        self._to_measure = MEASURED
        self._most_waiting = self._start = 0
        self._recomputed = False
        """Whether a recompute followed the last forward call."""

    def begin(self, device: torch.device, nbytes: int, larger: bool) -> bool:
        """Note a forward call of a block; return whether blocks on its device may keep something in this pass.

        Args:
            device: Where the block runs.
            nbytes: The size of its hidden states.
            larger: Whether it is larger than those before it.
        """
        self.device = self.device or device
        if self._recomputed or not self.waiting.used:
            self._to_measure = max(self._to_measure - self._recomputed, 0)
            self._recomputed, self.waiting, self._most_waiting = False, Allowance(0), 0
            now = usage(self.device, ranks_on_node(self.ranks_per_node))
            ahead = min(MAX_PREFETCH * nbytes, MAX_PREFETCH_BYTES) if self.loads_ahead else 0
            self._start, self.limit = now.used, max(int(SHARE * (now.free + self.used - self.growth - ahead)), 0)
        self._most_waiting = max(self._most_waiting, self.waiting.used + nbytes)
        if larger or self._most_waiting > self.most:
            self._to_measure = MEASURED
        return self._to_measure == 0 and device == self.device

    def recomputed(self) -> None:
        """Note a recompute of a block."""
        self._recomputed, self.most = True, max(self.most, self._most_waiting)
        if self._to_measure and self.device is not None:
            peak = usage(self.device, ranks_on_node(self.ranks_per_node)).peak
            self.growth = max(self.growth, peak - self._start)
