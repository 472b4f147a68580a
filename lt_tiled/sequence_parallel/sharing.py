"""What a model that shares its sequences carries: its policy, the region that is open, and the checks that passed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from lt_tiled.policies import SequenceParallel
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.attention import AttentionMode
from lt_tiled.sequence_parallel.region import Region, entered
from lt_tiled.sequence_parallel.same_batch import check_same_batch
from lt_tiled.sequence_parallel.self_check import UNNAMED


@dataclass(eq=False)
class Sharing:
    """How a part of a model shares its sequences, and the regions that it is in."""

    owner: str
    """The name of the model in messages."""
    policy: SequenceParallel
    group: dist.ProcessGroup | None
    caller: nn.Module | None
    """The module that calls the blocks; ``None`` if the policy names the module."""
    blocks: Sequence[tuple[str, nn.Module]]
    """The modules, with their paths, from whose first to whose last one there is a region."""
    mode: AttentionMode | None = None
    """Finds attention in models that call ``F.scaled_dot_product_attention`` themselves."""
    hand_written: bool = False
    """Whether the model is not one of transformers."""
    lengths: Sequence[int] = UNNAMED
    """Numbers of tokens above which the model may compute otherwise."""
    positions: Sequence[int] = ()
    """Positions above which it may."""
    open: Region | None = None
    """The region that the first block opened and the last one will close."""
    given: Region | None = None
    """A region that the first block opens in place of its own: that of a self-check."""
    regions: WeakSet[Region] = field(default_factory=WeakSet)
    """Those that a graph holds: a model's own activation checkpointing may recompute their blocks."""
    call: Call | None = None
    """The call of the caller that runs, whose arguments are the batch."""
    compared: bool = False
    """Whether the ranks compared that batch."""

    @property
    def size(self) -> int:
        return self.policy.size

    def compare(self, call: Call) -> None:
        """Raise an error if the ranks of the group have different arguments."""
        assert self.group is not None
        check_same_batch(self.owner, self.group, call.arguments)

    def region(self, total: int, **options: Any) -> Region:
        region = Region(self.group, total, self.owner, mode=self.mode, **options)
        self.regions.add(region)
        return region

    @contextmanager
    def around_blocks(self, call: Call | None = None, compared: bool = False) -> Iterator[None]:
        """Refuse a forward pass that ends, or fails because it needs all tokens, between the first and last block."""
        self.call, self.compared = call, compared
        try:
            yield
        except (RuntimeError, IndexError) as error:
            if self.open is None or isinstance(error, torch.OutOfMemoryError | dist.DistError):
                raise
            raise ValueError(
                f"{self.owner} needs all tokens between its blocks, where each rank has its own ({error}): call it"
                " without what it uses there, as features of images that it adds to hidden states, or name one module"
                " around it in SequenceParallel(targets=...). Pass a block as an argument what it reads from an"
                " attribute, as positions."
            ) from error
        else:
            if self.open is not None:
                self.open.check_closed()
        finally:
            self.open, self.call, self.compared = None, None, False

    @contextmanager
    def opened_by_first_block(self, region: Region) -> Iterator[None]:
        """Let the first block open this region."""
        self.given = region
        try:
            with entered(None), self.around_blocks():
                yield
        finally:
            self.given = None

    def recomputed(self, name: str) -> Region:
        """Return the region of a block that a checkpoint around it recomputes, if no other may be the one."""
        found = list(self.regions)
        if len(found) != 1:
            raise RuntimeError(
                f"{name} is recomputed in the backward pass by its own activation checkpointing, and {len(found)}"
                " forward passes with sequence parallelism may have saved it. Use lt_tiled's activation checkpointing"
                " (activation_checkpointing=True), or run the backward pass of one before the next forward pass."
            )
        return found[0]
