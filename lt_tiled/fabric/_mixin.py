"""When a Fabric strategy prepares its model."""

from __future__ import annotations

from typing import Any

from torch import nn

from lt_tiled.strategies._options import TiledOptions


class TiledStrategy(TiledOptions):
    """Stands left of any strategy: marks the modules before the engine wraps the model.

    Fabric never calls ``teardown``: call :meth:`release` to have the model as it was.
    """

    def setup_module(self, module: nn.Module) -> Any:
        self.prepare_once(module)
        return super().setup_module(module)  # type: ignore[misc]

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self.release()
