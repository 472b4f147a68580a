"""When a Trainer strategy prepares its model."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lt_tiled._log_offload import OffloadLog
from lt_tiled.strategies._options import TiledOptions
from lt_tiled.strategies._units import refuse_units_in_tiled_modules


class TiledStrategy(TiledOptions):
    """Stands left of any strategy: marks the modules after ``configure_model`` and before the engine wraps the model.

    ``teardown`` undoes it: the one hook that Lightning calls after success, after an exception and after Ctrl-C.
    """

    lightning_module: pl.LightningModule | None

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        self._log = OffloadLog()
        self.prepare_once(self.lightning_module)
        super().setup(trainer)  # type: ignore[misc]
        refuse_units_in_tiled_modules(self.lightning_module)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        self._end_step()

    def on_train_end(self) -> None:
        self._end_step()
        super().on_train_end()  # type: ignore[misc]

    def _end_step(self) -> None:
        assert self.lightning_module is not None
        for prepared in self.prepared:
            if prepared.offloader is not None and prepared.offloader.step:
                self._log.step(self.lightning_module.trainer, prepared.offloader)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.prepared.free_buffers()  # a whole state dict may need the RAM
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self.release()
