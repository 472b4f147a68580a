"""Attention of a few heads at a time: queries, keys and values of all heads are never alive together.

NOTE [Head tiles]
An attention module runs once for each part of its heads, with the rows of its query, key and value projections that
belong to them, up to the input of its output projection. Nothing of that is saved: the backward pass runs each part
again with a graph and takes its gradients. This is UPipe (arXiv:2602.21196) as a function of the module, whose code
does not change. Parts consist of whole groups of query heads that share a key-value head, so each row of the
projections gets its gradient from one part, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.kept import keeping, kept_or
from lt_tiled.modules.find import walk
from lt_tiled.modules.patch import Order, Patch, uncompiled, without_compiler
from lt_tiled.sequence_parallel.region import Region, current, entered
from lt_tiled.sequence_parallel.states import find_mixers, has_heads
from lt_tiled.tiling.deferred import Deferred
from lt_tiled.tiling.layout import each_tile
from lt_tiled.tiling.recompute import (
    Precision,
    RandomState,
    SavedCounter,
    hidden_from_checkpoints,
    random_state_kept,
    saves_elsewhere,
    wants_graph,
)
from lt_tiled.tiling.weights import Substituted, Weight, Work, paired, trainable_weights

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class HeadTilesPatch(Patch):
    """On an attention module whose heads are computed in parts."""

    order = Order.HEADS

    def __init__(self, path: str) -> None:
        self.path = path

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = current()
        if region is None or region.head_tiles == 1:
            return self.inner(module, *args, **kwargs)
        parts = _cut_heads(module, region.head_tiles, region.size)
        if len(parts) < region.head_tiles:
            inform(
                f"{self.path} computes its heads in {len(parts)} parts instead of {region.head_tiles}: each part has"
                f" whole groups of query heads, and at least one head for each of {region.size} ranks",
                once=f"head tiles {region.owner}",
            )
        if len(parts) == 1:
            return self.inner(module, *args, **kwargs)
        region.check_recompute()
        hidden = args[0] if args else kwargs.pop("hidden_states", None)
        leaves = [t for t in pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)]
        if not isinstance(hidden, Tensor) or any(t.requires_grad for t in leaves):
            raise _no_parts(f"{self.path} is called with other tensors that want a gradient than hidden states")
        if hooked := Work(module.forward, (module,)).hooked():
            raise ValueError(
                f"{self.path} has a hook on its {hooked}, which would see a part of the heads: remove it, or set"
                " head_tiles=1."
            )
        if isinstance(hidden, Deferred):
            hidden = hidden.value("attention in head tiles")
        call = _Call(module, self, region, parts, args[1:], kwargs, Precision.now(hidden.device))
        attended = _HeadTiles.apply(call, hidden, *(weight.tensor for weight in call.weights()))
        output = module.o_proj(attended)
        return pytree.tree_map(lambda leaf: output if leaf is _OUTPUT else leaf, call.output)


class _Part(NamedTuple):
    """Some heads: the rows of each projection, and the columns of the output projection's input."""

    queries: slice
    keys: slice

    def rows(self, projection: str) -> slice:
        return self.queries if projection == "q_proj" else self.keys


def _cut_heads(module: Any, tiles: int, size: int) -> list[_Part]:
    """Cut the heads into at most ``tiles`` parts, each of which has at least one query head for each rank."""
    width = module.head_dim
    heads, keys = (linear.out_features // width for linear in (module.q_proj, module.k_proj))
    group, tiles = heads // keys, min(tiles, keys)
    while tiles > 1 and keys // tiles * group < size:
        tiles -= 1
    cuts = [keys * index // tiles * width for index in range(tiles + 1)]
    return [_Part(slice(low * group, high * group), slice(low, high)) for low, high in pairwise(cuts)]


def _no_parts(reason: str) -> ValueError:
    return ValueError(f"{reason}, so its heads cannot be computed in parts: set head_tiles=1.")


_OUTPUT = object()


@dataclass(eq=False)
class _Call:
    module: Any
    patch: HeadTilesPatch
    region: Region
    parts: list[_Part]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Precision
    output: Any = None
    """What the module returned, with ``_OUTPUT`` in place of its tensor."""
    random: RandomState | None = None
    """The generators' state before the forward pass, if it drew numbers."""

    def weights(self) -> list[Weight]:
        """Return the trainable weights in front of the output projection."""
        found = trainable_weights(self.module.modules())
        return [weight for weight in found if not any(owner is self.module.o_proj for owner, _ in weight.places)]

    def run(self, part: _Part, hidden: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, _Projections]:
        """Return the input of the output projection for some heads, and the mode in which it was computed."""
        mode = _Projections(self.patch.path, self.module, hidden, part, pairs)
        try:
            with entered(self.region), keeping(None), uncompiled(mode):
                output = self.patch.inner(self.module, hidden, *self.args, **self.kwargs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError | dist.DistError):
                raise
            raise ValueError(
                f"{self.patch.path} ({type(self.module).__name__}) cannot compute some of its heads ({error}): what"
                " belongs to heads, as a norm or a mask, may be that of all of them. Set head_tiles=1."
            ) from error
        finally:
            mode.end()
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(tensors) != 1 or tensors[0] is not mode.found:
            owner = f"{self.patch.path} ({type(self.module).__name__})"
            raise _no_parts(f"{owner} does not return what its o_proj returns and nothing else")
        self.output = pytree.tree_map(lambda leaf: _OUTPUT if leaf is mode.found else leaf, output)
        return tensors[0], mode


class _Projections(Substituted):
    """Computes the rows of the projections that belong to some heads, and lets the output projection return its input.

    Where gradients are on, a graph begins at the output of each projection.
    """

    def __init__(
        self, path: str, module: Any, hidden: Tensor, part: _Part, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(pairs)
        self._path: str = path
        self._hidden: Any = hidden
        for name in _PROJECTIONS:
            self._linears[id(module._modules[name].weight)] = partial(self._project, name, module._modules[name])
        self._part = part
        self.found: Tensor | None = None
        """The input of the output projection."""
        self.outputs: dict[str, Tensor] = {}
        """Those of the other projections, which have the module's own input."""

    def _project(self, name: str, linear: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if name == "o_proj":
            self.found = input
            return input
        if name in self.outputs or input is not self._hidden:
            what = "run twice" if name in self.outputs else "not given the module's own input"
            raise _no_parts(f"{self._path}.{name} is {what}")
        rows = self._part.rows(name)
        with torch.no_grad():
            out = F.linear(input, linear.weight[rows], None if linear.bias is None else linear.bias[rows])
        self.outputs[name] = out.requires_grad_(torch.is_grad_enabled())
        return out

    def end(self) -> None:
        super().end()
        self._hidden = None


class _HeadTiles(torch.autograd.Function):
    """Attention up to its output projection; the inputs are hidden states and trainable weights."""

    @staticmethod
    @hidden_from_checkpoints()
    def forward(ctx: Any, call: _Call, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(hidden)

        def compute() -> tuple[Tensor, Any]:
            start, whole = RandomState.now(hidden.device), None
            for part in each_tile(call.parts):
                out = call.run(part, hidden, [])[0]
                whole = out.new_empty(*out.shape[:-1], call.parts[-1].queries.stop) if whole is None else whole
                whole[..., part.queries] = out
            call.random = None if start.same_as(RandomState.now(hidden.device)) else start
            assert whole is not None
            return whole, call.output

        # keep="exchange" is refused with head tiles
        output, call.output = kept_or(None, compute, communicates=call.region.size > 1)
        return output

    @staticmethod
    @without_compiler
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call: _Call = ctx.call
        if wants_graph([gradient]):
            raise RuntimeError(
                f"{call.patch.path}: attention in head tiles has no second derivative, and this backward pass is"
                " differentiated (create_graph=True) or batched (is_grads_batched=True). Call it"
                " without, or set head_tiles=1."
            )
        (hidden,) = ctx.saved_tensors
        gradients = _Gradients(call, hidden, ctx.needs_input_grad[1])
        random = nullcontext() if call.random is None else random_state_kept(hidden.device, call.random)
        saved = SavedCounter() if saves_elsewhere() else nullcontext()
        with random, torch.enable_grad(), call.autocast.context(), saved:
            for part in each_tile(call.parts):
                gradients.add(part, gradient[..., part.queries])
        of_weights = [gradients.of_weights.get(id(weight)) for weight in gradients.weights]
        return None, gradients.of_hidden, *of_weights


class _Gradients:
    """The gradients of one call, summed over the parts of its heads."""

    def __init__(self, call: _Call, hidden: Tensor, wants_hidden: bool) -> None:
        self.call, self.hidden, self.wants_hidden = call, hidden.detach(), wants_hidden
        self.weights = call.weights()
        projections = {call.module._modules[name] for name in _PROJECTIONS}
        self.others = [weight for weight in self.weights if projections.isdisjoint(dict(weight.places))]
        """The weights that belong to no projection."""
        self.of_hidden: Tensor | None = None
        self.of_weights: dict[int, Tensor] = {}
        """By the ids of the weights."""

    def add(self, part: _Part, gradient: Tensor) -> None:
        """Compute some heads again with a graph, and add their gradients."""
        x = self.hidden.view_as(self.hidden).requires_grad_(self.wants_hidden)
        leaves = [weight.now()[-1].detach().requires_grad_() for weight in self.others]
        out, mode = self.call.run(part, x, paired(self.others, leaves) if leaves else [])
        targets, weights = list(mode.outputs.values()), []
        for weight, leaf in zip(self.others, leaves, strict=True):
            for tensor in (leaf, *weight.now()):
                if tensor.requires_grad:  # custom autograd Functions get the weights themselves: NOTE [Substitution]
                    targets.append(tensor)
                    weights.append(weight)
        if self.wants_hidden:
            targets.append(x)
        with self.call.autocast.disabled():
            found: list[Tensor | None] = [*torch.autograd.grad(out, targets, gradient, allow_unused=True)]
        del out
        with torch.no_grad():
            self._add_projections(part, list(mode.outputs), found)
            for weight, own in zip(weights, found, strict=False):
                if own is not None:
                    self._sum_of(weight).add_(own)
            if self.wants_hidden and (own := found[-1]) is not None:  # of what is no projection of it
                self.of_hidden = own if self.of_hidden is None else self.of_hidden.add_(own)

    def _add_projections(self, part: _Part, names: Sequence[str], found: list[Tensor | None]) -> None:
        """Take the gradients of projections out of a list, and add those of their input, weights and biases."""
        x = self.hidden.reshape(-1, self.hidden.shape[-1])
        gradients, weights = [], []
        for name in names:
            gradient, linear, rows = found.pop(0), self.call.module._modules[name], part.rows(name)
            if gradient is None:
                continue
            gradient = gradient.reshape(-1, gradient.shape[-1])
            for weight in self.weights:
                if (linear, "weight") in weight.places:
                    self._sum_of(weight)[rows] = gradient.t() @ x.to(gradient.dtype)
                elif (linear, "bias") in weight.places:
                    self._sum_of(weight)[rows] = gradient.sum(0)
            gradients.append(gradient)
            weights.append(linear.weight[rows])
        if not self.wants_hidden or not gradients:
            return
        # One product for queries, keys and values: the sum over the parts is rounded as often as without parts.
        left, right = torch.cat(gradients, -1), torch.cat(weights).to(gradients[0].dtype)
        del gradients, gradient, weights
        if self.of_hidden is None:
            self.of_hidden = (left @ right).view(self.hidden.shape).to(self.hidden.dtype)
        elif self.of_hidden.dtype == left.dtype:
            self.of_hidden.view(-1, self.of_hidden.shape[-1]).addmm_(left, right)
        else:
            self.of_hidden += (left @ right).view(self.hidden.shape)

    def _sum_of(self, weight: Weight) -> Tensor:
        if id(weight) not in self.of_weights:
            self.of_weights[id(weight)] = torch.zeros_like(weight.tensor, requires_grad=False)
        return self.of_weights[id(weight)]


def find_attention(modules: Sequence[tuple[str, nn.Module]], tiles: int) -> list[tuple[str, nn.Module]]:
    """Return the attention modules in these, whose heads can be computed in parts.

    Raise ``ValueError`` if there are none, and no layers whose state has heads.
    """
    found, others = [], set()
    state_layers = find_mixers(modules)
    mixers = {module for _, module in state_layers}
    for block_path, block in modules:
        for path, module in [(block_path, block), *walk(block, block_path)]:
            kinds = {type(module._modules.get(name)) for name in _PROJECTIONS}
            if type(None) in kinds or module in mixers:
                continue
            others |= kinds - {nn.Linear}
            if kinds == {nn.Linear} and isinstance(getattr(module, "head_dim", None), int):
                linears: Any = module
                # Queries with a gate beside them in one projection, as in Qwen3-Next, have wider rows.
                if linears.q_proj.out_features == linears.o_proj.in_features:
                    found.append((path, module))
    if not found and not has_heads(state_layers):
        layers = " and ".join(sorted(f"{kind.__module__}.{kind.__name__}" for kind in others))
        remedy = f"put nn.Linear in place of {layers} (LoRA: choose other target_modules), or " if others else ""
        raise ValueError(
            f"head_tiles={tiles} needs attention modules with head_dim and four linear layers as Llama has them"
            f" ({', '.join(_PROJECTIONS)}), and there are none in {modules[0][0]}:"
            f" {remedy}set head_tiles=1."
        )
    return found
