"""The package's logger: visible without set-up, as Lightning's is, and from one process only."""

from __future__ import annotations

import logging

import torch.distributed as dist

_logger = logging.getLogger("lt_tiled")
_logger.setLevel(logging.INFO)
if not logging.root.hasHandlers():
    _logger.addHandler(logging.StreamHandler())
    _logger.propagate = False

_said: set[str] = set()


def inform(message: str) -> None:
    _say(logging.INFO, message)


def warn(message: str) -> None:
    _say(logging.WARNING, message)


def inform_once(key: str, message: str) -> None:
    """Log a message the first time that its key comes up in this process."""
    if key not in _said:
        _said.add(key)
        inform(message)


def _say(level: int, message: str) -> None:
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        _logger.log(level, message)
