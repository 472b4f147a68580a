"""A few tokens of a call, and runs on them: at once, in tiles, and while some of them change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.errors import REMEDY
from lt_tiled.tiling.graph import GraphRecorder
from lt_tiled.tiling.layout import TokenShape
from lt_tiled.tiling.observe import History, Observation
from lt_tiled.tiling.recompute import RandomState, version_of
from lt_tiled.tiling.tiled_call import TiledCall

CHECK_TOKENS = 32
_INFLUENCE = 16.0
"""By what some tokens are multiplied, and by its negative, to see whether others change. In range of float16."""


class _Uncompiled(TiledCall):
    compiles = False


class Probe:
    """A few tokens of a call, in the module's own layout, and what the call's modules held ``before`` they ran."""

    def __init__(self, call: TiledCall, inputs: Sequence[Tensor], before: Observation) -> None:
        self.call, self.name, self.before = call, call.patch.name, before
        self.random, self.graph = RandomState.now(call.device), GraphRecorder()
        self.shown = False
        """Whether anything that was compared is not zero."""
        self.shape, picked = _pick(call.shape.lead, call.device)
        self.inputs = self.in_shape(call.cut(call.flat(inputs), picked))
        for tensor, wants_grad in zip(self.inputs, call.wants_grad, strict=True):
            tensor.requires_grad_(wants_grad)
        self.versions = [version_of(tensor) for tensor in self.inputs]
        self.one = self.in_tiles(0, self.shape.tokens)

    def in_tiles(self, *ends: int) -> TiledCall:
        """Return the call of these tokens in tiles that end there."""
        call = self.call
        return _Uncompiled(call.work, call.patch, self.inputs, call.arguments, self.shape, list(pairwise(ends)))

    def in_shape(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """Return flat arguments in the module's own layout."""
        pairs = zip(flat, self.call.per_token, strict=True)
        return [self.shape.unflatten(t) if per_token else t for t, per_token in pairs]

    def scaled(self, factors: Tensor | float, index: slice = slice(None)) -> list[Tensor]:
        """Return the flat arguments of some tokens, the hidden states times a factor, or one for each token."""
        flat = self.one.flat(self.inputs)
        first = next(i for i, t in enumerate(flat) if self.one.per_token[i] and t.is_floating_point())
        factors = torch.as_tensor(factors).to(flat[first])
        flat[first] = flat[first] * factors.view(-1, *[1] * (flat[first].dim() - 1))
        return self.one.cut(flat, index)

    def run_with_graph(self) -> list[Any]:
        """Return the leaves of the output for all tokens at once, computed with a graph from the arguments on."""
        leaves = [t.requires_grad_(wants) for t, wants in zip(self.scaled(1.0), self.one.wants_grad, strict=True)]
        with FixedDraws(self):
            return pytree.tree_leaves(self.one.run_tile(leaves))

    def count_draws(self, tiles: int) -> int:
        """Return how many random numbers the module draws for all tokens in so many tiles."""
        flat, tokens, draws = self.one.flat(self.inputs), self.shape.tokens, FixedDraws(self)
        with torch.no_grad(), draws:
            for low, high in pairwise(index * tokens // tiles for index in range(tiles + 1)):
                self.one.run_tile(self.one.cut(flat, slice(low, high)))
        return draws.count


class Run:
    """A forward pass without a graph, in which all tokens but the changed ones draw the same random numbers."""

    def __init__(self, probe: Probe, call: TiledCall, inputs: Sequence[Tensor], changed: Tensor | None = None) -> None:
        self.call, self.inputs, self.draws = call, inputs, FixedDraws(probe, changed)
        with self.draws:
            self.outputs, self.trace = call.forward(inputs, learn=False)

    def gradients(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of arguments and weights for these gradients of the outputs' leaves."""
        if not self.call.differentiable:
            return []
        with self.draws:
            found = self.call.backward(self.trace, self.inputs, given)
        return [g if g is None or g.layout is torch.strided else g.to_dense() for g in found]

    def gradients_of_given(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients without what does not scale with those of the outputs, such as a loss of a hook."""
        twice = self.gradients([None if g is None else 2 * g for g in given])
        pairs = zip(twice, self.gradients(given), strict=True)
        return [None if a is None or b is None else a - b for a, b in pairs]


class Runs:
    """The runs of a probe's tokens that are compared."""

    def __init__(self, probe: Probe) -> None:
        self.probe, tokens, device = probe, probe.shape.tokens, probe.call.device
        self.whole = Run(probe, probe.one, probe.inputs)
        # Two rows would draw as many masks as two tiles.
        self.draws = [probe.count_draws(tiles) for tiles in (1, 2, 3)] if self.whole.draws.count else []
        """How many random numbers one, two and three tiles draw, if any."""
        most = max(1, tokens * 3 // 4)  # so unequal that sums over tokens differ beyond rounding
        self.tiled = Run(probe, probe.in_tiles(0, most, tokens), probe.inputs)
        self.with_graph = probe.run_with_graph() if probe.one.differentiable else []
        kinds = self.tiled.trace.layout.kinds
        self.outputs = [index for index, kind in enumerate(kinds) if kind in ("tokens", "flat")]
        """The indices of the leaves that are per token."""
        self.given: list[Tensor | None] = [None] * len(kinds)
        """A random gradient for each of them."""
        for index in self.outputs:
            if (output := self.whole.outputs[index]).is_floating_point():
                self.given[index] = torch.randn_like(output)
        places = torch.meshgrid(*(torch.arange(size, device=device) for size in probe.shape.lead), indexing="ij")
        self._changed = torch.stack(places).sum(0).flatten() % 2 == 0  # some in each row, and in each column
        self.beside_others: list[Run] = []
        """Runs in which half of the tokens have other values; fewer if the module does not take such values."""
        for factor in (_INFLUENCE, -_INFLUENCE):
            inputs = probe.in_shape(probe.scaled(torch.where(self._changed, factor, 1.0)))
            try:
                self.beside_others.append(Run(probe, probe.one, inputs, self._changed))
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception:
                break

    @property
    def targets(self) -> list[tuple[str, bool]]:
        """The arguments and weights that get gradients, by name, and whether these are per token."""
        call = self.probe.one
        if not call.differentiable:
            return []
        arguments = enumerate(zip(call.wants_grad, call.per_token, strict=True))
        targets = [(f"argument {index}", per_token) for index, (wants, per_token) in arguments if wants]
        for weight in call.weights:
            owner, name = weight.places[0]
            targets.append((f"{type(owner).__name__}.{name}", False))
        return targets

    def unchanged(self, tensor: Tensor) -> Tensor:
        """Return a per-token tensor with zeros for the tokens that change in :attr:`beside_others`."""
        flat = tensor.detach().reshape(len(self._changed), -1)
        return flat.masked_fill(self._changed[:, None], 0).view_as(tensor)


class FixedDraws(TorchDispatchMode):
    """Lets all tokens but the changed ones draw the same random numbers, as if no tiles were there, and counts them."""

    def __init__(self, probe: Probe, changed: Tensor | None = None) -> None:
        super().__init__()
        self._start, self._shape, self._changed = probe.random, probe.shape, changed
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        with self:
            composed = func.decompose(*args, **kwargs)  # inference mode does not take dropout apart
        if composed is not NotImplemented:
            return composed
        self._start.set()
        drawn = func(*args, **kwargs)
        self.count += (drawn if isinstance(drawn, Tensor) else drawn[0]).numel()
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(drawn[1])  # the backward pass scales both calls alike
        if isinstance(drawn, Tensor) and drawn.numel():
            self._fix(drawn, func.overloadpacket.__name__.rstrip("_"))
        return drawn

    def _fix(self, drawn: Tensor, operator: str) -> None:
        if not (drawn.is_floating_point() or drawn.dtype == torch.bool):
            if operator != "randperm":
                drawn.fill_(0 if operator == "multinomial" else int(drawn.flatten()[0]))
            return
        keeps, drops = (1.0, 0.0) if operator == "bernoulli" else (0.6, 0.3)  # in most masks
        drawn.fill_(keeps)
        covers = self._shape.covers(drawn)
        if self._changed is not None and (covers or drawn.shape[:1] == self._changed.shape):
            lead = self._shape.lead if covers else self._changed.shape
            drawn.masked_fill_(self._changed.view(*lead, *[1] * (drawn.dim() - len(lead))), drops)


def observed(call: TiledCall) -> Observation:
    """Return what the modules and arguments of a call hold now."""
    arguments = {str(index): value for index, value in enumerate(call.arguments.others)}
    return Observation(call.patch.name, call.work.modules, REMEDY, History(), arguments, generators=True, shared=False)


def _pick(lead: Sequence[int], device: torch.device) -> tuple[TokenShape, Tensor]:
    """Return the leading dimensions of a few tokens from all over ``lead``, and their indices among all tokens.

    Several entries of each dimension, where it has them: what mixes along a batch must also be seen.
    """
    several = {2: 5, 3: 3}.get(len(lead), 2)  # two would hide what moves entries by two; all of them are at most 64
    counts = [min(size, several) for size in lead]
    for index in reversed(range(len(lead))):
        counts[index] = min(lead[index], max(counts[index], ceil(CHECK_TOKENS * counts[index] / prod(counts))))
    picked = torch.zeros(1, dtype=torch.int64, device=device)
    for size, count in zip(lead, counts, strict=True):
        chosen = torch.arange(count, device=device) * (size - 1) // max(count - 1, 1)
        picked = (picked[:, None] * size + chosen).flatten()
    return TokenShape(torch.Size(counts)), picked
