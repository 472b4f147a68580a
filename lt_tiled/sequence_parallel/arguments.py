"""The arguments of a call: those with a dimension of tokens are cut to the rank's own, and the others stay whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.modules.cache import by_name

DOCUMENTS = ("cu_seq_lens", "max_length", "seq_idx")
"""How arguments begin that tell the places of packed documents, which functions over all tokens need whole."""


@dataclass(frozen=True)
class Call:
    """A call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, positional ones first."""
        return by_name(type(self.module).forward, self.args, self.kwargs)

    @cached_property
    def tokens(self) -> Tensor | None:
        """Token ids ``[B, S]`` or hidden states ``[B, S, H]``: the first tensor of tokens if none has a known name."""
        first = [self.arguments.get("input_ids"), self.arguments.get("inputs_embeds")]
        for value in first + list(self.arguments.values()):
            if isinstance(value, Tensor) and value.dim() >= 2:
                return value
        return None

    def run(self, forward: Callable[..., Any]) -> Any:
        return forward(self.module, *self.args, **self.kwargs)

    def with_tokens(self, tokens: Tensor) -> Call:
        """Return the call for other ``tokens``, as many as these."""
        old = self.tokens
        return self.replaced(**pytree.tree_map(lambda leaf: tokens if leaf is old else leaf, self.arguments))

    def shortened(self, owner: str, total: int, tokens: int) -> Call:
        """Return the call with the first tokens alone, and without the places of packed documents."""
        assert self.tokens is not None
        kwargs = {name: value for name, value in self.kwargs.items() if not name.startswith(DOCUMENTS)}
        call = Call(self.module, self.args, kwargs)

        def first(tensor: Tensor, dim: int) -> Tensor:
            return tensor.narrow(dim, 0, tokens)

        return call.changed(owner, total, first(self.tokens, 1), first, masks=True)

    def changed(
        self, owner: str, total: int, tokens: Any, change: Callable[[Tensor, int], Tensor], masks: bool = False
    ) -> Call:
        """Return the call for other ``tokens``, with a change of each other tensor of ``total`` tokens.

        Args:
            owner: The name in messages.
            total: The sequence length.
            tokens: Takes the place of :attr:`tokens`.
            change: Gets a tensor and the dimension of its tokens.
            masks: Change masks too, once for each dimension of tokens; otherwise they stay as they are.
        """

        def changed(name: str, leaf: Any) -> Any:
            if leaf is self.tokens:
                return tokens
            if isinstance(leaf, Tensor) and (masks or not is_mask(name, leaf, total)):
                for dim in token_dims(owner, name, leaf, total):
                    leaf = change(leaf, dim)
            return leaf

        return self.replaced(**{n: pytree.tree_map(partial(changed, n), value) for n, value in self.arguments.items()})

    def replaced(self, **new: Any) -> Call:
        arguments, count = self.arguments | new, len(self.args)
        return Call(self.module, tuple(arguments.values())[:count], dict(list(arguments.items())[count:]))


def is_mask(name: str, tensor: Tensor, total: int) -> bool:
    """Whether a tensor is a mask or a bias of attention, which is needed for all tokens."""
    sizes = tensor.shape
    numbers = tensor.is_floating_point() or tensor.dtype == torch.bool  # and not position ids of as many rows
    square = numbers and len(sizes) >= 2 and sizes[-1] == sizes[-2] == total
    padding = len(sizes) == 4 and sizes[-1] == total and sizes[-2] == 1
    return "mask" in name or square or padding


def token_dims(owner: str, name: str, tensor: Tensor, total: int) -> list[int]:
    """Return the dimensions of tokens: one, two of a mask, or none."""
    if name.startswith(DOCUMENTS):
        return []
    dims = [dim for dim, size in enumerate(tensor.shape) if size == total]
    if not tensor.is_floating_point() and tensor.dtype != torch.bool and "mask" not in name:
        return dims[-1:]  # token or position ids [B, S]
    if len(dims) > 1 and not is_mask(name, tensor, total):
        raise ValueError(
            f"{owner} was called with {name} of the shape {list(tensor.shape)}, and sequence parallelism cannot tell"
            f" which dimension has the {total} tokens: use another sequence length."
        )
    return dims
