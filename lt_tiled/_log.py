"""The package's logger. It prints without set-up, as Lightning's does, and only on rank 0."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_logger = logging.getLogger("lt_tiled")
_logger.setLevel(logging.INFO)
if not logging.root.hasHandlers():
    _logger.addHandler(logging.StreamHandler())
    _logger.propagate = False

_logged: set[str] = set()


def quiet_libraries() -> None:
    """Silence messages, by logger and pattern, that libraries print about themselves."""
    # Where torchao is installed, it logs each CUDA library that cannot be loaded, and torch logs its enums.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Lightning 2.6 and DeepSpeed 0.19 use what torch 2.13 deprecates.
    deprecated = r".*(LeafSpec\)|torch\.distributed\.(all_gather_into|reduce_scatter)_tensor)` is deprecated"
    warnings.filterwarnings("ignore", deprecated, FutureWarning)


def inform(message: str, *, once: str | None = None, level: int = logging.INFO) -> None:
    """Log a message; with ``once``, only the first time that this key is used in this process."""
    if once in _logged or (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        return
    if once is not None:
        _logged.add(once)
    _logger.log(level, message)


def warn(message: str, *, once: str | None = None) -> None:
    """Log a warning, as :func:`inform` does."""
    inform(message, once=once, level=logging.WARNING)


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing inside, and forget the keys used there, because it is only a trial."""
    level = _logger.level
    before = set(_logged)
    _logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _logger.setLevel(level)
        _logged.intersection_update(before)
