"""The package's logger: visible without set-up, as Lightning's is, and from one process only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
    if _first(key):
        inform(message)


def warn_once(key: str, message: str) -> None:
    """Warn the first time that a key comes up in this process."""
    if _first(key):
        warn(message)


def _first(key: str) -> bool:
    known = key in _said
    _said.add(key)
    return not known


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing, and remember nothing as said: what runs inside is tried, and not what the user will run."""
    level, before = _logger.level, set(_said)
    _logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _logger.setLevel(level)
        _said.clear()
        _said.update(before)


def _say(level: int, message: str) -> None:
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        _logger.log(level, message)
