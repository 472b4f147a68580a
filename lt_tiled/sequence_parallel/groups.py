"""The groups of ranks that share sequences, and which data each group takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Groups:
    """Groups of consecutive ranks, which are on one node where the size allows."""

    group: dist.ProcessGroup
    """That of this rank."""
    index: int
    """Its place among the groups."""
    count: int

    @classmethod
    def of_size(cls, size: int) -> Groups:
        """Make the groups of all ranks. Every rank calls it."""
        if not (dist.is_available() and dist.is_initialized()):  # as on a single device
            raise ValueError(
                f"sequence_parallel={size} needs as many ranks, and there is one: use a distributed strategy such as"
                " tiled_ddp, or sequence_parallel=1."
            )
        world, rank = dist.get_world_size(), dist.get_rank()
        check_size(size, world)
        key = dist.group.WORLD, size
        if key not in _made:
            _made[key] = dist.new_subgroups(size)[0]
        return cls(_made[key], rank // size, world // size)


_made: dict[tuple[dist.ProcessGroup | None, int], dist.ProcessGroup] = {}
"""The group of this rank by the group of all ranks and the size: each group has threads and, on a GPU, memory."""


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks with collectives of the CPU, for which no rank waits for its device."""
    if "gloo" in dist.get_backend_config(group):
        return group
    if group not in _hosts:
        ranks = dist.get_process_group_ranks(group)
        _hosts[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _hosts[group]


_hosts: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def sizes_of(ranks: int) -> list[int]:
    """Return the sizes that groups of these ranks can have."""
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


def check_size(size: int, ranks: int) -> None:
    """Raise ``ValueError`` if groups of these ranks cannot have this size."""
    if size not in (possible := sizes_of(ranks)):
        raise ValueError(f"sequence_parallel={size} does not divide the {ranks} ranks: choose one of {possible}.")


def group_of(wanted: int, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that shares sequences.

    Raises:
        ValueError: If the group, by default that of all ranks, has another size.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or group.size() != wanted:
        size = 1 if group is None else group.size()
        raise ValueError(
            f"sequence_parallel={wanted} and the process group has {size} ranks: pass a group of that size."
        )
    return group
