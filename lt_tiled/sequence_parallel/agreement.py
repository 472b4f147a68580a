"""What the ranks that share a sequence agree on, by numbers on the host: their batch, and the order of their blocks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # the planner's tensors; torch names them in no public module
from torch.utils import _pytree as pytree

from lt_tiled.sequence_parallel.groups import host_group

_CHUNK = 2**22
"""Values that are hashed at once, which bounds the memory that it takes."""


def check_same_batch(owner: str, group: dist.ProcessGroup | None, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` on all ranks of a group unless each of them has the same tensors in its arguments."""
    assert group is not None
    found: list[tuple[Any, ...]] = []
    for name, value in arguments.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, FakeTensor):  # which has no values
                return
            if isinstance(leaf, Tensor) and not leaf.is_nested:
                # What the model computed may differ: dropout in front of the blocks, sums in any order.
                is_given = leaf.grad_fn is None and leaf.layout is torch.strided
                found.append((name, leaf.dtype, *leaf.shape, _hash(leaf) if is_given else None))
    if not _is_same(group, repr(found)):
        raise ValueError(
            f"{owner} was given different batches on the {group.size()} ranks that share a sequence: use Lightning's"
            " sampler, or give yours num_replicas=strategy.data_world_size, rank=strategy.data_rank and the same seed."
        )


def check_same_block(owner: str, group: dist.ProcessGroup, block: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` on all ranks of a group unless each of them exchanges tokens in the same block next."""
    if not isinstance(tensor, FakeTensor) and not _is_same(group, block):
        raise ValueError(
            f"{owner}: {block} comes next on this rank, and something else on another rank that shares the sequence."
            " A block may leave itself out at random: draw the same numbers on all ranks, or leave none out."
        )


def _is_same(group: dist.ProcessGroup, text: str) -> bool:
    """Whether all ranks of a group have the same text."""
    mine = torch.tensor([zlib.crc32(text.encode())])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=host_group(group))
    return all(torch.equal(mine, other) for other in everyone)


@torch.no_grad()
def _hash(tensor: Tensor) -> int:
    """Return a number that depends on the bytes and the place of each value."""
    values = tensor.resolve_conj().reshape(-1).contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(values.itemsize, torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in values.view(integers).split(_CHUNK):
        places = torch.arange(1, len(chunk) + 1, device=values.device)
        mixed = (chunk.long() + 1) * (2 * places * 0x1E3779B97F4A7C15 + 1)  # odd, so that no bit is lost
        # Sums of integers do not depend on their order, which differs between devices.
        total = 31 * total + (mixed ^ (mixed >> 29)).sum()
    return int(total)
