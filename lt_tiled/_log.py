"""The package's logger. It prints without set-up, as Lightning's does, and only on rank 0."""

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

_logged: set[str] = set()


def inform(message: str) -> None:
    _log(logging.INFO, message)


def warn(message: str) -> None:
    _log(logging.WARNING, message)


def inform_once(key: str, message: str) -> None:
    """Log a message the first time that its key is used in this process."""
    _log(logging.INFO, message, key)


def warn_once(key: str, message: str) -> None:
    """Warn the first time that a key is used in this process."""
    _log(logging.WARNING, message, key)


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing inside, and forget the keys used there, because it is only a trial."""
    level, before = _logger.level, set(_logged)
    _logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _logger.setLevel(level)
        _logged.intersection_update(before)


def _log(level: int, message: str, key: str | None = None) -> None:
    if key in _logged or (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        return
    if key is not None:
        _logged.add(key)
    _logger.log(level, message)
