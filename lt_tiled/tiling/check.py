"""The self-check: a few tokens of a module's first call run whole and in two tiles, and must give the same.

NOTE [What is checked]
Outputs, and the gradients of inputs and of each weight. With zero gradients of the outputs all gradients must be zero,
or the module attaches a loss of its own, which each tile would attach again. How many random numbers are drawn, because
a mask that several tokens share would be another one for each tile. And what the call changes or leaves behind: its
input, buffers, attributes, a tensor with a graph, and collectives, which ranks with other tiles would not match.

It runs in float64 where that takes at most :data:`MOST_BYTES`, so that a small error is not mistaken for rounding, and
in the mode of the call: training and evaluation are checked each in its first call.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.errors import REMEDY, NotPositionWiseError, TwoThreadsError
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.cut import Assembly, Bounds, Tokens
from lt_tiled.tiling.graph import check_closed, kept_tensors
from lt_tiled.tiling.recompute import (
    TOLERANCE,
    PlainSavedTensors,
    RandomState,
    hidden_from_modes,
    random_state_kept,
    version_of,
)
from lt_tiled.tiling.run import leaves_of
from lt_tiled.tiling.state import Owner
from lt_tiled.tiling.weights import Place, in_place

CHECK_TOKENS = 32
MOST_BYTES = 256 * 2**20
"""The most bytes of the copies of weights and buffers in float64."""
_FLOOR = 1e-3
"""Smaller values, relative to the inputs or the outputs' gradients, are compared as if they had this size: they may be
rounding."""


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor], owner: Owner | None) -> bool:
    """Check on a few tokens of a call that it may run in tiles. One call of each kind of module is checked.

    Returns:
        Whether they showed anything: zeros, as of a new adapter, do not.

    Raises:
        NotPositionWiseError: If it may not, or fails on a few tokens.
    """
    kind = _kind_of(call, inputs)
    if owner is not None and kind in owner.passed:
        return True
    state = _Attributes(call.function.parts)
    # An activation checkpoint around it would count what its graphs save, and keep what it computes.
    with hidden_from_modes(inputs[0]), PlainSavedTensors(), random_state_kept(call.device):
        try:
            shown = _check(call, inputs)
        finally:
            state.restore()
    if shown and owner is not None:
        owner.passed.add(kind)
    return shown


def _check(call: TiledCall, inputs: Sequence[Tensor]) -> bool:
    held = [p for part in call.function.parts for p in part._parameters.values() if p is not None]
    plain = all(type(p) in (Tensor, nn.Parameter) and p.is_floating_point() for p in held)
    if plain and sum(8 * p.numel() for p in held) <= MOST_BYTES:
        try:
            return _Check(call, inputs, wide=True).run()
        except (NotPositionWiseError, TwoThreadsError):
            raise
        except Exception:  # the module's own code names a dtype
            pass
    try:
        return _Check(call, inputs, wide=False).run()
    except (NotPositionWiseError, TwoThreadsError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise NotPositionWiseError(
            f"{call.name} fails when it is given a few of its tokens: {error}. Arguments that broadcast over"
            f" tokens must be expanded to all of them before the call. {REMEDY}"
        ) from error


def _kind_of(call: TiledCall, inputs: Sequence[Tensor]) -> Hashable:
    """Return what is equal for calls of modules of the same classes, shapes, dtypes and attributes."""
    facts: list[Any] = [call.kind[1:]]  # without what tells functions of one module apart
    for part in call.function.parts:
        facts.append(type(part))
        for name, value in sorted(_attributes(part)):
            # Numbers, names and containers of them by value; functions, settings and tensors by identity.
            plain = all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))
            facts.append((name, repr(value) if plain else id(value)))
        facts += [(name, id(buffer)) for name, buffer in part._buffers.items()]
        facts += [(w.shape, w.dtype, w.requires_grad) for w in part._parameters.values() if w is not None]
    for tensor, per_token in zip(inputs, call.per_token, strict=True):
        facts.append((tensor.shape[len(call.tokens.lead) :] if per_token else tensor.shape, tensor.dtype))
    return tuple(facts)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that its own code or users set, and its training mode."""
    for name, value in part.__dict__.items():
        patched = name == "forward" or name.startswith("_lt_tiled")
        weight = isinstance(value, Tensor) and value.requires_grad  # FSDP's views
        if name not in _OF_TORCH and not patched and not weight:
            yield name, value


class _Check:
    """A few tokens of a call, in the module's own layout.

    Args:
        call: The call.
        inputs: The tensors among its arguments.
        wide: Whether to compute in float64.
    """

    def __init__(self, call: TiledCall, inputs: Sequence[Tensor], wide: bool) -> None:
        self.call, self.name, self.wide = call, call.name, wide
        self.tokens, picked = _pick(call.tokens.lead, call.device)
        self.probe = _Probe(self.name, call)
        self.places, self.leaves = list[list[Place]](), list[Tensor]()
        """Of each weight and buffer, and what stands there."""
        for tensor, places in _held(call, wide).items():
            self.places.append(places)
            leaf = self._as_leaf(tensor.detach().clone(), tensor in call.weights)
            # Code that parametrizes a weight for a while, as peft does, makes a buffer of what is no parameter.
            if isinstance(tensor, nn.Parameter):
                leaf = nn.Parameter(leaf, leaf.requires_grad)
            self.leaves.append(leaf)
        self.inputs: list[Tensor] = []
        for tensor, per_token, wants in zip(inputs, call.per_token, call.wants_grad, strict=True):
            few = tensor.detach()
            if per_token:
                few = call.tokens.flatten(few)[picked].view(*self.tokens.lead, *few.shape[len(call.tokens.lead) :])
            self.inputs.append(self._as_leaf(few, wants))
        self.given: list[Tensor] = []
        """A random gradient for each output."""

    def _as_leaf(self, tensor: Tensor, wants: bool) -> Tensor:
        if self.wide and tensor.is_floating_point():
            tensor = tensor.double()
        return tensor.requires_grad_(wants and self.call.differentiable)

    def run(self) -> bool:
        """Run all tokens and then two tiles; return whether anything that was compared is not zero.

        Raises:
            NotPositionWiseError: If they differ, or the module changes something.
        """
        parts, count = self.call.function.parts, self.tokens.count
        buffers = [(leaf, leaf.clone()) for leaf in self.leaves if not leaf.requires_grad]
        with (
            torch.set_grad_enabled(self.call.differentiable),
            in_place(self.places, self.leaves),
            self.probe,
        ):
            # 1. All tokens at once.
            outputs, gradients = self._run([(0, count)])
            drawn, self.probe.drawn = self.probe.drawn, 0
            # 2. Two tiles, so unequal that sums over tokens differ. The first run may have filled caches.
            before, first = _Attributes(parts), max(1, count * 3 // 4)
            of_tiles, gradients_of_tiles = self._run([(0, first), (first, count)])
            changes = before.changes() + self._replaced_buffers()
        # 3. Nothing may have changed.
        changes += ["a buffer" for leaf, was in buffers if not torch.equal(leaf.nan_to_num(), was.nan_to_num())]
        if changes:
            self._refuse(
                f"changes {changes[0]} in its forward, which would be changed once for each tile, and again in the"
                " recompute. Return it as an output instead."
            )
        if self.probe.drawn != drawn:
            self._refuse(
                "draws one random mask for several tokens, such as locked dropout or stochastic depth, and each tile"
                " would draw another."
            )
        # 4. Both must be equal, but for rounding.
        shown = False
        for index, (whole, tiled) in enumerate(zip(outputs, of_tiles, strict=True)):
            shown |= self._compare(whole, tiled, f"output {index}", self._noise_of(self.inputs))
        for name, whole, tiled in zip(self._targets(), gradients, gradients_of_tiles, strict=True):
            shown |= self._compare(whole, tiled, f"gradient of {name}", self._noise_of(self.given))
        return shown

    def _run(self, bounds: Sequence[Bounds]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the tokens in tiles; return the outputs, and the gradients of inputs and weights."""
        call, function = self.call, self.call.function
        assembly = Assembly(self.tokens, bounds, self.name)
        kept = kept_tensors(function)
        weights = [leaf for leaf in self.leaves if leaf.requires_grad]
        runs: list[tuple[list[Any], list[Tensor]]] = []
        for index in range(len(bounds)):
            leaves: list[Tensor] = []
            for tensor, per_token in zip(self.inputs, call.per_token, strict=True):
                part = self.tokens.tiles(tensor.detach(), bounds)[index] if per_token else tensor.detach()
                leaves.append(part.requires_grad_(tensor.requires_grad))
            given = [leaf.clone() for leaf in leaves]
            versions = [t._version for t in given]
            output = call.run(given)
            if versions != [t._version for t in given]:
                self._refuse("changes its input in place, which tiles cannot do. Make the change out of place.")
            check_closed(output, None if call.differentiable else (), function, kept, self.name)
            assembly.add(index, pytree.tree_map_only(Tensor, torch.Tensor.detach, output))
            runs.append((leaves_of(output), leaves))
        outputs = assembly.wholes
        if not call.differentiable:
            return outputs, []
        if not self.given:
            # By a generator of its own, whose numbers are not counted.
            random = torch.Generator().manual_seed(0)
            for output in outputs:
                self.given.append(torch.zeros_like(output))
                if output.is_floating_point():
                    self.given[-1].copy_(torch.randn(output.shape, generator=random))
        columns: list[list[Tensor]] = []
        for (ends, leaves), own in zip(runs, assembly.gradients(self.given), strict=True):
            targets = [leaf for leaf in leaves if leaf.requires_grad] + weights
            columns.append(self._gradients(ends, own, targets))
        return outputs, self._together(columns)

    def _gradients(self, ends: list[Any], given: Sequence[Any], targets: list[Tensor]) -> list[Tensor]:
        """Return the gradients of a tile; a target that it does not use gets zeros."""
        roots = [(end, gradient) for end, gradient in zip(ends, given, strict=True) if end.requires_grad]
        if not roots or not targets:
            return [torch.zeros_like(target) for target in targets]
        tensors = [end for end, _ in roots]
        zeros = torch.autograd.grad(
            tensors, targets, [torch.zeros_like(end) for end in tensors], retain_graph=True, allow_unused=True
        )
        for gradient in zeros:
            if gradient is not None and bool(gradient.to_dense().nan_to_num().count_nonzero()):
                self._refuse(
                    "has gradients that do not come from its output, such as those of a loss that it attaches itself,"
                    " which each tile would attach again. Return the loss as an output instead."
                )
        found = torch.autograd.grad(tensors, targets, [gradient for _, gradient in roots], allow_unused=True)
        return [
            torch.zeros_like(target) if gradient is None else gradient.to_dense()
            for target, gradient in zip(targets, found, strict=True)
        ]

    def _together(self, columns: list[list[Tensor]]) -> list[Tensor]:
        """Return the gradients of all tokens: those of tiles one after the other, and sums of all others."""
        per_token = [p for p, tensor in zip(self.call.per_token, self.inputs, strict=True) if tensor.requires_grad]
        found: list[Tensor] = []
        for index, gradients in enumerate(zip(*columns, strict=True)):
            if index < len(per_token) and per_token[index]:
                found.append(torch.cat([gradient.flatten(0, len(self.tokens.lead) - 1) for gradient in gradients]))
            else:
                found.append(sum(gradients[1:], gradients[0]))
        return found

    def _targets(self) -> list[str]:
        """Return the names of the inputs and weights that get gradients."""
        names = [f"argument {index}" for index, tensor in enumerate(self.inputs) if tensor.requires_grad]
        for places, leaf in zip(self.places, self.leaves, strict=True):
            if leaf.requires_grad:
                owner, name = places[0]
                names.append(f"{type(owner).__name__}.{name}")
        return names

    def _replaced_buffers(self) -> list[str]:
        """Return the buffers in whose places something else stands now."""
        found: list[str] = []
        for places, leaf in zip(self.places, self.leaves, strict=True):
            for part, name in places:
                if name in part._buffers and part._buffers[name] is not leaf:
                    found.append(f"{type(part).__name__}.{name}")
        return found

    @property
    def _bound(self) -> float:
        """The relative difference that rounding may cause: that of the least precise dtype in the run."""
        return max(TOLERANCE.get(dtype, 0.0) for dtype in self.probe.dtypes)

    def _noise_of(self, tensors: Sequence[Tensor]) -> float:
        """Return the norm of what rounding may cause next to tensors of this size, as of a sum that cancels."""
        return self._bound * _FLOOR * sum(_norm(t) for t in tensors if t.is_floating_point())

    def _compare(self, whole: Tensor, tiled: Tensor, what: str, noise: float) -> bool:
        """Refuse a difference that rounding does not explain; return whether it is not zero."""
        what = f"is not position-wise: its {what} for {self.tokens.count} tokens"
        unless = "Pass self_check=False only if you know why it differs."
        if whole.is_complex():
            whole, tiled = (torch.view_as_real(value.resolve_conj()) for value in (whole, tiled))
        finite = whole.isfinite()
        if not torch.equal(finite, tiled.isfinite()):
            self._refuse(f"{what} is finite elsewhere in tiles. {unless}")
        size = _norm(whole.masked_fill(~finite, 0))
        difference = _norm(whole.masked_fill(~finite, 0) - tiled.masked_fill(~finite, 0))
        if difference > max(self._bound * size, noise):
            self._refuse(
                f"{what} differs by {difference / max(size, 1e-30):.1e} in tiles (relative; rounding explains"
                f" {self._bound:.0e}). {unless}"
            )
        return size != 0

    def _refuse(self, problem: str) -> None:
        raise NotPositionWiseError(f"{self.name} {problem} {REMEDY}")


def _held(call: TiledCall, wide: bool) -> dict[Tensor, list[Place]]:
    """Return the weights and buffers of a call with their places; frozen weights only where all are to be float64."""
    found: dict[Tensor, list[Place]] = {weight: list(places) for weight, places in call.weights.items()}
    for part in call.function.parts:
        for holder in (part._parameters, part._buffers) if wide else (part._buffers,):
            for name, tensor in holder.items():
                if tensor is not None and (part, name) not in found.get(tensor, ()):
                    found.setdefault(tensor, []).append((part, name))
    return found


class _Attributes:
    """The attributes of modules, and what the containers among them hold."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts
        self.before = self._read()

    def _read(self) -> dict[tuple[nn.Module, str], tuple[Any, Any]]:
        found: dict[tuple[nn.Module, str], tuple[Any, Any]] = {}
        for part in self.parts:
            for name, value in _attributes(part):
                inside: Any = None
                if isinstance(value, list | dict | set | deque):
                    inside = copy.copy(value)
                elif isinstance(value, Tensor):
                    inside = version_of(value)
                found[part, name] = value, inside
        return found

    def changes(self) -> list[str]:
        """Return the names of attributes that hold something else now."""
        now = self._read()
        found: list[str] = []
        for place in self.before.keys() | now.keys():
            was, inside = self.before.get(place, (None, None))
            value, inside_now = now.get(place, (None, None))
            same = value is was or (isinstance(value, _PLAIN) and value == was)
            if not same or not _is_same_inside(inside, inside_now):
                found.append(f"{type(place[0]).__name__}.{place[1]}")
        return sorted(found)

    def restore(self) -> None:
        """Put back what was there."""
        for part in self.parts:
            for name, _ in list(_attributes(part)):
                if (part, name) not in self.before:
                    del part.__dict__[name]
        for (part, name), (value, inside) in self.before.items():
            part.__dict__[name] = value
            if isinstance(value, list | deque):
                value.clear()
                value.extend(inside)
            elif isinstance(value, dict | set):
                value.clear()
                value.update(inside)


def _is_same_inside(was: Any, now: Any) -> bool:
    if type(was) is not type(now):
        return False
    if isinstance(was, dict):
        was, now = (*was.keys(), *was.values()), (*now.keys(), *now.values())
    if isinstance(was, set | int | None):
        return bool(was == now)
    return len(was) == len(now) and all(a is b for a, b in zip(was, now, strict=True))


def _norm(tensor: Tensor) -> float:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return float(tensor.detach().to(wide).norm())


class _Probe(TorchDispatchMode):
    """Lets all tokens draw the same random numbers, as if no tiles were there, and counts them. Refuses collectives."""

    def __init__(self, name: str, call: TiledCall) -> None:
        super().__init__()
        self.name, self.start, self.drawn = name, RandomState.now(call.device), 0
        self.dtypes: set[torch.dtype] = {torch.float64}
        """The floating-point dtypes of what was computed."""
        self.parallel = any(hasattr(weight, "placements") for weight in call.weights)
        """Whether the weights are DTensors, whose ranks make equal tiles."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "c10d" in func.namespace and not self.parallel:
            raise NotPositionWiseError(
                f"{self.name} communicates with other ranks in its forward ({func.name()}), and ranks with other tiles"
                f" would not answer. {REMEDY}"
            )
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        found = self._drawn(func, args, kwargs) if draws else func(*args, **kwargs)
        for leaf in found if isinstance(found, tuple | list) else (found,):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.dtypes.add(leaf.dtype)
        return found

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            composed = func.decompose(*args, **kwargs)  # inference mode does not take dropout apart
        if composed is not NotImplemented:
            return composed
        self.start.set()
        drawn = func(*args, **kwargs)
        self.drawn += (drawn if isinstance(drawn, Tensor) else drawn[0]).numel()
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(drawn[1])  # the backward pass scales both calls alike
        if isinstance(drawn, Tensor) and drawn.numel() and "randperm" not in func.name():
            number = drawn.is_floating_point() or drawn.dtype == torch.bool
            keeps = 1.0 if "bernoulli" in func.name() else 0.6  # in most masks
            drawn.fill_(keeps if number else int(drawn.flatten()[0]))
        return drawn


def _pick(lead: Sequence[int], device: torch.device) -> tuple[Tokens, Tensor]:
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
    return Tokens(torch.Size(counts)), picked
