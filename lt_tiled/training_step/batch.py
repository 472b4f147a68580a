"""Batches of a training step: the first of the data, their tensors and sequence lengths."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lt_tiled.errors import SimulationError


def first_batch(module: LightningModule, datamodule: LightningDataModule | None, index: int = 0) -> Any:
    """Return the first batch of the training data, or another, as ``training_step`` receives it, on the CPU.

    Raises:
        SimulationError: If there is none.
    """
    loader = (module if datamodule is None else datamodule).train_dataloader()
    batches = deque(islice(CombinedLoader(loader, "max_size_cycle"), index + 1), maxlen=1)
    if not batches:
        raise SimulationError("train_dataloader() yields no batch: add data, or make batch_size smaller.")
    batch, _, _ = batches.pop()
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        overridden = datamodule is not None and is_overridden(hook, datamodule)
        batch = getattr(datamodule if overridden else module, hook)(batch, 0)
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order."""
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def to_meta(batch: Any) -> Any:
    """Return a batch without its values, on the meta device."""
    return apply_to_collection(batch, Tensor, lambda t: torch.empty_like(t, device="meta"))


def tokens_of(batch: Any) -> int:
    """Return the number of tokens of a batch: the first two sizes of its first tensor that has two, or 0."""
    return next((tensor.shape[0] * tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() > 1), 0)


def length_of(batch: Any) -> int:
    """Return a batch's sequence length: dimension 1 of its first 2D or 3D tensor, or 0 if there is none (images)."""
    return next((tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() in (2, 3)), 0)


def with_length(batch: Any, tokens: int) -> Any:
    """Repeat or cut a batch's sequences to ``tokens``, in each dimension but the first that has the sequence length.

    Raises:
        ValueError: If the batch has no sequences.
    """
    length = length_of(batch)
    if not length:
        raise ValueError(
            "The batch has no tensor with two or three dimensions, so its sequences cannot be made longer: yield"
            " tensors of shape [batch, sequence] from the data, or do not set a sequence length."
        )

    def changed(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            if dim and size == length != tokens:
                tensor = torch.cat([tensor] * -(-tokens // length), dim).narrow(dim, 0, tokens)
        return tensor

    return apply_to_collection(batch, Tensor, changed)
