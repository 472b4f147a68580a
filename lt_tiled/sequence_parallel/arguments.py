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
    def tokens(self) -> Any:
        """Token ids ``[B, S]`` or hidden states ``[B, S, H]``; if no argument has a known name, the first tensor."""
        for name in ("input_ids", "inputs_embeds", *self.arguments):
            for leaf in pytree.tree_leaves(self.arguments.get(name)):
                if isinstance(leaf, Tensor) and leaf.dim() >= 2:
                    return leaf
        return None

    def run(self, forward: Callable[..., Any]) -> Any:
        return forward(self.module, *self.args, **self.kwargs)

    def with_tokens(self, tokens: Tensor, cut: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor) -> Call:
        """Return the call for other tokens, with other tensors as ``cut`` returns them for their arguments' names."""

        def change(name: str, tensor: Tensor) -> Tensor:
            return tokens if tensor is self.tokens else cut(name, tensor)

        new: dict[str, Any] = {}
        for name, value in self.arguments.items():
            new[name] = pytree.tree_map_only(Tensor, partial(change, name), value)
        count = len(self.args)
        return Call(self.module, tuple(new.values())[:count], dict(list(new.items())[count:]))

    def cut(self, owner: str, total: int, part: Callable[[Tensor, int], Tensor], masks: bool = False) -> Call:
        """Return the call with a part of each tensor of ``total`` tokens.

        ``part`` gets a tensor and the dimension of its tokens. With ``masks`` they are cut too, in each such dimension.
        """
        tokens = self.tokens
        if tokens.shape[1] == total:
            tokens = part(tokens, 1)

        def cut(name: str, tensor: Tensor) -> Tensor:
            for dim in token_dims(owner, name, tensor, total, masks):
                tensor = part(tensor, dim)
            return tensor

        return self.with_tokens(tokens, cut)

    def shortened(self, owner: str, total: int, tokens: int) -> Call:
        """Return the call with the first tokens alone, and without the places of packed documents."""
        kwargs = {name: value for name, value in self.kwargs.items() if not name.startswith(DOCUMENTS)}
        short = Call(self.module, self.args, kwargs)
        return short.cut(owner, total, lambda tensor, dim: tensor.narrow(dim, 0, tokens), masks=True)


def token_dims(owner: str, name: str, tensor: Tensor, total: int, masks: bool) -> list[int]:
    """Return the dimensions of tokens: one or none, and two of a mask or a bias of attention if ``masks``."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size == total]
    numbers = tensor.is_floating_point() or tensor.dtype == torch.bool  # and not position ids of as many rows
    padding = tensor.dim() == 4 and tensor.shape[-2:] == (1, total)
    if name.startswith(DOCUMENTS):
        return []
    if len(dims) > 1 and name.startswith("position_embeddings"):
        return [tensor.dim() - 2]  # rotary tables [B, S, D]
    if "mask" in name or padding or (numbers and tensor.shape[-2:] == (total, total)):
        return dims if masks else []
    if len(dims) > 1 and numbers:
        raise ValueError(
            f"{owner} was called with {name} of the shape {list(tensor.shape)}, and sequence parallelism cannot tell"
            f" which dimension has the {total} tokens: use another sequence length."
        )
    return dims[-1:]  # token or position ids [B, S]
