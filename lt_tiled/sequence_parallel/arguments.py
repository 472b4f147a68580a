"""Which arguments of a call belong to tokens: they are cut to the rank's own, and the others stay whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call with their names, those given by position first."""
    names = [*inspect.signature(type(module).forward).parameters][1:]
    yield from zip([*names, *[""] * len(args)], args, strict=False)
    yield from kwargs.items()


def hidden_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first tensor with a dimension of tokens: hidden states ``[B, S, H]`` or token ids ``[B, S]``."""
    for _, value in named_arguments(module, args, kwargs):
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value
    return None


def changed_arguments(
    owner: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    total: int,
    hidden: Tensor,
    change: Callable[[Tensor, int], Tensor],
    masks: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call for other tokens.

    Args:
        owner: The name in messages.
        module: What is called.
        args: The arguments by position.
        kwargs: The arguments by name.
        total: The sequence length.
        hidden: What :func:`hidden_of` returns becomes this.
        change: Applied to each other tensor of ``total`` tokens, with the dimension that these are in.
        masks: Apply it to masks too, once for each dimension of tokens; otherwise they stay as they are.

    Raises:
        ValueError: If two dimensions of a tensor could be the tokens.
    """
    old = hidden_of(module, args, kwargs)

    def changed(name: str, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor is old:
            return hidden if tensor is old else tensor
        mask, dims = is_mask(name, tensor, total), token_dims(owner, name, tensor, total)
        for dim in dims if masks or not mask else ():
            tensor = change(tensor, dim)
        return tensor

    def each(name: str, value: Any) -> Any:
        return pytree.tree_map(lambda leaf: changed(name, leaf), value)

    new = [(name, each(name, value)) for name, value in named_arguments(module, args, kwargs)]
    return tuple(value for _, value in new[: len(args)]), dict(new[len(args) :])


def is_mask(name: str, tensor: Tensor, total: int) -> bool:
    """Whether a tensor is a mask or a bias of attention, which is needed for all tokens."""
    sizes = tensor.shape
    numbers = tensor.is_floating_point() or tensor.dtype == torch.bool  # and not position ids of as many rows
    square = numbers and len(sizes) >= 2 and sizes[-1] == sizes[-2] == total
    padding = len(sizes) == 4 and sizes[-1] == total and sizes[-2] == 1
    return "mask" in name or square or padding


def token_dims(owner: str, name: str, tensor: Tensor, total: int) -> list[int]:
    """Return the dimensions of tokens: one, two of a mask, or none.

    Raises:
        ValueError: If it is not clear which one it is.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size == total]
    if not tensor.is_floating_point() and tensor.dtype != torch.bool and "mask" not in name:
        return dims[-1:]  # token or position ids [B, S]
    if len(dims) > 1 and not is_mask(name, tensor, total):
        raise ValueError(
            f"{owner} was called with {name or 'an argument'} of the shape {list(tensor.shape)}, and sequence"
            f" parallelism cannot tell which dimension has the {total} tokens: use another sequence length."
        )
    return dims


def repeated_to(tokens: int) -> Callable[[Tensor, int], Tensor]:
    """Return a function that repeats or cuts a dimension to a number of tokens."""

    def repeated(tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor] * -(-tokens // tensor.shape[dim]), dim).narrow(dim, 0, tokens)

    return repeated
