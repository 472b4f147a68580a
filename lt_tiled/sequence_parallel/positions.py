"""Rotary tables: those of a whole call, of which each rank takes the rows of its own tokens.

What a rotary module computes may depend on all positions: with ``rope_type`` dynamic or longrope, other frequencies
are used where the last position is above a length. So it is given the positions of all tokens. It is found by what it
is called with: ``position_ids``, and it has no weights.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled.modules.patch import Order, Patch
from lt_tiled.sequence_parallel.arguments import Call
from lt_tiled.sequence_parallel.ulysses import UlyssesState, current


class RotaryPatch(Patch):
    """On a module that computes rotary tables from position ids."""

    order = Order.POSITIONS

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, call = current(), Call(module, args, kwargs)
        if state is None:
            return call.run(self.inner)
        positions = call.arguments.get("position_ids")
        if not isinstance(positions, Tensor) or positions.shape[-1] != state.length:
            return call.run(self.inner)
        everything = state.all_positions(positions)

        def in_whole_call(value: Any) -> Any:
            if value is positions:
                return everything
            if isinstance(value, Tensor) and value.dim() == 3 and value.shape[1] == state.length:
                # Hidden states: their shape, dtype and device are read, and not their values.
                return value.detach()[:, :1].expand(-1, state.total, -1)
            return value

        output = call.replaced(**{name: in_whole_call(value) for name, value in call.arguments.items()}).run(self.inner)
        return pytree.tree_map(partial(_own_rows, state), output)


def _own_rows(state: UlyssesState, table: Any) -> Any:
    """Return the rank's own rows of a table ``[..., S, D]`` or ``[..., S]``, without the memory of the others."""
    for dim in (-2, -1):
        if isinstance(table, Tensor) and table.dim() >= -dim and table.shape[dim] == state.total:
            return state.own(table, dim).clone()
    return table


def find_rotary(module: nn.Module) -> list[nn.Module]:
    """Return the modules in a module that compute something from position ids, and have no weights."""
    found = []
    for part in module.modules():
        takes_positions = "position_ids" in inspect.signature(type(part).forward).parameters
        if takes_positions and next(part.parameters(), None) is None:
            found.append(part)
    return found
