"""The package's logger. It prints without set-up, as Lightning's does, and only on rank 0. And what shows progress."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

_logger = logging.getLogger("lt_tiled")
_logger.setLevel(logging.INFO)
if not logging.root.hasHandlers():
    _logger.addHandler(logging.StreamHandler())
    _logger.propagate = False

_logged: set[str] = set()


def quiet_libraries() -> None:
    """Silence messages, by logger and pattern, that libraries print about themselves."""
    # transformers imports torchao where it is installed: torchao logs each CUDA library that cannot be loaded, and
    # torch logs the enums that torchao registers.
    for logger in (logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")):
        if logger.level == logging.NOTSET:  # keep a level that the user has set
            logger.setLevel(logging.ERROR)
    # Lightning 2.6 and DeepSpeed 0.19 use what torch 2.13 deprecates.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    collectives = r".*torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
    warnings.filterwarnings("ignore", collectives, FutureWarning)


def inform(message: str, *, once: str | None = None, level: int = logging.INFO) -> None:
    """Log a message; with ``once``, only the first time that this key is used in this process."""
    if once in _logged or _on_other_rank():
        return
    if once is not None:
        _logged.add(once)
    _logger.log(level, message)


def _on_other_rank() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_rank() > 0


def warn(message: str, *, once: str | None = None) -> None:
    """Log a warning, as :func:`inform` does."""
    inform(message, once=once, level=logging.WARNING)


@contextmanager
def progress(title: str) -> Iterator[None]:
    """Show what is being done, and for how long, on the terminal of rank 0, and nowhere else."""
    try:
        from rich.console import Console  # which lt_tiled also runs without
    except ModuleNotFoundError:
        yield
        return
    console = Console(stderr=True)
    with console.status(title) if console.is_terminal and not _on_other_rank() else nullcontext():
        yield


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
