"""The self-check: the properties that a module must have to run in tiles, checked on a few tokens of its first call.

A property is a function that returns what contradicts it. Its docstring says what it compares, what may differ, and
which modules it catches. :data:`OF_ANY_CALL` and :data:`OF_TILES` list them in the order in which they are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.probe import Probe, Run, Runs, observed
from lt_tiled.tiling.recompute import TOLERANCE, SavedCounter, hidden_from_modes, random_state_kept, version_of
from lt_tiled.tiling.tiled_call import TiledCall

Problems = Iterable[str]

_GRADIENT_TOLERANCE = 5e-2
"""Of gradients of any dtype in tiles; that of outputs is ``TOLERANCE`` in ``tiling/recompute.py``.

A module may compute in 16 bits inside, and weights sum what is rounded.
"""
_FLOOR = 1e-3
"""Smaller values, relative to the inputs or the outputs' gradients, are compared as if they had this size: they may be
rounding."""
_RUNS = 8
"""How many runs in a row must use a generator of Python: another thread may use it during some."""


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor]) -> None:
    """Check on a few tokens of a call that it may run in tiles, and remember it if they show anything.

    One call of each kind is checked. A call of a kind that failed is, too, so it fails with its own name.

    Raises:
        NotPositionWiseError: If it lacks a property, or fails on a few tokens.
    """
    owner, learned = call.patch.owner, call.patch.learned
    kind = _kind(call, inputs)
    if owner is not None and kind in owner.passed:
        learned.checked.add(call.mode)
        return
    before = observed(call)
    try:
        # An activation checkpoint around it would count what its graphs save, and keep what it computes.
        with hidden_from_modes(inputs[0]), SavedCounter(), random_state_kept(call.device):
            probe, tiled = Probe(call, inputs, before), len(call.bounds) > 1
            _refuse(probe.name, (has_property(probe) for has_property in OF_ANY_CALL))
            if tiled:  # one tile cannot differ from the untiled call, but runs again in the backward pass
                runs = Runs(probe)
                _refuse(probe.name, (has_property(runs) for has_property in OF_TILES))
            if probe.shown or not tiled:
                learned.checked.add(call.mode)
                if owner is not None:
                    owner.passed.add(kind)
    except BaseException as error:
        before.undo()  # it may run untiled from here
        ours = isinstance(error, NotPositionWiseError | torch.OutOfMemoryError | MemoryError)
        if ours or not isinstance(error, Exception):
            raise
        raise NotPositionWiseError(
            f"{call.patch.name} fails when it is given a few of its tokens: {error}. Arguments that broadcast over"
            f" tokens must be expanded to all of them before the call. {REMEDY}"
        ) from error


def _kind(call: TiledCall, inputs: Sequence[Tensor]) -> Hashable:
    """Return what is equal for calls of modules of the same classes, shapes, dtypes and flags."""
    facts: list[Hashable] = [call.mode]
    for part in call.work.parts:
        facts.append(type(part))
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                facts.append((tensor.shape, tensor.dtype, tensor.requires_grad))
    for tensor, per_token in zip(inputs, call.per_token, strict=True):
        shape = tensor.shape[len(call.shape.lead) :] if per_token else tensor.shape
        facts.append((shape, tensor.dtype))
    return tuple(facts)


def _refuse(name: str, contradictions: Iterable[Problems]) -> None:
    for problem in chain.from_iterable(contradictions):
        raise NotPositionWiseError(f"{name} {problem} {REMEDY}")


# Properties of any call


def gradients_arrive(probe: Probe) -> Problems:
    """Compare the attributes with a graph before and after the first run, exactly.

    Catches an auxiliary loss in an attribute and, where no known tensor wants a gradient, weights in plain lists.
    """
    kept = kept_tensors(probe.call.work)
    with probe.graph:
        output = probe.one.run_tile(probe.one.flat(probe.inputs))
    check_closed(output, None if probe.call.differentiable else (), probe.call.work, kept, probe.name)
    return ()


def generators_are_torchs(probe: Probe) -> Problems:
    """Compare the states of all generators but torch's default ones before and after a run, exactly.

    Catches noise from Python, NumPy or a generator of the module's own, which tiles would draw in another order.
    """
    before, runs = probe.before, 0
    while before.drew and runs < _RUNS:
        before, runs = observed(probe.call), runs + 1
        probe.one.run_tile(probe.scaled(1.0, slice(0, 2)))
    if before.drew:
        yield (
            "draws random numbers from Python, NumPy or a torch.Generator of its own, which tiles would draw in another"
            " order. Draw them from torch's default generators."
        )


def state_stays(probe: Probe) -> Problems:
    """Compare tensors before and after the first run, and all else before and after one of fewer tokens, by value.

    Catches running statistics, counters, lists that grow. The first run may fill caches.
    """
    after = observed(probe.call)
    with probe.graph:
        probe.one.run_tile(probe.scaled(0.5, slice(0, max(1, probe.shape.tokens // 2))))
    for change, _ in chain(probe.before.changes(attributes=False), after.changes()):
        yield (
            f"changes {change} in its forward, which would be changed once for each tile, and again in the recompute."
            " Return it as an output instead."
        )


def inputs_stay(probe: Probe) -> Problems:
    """Compare the versions of the arguments before and after the first run, exactly. Catches router jitter in place."""
    if probe.versions != [version_of(tensor) for tensor in probe.inputs]:
        yield "changes its input in place, which tiles cannot do for the caller. Make the change out of place."


def no_graph_is_kept(probe: Probe) -> Problems:
    """Find tensors with a graph that outlive the outputs, but for attributes. Catches a list of auxiliary losses."""
    for tensor in probe.graph.kept(probe.call.work):
        yield (
            f"keeps a tensor of shape {list(tensor.shape)} with a graph outside of its outputs, as for an auxiliary"
            " loss, which would be that of one tile. Return it as an output instead."
        )


OF_ANY_CALL = (gradients_arrive, generators_are_torchs, state_stays, inputs_stay, no_graph_is_kept)


# Properties of tiles


def draws_are_per_token(runs: Runs) -> Problems:
    """Compare how many random numbers are drawn in one, two and three tiles, exactly.

    Catches a mask for all tokens, for each row or for each position, such as locked dropout and stochastic depth.
    """
    if len(set(runs.draws)) > 1:
        yield (
            "draws one random mask for several tokens, such as locked dropout or stochastic depth, and each tile would"
            " draw another."
        )


def outputs_are_those_of_tiles(runs: Runs) -> Problems:
    """Compare outputs of all tokens at once with those of two tiles, but for rounding; constants exactly.

    Catches means, shifts, attention, positions, and branches on the number of tokens.
    """
    layout, tokens = runs.tiled.trace.layout, f"for {runs.probe.shape.tokens} tokens"
    for index, name in enumerate(layout.names):
        whole, tiled = runs.whole.outputs[index], runs.tiled.outputs[index]
        if index in runs.outputs:
            yield from _output_differs(runs, whole, tiled, f"output {name} {tokens}".replace("  ", " "))
        elif layout.kinds[index] == "constant" and whole != tiled:
            yield f"returns {whole!r} as output {name} {tokens} in their own shape, and {tiled!r} for a tile of them."


def outputs_ignore_the_graph(runs: Runs) -> Problems:
    """Compare outputs without and with a graph, but for rounding. Catches a branch on the gradient mode."""
    for index in runs.outputs if runs.with_graph else ():
        whole = runs.whole.outputs[index]
        what = "output without and with a graph, in which tiles run forward and backward,"
        yield from _output_differs(runs, whole, runs.with_graph[index].detach().reshape(whole.shape), what)


def outputs_ignore_other_tokens(runs: Runs) -> Problems:
    """Compare outputs of the same tokens while others change, but for rounding.

    Catches weak mixing without a gradient, and random numbers of one token that others use.
    """
    for run in runs.beside_others:
        for index in runs.outputs:
            before, now = (runs.unchanged(outputs[index]) for outputs in (runs.whole.outputs, run.outputs))
            yield from _output_differs(runs, before, now, "output for the same tokens, while others change,", False)


def gradients_ignore_other_tokens(runs: Runs) -> Problems:
    """Compare gradients that some tokens give while others change, but for rounding; the others' must be zero.

    Catches mixing behind a gate that is zero or small, and mixing in the backward pass alone.
    """
    if any(_gradients_of_some_differ(runs, Run.gradients)):
        yield from _gradients_of_some_differ(runs, Run.gradients_of_given)


def gradients_are_those_of_tiles(runs: Runs) -> Problems:
    """Compare gradients of all tokens at once with those of two tiles, up to 5 %.

    Catches what depends on the number of tokens in the backward pass alone.
    """
    noise = _GRADIENT_TOLERANCE * _FLOOR * _size(runs.given)
    gradients = runs.whole.gradients(runs.given), runs.tiled.gradients(runs.given)
    for (name, _), whole, tiled in zip(runs.targets, *gradients, strict=True):
        if whole is not None and tiled is not None:
            what = f"gradient of {name} for {runs.probe.shape.tokens} tokens"
            yield from _differs(runs.probe, whole, tiled, what, _GRADIENT_TOLERANCE, noise)


OF_TILES = (
    draws_are_per_token,
    outputs_are_those_of_tiles,
    outputs_ignore_the_graph,
    outputs_ignore_other_tokens,
    gradients_ignore_other_tokens,
    gradients_are_those_of_tiles,
)


# Comparing


def _output_differs(runs: Runs, a: Tensor, b: Tensor, what: str, autocast: bool = True) -> Problems:
    """Compare outputs, with the tolerance of their dtype and of autocast's, where that explains a difference too."""
    probe, noise = runs.probe, 0.0
    bound = _tolerance(a.dtype, probe.one.autocast.dtype if autocast else None)
    for tensor, per_token in zip(probe.inputs, probe.one.per_token, strict=True):
        if per_token and tensor.is_floating_point():
            noise += _noise(tensor.dtype, bound) * _size([tensor])  # as of a sum over what a layer norm returns
    if a.shape == b.shape and not torch.equal(a.isfinite(), b.isfinite()):
        yield f"is not position-wise: its {what} is finite elsewhere in one of two ways to compute it. {_UNLESS}"
    yield from _differs(probe, a, b, what, bound, noise)


def _gradients_of_some_differ(
    runs: Runs, gradients: Callable[[Run, Sequence[Tensor | None]], list[Tensor | None]]
) -> Problems:
    given = [None if g is None else runs.unchanged(g) for g in runs.given]
    tensors = [t for t in (*runs.whole.outputs, *runs.probe.inputs) if isinstance(t, Tensor)]
    bound = _tolerance(runs.probe.one.autocast.dtype, *(t.dtype for t in tensors))
    before, size = gradients(runs.whole, given), _size(given)
    for run in (runs.whole, *runs.beside_others):
        now = before if run is runs.whole else gradients(run, given)
        for (name, per_token), a, b in zip(runs.targets, before, now, strict=True):
            if a is None or b is None or (a is b and not per_token):
                continue
            problems = []
            if per_token and not torch.equal(b, kept := runs.unchanged(b)):
                problems.append(
                    f"is not position-wise: its gradient of {name} is not zero at tokens whose outputs have no gradient"
                    f" (at most {float((b - kept).abs().max()):.1e}). {_UNLESS}"
                )
            what = f"gradient of {name} for the same tokens, while others change,"
            a = runs.unchanged(a) if per_token else a
            problems += _differs(runs.probe, a, b, what, bound, _noise(a.dtype, bound) * size)
            if problems and bool(b.isfinite().all()):  # else 0 * inf, where the others overflow
                yield from problems
        del now  # as large as the weights


_UNLESS = "Pass self_check=False only if you know why it differs."


def _differs(probe: Probe, a: Tensor, b: Tensor, what: str, bound: float, noise: float) -> Problems:
    """Yield a difference whose norm is more than ``noise``, and relative to the first value more than ``bound``."""
    if a.shape != b.shape:
        yield f"is not position-wise: its {what} has the shape {list(a.shape)}, and {list(b.shape)} from tiles."
    if a.is_complex():
        a, b = (torch.view_as_real(value.resolve_conj()) for value in (a, b))
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    difference, size = float((a.to(wide) - b.to(wide)).norm()), float(a.to(wide).norm())
    probe.shown = probe.shown or size != 0
    if not difference <= max(bound * size, noise) and bool(a.isfinite().all()):
        yield (
            f"is not position-wise: its {what} differs by {difference / max(size, 1e-30):.1e} between two ways to"
            f" compute it (relative; rounding explains {bound:.0e}). {_UNLESS}"
        )


def _tolerance(*dtypes: torch.dtype | None) -> float:
    return max(0.0 if dtype is None else TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def _noise(dtype: torch.dtype, bound: float) -> float:
    """Return what may be rounding in outputs or gradients, relative to inputs of a dtype or the outputs' gradients."""
    return min(bound * _FLOOR, 10 * torch.finfo(dtype).eps)


def _size(tensors: Sequence[Tensor | None]) -> float:
    return sum(float(t.detach().norm()) for t in tensors if t is not None)
