"""The collectives of sequence parallelism. The backward pass of each is its exact adjoint (the exchange has its own).

They are custom operators, so that ``torch.compile`` and simulations on fake tensors see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""Operators take no process groups, only their names."""
# torch 2.13 deprecates the names that 2.11 has.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def name_of(group: dist.ProcessGroup) -> str:
    """Return the name by which the operators of this module find a process group."""
    _GROUPS[group.group_name] = group
    return group.group_name


def _save_group(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.group = inputs[-1]


@torch.library.custom_op("lt_tiled::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Send each rank its entry of a tensor ``[n, ...]``, and return the entries that arrive."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=_GROUPS[group])
    return out


@all_to_all.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


all_to_all.register_autograd(lambda ctx, gradient: (all_to_all(gradient, ctx.group), None), setup_context=_save_group)


@torch.library.custom_op("lt_tiled::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, group: str) -> Tensor:
    """Return the equally large parts of all ranks, along ``dim``, as one tensor."""
    mine = x.movedim(dim, 0).contiguous()
    out = x.new_empty(_GROUPS[group].size() * len(mine), *mine.shape[1:])
    _all_gather(out, mine, group=_GROUPS[group])
    return out.movedim(0, dim).contiguous()


@all_gather.register_fake
def _(x: Tensor, dim: int, group: str) -> Tensor:
    return x.new_empty(*x.shape[:dim], _GROUPS[group].size() * x.shape[dim], *x.shape[dim + 1 :])


@torch.library.custom_op("lt_tiled::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    """Sum a tensor over all ranks and return the rank's own part along ``dim``."""
    whole = x.movedim(dim, 0).contiguous()
    out = x.new_empty(len(whole) // _GROUPS[group].size(), *whole.shape[1:])
    _reduce_scatter(out, whole, group=_GROUPS[group])
    return out.movedim(0, dim).contiguous()


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, group: str) -> Tensor:
    return x.new_empty(*x.shape[:dim], x.shape[dim] // _GROUPS[group].size(), *x.shape[dim + 1 :])


def _save_dim(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.dim, ctx.group = inputs


def _scatter_back(ctx: Any, gradient: Tensor) -> Any:
    return reduce_scatter(gradient, ctx.dim, ctx.group), None, None


all_gather.register_autograd(_scatter_back, setup_context=_save_dim)


@torch.library.custom_op("lt_tiled::group_mean", mutates_args=())
def group_mean(x: Tensor, group: str) -> Tensor:
    """Return the mean over the ranks.

    Its adjoint is the identity: each of ``n`` ranks returns the mean, which depends on each ``x`` by ``1 / n``.
    """
    out = x.detach().clone()
    dist.all_reduce(out, group=_GROUPS[group])
    return out.div_(_GROUPS[group].size())


@group_mean.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


group_mean.register_autograd(lambda ctx, gradient: (gradient, None))
