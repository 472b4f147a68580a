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


@torch.library.custom_op("lt_tiled::all_to_all", mutates_args=())
def all_to_all(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Send the consecutive parts of a flat tensor, of ``send`` entries, and return the parts that arrive."""
    out = x.new_empty(sum(receive))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=_GROUPS[group])
    return out


@all_to_all.register_fake
def _(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    return x.new_empty(sum(receive))


@torch.library.custom_op("lt_tiled::all_gather", mutates_args=())
def all_gather(x: Tensor, lengths: list[int], dim: int, group: str) -> Tensor:
    """Return the parts of all ranks, of ``lengths`` along ``dim``, as one tensor."""
    longest, mine = max(lengths), x.movedim(dim, 0)
    padded = mine.contiguous() if len(mine) == longest else _padded(mine, longest)
    out = x.new_empty(len(lengths) * longest, *mine.shape[1:])
    _all_gather(out, padded, group=_GROUPS[group])
    if min(lengths) < longest:
        out = torch.cat([part[:length] for part, length in zip(out.split(longest), lengths, strict=True)])
    return out.movedim(0, dim).contiguous()


@all_gather.register_fake
def _(x: Tensor, lengths: list[int], dim: int, group: str) -> Tensor:
    return x.new_empty(*x.shape[:dim], sum(lengths), *x.shape[dim + 1 :])


@torch.library.custom_op("lt_tiled::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, lengths: list[int], dim: int, group: str) -> Tensor:
    """Sum a tensor over all ranks and return the rank's own part along ``dim``."""
    longest, whole = max(lengths), x.movedim(dim, 0)
    if min(lengths) < longest:
        whole = torch.cat([_padded(part, longest) for part in whole.split(lengths)])
    out = x.new_empty(longest, *whole.shape[1:])
    _reduce_scatter(out, whole.contiguous(), group=_GROUPS[group])
    return out[: lengths[_GROUPS[group].rank()]].movedim(0, dim).contiguous()


@reduce_scatter.register_fake
def _(x: Tensor, lengths: list[int], dim: int, group: str) -> Tensor:
    return x.new_empty(*x.shape[:dim], lengths[_GROUPS[group].rank()], *x.shape[dim + 1 :])


def _padded(x: Tensor, length: int) -> Tensor:
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])


def _save_place(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.lengths, ctx.dim, ctx.group = inputs


def _scatter_back(ctx: Any, gradient: Tensor) -> Any:
    return reduce_scatter(gradient, ctx.lengths, ctx.dim, ctx.group), None, None, None


all_gather.register_autograd(_scatter_back, setup_context=_save_place)


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
