"""Memory, traffic and speed of each step, and at the end the picture of one, beside what was predicted."""

from __future__ import annotations

import copy
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from rich.console import Console
from torch import Tensor, nn

from lt_tiled._log import warn
from lt_tiled._types import NonNegativeInt
from lt_tiled.memory import PeakMemory
from lt_tiled.offload.stats import OffloadStats
from lt_tiled.planner.job import Job, configure, meta, settings_of, stub_trainer
from lt_tiled.planner.picture import check_format, draw_step
from lt_tiled.planner.plan import gib
from lt_tiled.planner.record import Recording
from lt_tiled.planner.simulate import Simulation
from lt_tiled.report import Report


class MemoryMonitor(Callback):
    """Logs the peak memory, tiles, offloaded bytes, stalls and tokens per second of each step, for Trainer and for
    Fabric.

    The figures go to the run's loggers as ``memory/...``. With Fabric a step ends with ``optimizer.step()``, and tokens
    are those that go into the model.

    Args:
        plot: Where the picture of a step goes, ``.png``, ``.svg`` or ``.pdf``: memory over time as it was, and as it
            was predicted. With a Trainer only.
        step: Which batch of the run is in the picture, from 0, or the first after it on which the optimizer steps; its
            state is there from the second step.

    Raises:
        ValueError: If ``plot`` ends in no format that can be drawn.
        ModuleNotFoundError: If ``plot`` is given and matplotlib is not installed.
    """

    def __init__(self, plot: str | None = None, step: NonNegativeInt = 2) -> None:
        if plot is not None:
            check_format(plot)
        self.plot = plot
        self.step = step
        self.peak = 0
        """The highest peak so far, in bytes."""
        self.measured: Simulation | None = None
        """The step of the picture, as it was."""
        self.predicted: Simulation | None = None
        """The same as it was predicted, if the module can be simulated."""
        self._meter: _Meter | None = None
        self._twin: LightningModule | None = None
        self._batch: Any = None
        self._recording: Recording | None = None
        self._fabric: Fabric | None = None
        self._steps = 0

    # Trainer

    def setup(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep a copy of the module without memory, before anything is wrapped, for the prediction."""
        if stage == "fit" and self.plot is not None and trainer.is_global_zero:
            self._twin = _without_memory(pl_module, trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        self.peak = self._steps = 0
        self.measured = self.predicted = None
        self._meter = _Meter(pl_module, trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._meter is not None
        self._meter.start(_tokens(batch))
        if self.plot is not None and self._steps >= self.step and self.measured is None and trainer.is_global_zero:
            self._batch = meta(batch)
            self._recording = Recording(pl_module, trainer.model, trainer.optimizers, trainer.strategy.root_device)
            self._recording.start()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._recording is not None:
            self._recording.begin("backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._recording is not None:
            self._recording.begin("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._meter is not None
        if self._recording is not None:
            recorded, self._recording = self._recording.stop(), None
            self.measured = recorded if "optimizer" in recorded.phases else None  # else the next one that steps
        metrics = self._meter.stop()
        self.peak = max(self.peak, self._meter.peak)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._steps += 1
        if every and self._steps % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(
                    metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped
                )  # as Lightning counts them

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        if self.plot is None or not trainer.is_global_zero:
            return
        if self.measured is None:
            warn(
                f"MemoryMonitor drew nothing: the run ended after {self._steps} steps; choose a step before that, not step={self.step}."
            )
            return
        self.predicted = self._predict(trainer)
        runs = {"measured": self.measured} | ({} if self.predicted is None else {"predicted": self.predicted})
        draw_step(runs, self.plot)
        beside = "" if self.predicted is None else f", {gib(self.predicted.peak)} predicted"
        Console().print(
            f"memory of step {self.step}: {gib(self.measured.peak)} at its peak{beside}. Drawn: {self.plot}"
        )

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _predict(self, trainer: pl.Trainer) -> Simulation | None:
        twin, self._twin = self._twin, None
        if twin is None:
            return None
        try:
            precision = trainer.precision
            settings = settings_of(
                trainer.strategy,
                trainer.callbacks,  # type: ignore[attr-defined]
                ranks=trainer.world_size,
                precision=precision,
                accumulate=trainer.accumulate_grad_batches,
                clip=bool(trainer.gradient_clip_val),
                foreach=trainer.strategy.root_device.type == "cuda",
            )
            stub_trainer(twin).datamodule = trainer.datamodule  # type: ignore[attr-defined]
            with torch.device("meta"):
                twin.setup("fit")
            configure(twin, str(precision), settings.engine)
            return Job(twin, self._batch, settings).simulate()
        except Exception as error:  # a module may need anything of a run; the run itself is through
            warn(f"MemoryMonitor has no prediction: {error}")
            return None

    # Fabric

    def on_after_setup(self, fabric: Fabric, module: nn.Module) -> None:
        """Fabric's hook, called by ``fabric.setup``."""
        self._fabric = fabric
        self._meter = meter = _Meter(module, fabric.device)
        meter.start(0)
        module.register_forward_pre_hook(lambda _, args, kwargs: meter.add(_tokens((args, kwargs))), with_kwargs=True)

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Fabric's hook, called by ``optimizer.step()``."""
        assert self._meter is not None
        assert self._fabric is not None
        metrics = self._meter.stop()
        self.peak = max(self.peak, self._meter.peak)
        if self._fabric._loggers:
            self._fabric.log_dict(metrics, step=self._steps)
        self._steps += 1
        self._meter.start(0)


class _Meter:
    """The figures of one step after the other."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.memory = PeakMemory(device)
        self.peak = 0
        self._before = OffloadStats()
        self._begun = 0.0
        self._count = 0

    def start(self, tokens: int) -> None:
        self.memory.reset()
        self._begun, self._count = time.monotonic(), tokens

    def add(self, tokens: int) -> None:
        self._count += tokens

    def stop(self) -> dict[str, float]:
        """The step's figures, by name."""
        self.peak = self.memory.read()
        seconds = max(time.monotonic() - self._begun, 1e-9)
        report = Report.of(self.model)
        offloaded, before = report.offloaded or OffloadStats(), self._before
        self._before = offloaded
        return {
            "memory/peak_gib": self.peak / 2**30,
            "memory/tiles": float(
                max([1, *(row.tiles for row in report.tiled), *(row.tiles for row in report.losses)])
            ),
            "memory/cpu_bytes": float(offloaded.cpu_bytes - before.cpu_bytes),
            "memory/disk_bytes": float(offloaded.disk_bytes - before.disk_bytes),
            "memory/stalled_ms": offloaded.stalled_ms - before.stalled_ms,
            "memory/tokens_per_second": self._count / seconds,
        }


def _tokens(batch: Any) -> int:
    """Those of the first tensor with two dimensions."""
    found: list[int] = []
    apply_to_collection(batch, Tensor, lambda t: found.append(t.shape[0] * t.shape[1]) if t.dim() > 1 else None)
    return found[0] if found else 0


def _without_memory(module: LightningModule, trainer: pl.Trainer) -> LightningModule | None:
    """A copy whose weights are on the meta device."""
    memo: dict[int, Any] = {id(trainer): trainer}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # a module may hold anything
        warn(f"MemoryMonitor has no prediction: {type(module).__name__} cannot be copied ({error}).")
        return None
