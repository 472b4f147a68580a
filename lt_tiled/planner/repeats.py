"""Simulate a few blocks of each kind, and repeat what they leave behind for the others.

NOTE [Blocks that repeat]
The blocks of a model are mostly alike. The first two and the last two of each kind are simulated. The others do only
what outlasts them: they allocate their output and what their forward pass keeps for the backward pass, accumulate the
gradients of their weights, and have the FLOPs of their kind. Weights, optimizer, engine, activation checkpointing and
offloading are those of the complete model, so none of their memory is extrapolated. Only the temporary tensors inside
of such a block are left out. They do not make the peak if a block of the same kind, which has the same temporary
tensors, is simulated from at least as many live bytes. This is checked for the forward and the backward pass of each
block. Where it does not hold, or where something that a block made lives longer than to its own backward pass,
:class:`IrregularError` is raised, all blocks are simulated, and the reason is logged at level DEBUG.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lt_tiled.modules.find import find_blocks
from lt_tiled.modules.patch import HOOKS, Order, Patch, is_of, remove_patches, set_patch
from lt_tiled.planner.engines import Release
from lt_tiled.planner.fake import FakeLedger
from lt_tiled.planner.ledger import Allocation
from lt_tiled.planner.where import Whereabouts
from lt_tiled.tiling.deferred import values

EDGE = 2
"""The number of blocks of each kind that are simulated at either end of a model."""


class IrregularError(Exception):
    """A block does not repeat others in a way that can be left out."""


class Moment(NamedTuple):
    """When the backward pass of a block begins."""

    live: int
    flops: int
    clock: int


class Output(NamedTuple):
    """A tensor that a block returns: a new one, or one of those that it was given."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    given: int | None


@dataclass
class Call:
    """A block in the forward pass, and what is known of its backward pass."""

    key: Hashable
    """The kind of the block and of its arguments."""
    live: int
    """The live bytes before it."""
    like: Call | None
    """The call that it repeats."""
    flops: int = 0
    inputs: list[Allocation | None] = field(default_factory=list)
    saves: list[bool] = field(default_factory=list)
    """Which of its inputs a repeated call saves."""
    outputs: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None
    kept: list[Allocation] = field(default_factory=list)
    """What is alive at its end besides its output."""
    releases: list[Release] = field(default_factory=list)
    """Those of a repeated call, for what it keeps."""
    backward: Moment | None = None
    after: Moment | None = None
    """When the backward pass of the next block begins."""


class RepeatPatch(Patch):
    """On each block while a step is simulated."""

    order = Order.REPEAT

    def __init__(self, repeats: Repeats, kind: Hashable, repeated: bool) -> None:
        self.repeats, self.kind, self.repeated = repeats, kind, repeated

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Simulate the block, or repeat another one."""
        return self.repeats.run(module, self, args, kwargs)


class Repeats(ExitStack):
    """Repeats blocks in a forward and a backward pass: see NOTE [Blocks that repeat]."""

    def __init__(self, model: nn.Module, where: Whereabouts, ledger: FakeLedger) -> None:
        super().__init__()
        self.where, self.ledger = where, ledger
        self.blocks = find_blocks(model)
        self.calls: dict[nn.Module, Call] = {}
        self.simulated: defaultdict[Hashable, list[Call]] = defaultdict(list)
        self.begun: list[Call] = []
        """Those whose backward pass began."""
        self.trained: defaultdict[Hashable, set[str]] = defaultdict(set)
        """The names of the weights that get gradients, by the kind of their block."""
        self.clock = 0
        """The moment at which the backward pass begins."""

    def __enter__(self) -> Repeats:
        kinds, seen = kinds_of(self.blocks), Counter[Hashable]()
        for (_, block), kind in zip(self.blocks, kinds, strict=True):
            repeated = EDGE <= seen[kind] < kinds.count(kind) - EDGE
            seen[kind] += 1
            set_patch(block, RepeatPatch(self, kind, repeated))
            self.callback(remove_patches, block, RepeatPatch)
            self.callback(block.register_forward_hook(self._watch_backward).remove)
            for name, weight in () if repeated else block.named_parameters():
                if weight.requires_grad:
                    note = partial(self._note_trained, kind, name)
                    self.callback(weight.register_post_accumulate_grad_hook(note).remove)
        return self

    def run(self, block: nn.Module, patch: RepeatPatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Simulate or repeat a block, in the forward pass or in its recompute."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self.where.phase != "forward":
            call = self.calls[block]
            return patch.inner(block, *args, **kwargs) if call.like is None else self._repeat(block, patch, call, given)
        if block in self.calls:
            raise IrregularError("a block runs twice in a forward pass")
        key = (patch.kind, _fact((args, kwargs)), torch.is_grad_enabled())
        like = self.simulated[key][-1] if patch.repeated and self.simulated[key] else None
        call = self.calls[block] = Call(key, self.ledger.now, like)
        if like is not None:
            self.ledger.flops += like.flops
            call.releases = [self.ledger.hold(a.nbytes if a.died is None else 0, a.part, a.place) for a in like.kept]
            return self._repeat(block, patch, call, given)
        self.simulated[key].append(call)
        before, flops = len(self.ledger.allocations), self.ledger.flops
        result = values(patch.inner(block, *args, **kwargs))
        call.flops, call.inputs = self.ledger.flops - flops, [self.ledger.find(t) for t in given]
        leaves, call.spec = tree_flatten(result)
        for leaf in leaves:
            same = next((i for i, t in enumerate(given) if t is leaf), None)
            is_tensor = isinstance(leaf, Tensor)
            call.outputs.append(Output(leaf.shape, leaf.dtype, leaf.requires_grad, same) if is_tensor else leaf)
        made = [self.ledger.find(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        call.kept = [a for a in self.ledger.allocations[before:] if a.died is None and not any(a is m for m in made)]
        return result

    def _repeat(self, block: nn.Module, patch: RepeatPatch, call: Call, given: list[Tensor]) -> Any:
        assert call.like is not None
        assert call.like.spec is not None
        weights = {name: w for name, w in block.named_parameters() if w.requires_grad}

        def backward() -> None:
            for release in call.releases:
                release()
            for name in reversed(weights):
                if name in self.trained[patch.kind]:
                    weights[name].backward(torch.empty_like(weights[name]))

        if not call.saves:  # a block saves its inputs or not: so does the next one
            call.saves = [a is not None and a.died is None for a in call.like.inputs]
        saved = [t for t, saves in zip(given, call.saves, strict=True) if saves and t.requires_grad]
        new = [o for o in call.like.outputs if isinstance(o, Output) and o.requires_grad and o.given is None]
        inputs = [t for t in given if t.requires_grad]
        made = iter(_Repeated.apply(backward, new, [*saved, torch.empty(0)], *inputs) if inputs else ())
        if new and not inputs:
            raise IrregularError("the output of a block requires a gradient, and its inputs do not")
        leaves = []
        for output in call.like.outputs:
            if not isinstance(output, Output):
                leaves.append(output)
            elif output.given is not None:
                leaves.append(given[output.given])
            else:
                fresh = next(made) if output.requires_grad else torch.empty(output.shape, dtype=output.dtype)
                leaves.append(fresh)
        return tree_unflatten(leaves, call.like.spec)

    def _note_trained(self, kind: Hashable, name: str, weight: Tensor) -> None:
        self.trained[kind].add(name)

    def _watch_backward(self, block: nn.Module, args: Any, output: Any) -> None:
        leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if leaves:
            leaves[0].register_hook(partial(self._begin_backward_of, self.calls[block]))

    def _begin_backward_of(self, call: Call, gradient: Tensor) -> None:
        call.backward = Moment(self.ledger.now, self.ledger.flops, self.ledger.clock)
        if self.begun:
            self.begun[-1].after = call.backward
        self.begun.append(call)

    def begin(self, phase: str) -> None:
        """Enter the forward, backward or optimizer phase.

        Raises:
            IrregularError: After the backward pass, if what was left out could change the prediction.
        """
        if phase == "backward":
            self._begin_backward()
        elif phase == "optimizer":
            for call in self.calls.values():
                if call.like is not None:
                    self._check(call, call.like)

    def _begin_backward(self) -> None:
        """Release what the blocks keep to the end of the forward pass, such as autocast's copies of weights."""
        self.clock = self.ledger.clock
        for call in self.calls.values():
            for release, allocation in zip(call.releases, call.like.kept if call.like else (), strict=True):
                if allocation.died is not None:
                    release()

    def _check(self, call: Call, like: Call) -> None:
        """Check what was left out of a call, and add the FLOPs of its backward pass."""
        same = self.simulated[call.key]
        if call.live > max(c.live for c in same) or len({c.flops for c in same}) > 1:
            raise IrregularError("the forward pass of a block begins with more live bytes or has other FLOPs")
        start, end = like.backward, like.after
        for allocation in like.kept:
            died = allocation.died
            if died is None or (died > self.clock and not (start and end and start.clock <= died <= end.clock)):
                raise IrregularError("what a block keeps outlives its backward pass")
        if call.backward is not None:
            known = [(c.backward, c.after) for c in same if c.backward and c.after]
            work = {after.flops - begin.flops for begin, after in known[-EDGE:]}
            if len(work) != 1 or call.backward.live > max(begin.live for begin, _ in known):
                raise IrregularError("the backward pass of a block begins with more live bytes or has other FLOPs")
            self.ledger.flops += work.pop()


class _Repeated(torch.autograd.Function):
    """New tensors that depend on the inputs of a block."""

    @staticmethod
    def forward(ctx: Any, backward: Release, new: list[Output], saved: list[Tensor], *inputs: Tensor) -> Any:
        ctx.save_for_backward(*saved)  # at least an empty tensor, which makes checkpoint recompute the block
        ctx.run, ctx.given = backward, [(t.shape, t.dtype) for t in inputs]
        return tuple(torch.empty(output.shape, dtype=output.dtype) for output in new)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors  # recomputes the block
        ctx.run()
        return None, None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.given)


def kinds_of(blocks: list[tuple[str, nn.Module]]) -> list[Hashable]:
    """Return what each block is, so far as a simulation can see: equal for blocks that are alike.

    The numbers by which the blocks of a list are told apart, such as ``layer_idx``, are left out.
    """
    parents = [path.rpartition(".")[0] for path, _ in blocks]
    indices = [parents[:i].count(parent) for i, parent in enumerate(parents)]
    facts = [_facts(block, index) for (_, block), index in zip(blocks, indices, strict=True)]
    numbers = set[Any]()
    for parent in set(parents):
        own = [(i, known) for of, i, known in zip(parents, indices, facts, strict=True) if of == parent]
        numbers |= {(parent, name) for name in own[0][1] if all(known.get(name) == (int, i) for i, known in own)}
    return [
        frozenset((name, value) for name, value in known.items() if (parent, name) not in numbers)
        for parent, known in zip(parents, facts, strict=True)
    ]


def _facts(block: nn.Module, index: int) -> dict[tuple[str, str], Hashable]:
    facts: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules():
        facts[path, ""] = type(module)
        for name, value in vars(module).items():
            if name in HOOKS:
                value = [hook for hook in value.values() if not is_of(hook, ("lt_tiled",))]
            if name in HOOKS or name not in _OF_TORCH:
                facts[path, name] = _fact(value, f".{index}.")
    return facts


_OF_TORCH = set(vars(nn.Module())) - {"training", "_parameters", "_buffers"}


def _fact(value: Any, own: str = "") -> Hashable:
    """Return something that is equal for values that are alike. ``own`` is the number of the block in paths."""
    if isinstance(value, str) and own:
        return str, value.replace(own, ".*.")
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, dict):
        return type(value), tuple((key, _fact(v, own)) for key, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_fact(v, own) for v in value)
    if isinstance(value, partial):
        return partial, _fact((value.func, value.args, value.keywords), own)
    if isinstance(value, Patch):
        return type(value), _fact(value.below)
    function = getattr(value, "__func__", value) if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType):
        return cast("Hashable", vars(function).get("_lt_tiled_place", id(function)))
    return id(value)
