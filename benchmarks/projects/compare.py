"""Train a model untiled, with activation checkpointing alone and with lt_tiled's strategies, and compare the runs."""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import lightning.pytorch
import pytorch_lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lt_tiled
import lt_tiled.pytorch_lightning
from benchmarks.sheet import Cell, Sheet, reason
from lt_tiled.namespaces import is_a
from lt_tiled.report import Report
from tests.meters import LiveBytes

CLOSE = 1e-6
SMALL = (
    0.1  # differences are relative to at least this: a bias that began at zero has the rounding of its gradient alone
)
LEARNING_RATE = 0.01
STEPS = 3
MIB = 2**20


@dataclass(frozen=True)
class Project:
    """A model of a released project, and tiny data for it."""

    package: str
    name: str
    build: Callable[[], tuple[Any, list[Any]]]
    """Returns a LightningModule with random weights, and the batch of each step."""


@dataclass
class Trained:
    """What a run of three steps computed and used."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    flops: int = 0
    peak: int = 0
    report: Report | None = None
    said: list[str] = field(default_factory=list)
    """lt_tiled's warnings, and what it leaves to the model's own activation checkpointing."""


class Meter(lightning.pytorch.Callback, pytorch_lightning.Callback):
    """Record the losses, the peak of live bytes of the second step, and the FLOPs of the third.

    Not of one step: the hooks of torch's counter keep what checkpointing frees.
    """

    def __init__(self) -> None:
        self.trained = Trained()
        self.live, self.flops = LiveBytes(), FlopCounterMode(display=False)
        self.running = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)  # not before the run: DDP draws random numbers in its setup, also without lt_tiled
        if batch_idx > 0:
            self.running.enter_context(self.live if batch_idx == 1 else self.flops)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.running.close()
        self.trained.losses.append(float(outputs["loss"]))
        self.trained.report = Report.of(pl_module)


@contextmanager
def _messages(said: list[str]) -> Iterator[None]:
    """Collect what lt_tiled warns of."""
    handler, logger = logging.Handler(), logging.getLogger("lt_tiled")

    def emit(record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or "applies itself" in record.getMessage():
            said.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def train(module: Any, batches: list[Any], strategy: Any = "auto", **policies: Any) -> Trained:
    """Train a copy of a module with its own Trainer for three steps, by SGD.

    Args:
        module: A LightningModule of either package.
        batches: One batch for each step.
        strategy: ``"auto"``, or the name of a strategy class of lt_tiled.
        policies: The arguments of that class.
    """
    module, meter = copy.deepcopy(module), Meter()
    namespaces: tuple[Any, Any] = (lt_tiled, lightning.pytorch)
    if not isinstance(module, lightning.pytorch.LightningModule):
        assert is_a(module, "LightningModule"), type(module)
        namespaces = (lt_tiled.pytorch_lightning, pytorch_lightning)
    ours, theirs = namespaces
    # Not the module's own optimizer: Adam makes whole steps of rounding where a gradient is zero.
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    with _messages(meter.trained.said):
        trainer = theirs.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy if strategy == "auto" else getattr(ours, strategy)(**policies),
            max_steps=STEPS,
            use_distributed_sampler=False,  # which would change the order of the batches
            callbacks=[meter],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(cast(Any, batches), batch_size=None))
    meter.trained.flops, meter.trained.peak = meter.flops.get_total_flops(), meter.live.peak
    meter.trained.weights = [weight.detach() for weight in module.parameters()]
    return meter.trained


def off(run: Trained, stock: Trained) -> tuple[float, float]:
    """Return the largest relative differences of losses, and of weights relative to the largest one of each tensor."""
    losses = [abs(a - b) / abs(b) for a, b in zip(run.losses, stock.losses, strict=True)]
    pairs = zip(run.weights, stock.weights, strict=True)
    weights = [float((a - b).abs().max() / b.abs().max().clamp(min=SMALL)) for a, b in pairs]
    return max(losses), max(weights)


def row(project: Project, train: Callable[..., Trained] = train) -> list[Cell | str]:
    """Return a row of the table: train one model in all ways, and compare."""
    cells: list[Cell | str] = [project.package, project.name]
    try:
        module, batches = project.build()
        stock = train(module, batches)
        checkpointed = train(module, batches, "TiledSingleDeviceStrategy", tiling=False)
        runs = [train(module, batches, strategy) for strategy in ("TiledSingleDeviceStrategy", "TiledDDPStrategy")]
        own = train(own_checkpointing(module), batches) if own_checkpointing(module) else None
    except Exception as error:  # a project that does not train is a row, too
        return [*cells, Cell(f"{type(error).__name__}: {reason(error)}"[:300], False), *[""] * 7]
    tiled = runs[0]
    assert tiled.report is not None
    losses, weights = (max(pair) for pair in zip(*(off(run, stock) for run in runs), strict=True))
    parts = [part for part in (*tiled.report.tiled, *tiled.report.norms) if part.tokens]
    return [
        *cells,
        Cell(f"{losses:.0e}", losses < CLOSE),
        Cell(f"{weights:.0e}", weights < CLOSE),
        _counted([part.kind for part in parts if part.tiles > 1]),
        _counted([part.kind for part in tiled.report.blocks]),
        ", ".join(f"{tiled.flops / run.flops:.3f}" if run else "-" for run in (checkpointed, own, stock)),
        ", ".join(f"{run.peak / MIB:.1f}" if run else "-" for run in (stock, own, checkpointed, tiled)),
        "<br>".join((*_in_one_tile(tiled.report), *dict.fromkeys(_without_remedy(text) for text in tiled.said))) or "-",
    ]


def own_checkpointing(module: Any) -> Any:
    """Return a copy of a model with its own activation checkpointing, or ``None`` if it has none that is off."""
    module, switched = copy.deepcopy(module), False
    for part in module.modules():
        for name in ("grad_checkpointing", "activation_checkpointing"):
            if getattr(part, name, None) is False:
                setattr(part, name, True)
                switched = True
    return module if switched else None


def _in_one_tile(report: Report) -> list[str]:
    calls = Counter((part.kind, part.tokens) for part in report.tiled if part.tiles < 2)
    return [
        f"{count} x {kind} {f'({tokens} tokens)' if tokens else '(few tokens)'}."
        for (kind, tokens), count in calls.items()
    ]


def _counted(kinds: list[str]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).items()) or "-"


def _without_remedy(text: str) -> str:
    """Leave out of a message what to do about it, and the path of the module."""
    text = re.sub(r"^(model|\w+)(\.\w+)+ \((\w+)\)", r"\3", text)
    text = re.sub(r" \([^)]*\): name (it|them),.*?(=False)\.", ".", text)
    return re.sub(r" (Arguments that broadcast|Remove it from targets|Turn the model's).*?\.(?= |$)", "", text)


def sheet(projects: list[Project]) -> Sheet:
    """Return the table of these projects."""
    table = Sheet(
        "projects",
        "models of released projects, three steps",
        [
            "package",
            "model",
            "losses",
            "weights",
            "tiled",
            "blocks checkpointed",
            "FLOPs, relative to checkpointing alone, the model's own, and untiled",
            "peak in MiB: untiled, the model's own checkpointing, checkpointing alone, tiled",
            "not tiled, and why",
        ],
    )
    for project in projects:
        table.add(*row(project))
    return table
