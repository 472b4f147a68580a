"""The lengths at which a model computes something else, as its configuration names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_OF_TOKENS = ("window", "chunk")
"""Parts of the names of lengths in tokens that a token can see."""
_OF_POSITIONS = ("original_max_position", "floor_scale", "seq_length", "seq_len", "logn", "log_n")
"""Parts of the names of positions from which others are scaled."""
UNNAMED = (64, 256)
"""Lengths past which models without a configuration are checked: attention may be scaled by the logarithm of one."""


def switches(config: Any) -> tuple[list[int], list[int]]:
    """Return the numbers of tokens, and the positions, above which a model of transformers computes otherwise."""
    fields = config.to_dict()
    of_tokens = {value for name, value in _lengths(fields) if _has(name, _OF_TOKENS)}
    of_positions = {value for name, value in _lengths(fields) if _has(name, _OF_POSITIONS)}
    rope = [fields.get(name) for name in ("rope_parameters", "rope_scaling")]
    if "dynamic" in str(rope) and (longest := fields.get("max_position_embeddings")):
        of_positions.add(longest)
    return sorted(of_tokens), sorted(of_positions)


def _lengths(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif isinstance(value, int) and value > 1:
            yield str(name), value


def _has(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)
