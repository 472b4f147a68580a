"""The longest sequence that trains, found by trying."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.seed import isolate_rng
from torchmetrics import Metric

from lt_tiled._log import inform
from lt_tiled.memory import PeakMemory, provides
from lt_tiled.policies import check_count, parse_bytes
from lt_tiled.recompute.mode import random_state_kept
from lt_tiled.training_step.step import create_optimizer_state, first_batch, run_step, silence, with_length


class SequenceLengthFinder(Callback):
    """Finds the longest sequence whose training step fits, before the run, as Lightning's ``BatchSizeFinder`` does.

    It tries a forward and a backward pass on a batch of the run's data, with the optimizer state in place. Lengths
    double until one does not fit, and bisection finds the rest. Then it restores weights, buffers, metrics, random
    numbers and the optimizer, sets the result as ``attribute`` of the data, and sets up the data again. A learning rate
    schedule that counts the steps of the run was made before that: set ``max_steps``.

    Ranks of DDP agree on a length that fits on all of them. Ranks of sharding engines wait for each other within a
    step: there, memory must run out on all ranks at the same sequence length, as for batches of one shape.

    Args:
        start: The first sequence length.
        limit: The largest sequence length; ``None`` for no limit.
        granule: The precision of the result.
        memory: The memory limit, in bytes or as ``"80GiB"``; ``None`` for the memory of the device.
        attribute: The name of the sequence length in the datamodule or, if it has none, in the module.

    Raises:
        ValueError: If a value is out of bounds, or neither has that attribute.
        RuntimeError: If not even the shortest sequence fits.
    """

    def __init__(
        self,
        start: int = 1024,
        limit: int | None = None,
        granule: int = 256,
        memory: int | str | None = None,
        attribute: str = "seq_len",
    ) -> None:
        check_count("start", start)
        check_count("granule", granule)
        check_count("limit", limit, None)
        self.start = start
        self.granule = granule
        self.limit = limit
        self.attribute = attribute
        self.memory = None if memory is None else parse_bytes(memory, "memory")
        self.found: int | None = None
        """The longest sequence that fits."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        holder = self._holder(trainer, pl_module)
        data = trainer.datamodule  # type: ignore[attr-defined]
        with isolate_rng(), random_state_kept(trainer.strategy.root_device):
            batch = trainer.strategy.batch_to_device(first_batch(pl_module, data))
            with _restored(trainer, pl_module):
                self.found = self._search(partial(self._fits, trainer, pl_module, batch))
        inform(f"SequenceLengthFinder: {self.found} tokens fit; {self.attribute} is set to {self.found}")
        setattr(holder, self.attribute, self.found)
        if data is not None:
            data.setup("fit")
        # A schedule that counts the run's steps has loaded the data already: reload it, as BatchSizeFinder does.
        trainer.fit_loop._combined_loader = None

    def _holder(self, trainer: Any, module: LightningModule) -> Any:
        """Return what has the sequence length as an attribute."""
        for holder in (trainer.datamodule, module):
            if hasattr(holder, self.attribute) and trainer.fit_loop._data_source.is_module():
                return holder
        raise ValueError(
            f"SequenceLengthFinder sets the sequence length as the attribute {self.attribute!r} of a datamodule, or of"
            " a module with data loaders. Pass one that has it and not loaders, or name yours with"
            " SequenceLengthFinder(attribute=...)."
        )

    def _search(self, try_length: Callable[[int], bool]) -> int:
        low = 0
        high: int | None = None
        length = min(self.start, self.limit or self.start)
        while True:
            fits = try_length(length)
            inform(f"SequenceLengthFinder: {length} tokens {'fit' if fits else 'do not fit'}")
            if fits:
                low = length
            else:
                high = length
            if high is None:
                # 1. Double, until a length does not fit.
                if low == self.limit:
                    return low
                length = min(2 * low, self.limit or 2 * low)
            elif high - low > self.granule:
                # 2. Bisect, at multiples of the granule.
                length = max((low + high) // 2 // self.granule * self.granule, low + self.granule)
            elif low:
                return low
            else:
                raise RuntimeError(f"Not even {length} tokens fit into memory: tile or offload more.")

    def _fits(self, trainer: pl.Trainer, module: LightningModule, batch: Any, tokens: int) -> bool:
        """Return whether a step on sequences of that length fits on every rank."""
        strategy: Any = trainer.strategy
        memory = PeakMemory(strategy.root_device)
        memory.reset()
        # Without a reduction: a rank that runs out of memory before it would leave the others waiting.
        without_reduction = getattr(strategy, "block_backward_sync", nullcontext)
        try:
            with without_reduction():
                run_step(strategy, module, with_length(batch, tokens), trainer.optimizers[0])
            fits = self.memory is None or memory.read() <= self.memory
        except RuntimeError as error:
            if not is_oom_error(error):
                raise
            fits = False
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        gc.collect()
        if provides(strategy.root_device, "empty_cache"):
            torch.get_device_module(strategy.root_device).empty_cache()
        return bool(strategy.reduce_boolean_decision(fits, all=True))


@contextmanager
def _restored(trainer: pl.Trainer, module: LightningModule) -> Iterator[None]:
    """Create the optimizer state and log nothing. Afterwards restore both, buffers and metrics."""
    buffers = [(m, name, b, b.detach().clone()) for m in module.modules() for name, b in m.named_buffers(recurse=False)]
    # The state of an engine's own optimizers exists from the start.
    optimizers = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, torch.optim.Optimizer)]
    silence(module)
    try:
        for optimizer in optimizers:
            create_optimizer_state(optimizer)
        yield
    finally:
        for optimizer in optimizers:
            optimizer.state.clear()
        for owner, name, buffer, before in buffers:
            setattr(owner, name, buffer)
            buffer.copy_(before)
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
        del module.log, module.log_dict  # of the instance
