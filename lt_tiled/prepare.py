"""A whole model: mark what the policies name, report it, undo it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from torch import nn

from lt_tiled._find import has_class, walk
from lt_tiled._log import inform, warn
from lt_tiled._marks import get_mark
from lt_tiled.checkpointing.blocks import BlockMark, OwnCheckpointingOff, find_checkpointable, mark_block, unmark_block
from lt_tiled.policies import Checkpointing, Tiling
from lt_tiled.report import Report
from lt_tiled.tiling.call import TileMark
from lt_tiled.tiling.modules import find_tileable, mark_tiled, untile


class Prepared(AbstractContextManager["Prepared"]):
    """A model whose modules are tiled and whose blocks are checkpointed until :meth:`release`. Usable in ``with``."""

    def __init__(self, model: nn.Module, tiling: Tiling | None, checkpointing: Checkpointing | None) -> None:
        # Everything is found before anything is changed, so that an error leaves the model as it was.
        tiled = find_tileable(model, tiling) if tiling else []
        blocks = _not_wrapped(model, find_checkpointable(model, checkpointing)) if checkpointing else []
        self.model = model
        self._tiled: list[nn.Module] = []
        self._blocks: list[nn.Module] = []
        self._own: OwnCheckpointingOff | None = None
        try:
            for path, module in tiled:
                if get_mark(module, TileMark) is None:  # else somebody tiled it by hand, and it keeps what it has
                    assert tiling is not None
                    mark_tiled(module, tiling, f"{path} ({type(module).__name__})")
                    self._tiled.append(module)
            for _, block in blocks:
                if get_mark(block, BlockMark) is None:
                    mark_block(block)
                    self._blocks.append(block)
            if self._blocks:
                self._own = OwnCheckpointingOff(model)
        except BaseException:
            self.release()
            raise
        inform(self.report().summary())

    def report(self) -> Report:
        """What is tiled and checkpointed, and into how many tiles the largest call so far was cut."""
        return Report.of(self.model)

    def release(self) -> None:
        """Leave the model as it was. Does nothing the second time."""
        if self._own is not None:
            self._own.undo()
        for block in self._blocks:
            unmark_block(block)
        for module in self._tiled:
            untile(module)
        self._own, self._blocks, self._tiled = None, [], []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def prepare(model: nn.Module, *, tiling: Tiling | None = None, checkpointing: Checkpointing | None = None) -> Prepared:
    """Tile and checkpoint a whole model in place, without any trainer.

    Args:
        model: Any module. Its keys, classes and results stay as they are.
        tiling: Which modules run tile by tile; ``None`` for none.
        checkpointing: Which blocks are recomputed in the backward; ``None`` for none.

    Returns:
        A handle that reports what was done and undoes it.

    Raises:
        ValueError: If a policy finds no module, names one that is not there, or names one that cannot be tiled.
    """
    return Prepared(model, tiling, checkpointing)


def _not_wrapped(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out blocks that torch's ``checkpoint_wrapper`` holds, or inside of which it stands."""
    wrappers = [m for _, m in walk(model) if has_class(m, ("CheckpointWrapper",))]
    if not wrappers:
        return blocks
    inside = {id(part) for wrapper in wrappers for part in wrapper.modules()}
    free = [(path, m) for path, m in blocks if not any(id(part) in inside for part in m.modules())]
    warn(f"{len(blocks) - len(free)} of {len(blocks)} blocks are checkpointed by torch's checkpoint_wrapper already and keep that.")
    return free
