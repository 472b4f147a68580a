"""A whole model: mark what the policies name, report it, undo it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from torch import nn

from lt_tiled._log import inform, warn
from lt_tiled.checkpointing import (
    BlockMark,
    BlockOffload,
    OwnCheckpointingOff,
    find_checkpointable,
    mark_block,
    unmark_block,
)
from lt_tiled.loss.transformers import find_losses, mark_losses, unmark_losses
from lt_tiled.modules.feed_forward import find_tileable
from lt_tiled.modules.find import NothingFound, has_class, walk
from lt_tiled.modules.patch import get_mark
from lt_tiled.offload.build import build_offloader
from lt_tiled.offload.offloader import Offloader
from lt_tiled.policies import Checkpointing, Tiers, Tiling, as_checkpointing, as_tiling
from lt_tiled.report import Report
from lt_tiled.tiling.api import mark_tiled, unmark
from lt_tiled.tiling.state import TileMark

Build = Callable[[Checkpointing, int | None], Offloader]


class Prepared(AbstractContextManager["Prepared"]):
    """A model whose modules are tiled and whose blocks are checkpointed until :meth:`release`. Usable in ``with``.

    Attributes:
        offloader: Where the blocks' inputs go, if they are offloaded; its ``stats`` tell what it did.
    """

    def __init__(
        self,
        model: nn.Module,
        tiling: Tiling | None,
        checkpointing: Checkpointing | None,
        ranks_per_node: int | None = None,
        build: Build = build_offloader,
    ) -> None:
        # Everything is found before anything is changed, so that an error leaves the model as it was.
        tiled = find_tileable(model, tiling) if tiling else []
        losses = find_losses(model) if tiling and tiling.loss else []
        blocks = _not_wrapped(model, find_checkpointable(model, checkpointing)) if checkpointing else []
        self.model = model
        self._owner = object()
        self._blocks: list[nn.Module] = []
        self._own: OwnCheckpointingOff | None = None
        self.offloader: Offloader | None = None
        try:
            if checkpointing is not None and checkpointing.offload is not None:
                self.offloader = build(checkpointing, ranks_per_node)
            for tileable in tiled:
                if (
                    get_mark(tileable.module, TileMark, tileable.method) is None
                ):  # else somebody tiled it, and it keeps what it has
                    assert tiling is not None
                    mark_tiled(tileable, tiling, self._owner)
            if tiling is not None:
                mark_losses(losses, tiling.loss_shards, self._owner)
            for path, block in blocks:
                if get_mark(block, BlockMark) is None:
                    mark_block(block, self._offload_of(path, checkpointing))
                    self._blocks.append(block)
            if self.offloader is not None and checkpointing is not None and not self._blocks:
                raise ValueError(
                    f"offload={checkpointing.offload!r} would do nothing: all {len(blocks)} blocks are checkpointed already. Say it where"
                    " they are, in the strategy's checkpointing argument for one, or turn that off."
                )
            if self._blocks:
                self._own = OwnCheckpointingOff(model)
        except BaseException:
            self.release()
            raise
        inform(self.report().summary())

    def _offload_of(self, path: str, policy: Checkpointing | None) -> BlockOffload | None:
        if self.offloader is None or policy is None:
            return None
        return BlockOffload(self.offloader, path, self.model, policy.select, policy.activations == "all")

    def report(self) -> Report:
        """What is tiled and checkpointed, and into how many tiles the largest call so far was cut."""
        return Report.of(self.model)

    def release(self) -> None:
        """Leave the model as it was, and give RAM and disk back. Does nothing the second time."""
        if self._own is not None:
            self._own.undo()
        for block in self._blocks:
            unmark_block(block)
        unmark(self.model, self._owner)
        unmark_losses(self.model, self._owner)
        self._own, self._blocks = None, []
        if self.offloader is not None:
            self.offloader.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AppliesPolicies:
    """Base class of the strategies and callbacks that prepare models by their policies."""

    tiling: Tiling | None
    checkpointing: Checkpointing | None


class PreparedModels(list[Prepared]):
    """What one strategy or callback prepared: each model once, until all are released (Fabric may set up several)."""

    def add(
        self, model: nn.Module, tiling: Tiling | None, checkpointing: Checkpointing | None, ranks_per_node: int
    ) -> None:
        """Apply the policies to a model, unless they were already. Of several models, some may have nothing to apply
        them to.
        """
        if any(prepared.model is model for prepared in self):
            return
        try:
            self.append(Prepared(model, tiling, checkpointing, ranks_per_node))
        except NothingFound as error:
            if not self:
                raise
            warn(f"{error} {type(model).__name__} is left as it is, because there are other models.")

    def release(self, keep: int = 0) -> None:
        """Leave every model as it was, but for the first ``keep`` of them."""
        while len(self) > keep:
            self.pop().release()

    def free_buffers(self) -> None:
        """Give back the RAM that waits for the next step's boundaries, so that what comes now can use it."""
        for prepared in self:
            if prepared.offloader is not None:
                prepared.offloader.free_buffers()


def prepare(
    model: nn.Module,
    *,
    tiling: Tiling | bool | int | None = None,
    checkpointing: Checkpointing | bool | Tiers | None = None,
) -> Prepared:
    """Tile and checkpoint a whole model in place, without any trainer.

    Args:
        model: Any module. Its keys, classes and results stay as they are.
        tiling: Which modules run tile by tile: a policy, a number of tiles, ``True``; ``None`` for none.
        checkpointing: Which blocks are recomputed in the backward: a policy, ``True``, or where their inputs go;
            ``None`` for none.

    Returns:
        A handle that reports what was done and undoes it.

    Raises:
        ValueError: If a policy finds no module, names one that is not there, or names one that cannot be tiled.
        OffloadError: If the place to offload to cannot be used, or has no room for its budget.
    """
    if tiling and (already := Report.of(model).tiled):
        warn(
            f"{len(already)} modules are tiled already, {already[0].path} among them, and stay as they are: release what tiled them first."
        )
    return Prepared(model, as_tiling(tiling), as_checkpointing(checkpointing))


def _not_wrapped(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out blocks that torch's ``checkpoint_wrapper`` holds, or inside of which it stands."""
    wrappers = [m for _, m in walk(model) if has_class(m, ("CheckpointWrapper",))]
    if not wrappers:
        return blocks
    inside = {id(part) for wrapper in wrappers for part in wrapper.modules()}
    free = [(path, m) for path, m in blocks if not any(id(part) in inside for part in m.modules())]
    warn(
        f"{len(blocks) - len(free)} of {len(blocks)} blocks are checkpointed by torch's checkpoint_wrapper already and keep that."
    )
    return free
