"""What runs in place of a tiled module's method and of the norms next to it: patch, run tile by tile, restore."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lt_tiled._log import warn
from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.modules.feed_forward import (
    MLPSizes,
    Tileable,
    cannot_be_tiled,
    find_sizes,
    is_one_kernel,
    parts_below,
)
from lt_tiled.modules.find import outermost, walk, walk_all
from lt_tiled.modules.patch import Order, Patch, get_patch, get_patches, remove_patch, roots, set_patch
from lt_tiled.policies import Tiling
from lt_tiled.tiling.autograd import defer, run_tiled
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.deferred import DeferredCall, none_left, values
from lt_tiled.tiling.layout import memory_order
from lt_tiled.tiling.recompute import is_transformed
from lt_tiled.tiling.self_check import check_position_wise
from lt_tiled.tiling.state import EngineNeeds, Found, Learned, Owner, Tiled
from lt_tiled.tiling.weights import Work

_HOOKS = "_post_accumulate_grad_hooks"
CallWithInputs = tuple[TiledCall, list[Tensor]]


def patch_tiled(tileable: Tileable, tiling: Tiling, needs: EngineNeeds, owner: Owner | None) -> TiledPatch:
    """Tile what was found, for its owner to undo.

    Raises:
        ValueError: If it is tiled already, or is known not to be position-wise.
    """
    module, name = tileable.module, tileable.name
    if get_patch(module, TiledPatch, tileable.method) is not None:
        raise ValueError(f"{name} is tiled already: call lt_tiled.untile() on it first.")
    parts, norm_of = roots(module, tileable.parts), tileable.norm_of
    for below, part in (pair for root in parts for pair in walk_all(root)):
        if reason := cannot_be_tiled(part):
            raise ValueError(f"{name} cannot be tiled: {below or 'it'} is a {type(part).__name__}, {reason}. {REMEDY}")
    found = Found(
        name,
        tileable.kind,
        tileable.method,
        tileable.parts,
        below=parts_below(module) if tileable.method == "forward" else (),
        sizes=find_sizes(*parts) if norm_of is None else MLPSizes.dense(norm_of, norm_of),
        before=bool(tileable.before),
        after=bool(tileable.after) or (norm_of is not None and tileable.parent is not None),
        named=tileable.named,
        guessed=norm_of is not None,
    )
    patch = TiledPatch(found, tiling, needs, owner)
    set_patch(module, patch, tileable.method)
    for after, norms in ((False, tileable.before), (True, tileable.after)):
        for index, norm in enumerate(norms):
            if get_patch(norm, NeighborPatch) is None:  # a norm that several modules share is the first one's neighbor
                alone = not (found.guessed or is_one_kernel(norm))
                set_patch(norm, NeighborPatch(after, index, patch, owner, alone))
    if tileable.parent is not None and get_patch(tileable.parent, ParentPatch) is None:
        set_patch(tileable.parent, ParentPatch(owner))
    return patch


def restore_tiled(model: nn.Module, owner: Owner | None) -> None:
    """Undo :func:`patch_tiled` for one owner, on copies of the modules (peft's ``modules_to_save``) too."""
    for _, module in walk_all(model):
        for patch in get_patches(module, Patch):
            if isinstance(patch, TiledPatch | NeighborPatch | ParentPatch) and patch.owner is owner:
                remove_patch(module, patch)


def tiled_patches(model: nn.Module) -> Iterator[tuple[str, nn.Module, TiledPatch]]:
    """Yield path, module and patch of each tiled module."""
    for path, module in walk_all(model):
        for patch in get_patches(module, TiledPatch):
            yield path, module, patch


def whole_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules whose weights must all be there while tiles in them run, with their paths.

    These are the parents of tiled modules and of their neighbors, which may run in the same tiles, and tiled modules
    that have no neighbors.
    """
    everything = list(walk_all(model))
    return outermost((path, m) for path, m in everything if get_patch(m, ParentPatch) or get_patches(m, TiledPatch))


# What runs in place of a tiled module's method


class TiledPatch(Tiled, Patch):
    """On a tiled module."""

    @property
    def order(self) -> Order:  # type: ignore[override]
        """On a norm alone, that of a neighbor."""
        return Order.NEIGHBOR if self.found.guessed else Order.TILE

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copy = super().__deepcopy__(memo)
        assert isinstance(copy, TiledPatch)
        copy.learned = Learned(self.learned.largest, untiled=self.learned.untiled)
        copy.needs = deepcopy(self.needs, memo)
        return copy

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call in tiles, or untiled for a reason."""
        if self.learned.untiled:
            return self.inner(module, *args, **kwargs)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"{self.name} is tiled, and torch.export and torch.jit cannot go through its tiles: call"
                " lt_tiled.untile() on it first."
            )
        return _call(module, self, args, kwargs)


def _find_engine(module: nn.Module, needs: EngineNeeds) -> None:
    if not needs.known and (
        needs.holder.get(needs.name) is not needs.weight or getattr(needs.weight, _HOOKS, None) is not needs.hooks
    ):
        needs.find(module)


def _call(module: nn.Module, patch: TiledPatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _find_engine(module, patch.needs)
    work = Work(patch.bound(module), roots(module, patch.found.parts), whole=patch.found.parts is None)
    made, order = _with_neighbor(work, patch, args, kwargs), None
    if made is None:
        args, kwargs = values((args, kwargs))
        if patch.found.guessed and not patch.found.after and len(args) == 1 and isinstance(args[0], Tensor):
            order = None if args[0].is_contiguous() else memory_order(args[0])
        decision = decide(work, patch, args if order is None else (args[0].permute(order),), kwargs)
        if isinstance(decision, Untiled):
            accept(decision, module, patch)
            return patch.inner(module, *args, **kwargs)
        if order is not None:
            return run_tiled(*decision).permute([order.index(i) for i in range(len(order))])
        made = decision
    if patch.found.after and not kwargs and _may_defer(made, patch):
        deferred = defer(*made)
        if deferred is not None:
            return deferred
    return run_tiled(*made)


# How a call runs: in tiles, or untiled for a reason


@dataclass(frozen=True)
class Untiled:
    """Why a call of a tiled module does not run in tiles."""

    reason: Literal["transform", "one tile", "hook", "recorded", "self-check", "neighbor"]
    what: str = ""
    """The module with the hook, what transformers records, or the message of the self-check."""
    error: Exception | None = None


def decide(work: Work, patch: Tiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallWithInputs | Untiled:
    """Return the call to run in tiles, or the reason why the module runs untiled."""
    if is_transformed():  # by the model's code, so on all ranks
        return Untiled("transform")
    if hooked := work.hooked():
        return Untiled("hook", hooked)
    # What nobody named is checked in the first step, and not in the first one that is long enough to tile.
    early = not (patch.found.named or patch.found.guessed or patch.learned.checked) and torch.is_grad_enabled()
    try:
        made = TiledCall.of(work, patch, args, kwargs, short=early)
    except NotPositionWiseError as error:  # for its arguments
        return Untiled("self-check", str(error), error)
    if made is None:
        return Untiled("one tile")
    if recorded := work.recorded():
        return Untiled("recorded", ", ".join(recorded))
    checks = _is_real(made) if patch.found.guessed else patch.tiling.self_check
    if checks and not made[0].checked:
        try:
            check_position_wise(*made)
        except NotPositionWiseError as error:
            return Untiled("self-check", str(error), error)
    return Untiled("one tile") if made[0].is_short else made


def decide_with_neighbor(made: CallWithInputs) -> Untiled | None:
    """Run the self-check, once, on a call with a neighbor in it.

    That the neighbor may run in the tiles is a guess, so it is checked whatever the policy says. The check is not
    counted as work of the step, and fake tensors, which have no values, are not checked.

    Returns:
        Why the call may not run, or ``None``.
    """
    call = made[0]
    if is_transformed() or call.work.recorded() or call.work.hooked():
        return Untiled("neighbor")
    try:
        if _is_real(made) and not call.checked:
            check_position_wise(*made)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the neighbor runs untiled
        return Untiled("neighbor", error=error)
    return None


def _is_real(made: CallWithInputs) -> bool:
    """Whether a call runs on real tensors: fake ones have no values to compare."""
    return type(made[1][0]) in (Tensor, nn.Parameter)


def accept(untiled: Untiled, module: nn.Module, patch: Tiled) -> None:
    """Warn that a call runs untiled, and remember it where later calls must do the same.

    Raises:
        RuntimeError: If the engine needs the same order of gradients on all ranks, and a hook turns tiling off.
        NotPositionWiseError: If the self-check failed, and nothing smaller can be tiled instead on all ranks.
    """
    name, found, same_order = patch.name, patch.found, patch.needs.same_order
    agreed = same_order and patch.needs.agreed
    if untiled.reason == "hook":
        text = (
            f"{name} runs untiled, because {untiled.what} inside it has a hook, which would see tiles, not all tokens."
        )
        if same_order:
            raise RuntimeError(
                f"{text} The engine needs the same order of gradients on all ranks, so it cannot: put the hook on"
                f" {name} itself, or remove it from Tiling(targets=...)."
            )
        warn(f"{text} Put the hook on {name} itself to keep it tiled.", once=f"hook {name} {untiled.what}")
    elif untiled.reason == "recorded":  # by a setting of the model, so on all ranks
        _tile_below(module, patch, f"{name}: transformers records {untiled.what} inside it, which tiles would change.")
    elif untiled.reason == "neighbor":
        if untiled.error is not None and agreed:
            raise _cannot_fall_back(name, "what is next to it", untiled.error) from untiled.error
    elif untiled.error is not None and not found.named and not found.below:
        if agreed:
            raise _cannot_fall_back(name, "it", untiled.error) from untiled.error
        patch.learned.untiled = True
        if not found.guessed:
            warn(f"{untiled.what} Nobody named it, so it runs untiled.", once=f"untiled {found.kind}")
    elif untiled.error is not None:
        if same_order or not found.below:
            raise untiled.error
        _tile_below(module, patch, untiled.what)


def _tile_below(module: nn.Module, patch: Tiled, reason: str) -> None:
    """Run a mixture of experts untiled, and its experts, below the router, in tiles.

    From now on, because a recompute in the backward pass, where nothing is recorded, must repeat the forward pass.
    """
    patch.learned.untiled = True
    parts = dict(walk(module))
    for path in patch.found.below:
        if get_patch(part := parts[path], TiledPatch) is None:
            below = Tileable.of_module(f"{patch.name}.{path}", part, named=patch.found.named)
            patch_tiled(below, patch.tiling, patch.needs, patch.owner)
    instead = (
        f"Below its router {' and '.join(patch.found.below)} run in tiles." if patch.found.below else "It runs untiled."
    )
    warn(f"{reason} {instead}")


# Neighbors: norms next to an MLP, and projections behind a norm


class NeighborPatch(Patch):
    """On a norm next to a tiled module, or on a projection behind a tiled norm."""

    order = Order.NEIGHBOR

    def __init__(self, after: bool, index: int, tiled: TiledPatch, owner: Owner | None, alone: bool) -> None:
        self.after, self.key, self.tiled, self.owner = after, ("norm", after, index), tiled, owner
        self.alone = alone
        """Whether it runs in tiles of its own where it cannot share its neighbor's."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copy = super().__deepcopy__(memo)
        assert isinstance(copy, NeighborPatch)
        copy.tiled = memo.get(id(self.tiled)) or self.tiled.__deepcopy__(memo)  # type: ignore[assignment]
        return copy

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run in the tiles of the neighbor where that can be."""
        if not self.tiled.active:
            return self.inner(module, *args, **kwargs)
        return _call_neighbor(module, self, args, kwargs)


class ParentPatch(Patch):
    """On the module whose forward calls both: nothing deferred leaves it, because its engine may free the weights."""

    order = Order.PARENT

    def __init__(self, owner: Owner | None) -> None:
        self.owner = owner

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what was deferred inside before the module returns."""
        with none_left():
            return values(self.inner(module, *args, **kwargs))


def _call_neighbor(module: nn.Module, patch: NeighborPatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _find_engine(module, patch.tiled.needs)
    work = Work(patch.bound(module), (module,), patch.key)
    if patch.after and (made := _with_neighbor(work, patch.tiled, args, kwargs)) is not None:
        return run_tiled(*made)
    args, kwargs = values((args, kwargs))
    tries = not kwargs and work.key not in patch.tiled.learned.refused and (patch.alone or not patch.after)
    made = TiledCall.of(work, patch.tiled, args, kwargs) if tries else None
    if made is None:
        return patch.inner(module, *args, **kwargs)
    defers = not patch.after and _may_defer(made, patch.tiled)
    if not (defers or patch.alone) or not _may_run(made):
        return patch.inner(module, *args, **kwargs)
    if defers and (deferred := defer(*made)) is not None:
        return deferred
    return run_tiled(*made) if patch.alone else patch.inner(module, *args, **kwargs)


def _may_defer(made: CallWithInputs, patch: TiledPatch) -> bool:
    tensors: list[Any] = made[1]
    plain = all(not (is_traceable_wrapper_subclass(t) or t.is_inference()) for t in tensors)
    return patch.needs.defer and plain and made[0].differentiable and patch.innermost.compiled is None


def _with_neighbor(
    work: Work, patch: TiledPatch, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallWithInputs | None:
    """Return one call of this work and the deferred one that is its first argument, if that can be joined."""
    deferred = args[0] if args else None
    if not isinstance(deferred, DeferredCall) or not deferred.open_for(patch):
        return None
    together, own = deferred.followed_by(work)
    if together.key in patch.learned.refused:
        return None
    others, kwargs = values((args[1:], kwargs))
    made = TiledCall.of(together, patch, (own, *others), kwargs)
    if made is None or not _may_run(made):
        return None
    deferred.runs_in_neighbor = True
    return made


def _may_run(made: CallWithInputs) -> bool:
    """Return whether a call may run with a neighbor in it; one that fails the self-check is not tried again."""
    untiled, call = decide_with_neighbor(made), made[0]
    if untiled is None:
        return True
    accept(untiled, call.work.modules[0], call.patch)
    if untiled.error is not None:
        call.patch.learned.refused.add(call.work.key)
    return False


def _cannot_fall_back(name: str, what: str, error: Exception | None) -> NotPositionWiseError:
    return NotPositionWiseError(
        f"{name}: {what} cannot run in its tiles, and the engine needs the same order of gradients on all ranks: name"
        f" the modules to tile, as in Tiling(targets=...). ({error})"
    )
