"""The collectives of sequence parallelism. The backward pass of each is its exact adjoint.

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
    """Return the mean over the ranks.

    Its adjoint is the identity: each of ``n`` ranks returns the mean, which depends on each ``x`` by ``1 / n``.
    """
    out = x.detach().clone()
    dist.all_reduce(out, group=_GROUPS[group])
    return out.div_(_GROUPS[group].size())


def _save_group(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.group = inputs[1]


all_to_all.register_fake(lambda x, group: x.new_empty(x.shape))
all_gather.register_fake(lambda x, group: x.new_empty(_GROUPS[group].size(), *x.shape))
reduce_scatter.register_fake(lambda x, group: x.new_empty(x.shape[1:]))
group_mean.register_fake(lambda x, group: torch.empty_like(x))
all_to_all.register_autograd(lambda ctx, gradient: (all_to_all(gradient, ctx.group), None), setup_context=_save_group)
all_gather.register_autograd(
    lambda ctx, gradient: (reduce_scatter(gradient, ctx.group), None), setup_context=_save_group
)
group_mean.register_autograd(lambda ctx, gradient: (gradient, None))
