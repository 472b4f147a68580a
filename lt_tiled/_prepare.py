"""A whole model: tile, checkpoint and share what the policies name, report it, undo it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import nn

from lt_tiled._log import inform, warn
from lt_tiled.engines.found import Engine
from lt_tiled.engines.zero import patch_leaves, restore_leaves
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.transformers import find_losses, patch_losses, restore_losses
from lt_tiled.modules.cache import patch_models
from lt_tiled.modules.feed_forward import Tileable
from lt_tiled.modules.find import has_class, walk
from lt_tiled.modules.patch import get_patch, remove_patch, set_patch
from lt_tiled.modules.targets import find_tileable
from lt_tiled.offload.offloader import Offloader, build_offloader
from lt_tiled.policies import (
    ActivationCheckpointing,
    ActivationCheckpointingLike,
    LossShards,
    SequenceParallel,
    Tiling,
    as_activation_checkpointing,
    as_loss,
    as_sequence_parallel,
    as_tiling,
)
from lt_tiled.recompute.blocks import (
    BlockOffload,
    BlockPatch,
    find_checkpointable,
    turn_off_own_checkpointing,
)
from lt_tiled.recompute.keep import keeps_attention, policy_of
from lt_tiled.report import Report
from lt_tiled.sequence_parallel.groups import group_of
from lt_tiled.sequence_parallel.share import find_shared, reach_attention, share
from lt_tiled.tiling.call import EngineNeeds, Owner
from lt_tiled.tiling.patch import TiledPatch, patch_tiled, restore_tiled

Found = TypeVar("Found")


class Prepared(AbstractContextManager["Prepared"]):
    """A model that is tiled and activation-checkpointed until :meth:`release`. Usable in ``with``.

    Attributes:
        offloader: Where the block inputs go, if they are offloaded; its ``stats`` tell what it did.
    """

    def __init__(
        self,
        model: nn.Module,
        tiling: Tiling | None,
        activation_checkpointing: ActivationCheckpointing | None,
        loss: LossShards | None = None,
        sequence_parallel: SequenceParallel | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        needs: EngineNeeds | None = None,
        defaults: Collection[str] = (),
        ranks_per_node: int | None = None,
        zero3_leaf_modules: bool = True,
        build: Callable[[ActivationCheckpointing, int | None], Offloader] = build_offloader,
    ) -> None:
        # Everything is found before anything is changed, so that an error leaves the model as it was.
        shared = find_shared(model, sequence_parallel, group) if sequence_parallel else []
        keep = policy_of(activation_checkpointing.keep) if activation_checkpointing else None
        losses = find_losses(model) if loss else []
        missing = list[NothingFoundError]()
        blocks, tiled = list[tuple[str, nn.Module]](), list[Tileable]()
        if activation_checkpointing is not None:
            find = partial(find_checkpointable, model, activation_checkpointing)
            blocks = _not_wrapped(model, _find(find, "activation_checkpointing" in defaults, missing))
        if tiling is not None:
            tiled = _find(partial(find_tileable, model, tiling), "tiling" in defaults, missing)
        if missing:
            used = ["tiles"] if tiled else []
            used += [f"activation checkpointing of its {len(blocks)} blocks"] if blocks else []
            used += ["the loss in tiles"] if losses else []
            how = f"with {' and '.join(used)} alone" if used else "as without lt_tiled"
            warn(f"{' '.join(map(str, missing))} It trains {how}.")
        self.model = model
        self.offloader: Offloader | None = None
        owner, needs = Owner(), needs or Engine(model)
        unpatched = [(path, block) for path, block in blocks if get_patch(block, BlockPatch) is None]
        with ExitStack() as undo:
            if activation_checkpointing is not None and activation_checkpointing.offload is not None:
                if not unpatched:
                    raise ValueError(
                        f"offload={activation_checkpointing.offload!r} has no effect: all {len(blocks)} blocks use"
                        " activation checkpointing already. Pass activation_checkpointing="
                        f"{activation_checkpointing.offload!r} to the strategy instead, or set"
                        " activation_checkpointing=False there."
                    )
                self.offloader = build(activation_checkpointing, ranks_per_node)
                undo.callback(self.offloader.close)
            undo.callback(restore_leaves, model)
            undo.callback(restore_losses, model, owner)
            undo.callback(restore_tiled, model, owner)
            for tileable in tiled:
                if get_patch(tileable.module, TiledPatch, tileable.method) is None:  # else it keeps what it has
                    assert tiling is not None
                    patch_tiled(tileable, tiling, needs, owner)
            if loss is not None:
                patch_losses(losses, loss, owner)
            patch_leaves(model, zero3_leaf_modules)
            call_torch = reach_attention(model, unpatched, undo) if keep is keeps_attention else set()
            for module in turn_off_own_checkpointing(model) if unpatched else []:
                undo.callback(setattr, module, "gradient_checkpointing", True)
            for path, block in unpatched:
                offload = BlockOffload(self.offloader, path, model) if self.offloader else None
                name = f"{path} ({type(block).__name__})"
                raises = activation_checkpointing is None or activation_checkpointing.compare == "raise"
                patch = BlockPatch(name, offload, keep, block in call_torch, raises)
                set_patch(block, patch)
                undo.callback(remove_patch, block, patch)
            if unpatched:
                patch_models(model, undo)
            for part in shared:
                share(part, undo)
            self._undo = undo.pop_all()
        self._needs = needs
        inform(self.report().summary())

    def report(self) -> Report:
        """Return what is tiled and what is recomputed, and the number of tiles of the largest call so far."""
        return Report.of(self.model)

    def find_engine(self) -> None:
        """Find the engine that wraps the model now, and not only in the first call.

        Raises:
            ValueError: If it would shard weights while tiles need them, or lose their gradients.
        """
        self._needs.update(self.model)

    def release(self) -> None:
        """Restore the model, and free CPU memory and disk. Does nothing the second time."""
        self._undo.close()

    def __exit__(self, *_: object) -> None:
        self.release()


class PreparedModels(list[Prepared]):
    """The models that one strategy or callback prepared, each once, until they are released."""

    def add(self, model: nn.Module, policies: AppliesPolicies, ranks_per_node: int | None = None) -> None:
        """Apply the policies to a model, unless they were already. Of several models, some may have nothing to tile."""
        if any(prepared.model is model for prepared in self):
            return
        try:
            prepared = Prepared(
                model,
                policies.tiling,
                policies.activation_checkpointing,
                policies.loss,
                policies.sequence_parallel,
                group=policies.sequence_group,
                defaults=policies.defaults,
                ranks_per_node=ranks_per_node,
                zero3_leaf_modules=policies.zero3_leaf_modules,
            )
        except NothingFoundError as error:
            if not self:
                raise
            warn(f"{error} {type(model).__name__} is not changed, because there are other models.")
        else:
            self.append(prepared)

    def find_engines(self) -> None:
        """Find the engine of each model; see :meth:`Prepared.find_engine`."""
        for prepared in self:
            prepared.find_engine()

    def release(self, keep: int = 0) -> None:
        """Restore every model but the first ``keep`` of them."""
        while len(self) > keep:
            self.pop().release()

    def free_buffers(self) -> None:
        """Free the CPU memory that is kept for the next step's block inputs."""
        for prepared in self:
            if prepared.offloader is not None:
                prepared.offloader.free_buffers()


class AppliesPolicies:
    """The base of strategies and callbacks: their policies, and the models that these were applied to."""

    defaults: Collection[str] = ()
    """The policies that nobody asked for: a model in which they find nothing is trained without them."""

    zero3_leaf_modules = True
    """Whether modules with tiled modules become leaf modules of ZeRO-3."""

    sequence_group: dist.ProcessGroup | None = None
    """The ranks that share each sequence with this one."""

    def set_policies(
        self, tiling: Any, activation_checkpointing: Any, loss: Any, sequence_parallel: Any = None
    ) -> None:
        """Read the policies or their short forms.

        Raises:
            ValueError: If one is not understood.
        """
        self.tiling, self.loss = as_tiling(tiling), as_loss(loss)
        self.activation_checkpointing = as_activation_checkpointing(activation_checkpointing)
        self.sequence_parallel = as_sequence_parallel(sequence_parallel)
        self.prepared = PreparedModels()
        """The models that the policies were applied to."""

    def note_defaults(self, tiling: Any, activation_checkpointing: Any) -> None:
        """Note which of the arguments of a user are the defaults, so that their policies may find nothing."""
        is_default = {"tiling": tiling == Tiling(), "activation_checkpointing": activation_checkpointing is True}
        self.defaults = [name for name, default in is_default.items() if default]

    def release(self) -> None:
        """Restore every model."""
        self.prepared.release()


def prepare(
    model: nn.Module,
    *,
    tiling: Tiling | bool | int | None = None,
    activation_checkpointing: ActivationCheckpointingLike | None = None,
    loss: bool | int | Literal["always"] | None = None,
    sequence_parallel: SequenceParallel | int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Prepared:
    """Apply tiling, activation checkpointing and sequence parallelism to a whole model in place, without a trainer.

    Args:
        model: Any module. Its ``state_dict`` keys, classes and results do not change.
        tiling: Which modules run tile by tile: a policy, a number of tiles, ``True``; ``None`` for none.
        activation_checkpointing: Which blocks are recomputed in the backward pass: a policy, ``True``, where their
            inputs are offloaded to, or what Lightning's ``activation_checkpointing_policy`` takes; ``None`` for none.
        loss: Whether transformers models compute their loss in tiles in training, where ``output.logits`` is then
            ``None``: ``True``, or how many tiles; ``"always"`` for evaluation, too.
        sequence_parallel: How the ranks of ``group`` share each sequence: a policy or their number; ``None`` if they do
            not. All of them call the model with the same inputs, and gradients are averaged over all ranks.
        group: The process group that shares each sequence; by default all ranks.

    Returns:
        A handle that reports what was done and undoes it.

    Raises:
        ValueError: If a policy names a module that is not there, or one that cannot be tiled.
        NothingFoundError: If a policy finds no module.
        OffloadError: If the place to offload to cannot be used, or has no room for its budget.
    """
    policy = as_tiling(tiling)
    if policy and (already := Report.of(model).tiled):
        warn(
            f"{len(already)} modules are tiled already, {already[0].path} among them, and are not tiled anew:"
            " release what tiled them first."
        )
    shared = as_sequence_parallel(sequence_parallel)
    group = group_of(shared.size, group) if shared else None
    return Prepared(
        model,
        policy,
        as_activation_checkpointing(activation_checkpointing),
        as_loss(loss),
        shared,
        group=group,
    )


def _find(find: Callable[[], list[Found]], optional: bool, missing: list[NothingFoundError]) -> list[Found]:
    """Return what a function finds, or nothing and add the reason to ``missing`` if nobody asked for it."""
    try:
        return find()
    except NothingFoundError as error:
        if not optional:
            raise
        missing.append(error)
        return []


def _not_wrapped(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out blocks inside, or around, torch's ``checkpoint_wrapper``."""
    wrappers = [m for _, m in walk(model) if has_class(m, ("CheckpointWrapper",))]
    if not wrappers:
        return blocks
    inside = {id(part) for wrapper in wrappers for part in wrapper.modules()}
    free = [(path, m) for path, m in blocks if not any(id(part) in inside for part in m.modules())]
    warn(f"{len(blocks) - len(free)} of {len(blocks)} blocks use a checkpoint_wrapper already and are left to it.")
    return free
