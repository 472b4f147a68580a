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
from itertools import pairwise
from operator import itemgetter
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_map_only

from lt_tiled.modules.blocks import find_blocks
from lt_tiled.modules.patch import HOOKS, Order, Patch, is_of, remove_patches, set_patch
from lt_tiled.planner.engines import Release
from lt_tiled.planner.ledger import Allocation, Work
from lt_tiled.planner.where import FakeLedger
from lt_tiled.tiling.deferred import values

EDGE = 2
"""The number of blocks of each kind that are simulated at either end of a model."""


class IrregularError(Exception):
    """A block does not repeat others in a way that can be left out."""


class Moment(NamedTuple):
    """A moment of the backward pass."""

    live: int
    work: Work
    clock: int


@dataclass
class Call:
    """A block in the forward pass, and when its backward pass begins and ends."""

    key: tuple[Hashable, ...]
    """The kind of the block, and what is known of its arguments."""
    like: Call | None
    """The call that it repeats."""
    live: int
    """The live bytes before it."""
    work: Work = field(default_factory=Work)
    inputs: list[Allocation | None] = field(default_factory=list)
    saves: list[bool] = field(default_factory=list)
    """Which of its inputs a repeated call saves."""
    result: Any = None
    """What it returns, with meta tensors, and with getters for those of its inputs that it returns."""
    kept: list[Allocation] = field(default_factory=list)
    """What is alive at its end besides its output."""
    releases: list[Release] = field(default_factory=list)
    """Those of a repeated call, for what it keeps."""
    begin: Moment | None = None
    end: Moment | None = None


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

    def __init__(self, model: nn.Module, ledger: FakeLedger) -> None:
        super().__init__()
        self.ledger = ledger
        self.calls: dict[nn.Module, Call] = {}
        self.simulated: defaultdict[Hashable, list[Call]] = defaultdict(list)
        self.begun: list[tuple[Call, Moment]] = []
        """The calls whose backward pass began."""
        self.trained: set[tuple[Hashable, str]] = set()
        """The weights that get gradients: the kind of their block, and their name."""
        blocks = find_blocks(model)
        kinds, seen = kinds_of(blocks), Counter[Hashable]()
        for (_, block), kind in zip(blocks, kinds, strict=True):
            repeated = EDGE <= seen[kind] < kinds.count(kind) - EDGE
            seen[kind] += 1
            set_patch(block, RepeatPatch(self, kind, repeated))
            self.callback(remove_patches, block, RepeatPatch)
            for name, weight in () if repeated else block.named_parameters():
                if weight.requires_grad:
                    note = partial(lambda of_kind, _: self.trained.add(of_kind), (kind, name))
                    self.callback(weight.register_post_accumulate_grad_hook(note).remove)

    def run(self, block: nn.Module, patch: RepeatPatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Simulate or repeat a block, in the forward pass or in its recompute."""
        inputs = _tensors((args, kwargs))
        if self.ledger.phase != "forward":
            call = self.calls[block]
            return patch.inner(block, *args, **kwargs) if call.like is None else self._repeat(block, call, inputs)
        if block in self.calls:
            raise IrregularError("a block runs twice in a forward pass")
        leaves, structure = tree_flatten((args, kwargs))
        key = (patch.kind, structure, tuple(_fact(leaf) for leaf in leaves), torch.is_grad_enabled())
        same = self.simulated[key]
        call = self.calls[block] = Call(key, same[-1] if patch.repeated and same else None, self.ledger.now)
        if call.like is not None:
            self.ledger.work += call.like.work
            for a in call.like.kept:
                call.releases.append(self.ledger.hold(a.nbytes if a.died is None else 0, a.part, a.place))
            # A block saves its inputs or not: so does the next one.
            call.saves = [a is not None and a.died is None for a in call.like.inputs]
            result = self._repeat(block, call, inputs)
        else:
            same.append(call)
            before, work = len(self.ledger.allocations), self.ledger.work
            result = values(patch.inner(block, *args, **kwargs))
            call.work, call.inputs = self.ledger.work - work, [self.ledger.find(t) for t in inputs]
            call.result = tree_map_only(Tensor, partial(_without_memory, inputs), result)
            outputs = [self.ledger.find(t) for t in _tensors(result)]
            call.kept = [a for a in self.ledger.allocations[before:] if a.died is None and a not in outputs]
        for output in [t for t in _tensors(result) if t.requires_grad][:1]:
            output.register_hook(partial(self._begin_backward_of, call))
        return result

    def _repeat(self, block: nn.Module, call: Call, inputs: list[Tensor]) -> Any:
        """Return what the call that is repeated returned."""
        assert call.like is not None
        weights = {name: weight for name, weight in block.named_parameters() if weight.requires_grad}

        def backward() -> None:
            for release in call.releases:
                release()
            for name in reversed(weights):
                if (call.key[0], name) in self.trained:
                    weights[name].backward(torch.empty_like(weights[name]))

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, itemgetter):
                return leaf(inputs)
            return next(outputs) if isinstance(leaf, Tensor) else leaf

        saved = [t for t, saves in zip(inputs, call.saves, strict=True) if saves and t.requires_grad]
        # The empty tensor gives the outputs a gradient, and makes checkpoint recompute the block.
        anchor = torch.empty(0, requires_grad=True)
        inputs_with_gradient = [t for t in inputs if t.requires_grad]
        new = _tensors(call.like.result)
        outputs = iter(_Repeated.apply(backward, new, [*saved, anchor], anchor, *inputs_with_gradient))
        return tree_map(fill, call.like.result)

    def _begin_backward_of(self, call: Call, gradient: Tensor) -> None:
        self.begun.append((call, Moment(self.ledger.now, self.ledger.work, self.ledger.clock)))

    def begin(self, phase: str) -> None:
        """Enter a phase. After the backward pass, raise if what was left out could change the prediction."""
        repeated = [(call, call.like) for call in self.calls.values() if call.like is not None]
        if phase == "backward":
            for call, like in repeated:
                for release, allocation in zip(call.releases, like.kept, strict=True):
                    if allocation.died is not None:  # at the end of the forward pass, as autocast's copies of weights
                        release()
            for call in self.calls.values():
                call.kept = [allocation for allocation in call.kept if allocation.died is None]
        elif phase == "optimizer":
            for (call, begin), (_, end) in pairwise(self.begun):
                call.begin, call.end = begin, end
            for call, like in repeated:
                self._check(call, like)

    def _check(self, call: Call, like: Call) -> None:
        """Check what was left out of a call, and add the FLOPs of its backward pass."""
        same = self.simulated[call.key]
        if call.live > max(c.live for c in same) or len({c.work for c in same}) > 1:
            raise IrregularError("the forward pass of a block begins with more live bytes or has other FLOPs")
        begin, end = like.begin, like.end
        for died in [allocation.died for allocation in like.kept]:
            if not (died and begin and end and begin.clock <= died <= end.clock):
                raise IrregularError("what a block keeps outlives its backward pass")
        if call.begin is not None:
            known = [(c.begin, c.end) for c in same if c.begin and c.end]
            work = {end.work - begin.work for begin, end in known[-EDGE:]}
            if len(work) != 1 or call.begin.live > max(begin.live for begin, _ in known):
                raise IrregularError("the backward pass of a block begins with more live bytes or has other FLOPs")
            self.ledger.work += work.pop()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _without_memory(inputs: list[Tensor], output: Tensor) -> Any:
    """Return a meta tensor like the output of a block, or a getter if the output is one of its inputs."""
    for index, given in enumerate(inputs):
        if given is output:
            return itemgetter(index)
    return torch.empty_like(output, device="meta", requires_grad=output.requires_grad)


class _Repeated(torch.autograd.Function):
    """New tensors that depend on the inputs of a block."""

    @staticmethod
    def forward(ctx: Any, backward: Release, new: list[Tensor], saved: list[Tensor], *inputs: Tensor) -> Any:
        ctx.save_for_backward(*saved)
        ctx.run, ctx.inputs = backward, [(t.shape, t.dtype) for t in inputs]
        outputs = [torch.empty_like(t, device="cpu", requires_grad=False) for t in new]
        ctx.mark_non_differentiable(*(output for output, t in zip(outputs, new, strict=True) if not t.requires_grad))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors  # recomputes the block
        ctx.run()
        return None, None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.inputs)


def kinds_of(blocks: list[tuple[str, nn.Module]]) -> list[Hashable]:
    """Return what each block is, so far as a simulation can see: equal for blocks that are alike.

    The numbers by which the blocks of a list are told apart, such as ``layer_idx``, are left out.
    """
    indices = [path.rpartition(".")[2] for path, _ in blocks]
    facts = [_facts(block, index) for index, (_, block) in zip(indices, blocks, strict=True)]
    names = set[str]()
    for index, known in zip(indices, facts, strict=True):
        names |= {name for name, fact in known.items() if type(fact) is not int or str(fact) != index}
    return [frozenset((name, fact) for name, fact in known.items() if name in names) for known in facts]


def _facts(block: nn.Module, index: str) -> dict[str, Hashable]:
    """Return the type, the attributes and the hooks of each module in a block, by name."""
    facts: dict[str, Any] = {}
    for path, module in block.named_modules():
        facts[path] = type(module)
        own: dict[str, Any] = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        for name in HOOKS:
            own[name] = [hook for hook in vars(module)[name].values() if not is_of(hook, ("lt_tiled",))]
        leaves, structure = tree_flatten_with_path(own)
        facts[f"{path} structure"] = structure
        for keys, leaf in leaves:
            is_path = isinstance(leaf, str)  # such as those that peft keeps
            facts[path + keystr(keys)] = leaf.replace(f".{index}.", ".*.") if is_path else _fact(leaf)
    return facts


_OF_TORCH = set(vars(nn.Module())) - {"training", "_parameters", "_buffers"}


def _fact(value: Any) -> Hashable:
    """Return something that is equal for values that are alike."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad
    if isinstance(value, Patch):
        return type(value), _fact(value.below)
    if isinstance(value, partial):
        return _fact(value.func), str((value.args, value.keywords))
    if isinstance(value, MethodType):
        return vars(value.__func__).get("_lt_tiled_place") or id(value.__func__)
    known = isinstance(value, int | float | str | bytes | torch.dtype | torch.device | torch.Size | None)
    return value if known else (id(value),)
