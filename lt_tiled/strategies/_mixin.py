"""When a Trainer strategy prepares its model."""

from __future__ import annotations

import lightning.pytorch as pl

from lt_tiled.strategies._options import TiledOptions


class TiledStrategy(TiledOptions):
    """Stands left of any strategy: marks the modules after ``configure_model`` and before the engine wraps the model.

    ``teardown`` undoes it: the one hook that Lightning calls after success, after an exception and after Ctrl-C.
    """

    lightning_module: pl.LightningModule | None

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        self.prepare_once(self.lightning_module)
        super().setup(trainer)  # type: ignore[misc]

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self.release()
