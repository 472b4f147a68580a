"""The self-check: a few tokens of a module's first call run whole and in two tiles, and must give the same.

NOTE [What is checked]
Outputs, and gradients of inputs and of each weight. With zero gradients of the outputs they must be zero, or the module
attaches a loss of its own, which each tile would attach again. How many random numbers a tile draws: a mask that
several tokens share would be another one for each tile. Collectives, which ranks with other tiles would not match. And
what the call changes: arguments, weights, buffers and attributes. A tensor with a graph that it leaves there is one,
because tiles run without a graph first.

It runs in float64 where the module allows it and the copies take at most :data:`MOST_BYTES`, so that a small error is
not mistaken for rounding. Training and evaluation are checked each in its first call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lt_tiled.errors import REMEDY, NotPositionWiseError
from lt_tiled.recompute.mode import PLAIN_TENSORS, PlainSavedTensors, hidden_from_modes, random_state_kept, version_of
from lt_tiled.tiling.call import TiledCall
from lt_tiled.tiling.cut import Tokens
from lt_tiled.tiling.last import find_plan
from lt_tiled.tiling.run import run_tiled

CHECK_TOKENS = 32
MOST_BYTES = 256 * 2**20
"""The most bytes of the copies in float64."""
_FLOOR = 1e-3
"""Smaller values, relative to the inputs or the outputs' gradients, are compared as if they had this size: they may be
rounding."""
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference that rounding may cause when a matrix product has another shape (float32: TF32 included)."""
_BY_VALUE = (int, float, complex, str, bytes, torch.Size, torch.device)
_OF_TORCH = nn.Module().__dict__.keys() - {"training", "_parameters", "_buffers"}
Held = frozenset[tuple[str, Hashable, Hashable]]
"""Names, modules, and facts that are equal as long as what is there is the same."""


def check_position_wise(call: TiledCall, inputs: Sequence[Tensor], passed: set[Hashable]) -> None:
    """Check on a few tokens of a call that it may run in tiles. One call of each kind of module is checked.

    Raises:
        NotPositionWiseError: If it may not, or fails on a few tokens.
    """
    # 1. Calls of modules of the same classes, attributes, shapes and dtypes are of one kind.
    holds = (list(inputs), call.arguments)
    facts = held(call.function.parts, holds, lambda tensor: (tensor.shape, tensor.dtype, tensor.requires_grad))
    kind = (call.kind[1:], facts)  # without what tells functions of one module apart
    if kind in passed:
        return
    # 2. An activation checkpoint around it would count what its graphs save, and keep what it computes.
    with_graph = torch.is_grad_enabled()
    with (
        hidden_from_modes(inputs[0]),
        PlainSavedTensors(),
        random_state_kept(call.device),
        torch.inference_mode(False),  # which does not take dropout apart
        torch.set_grad_enabled(with_graph),
    ):
        for wide in (True, False):
            try:
                check = _Check(call, inputs, wide)
                with _copies_in_place(call.function.parts, check.instead_of):
                    check.run()
                break
            except NotPositionWiseError:
                raise
            except Exception as error:
                # Its weights are too large or quantized, or its own code names a dtype.
                if wide:
                    continue
                if isinstance(error, torch.OutOfMemoryError | MemoryError):
                    raise
                raise NotPositionWiseError(
                    f"{call.name} fails when it is given a few of its tokens: {error}. Expand arguments that broadcast"
                    f" over tokens before the call. {REMEDY}"
                ) from error
    passed.add(kind)


@contextmanager
def _copies_in_place(parts: Sequence[nn.Module], copy: Callable[[Any], Any]) -> Iterator[None]:
    """Let copies stand in the places of tensors and containers that modules hold, so that nothing stays changed."""
    before = [(part, part.__dict__) for part in parts]
    try:
        for part, entries in before:
            object.__setattr__(part, "__dict__", {**entries, **pytree.tree_map(copy, _own(part))})
        yield
    finally:
        for part, entries in before:
            object.__setattr__(part, "__dict__", entries)


class _Check(TorchDispatchMode):
    """A few tokens of a call, in the module's own layout, in float64 if it is wide.

    As a mode it lets all tokens draw the same numbers, as if no tiles were there, and counts them. It refuses
    collectives.
    """

    def __init__(self, call: TiledCall, inputs: Sequence[Tensor], wide: bool) -> None:
        super().__init__()
        self.call = call
        self.wide = wide
        self.drawn = 0
        self.dtypes: set[torch.dtype] = {torch.float64}
        """The dtypes of what was computed."""
        self.parallel = any(hasattr(weight, "placements") for weight in call.weights)
        """Whether the weights are DTensors, whose ranks make equal tiles."""
        self.bytes = 0  # of the copies in float64
        self.copies: dict[int, Tensor] = {}
        """What stands in the places of tensors that modules hold, by the ids of those."""
        # Several entries of each dimension: what mixes along a batch must also be seen, and what moves entries by two.
        *rows, columns = call.tokens.lead
        few = [min(size, 5) for size in rows]
        few.append(min(columns, max(5, CHECK_TOKENS // prod(few))))
        self.tokens = Tokens(torch.Size(few))
        self.inputs: list[Tensor] = []
        for tensor, wants, per_token in zip(inputs, call.wants_grad, call.per_token, strict=True):
            part = tensor.detach()[tuple(map(slice, few))] if per_token else tensor
            self.inputs.append(self._copy(part, wants and call.differentiable))
        self.others = pytree.tree_map(self.instead_of, call.arguments)
        self.targets: dict[Tensor, str] = {}  # the inputs and weights that get gradients, with their names
        self.before: Held = frozenset()  # what modules and arguments hold once caches are filled

    def instead_of(self, value: Any) -> Any:
        """Return what stands in the place of a tensor while the check runs, and anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        wants = value in self.call.weights
        if id(value) not in self.copies and (wants or type(value) in PLAIN_TENSORS):
            self.copies[id(value)] = self._copy(value, wants)
        return self.copies.get(id(value), value)

    def _copy(self, tensor: Tensor, wants: bool) -> Tensor:
        """Return a leaf with the values of a tensor. Weights share its memory, unless the check is wide."""
        copy = tensor.detach()
        if self.wide:
            self.bytes += 8 * copy.numel()
            if type(tensor) not in PLAIN_TENSORS or self.bytes > MOST_BYTES:
                raise TypeError("cannot be copied in float64")
            copy = copy.to(torch.float64 if copy.is_floating_point() else copy.dtype, copy=True)
        elif type(tensor) is Tensor:
            copy = copy.clone()
        # Code that parametrizes a weight for a while, as peft does, makes a buffer of what is no parameter.
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=False)
        return copy.requires_grad_(wants)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # 1. Collectives.
        kwargs = kwargs or {}
        if "c10d" in func.namespace and not self.parallel:
            self._refuse(
                f"communicates with other ranks in its forward ({func.name()}), and ranks with other tiles would not"
                " answer."
            )
        # 2. Dtypes. The link of an anchor has no elements.
        found = func(*args, **kwargs)
        leaves = pytree.tree_leaves(found)
        self.dtypes.update(leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel())
        # 3. Random numbers: those that most masks keep, and a category that each token has.
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return found
        self.drawn += leaves[0].numel()
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(found[1])  # the backward pass scales both calls alike
        if "bernoulli" in func.name():
            leaves[0].fill_(1)
        else:
            leaves[0].fill_(0.6)  # 0 for integers
        return found

    def run(self) -> None:
        """Run all tokens and then two tiles, and compare them."""
        # 1. The call with two tiles, so unequal that sums over tokens differ.
        call = self.call
        first = max(1, self.tokens.count * 3 // 4)
        function = replace(call.function, plans={})
        few = TiledCall(function, self.inputs, self.others, call.names, self.tokens, [first, self.tokens.count - first])
        for index, tensor in enumerate(self.inputs):
            if tensor.requires_grad:
                self.targets[tensor] = f"argument {index}"
        for weight, places in few.weights.items():
            part, name = places[0]
            self.targets[weight] = f"{type(part).__name__}.{name}"
        # 2. All tokens at once, on copies, which the module may change.
        tile = list(map(torch.clone, self.inputs))
        versions = list(map(version_of, tile))
        with self:
            outputs = pytree.tree_leaves(few.run(*tile))
        if versions != list(map(version_of, tile)):
            self._refuse("changes its input in place, which tiles cannot do. Make the change out of place.")
        # 3. A tile, which must draw its share of the random numbers. The first run may have filled caches, but from now
        # on nothing may change.
        self.before = held(call.function.parts, self.others, value_of)
        all_drawn = self.drawn
        with self, torch.no_grad():
            few.run(*next(few.tiles(list(map(torch.clone, self.inputs)))))
        if (self.drawn - all_drawn) * self.tokens.count != all_drawn * first:
            self._refuse(
                "draws one random mask for several tokens, such as locked dropout or stochastic depth, and each tile"
                " would draw another."
            )
        # 4. Both tiles.
        function.plans[few.kind] = find_plan(few, self.inputs)  # which runs one with a graph, to its end
        with self:
            of_tiles = pytree.tree_leaves(run_tiled(few, self.inputs))
        self._refuse_changes()  # here without a graph, which the recompute makes again
        for index, (whole, own) in enumerate(zip(outputs, of_tiles, strict=True)):
            same = whole.shape == own.shape and whole.requires_grad <= own.requires_grad
            if not same or not torch.equal(whole.isfinite(), own.isfinite()):
                self._refuse(f"is not position-wise: its output {index} has another shape or is finite elsewhere.")
            self._compare(f"output {index}", whole, own, self.inputs)
        # 5. Gradients. A loss that the module attaches has one, whatever those of its outputs are.
        if any(map(norm, self._gradients(outputs, list(map(torch.zeros_like, outputs))))):
            self._refuse(
                "has gradients that do not come from its output, such as those of a loss that it attaches: each tile"
                " would attach it. Return it as an output."
            )
        given = [torch.randn(output.shape, device=output.device).to(output.dtype) for output in outputs]
        gradients = self._gradients(outputs, given)
        gradients_of_tiles = self._gradients(of_tiles, given)
        self._refuse_changes()
        for name, whole, own in zip(self.targets.values(), gradients, gradients_of_tiles, strict=False):
            self._compare(f"gradient of {name}", whole, own, given)

    def _gradients(self, outputs: Sequence[Any], given: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of inputs and weights, given those of the outputs; none if there is no graph."""
        ends: list[Tensor] = []
        at_ends: list[Tensor] = []
        for output, gradient in zip(outputs, given, strict=True):
            if output.requires_grad:
                ends.append(output)
                at_ends.append(gradient)
        if not ends or not self.targets:
            return []
        with self:
            targets = tuple(self.targets)
            found = torch.autograd.grad(ends, targets, at_ends, retain_graph=True, materialize_grads=True)
        return list(map(Tensor.to_dense, found))

    def _compare(self, what: str, whole: Tensor, tiled: Tensor, sources: Sequence[Tensor]) -> None:
        """Refuse a difference that rounding does not explain."""
        size = norm(whole)
        difference = norm(whole - tiled)
        # The least precise dtype of the run decides. A sum that cancels is as inexact as what it is computed from.
        bound = max(TOLERANCE.get(dtype, 0.0) for dtype in self.dtypes)
        noise = _FLOOR * sum(map(norm, filter(torch.is_floating_point, sources)))
        if difference > bound * max(size, noise):
            self._refuse(
                f"is not position-wise: its {what} for {self.tokens.count} tokens differs by"
                f" {difference / max(size, 1e-30):.1e} in tiles (relative; rounding explains {bound:.0e}). If you know"
                " why, pass self_check=False."
            )

    def _refuse_changes(self) -> None:
        changes = self.before ^ held(self.call.function.parts, self.others, value_of)
        if changes:
            self._refuse(
                f"changes {min(label for label, _, _ in changes)} in its forward, which each tile and its recompute"
                " would change again. Return it as an output."
            )

    def _refuse(self, problem: str) -> None:
        raise NotPositionWiseError(f"{self.call.name} {problem} {REMEDY}")


# What modules hold


def held(parts: Sequence[nn.Module], others: Sequence[Any], fact_of: Callable[[Tensor], Hashable]) -> Held:
    """Return what modules and arguments hold, also in containers, with such facts of tensors."""
    values: list[tuple[str, Hashable, Any]] = [("its arguments", None, others)]
    for index, part in enumerate(parts):
        for name, value in _own(part).items():
            values.append((f"{type(part).__name__}.{name}", (index, type(part)), value))
    found: set[tuple[str, Hashable, Hashable]] = set()
    for label, place, value in values:
        for path, leaf in pytree.tree_leaves_with_path(value):
            fact: Hashable = id(leaf)
            if isinstance(leaf, Tensor):
                fact = fact_of(leaf)
            elif isinstance(leaf, _BY_VALUE):
                fact = leaf
            found.add((label + pytree.keystr(path), place, fact))
    return frozenset(found)


def _own(part: nn.Module) -> dict[str, Any]:
    """Return weights, buffers and training mode of a module, and the attributes that its code or a user set."""
    own: dict[str, Any] = {}
    for name, value in part.__dict__.items():
        if name not in _OF_TORCH and not name.startswith("_lt_tiled") and not isinstance(value, MethodType):
            # The dictionaries of ZeRO-3 are no containers for pytree, and have functions of their own.
            own[name] = dict(value.items()) if name == "_parameters" else value
    return own


def value_of(tensor: Tensor) -> Hashable:
    """Return what is equal as long as a tensor has the same values."""
    is_float8 = tensor.is_floating_point() and tensor.dtype not in TOLERANCE
    if is_float8 or type(tensor) not in PLAIN_TENSORS:
        return id(tensor), version_of(tensor)
    # Code that parametrizes a weight for a while changes its version.
    return norm(tensor), tensor.requires_grad, 0 if isinstance(tensor, nn.Parameter) else version_of(tensor)


def norm(tensor: Tensor) -> float:
    """Return the norm of what is finite."""
    finite = tensor.detach().resolve_conj()
    if not (finite.is_floating_point() or finite.is_complex()):
        finite = finite.double()
    # Without a copy in float32.
    wide = torch.promote_types(finite.dtype, torch.float32)
    return float(torch.linalg.vector_norm(finite.nan_to_num(0, 0, 0), dtype=wide))
