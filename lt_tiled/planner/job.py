"""A configuration as something to simulate: a LightningModule, one of its batches, and what its Trainer would do with
them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lt_tiled._log import warn
from lt_tiled.callbacks._preparing import PreparingCallback
from lt_tiled.errors import SimulationError
from lt_tiled.planner.engines import Engine, engine_of
from lt_tiled.planner.simulate import Settings, Simulation, Subject, simulate

_PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32": (torch.float32, None),
    "64": (torch.float64, None),
    "bf16": (torch.float32, torch.bfloat16),
    "16": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
}
"""The dtype of the weights, and that of mixed precision."""


@dataclass(frozen=True)
class Job:
    """What a run trains, and how.

    Attributes:
        module: On the meta device, configured.
        batch: A batch of its training data, on the meta device.
        settings: What the Trainer and its strategy would do.
    """

    module: LightningModule
    batch: Any
    settings: Settings

    @property
    def name(self) -> str:
        """Of the model: of that inside of the module, if there is one."""
        inner = max(self.module.children(), key=lambda m: sum(p.numel() for p in m.parameters()), default=self.module)
        return type(inner).__name__

    @property
    def tokens(self) -> int:
        """The length of the batch's sequences."""
        return length_of(self.batch)

    def simulate(self, tokens: int | None = None, settings: Settings | None = None) -> Simulation:
        """Simulate a step.

        Args:
            tokens: Of each sequence, if not those of the batch.
            settings: If not those of the job.

        Raises:
            SimulationError: With the operation that needs values.
            ValueError: If the batch has no sequences to lengthen.
        """
        length = self.tokens
        if tokens is not None and length == 0:
            raise ValueError(
                "The batch has no tensor with two or three dimensions, whose second could be made longer: leave --seq and --find out."
            )

        def step() -> Tensor:
            batch = apply_to_collection(self.batch, Tensor, _fake_like, length, tokens or length)
            return loss_of(self.module.training_step(*step_arguments(self.module, batch)), self.module)

        return simulate(Subject(self.module, step, self._optimizer), settings or self.settings)

    def _optimizer(self) -> torch.optim.Optimizer:
        found, _ = _init_optimizers_and_lr_schedulers(self.module)
        if len(found) != 1:
            raise SimulationError(
                f"{type(self.module).__name__} has {len(found)} optimizers: a plan is of a module with one."
            )
        return found[0]


def make_job(
    module: LightningModule,
    datamodule: LightningDataModule | None,
    trainer: Mapping[str, Any],
    devices: int | None = None,
) -> Job:
    """Configure a module as its Trainer would, without weights.

    Args:
        module: Made under ``torch.device("meta")``.
        datamodule: Its data; ``None`` for the module's own.
        trainer: The arguments of the Trainer.
        devices: How many, if not those of the Trainer.

    Raises:
        ValueError: If an argument is not understood.
    """
    strategy = trainer.get("strategy", "auto")
    if isinstance(strategy, str) and strategy != "auto":
        if strategy not in StrategyRegistry.available_strategies():
            raise ValueError(
                f"strategy={strategy!r} is not known: give one of {', '.join(StrategyRegistry.available_strategies())}."
            )
        strategy = StrategyRegistry.get(strategy)
    callbacks = trainer.get("callbacks") or []
    precision = str(trainer.get("precision") or "32")
    settings = settings_of(
        strategy,
        callbacks if isinstance(callbacks, Sequence) else [callbacks],
        ranks=_ranks(trainer) if devices is None else devices,
        precision=precision,
        accumulate=int(trainer.get("accumulate_grad_batches") or 1),
        clip=bool(trainer.get("gradient_clip_val")),
        foreach=trainer.get("accelerator", "auto") != "cpu",
    )
    if (
        devices is None
        and str(trainer.get("devices", "auto")) in ("auto", "-1")
        and settings.engine.name not in ("single", "ddp")
    ):
        warn("devices='auto' is planned as one, which shards nothing: say how many with --devices.")
    stub = stub_trainer(module)
    if datamodule is not None:
        stub.datamodule = datamodule  # type: ignore[attr-defined]
        datamodule.prepare_data()
        datamodule.setup("fit")
    else:
        module.prepare_data()
    with torch.device("meta"):
        module.setup("fit")
    batch = first_batch(module, datamodule)
    configure(module, precision, settings.engine)
    return Job(module, meta(batch), settings)


def settings_of(strategy: Any, callbacks: Sequence[Any], ranks: int, precision: Any, **others: Any) -> Settings:
    """What a strategy, and callbacks beside it, do.

    Args:
        strategy: An object, or ``"auto"``.
        callbacks: All of the Trainer's.
        ranks: Of all nodes.
        precision: As of the Trainer.
        others: Further fields of the settings.

    Raises:
        ValueError: If the precision is not understood.
    """
    policies = [strategy, *(c for c in callbacks if isinstance(c, PreparingCallback))]
    engine = engine_of(strategy, ranks)
    engine = replace(engine, mixed=engine.name == "fsdp" and str(precision).endswith("mixed"))
    return Settings(
        tiling=next((t for p in policies if (t := getattr(p, "tiling", None)) is not None), None),
        checkpointing=next((c for p in policies if (c := getattr(p, "checkpointing", None)) is not None), None),
        engine=engine,
        autocast=_dtypes(str(precision), engine)[1],
        **others,
    )


def configure(module: LightningModule, precision: str, engine: Engine) -> None:
    """Let a module make its model without memory, and log nothing."""
    weights = _dtypes(precision, engine)[0]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(weights)
        with torch.device("meta"):
            module.configure_model()
    finally:
        torch.set_default_dtype(default)
    module.to(weights)
    module.__dict__.update(log=nothing, log_dict=nothing)  # which need a loop, and there is none


def meta(batch: Any) -> Any:
    """A batch without its values."""
    return apply_to_collection(batch, Tensor, lambda t: torch.empty_like(t, device="meta"))


def step_arguments(module: LightningModule, batch: Any) -> tuple[Any, ...]:
    """What a module's ``training_step`` takes."""
    return (batch, 0) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else (batch,)


def loss_of(found: Any, module: LightningModule) -> Tensor:
    """The loss in what a ``training_step`` returned.

    Raises:
        SimulationError: If there is none.
    """
    loss = found["loss"] if isinstance(found, Mapping) else found
    if not isinstance(loss, Tensor):
        raise SimulationError(
            f"{type(module).__name__}.training_step returned {type(loss).__name__} and no loss: what optimizes by hand cannot be"
            " simulated or tried."
        )
    return loss


def stub_trainer(module: LightningModule) -> Trainer:
    """A Trainer that a module can ask what modules ask, and that runs nothing."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        stub = Trainer(accelerator="cpu", devices=1, max_epochs=-1, max_steps=1000, **quiet)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    module.trainer = stub
    stub.strategy.connect(module)
    return stub


def first_batch(module: LightningModule, datamodule: LightningDataModule | None) -> Any:
    """A batch of the training data, as ``training_step`` gets it, on the CPU."""
    loader = (module if datamodule is None else datamodule).train_dataloader()
    several = isinstance(loader, Mapping | Sequence)
    batch = next(iter(CombinedLoader(loader, "max_size_cycle")))[0] if several else next(iter(loader))
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        own = datamodule is not None and getattr(type(datamodule), hook) is not getattr(LightningDataModule, hook)
        batch = getattr(datamodule if own else module, hook)(batch, 0)
    return batch


def nothing(*_: Any, **__: Any) -> None:
    """In the place of ``self.log``."""


def _ranks(trainer: Mapping[str, Any]) -> int:
    devices = trainer.get("devices", 1)
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    per_node = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 1
    return max(per_node, 1) * int(trainer.get("num_nodes", 1))


def _dtypes(precision: str, engine: Engine) -> tuple[torch.dtype, torch.dtype | None]:
    name = precision.removesuffix("-mixed")
    known = _PRECISIONS.get(name, _PRECISIONS.get(name.removesuffix("-true")))
    if known is None:
        raise ValueError(f"precision={precision!r} cannot be planned: set it to one of {', '.join(_PRECISIONS)}.")
    weights, autocast = known
    # Their own mixed precision: weights are 16 bits wide where they are gathered, and float32 where they are stepped
    # on.
    return (autocast, None) if autocast is not None and engine.casts_weights else (weights, autocast)


def length_of(batch: Any) -> int:
    """The length of a batch's sequences: the second dimension of its first tensor with two or three; 0 if there is none
    (images).
    """
    lengths: list[int] = []
    apply_to_collection(batch, Tensor, lambda t: lengths.extend(t.shape[1:2] if t.dim() in (2, 3) else ()))
    return lengths[0] if lengths else 0


def lengthened(tensor: Tensor, length: int, tokens: int) -> Tensor:
    """A tensor with as many tokens in the dimensions, but for the first, that have its sequence's length: its own, over
    and over.
    """
    for dim, size in enumerate(_shape(tensor, length, tokens)):
        if size != tensor.shape[dim]:
            tensor = torch.cat([tensor] * -(-size // tensor.shape[dim]), dim).narrow(dim, 0, size)
    return tensor


def _shape(tensor: Tensor, length: int, tokens: int) -> list[int]:
    return [tokens if dim and size == length else size for dim, size in enumerate(tensor.shape)]


def _fake_like(tensor: Tensor, length: int, tokens: int) -> Tensor:
    return torch.zeros(_shape(tensor, length, tokens), dtype=tensor.dtype, device="cpu")
