"""What a block with activation checkpointing keeps for its recompute: what attention exchanged, or attention itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from lt_tiled._log import inform
from lt_tiled.offload.geometry import storage_key
from lt_tiled.policies import Keep
from lt_tiled.tiling.recompute import (
    Precision,
    RandomState,
    hidden_from_checkpoints,
    random_state_kept,
    version_of,
    wants_graph,
)

T = TypeVar("T")


def apart(tensor: Tensor) -> Tensor:
    """Return a tensor to keep: an output that its own node held through a hook would keep the node alive."""
    return tensor if tensor.is_leaf else tensor.detach()


class Kept:
    """What one call of a block keeps: recorded in its forward pass, replayed in its recompute.

    Args:
        what: What is kept, apart from outputs of operators.
        device: Where the block runs.
        pack: Stores a tensor until the recompute, for example in CPU memory.
        unpack: Returns it.
        locally: Whether this rank alone decided to keep something, so that its recompute communicates all the same.
    """

    def __init__(
        self,
        what: Keep | None,
        device: torch.device,
        pack: Callable[[Tensor], Any] = apart,
        unpack: Callable[[Any], Tensor] = lambda t: t,
        locally: bool = False,
    ) -> None:
        self.what, self.device, self.pack, self.unpack, self.locally = what, device, pack, unpack, locally
        self.attends = False
        """Whether there was attention to keep."""
        self.drew: RandomState | None = None
        """Where random numbers began in the last computation, if it may have drawn some."""
        self._values: dict[Hashable, Any] = {}
        self._next = 0
        self.recorded = False

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Record what the first call computes, and replay it in the same order in later ones."""
        self._next = 0
        with keeping(None if self.what is None else self):
            yield
        self.recorded = True

    @property
    def found(self) -> tuple[bool, bool]:
        """Whether there was something to keep by name, and by a policy of operators."""
        return self._next > 0, len(self._values) > self._next

    def value(self, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns, or returned in the forward pass, where alone it is called."""
        place, self._next = self._next, self._next + 1
        with hidden_from_checkpoints():
            if self.recorded and self._holds(place):
                replayed: T = self.replay(place)
                return replayed
            self.drew, self.attends = RandomState.now(self.device), True
            found = compute()
            if not self.recorded:
                self.record(place, found, self.drew)
                self.drew = self._values[place][-1] and self.drew
            return found

    def _holds(self, place: Hashable) -> bool:
        """Whether something is there that no backward pass freed and nobody changed in place."""
        packed = () if self._values[place] is None else self._values[place][0]
        return bool(packed) and not any(isinstance(t, Tensor) and version_of(t) != version for version, t in packed)

    def record(self, place: Hashable, found: Any, before: RandomState | None) -> None:
        """Keep what was computed, with the state of the generators if it is not the one before."""
        after = None if before is None else RandomState.now(self.device)
        leaves, form = pytree.tree_flatten(found)
        packed = [(version_of(leaf), self.pack(leaf)) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves]
        drew = before is not None and after is not None and not before.same_as(after)
        self._values[place] = packed, form, (before, after) if drew else None

    def forget(self, place: Hashable) -> None:
        """Drop it."""
        self._values.pop(place, None)

    def __contains__(self, place: Hashable) -> bool:
        return place in self._values

    def replay(self, place: Hashable) -> Any:
        """Return what was kept. Random numbers go on where they did after it."""
        if self._values[place] is None:
            raise RuntimeError(
                "A second backward pass needs what a block kept, and the first one freed it: call that with"
                " retain_graph=True, or leave keep and policy out of ActivationCheckpointing."
            )
        packed, form, random = self._values[place]
        self.drew = random and random[0]
        if random is not None:
            random[1].set()
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # no public name
            self._values[place] = None  # no second backward pass will need it
        return pytree.tree_unflatten(
            [leaf if version is None else self.unpacked(version, leaf) for version, leaf in packed], form
        )

    def unpacked(self, version: int, packed: Any) -> Tensor:
        """Return a packed tensor that had this version.

        Raises:
            RuntimeError: If it was changed in place since.
        """
        if isinstance(packed, Tensor) and version_of(packed) != version:
            raise RuntimeError(
                f"A tensor of shape {list(packed.shape)} that a block keeps for its recompute was changed in place"
                " after the block. Make the change out of place, or keep something else in ActivationCheckpointing."
            )
        return self.unpack(packed)


class Watch(Kept):
    """Looks for attention in a call of a block, and keeps nothing.

    Args:
        device: Where the block runs.
        collectives: Notes whether what runs in it communicates, if there are other ranks.
    """

    def __init__(self, device: torch.device, collectives: Any = None) -> None:
        super().__init__("attention_output", device, locally=True)
        self.collectives = collectives

    def value(self, compute: Callable[[], T]) -> T:
        """Return what ``compute`` returns. Attention that communicates is not to be kept."""
        with nullcontext() if self.collectives is None else self.collectives:
            found = compute()
        self.attends = self.collectives is None or not self.collectives.seen
        return found


_kept: ContextVar[Kept | None] = ContextVar("kept", default=None)


@contextmanager
def keeping(kept: Kept | None) -> Iterator[None]:
    """Keep there what is computed inside; nothing with ``None``."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def kept_or(what: Keep | None, compute: Callable[[], T], communicates: bool = True) -> T:
    """Return what ``compute`` returns, or what this thread's block kept of it in its forward pass.

    A block keeps what is of its own kind, or of any kind with ``None``.
    """
    kept = _kept.get()
    if kept is None or what not in (kept.what, None) or (kept.locally and communicates):
        return compute()
    return kept.value(compute)


def attended(what: Keep, compute: Callable[..., Tensor], *inputs: Tensor, alone: bool = False) -> Tensor:
    """Return attention of queries, keys and values, or what it was in the forward pass of the block, with its graph.

    Where the block keeps attention, its saved tensors stay from the forward pass, and it runs once. Where it keeps the
    output, they do but for the inputs, which the recompute computes again. Attention that reads something else that
    wants a gradient, as a learned bias, is not kept: its graph would end there. ``alone`` says that ``compute`` holds
    none of the inputs, so that it may be called again in the backward pass.
    """
    kept = _kept.get()
    if kept is None or kept.what != what or not any(t.requires_grad for t in inputs):  # as in frozen blocks
        return compute(*inputs)
    if isinstance(kept, Watch):
        return kept.value(partial(compute, *inputs))

    def run() -> tuple[_Graph | None, Tensor | None]:
        recomputed = _Recomputed(kept, inputs if what == "attention_output" else ())
        with torch.enable_grad(), saved_tensors_hooks(recomputed.pack, recomputed.unpack):
            link = torch.empty(0, device=inputs[0].device, requires_grad=True)
            begun = [_Begin.apply(link, t.detach()) if t.requires_grad else t for t in inputs]
            output = compute(*begun)
        if _reads_others(output) or (kept.locally and not recomputed.saves):
            return None, None
        starts = [get_gradient_edge(t) if t.requires_grad else None for t in begun]
        return _Graph(starts, get_gradient_edge(output), recomputed), output.detach()

    graph, output = kept.value(run)
    if graph is None:
        kept.attends = False
        inform("attention that reads a learned bias or weight, or saves nothing, is recomputed", once="not kept")
        return compute(*inputs)
    again = _Again(compute, Precision.now(kept.device), kept.drew) if alone and what == "attention_output" else None
    # Outside of the arguments, because one that is returned could not be changed in place.
    return _Attended.apply((graph, again, output), *inputs)  # type: ignore[no-any-return]


def _reads_others(output: Tensor) -> bool:
    """Whether the graph of an output has leaves besides those at which a run of attention begins."""
    nodes, seen = [output.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or node.name() == f"{_Begin.__name__}Backward":
            continue
        seen.add(node)
        if not node.next_functions:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def keeps_attention() -> bool:
    """Whether this thread's block keeps attention, or its output."""
    kept = _kept.get()
    return kept is not None and kept.what != "exchange"


def attended_alone(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return what an attention function returns where no ranks share its tokens, and keep it as the block asks."""
    if not keeps_attention():
        return function(*args, **kwargs)
    kept, (leaves, form) = _kept.get(), pytree.tree_flatten((args, kwargs))
    assert kept is not None
    assert kept.what is not None
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    inputs = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None

    def compute(*inputs: Tensor) -> Tensor:
        own = list(leaves)
        for place, value in zip(places, inputs, strict=True):
            own[place] = value
        own_args, own_kwargs = pytree.tree_unflatten(own, form)
        return function(*own_args, **own_kwargs)

    return attended(kept.what, compute, *inputs, alone=True)


class _Recomputed:
    """Tells saved tensors that are inputs of attention from others, which are kept.

    Args:
        kept: Where the others go.
        inputs: The inputs that are recomputed.
    """

    def __init__(self, kept: Kept, inputs: Sequence[Tensor]) -> None:
        self._kept = kept
        self._places = {storage_key(tensor): place for place, tensor in enumerate(inputs)}
        self._layouts = [_layout(tensor) for tensor in inputs]
        self.saves = False
        """Whether attention saved a tensor: torch's recompute of a block ends with the last tensor that is saved."""
        self.inputs: Sequence[Tensor] = ()
        """The recomputed ones, while a backward pass needs them."""

    @property
    def any(self) -> bool:
        """Whether there are inputs that are recomputed."""
        return bool(self._layouts)

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether recomputed inputs have the layouts of those of the forward pass."""
        return [_layout(tensor) for tensor in inputs] == self._layouts

    def pack(self, tensor: Tensor) -> Any:
        self.saves = True
        place = self._places.get(storage_key(tensor))
        if place is None or tensor.dtype != self._layouts[place][0] or tensor.is_conj() or tensor.is_neg():
            return version_of(tensor), self._kept.pack(tensor)
        return _View(place, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _View):
            return self._kept.unpacked(*packed)
        whole = self.inputs[packed.place]
        return whole.as_strided(packed.shape, packed.stride, packed.offset)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return where in its storage a tensor is, and how large that is."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()


class _View(NamedTuple):
    """A saved tensor in the storage of an input."""

    place: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Graph:
    """The graph of one run of attention, which holds neither its inputs nor its output."""

    starts: list[GradientEdge | None]
    """Where it begins, for each input that wants a gradient."""
    end: GradientEdge
    recomputed: _Recomputed


class _Begin(torch.autograd.Function):
    """Begins a graph at a tensor that the graph does not hold, as that of a leaf would."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


@dataclass(frozen=True)
class _Again:
    """Attention as it was computed, to compute it again."""

    compute: Callable[..., Tensor]
    precision: Precision
    random: RandomState | None

    def gradients(self, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
        """Return the gradients of the inputs, which may be differentiated."""
        random = nullcontext() if self.random is None else random_state_kept(self.random.device, self.random)
        again = torch.is_grad_enabled()
        with torch.enable_grad(), self.precision.context(), random:
            output = self.compute(*inputs)
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad([output], wanted, [gradient], create_graph=again, allow_unused=True))
        return [next(found) if t.requires_grad else None for t in inputs]


class _Attended(torch.autograd.Function):
    """The output of a run, whose backward pass goes through the run's graph."""

    @staticmethod
    def forward(ctx: Any, run: tuple[_Graph, _Again | None, Tensor], *inputs: Tensor) -> Tensor:
        ctx.graph, ctx.again, output = run
        if ctx.graph.recomputed.any:
            ctx.save_for_backward(*inputs)  # those of the recompute: the block's checkpoint saves none before
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        starts, end, recomputed = ctx.graph.starts, ctx.graph.end, ctx.graph.recomputed
        inputs = ctx.saved_tensors
        if wants_graph([gradient]) or not recomputed.fits(inputs):
            if ctx.again is not None:
                return (None, *ctx.again.gradients(inputs, gradient))
            raise RuntimeError(
                "Attention that a block keeps has no second derivative, and this backward pass is differentiated"
                " (create_graph=True) or batched (is_grads_batched=True), or the recompute gave attention inputs of"
                " other layouts. Call it without, or set keep=None."
            )
        wanted = [start for start in starts if start is not None]
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        recomputed.inputs = inputs
        found = iter(torch.autograd.grad([end], wanted, [gradient], retain_graph=again, allow_unused=True))
        recomputed.inputs = ()
        return (None, *(None if start is None else next(found) for start in starts))
