"""When a Fabric strategy prepares its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lt_tiled.strategies._options import TiledOptions
from lt_tiled.strategies._units import refuse_units_in_tiled_modules


class TiledStrategy(TiledOptions):
    """Stands left of any strategy: marks the modules before the engine wraps the model.

    Fabric never calls ``teardown``: call :meth:`release` to have the model as it was. A model that could not be set up
    is as it was.
    """

    def setup_module(self, module: nn.Module) -> Any:
        with self._prepared_unless_refused(module):
            wrapped = super().setup_module(self.wrap(module))  # type: ignore[misc]
            refuse_units_in_tiled_modules(wrapped)
            return wrapped

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, *args: Any) -> Any:
        with self._prepared_unless_refused(module):  # here too: DeepSpeed sets up both at once, without setup_module
            return super().setup_module_and_optimizers(module, optimizers, *args)  # type: ignore[misc]

    @contextmanager
    def _prepared_unless_refused(self, module: nn.Module) -> Iterator[None]:
        before = len(self.prepared)
        try:
            self.prepare_once(module)
            yield
        except BaseException:
            self.prepared.release(keep=before)
            raise

    def wrap(self, module: nn.Module) -> nn.Module:
        """Hook for engines that Lightning does not let wrap a model in the way that it has to be."""
        return module

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.prepared.free_buffers()  # a whole state dict may need the RAM
        super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self.release()
