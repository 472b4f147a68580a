"""The self-check: a few tokens through the module, at once and in tiles, must give the same result."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from itertools import accumulate, chain
from math import ceil, prod
from types import CellType, FrameType, GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.layout import TokenShape
from lt_tiled.tiling.observe import History, Observation
from lt_tiled.tiling.recompute import (
    TOLERANCE,
    RandomState,
    SavedCounter,
    hidden_from_modes,
    random_state_kept,
    version_of,
)
from lt_tiled.tiling.state import Work
from lt_tiled.tiling.tiled_call import TiledCall, Trace

CHECK_TOKENS = 32
_GRADIENT_TOLERANCE = 5e-2
"""The same for gradients of any dtype: a module may compute in 16 bits inside, and weights sum what is rounded."""
_FLOOR = 1e-3
"""Smaller values, relative to the inputs or the outputs' gradients, are compared as if they had this size: they may be
rounding."""
_INFLUENCE = 16.0
"""By what some tokens are multiplied, and by its negative, to see whether others change. In range of float16."""
_UNLESS = "Pass self_check=False only if you know why it differs."
_DRAWS = 8
"""How often random numbers are drawn to see whether all tokens share them."""


class _Sample(TiledCall):
    """A call of a few tokens, which is not compiled."""

    compiled = None


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor]) -> None:
    """Compare a few tokens of a call in the module's own layout with the same tokens in two unequal tiles.

    Compared are the outputs and, where a backward pass may follow, the gradients of arguments and weights for a random
    gradient of the outputs: gates that are initialized to zero hide what is behind them from the outputs alone.

    Raises:
        NotPositionWiseError: If a value differs or is not per token, if random numbers are not drawn for each token
            from torch's generators, if the module changes arguments, buffers or attributes, or if it fails on a few
            tokens.
    """
    before = _observe(call)
    try:
        # An activation checkpoint around it would count what its graphs save, and keep what it computes.
        with hidden_from_modes(inputs[0]), SavedCounter():
            _check(call, inputs, before)
    except BaseException as error:
        before.undo()  # it may run untiled from here
        if isinstance(error, NotPositionWiseError | torch.OutOfMemoryError | MemoryError) or not isinstance(
            error, Exception
        ):
            raise
        raise NotPositionWiseError(
            f"{call.patch.name} fails when it is given a few of its tokens: {error}. Arguments that broadcast over"
            f" tokens must be expanded to all of them before the call. {REMEDY}"
        ) from error


def _observe(call: TiledCall) -> Observation:
    arguments = {str(index): value for index, value in enumerate(call.arguments.others)}
    return Observation(call.patch.name, call.work.modules, REMEDY, History(), arguments, generators=True, shared=False)


def _check(call: TiledCall, inputs: Sequence[Tensor], before: Observation) -> None:
    shape, picked = _pick(call.shape.lead, call.device)
    triples = zip(call.cut(call.flat(inputs), picked), call.per_token, call.wants_grad, strict=True)
    sample = [(shape.unflatten(t) if per_token else t).requires_grad_(wants) for t, per_token, wants in triples]

    def cut(*sizes: int) -> TiledCall:
        ends = list(accumulate(sizes))
        bounds = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return _Sample(call.work, call.patch, sample, call.arguments, shape, bounds)

    one, kept = cut(shape.tokens), kept_tensors(call.work)
    # In the module's own mode and with a graph, if one is wanted: statistics and auxiliary losses are computed there.
    versions = [version_of(t) for t in sample]
    with random_state_kept(call.device), _Survivors(call.patch.name, call.work):
        start = RandomState.now(call.device)
        output = one.run_tile(one.flat(sample))
        dropout = not start.same_as(RandomState.now(call.device))
        # Where nothing known wants a gradient, what does is not known.
        check_closed(output, None if call.differentiable else (), call.work, kept, call.patch.name)
        del output
        if before.drew and all(_draws_elsewhere(one, sample) for _ in range(_DRAWS)):  # not another thread
            raise NotPositionWiseError(
                f"{call.patch.name} draws random numbers from Python, NumPy or a torch.Generator of its own, which the"
                f" recompute would not repeat. Draw them from torch's default generators. {REMEDY}"
            )
        after = _observe(call)  # the first run may fill caches; the second one has fewer tokens
        call.run_tile(_scaled(one, sample, torch.tensor(0.5), slice(0, max(1, shape.tokens // 2))))
        change = next(chain(before.changes(attributes=False), after.changes()), None)
        del after  # which holds what the first run kept
        if change is not None:
            raise NotPositionWiseError(
                f"{call.patch.name} changes {change[0]} in its forward, which would be changed once for each tile, and"
                f" again in the recompute. Return it as an output instead. {REMEDY}"
            )
        if versions != [version_of(t) for t in sample]:
            raise NotPositionWiseError(
                f"{call.patch.name} changes its input in place, which tiles cannot do for the caller. Make the change"
                f" out of place. {REMEDY}"
            )
        if dropout and len(call.bounds) > 1:
            _check_dropout(call, one.flat(sample))
    if len(call.bounds) == 1:  # it cannot differ from the untiled call, but runs again in the backward pass
        call.patch.learned.checked.add(call.mode)
        return
    with random_state_kept(call.device):
        most = max(1, shape.tokens * 3 // 4)  # so unequal that sums over tokens differ beyond rounding
        if _compare_tiles(cut(shape.tokens), cut(most, shape.tokens - most), sample):
            call.patch.learned.checked.add(call.mode)


class _EqualDraws(TorchDispatchMode):
    """Lets all tokens of all tiles draw the same random numbers, so that dropout does not tell tiles apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        with self:
            drawn = func.decompose(*args, **kwargs)  # inference mode does not take dropout apart
        if drawn is not NotImplemented:
            return drawn
        torch.manual_seed(0)
        drawn = func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(drawn[1])  # the backward pass scales both calls alike
        if isinstance(drawn, Tensor) and (drawn.is_floating_point() or drawn.dtype == torch.bool):
            drawn.fill_(1.0 if "bernoulli" in func.name() else 0.6)  # keeps, in most masks
        elif isinstance(drawn, Tensor) and drawn.numel() and "randperm" not in func.name():
            drawn.fill_(0 if "multinomial" in func.name() else int(drawn.flatten()[0]))
        return drawn


class _Survivors(TorchFunctionMode):
    """Refuses a run that keeps a tensor with a graph outside of its outputs and of the modules' attributes.

    Those in attributes of the modules are seen by :func:`check_closed`, which knows what the output depends on.
    """

    def __init__(self, name: str, work: Work) -> None:
        super().__init__()
        self._name, self._work = name, work
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.grad_fn is not None:
            self._made.append(weakref.ref(result))
        return result

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        attributes = {id(t) for t in kept_tensors(self._work).values()}
        for reference in self._made if exc[0] is None else []:
            tensor = reference()
            if tensor is not None and id(tensor) not in attributes and _is_kept(tensor):
                raise NotPositionWiseError(
                    f"{self._name} keeps a tensor of shape {list(tensor.shape)} with a graph outside of its outputs, as"
                    f" for an auxiliary loss, which would be that of one tile. Return it as an output instead. {REMEDY}"
                )


def _is_kept(value: Any, own: Any = None) -> bool:
    """Whether anything but a frame, a cell, a generator or a tuple of its own graph refers to a tensor."""
    passing = (CellType, FrameType, GeneratorType)
    holders = [holder for holder in gc.get_referrers(value) if not isinstance(holder, passing) and holder is not own]
    return any(type(holder) is not tuple or _is_kept(holder, holders) for holder in holders)


def _check_dropout(call: TiledCall, flat: Sequence[Tensor]) -> None:
    """Refuse one random mask for several tokens, of which each tile would draw its own: equal tokens show it.

    Raises:
        NotPositionWiseError: If the outputs of equal tokens differ from run to run, and next to nothing in each run.
    """
    # One token less: all tokens of a call would run in its own layout, with a mask for each row.
    tokens = next(len(t) for t, per_token in zip(flat, call.per_token, strict=True) if per_token) - 1
    lead = call.shape.tile_lead(tokens)
    runs: list[tuple[Any, ...]] = []
    for which in range(4):  # a mask, a scale of zero or an activation hides some
        pairs = zip(flat, call.per_token, strict=True)
        equal = [_token(t, which).expand(tokens, *t.shape[1:]) if per_token else t for t, per_token in pairs]
        with torch.no_grad():
            runs += zip(*(pytree.tree_leaves(call.run_tile(equal)) for _ in range(_DRAWS)), strict=True)
    for leaves in runs:
        if all(isinstance(t, Tensor) and (t.shape[: len(lead)] == lead or t.shape[:1] == (tokens,)) for t in leaves):
            draws = torch.stack([(t if t.is_complex() else t.double()).reshape(tokens, -1) for t in leaves])
            runs_apart, tokens_apart = (draws - draws[:1]).abs().amax(), (draws - draws[:, :1]).abs().amax()
            if runs_apart > 0 and tokens_apart < 0.01 * runs_apart:  # rounding of a product differs from row to row
                raise NotPositionWiseError(
                    f"{call.patch.name} draws one random mask for all tokens, such as locked dropout or stochastic"
                    f" depth, and each tile would draw another. {REMEDY}"
                )


def _token(flat: Tensor, which: int) -> Tensor:
    """Return the first token, the last one, or the one with the largest or the smallest entries."""
    sizes = flat.detach().reshape(len(flat), -1).float().abs().sum(1)
    index = (0, len(flat) - 1, int(sizes.argmax()), int(sizes.argmin()))[which]
    return flat[index : index + 1]


def _draws_elsewhere(one: TiledCall, sample: Sequence[Tensor]) -> bool:
    """Whether a run draws from the generators that a recompute of tiles does not restore."""
    before = _observe(one)
    one.run_tile(one.cut(one.flat(sample), slice(0, 2)))  # few, so that this takes little time
    return before.drew


def _compare_tiles(one: TiledCall, two: TiledCall, sample: Sequence[Tensor]) -> bool:
    """Compare a call in one tile with the same in two; return whether that shows anything, which zeros do not.

    Raises:
        NotPositionWiseError: If an output or a gradient differs.
    """
    name, tokens = one.patch.name, one.shape.tokens
    with _EqualDraws():
        (whole, whole_trace), (tiled, trace) = one.forward(sample, learn=False), two.forward(sample, learn=False)
    per_token = [index for index, kind in enumerate(trace.layout.kinds) if kind in ("tokens", "flat")]
    for index in per_token:
        what = f"output {trace.layout.names[index]}".strip()
        _compare_outputs(one, sample, whole[index], tiled[index], one.autocast.dtype, f"{what} for {tokens} tokens")
    for index, kind in enumerate(trace.layout.kinds):
        if kind == "constant" and whole[index] != tiled[index]:
            raise NotPositionWiseError(
                f"{name}: output {trace.layout.names[index]} is {whole[index]!r} for {tokens} tokens in their own shape"
                f" and {tiled[index]!r} for a tile of them. {REMEDY}"
            )
    compared = [whole[index] for index in per_token]
    if one.differentiable:
        with _EqualDraws():
            pairs = zip(one.flat(sample), one.wants_grad, strict=True)
            leaves = pytree.tree_leaves(one.run_tile([t.requires_grad_(wants) for t, wants in pairs]))
        for index in per_token:
            a, b = whole[index], leaves[index].detach().reshape(whole[index].shape)
            what = "output without and with a graph, in which tiles run forward and backward,"
            _compare_outputs(one, sample, a, b, one.autocast.dtype, what)
    given = [
        torch.randn_like(leaf) if index in per_token and leaf.is_floating_point() else None
        for index, leaf in enumerate(whole)
    ]
    _check_influence(one, sample, whole, whole_trace, given)
    if one.differentiable:
        scale = sum(float(g.norm()) for g in given if g is not None)
        with _EqualDraws():
            gradients = one.backward(whole_trace, sample, given), two.backward(trace, sample, given)
        for what, a, b in zip(_names_of_gradients(one), *gradients, strict=True):
            if a is not None and b is not None:
                _compare(a, b, _GRADIENT_TOLERANCE, _FLOOR * scale, f"gradient of {what} for {tokens} tokens", name)
                compared.append(a)
    return any(bool(t.any()) for t in compared)


def _names_of_gradients(call: TiledCall) -> list[str]:
    arguments = [f"argument {index}" for index, wants in enumerate(call.wants_grad) if wants]
    return [*arguments, *(f"{type(w.places[0][0]).__name__}.{w.places[0][1]}" for w in call.weights)]


def _check_influence(
    one: TiledCall, sample: Sequence[Tensor], outputs: Sequence[Any], trace: Trace, given: Sequence[Tensor | None]
) -> None:
    """Refuse a module in which large changes of some tokens change others, or gradients that others alone receive.

    Mixing that is too weak for the comparison of tiles shows here: what is compared is computed with the same shapes,
    and a token whose outputs have no gradient gets none at all.

    Args:
        one: The call in one tile.
        sample: Its arguments.
        outputs: The leaves of its output.
        trace: What its forward pass left.
        given: The gradients of its per-token outputs; other outputs have none and are not compared.

    Raises:
        NotPositionWiseError: If an output of an unchanged token differs, or a gradient of the unchanged tokens.
    """
    coordinates = torch.meshgrid(*(torch.arange(n, device=one.device) for n in one.shape.lead), indexing="ij")
    changed = torch.stack(coordinates).sum(0).flatten() % 2 == 1  # some in each row, and in each column

    def unchanged(t: Tensor) -> Tensor:
        flat = t.detach().reshape(one.shape.tokens, -1)
        return flat.masked_fill(changed[:, None], 0).view_as(t)

    received = [None if g is None else unchanged(g) for g in given]
    scale = sum(float(g.norm()) for g in received if g is not None)
    dtypes = [one.autocast.dtype, *(leaf.dtype for leaf in outputs if isinstance(leaf, Tensor))]
    bound = max(TOLERANCE.get(dtype, 0.0) for dtype in (*dtypes, *(t.dtype for t in sample)) if dtype is not None)
    wide = [per_token for per_token, wants in zip(one.per_token, one.wants_grad, strict=True) if wants]
    wide += [False] * len(one.weights)

    def gradients(run: _Run, factor: float = 1.0) -> list[Tensor | None]:
        with _EqualDraws():
            found = one.backward(*run, [None if g is None else g * factor for g in received])
        return [g if g is None or g.layout is torch.strided else g.to_dense() for g in found]

    def compare(expected: list[Tensor | None], found: list[Tensor | None]) -> None:
        for what, a, b, per_token in zip(_names_of_gradients(one), expected, found, wide, strict=False):
            if a is None or b is None or not bool(b.isfinite().all()):  # 0 * inf, where the others overflow
                continue
            if per_token:
                kept = unchanged(b)
                if not torch.equal(kept, b):
                    raise NotPositionWiseError(
                        f"{one.patch.name} is not position-wise: its gradient of {what} is not zero at tokens whose"
                        f" outputs have no gradient (at most {float((b - kept).abs().max()):.1e}). {REMEDY} {_UNLESS}"
                    )
                a, b = unchanged(a), kept
            what = f"gradient of {what} for the same tokens, while others change,"
            _compare(a, b, bound, scale * _rounding(a.dtype, bound), what, one.patch.name)

    def given_alone(run: _Run) -> list[Tensor | None]:
        """Return gradients without what a hook or a custom Function adds to them: a loss of each token, for example."""
        pairs = zip(gradients(run, 2.0), gradients(run), strict=True)
        return [None if a is None or b is None else a - b for a, b in pairs]

    first = trace, sample
    before = gradients(first) if one.differentiable else []

    def check(run: _Run, found: list[Tensor | None]) -> None:
        try:
            compare(before, found)
        except NotPositionWiseError:
            compare(given_alone(first), given_alone(run))

    check(first, before)
    for factor in (_INFLUENCE, -_INFLUENCE):
        flat = _scaled(one, sample, torch.where(changed, factor, 1.0))
        pairs = zip(flat, one.per_token, strict=True)
        scaled = [one.shape.unflatten(t) if per_token else t for t, per_token in pairs]
        try:
            with _EqualDraws():
                leaves, scaled_trace = one.forward(scaled, learn=False)
            now = gradients((scaled_trace, scaled)) if one.differentiable else []
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:  # values that the module does not take
            return
        for a, b, g in zip(outputs, leaves, given, strict=True):
            if g is not None:
                what = "output for the same tokens, while others change,"
                _compare_outputs(one, sample, unchanged(a), unchanged(b), None, what)
        check((scaled_trace, scaled), now)
        del now  # as large as the weights


_Run = tuple[Trace, Sequence[Tensor]]


def _compare_outputs(
    one: TiledCall, sample: Sequence[Tensor], a: Tensor, b: Tensor, autocast: torch.dtype | None, what: str
) -> None:
    """Compare outputs, with the tolerance of their dtype and of autocast's, where that explains a difference too."""
    bound = max(TOLERANCE.get(dtype, 0.0) for dtype in (a.dtype, autocast or a.dtype))
    _compare(a, b, bound, _noise(one, sample, bound), what, one.patch.name)


def _noise(one: TiledCall, sample: Sequence[Tensor], bound: float) -> float:
    """Return the norm below which outputs may be rounding alone, as of a sum over what a layer norm returns."""
    inputs = [t for t, per_token in zip(sample, one.per_token, strict=True) if per_token and t.is_floating_point()]
    return sum(float(t.detach().norm()) * _rounding(t.dtype, bound) for t in inputs if bound)


def _rounding(dtype: torch.dtype, bound: float) -> float:
    return min(_FLOOR, 10 * torch.finfo(dtype).eps / bound)


def _scaled(one: TiledCall, sample: Sequence[Tensor], factors: Tensor, index: slice = slice(None)) -> list[Tensor]:
    """Return the arguments for some tokens, with the hidden states multiplied by a factor for each token."""
    flat = one.flat(sample)
    first = next(i for i, t in enumerate(flat) if one.per_token[i] and t.is_floating_point())
    flat[first] = flat[first] * factors.to(flat[first]).view(-1, *[1] * (flat[first].dim() - 1))
    return one.cut(flat, index)


def _pick(lead: Sequence[int], device: torch.device) -> tuple[TokenShape, Tensor]:
    """Return the leading dimensions of a few tokens from all over ``lead``, and their indices among all tokens.

    Several entries of each dimension, where it has them: what mixes along a batch must be seen too.
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


def _compare(whole: Tensor, tiled: Tensor, bound: float, floor: float, what: str, module: str) -> None:
    if whole.shape != tiled.shape:
        raise NotPositionWiseError(
            f"{module} is not position-wise: its {what} has the shape {list(whole.shape)}, and {list(tiled.shape)} from"
            f" tiles. {REMEDY}"
        )
    if whole.is_complex():
        whole, tiled = (torch.view_as_real(value.resolve_conj()) for value in (whole, tiled))
    wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
    difference = float((whole.to(wide) - tiled.to(wide)).norm() / whole.to(wide).norm().clamp_min(max(floor, 1e-30)))
    if not difference <= bound and bool(whole.isfinite().all()):
        raise NotPositionWiseError(
            f"{module} is not position-wise: its {what} differs by {difference:.1e} between two ways to compute it"
            f" (relative; rounding explains {bound:.0e}). {REMEDY} {_UNLESS}"
        )
