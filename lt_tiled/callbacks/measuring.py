"""The table at the end of a run, the memory, offload traffic and speed of each step, and a plot of one step."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lt_tiled._log import warn
from lt_tiled.cli.numbers import NonNegativeInt
from lt_tiled.memory import PeakMemory, gib
from lt_tiled.offload.stats import OffloadStats
from lt_tiled.report import Report, show
from lt_tiled.strategies.base import log_step
from lt_tiled.training_step.step import to_meta, tokens_of

if TYPE_CHECKING:
    from lt_tiled.planner.record import Recording
    from lt_tiled.planner.simulate import Simulation


class TilingReport(Callback):
    """Prints what was tiled, into how many tiles, what was offloaded, and the peak memory of a training step."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.peak = 0
        """The highest peak of a step, in bytes."""
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self.peak = self._steps = 0
        self._start = time.monotonic()
        self._memory = PeakMemory(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._memory.reset()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps += 1
        self.peak = max(self.peak, self._memory.read())

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        # The strategy restores the model in its teardown, which comes before `on_fit_end`.
        self.report = Report.of(pl_module)
        self._seconds = time.monotonic() - self._start

    def on_fit_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        if self.report is not None and trainer.is_global_zero:
            show(self.report.table(self._memory.describe(self.peak), self._steps, self._seconds))


class MemoryMonitor(Callback):
    """Logs peak memory, tiles and tokens per second of each step, for Trainer and Fabric.

    The figures go to the loggers of the run as ``lt_tiled/...``. With Fabric, where strategies do not log, the offload
    figures are logged as well; a step ends with ``optimizer.step()``, and the tokens are those passed to the model.

    Args:
        plot: A file for the plot of a step, ``.png``, ``.svg`` or ``.pdf``: measured and predicted memory over time.
            With a Trainer only.
        step: The batch of the run to plot, from 0. If the optimizer does not step on it, the next one on which it does
            is plotted. The optimizer state exists from the second step on.

    Raises:
        ValueError: If ``plot`` has an unknown suffix.
        ModuleNotFoundError: If ``plot`` is given and matplotlib is not installed.
    """

    def __init__(self, plot: str | None = None, step: NonNegativeInt = 2) -> None:
        if plot is not None:
            from lt_tiled.planner.picture import check_format

            check_format(plot)
        self.plot = plot
        self.step = step
        self.peak = 0
        """The highest peak so far, in bytes."""
        self.measured: Simulation | None = None
        """The plotted step as it was measured."""
        self.predicted: Simulation | None = None
        """The plotted step as it was predicted, if the module can be simulated."""
        self._fabric: Fabric
        self._offloaded: dict[str, float]
        self._twin: LightningModule | None = None
        self._recording: Recording | None = None
        self._steps = 0

    # Trainer

    def setup(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep a copy of the module without memory for the prediction, before the engine wraps anything."""
        if stage == "fit" and self.plot is not None and trainer.is_global_zero:
            self._twin = _without_memory(pl_module, trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self.peak = self._steps = 0
        self.measured = self.predicted = None
        self._measure(pl_module, trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin_step(tokens_of(batch))
        if self.plot is not None and self._steps >= self.step and self.measured is None and trainer.is_global_zero:
            from lt_tiled.planner.record import Recording

            self._batch = to_meta(batch)
            self._recording = Recording(trainer)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._recording is not None:
            self._recording.begin("backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._recording is not None:
            self._recording.begin("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recording is not None:
            recorded, self._recording = self._recording.stop(), None
            self.measured = recorded if "optimizer" in recorded.phases else None
        metrics = self._end_step()
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # Lightning's own step has no public name
        log_step(trainer, self._steps, metrics, step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        if self.plot is None or not trainer.is_global_zero:
            return
        if self.measured is None:
            warn(f"MemoryMonitor drew no plot: the run ended after {self._steps} steps. Lower step={self.step}.")
            return
        from lt_tiled.planner.picture import draw_step

        runs, text = {"measured": self.measured}, f"memory of step {self.step}: {gib(self.measured.peak)} at its peak"
        self.predicted = self._predict(trainer)
        if self.predicted is not None:
            runs["predicted"] = self.predicted
            text += f", {gib(self.predicted.peak)} predicted"
        draw_step(runs, self.plot)
        show(f"{text}. Plot written to {self.plot}.")

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _predict(self, trainer: pl.Trainer) -> Simulation | None:
        from lt_tiled.planner.job import job_of_run

        twin, self._twin = self._twin, None
        try:
            return None if twin is None else job_of_run(twin, self._batch, trainer).simulate(whole=True)
        except Exception as error:  # a module may need anything that only a run has
            warn(f"MemoryMonitor has no prediction: {error}")
            return None

    # Fabric

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        self._fabric = fabric
        self._measure(module, fabric.device)
        self._begin_step()

        def count(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._tokens += tokens_of((args, kwargs))

        module.register_forward_pre_hook(count, with_kwargs=True)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Fabric's hook, called by ``optimizer.step()``."""
        step, before = self._steps, self._offloaded
        self._offloaded = (Report.of(self._model).offloaded or OffloadStats()).metrics()
        moved = {name: value - before[name] for name, value in self._offloaded.items()}
        self._fabric.log_dict({**self._end_step(), **moved}, step=step)
        self._begin_step()

    # Both

    def _measure(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._memory = model, PeakMemory(device)
        self._offloaded = OffloadStats().metrics()

    def _begin_step(self, tokens: int = 0) -> None:
        self._memory.reset()
        self._start, self._tokens = time.monotonic(), tokens

    def _end_step(self) -> dict[str, float]:
        """Return the figures of the step by name."""
        peak, seconds = self._memory.read(), max(time.monotonic() - self._start, 1e-9)
        self.peak = max(self.peak, peak)
        self._steps += 1
        report = Report.of(self._model)
        tiles = [row.tiles for row in report.tiled] + [row.tiles for row in report.losses]
        return {
            "lt_tiled/peak_memory": peak / 2**30,
            "lt_tiled/tiles": float(max([1, *tiles])),
            "lt_tiled/tokens_per_second": self._tokens / seconds,
        }


def _without_memory(module: LightningModule, trainer: pl.Trainer) -> LightningModule | None:
    """Return a copy of a module on the meta device."""
    memo: dict[int, Any] = {id(trainer): trainer}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # a module may hold anything
        warn(f"MemoryMonitor has no prediction: {type(module).__name__} cannot be copied ({error}).")
        return None
