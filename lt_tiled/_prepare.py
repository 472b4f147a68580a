"""A whole model: tile, checkpoint and share what the policies name, report it, undo it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from lt_tiled._log import inform, warn
from lt_tiled.engines.found import Engine
from lt_tiled.engines.zero import patch_leaves
from lt_tiled.errors import NothingFoundError
from lt_tiled.loss.transformers import find_losses, patch_losses
from lt_tiled.modules.cache import leave_out_caches
from lt_tiled.modules.feed_forward import Tileable
from lt_tiled.modules.patch import get_patch, patch_until, remove_patches
from lt_tiled.modules.targets import find_tileable
from lt_tiled.offload.offloader import Offloader, build_offloader
from lt_tiled.policies import (
    ActivationCheckpointing,
    ActivationCheckpointingLike,
    SequenceParallel,
    Tiling,
    as_loss,
    as_policy,
    as_sequence_parallel,
)
from lt_tiled.recompute.blocks import BlockPatch, find_checkpointable, turn_off_own_checkpointing
from lt_tiled.recompute.keep import policy_of
from lt_tiled.report import Report
from lt_tiled.sequence_parallel.enable import enable, find_doors
from lt_tiled.sequence_parallel.groups import group_of
from lt_tiled.tiling.patch import TiledPatch, patch_tiled


class AppliesPolicies:
    """The base of strategies and callbacks: their policies, and the models that these were applied to."""

    strict = False  # whether a policy that finds nothing raises, and does not only warn
    sequence_group: dist.ProcessGroup | None = None  # the ranks that share each sequence, or consecutive ones
    ranks_per_node: int | None = None  # the processes that share the budgets of a node, if it is known
    build_offloader = staticmethod(build_offloader)

    def set_policies(
        self, tiling: Any = None, activation_checkpointing: Any = None, loss: Any = None, sequence_parallel: Any = None
    ) -> None:
        """Read the policies or their short forms. Raise ``ValueError`` if one is not understood."""
        self.tiling = as_policy(tiling, Tiling, "num_shards")
        self.activation_checkpointing = as_policy(activation_checkpointing, ActivationCheckpointing, "offload")
        self.loss = as_loss(loss)
        self.sequence_parallel = as_sequence_parallel(sequence_parallel)
        self.prepared: list[Prepared] = []  # the models that the policies were applied to

    def prepare_once(self, model: nn.Module) -> None:
        """Apply the policies to a model, unless they were already."""
        if all(prepared.model is not model for prepared in self.prepared):
            self.prepared.append(Prepared(model, self))

    def modules_of(self, policy: Any, find: Callable[[Any], list[Any]]) -> list[Any]:
        """Return the modules that a policy names. Where it finds nothing, warn, or raise if the policies are strict."""
        if policy is None:
            return []
        try:
            return find(policy)
        except NothingFoundError as error:
            if self.strict:
                raise
            warn(f"{error} The model trains without it.")
            return []

    def release(self) -> None:
        """Restore every model."""
        while self.prepared:
            self.prepared.pop().release()


class Prepared(AbstractContextManager["Prepared"]):
    """A model that is tiled and activation-checkpointed until :meth:`release`. It is a context manager.

    ``offloader`` moves block inputs, or is ``None``. Its ``stats`` are the bytes that it moved.
    """

    def __init__(self, model: nn.Module, policies: AppliesPolicies) -> None:
        self.model = model
        self.offloader: Offloader | None = None
        # 1. What each policy names. An error leaves the model as it was, because nothing is changed yet.
        tiled: list[Tileable] = policies.modules_of(policies.tiling, partial(find_tileable, model))
        losses = policies.modules_of(policies.loss, lambda _: find_losses(model))
        blocks = policies.modules_of(policies.activation_checkpointing, partial(find_checkpointable, model))
        doors = policies.modules_of(
            policies.sequence_parallel,
            lambda sharing: find_doors(model, sharing, group_of(sharing.size, policies.sequence_group)),
        )
        # 2. Without what another call prepared, or a user tiled.
        new_tiled = [found for found in tiled if get_patch(found.module, TiledPatch, found.method) is None]
        new_blocks = [(path, block) for path, block in blocks if get_patch(block, BlockPatch) is None]
        if before := len(tiled) - len(new_tiled) + len(blocks) - len(new_blocks):
            kind = type(model).__name__
            warn(f"{before} modules of {kind} are prepared already and stay so: release what prepared them first.")
        # 3. Change the model. The stack undoes it, also after an error.
        with ExitStack() as undo:
            self._tile(new_tiled, losses, policies, undo)
            self._checkpoint(new_blocks, policies, undo)
            for door in doors:
                enable(door, undo)
            self._undo = undo.pop_all()
        inform(self.report().summary())

    def _tile(self, tiled: list[Tileable], losses: list[Any], policies: AppliesPolicies, undo: ExitStack) -> None:
        """Run modules and losses in tiles, until ``undo`` is closed."""
        owner = object()
        engine = Engine(self.model)
        undo.callback(remove_patches, self.model, owner)
        if policies.tiling is not None:
            for tileable in tiled:
                patch_tiled(tileable, policies.tiling, engine, owner)
        if policies.loss is not None:
            patch_losses(losses, policies.loss, owner)
        patch_leaves(self.model, undo)

    def _checkpoint(self, blocks: list[tuple[str, nn.Module]], policies: AppliesPolicies, undo: ExitStack) -> None:
        """Run blocks with activation checkpointing, until ``undo`` is closed."""
        policy = policies.activation_checkpointing
        if policy is None or not blocks:
            return
        # 1. Where block inputs go, if the policy moves them.
        if policy.offload is not None:
            self.offloader = policies.build_offloader(policy, policies.ranks_per_node)
            undo.callback(self.offloader.close)
        # 2. What blocks save besides.
        keep = policy_of(policy.keep)
        # 3. The blocks themselves. What the model would recompute by itself would run a second time.
        for module in turn_off_own_checkpointing(self.model):
            undo.callback(setattr, module, "gradient_checkpointing", True)
        for path, block in blocks:
            patch_until(undo, block, BlockPatch(path, self.offloader, keep, policy.compare == "raise"))
        # 4. A cache would hold the keys and values of all layers, and a recompute would add them twice.
        leave_out_caches(self.model, undo)

    def report(self) -> Report:
        """Return what is tiled and what is recomputed, and the number of tiles of the largest call so far."""
        return Report.of(self.model)

    def release(self) -> None:
        """Restore the model, and free CPU memory and disk. Does nothing the second time."""
        self._undo.close()

    def __exit__(self, *_: object) -> None:
        self.release()


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
        tiling: As in the strategies.
        activation_checkpointing: As in the strategies.
        loss: As in the strategies.
        sequence_parallel: As in the strategies. All ranks that share a sequence must call the model with the same
            inputs, and gradients must be averaged over all ranks.
        group: The process group that shares each sequence, by default consecutive ranks.

    Returns:
        A handle that reports how modules ran and restores the model.

    Raises:
        ValueError: If a policy names a module that does not exist or cannot be tiled.
        NothingFoundError: If a policy finds no module.
        OffloadError: If the directory cannot be used, or the disk has no room for the budget.
    """
    policies = AppliesPolicies()
    policies.strict = True
    policies.set_policies(tiling, activation_checkpointing, loss, sequence_parallel)
    policies.sequence_group = group
    return Prepared(model, policies)
