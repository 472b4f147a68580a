"""The groups of ranks that share sequences: which data each takes, what its ranks compare, and their collectives."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lt_tiled.recompute.mode import is_backward


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
        world = dist.get_world_size()
        check_size(size, world)
        return cls(_subgroup(dist.group.WORLD, size), dist.get_rank() // size, world // size)


@cache  # each group has threads and, on a GPU, memory
def _subgroup(world: dist.ProcessGroup, size: int) -> Any:
    """Return this rank's group of a size, made of the group of all ranks."""
    return dist.new_subgroups(size)[0]


@cache
def host_group(group: dist.ProcessGroup) -> Any:
    """Return a group of the same ranks with collectives of the CPU, for which no rank waits for its device."""
    if "gloo" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def check_size(size: int, ranks: int) -> None:
    """Raise ``ValueError`` if groups of these ranks cannot have this size."""
    if ranks % size:
        possible = [number for number in range(1, ranks + 1) if ranks % number == 0]
        raise ValueError(f"sequence_parallel={size} does not divide the {ranks} ranks: choose one of {possible}.")


def group_of(wanted: int, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that shares sequences, by default of consecutive ranks, or refuse one of another size."""
    if group is None:
        return Groups.of_size(wanted).group
    if group.size() != wanted:
        raise ValueError(
            f"sequence_parallel={wanted} and the process group has {group.size()} ranks: pass a group of that size."
        )
    return group


# What the ranks of a group compare


def check_same_batch(owner: str, group: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` on all ranks of a group unless each has the same tensors and numbers in its arguments."""
    if not isinstance(group, dist.ProcessGroup):  # a simulation, whose tensors have no values
        return
    text = ""
    for name, value in arguments.items():
        for leaf in _leaves(value):
            if isinstance(leaf, int | float | str):
                text += f"{name} {leaf} "
            if isinstance(leaf, Tensor) and not leaf.is_nested:
                text += f"{name} {leaf.dtype} {list(leaf.shape)} "
                # What the model computed may differ: dropout in front of the blocks, sums in any order.
                if leaf.grad_fn is None and leaf.layout is torch.strided:
                    values = leaf.detach().resolve_conj().cpu().reshape(-1).contiguous()
                    text += f"{zlib.crc32(values.view(torch.uint8).numpy().data)} "
    if not _is_same(group, text):
        raise ValueError(
            f"{owner} was given different batches on the {group.size()} ranks that share a sequence: use Lightning's"
            " sampler, or give yours **strategy.distributed_sampler_kwargs and the same seed."
        )


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what is in containers: those of torch, mappings such as the batches of tokenizers, and dataclasses."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Mapping):
            yield from _leaves(dict(leaf))
        elif is_dataclass(leaf):
            yield from _leaves(vars(leaf))
        else:
            yield leaf


def check_same_block(group: Any, event: str) -> None:
    """Raise ``ValueError`` on all ranks unless each of them exchanges tokens in the same block next."""
    if is_backward() or not isinstance(group, dist.ProcessGroup):  # a recompute repeats what they agreed on
        return
    if not _is_same(group, event):
        raise ValueError(
            f"{event} comes next on this rank, and something else on another rank of the group."
            " A block may leave itself out at random: draw the same numbers on all ranks, or leave none out."
        )


def _is_same(group: Any, text: str) -> bool:
    """Whether all ranks of a group have the same text."""
    mine = torch.tensor([zlib.crc32(text.encode())])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=host_group(group))
    return all(torch.equal(mine, other) for other in everyone)


# Collectives. The backward pass of each is its exact adjoint. They are custom operators, so that torch.compile and
# simulations on fake tensors see them.

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""Operators take no process groups, only their names."""
# torch 2.13 deprecates the names that 2.11 has.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name by which the operators of this module find a process group."""
    _GROUPS[group.group_name] = group
    return group.group_name


@torch.library.custom_op("lt_tiled::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Send each rank its entry of a tensor ``[n, ...]``, and return the entries that arrive."""
    out = x.new_empty(x.shape)
    dist.all_to_all_single(out, x.contiguous(), group=_GROUPS[group])
    return out


@torch.library.custom_op("lt_tiled::all_gather", mutates_args=())
def all_gather(x: Tensor, group: str) -> Tensor:
    """Return the tensors of all ranks as one: ``[n, ...]``."""
    out = x.new_empty(_GROUPS[group].size(), *x.shape)
    _all_gather(out, x.contiguous()[None], group=_GROUPS[group])
    return out


@torch.library.custom_op("lt_tiled::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Sum a tensor ``[n, ...]`` over all ranks, and return the rank's own entry."""
    out = x.new_empty(1, *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=_GROUPS[group])
    return out.squeeze(0)


@torch.library.custom_op("lt_tiled::group_mean", mutates_args=())
def group_mean(x: Tensor, group: str) -> Tensor:
    """Return the mean over the ranks. Its adjoint is the identity: ``n`` ranks return ``1 / n`` of each ``x``."""
    out = x.detach().clone()
    dist.all_reduce(out, group=_GROUPS[group])
    return out.div_(_GROUPS[group].size())


def _save_group(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.group = inputs[1]


all_to_all.register_fake(lambda x, group: x.new_empty(x.shape))
all_gather.register_fake(lambda x, group: x.new_empty(_GROUPS[group].size(), *x.shape))
reduce_scatter.register_fake(lambda x, group: x.new_empty(x.shape[1:]))
group_mean.register_fake(lambda x, group: torch.empty_like(x))
all_to_all.register_autograd(lambda ctx, grad: (all_to_all(grad, ctx.group), None), setup_context=_save_group)
all_gather.register_autograd(lambda ctx, grad: (reduce_scatter(grad, ctx.group), None), setup_context=_save_group)
group_mean.register_autograd(lambda ctx, grad: (grad, None))
