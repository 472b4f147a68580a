"""What runs in place of a tiled module's method and of the norms next to it.

NOTE [How a call runs]
:class:`TiledPatch` decides for each call. It runs in tiles together with the norm that is pending before it, or alone,
or untiled for one of these reasons, which code and settings give:

==========  ================================================================  =======================================
reason      when                                                              what follows
==========  ================================================================  =======================================
transform   torch.func, forward-mode AD, parametrize.cached, torch.jit.trace  untiled, one line
hook        a user's hook inside would see tiles                              untiled, one warning
inputs      no plain hidden states: nested tensors, DTensors                  untiled
short       fewer tokens than two tiles need                                  untiled
check       the self-check failed                                             raises if a user chose the module; else
                                                                              untiled for ever, one warning; the
                                                                              experts of a mixture run in tiles
==========  ================================================================  =======================================

On several ranks, what runs untiled passes its weights through an anchor: see NOTE [One order on all ranks].
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lt_tiled._log import warn
from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.modules.feed_forward import ONE_KERNEL, MLPSizes, Tileable, find_sizes, has_capacity, parts_below
from lt_tiled.modules.find import ENGINES, outermost, walk
from lt_tiled.modules.patch import Order, Patch, get_patch, get_patches, has_hooks, roots, set_patch
from lt_tiled.policies import Tiling
from lt_tiled.recompute.mode import is_real, is_transformed
from lt_tiled.tiling.anchor import run_untiled
from lt_tiled.tiling.call import TENSOR, EngineNeeds, LargestCall, Plan, TiledCall, TileFunction
from lt_tiled.tiling.check import check_position_wise
from lt_tiled.tiling.cut import Tokens, tile_sizes
from lt_tiled.tiling.last import find_plan
from lt_tiled.tiling.pending import Boundary, Pending, values
from lt_tiled.tiling.recorded import CAPTURING, active_collector, record, run_recorded
from lt_tiled.tiling.run import run_tiled

CallWithInputs = tuple[TiledCall, list[Tensor]]
_OF_ENGINES = ("torch.", *ENGINES)
"""Packages whose hooks compute weights or follow modules."""
_NO_USERS = (*_OF_ENGINES, CAPTURING)  # and record outputs


# Setting patches, and finding them


def patch_tiled(tileable: Tileable, tiling: Tiling, needs: EngineNeeds, owner: object) -> TiledPatch:
    """Tile what was found, for its owner to undo.

    Raises:
        ValueError: If it is tiled already, or is known not to be position-wise.
    """
    # 1. Refuse what cannot be tiled.
    module = tileable.module
    kind = f"{type(module).__name__}.{tileable.method}".removesuffix(".forward")
    name = f"{tileable.path} ({kind})" if tileable.path else kind
    if get_patch(module, TiledPatch, tileable.method) is not None:
        raise ValueError(f"{name} is tiled already: call lt_tiled.untile() on it first.")
    parts = roots(module, tileable.parts)
    norm_of = tileable.norm_of
    if any(has_capacity(part) for root in parts for _, part in walk(root)):
        raise ValueError(
            f"{name} cannot be tiled: its experts have a capacity, so that the result of a token depends on all tokens."
            f" {REMEDY}"
        )
    # 2. The module itself.
    patch = TiledPatch(
        name,
        kind,
        tileable.parts,
        sizes=find_sizes(*parts) if norm_of is None else MLPSizes.dense(norm_of, norm_of),
        requested=tileable.named,
        is_lone_norm=norm_of is not None,
        pends=bool(tileable.after),
        tiling=tiling,
        needs=needs,
        owner=owner,
    )
    set_patch(module, patch, tileable.method)
    # 3. Its neighbors, whose leader it is.
    for before, neighbors in ((True, tileable.before), (False, tileable.after)):
        for neighbor in neighbors:
            if get_patch(neighbor, TiledPatch) is None:  # what several modules share is the first one's neighbor
                # A projection behind a norm, and a norm of one kernel, gain nothing by tiles of their own.
                alone = not (patch.is_lone_norm or isinstance(neighbor, ONE_KERNEL))
                set_patch(neighbor, replace(patch, parts=None, pends=before, alone=alone, leader=patch))
    # 4. The block that calls them, which nothing pending leaves.
    if tileable.parent is not None and get_patch(tileable.parent, Boundary) is None:
        set_patch(tileable.parent, Boundary(owner))
    return patch


def tiled_patches(model: nn.Module) -> Iterator[tuple[str, nn.Module, TiledPatch]]:
    """Yield path, module and patch of each tiled module."""
    for path, module in walk(model):
        for patch in get_patches(module, TiledPatch):
            if patch.is_leader:
                yield path, module, patch


def whole_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules whose weights must all be there while tiles in them run, with their paths.

    These are the parents of tiled modules and of their neighbors, which may run in the same tiles, and tiled modules
    that have no neighbors.
    """
    tiled = {module for _, module, _ in tiled_patches(model)}
    return outermost(walk(model), lambda module: module in tiled or get_patch(module, Boundary) is not None)


# A call


@dataclass(eq=False)
class TiledPatch(Patch):
    """On a tiled module, on a norm next to one, and on the projections behind a norm.

    It refers to no module, because copies of a model have copies of it.
    """

    order = Order.TILE
    name: str
    """The name in messages."""
    kind: str
    """The class, or ``Class.method``."""
    parts: tuple[str, ...] | None
    """The children that a method uses; ``None`` for the whole module."""
    sizes: MLPSizes | None
    """Its sizes, where its weights show them."""
    requested: bool
    """Whether a user chose it. Else it stays untiled where it cannot be tiled."""
    is_lone_norm: bool
    """Whether it belongs to a norm that the policy does not name, and that is not next to an MLP."""
    pends: bool
    """Whether its output may be pending, because what follows may run in the same tiles."""
    tiling: Tiling
    needs: EngineNeeds
    owner: object
    alone: bool = True
    """Whether it runs in tiles where it cannot share those of another module."""
    leader: Any = None
    """The patch whose tiles it may share: of the MLP, or of the norm before projections. By default itself."""
    untiled = False
    """Whether it failed the self-check."""

    def __post_init__(self) -> None:
        self.leader = self.leader or self
        # What calls find out.
        self.plans: dict[Hashable, Plan | None] = {}
        self.largest = LargestCall()
        self.compiled_tile: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy: Any = super().__deepcopy__(memo)
        copy.leader = deepcopy(self.leader, memo)
        copy.needs = deepcopy(self.needs, memo)
        copy.__post_init__()
        return copy

    @property
    def is_leader(self) -> bool:
        """Whether it is on a tiled module, and not on a neighbor of one."""
        return self.leader is self

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call: see NOTE [How a call runs]."""
        self.needs.update(module)
        # 1. What runs on a tile, with what transformers records in it.
        function = self._function(module)
        collector = active_collector(function.inside)
        if collector is not None:
            function = replace(function, run=partial(run_recorded, function.run, tuple(collector)), key=(id(self), ""))
        # 2. Together with the norm that is pending before it,
        made: CallWithInputs | None = None
        swaps = False
        pending = next(iter(args), None)
        if isinstance(pending, Pending) and pending.may_join(self.leader):
            both = function.after(pending.call)
            made = self.decide(module, both, (*pending.inputs, *values(args[1:])), values(kwargs))
        # or alone.
        if made is None:
            args = values(args)
            kwargs = values(kwargs)
            tensors = args
            # A norm of heads ``[B, N, S, D]`` gets them as they lie in memory: else its input would be copied.
            if self.is_lone_norm and not self.pends and _heads_are_swapped(args):
                swaps = True
                tensors = (args[0].transpose(1, 2), *args[1:])
            if self.alone or self.pends:
                made = self.decide(module, function, tensors, kwargs)
        if made is not None:
            call, inputs = made
            if self.is_leader:
                self.largest.note(call.tokens.count, call.sizes, self.kind)
            # 3. In the tiles of what follows, if that takes its output.
            if self._may_pend(module, call, inputs):
                return Pending.of(call, inputs, self.leader)
            # 4. In tiles of its own.
            if self.alone or call.function.first is not None:
                result = run_tiled(call, inputs)
                if swaps:
                    return result.transpose(1, 2)
                return result if collector is None else record(result, collector)
        # 5. Untiled.
        return run_untiled(function.parts, partial(self.inner, module, *args, **kwargs))

    def _function(self, module: nn.Module) -> TileFunction:
        """Return what runs on a tile: the module's own code below this patch."""
        below = self.bound(module)
        options = self.tiling.compile
        if options is not False and self.compiled_tile is None:
            run = torch.compile(below, **({} if options is True else options))
            # Inductor's own random numbers would differ between the forward pass and the recompute.
            self.compiled_tile = torch._inductor.config.patch(fallback_random=True)(run)
        below = self.compiled_tile or below
        parts = [part for root in roots(module, self.parts) for part in root.modules()]
        # The hooks of a module that runs by its forward run around its tiles.
        inside = parts[1:] if self.parts is None else parts
        return TileFunction(below, module, parts, inside, id(self), self.name, self.tiling, self.plans)

    def decide(
        self, module: nn.Module, function: TileFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallWithInputs | None:
        """Return the call to run in tiles; ``None`` to run untiled: see NOTE [How a call runs].

        Raises:
            NotPositionWiseError: If the self-check failed, a user chose the module, and nothing in it can be tiled.
        """
        # check, in an earlier call; transform
        if self.untiled or is_transformed() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None
        # hook
        for part in function.inside:
            if has_hooks(part, _NO_USERS):
                kind = type(part).__name__
                warn(
                    f"{self.name} runs untiled, because {kind} inside it has a hook, which would see tiles, not all"
                    f" tokens. Put the hook on {self.name} itself to keep it tiled.",
                    once=f"hook {self.name} {kind}",
                )
                return None
        # inputs
        inputs: list[Tensor] = []
        arguments: list[Any] = []
        hidden = None
        for value in (*args, *kwargs.values()):
            arguments.append(TENSOR if isinstance(value, Tensor) else value)
            if isinstance(value, Tensor):
                inputs.append(value)
                if hidden is None and value.is_floating_point() and value.dim() > 1:
                    hidden = value
        if hidden is None or hidden.is_nested or hasattr(hidden, "placements"):  # a DTensor
            return None
        # check and plan, in the first step: a rank with a short input must not wait for another that refuses
        tokens = Tokens(hidden.shape[:-1])
        sizes = tile_sizes(self.tiling, tokens.count, hidden.shape[-1], self.sizes)
        call = TiledCall(function, inputs, arguments, tuple(kwargs), tokens, sizes)
        early = not self.is_lone_norm and torch.is_grad_enabled() and tokens.count > 1
        # That norms may run in tiles, and in those of what follows, is a guess: it is checked whatever the policy says.
        checks = self.tiling.self_check or self.is_lone_norm or not self.is_leader
        if call.kind not in self.plans and (early or len(sizes) > 1):
            try:
                if checks and is_real(inputs[0]):
                    check_position_wise(call, inputs, self.needs.passed)
                self.plans[call.kind] = find_plan(call, inputs)
            except NotPositionWiseError as error:
                if function.first is None:
                    self._step_back(module, error)
                self.plans[call.kind] = None
        # short
        if len(sizes) < 2 or self.plans[call.kind] is None:
            return None
        return call, inputs

    def _step_back(self, module: nn.Module, error: NotPositionWiseError) -> None:
        """Warn that a module failed the self-check, and tile the experts of a mixture."""
        below = parts_below(module) if self.method == "forward" else []
        if self.is_leader and self.requested and not below:
            raise error
        # From now on, because a recompute in the backward pass must repeat the forward pass.
        self.untiled = True
        if not self.is_leader or self.is_lone_norm:
            return
        instead = "Nobody named it, so it runs untiled."
        for path, part in below:
            instead = "Below its router its experts run in tiles."
            if get_patch(part, TiledPatch) is None:
                tileable = Tileable(f"{self.name}.{path}", part, named=self.requested)
                patch_tiled(tileable, self.tiling, self.needs, self.owner)
        warn(f"{error} {instead}", once=f"untiled {self.kind}")

    def _may_pend(self, module: nn.Module, call: TiledCall, inputs: list[Tensor]) -> bool:
        """Whether the output may be pending, because what follows may take it: see NOTE [Pending]."""
        if not (self.pends and self.needs.pending and call.differentiable) or call.plan.output is None:
            return False
        # Hooks would compute it. Those that record do so in a forward pass alone, and its recompute must run alike.
        for part in (module, *call.function.inside):
            if has_hooks(part, _OF_ENGINES):
                return False
        return not any(map(Tensor.is_inference, inputs))


def _heads_are_swapped(args: tuple[Any, ...]) -> bool:
    """Whether the first argument is a view ``[B, N, S, D]`` of heads that lie in memory as ``[B, S, N, D]``."""
    if not args or not isinstance(args[0], Tensor) or args[0].dim() != 4 or args[0].is_contiguous():
        return False
    return args[0].transpose(1, 2).is_contiguous()
