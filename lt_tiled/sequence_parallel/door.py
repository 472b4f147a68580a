"""Where the sequences of a model begin to be shared: what is known of a model before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.attention import AttentionMode
from lt_tiled.sequence_parallel.ulysses import UlyssesState

UNNAMED = (64, 256)
"""Lengths past which models without a configuration are checked: attention may be scaled by the logarithm of one."""


@dataclass(frozen=True, eq=False)
class Door:
    """How a part of a model shares its sequences."""

    owner: str
    """The name of the model in messages."""
    policy: SequenceParallel
    group: dist.ProcessGroup | None
    """The ranks that share each sequence; ``None`` if nothing is going to run."""
    caller: nn.Module | None
    """The module that calls the blocks; ``None`` if the policy names the module."""
    blocks: Sequence[tuple[str, nn.Module]]
    """The modules, with their paths, from whose first to whose last one a pass is shared."""
    mode: AttentionMode | None = None
    """Finds attention in models that call ``F.scaled_dot_product_attention`` themselves."""
    hand_written: bool = False
    """Whether the model is not one of transformers."""
    lengths: Sequence[int] = UNNAMED
    """Numbers of tokens above which the model may compute otherwise."""

    @property
    def size(self) -> int:
        return self.policy.size

    def state(self, total: int, **known: Any) -> UlyssesState:
        """Return the state of a forward pass on so many tokens."""
        assert self.group is not None
        return UlyssesState(self.group, total, self.owner, **known)

    def state_of_blocks(self, call: Call, tokens: Tensor) -> UlyssesState:
        """Return the state of a pass from a call of a block with all tokens on."""
        return self.state(tokens.shape[1], positions=call.arguments.get("position_ids"))
