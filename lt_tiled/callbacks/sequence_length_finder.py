"""The longest sequence that trains, by trying."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lt_tiled._log import inform
from lt_tiled._types import PositiveInt
from lt_tiled.callbacks._preparing import PreparingCallback
from lt_tiled.memory import PeakMemory
from lt_tiled.planner.job import first_batch, length_of, lengthened, loss_of, nothing, step_arguments
from lt_tiled.planner.plan import gib
from lt_tiled.planner.shards import stepped_on
from lt_tiled.policies import parse_bytes


class SequenceLengthFinder(Callback):
    """Finds the longest sequence whose training step fits, before the run: the counterpart of Lightning's
    ``BatchSizeFinder``.

    A batch of the run's data is made longer and shorter, and each length tried by a forward and a backward, with the
    optimizer's state in place. Weights, buffers, metrics, random numbers and the optimizer are as before when the run
    begins. Lengths double until one does not fit, and the rest is bisection. The result is set as ``attribute`` of the
    data, which is then set up anew. A schedule that counts the steps of the run was made before that: give
    ``max_steps``.

    Ranks of DDP try each by itself and agree on what fits on all. Those of sharding engines wait for each other within
    a step: there memory must end on all of them at the same length, as it does for batches of one shape.

    Args:
        start: The first length.
        limit: No length is longer; ``None`` for as long as memory lasts.
        granule: How exactly the longest length is found.
        memory: What must not be exceeded, in bytes or as ``"80GiB"``; ``None`` for what the device has.
        attribute: The name of the length in the datamodule, or else in the module.

    Raises:
        ValueError: If a value is out of bounds, or neither has that attribute.
        RuntimeError: If not even the first length fits.
    """

    def __init__(
        self,
        start: PositiveInt = 1024,
        limit: PositiveInt | None = None,
        granule: PositiveInt = 256,
        memory: int | str | None = None,
        attribute: str = "seq_len",
    ) -> None:
        for name, value in (("start", start), ("granule", granule), ("limit", limit)):
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
        if limit is not None and limit < start:
            raise ValueError(f"limit={limit} is shorter than start={start}: raise it, or begin with less.")
        self.start, self.limit, self.granule, self.attribute = (
            int(start),
            None if limit is None else int(limit),
            int(granule),
            attribute,
        )
        self.memory = None if memory is None else parse_bytes(memory, "memory")
        self.found: int | None = None
        """The longest length that fits."""
        self.peaks: dict[int, int] = {}
        """By length, the peak of its step in bytes; of those that fit."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        holder = self._holder(trainer, pl_module)
        self._refuse_later_callbacks(trainer)
        with isolate_rng():
            batch = first_batch(pl_module, trainer.datamodule)  # type: ignore[attr-defined]
            trial = _Trial(trainer, pl_module, trainer.strategy.batch_to_device(batch), self.memory)
            self.peaks = {}
            try:
                self.found = self._search(trial)
            finally:
                trial.restore()
        inform(
            f"SequenceLengthFinder: {self.found} tokens fit ({gib(self.peaks[self.found])}); {self.attribute} is set to it"
        )
        setattr(holder, self.attribute, self.found)
        if trainer.datamodule is not None:  # type: ignore[attr-defined]
            trainer.datamodule.setup("fit")  # type: ignore[attr-defined]
        # A schedule that counts the run's steps has loaded the data already; as Lightning's BatchSizeFinder, let it be
        # loaded anew.
        trainer.fit_loop._combined_loader = None

    def _refuse_later_callbacks(self, trainer: pl.Trainer) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks[callbacks.index(self) :]:
            if isinstance(callback, PreparingCallback):
                raise ValueError(
                    f"{type(callback).__name__} stands behind SequenceLengthFinder, which would try the model without it: put it before, or"
                    " let the strategy do it."
                )

    def _holder(self, trainer: pl.Trainer, module: LightningModule) -> Any:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not trainer.fit_loop._data_source.is_module():
            raise ValueError(
                "The data loaders were given to fit, and their length cannot be set: give a datamodule, or a module, that makes them, with"
                f" an attribute {self.attribute!r} for the length of its sequences."
            )
        for holder in (data, module):
            if holder is not None and hasattr(holder, self.attribute):
                return holder
        raise ValueError(
            f"Neither the datamodule ({type(data).__name__}) nor {type(module).__name__} has an attribute {self.attribute!r}, the length of"
            " its sequences: name yours with SequenceLengthFinder(attribute=...), and let train_dataloader use it."
        )

    def _search(self, trial: _Trial) -> int:
        low, high = 0, None
        length = self.start
        while high is None or high - low > self.granule:
            fits = trial.run(length, self.peaks)
            inform(f"SequenceLengthFinder: {length} tokens {'fit' if fits else 'do not fit'}")
            low, high = (length, high) if fits else (low, length)
            if not low:
                if length <= self.granule:
                    raise RuntimeError(
                        f"Not even {length} tokens fit: a step takes more memory than there is. Tile or offload more."
                    )
                length = max(length // 2 // self.granule * self.granule, self.granule)
            elif high is None:
                if self.limit is not None and low >= self.limit:
                    return low
                length = min(2 * low, self.limit or 2 * low)
            else:
                length = max((low + high) // 2 // self.granule * self.granule, low + self.granule)
                if length >= high:
                    return low
        return low


class _Trial:
    """Steps on longer batches that leave nothing behind."""

    def __init__(self, trainer: pl.Trainer, module: LightningModule, batch: Any, memory: int | None) -> None:
        self.trainer, self.module, self.batch, self.limit = trainer, module, batch, memory
        self.length = length_of(batch)
        if not self.length:
            raise ValueError("The batch has no tensor with two or three dimensions, whose second could be made longer.")
        self.device = trainer.strategy.root_device
        self.memory = PeakMemory(self.device)
        self._buffers = [
            (m, name, b, b.detach().clone())
            for m in module.modules()
            for name, b in m._buffers.items()
            if b is not None
        ]
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._metrics = [(m, copy.deepcopy(m.metric_state), m._update_count) for m in metrics]
        self._log = {name: module.__dict__.get(name) for name in ("log", "log_dict")}
        module.__dict__.update(log=nothing, log_dict=nothing)  # there is no loop yet
        self._make_state()

    def _make_state(self) -> None:
        """Let the optimizer have its state, by a step of no size with gradients of zero. DeepSpeed's has it from the
        start.
        """
        if isinstance(self.trainer.strategy, DeepSpeedStrategy):
            return
        for optimizer in self.trainer.optimizers:
            rates = [(group, group["lr"]) for group in optimizer.param_groups]
            weights = [p for p in stepped_on(optimizer) if p.requires_grad]
            try:
                for group, rate in rates:
                    group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
                for weight in weights:
                    weight.backward(torch.zeros_like(weight))
                optimizer.step()
            except TypeError:  # LBFGS wants a closure, and has little state
                pass
            finally:
                for group, rate in rates:
                    group["lr"] = rate
                optimizer.zero_grad()

    def run(self, tokens: int, peaks: dict[int, int]) -> bool:
        """Whether a step on sequences of that length fits on every rank."""
        batch = apply_to_collection(self.batch, Tensor, lengthened, self.length, tokens)
        fits = True
        self.memory.reset()
        try:
            self._step(batch)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            fits = False
        peak = self.memory.read()
        fits = fits and (self.limit is None or peak <= self.limit)
        del batch
        self._free()
        if _distributed_is_initialized():
            fits = self.trainer.strategy.reduce_boolean_decision(fits, all=True)
        if fits:
            peaks[tokens] = peak
        return fits

    def _step(self, batch: Any) -> None:
        strategy, optimizer = self.trainer.strategy, self.trainer.optimizers[0]
        # Without the ranks' reduction: one whose memory ended before it would leave the others waiting.
        with strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) else nullcontext():
            loss = loss_of(strategy.training_step(*step_arguments(self.module, batch)), self.module)
            optimizer.zero_grad()
            strategy.backward(loss, optimizer)

    def _free(self) -> None:
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Leave everything as it was found."""
        if not isinstance(self.trainer.strategy, DeepSpeedStrategy):
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()
        for module, name, buffer, before in self._buffers:
            module._buffers[name] = buffer
            buffer.copy_(before)
        for metric, state, count in self._metrics:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None
        for name, before_log in self._log.items():
            if before_log is None:
                self.module.__dict__.pop(name, None)
            else:
                self.module.__dict__[name] = before_log
        self._free()


def _out_of_memory(error: RuntimeError) -> bool:
    return is_oom_error(error) or "can't allocate memory" in str(error)
