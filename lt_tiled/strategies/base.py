"""What all tiled strategies have in common, for Trainer and for Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lt_tiled._prepare import AppliesPolicies
from lt_tiled.policies import ActivationCheckpointingLike, SequenceParallel, Tiling
from lt_tiled.sequence_parallel.groups import Groups

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.strategies.strategy import Strategy as FabricBase
    from lightning.pytorch.strategies import Strategy as TrainerBase
else:  # see NOTE [Namespaces]
    FabricBase = TrainerBase = object


class TiledStrategy(AppliesPolicies):
    """Base class of all tiled strategies. Adds four arguments to those of the engine.

    It must precede Lightning's class in the bases.

    Args:
        tiling: ``True``, a number of tiles, or a ``Tiling``. ``None`` and ``False`` turn tiling off.
        activation_checkpointing: ``True``, or an ``ActivationCheckpointing``. ``"cpu"``, ``"disk"`` and ``"cpu+disk"``
            also offload block inputs. ``None`` and ``False`` turn activation checkpointing off.
        loss: ``True`` or a number of tiles to compute the loss of transformers models in tiles in training, where
            ``output.logits`` is then ``None``. ``"always"`` does so in evaluation as well.
        sequence_parallel: The number of ranks that share each sequence, or a ``SequenceParallel``.
    """

    def __init__(
        self,
        *args: Any,
        tiling: bool | int | Tiling | None = True,
        activation_checkpointing: ActivationCheckpointingLike | None = True,
        loss: bool | int | Literal["always"] | None = None,
        sequence_parallel: int | SequenceParallel | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.set_policies(tiling, activation_checkpointing, loss, sequence_parallel)

    @property
    def on_cpu(self) -> bool:
        return bool(self.root_device.type == "cpu")  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of ``DistributedSampler``: ranks that share sequences, or a model, read the same data."""
        if self.sequence_parallel is None:
            return super().distributed_sampler_kwargs  # type: ignore[misc,no-any-return]
        groups = Groups.of_size(self.sequence_parallel.size)
        return {"num_replicas": groups.count, "rank": groups.index}

    def prepare_once(self, model: nn.Module) -> None:
        """Apply the policies before the engine wraps the model. A model that is prepared already keeps its policies."""
        self.ranks_per_node = len(getattr(self, "parallel_devices", None) or [None])
        super().prepare_once(model)

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self.release()


class TiledTrainerStrategy(TiledStrategy, TrainerBase):
    """Base class for Trainer: patches the model after ``configure_model`` and before the engine wraps it."""

    lightning_module: pl.LightningModule  # connected before any hook runs

    def setup(self, trainer: pl.Trainer) -> None:
        self.prepare_once(self.lightning_module)
        super().setup(trainer)


class TiledFabricStrategy(TiledStrategy, FabricBase):
    """Base class for Fabric: patches the model before the engine wraps it.

    Fabric has no teardown hook; call :meth:`release` to restore the model.
    """

    def setup_module(self, module: nn.Module) -> Any:
        self.prepare_once(module)
        return super().setup_module(self.wrap(module))

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, *args: Any) -> Any:
        self.prepare_once(module)  # DeepSpeed sets up both at once and does not call setup_module
        return super().setup_module_and_optimizers(module, optimizers, *args)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap the model where Lightning's own wrapping does not fit the engine."""
        return module


class SingleDevice(TiledStrategy):
    """Takes the device from ``accelerator`` and ``devices``; Lightning's own class ignores them in favor of ``device``.

    Lightning's connectors set ``parallel_devices`` on a strategy that is passed as an object. Without them, ``device``
    counts.
    """

    _root_device: torch.device
    parallel_devices: list[torch.device] | None = None

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [self._root_device]
        if len(devices) > 1:
            raise ValueError(
                f"{type(self).__name__} runs on one device and was given {len(devices)}: pass devices=1, or a strategy"
                ' for several devices such as "tiled_ddp".'
            )
        return devices[0]
